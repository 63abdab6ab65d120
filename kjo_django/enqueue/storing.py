"""Storing jobs and records in the caller's transaction, and sending them on their way.

A job is stored once per queue and unique id. Of a known unique id an open job is a ``duplicate``; a
completed one whose result still lives answers ``completed``; a failed one is a ``duplicate`` until
its error expires; a cancelled or expired one begins a new generation with the new payload. Where
the enqueue has a ``UniqueRule``, that decides instead: see ``unique``.

A record for a topic that other services read (an event, a redelivery in another system's format) is
stored as a row with a ``destination``: its bytes and headers as they are, not our envelope.
Publishing it completes the row, since nothing here waits for it to be consumed.

On a transactional transport the message is written with the row, in the caller's transaction. On
any other the row waits as ``pending`` (or ``failing``) for the relay. Relays and consumers are
woken once the transaction has committed: one call per transaction, not one per job. A lost call
costs time only, since every waiter polls slowly too.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Model
from django.db.models.base import ModelState

from kjo_django import garbage_collection, registry, signals, states, tracing
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import unique
from kjo_django.enqueue.handle import JobHandle
from kjo_django.enqueue.unique import UniqueRule
from kjo_django.enqueue.waiting import REPLY_CHANNELS, result_of
from kjo_django.exceptions import CoordinationError, JobExistsError, PayloadError, StorageError
from kjo_django.ids import uuid7, uuid7s
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import ORIGIN_ID, Job, transition
from kjo_django.runtime import (
    Runtime,
    current_runtime,
    database_of,
    database_of_transport,
    databases,
    get_transport,
    jobs_database,
    runtime_for,
    runtime_of,
    transport_class,
    use_database,
)
from kjo_django.states import JobState
from kjo_django.store import Store
from kjo_django.store.rows import DueJob, Publication
from kjo_django.transports.base import OutgoingRecord, Published, Transport
from kjo_django.values import MAX_PRIORITY

logger = get_logger("kjo_django")

OUTGOING = "outgoing"
"""The queue of records for topics that no queue is declared for, on the default transport."""
RELAY_CHANNEL = "kjo:relay"
MAX_REPLY_CHANNEL = 100
"""Ours are shorter; PostgreSQL refuses to be told thousands of characters."""
LISTEN_AGAIN = 10.0
"""Seconds until coordination that was away when it was to be listened to is asked again."""
_SENT = ("queued", "replaced")
"""The answers of which a message is to be sent."""
MAX_RESULT_TTL = 100 * 365 * 86_400_000
"""Milliseconds. A moment that no database can hold would fail the job after it has run."""


def check_payload_size(payload: bytes) -> bytes:
    """Return the payload, or raise ``PayloadError`` when it is over ``MAX_PAYLOAD_BYTES``."""
    limit = get_settings().max_payload_bytes
    if len(payload) > limit:
        raise too_large(len(payload), limit)
    return payload


def too_large(size: int, limit: int) -> PayloadError:
    """Return the error for a payload of so many bytes."""
    return PayloadError(
        f"The payload has {size} bytes; KJO['MAX_PAYLOAD_BYTES'] allows {limit}. "
        "Store the data and pass its id."
    )


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


observers: list[Callable[[], None]] = []
"""Each is called when an enqueue is complete, in the transaction and the database of who enqueues;
for tests of projects."""
_unfinished = threading.local()


@contextmanager
def enqueued_together(runtime: Runtime) -> Iterator[None]:
    """Let the observers be called once, when the block has ended: it stores what belongs together
    by several calls."""
    outer = getattr(_unfinished, "is_open", False)
    _unfinished.is_open = True
    try:
        yield
    finally:
        _unfinished.is_open = outer
    if observers:
        call_observers(runtime)


def call_observers(runtime: Runtime) -> None:
    """Call the observers, unless what is being enqueued is not complete."""
    if not getattr(_unfinished, "is_open", False):
        with use_database(runtime.database):
            for observe in tuple(observers):
                observe()


def store(
    jobs: Sequence[Job],
    *,
    revives_failed: bool = False,
    runtime: Runtime | None = None,
    beside: Sequence[Sequence[Model]] = (),
    is_last: bool = False,
) -> list[JobHandle[Any]]:
    """Store jobs and send them on their way, joining the caller's transaction.

    One INSERT for all of them; where a unique id was taken, a query tells by whom. Answers come in
    the order of the jobs.

    :param jobs: new ones, ``pending`` or ``waiting``, of queues of one database; one definition's,
        if they have a ``UniqueRule``.
    :param revives_failed: a failed job of the same id begins a new generation at once, instead of
        being a duplicate until its error expires.
    :param beside: rows of the workflow whose steps the jobs are, as ``Store.insert_steps`` takes
        them. Jobs that are ``waiting`` wait for other steps. None has a unique id.
    :param is_last: the caller does nothing more but commit.
    :raises JobExistsError: the rule says so of one of them.
    """
    if not jobs:
        return []
    runtime = runtime or runtime_of(jobs[0].queue)
    if (alias := runtime.database) != current_runtime().database:
        with use_database(alias):
            return store(
                jobs, revives_failed=revives_failed, runtime=runtime, beside=beside, is_last=is_last
            )
    joining = {
        queue.name: queue
        for queue in map(runtime.settings.queue, {job.queue for job in jobs})
        if transport_class(queue.transport).capabilities.transactional
    }
    with tracing.tracer.enqueuing(jobs) if tracing.tracer is not None else nullcontext():
        if joining or beside or any(job.unique_id is not None for job in jobs):
            answers = _store_with_more(jobs, joining, runtime, revives_failed, beside, is_last)
        else:
            # The common case of a log transport: one statement needs no transaction of its own.
            runtime.store.insert_jobs(jobs)
            answers = [JobHandle(job.pk, "queued") for job in jobs]
            after_commit(runtime, RELAY_CHANNEL, map(_facts, jobs))
    for job, answer in zip(jobs, answers, strict=True):
        job._state.adding, job._state.db = False, alias
        answer.database = alias
    if observers:
        call_observers(runtime)
    return answers


def _store_with_more(
    jobs: Sequence[Job],
    joining: Mapping[str, QueueConf],
    runtime: Runtime,
    revives_failed: bool,
    beside: Sequence[Sequence[Model]],
    is_last: bool,
) -> list[JobHandle[Any]]:
    """Store jobs that have unique ids, rows beside them, or messages that are stored with them.

    :param joining: those of their queues whose transport joins the transaction.
    """
    for job in jobs:
        if job.queue in joining and job.state != JobState.WAITING:
            job.state, job.queued_at = JobState.QUEUED, job.created_at
    statements, rule = runtime.store, jobs[0].unique_rule
    is_named = any(job.unique_id is not None for job in jobs)
    has_several = joining or (is_named and (len(jobs) > 1 or rule is not None))
    answers: list[JobHandle[Any]] = [JobHandle(job.pk, "queued") for job in jobs]
    # A JobExistsError leaves the caller's transaction as it was.
    with (
        statements.transaction(savepoint=rule is not None, defers=True)
        if has_several
        else nullcontext()
    ):
        if is_named:
            answers = _store_unique(jobs, revives_failed, statements)
        elif beside:
            statements.insert_steps(beside, jobs, is_last=is_last and not joining)
        else:
            statements.insert_jobs(jobs)
        answered = zip(jobs, answers, strict=True)
        _send_on([job for job, answer in answered if answer.answer in _SENT], joining, runtime)
    return answers


def _send_on(jobs: Iterable[Job], joining: Mapping[str, QueueConf], runtime: Runtime) -> None:
    """Write the messages of those whose queues are ``joining``; wake who waits for the jobs, on
    commit."""
    by_queue: dict[str, list[Job]] = {}
    for job in jobs:
        by_queue.setdefault(job.queue, []).append(job)
    for name, stored in by_queue.items():
        channel = RELAY_CHANNEL
        if sent := [job for job in stored if job.state == JobState.QUEUED]:
            dispatch_jobs(sent, joining[name])
            channel = topic_channel(joining[name].topic)
        after_commit(runtime, channel, map(_facts, stored))


def _facts(job: Job) -> dict[str, Any]:
    """Return what ``job_enqueued`` is sent with."""
    facts = {"job_id": str(job.pk), "unique_id": job.unique_id}
    return {**facts, "queue": job.queue, "handler": job.handler}


def store_alike(
    job: Job,
    unique_ids: Sequence[str | None],
    keys: Sequence[str],
    payloads: Sequence[bytes],
    runtime: Runtime,
    *,
    waits: bool = False,
) -> list[JobHandle[Any]]:
    """Store a job for each payload, as ``store`` does, without making an instance of each where
    none has a unique id.

    What tells the jobs from one another comes by column: of objects that stay, one for each job,
    Python would look through everything there is for garbage now and then.

    :param job: unsaved; what all of them have in common. It is not stored itself.
    :param waits: the jobs are steps of a workflow that wait for others.
    """
    job.state = JobState.WAITING if waits else JobState.PENDING
    if any(id is not None for id in unique_ids):
        copies, ids = [], uuid7s(len(payloads))
        for id, unique_id, key, payload in zip(ids, unique_ids, keys, payloads, strict=True):
            # The model's own ``__init__`` costs more than all the rest of an enqueue.
            copy = Job.__new__(Job)
            own = {"id": id, "unique_id": unique_id, "key": key, "payload": payload}
            copy.__dict__.update(job.__dict__, _state=ModelState(), **own)
            copies.append(copy)
        return store(copies, runtime=runtime)
    queue, statements = runtime.settings.queue(job.queue), runtime.store
    joins = is_transactional(queue) and not waits
    if joins:
        job.state, job.queued_at = JobState.QUEUED, job.created_at
    # What the tracer leaves with this one, all of them carry.
    alike = [job] * len(payloads)
    with (
        tracing.tracer.enqueuing(alike) if tracing.tracer is not None else nullcontext(),
        garbage_collection.paused(),
        statements.transaction(savepoint=False) if joins else nullcontext(),
    ):
        ids = uuid7s(len(payloads))
        contents = list(zip(ids, keys, payloads, strict=True))
        statements.insert_alike(job, contents)
        database = runtime.database
        answers: list[JobHandle[Any]] = [JobHandle(id, "queued", database=database) for id in ids]
        facts = {"unique_id": None, "queue": job.queue, "handler": job.handler}
        channel = RELAY_CHANNEL
        if joins:
            _publish_alike(job, contents, queue, runtime)
            channel = topic_channel(queue.topic)
        after_commit(runtime, channel, ({**facts, "job_id": str(id)} for id in ids))
    if observers:
        call_observers(runtime)
    return answers


def _publish_alike(
    job: Job, contents: Iterable[tuple[UUID, str, bytes]], queue: QueueConf, runtime: Runtime
) -> None:
    """Write the messages of jobs that ``store_alike`` has stored, and wake their consumers on
    commit."""
    one = Job.__new__(Job)
    one.__dict__.update(job.__dict__)
    records = []
    with use_database(runtime.database):
        for one.id, one.key, one.payload in contents:
            records.append(record_of(one, queue, job.available_at, service=runtime.service))
        publish(get_transport(queue.transport), records)
    for topic in {record.topic for record in records}:
        after_commit(runtime, topic_channel(topic))


def _store_unique(jobs: Sequence[Job], revives_failed: bool, store: Store) -> list[JobHandle[Any]]:
    """Insert, then resolve the unique ids that were taken."""
    if jobs[0].unique_rule is not None and jobs[0].unique_rule.names_jobs:
        return _store_in_windows(jobs, store)
    if store.insert_jobs(jobs, ignore_conflicts=True) == len(jobs):
        return [JobHandle(job.pk, "queued") for job in jobs]
    holders = _holders_of([job for job in jobs if job.unique_id is not None], store.alias)
    answers: list[JobHandle[Any]] = []
    for job in jobs:
        holder = holders.get((job.queue, job.unique_id)) if job.unique_id is not None else job
        if holder is None:
            raise _vanished(job)
        if holder.pk == job.pk:
            answers.append(JobHandle(job.pk, "queued"))
        else:
            answers.append(_meet(store.alias, job, holder, revives_failed))
    return answers


def _holders_of(jobs: Sequence[Job], using: str) -> dict[tuple[str, str | None], Job]:
    """Return the rows that have the unique ids of jobs, by their queues and ids."""
    ids: dict[str, list[str | None]] = {}
    for job in jobs:
        ids.setdefault(job.queue, []).append(job.unique_id)
    holders: dict[tuple[str, str | None], Job] = {}
    for queue, named in ids.items():
        for start in range(0, len(named), 1000):
            rows = Job.objects.using(using).filter(
                queue=queue, unique_id__in=named[start : start + 1000]
            )
            holders.update({(queue, row.unique_id): row for row in rows})
    return holders


_RENEWED = (
    *("handler", "key", "priority", "max_attempts", "payload", "content_type", "headers"),
    *("available_at", "expires_at", "created_at", "result_ttl"),
)
"""The columns that a new generation takes from the enqueue that begins it."""


def _vanished(job: Job) -> StorageError:
    return StorageError(
        f"The job {job.unique_id!r} of queue {job.queue!r} could not be stored: its row "
        "vanished while it was looked up. Enqueue it again."
    )


def _meet(using: str, job: Job, holder: Job, revives_failed: bool) -> JobHandle[Any]:
    """Answer an enqueue whose unique id is taken by ``holder``."""
    for _attempt in range(5):
        answer = _answer_of(holder, revives_failed)
        if answer is not None and job.unique_rule is not None:
            replaced = (
                _replace(job, holder, using) if job.unique_rule.on_conflict == "replace" else None
            )
            return replaced or _kept(job, answer)
        if answer is not None:
            return answer
        # One conditional UPDATE on state and generation: of several who revive it, one wins.
        revived = transition(
            "requeue",
            Job.objects.using(using).at(holder.pk, holder.generation).filter(state=holder.state),
            **fresh_run(job.queue),
            **{name: getattr(job, name) for name in _RENEWED},
        )
        if revived:
            job.pk, job.generation = holder.pk, holder.generation + 1
            return JobHandle(holder.pk, "queued")
        known = Job.objects.using(using).filter(pk=holder.pk).first()
        if known is None:
            raise _vanished(job)
        holder = known
    raise StorageError(f"The job {job.unique_id!r} keeps changing; enqueue it again.")


def _store_in_windows(jobs: Sequence[Job], store: Store) -> list[JobHandle[Any]]:
    """Store jobs whose unique ids end in the number of a window, see ``unique``."""
    store.take_write_lock()
    answers: dict[int, JobHandle[Any]] = {}
    # In one order, so that two transactions with the same windows do not wait for each other.
    for at in sorted(range(len(jobs)), key=lambda at: jobs[at].unique_id or ""):
        answers[at] = _store_in_window(jobs[at], store)
    return [answers[at] for at in range(len(jobs))]


def _store_in_window(job: Job, store: Store) -> JobHandle[Any]:
    name = job.unique_id or ""
    for _attempt in range(10):
        holder = unique.latest(store.alias, job.queue, name)
        if holder is not None:
            answer = _meet_in_window(job, holder, store.alias)
            if answer is not None:
                return answer
        job.unique_id = unique.numbered(name, 1 if holder is None else unique.number_of(holder) + 1)
        if store.insert_jobs([job], ignore_conflicts=True):
            return JobHandle(job.pk, "queued")
    raise StorageError(f"The job {name!r} keeps changing; enqueue it again.")


def _meet_in_window(job: Job, holder: Job, using: str) -> JobHandle[Any] | None:
    """Answer an enqueue that finds the latest job with its arguments; None: it stores another."""
    rule: UniqueRule = job.unique_rule
    if rule.unique_for is not None and (
        holder.state == JobState.CANCELLED or holder.created_at + rule.unique_for <= job.created_at
    ):
        return None
    if rule.on_conflict == "replace" and (replaced := _replace(job, holder, using)) is not None:
        return replaced
    if rule.debounce is not None:
        return None  # it has begun, and may have read what this call is about already
    if holder.state == JobState.COMPLETED:
        answer: JobHandle[Any] = JobHandle(holder.pk, "completed", "completed", result_of(holder))
    else:
        answer = JobHandle(holder.pk, "duplicate", states.to_queue(holder.status))
    return _kept(job, answer)


def _kept(job: Job, answer: JobHandle[Any]) -> JobHandle[Any]:
    """Return the answer to an enqueue that has met a job, or raise it."""
    if job.unique_rule.on_conflict == "raise":
        raise JobExistsError(
            f"{job.handler}: the job {answer.job_id} is there already, {answer.existing_state}",
            job_id=str(answer.job_id),
            existing_state=answer.existing_state,
        )
    return answer


def _replace(job: Job, holder: Job, using: str) -> JobHandle[Any] | None:
    """Give the job that is there the payload and the options of a new enqueue, in a new generation;
    None if it has begun or ended."""
    waiting = unique.lock_waiting(using, holder.pk) if holder.state in states.OPEN else None
    if waiting is None:
        return None
    rule: UniqueRule = job.unique_rule
    if rule.debounce is None or not waiting.attempts:
        job.created_at = waiting.created_at  # of the first enqueue: so long it has waited
    if rule.debounce_max is not None:
        job.available_at = min(job.available_at, job.created_at + rule.debounce_max)
    changed = transition(
        "requeue",
        Job.objects.using(using).at(waiting.pk, waiting.generation).filter(state=waiting.state),
        **fresh_run(job.queue),
        **{name: getattr(job, name) for name in _RENEWED},
    )
    if not changed:
        return None
    job.pk, job.generation, job.unique_id = waiting.pk, waiting.generation + 1, waiting.unique_id
    return JobHandle(waiting.pk, "replaced", states.to_queue(waiting.status))


def _answer_of(holder: Job, revives_failed: bool) -> JobHandle[Any] | None:
    """Return the answer, or None when the row may begin a new generation."""
    now = CLOCK.now()
    is_expired = holder.result_expires_at is not None and holder.result_expires_at <= now
    if holder.state == JobState.CANCELLED or (holder.state in states.FINAL and is_expired):
        return None
    if holder.state == JobState.FAILED and revives_failed:
        return None
    if holder.state == JobState.COMPLETED:
        return JobHandle(holder.pk, "completed", "completed", result_of(holder))
    return JobHandle(holder.pk, "duplicate", states.to_queue(holder.status))


def fresh_run(job_queue: str) -> dict[str, Any]:
    """Return the columns every new generation starts with."""
    state = initial_state(get_settings().queue(job_queue))
    return {
        "state": state,
        "attempts": 0,
        "queued_at": CLOCK.now() if state == JobState.QUEUED else None,
        "started_at": None,
        "finished_at": None,
        "lease_token": "",
        "lease_expires_at": None,
        "result": None,
        "result_expires_at": None,
        "error": "",
        "worker": "",
        "topic": "",
        "partition": None,
        "offset": None,
    }


# --- Records for others ---------------------------------------------------------------------------


def carrier_of(topic: str, transport: str | None = None) -> QueueConf:
    """Return the queue whose relay publishes to a topic: the one declared for it, else the common
    one of the default transport.

    :raises ValueError: another transport is asked for and no queue there has the topic.
    """
    conf = get_settings()
    for name in registry.queue_names():
        queue = conf.queue(name)
        if topic in queue.topics and transport in (None, queue.transport):
            return queue
    common = conf.queue(OUTGOING)
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
    id, now = uuid7(), CLOCK.now()
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
        state=initial_state(queue),
        max_attempts=1,
        payload=check_payload_size(value or b""),
        headers=stored or None,
        available_at=available_at or now,
        created_at=now,
        result_ttl=queue.result_ttl // timedelta(milliseconds=1),
        destination=topic,
    )
    job.queued_at = now if job.state == JobState.QUEUED else None
    with (
        use_database(outbox_of(queue)) as runtime,
        tracing.tracer.enqueuing([job]) if tracing.tracer is not None else nullcontext(),
        runtime.store.transaction(savepoint=False),
    ):
        job.save(using=runtime.database, force_insert=True)
        dispatch_jobs([job], queue)
    return job


def outbox_of(queue: QueueConf) -> str:
    """Return the alias of the database in which a record for this queue's relay is stored: that of
    the queue; for the common one, the database that this thread works with."""
    return jobs_database() if queue.name == OUTGOING else database_of(queue.name)


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


# --- The message of a job, and its way to the transport -------------------------------------------


def is_transactional(queue: QueueConf, database: str | None = None) -> bool:
    """Return whether the queue's transport publishes inside the transaction that stores the job.

    :param database: the alias of the database with the job; by default that of this thread. Records
        for others may be stored in another one than their transport writes to.
    """
    if not transport_class(queue.transport).capabilities.transactional:
        return False
    if queue.name != OUTGOING or len(databases()) == 1:
        return True
    return database_of_transport(queue.transport) == (database or jobs_database())


def channel_of(queue: QueueConf) -> str:
    """Return whom to wake for a job of this queue: its consumers, or the relay before them."""
    return topic_channel(queue.topic) if is_transactional(queue) else RELAY_CHANNEL


def publish(transport: Transport, records: Sequence[OutgoingRecord]) -> list[Published]:
    """Publish records and return the transport's answers; a tracer gets a span around it.

    Whatever sends a record calls this. On a transactional transport the record is a row of the
    caller's transaction, and there is no span but the one of what stored it.
    """
    if tracing.tracer is None or transport.capabilities.transactional:
        return transport.publish(records)
    with tracing.tracer.publishing(transport.alias, records) as traced:
        return transport.publish(traced)


def record_of(
    job: Job | DueJob,
    queue: QueueConf,
    available_at: datetime | None = None,
    *,
    service: str | None = None,
) -> OutgoingRecord:
    """Return the message of a job's next attempt; of a record for others, that record.

    :param service: the name of this service; by default that of the settings.
    """
    if job.destination:
        headers = names.from_row(job.headers)
        raw_key = headers.pop(names.RAW_KEY, None)
        is_tombstone = headers.pop(names.NO_VALUE, None) is not None
        if names.REDELIVERY in headers:
            # A requeue asks for it to be handled again.
            headers[names.REDELIVERY] = names.message_id(str(job.id), job.generation).encode()
        return OutgoingRecord(
            topic=job.destination,
            key=raw_key if raw_key is not None else job.key.encode() or None,
            value=None if is_tombstone else bytes(job.payload),
            headers=headers,
            available_at=available_at,
        )
    id = str(job.id)
    # Without a key of its own a job is its own key: partitions fill evenly, nothing waits.
    key: bytes | None = (job.key or id).encode()
    value: bytes | None = bytes(job.payload)
    service = current_runtime().service if service is None else service
    origin = (job.headers or {}).get(ORIGIN_ID) or id
    headers = names.from_row(job.headers) if job.headers else {}
    headers[names.ID] = names.message_id(origin, job.generation).encode()
    headers[names.TYPE] = job.handler.encode()
    headers[names.JOB_ID] = id.encode()
    headers[names.SERVICE] = service.encode()
    headers[names.GENERATION] = b"%d" % job.generation
    headers[names.ATTEMPT] = b"%d" % (job.attempts + 1)
    headers[names.CONTENT_TYPE] = job.content_type.encode()
    if job.headers:
        # A message nobody enqueued here keeps the key it came with.
        key = headers.pop(names.RAW_KEY, key)
        key = key if headers.pop(names.NO_KEY, None) is None else None
        value = value if headers.pop(names.NO_VALUE, None) is None else None
    if not job.priority:
        return OutgoingRecord(queue.topic, value, key, headers, available_at)
    topic = queue.levels[queue.level_of(job.priority)]
    return OutgoingRecord(topic, value, key, headers, available_at, priority=job.priority)


def initial_state(queue: QueueConf) -> JobState:
    """Return the state a job is stored in: on a transactional transport it is queued at once."""
    return JobState.QUEUED if is_transactional(queue) else JobState.PENDING


def dispatch_jobs(jobs: Sequence[Job], queue: QueueConf, *, ahead: bool = False) -> None:
    """Send stored jobs of one queue on their way, inside the caller's transaction.

    Transactional transport: publish their messages now. Otherwise: wake the relay on commit.

    :param ahead: let those without a key, whose order is nobody's, come before others of their
        priority, where the transport knows priorities.
    """
    runtime = current_runtime()
    if not is_transactional(queue):
        after_commit(runtime, RELAY_CHANNEL)
        return
    records = [record_of(job, queue, job.available_at) for job in jobs]
    if ahead:
        records = [
            replace(record, priority=min(MAX_PRIORITY, record.priority + (not job.key)))
            for record, job in zip(records, jobs, strict=True)
        ]
    publish(get_transport(queue.transport), records)
    forwarded = [Publication(job, job.destination, None, None) for job in jobs if job.destination]
    if forwarded:
        record_forwarded(runtime.store, forwarded, CLOCK.now())
    for topic in {record.topic for record in records} or {queue.topic}:
        after_commit(runtime, topic_channel(topic))


def is_waited_for(job: Job | DueJob) -> bool:
    """Whether others of its key wait until a record has been handled; that completes its row."""
    return names.PARKED_ROW in (job.headers or {})


def record_forwarded(store: Store, published: Sequence[Publication], now: datetime) -> None:
    """Record that records for others have been published.

    That completes the row of a record; of a record that others of its key wait for, the row becomes
    queued instead.
    """
    store.complete_forwarded([one for one in published if not is_waited_for(one.job)], now)
    for job in [one.job for one in published if is_waited_for(one.job)]:
        rows = Job.objects.using(store.alias).at(job.id, job.generation).exclude(destination="")
        transition("publish", rows, topic=job.destination, queued_at=now)


# --- Waking relays, consumers and waiters ---------------------------------------------------------


def topic_channel(topic: str) -> str:
    """Return the channel that tells of records a transactional transport got."""
    return f"kjo:topic:{topic}"


def wake_consumers(transport: Transport, records: Iterable[OutgoingRecord]) -> None:
    """Wake those who consume what a transactional transport was given, when that is committed. For
    records that no job was stored with."""
    runtime = runtime_for(database_of_transport(transport.alias))
    for topic in sorted({record.topic for record in records}):
        after_commit(runtime, topic_channel(topic))


@dataclass(slots=True, eq=False)
class AfterCommit:
    """The wake-ups and signals of one transaction."""

    runtime: Runtime
    channels: set[str] = field(default_factory=set)
    enqueued: list[dict[str, Any]] = field(default_factory=list)

    def send(self) -> None:
        """Send them; called once the transaction is committed."""
        wake(self.runtime, *self.channels)
        for facts in self.enqueued:
            signals.job_enqueued.send_robust(sender=facts["handler"], **facts)


def after_commit(runtime: Runtime, channel: str, enqueued: Iterable[dict[str, Any]] = ()) -> None:
    """Wake ``channel`` and send ``job_enqueued`` when the current transaction commits.

    Outside a transaction it happens at once; rolled back, it never happens.

    :param runtime: that of the database with the transaction.
    """
    connection = transaction.get_connection(runtime.database)
    after, is_new = AfterCommit(runtime), True
    if connection.in_atomic_block and connection.run_on_commit:
        savepoints, function, _robust = connection.run_on_commit[-1]
        last = getattr(function, "__self__", None)
        # Only an entry of the same savepoints shares this job's fate.
        if isinstance(last, AfterCommit) and savepoints == set(connection.savepoint_ids):
            after, is_new = last, False
    after.channels.add(channel)
    if signals.job_enqueued.receivers:
        after.enqueued.extend(enqueued)
    if is_new:
        transaction.on_commit(after.send, using=runtime.database, robust=True)


def wake(runtime: Runtime, *channels: str) -> None:
    """Wake whoever listens on one of the channels, now; coordination that is out of reach is
    logged, no more.

    A call is worth little time, and a web request or a lane waits for it: a circuit breaker keeps
    callers from waiting for a server that does not answer.
    """
    breaker, began = runtime.wake_breaker, runtime.clock.monotonic()
    if breaker.is_open():
        return
    try:
        runtime.coordination.notify(*channels)
    except CoordinationError as error:
        breaker.record_failure(began)
        called = ", ".join(channels)
        logger.warning("Could not wake %s, it will find out by polling: %s", called, error)
    else:
        breaker.record_success()


def notify_waiters(channels: Collection[str]) -> None:
    """Wake those who wait for jobs that have ended; a lost call costs them time only.

    A channel came in a message's header, where anybody may have written anything.
    """
    known = sorted(
        name
        for name in channels
        if len(name) <= MAX_REPLY_CHANNEL and name.startswith(REPLY_CHANNELS) and "\0" not in name
    )
    if known:
        wake(current_runtime(), *known)
