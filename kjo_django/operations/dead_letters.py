"""Replay and discard of open dead letters.

The dead letter of a job is replayed by requeueing the job. If the job's id has been enqueued again
since, the letter's payload becomes a job of its own. A message that nobody enqueued here is
published again, byte for byte. Some hundred letters change in one transaction, and no row is locked
while a broker is waited for. A run that was interrupted is repeated, and goes on with the letters
that are still open.
"""

from __future__ import annotations

import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q, QuerySet
from django.db.models.functions import Length
from django.utils.translation import gettext_noop as _

from kjo_django import registry, signals
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import storing
from kjo_django.enqueue.storing import (
    after_commit,
    check_payload_size,
    only_in_rows,
    row_key,
    store,
)
from kjo_django.exceptions import CoordinationError, MessageError, PublishError
from kjo_django.ids import uuid7
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, serializer_for
from kjo_django.models import (
    ORIGIN_ID,
    DeadLetter,
    DeadLetterState,
    Job,
    ProcessedEvent,
    source_of_job,
)
from kjo_django.operations import internal, redaction
from kjo_django.operations.audit import send_after_commit
from kjo_django.operations.jobs import (
    Outcomes,
    RequeueResult,
    close_as_replayed,
    lock_jobs,
    requeue_chunk,
    requeue_locked,
)
from kjo_django.operations.rows import (
    CHUNK,
    Observer,
    Pace,
    Progress,
    chunks,
    key_of,
    lock,
    no_progress,
)
from kjo_django.refusals import RefusedError
from kjo_django.runtime import (
    current_runtime,
    get_coordination,
    get_transport,
    jobs_database,
    runtime_for,
)
from kjo_django.states import JobState
from kjo_django.store.counting import COUNT_LIMIT, bounded_count
from kjo_django.transports.base import OutgoingRecord, Published, Record
from kjo_django.values import count_within
from kjo_django.workflows.countdown import give_up

logger = get_logger("kjo_django")

PREVIEW_LIMIT = 1000
"""Dead letters that a preview reads if no limit is given."""
LEASE = timedelta(seconds=40)
"""So long no other run publishes a letter's message: longer than a broker is waited for."""
LOOK_AGAIN = 0.2
"""Seconds between looks at a letter that another run has the lease of."""
FAILURES_IN_A_ROW = 3
"""A run stops after so many errors of the transport in a row: the transport is down."""
SAMPLES = 20
"""Refusals and failures that a report lists; all are counted."""

REFUSED_LOOP = "replayed too often"
REFUSED_PROCESSED = "already processed"
REFUSED_NO_SOURCE = "no source topic"
REFUSED_INTERNAL = "an internal job"
NEEDS_PERMISSION = "it needs the permission of what it does"


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which dead letters. A field that is None does not restrict."""

    ids: Collection[UUID | str] | None = None
    queue: str | None = None
    """Of this queue, and of the queue of its retries."""
    handler: str | None = None
    reason: str | None = None
    error: str | None = None
    """Part of the error's text or type, in any case."""
    fingerprint: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it restricts nothing."""
        return self == DeadLetterFilter()


Selection = DeadLetterFilter | QuerySet[DeadLetter]


@dataclass(slots=True)
class ReplayReport:
    """The counts of one run. A dry run counts what a replay would do."""

    source: str
    is_dry_run: bool = False
    is_capped: bool = False
    """Of a dry run: whether there are more dead letters than it read."""
    matched: int = 0
    """Dead letters that the filter found, up to the limit."""
    replayed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By reason; a refused dead letter stays open."""
    failed: int = 0
    """Not accepted by the transport; they stay open for the next run."""
    skipped: int = 0
    """Changed by somebody else meanwhile, or, in a topic, outside the filter."""
    already_processed: int = 0
    """Of those matched, how many took effect here before."""
    histogram: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By reason, handler and error type."""
    samples: list[dict[str, str]] = field(default_factory=list)
    unknown_ids: list[str] = field(default_factory=list)
    """From a topic that was read to its end: wanted ids that no record has."""
    stopped: str = ""
    """Why the run ended early, if it did."""

    @property
    def is_ok(self) -> bool:
        """Whether nothing failed. A refusal is no failure."""
        return not self.failed and not self.stopped

    def count(self, reason: str, handler: str, error_type: str) -> None:
        """Count a dead letter that matched."""
        self.matched += 1
        self.histogram[reason, handler, error_type] += 1

    def refuse(self, id: str, reason: str, detail: str = "") -> None:
        """Count a dead letter that is refused."""
        self.refused[reason] += 1
        self._sample(id, "refused", f"{reason}: {detail}" if detail else reason)

    def skip(self, id: str, why: str) -> None:
        """Count a dead letter that is left as it is."""
        self.skipped += 1
        self._sample(id, "skipped", why)

    def fail(self, id: str, error: object) -> None:
        """Count a dead letter that the transport did not accept."""
        self.failed += 1
        self._sample(id, "failed", str(error))

    def as_dict(self) -> dict[str, Any]:
        """Return the report ready for JSON."""
        return {
            "source": self.source,
            "dry_run": self.is_dry_run,
            "is_capped": self.is_capped,
            "matched": self.matched,
            "replayed": self.replayed,
            "refused": dict(self.refused),
            "failed": self.failed,
            "skipped": self.skipped,
            "already_processed": self.already_processed,
            "histogram": [
                {"reason": reason, "handler": handler, "error_type": error, "count": count}
                for (reason, handler, error), count in self.histogram.most_common()
            ],
            "samples": self.samples,
            "stopped": self.stopped or None,
            "ok": self.is_ok,
        }

    def _sample(self, id: str, outcome: str, detail: str) -> None:
        if len(self.samples) < SAMPLES:
            self.samples.append({"id": id, "outcome": outcome, "detail": detail})


# --- Formats of dead letters ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DeadLetterFormat:
    """The headers and rows of a pattern's messages in dead-letter topics.

    Such a message took effect when it died. It has no id: its topic, partition and offset name its
    dead letter.

    :param marker: the header that each of these messages has.
    :param counter: the header that counts redeliveries; a replay leaves it out.
    :param origin: the header with the topic that the message died on.
    :param letter_of: returns the row of a record, in any state, or None.
    :param is_decided: whether the row of a record has been replayed or discarded since.
    """

    marker: str
    counter: str
    origin: str
    letter_of: Callable[[Record], DeadLetter | None]
    is_decided: Callable[[Record, DeadLetter], bool]


_formats: dict[str, DeadLetterFormat] = {}

ORIGINS = [
    names.DLQ_ORIGINAL_TOPIC,
    "kafka_dlt-original-topic",  # Spring
    "dlq-original-topic",  # of event consumers
    "__dlq.errors.topic",  # Kafka 4.4
]
"""Headers with the topic that a message died on; the first one that is there counts."""
COUNTERS = {names.REDELIVERY}
"""Headers that a replay leaves out, so that redeliveries are counted from 0."""


def register_format(format: DeadLetterFormat) -> None:
    """Make dead letters of this format known to replays."""
    if format.marker not in _formats:
        ORIGINS.append(format.origin)
        COUNTERS.add(format.counter)
    _formats[format.marker] = format


def format_of(headers: Mapping[str, Any]) -> DeadLetterFormat | None:
    """Return the registered format that a message's headers have, None for a worker's own."""
    return next((each for marker, each in _formats.items() if marker in headers), None)


# --- Finding --------------------------------------------------------------------------------------


def select(selection: Selection) -> QuerySet[DeadLetter]:
    """Return the open dead letters of a selection, oldest first."""
    if isinstance(selection, DeadLetterFilter):
        rows = restricted(DeadLetter.objects.all(), selection)
    else:
        rows = selection
    return rows.using(jobs_database()).filter(state=DeadLetterState.OPEN).order_by("pk")


def restricted(rows: QuerySet[DeadLetter], selection: DeadLetterFilter) -> QuerySet[DeadLetter]:
    """Return the rows that a filter describes, in any state."""
    exact = {
        "handler": selection.handler,
        "reason": selection.reason,
        "fingerprint": selection.fingerprint,
        "failed_at__gte": selection.since,
        "failed_at__lt": selection.until,
    }
    rows = rows.filter(**{name: value for name, value in exact.items() if value is not None})
    if selection.queue is not None:
        retries = get_settings().queue(selection.queue).retries
        rows = rows.filter(queue__in={selection.queue, retries})
    if selection.ids is not None:
        rows = rows.filter(pk__in=[_id(each) for each in selection.ids])
    if selection.error:
        text = Q(error__icontains=selection.error) | Q(error_type__icontains=selection.error)
        rows = rows.filter(text)
    return rows


def not_open(ids: Collection[UUID | str]) -> tuple[list[str], dict[str, str]]:
    """Return the ids that no dead letter has, and the states of the closed dead letters by id.

    :raises ValueError: an id is malformed.
    """
    wanted = {_id(each): str(each) for each in ids}
    rows = DeadLetter.objects.using(jobs_database()).filter(pk__in=wanted)
    states = dict(rows.values_list("pk", "state"))
    unknown = [given for id, given in wanted.items() if id not in states]
    closed = {str(id): state for id, state in states.items() if state != DeadLetterState.OPEN}
    return unknown, closed


def processed(message_ids: Mapping[str, str]) -> set[str]:
    """Return the ids whose effects are committed here.

    :param message_ids: the type of each message by its id.
    """
    wanted = [id for id in message_ids if id]
    rows = ProcessedEvent.objects.using(jobs_database()).filter(
        event_id__in=wanted, service_name=get_settings().service_name
    )
    return {
        id for id, kind in rows.values_list("event_id", "event_type") if message_ids[id] == kind
    }


def _id(given: UUID | str) -> UUID:
    key = key_of(given)
    if key is None:
        raise RefusedError(_("%(value).80r is not the id of a dead letter"), value=given)
    return key


# --- Replaying and discarding ---------------------------------------------------------------------


def replay(
    selection: Selection,
    *,
    limit: int | None = None,
    rate: float | None = None,
    dry_run: bool = False,
    force: bool = False,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
) -> ReplayReport:
    """Replay the open dead letters that there are now, oldest first, and return a report.

    :param limit: replay at most so many.
    :param rate: at most so many a second, from ``RATE_MIN`` to ``RATE_MAX`` of ``operations.rows``.
    :param dry_run: change nothing; report what would be replayed and what would be refused.
    :param force: also replay letters that were replayed too often, and messages that took effect
        before. Such a message gets a new id, or it would be dropped as a duplicate.
    :param actor: who asked, for the log and the letters' notes.
    :param on_changed: called with the letters of each transaction inside it.
    """
    pace = Pace(rate)
    rows = select(selection)
    if dry_run:
        return preview(rows, limit=limit, force=force, progress=progress)
    report = ReplayReport("table")
    known = bounded_count(rows)
    total = min(limit, known) if limit is not None else None if known == COUNT_LIMIT else known
    replayer = Replayer(report, force, actor, on_changed)
    size = 1 if rate is not None else CHUNK
    for keys in chunks(rows):
        while keys and not report.stopped and (limit is None or report.replayed < limit):
            count = size if limit is None else min(size, limit - report.replayed)
            pace.wait()
            replayer.replay_all(keys[:count])
            keys = keys[count:]
            progress(report.matched, total)
    return report


def edit_and_replay(
    id: UUID | str,
    value: bytes,
    *,
    actor: str = "",
    on_changed: Observer | None = None,
) -> ReplayReport:
    """Replay one open dead letter with another value; the letter keeps its own.

    The caller has checked the permission ``edit_payload``.

    :param value: the repaired payload or event. Where ``redaction.shown_value`` showed
        ``[redacted]`` and the text is unchanged, the letter's own value is used.
    :raises MessageError: the value does not fit its content type.
    :raises ValueError: the value is too large, it says ``[redacted]`` where nothing was hidden, or
        the letter is of an internal job.
    """
    check_payload_size(value)
    report = ReplayReport("table")
    letter = select(DeadLetterFilter(ids=[id])).select_related("job").first()
    if letter is None:
        report.skipped += 1
        return report
    of_job = letter.job.handler if letter.job is not None else ""
    if internal.is_internal(letter.handler) or internal.is_internal(of_job):
        text = _("An internal job cannot be edited: its payload says who may do what")
        raise RefusedError(text)
    value = _with_hidden(letter, value)
    check_payload_size(value)
    report.count(letter.reason, letter.handler, letter.error_type)
    Replayer(report, actor=actor, on_changed=on_changed, value=value).replay(letter)
    return report


def _with_hidden(letter: DeadLetter, value: bytes) -> bytes:
    """Return an edited value with the secrets that its editor was not shown."""
    serializer = serializer_for(letter.content_type or JSON.content_type)
    edited = serializer.loads(value)
    try:
        if not redaction.is_marked(edited):
            return value
        try:
            original = [serializer.loads(bytes(letter.value))] if letter.value is not None else []
        except MessageError:
            original = []  # nothing of it was shown, so nothing was hidden
        return serializer.dumps(redaction.restored(edited, *original))
    except RecursionError:
        raise RefusedError(_("The value is nested too deeply")) from None


def preview(
    selection: Selection,
    *,
    limit: int | None = PREVIEW_LIMIT,
    force: bool = False,
    progress: Progress = no_progress,
) -> ReplayReport:
    """Return a report of what a replay would do; nothing is changed.

    :param limit: read at most the oldest so many; ``is_capped`` is true if there are more. None:
        read all.
    """
    rows = select(selection)
    report = ReplayReport("table", is_dry_run=True)
    columns = (
        *("pk", "reason", "handler", "error_type", "replay_count", "message_id", "source_id"),
        *("job_id", "job__state", "job__generation"),
    )
    for keys in chunks(rows):
        found = list(rows.filter(pk__in=keys).values(*columns))
        done = processed({row["message_id"]: row["handler"] for row in found})
        for row in found:
            if limit is not None and report.matched >= limit:
                report.is_capped = True
                return report
            report.count(row["reason"], row["handler"], row["error_type"])
            report.already_processed += row["message_id"] in done
            refusal = None if force else _foreseen_refusal(row, is_done=row["message_id"] in done)
            if refusal is not None:
                report.refuse(str(row["pk"]), refusal)
        progress(report.matched, None)
    return report


def _foreseen_refusal(row: dict[str, Any], *, is_done: bool) -> str | None:
    if row["replay_count"] >= get_settings().max_replays:
        return REFUSED_LOOP
    if row["job__state"] is not None:
        if row["source_id"] != source_of_job(row["job_id"], row["job__generation"]):
            return None  # it runs as a job of its own
        return None if row["job__state"] == JobState.FAILED else f"the job is {row['job__state']}"
    return REFUSED_PROCESSED if is_done else None


def discard(
    selection: Selection,
    *,
    note: str,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
) -> int:
    """Close open dead letters without replay, and return how many.

    :param note: why; stored with each letter.
    """
    note = note.strip()
    if not note:
        text = _("A note is needed that says why these dead letters are discarded")
        raise RefusedError(text)
    using = jobs_database()
    text = f"{note} ({actor})" if actor else note
    count = 0
    open_rows = DeadLetter.objects.using(using).filter(state=DeadLetterState.OPEN)
    for keys in chunks(select(selection)):
        with transaction.atomic(using=using):
            columns = ("pk", "queue", "handler", "topic", "message_id", "source_id", "job_id")
            letters = lock(open_rows.only(*columns), keys)
            count += open_rows.filter(pk__in=[letter.pk for letter in letters]).update(
                state=DeadLetterState.DISCARDED, closed_at=CLOCK.now(), note=text[:500]
            )
            _give_up_steps(letters)
            if on_changed is not None and letters:
                on_changed(letters)
            send_after_commit(signals.message_discarded, letters, note=note)
        progress(count, None)
    return count


def _give_up_steps(letters: Collection[DeadLetter]) -> None:
    """Cancel what waits for these letters' jobs to be repeated: nobody will."""
    ids = [letter.job_id for letter in letters if letter.job_id is not None]
    rows = Job.objects.using(jobs_database()).filter(
        pk__in=ids, stage__isnull=False, state=JobState.FAILED
    )
    sources = {letter.source_id for letter in letters}
    steps = [
        stage
        for stage, id, generation in rows.values_list("stage_id", "pk", "generation")
        if source_of_job(id, generation) in sources
    ]
    if steps:
        give_up(current_runtime(), steps)


# --- Replaying letters ----------------------------------------------------------------------------


@dataclass(slots=True)
class Replayer:
    """Replays letters and counts them in a report.

    :param value: the payload to run with; None: the letter's.
    """

    report: ReplayReport
    force: bool = False
    actor: str = ""
    on_changed: Observer | None = None
    value: bytes | None = None
    using: str = field(default_factory=jobs_database, init=False)
    _failures_in_a_row: int = field(default=0, init=False)
    """How many messages were refused since the transports took one."""
    _is_accepted: bool = field(default=False, init=False)
    """Whether the transports took the last message."""

    # --- Of many letters --------------------------------------------------------------------------

    def replay_all(self, keys: Sequence[UUID]) -> None:
        """Replay the open letters of these keys, together where nothing stands against that; each
        of the others by itself, so that the report says why it is refused. Stops, and says so in
        the report, when a transport seems to be down."""
        is_one = len(keys) == 1
        rows = select(DeadLetterFilter(ids=keys)).annotate(size=Length("value"))
        letters = list(rows.defer("traceback") if is_one else rows.defer("value", "traceback"))
        self.report.skipped += len(keys) - len(letters)
        done: set[UUID] = set() if is_one else self._replay_together(letters)
        for letter in letters:
            is_done = letter.pk in done
            if is_done or not self.report.stopped:
                self.report.count(letter.reason, letter.handler, letter.error_type)
                if not is_done:
                    self.replay(letter)

    def _replay_together(self, letters: Sequence[DeadLetter]) -> set[UUID]:
        """Replay letters together where nothing stands against that; return the keys of these."""
        plain = [one for one in letters if one.replay_count < get_settings().max_replays]
        done = self._requeue_together([one for one in plain if one.job_id is not None])
        return done | self._publish_together([one for one in plain if one.job_id is None])

    def _requeue_together(self, letters: Sequence[DeadLetter]) -> set[UUID]:
        """Requeue the jobs of letters in one transaction, where a job has failed and has not been
        enqueued again since. Returns the keys of the letters that were replayed."""
        if not letters:
            return set()
        with transaction.atomic(using=self.using):
            of_job = {letter.job_id: letter for letter in self._lock(letters)}
            jobs, _, _ = lock_jobs(list(of_job))
            failed = [
                job
                for job in jobs
                if job.state == JobState.FAILED
                and of_job[job.pk].source_id == source_of_job(job.pk, job.generation)
                and not internal.is_internal(job.handler)
            ]
            replayed = [of_job[job.pk] for job in failed]
            if replayed:
                requeue_locked(failed, actor=self.actor, letters=replayed)
                self._changed(replayed)
        return {letter.pk for letter in replayed}

    def _publish_together(self, letters: Sequence[DeadLetter]) -> set[UUID]:
        """Publish messages that nobody enqueued here, in parts that fit into memory, where nothing
        stands against that. Returns the keys of the letters that were given to a transport."""
        done: set[UUID] = set()
        left = list(letters)
        while left and not self.report.stopped:
            # A transport that may be down is asked with few first.
            most = len(left) if self._is_accepted else FAILURES_IN_A_ROW
            sizes = [letter.size or 0 for letter in left[:most]]  # type: ignore[attr-defined]
            count = count_within(sizes, get_settings().relay_batch_bytes)
            part, left = left[:count], left[count:]
            rows = select(DeadLetterFilter(ids=[letter.pk for letter in part])).defer("traceback")
            queues: dict[str, QueueConf] = {}
            by_queue: defaultdict[str, list[tuple[DeadLetter, OutgoingRecord]]] = defaultdict(list)
            for letter, queue, record in self._plain_records(list(rows)):
                queues[queue.name] = queue
                by_queue[queue.name].append((letter, record))
            for name, pairs in by_queue.items():
                done |= self._publish(pairs, queues[name])
        return done

    def _plain_records(
        self, letters: Sequence[DeadLetter]
    ) -> Iterator[tuple[DeadLetter, QueueConf, OutgoingRecord]]:
        """Yield the messages that have a topic to go to and have not taken effect, each with its
        queue and its record."""
        own = [letter for letter in letters if format_of(letter.headers) is None]
        effective = processed({letter.message_id: letter.handler for letter in own})
        for letter in letters:
            queue = queue_of(letter.queue, letter.topic)
            topic = replay_topic_of(queue, letter.topic) if queue else ""
            is_done = letter.message_id in effective and format_of(letter.headers) is None
            if queue is not None and topic and not is_done:
                yield letter, queue, _record_of(letter, topic, new_id=False)

    def _lock(self, letters: Sequence[DeadLetter]) -> list[DeadLetter]:
        """Lock letters, and return those that are open."""
        rows = DeadLetter.objects.using(self.using).filter(state=DeadLetterState.OPEN)
        locked = lock(rows.only("pk", "state"), [letter.pk for letter in letters])
        keys = {letter.pk for letter in locked}
        return [letter for letter in letters if letter.pk in keys]

    # --- Of one letter ----------------------------------------------------------------------------

    def replay(self, letter: DeadLetter) -> None:
        """Replay a letter that the report has counted, or count why it is refused."""
        if letter.replay_count >= get_settings().max_replays and not self.force:
            self._refuse(letter, REFUSED_LOOP, f"{letter.replay_count} times; --force replays it")
        elif letter.job_id is not None:
            self._replay_job(letter, Job.objects.using(self.using).filter(pk=letter.job_id))
        else:
            self._replay_message(letter)

    def _refuse(self, letter: DeadLetter, reason: str, detail: str = "") -> None:
        self.report.refuse(str(letter.pk), reason, detail)

    def _is_mine(self, letter: DeadLetter) -> bool:
        """Lock a letter and return True if it is open; else count it as skipped."""
        is_mine = bool(self._lock([letter]))
        self.report.skipped += not is_mine
        return is_mine

    # --- Of a job ---------------------------------------------------------------------------------

    def _replay_job(self, letter: DeadLetter, rows: QuerySet[Job]) -> None:
        with transaction.atomic(using=self.using):
            if not self._is_mine(letter):
                return
            job = rows.defer("payload", "result").first()
            if job is None or letter.source_id == source_of_job(job.pk, job.generation):
                self._requeue(letter, job, rows)
            else:
                self._store_again(letter, job)

    def _requeue(self, letter: DeadLetter, job: Job | None, rows: QuerySet[Job]) -> None:
        """Requeue the letter's job, which is still in its generation."""
        still = rows if job is None else rows.filter(generation=job.generation)
        if not self.force:
            still = still.filter(state=JobState.FAILED)
        outcomes = Outcomes()
        # The job's row is locked without waiting: whoever requeues the job holds that row and waits
        # for this letter.
        requeue_chunk([letter.job_id], outcomes, still=still, payload=self.value, actor=self.actor)
        if outcomes.changed_count:
            self._changed([letter])
            return
        state = next(iter(outcomes.counts))
        if state == RequeueResult.FORBIDDEN:
            self._refuse(letter, REFUSED_INTERNAL, NEEDS_PERMISSION)
        elif state == RequeueResult.NOT_FOUND:
            # It was requeued or enqueued again meanwhile.
            now = rows.values_list("state", flat=True).first()
            self._refuse(letter, f"the job is {now}", "--force runs it again")
        else:
            self._refuse(letter, f"the job is {state}")

    def _store_again(self, letter: DeadLetter, job: Job) -> None:
        """Store the letter's payload as a job of its own.

        The letter's job was enqueued again since. Its new payload is neither run nor lost by this.
        """
        headers = names.from_json(letter.headers)
        replayed = replay_headers(headers, letter.replay_count + 1, new_id=True)
        kept = {name: data for name, data in replayed.items() if name not in names.OF_A_MESSAGE}
        kept.pop(ORIGIN_ID, None)
        key = None if letter.key is None else bytes(letter.key)
        has_value = self.value is not None or letter.value is not None
        extra = only_in_rows(key, b"" if has_value else None)
        if key == str(job.pk).encode():
            key = None  # the message of a job without a key has the job's id as key
        again = Job(
            id=uuid7(),
            queue=job.queue,
            handler=letter.handler,
            key=row_key(key),
            max_attempts=job.max_attempts,
            payload=bytes(letter.value or b"") if self.value is None else self.value,
            content_type=letter.content_type,
            headers=names.for_row({**names.in_order(kept), **extra}),
            result_ttl=job.result_ttl,
        )
        if not internal.may_run_again(again, self.actor):
            self._refuse(letter, REFUSED_INTERNAL, NEEDS_PERMISSION)
            return
        internal.reassign(again, self.actor)
        store([again])
        self._close([letter])

    # --- Of a message without a job ---------------------------------------------------------------

    def _replay_message(self, letter: DeadLetter) -> None:
        queue = queue_of(letter.queue, letter.topic)
        topic = replay_topic_of(queue, letter.topic) if queue else ""
        if queue is None or not topic:
            self._refuse(letter, REFUSED_NO_SOURCE)
            return
        # A message of another format took effect when it died; its letter's row decides.
        is_foreign = format_of(letter.headers) is not None
        is_done = not is_foreign and bool(processed({letter.message_id: letter.handler}))
        if is_done:
            self.report.already_processed += 1
            if not self.force:
                self._refuse(letter, REFUSED_PROCESSED, "--force runs it again under a new id")
                return
        record = _record_of(letter, topic, new_id=is_done)
        if self.value is not None:
            record = replace(record, value=self.value)
        self.report.skipped += not self._publish([(letter, record)], queue)

    def _publish(
        self, pairs: Sequence[tuple[DeadLetter, OutgoingRecord]], queue: QueueConf
    ) -> set[UUID]:
        """Publish records, close the letters of those that the transport accepts, and return the
        keys of the letters that were open and nobody else's.

        A transactional transport gets them in the transaction that closes the letters. For another
        one no row is locked, since its broker may be slow: leases keep a second run from the same
        letters meanwhile.
        """
        letters = [letter for letter, _ in pairs]
        if storing.is_transactional(queue):
            with transaction.atomic(using=self.using):
                mine = {letter.pk for letter in self._lock(letters)}
                self._close(self._send([pair for pair in pairs if pair[0].pk in mine], queue))
                after_commit(runtime_for(self.using), storing.channel_of(queue))
            return mine
        with self._leased([letter.pk for letter in letters]) as keys:
            mine = self._open(keys)
            accepted = self._send([pair for pair in pairs if pair[0].pk in mine], queue)
            with transaction.atomic(using=self.using):
                self._close(self._lock(accepted))
        return mine

    def _open(self, keys: Collection[UUID]) -> set[UUID]:
        """Return the keys of open letters among these."""
        return set(select(DeadLetterFilter(ids=keys)).values_list("pk", flat=True))

    def _send(
        self, pairs: Sequence[tuple[DeadLetter, OutgoingRecord]], queue: QueueConf
    ) -> list[DeadLetter]:
        """Publish records, count those that the transport refuses, and return the letters of the
        others."""
        records = [record for _, record in pairs]
        try:
            answers = storing.publish(get_transport(queue.transport), records)
        except PublishError as error:
            answers = [Published(error=str(error))] * len(records)
        accepted = []
        for (letter, _record), answer in zip(pairs, answers, strict=True):
            if answer.error is None:
                accepted.append(letter)
                self._failures_in_a_row, self._is_accepted = 0, True
                continue
            self.report.fail(str(letter.pk), answer.error)
            self._is_accepted = False
            self._failures_in_a_row += 1
            if self._failures_in_a_row >= FAILURES_IN_A_ROW:
                count = self._failures_in_a_row
                self.report.stopped = f"{count} in a row were not accepted; run it again later"
        return accepted

    @contextmanager
    def _leased(self, keys: Sequence[UUID]) -> Iterator[Sequence[UUID]]:
        """Yield the keys of which no other run has the lease; of all, where coordination is away.
        One alone is waited for: the other run closes its letter, or has died, and its lease ends.
        """
        token = uuid7().hex
        leased = _claim(keys, token)
        while len(keys) == 1 and not leased and self._open(keys):
            time.sleep(LOOK_AGAIN)
            leased = _claim(keys, token)
        try:
            yield leased
        finally:
            with suppress(CoordinationError):  # then they expire
                get_coordination().release([_lease_of(key) for key in leased], token)

    def _close(self, letters: Sequence[DeadLetter]) -> None:
        if letters:
            rows = DeadLetter.objects.using(self.using)
            close_as_replayed(rows.filter(pk__in=[letter.pk for letter in letters]), self.actor)
            send_after_commit(signals.message_replayed, letters)
            self._changed(letters)

    def _changed(self, letters: Sequence[DeadLetter]) -> None:
        self.report.replayed += len(letters)
        if self.on_changed is not None:
            self.on_changed(letters)


def _lease_of(letter: UUID) -> str:
    return f"REPLAY:{letter}"


def _claim(letters: Sequence[UUID], token: str) -> Sequence[UUID]:
    """Return the letters of which this token has the lease now; all, where nobody can lease."""
    try:
        claims = get_coordination().claim([_lease_of(key) for key in letters], token, LEASE)
    except CoordinationError as error:
        logger.warning("Dead letters are replayed without leases: %s", error)
        return letters
    return [key for key, claim in zip(letters, claims, strict=True) if claim.acquired]


# --- The record of a replay -----------------------------------------------------------------------

REPLAY_OF = "kjo-replay-of"
"""The id of the message before a forced replay gave it a new one."""
_ORIGIN = names.FIRST_WINS - {names.DLQ_FIRST_FAILED_AT}
_OF_A_JOB = frozenset({names.JOB_ID, names.GENERATION, names.ATTEMPT})


def replay_topic_of(queue: QueueConf, topic: str) -> str:
    """Return the topic that a queue's messages are published to again, of the level they had.

    It is not a topic that other services read: they would get the message once more.

    :param topic: where they were read first.
    """
    levels = get_settings().queue(queue.retries).levels
    return levels.get(queue.level_in(topic), levels[0])


def queue_of(queue: str, topic: str) -> QueueConf | None:
    """Return the queue of a dead letter: by its name, else the queue that reads its topic."""
    conf = get_settings()
    if queue:
        return conf.queue(queue)
    declared = [conf.queue(name) for name in registry.queue_names()]
    return next((found for found in declared if topic in found.topics), None)


def replay_headers(
    headers: Mapping[str, bytes], replay_count: int, *, new_id: bool = False
) -> dict[str, bytes]:
    """Return the headers of a replayed message.

    They are its own headers, the origin that the dead-letter queue added, and the number of
    replays.
    """
    # A message of another format has no id: its copies in the table and the topic share this one.
    stays = _ORIGIN | {names.DLQ_MESSAGE_ID} if format_of(headers) else _ORIGIN
    added = {name for name in headers if name.startswith(names.DLQ_PREFIX)} - stays
    kept = _without(headers, added | set(COUNTERS))
    if names.JOB_ID in kept and _is_of_this_service(kept):
        job = find_job(kept)
        if job is None or job.generation != generation_of(kept):
            # The row was deleted, or has another payload by now. A consumer would drop a message
            # that names it.
            kept = _without(kept, _OF_A_JOB)
            new_id = new_id or job is not None
    if new_id and names.ID in kept:
        kept[REPLAY_OF] = kept[names.ID]
        kept[names.ID] = str(uuid7()).encode()
    kept[names.REPLAY_COUNT] = b"%d" % replay_count
    return kept


def _without(headers: Mapping[str, bytes], names: Collection[str]) -> dict[str, bytes]:
    return {name: value for name, value in headers.items() if name not in names}


def _record_of(letter: DeadLetter, topic: str, *, new_id: bool) -> OutgoingRecord:
    headers = names.from_json(letter.headers)
    # Messages of other formats name their origin in headers of their own.
    if format_of(headers) is None and names.DLQ_ORIGINAL_TOPIC not in headers:
        origin = {
            names.DLQ_ORIGINAL_TOPIC: letter.topic or None,
            names.DLQ_ORIGINAL_PARTITION: letter.partition,
            names.DLQ_ORIGINAL_OFFSET: letter.offset,
        }
        headers = {**names.encode(origin), **headers}
    count = max(letter.replay_count, names.number(headers, names.REPLAY_COUNT, 0)) + 1
    return OutgoingRecord(
        topic=topic,
        key=None if letter.key is None else bytes(letter.key),
        value=None if letter.value is None else bytes(letter.value),
        headers=replay_headers(headers, count, new_id=new_id),
    )


def generation_of(headers: Mapping[str, bytes]) -> int:
    """Return the generation of the job in a message's headers."""
    return names.number(headers, names.GENERATION, 1)


def find_job(headers: Mapping[str, bytes]) -> Job | None:
    """Return the job of a message if this service's database has it, else None."""
    if not _is_of_this_service(headers):
        return None
    try:
        id = uuid.UUID(names.text(headers, names.JOB_ID))
    except ValueError:
        return None
    rows = Job.objects.using(jobs_database()).only("id", "state", "generation", "queue", "handler")
    return rows.filter(pk=id).first()


def _is_of_this_service(headers: Mapping[str, bytes]) -> bool:
    return names.text(headers, names.SERVICE) == get_settings().service_name
