"""The database backend of django-tasks on PostgreSQL."""

import multiprocessing
import os
import sys
from urllib.parse import urlsplit

import django
from django.conf import settings

database = urlsplit(os.environ["DATABASE_URL"])
if not settings.configured:
    settings.configure(
        USE_TZ=True,
        INSTALLED_APPS=["django_tasks_db"],
        TASKS={"default": {"BACKEND": "django_tasks_db.DatabaseBackend"}},
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

try:
    from django.tasks import task
except ImportError:
    from django_tasks import task

from tally import tally  # noqa: E402


@task()
def no_op():
    tally.add()


def fill(count):
    from django.core.management import call_command
    from django.db import transaction

    call_command("migrate", verbosity=0)
    with transaction.atomic():
        for _ in range(count):
            no_op.enqueue()


def run():
    from django.core.management import call_command
    from django.utils.crypto import get_random_string

    call_command(
        "db_worker",
        interval=0.01,
        startup_delay=False,
        verbosity=0,
        worker_id=get_random_string(32),
    )


if __name__ == "__main__":
    # Tasks are found again by the path of their module.
    import django_tasks_side

    if sys.argv[1] == "fill":
        django_tasks_side.fill(int(sys.argv[2]))
    else:
        for _ in range(int(os.environ.get("PROCESSES", "2"))):
            context = multiprocessing.get_context("spawn")
            context.Process(target=django_tasks_side.run).start()
