"""A task nobody but its enqueuer imports."""

from kjo_django.contrib.tasks import task


@task(queue_name="mails")
def add(a: int, b: int) -> int:
    return a + b
