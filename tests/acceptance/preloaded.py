"""What the fork server of `tests.acceptance.forking` imports before it forks.

Django and the clients of servers: most of what a worker has imported when it is ready. Nothing of
the package under test, and nothing that reads settings or starts a thread.
"""

import gc
import os
import threading
from contextlib import suppress
from importlib import import_module

from django.conf import settings

SERVER = os.getpid()
"""The process that has imported this: the fork server, seen from those it forks."""
OF_DJANGO = (
    "django.contrib.admin.apps",
    "django.contrib.auth.apps",
    "django.contrib.auth.hashers",
    "django.contrib.auth.password_validation",
    "django.contrib.staticfiles.apps",
    "django.core.management.commands.migrate",
    "django.db.backends.sqlite3.base",
)
OF_EXTRAS = (
    "confluent_kafka.admin",
    "django.db.backends.postgresql.base",
    "django_redis.cache",
    "django_redis.client",
)

for name in OF_DJANGO:
    import_module(name)
for name in OF_EXTRAS:
    with suppress(ImportError):
        import_module(name)
assert not settings.configured, "a module has read settings: those of the server"
assert threading.active_count() == 1, "a fork has none of the threads"
# A collection in a forked process would write to each object, and so copy all of them.
gc.collect()
gc.freeze()
