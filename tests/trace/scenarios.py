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

from tests.trace.recording import Calls, Recorder, Walk, walk_of

QUEUE = "trace"
ROUNDS = 12
"""Of each scenario; what all of them have called counts."""
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

        rounds: dict[str, list[Calls]] = {"completed": [], "failed": [], "replayed": []}
        with _worker() as (recorder, ends, watching):

            def record(act: Callable[[], object]) -> Calls:
                with recorder.recording():
                    act()
                    if not ends.acquire(timeout=LIMIT):
                        raise TimeoutError(f"The job did not end within {LIMIT:.0f} s.")
                    time.sleep(AFTERWARDS)  # sleep: what is done after the end is part of it
                return recorder.calls(but=watching)

            for _ in range(ROUNDS):
                rounds["completed"].append(record(completes.enqueue))
                fails.set()
                rounds["failed"].append(record(fails_once.enqueue))
                fails.clear()
                rounds["replayed"].append(record(replay))
    return {name: walk_of(found) for name, found in rounds.items()}


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
def _worker() -> Iterator[tuple[Recorder, threading.Semaphore, int | None]]:
    """Run a worker; yield what records it, what each end releases, and the thread that only looks
    whether the others live: the slower the machine, the more of its rounds are within a job's."""
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
        yield recorder, ends, thread.ident
    finally:
        worker.stop()
        thread.join(LIMIT)
        recorder.remove()
