"""Recording where the relay's messages went, unless a job has moved on meanwhile.

What is never recorded, since the relay died, is published again, and recorded then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from kjo_django import states
from kjo_django.enqueue import storing
from kjo_django.models import Job
from kjo_django.runtime import Runtime
from kjo_django.store.rows import Publication

RECORD_AGAIN = 0.1
"""Seconds until a row that was locked is looked at again, though one batch follows the other: its
job's next attempt, or generation, waits for that."""


class Publications:
    """What one relay has published, until the database knows of it.

    A consumer that was quicker has the row locked for as long as its job runs, and the relay waits
    for no handler; or the database is away. What could not be recorded must not be published again
    meanwhile: who reads records for others may not know a second copy for one.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.unrecorded: dict[UUID, Publication] = {}
        """By its job: what has been published though the job's row does not say so."""
        self._tried_at = 0.0
        self._thread: _RecordingThread | None = None
        self._begun: tuple[Sequence[Publication], Future[set[UUID]]] | None = None

    @property
    def are_overdue(self) -> bool:
        """Whether to try again to record what could not be recorded."""
        begun = len(self._begun[0]) if self._begun is not None else 0
        waited = self._runtime.clock.monotonic() - self._tried_at
        return len(self.unrecorded) > begun and waited > RECORD_AGAIN

    def record(self, published: Sequence[Publication]) -> None:
        """Record where messages went, as far as their rows are free.

        :raises DatabaseError: nothing, or not all, could be recorded; ``record_missing`` tries it
            again.
        """
        if not self.unrecorded:
            self._tried_at = self._runtime.clock.monotonic()
        self.unrecorded.update((one.job.id, one) for one in published)
        self._forget(published, _write(self._runtime, published))

    def begin(self, published: Sequence[Publication]) -> None:
        """Record where the messages of a batch went while the caller sends the next; ``finish``
        waits for it. One batch at a time is recorded so.

        Only PostgreSQL has two writers that do not stand in each other's way; elsewhere it is done
        at once. So are records for others, since who reads them may not know a second copy.

        :raises DatabaseError: as ``record``; also for the batch begun before.
        """
        self.unrecorded.update((one.job.id, one) for one in published)
        self._wait()
        store = self._runtime.store
        jobs = [one for one in published if not one.job.destination]
        is_beside = store.has_independent_writers and not store.connection.in_atomic_block
        if not is_beside or not jobs:
            self.record(published)
            return
        if self._thread is None:
            self._thread = _RecordingThread()
        self._begun = jobs, self._thread.submit(functools.partial(_write, self._runtime, jobs))
        self.record([one for one in published if one.job.destination])

    def finish(self) -> None:
        """Wait for what was begun, and end the thread.

        :raises DatabaseError: it could not be recorded; ``record_missing`` tries it again.
        """
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(None)
        self._wait()

    def record_missing(self) -> None:
        """Record what could not be recorded and still has to be, as far as its rows are free."""
        self.finish()
        if not self.unrecorded:
            return
        rows = Job.objects.using(self._runtime.database).filter(
            pk__in=list(self.unrecorded), state__in=states.AWAITING_PUBLISH
        )
        waiting = set(rows.values_list("pk", "generation", "attempts"))
        missing = list(self.unrecorded.values())
        due = [
            one for one in missing if (one.job.id, one.job.generation, one.job.attempts) in waiting
        ]
        # All others have moved on, or are gone.
        self.unrecorded = {one.job.id: one for one in due}
        self._tried_at = self._runtime.clock.monotonic()
        self.record(due)

    def _wait(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            jobs, locked = begun
            self._forget(jobs, locked.result())

    def _forget(self, published: Sequence[Publication], locked: Collection[UUID]) -> None:
        for one in published:
            if one.job.id not in locked:
                del self.unrecorded[one.job.id]


class _RecordingThread:
    """A thread with a database connection of its own.

    A daemon: one that hangs in a database that is frozen must not keep the process from ending.
    """

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Future[set[UUID]], Callable[[], set[UUID]] | None]] = (
            SimpleQueue()
        )
        threading.Thread(target=self._run, name="kjo-relay-records", daemon=True).start()

    def submit(self, call: Callable[[], set[UUID]] | None) -> Future[set[UUID]]:
        """Have it called after those before, and return its future; None ends the thread."""
        future: Future[set[UUID]] = Future()
        self._calls.put((future, call))
        return future

    def _run(self) -> None:
        future, call = self._calls.get()
        while call is not None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)
                # Whatever is wrong with its connection, the next call has a new one.
                _close_connections()
            future, call = self._calls.get()
        _close_connections()


def _close_connections() -> None:
    # One that cannot even be closed is not worth a thread that others wait for.
    with suppress(DatabaseError, InterfaceError):
        connections.close_all()


def _write(runtime: Runtime, published: Sequence[Publication]) -> set[UUID]:
    """Record where messages went; return the jobs whose rows were locked, or are gone."""
    now = runtime.clock.now()
    by_topic: dict[str, list[Publication]] = {}
    for one in published:
        if not one.job.destination:
            by_topic.setdefault(one.topic, []).append(one)
    locked: set[UUID] = set()
    for topic, jobs in by_topic.items():
        locked |= runtime.store.record_published(topic, jobs, now)
    if records := [one for one in published if one.job.destination]:
        storing.record_forwarded(runtime.store, records, now)
    return locked
