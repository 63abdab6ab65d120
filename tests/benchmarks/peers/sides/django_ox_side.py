"""django-ox: a backend of Django's tasks on PostgreSQL, which polls."""

import os

import tasks_on_django
from django.conf import settings

if not settings.configured:
    tasks_on_django.set_up("django_ox", "django_ox.backend.OxBackend")

from django.tasks import task
from saving import ran


@task()
def timed(saved_at):
    ran(saved_at)


def work(call_command):
    call_command(
        "ox_worker",
        concurrency=int(os.environ.get("CONCURRENCY", "8")),
        interval=float(os.environ.get("INTERVAL", "0.05")),
        verbosity=0,
    )


if __name__ == "__main__":
    import django_ox_side

    tasks_on_django.run(django_ox_side.timed, work)
