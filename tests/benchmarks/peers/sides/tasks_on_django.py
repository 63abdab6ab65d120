"""What sides share that are backends of Django's tasks on PostgreSQL."""

import os
import sys
from urllib.parse import urlsplit

import django
from django.conf import settings


def set_up(app, backend, **options):
    """Have Django use one app's backend; connections persist."""
    database = urlsplit(os.environ["DATABASE_URL"])
    settings.configure(
        USE_TZ=True,
        INSTALLED_APPS=["django.contrib.contenttypes", app],
        TASKS={"default": {"BACKEND": backend, "QUEUES": [], "OPTIONS": options}},
        DATABASES={
            "default": {
                "ENGINE": "django.db.backends.postgresql",
                "NAME": database.path.removeprefix("/"),
                "USER": database.username or "",
                "PASSWORD": database.password or "",
                "HOST": database.hostname or "",
                "PORT": database.port or "",
                "CONN_MAX_AGE": None,
            }
        },
    )
    django.setup()


def run(task, work):
    """Do what the command line asks for: make the tables, work, or save.

    Called when the side is a module of its own name, by which workers find its task again.
    """
    from django.core.management import call_command
    from saving import save

    if sys.argv[1] == "install":
        call_command("migrate", verbosity=0)
    elif sys.argv[1] == "save":
        save(task.enqueue)
    else:
        work(call_command)
