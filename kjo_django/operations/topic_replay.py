"""Replay of a dead-letter topic that others filled.

A consumer group of its own reads the records that are there when the run begins, and publishes each
to its source topic. A record is acknowledged after its delivery report, so a run that was
interrupted goes on where it was. A record of a job of this service requeues the job: the job's
consumer would drop the message of a failed job.

The group passes over records outside the filter. So the group's default name contains the filter: a
run with another filter begins at the beginning. Where acknowledging deletes (transports without
replay), such records stay.
"""

from __future__ import annotations

import functools
import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field

from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.enqueue import storing
from kjo_django.exceptions import PublishError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import DeadLetter, DeadLetterState, Job, source_of_job
from kjo_django.operations.dead_letters import (
    ORIGINS,
    REFUSED_LOOP,
    REFUSED_PROCESSED,
    DeadLetterFilter,
    Replayer,
    ReplayReport,
    find_job,
    format_of,
    generation_of,
    processed,
    replay_headers,
    replay_topic_of,
)
from kjo_django.operations.jobs import close_as_replayed, requeue
from kjo_django.operations.rows import Pace, Progress, checked_rate, no_progress
from kjo_django.refusals import RefusedError
from kjo_django.runtime import get_transport, jobs_database
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord, Record, Subscription, TopicPartition

SUFFIX = "-dlq"
BATCH = 100
JOIN_PATIENCE = 60.0
"""Seconds to wait until the group has partitions."""
IDLE_PATIENCE = 5.0
"""Seconds without a record after which a topic with gaps at its end counts as read."""


@dataclass(frozen=True, slots=True)
class TopicReplay:
    """A request to replay a topic."""

    topic: str
    transport: str = "default"
    group: str | None = None
    """Consumer group; None: ``<service>-replay-<topic>``, and the filter's digest."""
    target: str | None = None
    """Topic to publish to; None: each record's origin."""
    selection: DeadLetterFilter = field(default_factory=DeadLetterFilter)
    limit: int | None = None
    rate: float | None = None
    dry_run: bool = False
    force: bool = False
    actor: str = ""

    def __post_init__(self) -> None:
        if self.target == self.topic:
            raise RefusedError(_("The target is the source itself: %(topic)r"), topic=self.topic)
        if self.selection.fingerprint is not None:
            text = _("Records of a topic have no fingerprint; filter by error or type")
            raise RefusedError(text)
        checked_rate(self.rate)

    @property
    def group_name(self) -> str:
        """The consumer group whose offsets say how far the replay is."""
        if self.group:
            return self.group
        name = f"{get_settings().service_name}-replay-{self.topic}"
        keeps = get_transport(self.transport).capabilities.replay
        if self.selection.is_empty or not keeps:
            return name
        return f"{name}-{hashlib.sha256(repr(self.selection).encode()).hexdigest()[:8]}"


def replay_topic(request: TopicReplay, *, progress: Progress = no_progress) -> ReplayReport:
    """Replay the records that the topic has for the group now, and return a report.

    :raises PublishError: the transport cannot be reached, or the topic does not exist.
    """
    return _TopicReplayer(request, progress).run()


def _why_nothing_comes(subscription: Subscription) -> str:
    """Return why a subscription brings nothing; "": there is nothing more."""
    if not subscription.last_error and subscription.assignment():
        return ""
    reason = subscription.last_error or "no partition was assigned"
    return f"{reason}; run it again later"


class _TopicReplayer:
    def __init__(self, request: TopicReplay, progress: Progress) -> None:
        self._request = request
        self._progress = progress
        self._transport = get_transport(request.transport)
        self._keeps = self._transport.capabilities.replay
        self._report = ReplayReport(request.topic, is_dry_run=request.dry_run)
        self._pace = Pace(request.rate)
        self._replayer = Replayer(self._report, request.force, request.actor)
        named_after = request.topic.removesuffix(SUFFIX)
        self._targets = {named_after: named_after}
        """Where the messages of each topic of this project are published to again."""
        for name in registry.queue_names():
            queue = get_settings().queue(name)
            if queue.transport == request.transport:
                self._targets |= {each: replay_topic_of(queue, each) for each in queue.topics}
        self._targets.pop(request.topic, None)
        self._ids: set[str] = set()
        """Ids of the records that matched."""

    def run(self) -> ReplayReport:
        """Replay up to the end that the topic has now, and return the report."""
        request = self._request
        if self._transport.describe_topics([request.topic])[0].partitions is None:
            raise PublishError(f"The topic {request.topic!r} does not exist")
        backlog = self._transport.lag([request.topic], request.group_name)
        if backlog and not any(backlog.values()):
            return self._report
        # A dry run must not move the group; where a topic can be read twice it uses another group.
        group, done_before = request.group_name, dict.fromkeys(backlog, 0)
        if request.dry_run and self._keeps:
            group = f"{request.group_name}-dry-run-{uuid.uuid4().hex[:8]}"
            everything = self._transport.lag([request.topic], group)
            done_before = {tp: everything.get(tp, lag) - lag for tp, lag in backlog.items()}
            backlog = everything
        subscription = self._transport.subscribe([request.topic], group)
        try:
            self._read(subscription, _Bounds(backlog, done_before, is_log=self._keeps))
        finally:
            subscription.close()
        if not self._is_stopped:
            wanted = map(str, request.selection.ids or ())
            self._report.unknown_ids = [id for id in wanted if id not in self._ids]
        return self._report

    def _read(self, subscription: Subscription, bounds: _Bounds) -> None:
        until = time.monotonic() + JOIN_PATIENCE
        while not (self._is_stopped or bounds.are_reached):
            sizes = (BATCH, self._limit_left, self._request.rate)
            size = max(1, int(min(size for size in sizes if size is not None)))
            records = subscription.poll(size, 0.5, get_settings().relay_batch_bytes)
            if records:
                until = time.monotonic() + IDLE_PATIENCE
                self._take(records, subscription, bounds)
            elif time.monotonic() > until:
                self._report.stopped = _why_nothing_comes(subscription)
                return
            elif subscription.assignment():
                until = min(until, time.monotonic() + IDLE_PATIENCE)
        subscription.flush()

    def _take(self, records: Sequence[Record], subscription: Subscription, bounds: _Bounds) -> None:
        """Replay or refuse records, and acknowledge those that are done with."""
        for record in records:
            if self._is_stopped:
                return
            if bounds.admits(record) and self._is_done_with(record):
                subscription.acknowledge([record])
        self._progress(self._report.matched, bounds.total)

    @property
    def _limit_left(self) -> int | None:
        if self._request.limit is None:
            return None
        taken = self._report.matched if self._request.dry_run else self._report.replayed
        return self._request.limit - taken

    @property
    def _is_stopped(self) -> bool:
        left = self._limit_left
        return bool(self._report.stopped) or (left is not None and left <= 0)

    # --- One record -------------------------------------------------------------------------------

    def _is_done_with(self, record: Record) -> bool:
        """Replay or refuse a record; return whether it may be acknowledged."""
        request, report = self._request, self._report
        if not _matches(record, request.selection):
            report.skipped += 1
            return self._keeps and not request.dry_run
        # Others wrote the header, so it may name only topics of this project.
        origin = next(iter(_origins(record)), "") or request.topic.removesuffix(SUFFIX)
        dead = DeadRecord(record, request.target or self._targets.get(origin))
        self._ids.add(dead.id)
        report.count(
            names.text(record.headers, names.DLQ_REASON),
            dead.handler,
            names.text(record.headers, names.DLQ_EXCEPTION_TYPE),
        )
        report.already_processed += dead.is_processed
        refusal = self._refusal(dead)
        if refusal is not None:
            report.refuse(dead.id, *refusal)
            return self._keeps and not request.dry_run
        if request.dry_run:
            return False
        self._pace.wait()
        if dead.is_of_present_generation:
            return self._requeue(dead)
        if dead.job_letter is None:
            return self._publish(dead)
        replayed = report.replayed
        self._replayer.replay(dead.job_letter)
        return self._keeps or report.replayed > replayed

    def _refusal(self, dead: DeadRecord) -> tuple[str, str] | None:
        """Return the reason why a record is not replayed and its detail, or None."""
        # The job's id was enqueued again, and this failure is still open: the record's payload has
        # not run since.
        is_left_behind = dead.job_letter is not None
        if dead.target is None and not dead.is_of_present_generation and not is_left_behind:
            return "no allowed target", "name it with --target"
        if self._request.force:
            return None
        if dead.replay_count >= get_settings().max_replays:
            return REFUSED_LOOP, f"{dead.replay_count} times; --force replays it"
        is_failed = dead.job is not None and dead.job.state == JobState.FAILED
        is_jobs_death = dead.is_of_present_generation and is_failed
        if dead.job is not None and not is_jobs_death and not is_left_behind:
            return "its job has moved on", f"the job is {dead.job.state}"
        if dead.is_decided and dead.foreign_letter is not None:
            state = dead.foreign_letter.state
            return f"its dead letter is {state}", "--force replays it all the same"
        if dead.is_processed:
            return REFUSED_PROCESSED, "--force runs it again under a new id"
        return None

    def _publish(self, dead: DeadRecord) -> bool:
        """Publish a record; return whether it may be acknowledged."""
        assert dead.target is not None
        report = self._report
        headers = replay_headers(
            dead.record.headers, dead.replay_count + 1, new_id=dead.is_processed
        )
        outgoing = OutgoingRecord(
            topic=dead.target, key=dead.record.key, value=dead.record.value, headers=headers
        )
        try:
            publish_one(outgoing, self._request.transport)
        except PublishError as error:
            # No later record may be acknowledged before this one: the next run begins here.
            report.fail(dead.id, error)
            report.stopped = "a record was not accepted; run it again later"
            return False
        if dead.foreign_letter is not None:
            # An open row would be replayed from the table once more.
            rows = DeadLetter.objects.using(jobs_database()).filter(pk=dead.foreign_letter.pk)
            close_as_replayed(rows, self._request.actor)
        report.replayed += 1
        return True

    def _requeue(self, dead: DeadRecord) -> bool:
        assert dead.job is not None
        rows = Job.objects.using(jobs_database())
        # In the generation and state that were read: of two replays at once, one requeues it.
        found = rows.filter(pk=dead.job.pk, generation=dead.job.generation)
        if not self._request.force:
            found = found.filter(state=dead.job.state)
        outcomes = requeue(found, actor=self._request.actor)
        if not outcomes.changed_count:
            result = next(iter(outcomes.counts), "moving on")
            self._report.refuse(dead.id, f"its job is {result}")
            return self._keeps
        self._report.replayed += 1
        return True


# --- The facts of a record ------------------------------------------------------------------------


class DeadRecord:
    """A record with the facts that decide whether it is replayed.

    :param target: the topic to publish to, None if none is allowed.
    """

    def __init__(self, record: Record, target: str | None) -> None:
        headers, id = record.headers, _message_id(record)
        self.record = record
        self.target = target
        self.id = id or "{}[{}]@{}".format(*record.position)
        self.handler = _handler(record)
        self.replay_count = names.number(headers, names.REPLAY_COUNT, 0)
        self.is_processed = bool(processed({id: self.handler}))
        self.job = find_job(headers)
        self.job_letter: DeadLetter | None = None
        """The open dead letter of this failure, if the job has begun another generation since."""
        generation = generation_of(headers)
        if self.job is not None and self.job.generation != generation:
            source = source_of_job(self.job.pk, generation)
            rows = DeadLetter.objects.using(jobs_database()).filter(state=DeadLetterState.OPEN)
            self.job_letter = rows.filter(source_id=source).defer("traceback").first()
        format = format_of(headers)
        self.foreign_letter = None if format is None else format.letter_of(record)
        """The row of a record of another format, in any state, or None."""
        self.is_decided = bool(
            format and self.foreign_letter and format.is_decided(record, self.foreign_letter)
        )
        """Whether ``foreign_letter`` has been replayed or discarded since."""

    @property
    def is_of_present_generation(self) -> bool:
        """Whether its job is still in the record's generation; another one may have another
        payload."""
        return self.job is not None and self.job.generation == generation_of(self.record.headers)


def _message_id(record: Record) -> str:
    """Return the message's id, or ""."""
    found = names.text(record.headers, names.DLQ_MESSAGE_ID)
    # Others wrote the header, and the database is asked for its text.
    return storable_text(found or names.text(record.headers, names.ID))


def _handler(record: Record) -> str:
    """Return the name of the message's handler, or ""."""
    found = names.text(record.headers, names.DLQ_HANDLER)
    return found or names.text(record.headers, names.TYPE)


def _origins(record: Record) -> list[str]:
    """Return the topics in its headers that it died on."""
    return list(filter(None, (names.text(record.headers, name) for name in ORIGINS)))


def _matches(record: Record, wanted: DeadLetterFilter) -> bool:
    """Whether a record's headers pass the filter. A missing header does not."""
    text = functools.partial(names.text, record.headers)
    error = f"{text(names.DLQ_EXCEPTION_TYPE)}\n{text(names.DLQ_EXCEPTION_MESSAGE)}".lower()
    failed_at = names.moment(record.headers, names.DLQ_LAST_FAILED_AT) or record.timestamp
    return (
        (wanted.ids is None or _message_id(record) in map(str, wanted.ids))
        and (not wanted.queue or get_settings().queue(wanted.queue).topic in _origins(record))
        and (wanted.handler is None or _handler(record) == wanted.handler)
        and (wanted.reason is None or text(names.DLQ_REASON) == wanted.reason)
        and (not wanted.error or wanted.error.lower() in error)
        and (wanted.since is None or (failed_at is not None and failed_at >= wanted.since))
        and (wanted.until is None or (failed_at is not None and failed_at < wanted.until))
    )


class _Bounds:
    """The end of each partition when the run began. Later records are left to the next run.

    In a log the lag is a difference of offsets, and a partition ends at the first offset read plus
    the lag: never too early. Elsewhere the lag is a number of records.
    """

    def __init__(
        self,
        lag: dict[TopicPartition, int],
        done_before: dict[TopicPartition, int],
        *,
        is_log: bool,
    ) -> None:
        self._lag = lag
        self._is_log = is_log
        self._done_before = done_before
        self._first: dict[TopicPartition, int] = {}
        self._open = {tp for tp, count in lag.items() if count}
        self._counts: dict[TopicPartition, int] = {}
        self.total = sum(lag.values()) - sum(done_before.values()) if lag else None

    @property
    def are_reached(self) -> bool:
        """Whether every partition has been read; False if the lag is unknown."""
        return bool(self._lag) and not self._open

    def admits(self, record: Record) -> bool:
        """Whether the record was there at the start, and the group has not passed it."""
        if not self._lag:
            return True
        where = TopicPartition(record.topic, record.partition)
        if where not in self._open:
            return False
        first = self._first.setdefault(where, record.offset)
        self._counts[where] = self._counts.get(where, 0) + 1
        lag = self._lag[where]
        position = record.offset - first
        if self._counts[where] >= lag or (self._is_log and position >= lag - 1):
            self._open.discard(where)
        return position >= self._done_before.get(where, 0)


def publish_one(record: OutgoingRecord, transport: str) -> None:
    """Publish a record and wait for its delivery report.

    :raises PublishError: the transport did not accept it.
    """
    outcome = storing.publish(get_transport(transport), [record])[0]
    if outcome.error is not None:
        raise PublishError(outcome.error)
