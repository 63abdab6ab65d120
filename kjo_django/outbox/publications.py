"""Recording where the relay's messages went, unless a job has moved on meanwhile.

What is never recorded, since the relay died, is published again, and recorded then.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future
from contextlib import suppress
from datetime import datetime
from queue import SimpleQueue
from typing import NamedTuple
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections, transaction

from kjo_django import states
from kjo_django.enqueue import dispatch
from kjo_django.models import Job, transition
from kjo_django.runtime import Runtime
from kjo_django.store.due_rows import Due
from kjo_django.store.postgres import array_text

RECORD_AGAIN = 0.1
"""Seconds until a row that was locked is looked at again, though one batch follows the other: its
job's next attempt, or generation, waits for that."""


class Publication(NamedTuple):
    """Where the message of a job went."""

    job: Due
    topic: str
    partition: int | None
    offset: int | None


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
        self._keep(published)
        self._forget(published, _write(self._runtime, published))

    def begin(self, published: Sequence[Publication]) -> None:
        """Record where the messages of a batch went while the caller sends the next; ``finish``
        waits for it. One batch at a time is recorded so.

        Only PostgreSQL has two writers that do not stand in each other's way; elsewhere it is done
        at once. So are records for others, since who reads them may not know a second copy.

        :raises DatabaseError: as ``record``; also for the batch begun before.
        """
        self._keep(published)
        self._wait()
        connection = connections[self._runtime.database]
        jobs = [one for one in published if not one.job.destination]
        if connection.vendor != "postgresql" or connection.in_atomic_block or not jobs:
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

    def _keep(self, published: Sequence[Publication]) -> None:
        if not self.unrecorded:
            self._tried_at = self._runtime.clock.monotonic()
        self.unrecorded.update((one.job.id, one) for one in published)

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
    using, now = runtime.database, runtime.clock.now()
    record = _record_at_once if connections[using].vendor == "postgresql" else _record_each
    by_topic: dict[str, list[Publication]] = {}
    for one in published:
        if not one.job.destination:
            by_topic.setdefault(one.topic, []).append(one)
    locked: set[UUID] = set()
    for topic, jobs in by_topic.items():
        locked |= record(using, topic, jobs, now)
    if records := [one for one in published if one.job.destination]:
        record_forwarded(using, records, now)
    return locked


# The rows are found and locked first, by their ids: the planner expects hardly any row in these
# states, and would compare each with each. Nobody waits for the disk: what a crash of the
# server loses is published and recorded again.
_RECORD = """
WITH free AS MATERIALIZED (
    SELECT id, generation, attempts, state FROM kjo_job WHERE id = ANY(%s::uuid[])
    FOR NO KEY UPDATE SKIP LOCKED
), sent AS MATERIALIZED (
    SELECT v.id, v.partition, v.position
    FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::int[], %s::bigint[])
        AS v (id, generation, attempts, partition, position)
    JOIN free USING (id)
    WHERE free.generation = v.generation AND free.attempts = v.attempts AND free.state = ANY(%s)
), recorded AS (
    UPDATE kjo_job SET state = 'queued', topic = %s, partition = sent.partition,
        "offset" = sent.position, queued_at = now()
    FROM sent, set_config(
        'synchronous_commit',
        CASE WHEN %s THEN current_setting('synchronous_commit') ELSE 'off' END, true
    ) WHERE kjo_job.id = sent.id
)
SELECT id FROM unnest(%s::uuid[]) AS v (id) EXCEPT SELECT id FROM free
"""


def _record_at_once(
    using: str, topic: str, published: Sequence[Publication], _now: datetime
) -> set[UUID]:
    """Record them in one round trip; return the jobs whose rows were locked, or are gone."""
    rows = [
        (job.id, job.generation, job.attempts, partition, offset)
        for job, _, partition, offset in published
    ]
    columns = [array_text(column) for column in zip(*rows, strict=True)]
    with connections[using].cursor() as cursor:
        expected = states.expected("publish")
        is_inside = connections[using].in_atomic_block
        cursor.execute(_RECORD, [columns[0], *columns, expected, topic, is_inside, columns[0]])
        return {row[0] for row in cursor.fetchall()}


def _record_each(
    using: str, topic: str, published: Sequence[Publication], now: datetime
) -> set[UUID]:
    """Record them one by one; return the jobs whose rows were locked, or are gone."""
    with transaction.atomic(using=using):
        free = every = {one.job.id for one in published}
        if connections[using].features.has_select_for_update_skip_locked:
            rows = Job.objects.using(using).filter(pk__in=list(free))
            free = set(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
        for job, _, partition, offset in published:
            if job.id in free:
                transition(
                    "publish",
                    Job.objects.using(using)
                    .at(job.id, job.generation)
                    .filter(attempts=job.attempts),
                    topic=topic,
                    partition=partition,
                    offset=offset,
                    queued_at=now,
                )
    return every - free


_RECORD_FORWARDED = """
UPDATE kjo_job SET state = 'completed', topic = kjo_job.destination, partition = v.partition,
    "offset" = v.position, queued_at = now(), finished_at = now(), error = '',
    attempts = kjo_job.attempts + 1
FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::bigint[])
    AS v (id, generation, partition, position)
WHERE kjo_job.id = v.id AND kjo_job.generation = v.generation AND kjo_job.state = ANY(%s)
    AND kjo_job.destination <> ''
"""


def record_forwarded(using: str, records: Sequence[Publication], now: datetime) -> None:
    """Record that records for others have been published; that completes their rows.

    A row without a destination is none any more: a consumer of this service has read the record
    before, has failed, and its retries are that row's.
    """
    waiting = [one for one in records if dispatch.is_waited_for(one.job)]
    done = [one for one in records if not dispatch.is_waited_for(one.job)]
    if connections[using].vendor == "postgresql" and done:
        rows = [(one.job.id, one.job.generation, one.partition, one.offset) for one in done]
        columns = [array_text(column) for column in zip(*rows, strict=True)]
        with connections[using].cursor() as cursor:
            cursor.execute(_RECORD_FORWARDED, [*columns, states.expected("complete")])
        done = []
    with transaction.atomic(using=using):
        for job, _, partition, offset in [*waiting, *done]:
            dispatch.mark_sent(using, job, now, partition=partition, offset=offset)
