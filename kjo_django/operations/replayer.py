"""Replaying one dead letter, in a transaction of its own."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from django.db import connections, transaction
from django.db.models import QuerySet

from kjo_django import signals
from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.attempt import Result
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.storing import store
from kjo_django.enqueue.wakeups import after_commit
from kjo_django.exceptions import PublishError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job, source_of_job
from kjo_django.operations import internal, republishing
from kjo_django.operations.jobs import (
    Outcomes,
    RequeueResult,
    close_as_replayed,
    requeue_chunk,
)
from kjo_django.operations.notifications import tell_of_letters
from kjo_django.operations.reports import (
    REFUSED_INTERNAL,
    REFUSED_LOOP,
    REFUSED_NO_SOURCE,
    REFUSED_PROCESSED,
    ReplayReport,
)
from kjo_django.operations.reprocessing import NOWHERE, Reprocessor
from kjo_django.operations.rows import Observer, lock, tell_after_commit
from kjo_django.patterns.kdlq import headers as kdlq
from kjo_django.states import JobState
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import OutgoingRecord, Record

NEEDS_PERMISSION = "it needs the permission of what it does"


class Replayer:
    """Replays one letter at a time into a report."""

    def __init__(
        self,
        report: ReplayReport,
        *,
        force: bool,
        actor: str,
        on_changed: Observer | None,
        reprocessor: Reprocessor | None = None,
        value: bytes | None = None,
    ) -> None:
        self._report = report
        self._reprocessor = reprocessor
        self._value = value
        self._force = force
        self._actor = actor
        self._on_changed = on_changed
        self._using = jobs_database()
        self._max_replays = get_settings().max_replays

    @property
    def _open(self) -> QuerySet[DeadLetter]:
        rows = DeadLetter.objects.using(self._using).filter(state=DeadLetterState.OPEN)
        return rows.defer("traceback")

    def replay(self, key: Any) -> None:
        """Replay the letter, or say in the report why not."""
        letter = self._open.filter(pk=key).first()
        if letter is None:
            self._report.skipped += 1
            return
        self._report.count(letter.reason, letter.handler, letter.error_type)
        self.replay_counted(letter)

    def replay_counted(self, letter: DeadLetter) -> None:
        """Replay a letter that the report has counted, or say in the report why not."""
        if letter.replay_count >= self._max_replays and not self._force:
            self._refuse(letter, REFUSED_LOOP, f"{letter.replay_count} times; --force replays it")
        elif letter.job_id is not None:
            self._replay_job(letter)
        else:
            self._replay_message(letter)

    def _refuse(self, letter: DeadLetter, reason: str, detail: str = "") -> None:
        self._report.refuse(str(letter.pk), reason, detail)

    # --- Of a job ---------------------------------------------------------------------------------

    def _replay_job(self, letter: DeadLetter) -> None:
        assert letter.job_id is not None
        with transaction.atomic(using=self._using):
            if not lock(self._open, [letter.pk]):
                self._report.skipped += 1
                return
            job = self._rows_of(letter).defer("payload", "result").first()
            if job is None or letter.source_id == source_of_job(job.pk, job.generation):
                again = self._requeue(letter, job)
            else:
                again = self._store_again(letter, job)
        if again is not None and self._reprocessor is not None:
            found = Job.objects.using(self._using).filter(pk=again).first()
            if found is not None:
                self._report.ended[self._reprocessor.run_job(found).value] += 1

    def _rows_of(self, letter: DeadLetter) -> QuerySet[Job]:
        assert letter.job_id is not None
        return Job.objects.using(self._using).filter(pk=letter.job_id)

    def _requeue(self, letter: DeadLetter, job: Job | None) -> Any:
        """Requeue the job whose present failure the letter tells of; return its key, or None."""
        still = self._rows_of(letter)
        if job is not None:
            still = still.filter(generation=job.generation)
        if not self._force:
            still = still.filter(state=JobState.FAILED)
        outcomes = Outcomes()
        # The job's row is taken as everybody takes it, never waited for: whoever requeues the
        # job holds that row and waits for this letter.
        requeue_chunk(
            [letter.job_id], outcomes, still=still, payload=self._value, actor=self._actor
        )
        if outcomes.changed_count:
            self._changed(letter)
            return letter.job_id
        state = next(iter(outcomes.counts))
        if state == RequeueResult.FORBIDDEN:
            self._refuse(letter, REFUSED_INTERNAL, NEEDS_PERMISSION)
        elif state == RequeueResult.NOT_FOUND:
            # It was requeued or enqueued again meanwhile.
            now = self._rows_of(letter).values_list("state", flat=True).first()
            self._refuse(letter, f"the job is {now}", "--force runs it again")
        else:
            self._refuse(letter, f"the job is {state}")
        return None

    def _store_again(self, letter: DeadLetter, job: Job) -> Any:
        """Store what the letter holds as a job of its own, and return its key: the letter's job was
        enqueued again since, with another payload that is not to run, or to be lost, by this."""
        again = republishing.job_of(letter, job, self._value)
        if not internal.may_run_again(again, self._actor):
            self._refuse(letter, REFUSED_INTERNAL, NEEDS_PERMISSION)
            return None
        internal.reassign(again, self._actor)
        store([again])
        self._close(letter)
        return again.pk

    # --- Of a message nobody enqueued here --------------------------------------------------------

    def _replay_message(self, letter: DeadLetter) -> None:
        queue = republishing.queue_of(letter.queue, letter.topic)
        topic = republishing.replay_topic_of(queue) if queue else ""
        if queue is None or not topic:
            self._refuse(letter, REFUSED_NO_SOURCE)
            return
        # What KDLQ killed has taken effect by that; it is processed once its row is closed.
        is_killed = kdlq.MARKER in letter.headers
        known = not is_killed and republishing.processed({letter.message_id: letter.handler})
        if known:
            self._report.already_processed += 1
            if not self._force:
                self._refuse(letter, REFUSED_PROCESSED, "--force runs it again under a new id")
                return
        record = _record_of(letter, topic, new_id=bool(known))
        if self._value is not None:
            record = replace(record, value=self._value)
        if self._reprocessor is not None:
            self._reprocess(letter, record, queue, self._reprocessor)
            return
        try:
            self._publish_and_close(letter, record, queue)
        except PublishError as error:
            self._report.fail(str(letter.pk), error)

    def _publish_and_close(
        self, letter: DeadLetter, record: OutgoingRecord, queue: QueueConf
    ) -> None:
        """Publish, then mark; one transaction keeps other replayers away meanwhile.

        Not on a database that would lock everybody else out while a broker is waited for (SQLite):
        there two replayers at once may publish a message twice, which its consumer absorbs.
        """
        is_transactional = dispatch.is_transactional(queue)
        features = connections[self._using].features
        if not is_transactional and not features.has_select_for_update_skip_locked:
            republishing.publish_one(record, queue.transport)
        with transaction.atomic(using=self._using):
            held = lock(self._open, [letter.pk])
            if not held:
                self._report.skipped += 1
                return
            if is_transactional or features.has_select_for_update_skip_locked:
                republishing.publish_one(record, queue.transport)
            if is_transactional:
                after_commit(self._using, dispatch.channel_of(queue))
            self._close(letter)

    def _reprocess(
        self, letter: DeadLetter, record: OutgoingRecord, queue: QueueConf, reprocessor: Reprocessor
    ) -> None:
        """Run it, then mark; a crash in between runs it again, which its marker absorbs."""
        place = Record(
            topic=letter.topic or record.topic,
            partition=NOWHERE if letter.partition is None else letter.partition,
            offset=NOWHERE if letter.offset is None else letter.offset,
            key=record.key,
            value=record.value,
            headers=dict(record.headers),
            # With its place this names a death: the next one is another, and has a letter too.
            timestamp=letter.failed_at,
        )
        result = reprocessor.run(place, queue)
        self._report.ended[result.value] += 1
        if result in (Result.DEFERRED, Result.SKIPPED):
            self._refuse(letter, f"it was {result.value}")
            return
        with transaction.atomic(using=self._using):
            # If it died again there is a new dead letter of that.
            self._close(letter)

    def _close(self, letter: DeadLetter) -> None:
        close_as_replayed(self._open.filter(pk=letter.pk), self._actor)
        tell = functools.partial(tell_of_letters, signals.message_replayed, [letter])
        tell_after_commit(self._using, tell)
        self._changed(letter)

    def _changed(self, letter: DeadLetter) -> None:
        self._report.replayed += 1
        if self._on_changed is not None:
            self._on_changed([letter])


def _origin_headers(letter: DeadLetter) -> dict[str, bytes]:
    return names.encode(
        {
            names.DLQ_ORIGINAL_TOPIC: letter.topic or None,
            names.DLQ_ORIGINAL_PARTITION: letter.partition,
            names.DLQ_ORIGINAL_OFFSET: letter.offset,
        }
    )


def _record_of(letter: DeadLetter, topic: str, *, new_id: bool) -> OutgoingRecord:
    headers = names.from_json(letter.headers)
    # KDLQ's messages say so in headers of their own.
    if kdlq.MARKER not in headers and names.DLQ_ORIGINAL_TOPIC not in headers:
        headers = {**_origin_headers(letter), **headers}
    count = max(letter.replay_count, names.number(headers, names.REPLAY_COUNT, 0)) + 1
    return OutgoingRecord(
        topic=topic,
        key=None if letter.key is None else bytes(letter.key),
        value=None if letter.value is None else bytes(letter.value),
        headers=republishing.replay_headers(headers, count, new_id=new_id),
    )
