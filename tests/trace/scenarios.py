"""One job on the memory transport and SQLite, three ways, in a worker of this process."""

from __future__ import annotations

import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import django

from tests.trace.recording import Recorder, Walk

QUEUE = "trace"
ROUNDS = 12
"""Of each scenario; the smallest walk counts, which no idle loop has had a part in."""
LIMIT = 60.0
"""Seconds until a job must have ended."""
AFTERWARDS = 0.1
"""Seconds in which a worker acknowledges, releases and announces what has ended."""


def measure() -> dict[str, Walk]:
    """Return the walk of a job that completes, one that fails for good, and one replayed."""
    with _project():
        from kjo_django import PermanentError, job
        from kjo_django.operations import dead_letters

        fails = threading.Event()

        @job(name="trace.completes", queue=QUEUE)
        def completes() -> None:
            pass

        @job(name="trace.fails", queue=QUEUE)
        def fails_once() -> None:
            if fails.is_set():
                raise PermanentError("fails")

        def replay() -> object:
            return dead_letters.replay(dead_letters.DeadLetterFilter(), actor="trace")

        walks: dict[str, list[Walk]] = {"completed": [], "failed": [], "replayed": []}
        with _worker() as (recorder, ends):
            for _ in range(ROUNDS):
                walks["completed"].append(_walk(recorder, ends, completes.enqueue))
                fails.set()
                walks["failed"].append(_walk(recorder, ends, fails_once.enqueue))
                fails.clear()
                walks["replayed"].append(_walk(recorder, ends, replay))
    return {name: min(found, key=lambda walk: walk.calls) for name, found in walks.items()}


def _walk(recorder: Recorder, ends: threading.Semaphore, act: Callable[[], object]) -> Walk:
    with recorder.recording():
        act()
        if not ends.acquire(timeout=LIMIT):
            raise TimeoutError(f"The job did not end within {LIMIT:.0f} s.")
        time.sleep(AFTERWARDS)  # sleep: what is done after the end is part of the walk
    return recorder.walk()


@contextmanager
def _project() -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["DATABASE_URL"] = f"sqlite:///{Path(folder, 'trace.sqlite3')}"
        os.environ["DJANGO_SETTINGS_MODULE"] = "tests.trace.settings"
        django.setup()
        from django.core.management import call_command

        call_command("migrate", verbosity=0)
        yield


@contextmanager
def _worker() -> Iterator[tuple[Recorder, threading.Semaphore]]:
    from kjo_django import signals
    from kjo_django.worker import Worker

    ends = threading.Semaphore(0)

    def on_end(**_: object) -> None:
        ends.release()

    recorder = Recorder()
    signals.job_completed.connect(on_end)
    signals.message_dead_lettered.connect(on_end)
    recorder.install()
    worker = Worker([QUEUE], concurrency=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    try:
        yield recorder, ends
    finally:
        worker.stop()
        thread.join(LIMIT)
        recorder.remove()
