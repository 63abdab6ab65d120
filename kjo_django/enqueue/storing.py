"""Enqueue: store a job in the caller's transaction, once per queue and unique id.

The semantics of a known unique id (PJQ-14 … 16, PJQ-F1, F2): an open job is a ``duplicate``; a
completed one whose result still lives answers ``completed``; a failed one is a ``duplicate`` until
its error expires; a cancelled or expired one begins a new generation with the new payload.
"""

from __future__ import annotations

import contextlib
import math
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, NamedTuple

from django.db import connections, transaction
from django.db.models.base import ModelState
from django.db.models.constants import OnConflict
from django.utils import timezone

from kjo_django import garbage_collection, states, tracing
from kjo_django.conf import get_settings
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.wakeups import RELAY_CHANNEL, after_commit
from kjo_django.exceptions import PayloadError, StorageError
from kjo_django.ids import uuid7s
from kjo_django.messages.serializers import load_result, serializer_for
from kjo_django.models import Job, transition
from kjo_django.states import JobState
from kjo_django.store import copying, store_for
from kjo_django.store.postgres import is_psycopg3
from kjo_django.store.transactions import jobs_database


@dataclass(frozen=True, slots=True)
class EnqueueResult:
    """The answer to an enqueue; duplicates are answers, never exceptions (PJQ-27)."""

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


def check_payload_size(payload: bytes) -> bytes:
    """Return the payload, or raise ``PayloadError`` when it is over the limit."""
    limit = get_settings().max_payload_bytes
    if len(payload) > limit:
        raise PayloadError(
            f"The payload has {len(payload)} bytes; KJO['MAX_PAYLOAD_BYTES'] allows {limit}. "
            "Store the data and pass its id."
        )
    return payload


def milliseconds(value: timedelta | int | None, default: timedelta) -> int:
    """Return a result's lifetime in milliseconds, validated before anything is written (PJQ-40).

    :param value: a positive timedelta, or a positive whole number of milliseconds.
    """
    given = value = default if value is None else value
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


def store(jobs: Sequence[Job], *, revives_failed: bool = False) -> list[EnqueueResult]:
    """Store jobs and send them on their way, joining the caller's transaction.

    One INSERT for all of them; where a unique id was taken, a query tells by whom. Answers come in
    the order of the jobs.

    :param revives_failed: a failed job of the same id begins a new generation at once, instead of
        being a duplicate until its error expires (PJQ-F1).
    """
    if not jobs:
        return []
    if tracing.tracer is None:
        return _store(jobs, revives_failed)
    with tracing.tracer.enqueuing(jobs):
        return _store(jobs, revives_failed)


class Content(NamedTuple):
    """What tells a job from the others of one call."""

    unique_id: str | None
    key: str
    payload: bytes


class Contents:
    """The same of many jobs, by column: of objects that stay, one for each, Python would look
    through everything there is for garbage now and then."""

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


def store_alike(job: Job, contents: Contents) -> list[EnqueueResult]:
    """Store a job for each of ``contents``, as ``store`` does, without making an instance of each
    where its row can be written without.

    :param job: unsaved; what all of them have in common. It is not stored itself.
    """
    if tracing.tracer is None:
        return _store_alike(job, contents)
    # What it leaves with this one, all of them carry.
    with tracing.tracer.enqueuing([job] * len(contents)):
        return _store_alike(job, contents)


def _store_alike(job: Job, contents: Contents) -> list[EnqueueResult]:
    using = jobs_database()
    connection = connections[using]
    queue = get_settings().queue(job.queue)
    if (
        dispatch.is_transactional(queue)
        or any(id is not None for id in contents.unique_ids)
        or not copying.may_copy(connection, len(contents))
    ):
        each = zip(uuid7s(len(contents)), contents, strict=True)
        return _store([_like(job, id, content) for id, content in each], revives_failed=False)
    job.state = dispatch.initial_state(queue)
    with garbage_collection.paused():
        ids = uuid7s(len(contents))
        copying.copy_alike(connection, job, zip(ids, contents.keys, contents.payloads, strict=True))
        answers = [EnqueueResult("queued", id) for id in ids]
    after_commit(using, RELAY_CHANNEL, (_facts(job, id, None) for id in ids))
    return answers


def _like(job: Job, id: uuid.UUID, content: Content) -> Job:
    """Return a copy. The model's own ``__init__`` costs more than all the rest of an enqueue."""
    copy = Job.__new__(Job)
    copy.__dict__.update(job.__dict__, _state=ModelState(), id=id, **content._asdict())
    return copy


def _store(jobs: Sequence[Job], revives_failed: bool) -> list[EnqueueResult]:
    using = jobs_database()
    conf = get_settings()
    queues = {name: conf.queue(name) for name in {job.queue for job in jobs}}
    for job in jobs:
        job.state = dispatch.initial_state(queues[job.queue])
        job.queued_at = job.created_at if job.state == JobState.QUEUED else None
    if all(job.unique_id is None for job in jobs) and not any(
        dispatch.is_transactional(queue) for queue in queues.values()
    ):
        # The common case of a log transport: a single statement needs no transaction of its own.
        _insert(using, jobs)
        _tell(using, jobs, RELAY_CHANNEL)
        return [EnqueueResult("queued", job.pk) for job in jobs]
    with store_for(using).transaction(savepoint=False):
        answers = _store_unique(using, jobs, revives_failed)
        for name, queue in queues.items():
            fresh = [
                job
                for job, answer in zip(jobs, answers, strict=True)
                if job.queue == name and answer.is_new
            ]
            if fresh:
                dispatch.hand_over(fresh, queue)
                _tell(using, fresh, dispatch.channel_of(queue))
    return answers


def _insert(using: str, jobs: Sequence[Job], *, ignore_conflicts: bool = False) -> int:
    """Store rows; return how many. ``bulk_create`` would open a transaction for one, and look at 27
    placeholders a row for many."""
    connection = connections[using]
    count = len(jobs)
    if not ignore_conflicts and copying.may_copy(connection, len(jobs)):
        copying.copy_jobs(connection, jobs)
    else:
        conflicts = OnConflict.IGNORE if ignore_conflicts else None
        count = _insert_values(connection, jobs, conflicts)
    for job in jobs:
        job._state.adding, job._state.db = False, using
    return count


_FIELDS = Job._meta.local_concrete_fields
_ROW = f"({', '.join(['%s'] * len(_FIELDS))})"
_around: dict[tuple[str, Any], tuple[str, str]] = {}


def _around_rows(connection: Any, on_conflict: Any) -> tuple[str, str]:
    """Return how the statement begins and how it ends. To quote the names takes longer than to
    build a job."""
    around = _around.get((connection.vendor, on_conflict))
    if around is None:
        columns = ", ".join(connection.ops.quote_name(field.column) for field in _FIELDS)
        begin = connection.ops.insert_statement(on_conflict=on_conflict)
        end = connection.ops.on_conflict_suffix_sql(_FIELDS, on_conflict, [], [])
        around = f"{begin} kjo_job ({columns}) VALUES ", f" {end}"
        _around[connection.vendor, on_conflict] = around
    return around


def _values_of(connection: Any, job: Job) -> list[Any]:
    return [field.get_db_prep_save(getattr(job, field.attname), connection) for field in _FIELDS]


def _insert_values(connection: Any, jobs: Sequence[Job], on_conflict: Any) -> int:
    begin, end = _around_rows(connection, on_conflict)
    is_ready = connection.vendor == "postgresql" and is_psycopg3()
    values_of = copying.values_of if is_ready else _values_of
    limit = connection.features.max_query_params or 30_000
    size = min(1000, limit // len(_FIELDS))
    count = 0
    with contextlib.ExitStack() as stack:
        if len(jobs) > size:
            stack.enter_context(transaction.atomic(using=connection.alias, savepoint=False))
        cursor = stack.enter_context(connection.cursor())
        for start in range(0, len(jobs), size):
            chunk = jobs[start : start + size]
            cursor.execute(
                begin + ", ".join([_ROW] * len(chunk)) + end,
                [value for job in chunk for value in values_of(connection, job)],
            )
            count += cursor.rowcount
    return count


def _tell(using: str, jobs: Sequence[Job], channel: str) -> None:
    after_commit(using, channel, (_facts(job, job.pk, job.unique_id) for job in jobs))


def _facts(job: Job, id: uuid.UUID, unique_id: str | None) -> dict[str, Any]:
    return {"job_id": str(id), "unique_id": unique_id, "queue": job.queue, "handler": job.handler}


def _store_unique(using: str, jobs: Sequence[Job], revives_failed: bool) -> list[EnqueueResult]:
    """Insert, then resolve the unique ids that were taken."""
    named = [job for job in jobs if job.unique_id is not None]
    if _insert(using, jobs, ignore_conflicts=bool(named)) == len(jobs):
        return [EnqueueResult("queued", job.pk) for job in jobs]
    holders: dict[tuple[str, str | None], Job] = {}
    for queue in {job.queue for job in named}:
        ids = [job.unique_id for job in named if job.queue == queue]
        for start in range(0, len(ids), 1000):
            rows = Job.objects.using(using).filter(
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
            answers.append(_meet(using, job, holder, revives_failed))
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
