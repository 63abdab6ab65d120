"""Storing jobs and records in the caller's transaction.

A job is stored once per queue and unique id. Of a known unique id an open job is a ``duplicate``; a
completed one whose result still lives answers ``completed``; a failed one is a ``duplicate`` until
its error expires; a cancelled or expired one begins a new generation with the new payload.

A record for a topic that other services read (an event, a redelivery in another system's format) is
stored as a row with a ``destination``: its bytes and headers as they are, not our envelope.
Publishing it completes the row, since nothing here waits for it to be consumed.
"""

from __future__ import annotations

import hashlib
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal, NamedTuple

from django.db.models.base import ModelState
from django.utils import timezone

from kjo_django import garbage_collection, registry, states, tracing
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.wakeups import RELAY_CHANNEL, after_commit
from kjo_django.exceptions import PayloadError, StorageError
from kjo_django.ids import uuid7, uuid7s
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import load_result, serializer_for, storable_text
from kjo_django.models import Job, transition
from kjo_django.runtime import Runtime, current_runtime
from kjo_django.states import JobState
from kjo_django.store import Store


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """The answer to an enqueue; duplicates are answers, never exceptions."""

    status: Literal["queued", "duplicate", "completed"]
    job_id: uuid.UUID
    existing_state: str | None = None
    """Of a duplicate: queued, processing, failing, completed or failed."""
    result: Any = None
    """Of a completed one: its cached result."""

    @property
    def is_new(self) -> bool:
        """Whether this call stored a job."""
        return self.status == "queued"


MAX_RESULT_TTL = 100 * 365 * 86_400_000
"""Milliseconds. A moment that no database can hold would fail the job after it has run."""


def check_payload_size(payload: bytes, limit: int | None = None) -> bytes:
    """Return the payload, or raise ``PayloadError`` when it is over the limit.

    :param limit: bytes; by default ``MAX_PAYLOAD_BYTES``.
    """
    if limit is None:
        limit = get_settings().max_payload_bytes
    if len(payload) > limit:
        raise PayloadError(
            f"The payload has {len(payload)} bytes; KJO['MAX_PAYLOAD_BYTES'] allows {limit}. "
            "Store the data and pass its id."
        )
    return payload


def milliseconds(value: timedelta | int) -> int:
    """Return a result's lifetime in milliseconds, validated before anything is written.

    :param value: a positive timedelta, or a positive whole number of milliseconds.
    """
    given = value
    if isinstance(value, timedelta):
        value = math.floor(value / timedelta(milliseconds=1))
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    if not is_whole or not 0 < value <= MAX_RESULT_TTL:
        kind = ValueError if is_whole else TypeError
        raise kind(
            "result_ttl must be a positive timedelta or a positive whole number of milliseconds, "
            f"at most 100 years, not {given!r}"
        )
    return value


def store(
    jobs: Sequence[Job], *, revives_failed: bool = False, runtime: Runtime | None = None
) -> list[EnqueueResult]:
    """Store jobs and send them on their way, joining the caller's transaction.

    One INSERT for all of them; where a unique id was taken, a query tells by whom. Answers come in
    the order of the jobs.

    :param revives_failed: a failed job of the same id begins a new generation at once, instead of
        being a duplicate until its error expires.
    """
    if not jobs:
        return []
    runtime = runtime or current_runtime()
    if tracing.tracer is None:
        return _store(jobs, revives_failed, runtime)
    with tracing.tracer.enqueuing(jobs):
        return _store(jobs, revives_failed, runtime)


class Content(NamedTuple):
    """What tells a job from the others of one call."""

    unique_id: str | None
    key: str
    payload: bytes


class Contents:
    """What tells many jobs from one another, by column.

    Of objects that stay, one for each job, Python would look through everything there is for
    garbage now and then.
    """

    def __init__(self) -> None:
        self.unique_ids: list[str | None] = []
        self.keys: list[str] = []
        self.payloads: list[bytes] = []

    def append(self, content: Content) -> None:
        unique_id, key, payload = content
        self.unique_ids.append(unique_id)
        self.keys.append(key)
        self.payloads.append(payload)

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[Content]:
        return map(Content, self.unique_ids, self.keys, self.payloads)


def store_alike(job: Job, contents: Contents, runtime: Runtime) -> list[EnqueueResult]:
    """Store a job for each of ``contents``, as ``store`` does, without making an instance of each
    where its row can be written without.

    :param job: unsaved; what all of them have in common. It is not stored itself.
    """
    if tracing.tracer is None:
        return _store_alike(job, contents, runtime)
    # What the tracer leaves with this one, all of them carry.
    with tracing.tracer.enqueuing([job] * len(contents)):
        return _store_alike(job, contents, runtime)


def _store_alike(job: Job, contents: Contents, runtime: Runtime) -> list[EnqueueResult]:
    using = runtime.database
    queue = runtime.settings.queue(job.queue)
    if (
        dispatch.is_transactional(queue)
        or any(id is not None for id in contents.unique_ids)
        or not runtime.store.may_copy(len(contents))
    ):
        each = zip(uuid7s(len(contents)), contents, strict=True)
        return _store([_like(job, id, content) for id, content in each], False, runtime)
    job.state = JobState.PENDING
    with garbage_collection.paused():
        ids = uuid7s(len(contents))
        runtime.store.copy_jobs(job, zip(ids, contents.keys, contents.payloads, strict=True))
        answers = [EnqueueResult("queued", id) for id in ids]
    facts = {"unique_id": None, "queue": job.queue, "handler": job.handler}
    after_commit(using, RELAY_CHANNEL, ({**facts, "job_id": str(id)} for id in ids))
    return answers


def _like(job: Job, id: uuid.UUID, content: Content) -> Job:
    """Return a copy. The model's own ``__init__`` costs more than all the rest of an enqueue."""
    copy = Job.__new__(Job)
    copy.__dict__.update(job.__dict__, _state=ModelState(), id=id, **content._asdict())
    return copy


def _store(jobs: Sequence[Job], revives_failed: bool, runtime: Runtime) -> list[EnqueueResult]:
    using = runtime.database
    queues = {name: runtime.settings.queue(name) for name in {job.queue for job in jobs}}
    transactional = {name for name, queue in queues.items() if dispatch.is_transactional(queue)}
    for job in jobs:
        is_sent = job.queue in transactional
        job.state = JobState.QUEUED if is_sent else JobState.PENDING
        job.queued_at = job.created_at if is_sent else None
    if not transactional and all(job.unique_id is None for job in jobs):
        # The common case of a log transport: a single statement needs no transaction of its own.
        _insert(jobs, runtime.store)
        after_commit(using, RELAY_CHANNEL, map(_facts, jobs))
        return [EnqueueResult("queued", job.pk) for job in jobs]
    with runtime.store.transaction(savepoint=False):
        answers = _store_unique(jobs, revives_failed, runtime.store)
        for name, queue in queues.items():
            fresh = [
                job
                for job, answer in zip(jobs, answers, strict=True)
                if job.queue == name and answer.is_new
            ]
            if fresh:
                dispatch.dispatch_jobs(fresh, queue)
                after_commit(using, dispatch.channel_of(queue), map(_facts, fresh))
    return answers


def _insert(jobs: Sequence[Job], store: Store, *, ignore_conflicts: bool = False) -> int:
    """Insert rows and return how many."""
    count = store.insert_jobs(jobs, ignore_conflicts=ignore_conflicts)
    for job in jobs:
        job._state.adding, job._state.db = False, store.alias
    return count


def _facts(job: Job) -> dict[str, Any]:
    """Return what ``job_enqueued`` is sent with."""
    facts = {"job_id": str(job.pk), "unique_id": job.unique_id}
    return {**facts, "queue": job.queue, "handler": job.handler}


def _store_unique(jobs: Sequence[Job], revives_failed: bool, store: Store) -> list[EnqueueResult]:
    """Insert, then resolve the unique ids that were taken."""
    named = [job for job in jobs if job.unique_id is not None]
    if _insert(jobs, store, ignore_conflicts=bool(named)) == len(jobs):
        return [EnqueueResult("queued", job.pk) for job in jobs]
    holders: dict[tuple[str, str | None], Job] = {}
    for queue in {job.queue for job in named}:
        ids = [job.unique_id for job in named if job.queue == queue]
        for start in range(0, len(ids), 1000):
            rows = Job.objects.using(store.alias).filter(
                queue=queue, unique_id__in=ids[start : start + 1000]
            )
            holders.update({(queue, row.unique_id): row for row in rows})
    answers = []
    for job in jobs:
        holder = holders.get((job.queue, job.unique_id)) if job.unique_id is not None else job
        if holder is None:
            raise _vanished(job)
        if holder.pk == job.pk:
            answers.append(EnqueueResult("queued", job.pk))
        else:
            answers.append(_meet(store.alias, job, holder, revives_failed))
    return answers


def _vanished(job: Job) -> StorageError:
    return StorageError(
        f"The job {job.unique_id!r} of queue {job.queue!r} could not be stored: its row "
        "vanished while it was looked up. Enqueue it again."
    )


def _meet(using: str, job: Job, holder: Job, revives_failed: bool) -> EnqueueResult:
    """Answer an enqueue whose unique id is taken by ``holder``."""
    for _attempt in range(5):
        answer = _answer_of(holder, revives_failed)
        if answer is not None:
            return answer
        # One conditional UPDATE on state and generation: of several who revive it, one wins.
        revived = transition(
            "requeue",
            Job.objects.using(using).at(holder.pk, holder.generation).filter(state=holder.state),
            **_revival(job),
        )
        if revived:
            job.pk, job.generation = holder.pk, holder.generation + 1
            return EnqueueResult("queued", holder.pk)
        known = Job.objects.using(using).filter(pk=holder.pk).first()
        if known is None:
            raise _vanished(job)
        holder = known
    raise StorageError(f"The job {job.unique_id!r} keeps changing; enqueue it again.")


def _answer_of(holder: Job, revives_failed: bool) -> EnqueueResult | None:
    """Return the answer, or None when the row may begin a new generation."""
    now = timezone.now()
    is_expired = holder.result_expires_at is not None and holder.result_expires_at <= now
    if holder.state == JobState.CANCELLED or (holder.state in states.FINAL and is_expired):
        return None
    if holder.state == JobState.FAILED and revives_failed:
        return None
    if holder.state == JobState.COMPLETED:
        return EnqueueResult("completed", holder.pk, "completed", result_of(holder))
    return EnqueueResult("duplicate", holder.pk, states.to_queue(holder.status))


def result_of(job: Job) -> Any:
    """Return a completed job's result; a handler that returned None stored nothing."""
    if job.result is None:
        return None
    return load_result(bytes(job.result), serializer_for(job.content_type))


def fresh_run(job_queue: str) -> dict[str, Any]:
    """Return the columns every new generation starts with."""
    queue = get_settings().queue(job_queue)
    state = dispatch.initial_state(queue)
    return {
        "state": state,
        "attempts": 0,
        "queued_at": timezone.now() if state == JobState.QUEUED else None,
        "started_at": None,
        "finished_at": None,
        "lease_token": "",
        "lease_expires_at": None,
        "result": None,
        "result_expires_at": None,
        "error": "",
        "topic": "",
        "partition": None,
        "offset": None,
    }


def _revival(job: Job) -> dict[str, Any]:
    taken = [
        "handler",
        "key",
        "max_attempts",
        "payload",
        "content_type",
        "headers",
        "available_at",
        "expires_at",
        "created_at",
        "result_ttl",
    ]
    return {**fresh_run(job.queue), **{name: getattr(job, name) for name in taken}}


# --- Records for others ---------------------------------------------------------------------------


def carrier_of(topic: str, transport: str | None = None) -> QueueConf:
    """Return the queue whose relay publishes to a topic: the one declared for it, else the common
    one of the default transport.

    :raises ValueError: another transport is asked for and no queue there has the topic.
    """
    conf = get_settings()
    for name in registry.queue_names():
        queue = conf.queue(name)
        if queue.topic == topic and transport in (None, queue.transport):
            return queue
    common = conf.queue(dispatch.OUTGOING)
    if transport not in (None, common.transport):
        raise ValueError(
            f"No queue of the transport {transport!r} has the topic {topic!r}; declare one in "
            "KJO['QUEUES'], with 'consume': False if this service only publishes to it."
        )
    return common


def store_record(
    topic: str,
    *,
    value: bytes | None,
    key: bytes | None,
    headers: Mapping[str, bytes],
    kind: str,
    carrier: QueueConf | None = None,
    available_at: datetime | None = None,
    row_header: str | None = None,
) -> Job:
    """Store a record in the caller's transaction, to be published once that commits.

    :param kind: what people see it as; an event's type.
    :param carrier: the queue whose relay publishes it; ``carrier_of(topic)`` if not given.
    :param available_at: not published before.
    :param row_header: a header that names the row.
    :raises PayloadError: it is too large. Nothing is written.
    """
    queue = carrier or carrier_of(topic)
    id, now = uuid7(), timezone.now()
    # What only rows say is not for others to have written; nor that somebody waits for them.
    ours = {*names.OF_A_ROW, names.PARKED_ROW, names.REDELIVERY}
    headers = {name: value for name, value in headers.items() if name not in ours}
    if row_header is not None:
        headers[row_header] = str(id).encode()
    stored = names.for_row({**names.in_order(headers), **only_in_rows(key, value)})
    stored.pop(names.NO_KEY, None)  # as the empty column says
    job = Job(
        id=id,
        queue=queue.name,
        handler=storable_text(kind, 100),
        key=row_key(key),
        state=dispatch.initial_state(queue),
        max_attempts=1,
        payload=check_payload_size(value or b""),
        headers=stored or None,
        available_at=available_at or now,
        created_at=now,
        result_ttl=queue.result_ttl // timedelta(milliseconds=1),
        destination=topic,
    )
    job.queued_at = now if job.state == JobState.QUEUED else None
    if tracing.tracer is None:
        _store_record(job, queue)
    else:
        with tracing.tracer.enqueuing([job]):
            _store_record(job, queue)
    return job


def _store_record(job: Job, queue: QueueConf) -> None:
    runtime = current_runtime()
    using = runtime.database
    with runtime.store.transaction(savepoint=False):
        job.save(using=using, force_insert=True)
        dispatch.dispatch_jobs([job], queue)


def only_in_rows(key: bytes | None, value: bytes | None) -> dict[str, bytes]:
    """Return the headers that say of a key and a value what a row's columns cannot."""
    found: dict[str, bytes] = {}
    if key is None:
        found[names.NO_KEY] = b"1"
    elif not _is_plain(key):
        found[names.RAW_KEY] = key
    if value is None:
        found[names.NO_VALUE] = b"1"
    return found


def row_key(key: bytes | None) -> str:
    """Return the key as the row's column holds it: its text, or a digest where only its bytes will
    do, so that rows of one key are known as such. "" for none."""
    if not key:
        return ""
    return key.decode() if _is_plain(key) else f"sha256:{hashlib.sha256(key).hexdigest()}"


def _is_plain(key: bytes) -> bool:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return False
    return 0 < len(text) <= 255 and storable_text(text) == text
