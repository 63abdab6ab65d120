"""Noting where the relay's messages went, unless a job has moved on meanwhile.

A note that is never made, since the relay died, is made by publishing again.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Collection, Sequence
from concurrent.futures import Future
from typing import NamedTuple
from uuid import UUID

from django.db import connections, transaction
from django.utils import timezone

from kjo_django import states
from kjo_django.enqueue import dispatch
from kjo_django.models import Job, transition
from kjo_django.outbox.aside import Aside
from kjo_django.store.due_rows import Due
from kjo_django.store.postgres import array_text
from kjo_django.transports.base import Published

MOST_PUT_OFF = 200
"""Notes that are put off: as many messages more are published again after a crash."""
LONGEST_PUT_OFF = 0.1
"""Seconds a note is put off while one call follows the other."""


class Sent(NamedTuple):
    """Where a job's message went."""

    id: UUID
    generation: int
    attempts: int
    partition: int | None
    offset: int | None


class Notes:
    """What one relay has published and not noted yet.

    A note that can wait is worth waiting with: the outcome of a job tells where its message was,
    and a job that has ended needs no note, which is a version of its row less.
    """

    def __init__(self) -> None:
        self.late: dict[UUID, tuple[str, Sent]] = {}
        """By its job: topic and place of what was put off, or was locked when it was to be noted.
        It is not to be published again meanwhile."""
        self._others: dict[UUID, tuple[Due, Published]] = {}
        self._count = 0
        self._since = 0.0
        self._aside: Aside | None = None
        self._begun: tuple[Future[set[UUID]], Sequence[Sent]] | None = None

    @property
    def missing(self) -> Collection[UUID]:
        """What has been published and is not noted: not to be published again meanwhile."""
        return {*self.late, *self._others} if self._others else self.late

    def put_off(self, topic: str, sent: Sequence[Sent]) -> None:
        """Note where jobs went later: their consumers may be at work this moment."""
        self._count += len(sent)
        self._hold(topic, sent)

    def _hold(self, topic: str, sent: Sequence[Sent]) -> None:
        if not self.late:
            self._since = time.monotonic()
        self.late.update((one.id, (topic, one)) for one in sent)

    @property
    def is_due(self) -> bool:
        """Whether what was put off since they were last looked at has become much, or old. A row
        that was locked is looked at as often: its next attempt, or generation, waits for that."""
        return self._count > MOST_PUT_OFF or (
            bool(self.missing) and time.monotonic() - self._since > LONGEST_PUT_OFF
        )

    def note(self, using: str, topic: str, sent: Sequence[Sent]) -> None:
        """Note where jobs went, without waiting for rows that are locked.

        A consumer that was quicker than this note has the row locked for as long as its job runs.
        Such a row is left for later.
        """
        note = _note_at_once if connections[using].vendor == "postgresql" else _note_each
        missing = note(using, topic, sent)
        self._hold(topic, [one for one in sent if one.id in missing])
        self._forget(sent, missing)

    def begin(self, using: str, topic: str, sent: Sequence[Sent]) -> None:
        """Note where jobs went while the caller goes on, on PostgreSQL; elsewhere at once.

        :raises DatabaseError: what was begun before could not be noted, and is left for later; this
            is not begun.
        """
        connection = connections[using]
        if connection.vendor != "postgresql" or connection.in_atomic_block:
            self.note(using, topic, sent)
            return
        self._await()
        self._hold(topic, sent)
        if self._aside is None:
            self._aside = Aside("kjo-relay-notes")
        future = self._aside.call(functools.partial(_note_at_once, using, topic, sent))
        self._begun = future, sent

    def end(self) -> None:
        """Wait for what was begun.

        :raises DatabaseError: it could not be noted, and is left for later.
        """
        aside, self._aside = self._aside, None
        if aside is not None:
            aside.close()
        self._await()

    def _await(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            future, sent = begun
            self._forget(sent, future.result())

    def _forget(self, sent: Sequence[Sent], missing: Collection[UUID]) -> None:
        for one in sent:
            if one.id not in missing:
                self.late.pop(one.id, None)

    def note_others(self, using: str, records: Sequence[tuple[Due, Published]]) -> None:
        """Note that records for others went out; kept for later where the database refuses, since
        who reads them may not know a second copy for one.

        :raises DatabaseError: it does.
        """
        self._others |= {job.pk: (job, answer) for job, answer in records}
        note_others(using, records)
        for job, _ in records:
            del self._others[job.pk]

    def note_late(self, using: str) -> None:
        """Note what was put off and still needs a note, as far as its rows are free by now."""
        self.end()
        if self.late:
            self._note_jobs(using)
        if self._others:
            self.note_others(using, list(self._others.values()))

    def _note_jobs(self, using: str) -> None:
        self._count, self._since = 0, time.monotonic()
        rows = Job.objects.using(using).filter(
            pk__in=list(self.late), state__in=states.AWAITING_PUBLISH
        )
        waiting = {id: run for id, *run in rows.values_list("pk", "generation", "attempts")}
        by_topic: dict[str, list[Sent]] = {}
        for id, (topic, one) in list(self.late.items()):
            if waiting.get(id) == [one.generation, one.attempts]:
                by_topic.setdefault(topic, []).append(one)
            else:
                del self.late[id]  # it has moved on, or is gone
        for topic, sent in by_topic.items():
            self.note(using, topic, sent)


# The rows are found and locked first, by their ids: the planner expects hardly any row in these
# states, and would compare each with each. Nobody waits for the disk: a note lost in a crash of the
# server is made by publishing again.
_NOTE = """
WITH free AS MATERIALIZED (
    SELECT id, generation, attempts, state FROM kjo_job WHERE id = ANY(%s::uuid[])
    FOR NO KEY UPDATE SKIP LOCKED
), sent AS MATERIALIZED (
    SELECT v.id, v.partition, v.position
    FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::int[], %s::bigint[])
        AS v (id, generation, attempts, partition, position)
    JOIN free USING (id)
    WHERE free.generation = v.generation AND free.attempts = v.attempts AND free.state = ANY(%s)
), noted AS (
    UPDATE kjo_job SET state = 'queued', topic = %s, partition = sent.partition,
        "offset" = sent.position, queued_at = now()
    FROM sent, set_config(
        'synchronous_commit',
        CASE WHEN %s THEN current_setting('synchronous_commit') ELSE 'off' END, true
    ) WHERE kjo_job.id = sent.id
)
SELECT id FROM unnest(%s::uuid[]) AS v (id) EXCEPT SELECT id FROM free
"""


def _note_at_once(using: str, topic: str, sent: Sequence[Sent]) -> set[UUID]:
    """Note them in one round trip; return those whose rows were locked, or are gone."""
    columns = [array_text(column) for column in zip(*sent, strict=True)]
    with connections[using].cursor() as cursor:
        states_of = states.expected("publish")
        is_others = connections[using].in_atomic_block
        cursor.execute(_NOTE, [columns[0], *columns, states_of, topic, is_others, columns[0]])
        return {row[0] for row in cursor.fetchall()}


def _note_each(using: str, topic: str, sent: Sequence[Sent]) -> set[UUID]:
    """The same for other databases."""
    now = timezone.now()
    with transaction.atomic(using=using):
        free = every = {one.id for one in sent}
        if connections[using].features.has_select_for_update_skip_locked:
            rows = Job.objects.using(using).filter(pk__in=list(free))
            free = set(rows.select_for_update(skip_locked=True).values_list("pk", flat=True))
        for one in sent:
            rows = Job.objects.using(using).at(one.id, one.generation)
            if one.id in free:
                transition(
                    "publish",
                    rows.filter(attempts=one.attempts),
                    topic=topic,
                    partition=one.partition,
                    offset=one.offset,
                    queued_at=now,
                )
    return every - free


_NOTE_OTHERS = """
UPDATE kjo_job SET state = 'completed', topic = kjo_job.destination, partition = v.partition,
    "offset" = v.position, queued_at = now(), finished_at = now(), error = '',
    attempts = kjo_job.attempts + 1
FROM unnest(%s::uuid[], %s::int[], %s::int[], %s::bigint[])
    AS v (id, generation, partition, position)
WHERE kjo_job.id = v.id AND kjo_job.generation = v.generation AND kjo_job.state = ANY(%s)
    AND kjo_job.destination <> ''
"""


def note_others(using: str, records: Sequence[tuple[Due, Published]]) -> None:
    """Note that records for others have been published; they are done with that.

    A row without a destination is none any more: a consumer of this service has read the record
    before, has failed, and its retries are that row's.
    """
    waiting = [each for each in records if dispatch.is_waited_for(each[0])]
    done = [each for each in records if not dispatch.is_waited_for(each[0])]
    if connections[using].vendor == "postgresql" and done:
        rows = [(j.pk, j.generation, a.partition, a.offset) for j, a in done]
        columns = [array_text(column) for column in zip(*rows, strict=True)]
        with connections[using].cursor() as cursor:
            cursor.execute(_NOTE_OTHERS, [*columns, states.expected("complete")])
        done = []
    with transaction.atomic(using=using):
        places = [(answer.partition, answer.offset) for _, answer in [*waiting, *done]]
        dispatch.mark_sent(using, [job for job, _ in [*waiting, *done]], places)
