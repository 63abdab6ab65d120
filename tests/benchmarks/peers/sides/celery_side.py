"""Celery on Redis: jobs that do nothing, and callers that wait for one, or for a chain of them."""

import functools
import json
import os
import sys
import time
from pathlib import Path

from celery import Celery, chain
from celery_workers import work
from tally import tally

URL, QUEUE = os.environ["REDIS_URL"], os.environ["KJO_BENCHMARK_TOPIC"]
has_results = sys.argv[1] in ("answer", "call", "chain")
app = Celery("kjo_benchmark", broker=URL, backend=URL if has_results else None)
app.conf.update(
    task_default_queue=QUEUE,
    task_ignore_result=not has_results,
    broker_connection_retry_on_startup=True,
    worker_send_task_events=False,
    worker_prefetch_multiplier=int(os.environ.get("PREFETCH", "4")),
    worker_hijack_root_logger=False,
    task_acks_late="LATE" in os.environ,
)


@app.task(name="kjo_benchmark.no_op")
def no_op():
    tally.add()


@app.task(name="kjo_benchmark.nothing")
def nothing():
    pass


@app.task(name="kjo_benchmark.timed")
def timed(saved_at):
    os.write(times(), f"{time.monotonic() - saved_at}\n".encode())


@functools.cache
def times():
    return os.open(os.environ["TIMES"], os.O_WRONLY | os.O_APPEND)


def save():
    """Answer each line on stdin, a number of calls and their rate, with the seconds from each call
    to the end of its task."""
    with Path(os.environ["TIMES"]).open() as answers:
        for line in sys.stdin:
            count, rate = json.loads(line)
            start = time.monotonic()
            for number in range(count):
                time.sleep(max(0.0, start + number / rate - time.monotonic()))
                timed.delay(time.monotonic())
            taken = ""
            while taken.count("\n") < count:
                time.sleep(0.05)
                taken += answers.read()
            print(json.dumps([float(each) for each in taken.split()]), flush=True)


def fill(count):
    with app.producer_pool.acquire(block=True) as producer:
        for _ in range(count):
            no_op.apply_async(producer=producer)


def call(signature):
    """Answer each line on stdin, a number of calls, with the seconds each took to its result."""
    for line in sys.stdin:
        took = []
        for _ in range(int(line)):
            began = time.perf_counter()
            signature.delay().get(timeout=30)
            took.append(time.perf_counter() - began)
        print(json.dumps(took), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "fill":
        fill(int(sys.argv[2]))
    elif sys.argv[1] == "call":
        call(nothing.si())
    elif sys.argv[1] == "chain":
        call(chain(nothing.si() for _ in range(5)))
    elif sys.argv[1] == "save":
        save()
    else:
        work(app, __file__)
