"""dj-queue: a backend of Django's tasks on PostgreSQL, woken by notifications."""

import os

import tasks_on_django
from django.conf import settings

if not settings.configured:
    worker = {
        "queues": "*",
        "threads": int(os.environ.get("THREADS", "3")),
        "processes": 1,
        "polling_interval": 0.1,
    }
    tasks_on_django.set_up("dj_queue", "dj_queue.backend.DjQueueBackend", workers=[worker])

from django.tasks import task
from saving import ran


@task()
def timed(saved_at):
    ran(saved_at)


def work(call_command):
    call_command("dj_queue")


if __name__ == "__main__":
    import dj_queue_side

    tasks_on_django.run(dj_queue_side.timed, work)
