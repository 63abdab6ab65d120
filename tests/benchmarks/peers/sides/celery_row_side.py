"""Celery on Redis as projects make it safe: acknowledged late, a row for each job, run once.

The row is written before the message is sent. The task inserts a marker (a second run finds it),
and sets the row to completed, in one transaction through Django's ORM.
"""

import os
import sys
import uuid
from urllib.parse import urlsplit

import django
from celery import Celery
from celery_workers import work
from django.conf import settings
from tally import tally

database = urlsplit(os.environ["DATABASE_URL"])
settings.configure(
    USE_TZ=True,
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

from django.db import connection, models, transaction  # noqa: E402
from django.utils import timezone  # noqa: E402

app = Celery("kjo_benchmark", broker=os.environ["REDIS_URL"])
app.conf.update(
    task_default_queue=os.environ["KJO_BENCHMARK_TOPIC"],
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", "4")),
    worker_hijack_root_logger=False,
)


class JobRow(models.Model):
    id = models.UUIDField(primary_key=True)
    state = models.CharField(max_length=10, default="queued")
    created_at = models.DateTimeField(default=timezone.now)
    finished_at = models.DateTimeField(null=True)

    class Meta:
        app_label = "peer"


class Marker(models.Model):
    event_id = models.UUIDField(unique=True)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        app_label = "peer"


@app.task(name="kjo_benchmark.no_op")
def no_op(id):
    with transaction.atomic():
        if Marker.objects.bulk_create([Marker(event_id=id)], ignore_conflicts=True):
            JobRow.objects.filter(pk=id, state="queued").update(
                state="completed", finished_at=timezone.now()
            )
    tally.add()


def fill(count):
    with connection.schema_editor() as editor:
        editor.create_model(JobRow)
        editor.create_model(Marker)
    ids = [uuid.uuid4() for _ in range(count)]
    JobRow.objects.bulk_create([JobRow(id=id) for id in ids], batch_size=1000)
    with app.producer_pool.acquire(block=True) as producer:
        for id in ids:
            no_op.apply_async((str(id),), producer=producer)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(int(sys.argv[2]))
    else:
        work(app, __file__)
