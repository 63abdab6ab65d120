"""Celery with a Redis broker and a Redis result backend, in an environment of its own.

Run by path with that environment's Python, never imported here: ``celery_side.py worker`` is its
worker, ``celery_side.py client`` answers each line on stdin, a number of calls, with the seconds
each took from the call to its result.
"""

from __future__ import annotations

import json
import os
import sys
import time

from celery import Celery

app = Celery("kjo_benchmark", broker=os.environ["REDIS_URL"], backend=os.environ["REDIS_URL"])
app.conf.update(
    task_default_queue=os.environ["KJO_BENCHMARK_TOPIC"],
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
)


@app.task(name="kjo_benchmark.no_op")
def no_op() -> None:
    """Do nothing."""


def client() -> None:
    """Make calls for as long as there are lines."""
    for line in sys.stdin:
        took = []
        for _ in range(int(line)):
            began = time.perf_counter()
            no_op.delay().get(timeout=30)
            took.append(time.perf_counter() - began)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        app.worker_main(
            ["worker", "--concurrency", "4", "--loglevel", "WARNING", "--without-mingle"]
        )
    else:
        client()
