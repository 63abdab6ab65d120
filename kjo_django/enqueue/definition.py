"""``@job``: a function that can be enqueued, by a call or by a model's save."""

from __future__ import annotations

import functools
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import repeat
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    Protocol,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from django.core.exceptions import ImproperlyConfigured, SynchronousOnlyOperation
from django.db import models, router, transaction
from django.db.models.signals import class_prepared, post_save
from django.utils import timezone

from kjo_django import registry
from kjo_django.clock import CLOCK
from kjo_django.conf import ScheduleOptions, read_schedule
from kjo_django.enqueue import unique
from kjo_django.enqueue.coroutines import awaited_as, coroutine_error, from_coroutine
from kjo_django.enqueue.handle import JobHandle, P, R, R_co
from kjo_django.enqueue.storing import (
    check_payload_size,
    store,
    store_alike,
    too_large,
)
from kjo_django.exceptions import Delay, PayloadError
from kjo_django.ids import uuid7
from kjo_django.messages.headers import inherited
from kjo_django.messages.serializers import Serializer, storable_text
from kjo_django.models import Job
from kjo_django.retries import LONGEST_DELAY, OwnBackoff, backoff_of, error_types
from kjo_django.running_job import Run
from kjo_django.runtime import Runtime, database_of, runtime_of
from kjo_django.timetables import cron_expression, zone_name
from kjo_django.values import (
    MOST_AT_ONCE,
    attempts,
    did_you_mean,
    duration,
    flag,
    lifetime,
    priority,
    queue_name,
    rate,
    refuse_unknown,
    text,
    texts,
    timedelta_of,
    whole,
)

Coro = Coroutine[Any, Any, R]
"""What a call of a coroutine function returns."""
Context = TypeVar("Context", bound=Run)
"""How a function annotates the context it takes: a ``JobContext``, which is of a layer above."""


@dataclass(frozen=True, slots=True)
class EnqueueOptions:
    """What ``using(...)`` has set for one enqueue; ``JobDefinition.using`` says what each means.
    None leaves it to the job and the settings.

    Durations may be given in seconds; they are kept as timedeltas.
    """

    id: str | None = None
    key: str | None = None
    delay: timedelta | None = None
    run_at: datetime | None = None
    expires_at: datetime | None = None
    max_attempts: int | None = None
    result_ttl: timedelta | None = None
    queue: str | None = None
    priority: int | None = None
    headers: Mapping[str, str] | None = None
    unique_for: timedelta | None = None
    unique_by: Sequence[str] | None = None
    debounce: timedelta | None = None
    debounce_max: timedelta | None = None
    on_conflict: str | None = None

    def __post_init__(self) -> None:
        if self.id is not None:
            _check_id(self.id)
        if self.key is not None and not (isinstance(self.key, str) and len(self.key) <= 255):
            raise ValueError("key must be text of at most 255 characters")
        _check_storable(self.key or "", "key")
        if self.delay is not None and self.run_at is not None:
            raise ValueError("Give delay or run_at, not both")
        for name in ("run_at", "expires_at"):
            if getattr(self, name) is not None:
                _check_moment(getattr(self, name), name)
        if self.headers is not None and not _are_headers(self.headers):
            # A header nobody can encode would stop the relay, which meets it later.
            raise ValueError("headers must be a dict of text to text that UTF-8 can encode")
        for name in _CONVERSIONS:
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, _converted(name, value))
        unique.convert(self)


def _converted(name: str, value: Any) -> Any:
    try:
        return _CONVERSIONS[name](value)
    except ValueError as error:
        raise ValueError(f"{name} must be {error}, not {value!r:.80}") from None


class UsingOptions(TypedDict, total=False):
    """The options of ``using()`` for type checkers; the method says what they mean."""

    id: str | None
    key: str | None
    delay: Delay | None
    run_at: datetime | None
    expires_at: datetime | None
    max_attempts: int | None
    result_ttl: Delay | None
    queue: str | None
    priority: int | None
    headers: Mapping[str, str] | None
    unique_for: Delay | None
    unique_by: Sequence[str] | None
    debounce: Delay | None
    debounce_max: Delay | None
    on_conflict: Literal["keep", "replace", "raise"] | None


def _delay(value: Any) -> timedelta:
    """A delay; one that is over already is as good as none."""
    found = timedelta_of(value)
    if not (isinstance(found, timedelta) and found <= LONGEST_DELAY):
        most = LONGEST_DELAY.days
        raise ValueError(f"a timedelta or number of seconds, of at most {most} days")
    return found


_CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "delay": _delay,
    "max_attempts": attempts,
    "priority": priority,
    "result_ttl": lifetime,
}
"""Options of ``using()`` that are converted, and how."""


def _check_moment(moment: Any, name: str) -> None:
    if not isinstance(moment, datetime) or timezone.is_naive(moment):
        raise ValueError(f"{name} must be an aware datetime")
    if not 1970 <= moment.year < 9000:
        # No page could show it: other time zones do not have it.
        raise ValueError(f"{name} must be between the years 1970 and 9000, not {moment}")


def _are_headers(headers: Any) -> bool:
    return isinstance(headers, Mapping) and all(
        isinstance(part, str) and storable_text(part) == part
        for item in headers.items()
        for part in item
    )


@dataclass(frozen=True, slots=True)
class Step:
    """A job and its payload, to be put into a chain, a group or a workflow."""

    job: JobDefinition[..., Any]
    """The job, with the options that ``using()`` has given it."""
    payload: dict[str, Any]
    """The arguments that it is called with."""


class JobDefinition(Generic[P, R_co]):
    """The job that ``@job`` makes from a function. A plain call runs the function immediately;
    ``enqueue`` lets a worker run it later.

    For type checkers it has the function's arguments, without the context, and its result.
    """

    def __init__(self, handler: registry.Handler, options: EnqueueOptions | None = None) -> None:
        self.handler = handler
        """The function and the options of ``@job``; for this package's own use."""
        self.options: EnqueueOptions = options or EnqueueOptions()
        """What ``using()`` has set; for this package's own use."""
        self._unique = unique.rule_of(self.options, handler)
        functools.update_wrapper(self, handler.function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the function directly, as if it were not a job. It is called with exactly these
        arguments: pass the context first if the function takes one. Nothing is stored.
        """
        return self.handler.function(*args, **kwargs)

    def __repr__(self) -> str:
        return f"<job {self.handler.name}>"

    @property
    def name(self) -> str:
        """The registered name, which is stored with every job."""
        return self.handler.name

    def using(self, **options: Unpack[UsingOptions]) -> JobDefinition[P, R_co]:
        """Return a copy of the job, with options for the jobs that this copy enqueues.

        Options that you do not give are those of the copied job, so
        ``using(delay=60).using(key="a")`` sets both. For an option that is None, the value of
        ``@job`` is used, then that of the queue and the settings.

        :param id: a unique id, text of 1 to 255 characters: there is one job for each queue and id.
            If there is one already, an enqueue stores nothing and returns that job's handle, whose
            ``answer`` is ``"duplicate"`` or ``"completed"``; see ``on_conflict``. When that job was
            cancelled, or its result is no longer kept, the id can be used again. Example:
            ``id="order-7"``.
        :param key: jobs with this key run one at a time and in order; it replaces the key of
            ``@job``. Text of at most 255 characters; an empty text means no order. Example:
            ``key="customer-3"``.
        :param delay: the time from the enqueue until the job is due, a timedelta or seconds, at
            most ten years. The job starts later if no lane is free. Not with ``run_at``. Example:
            ``delay=300``.
        :param run_at: the moment at which the job is due, an aware datetime. Not with ``delay``.
            Example: ``run_at=timezone.now() + timedelta(days=1)``.
        :param expires_at: the moment, an aware datetime, after which no attempt of the job is
            started. A job that has not started by then becomes a dead letter with the reason
            ``expired``. Example: ``expires_at=timezone.now() + timedelta(minutes=10)``.
        :param max_attempts: number of executions, the first one included, before the job becomes a
            dead letter. Example: ``max_attempts=1``.
        :param result_ttl: how long the result or error of the job is kept after its end, a
            timedelta or seconds. Example: ``result_ttl=timedelta(days=1)``.
        :param queue: another queue than that of ``@job``. A handler must use it, or
            ``KJO["QUEUES"]`` must declare it; otherwise the enqueue raises a ValueError. Example:
            ``queue="default"``.
        :param priority: from -100 to 100, the highest first, instead of that of ``@job``.
            Example: ``priority=50``.
        :param headers: texts by name that are sent with the job, outside its payload; the handler
            reads them in ``context.headers``. A job that a handler enqueues gets the trace and the
            ``correlation-id`` of the running job, unless you give others. Example:
            ``headers={"correlation-id": "request-17"}``.
        :param unique_for: within this time, a timedelta or seconds, only the first of the enqueues
            with the same arguments stores a job. Replaces that of ``@job``; not with ``id``.
            Example: ``unique_for=3600``.
        :param unique_by: the names of the arguments that ``unique_for`` and ``debounce`` compare;
            with an empty list none is compared, so there is one job. Example:
            ``unique_for=3600, unique_by=[]``.
        :param debounce: of the enqueues with the same arguments only the last one runs, after no
            further one has come for this time, a timedelta or seconds. Not with ``id``, ``delay``
            and ``run_at``. Example: ``debounce=30``.
        :param debounce_max: a debounced job is due at the latest this time after the first enqueue,
            a timedelta or seconds. Example: ``debounce=30, debounce_max=300``.
        :param on_conflict: what to do if there is already a job with the id or within the window:
            ``"keep"`` that job (the default); ``"replace"`` it if it is not running and has not
            ended; or ``"raise"`` ``JobExistsError``. Example:
            ``id="order-7", on_conflict="replace"``.
        :raises TypeError: there is no such option.
        :raises ValueError: a value is not valid, or two options exclude each other.
        """
        refuse_unknown(options, UsingOptions.__annotations__, "using")
        given: dict[str, Any] = {**options}  # durations, which the options keep as timedeltas
        return JobDefinition(self.handler, replace(self.options, **given))

    def enqueue(self, /, *arguments: P.args, **payload: P.kwargs) -> JobHandle[R_co]:
        """Store a job that will call the function with this payload, given by keyword, and return a
        handle to follow it.

        The job is part of the caller's transaction: it is rolled back with it and never runs before
        its commit. For a queue with its own database, this is the transaction that is open on that
        database.

        :raises TypeError: the function does not take these arguments.
        :raises PayloadError: the payload cannot be serialized or is too large. Nothing is written.
        :raises JobExistsError: with ``on_conflict="raise"``, if there is such a job. Nothing is
            written.
        :raises ValueError: the queue is not declared, or the key is too long.
        """
        if arguments:
            raise TypeError(
                f"{self.name}.enqueue() takes the arguments by keyword: "
                f"{self.handler.example_of('enqueue')}, not by place"
            )
        runtime = runtime_of(self.options.queue or self.handler.options.queue)
        key, data = self._key_and_bytes(payload, self.options.id, runtime)
        row = new_job(self.options, self.handler.options, key, data, runtime)
        try:
            if self._unique is not None:
                make_unique(self, row, payload)
            return store([row], runtime=runtime)[0]
        except SynchronousOnlyOperation:
            raise coroutine_error("enqueue", self.handler.example_of("aenqueue")) from None

    def step(self, /, **payload: Any) -> Step:
        """Return a step for a chain, a group or a workflow. The step is checked when the workflow
        is enqueued.

        :param payload: the arguments by keyword. A step of a chain can omit the argument that gets
            the result of the step before.
        """
        return Step(self, payload)

    async def aenqueue(self, /, *arguments: P.args, **payload: P.kwargs) -> JobHandle[R_co]:
        """``enqueue`` from asynchronous code; raises the same errors."""
        return await from_coroutine(self.enqueue)(*arguments, **payload)

    @awaited_as("sync_to_async(job.enqueue_many)(payloads)")
    def enqueue_many(
        self, payloads: Iterable[Mapping[str, Any]], *, ids: Iterable[str] | None = None
    ) -> list[JobHandle[R_co]]:
        """Store many jobs with few statements (on PostgreSQL by COPY), all or none, and return a
        handle for each, in their order.

        :param payloads: the arguments of each job by name.
        :param ids: a unique id for each payload; each handle's ``is_new`` says whether its job was
            stored.
        :raises ValueError: there is not one id for each payload. Nothing is written.
        :raises TypeError: the function does not take the arguments of a payload.
        :raises PayloadError: a payload cannot be serialized or is too large. A note on the
            exception says which. Nothing is written.
        :raises ValueError: there are more payloads than ids, or fewer.
        """
        wanted: Iterable[tuple[Mapping[str, Any], str | None]]
        if ids is None:
            wanted = zip(payloads, repeat(self.options.id))
        else:
            payloads, ids = list(payloads), list(ids)
            if len(payloads) != len(ids):
                raise ValueError(
                    f"enqueue_many() needs an id for each payload: there are {len(payloads)} "
                    f"payloads and {len(ids)} ids"
                )
            wanted = zip(payloads, ids, strict=True)
        runtime = runtime_of(self.options.queue or self.handler.options.queue)
        rule = self._unique if ids is None else unique.rule_for_ids(self.options)
        unique_ids: list[str | None] = []
        keys: list[str] = []
        data: list[bytes] = []
        try:
            for each, id in wanted:
                payload = dict(each)
                key, one = self._key_and_bytes(payload, id, runtime)
                if rule is not None and rule.names_jobs:
                    id = unique.unique_name(rule, self.handler, payload)
                    key = rule.key_of(key, id)
                unique_ids.append(id)
                keys.append(key)
                data.append(one)
        except Exception as error:
            error.add_note(f"Raised by payloads[{len(data)}] of enqueue_many().")
            raise
        if not data:
            return []
        alike = new_job(self.options, self.handler.options, keys[0], data[0], runtime)
        if rule is not None:
            rule.apply_to(alike)
        return store_alike(alike, unique_ids, keys, data, runtime)

    def _key_and_bytes(
        self, payload: dict[str, Any], id: str | None, runtime: Runtime
    ) -> tuple[str, bytes]:
        """Return the ordering key and the serialized payload of a job, validated."""
        problem = self.handler.check_arguments(payload)
        if problem is not None:
            raise TypeError(f"{self.name}: {problem}")
        if id is not None and id is not self.options.id:
            _check_id(id)
        key = self.options.key
        if key is None:
            key = "" if self.handler.options.key is None else self.handler.key_of(payload)
            if len(key) > 255:
                raise ValueError(f"{self.name}: the key has {len(key)} characters, 255 are allowed")
            if key:
                _check_storable(key, f"{self.name}: the key")
        data = self.handler.options.serializer.dumps(payload)
        if len(data) > runtime.settings.max_payload_bytes:
            raise too_large(len(data), runtime.settings.max_payload_bytes)
        return key, data


# Functions, not methods: callers of a job have nothing to do with rows, nor do their type checkers.


def unsaved_job(definition: JobDefinition[..., Any], payload: dict[str, Any]) -> Job:
    """Return the unsaved row of a job; everything is validated here, before any write."""
    options = definition.options
    runtime = runtime_of(options.queue or definition.handler.options.queue)
    key, data = definition._key_and_bytes(payload, options.id, runtime)
    row = new_job(options, definition.handler.options, key, data, runtime)
    make_unique(definition, row, payload)
    return row


def make_unique(definition: JobDefinition[..., Any], job: Job, payload: Mapping[str, Any]) -> None:
    """Have ``store`` treat an unsaved job with these arguments as the definition's options say."""
    if (rule := definition._unique) is None:
        return
    if rule.names_jobs:
        job.unique_id = unique.unique_name(rule, definition.handler, payload)
        job.key = rule.key_of(job.key, job.unique_id)
    rule.apply_to(job)


def new_job(
    given: EnqueueOptions,
    declared: registry.HandlerOptions,
    key: str,
    payload: bytes,
    runtime: Runtime,
) -> Job:
    """Return the unsaved row of a job with everything resolved.

    :param given: the options of this enqueue; what they leave open ``declared`` says, and what that
        leaves open its queue.
    :param payload: ``dumped`` by the declared serializer.
    """
    name = known_queue(given.queue) if given.queue else declared.queue
    queue = runtime.settings.queue(name)
    is_limited = declared.rate is not None or declared.concurrency is not None
    if is_limited and given.queue and not runtime.holds(declared.queue):
        raise ValueError(
            f"{declared.name}: its limits hold within one database, and the queue {name!r} has "
            f"another one than its own, {declared.queue!r}: see KJO['QUEUES'][…]['database']."
        )
    result_ttl = given.result_ttl or declared.result_ttl or queue.result_ttl
    now = CLOCK.now()
    priority = declared.priority if given.priority is None else given.priority
    if priority and (key or declared.key is not None):
        priority = queue.keyed_priority(priority)
    return Job(
        id=uuid7(),
        queue=queue.name,
        handler=declared.name,
        unique_id=given.id,
        key=key,
        # Where a queue has levels, jobs without a priority are told from those of lower levels.
        priority=priority or (None if len(queue.levels) == 1 else 0),
        max_attempts=given.max_attempts or declared.max_attempts or queue.max_attempts,
        payload=payload,
        content_type=declared.serializer.content_type,
        headers={**inherited(), **(given.headers or {})} or None,
        available_at=given.run_at or (now + given.delay if given.delay else now),
        expires_at=given.expires_at,
        created_at=now,
        result_ttl=result_ttl // timedelta(milliseconds=1),
    )


def dumped(payload: Any, serializer: Serializer) -> bytes:
    """Return a payload as it is stored and sent.

    :raises PayloadError: it cannot be serialized or is too large.
    """
    return check_payload_size(serializer.dumps(payload))


def known_queue(name: str, also: Iterable[str] = ()) -> str:
    """Return the name, or refuse a queue that no worker would ever consume.

    :param also: names that are allowed besides those of queues.
    """
    known = list(dict.fromkeys([*registry.queue_names(), *also]))
    if name not in known:
        hint = did_you_mean(name, known, f"Known: {', '.join(known)}.")
        raise ValueError(f"No queue is named {name!r}; declare it in KJO['QUEUES']. {hint}")
    return name


def _key(value: Any) -> Any:
    if not callable(value):
        try:
            text(value)
        except ValueError:
            raise ValueError("the name of an argument, or a function of the arguments") from None
    return value


def _serializer(value: Any) -> Any:
    if not all(hasattr(value, name) for name in ("content_type", "dumps", "loads")):
        raise ValueError("an object with content_type, dumps() and loads()")
    return value


def _schedule(value: Any) -> dict[str, Any]:
    if isinstance(value, str):
        return {"cron": cron_expression(value)}
    if isinstance(value, timedelta):
        return {"every": value}
    if not isinstance(value, Mapping):
        raise ValueError("a cron expression, a timedelta or a dict as in KJO['SCHEDULES']")
    return dict(value)


MOST_SLOTS = 1000
"""The largest number of jobs that a limit lets run at once."""
_BELONG_TO = {"burst": "rate", "rate_key": "rate", "concurrency_key": "concurrency"}
"""Options of ``@job`` that mean something beside another one only."""
_CHECKS: Mapping[str, Callable[[Any], Any]] = {
    "queue": queue_name,
    "key": _key,
    "priority": priority,
    "atomic": flag,
    "database_only": flag,
    "takes_context": flag,
    "serializer": _serializer,
    "batch": whole(1),
    "max_attempts": attempts,
    "timeout": duration,
    "backoff": backoff_of,
    "retry_on": error_types,
    "give_up_on": error_types,
    "result_ttl": lifetime,
    "rate": rate,
    "burst": whole(1, MOST_AT_ONCE),
    "rate_key": _key,
    "concurrency": whole(1, MOST_SLOTS),
    "concurrency_key": _key,
    "redact": texts,
    "schedule": _schedule,
    "timezone": zone_name,
    **unique.CHECKS,
}
"""Every option of ``@job`` but its name, and what it must be."""


class JobOptions(TypedDict, total=False):
    """The options of ``@job`` for type checkers, without those two that change how the function is
    called."""

    name: str | None
    queue: str
    key: str | Callable[..., Any] | None
    priority: int
    max_attempts: int | None
    timeout: Delay | None
    backoff: OwnBackoff | Delay | Sequence[Delay] | None
    retry_on: type[BaseException] | Sequence[type[BaseException]]
    give_up_on: type[BaseException] | Sequence[type[BaseException]]
    result_ttl: Delay | None
    atomic: bool
    database_only: bool
    serializer: Serializer
    rate: str | None
    burst: int
    rate_key: str | Callable[..., Any] | None
    concurrency: int | None
    concurrency_key: str | Callable[..., Any] | None
    redact: Sequence[str]
    schedule: str | timedelta | Mapping[str, Any] | None
    timezone: str | None
    unique_for: Delay | None
    unique_by: Sequence[str] | None
    debounce: Delay | None
    debounce_max: Delay | None
    on_conflict: Literal["keep", "replace", "raise"] | None


class JobDecorator(Protocol):
    """What ``@job(…)`` returns: it makes a job of a function, sync or ``async def``."""

    @overload
    def __call__(self, function: Callable[P, Coro[R]], /) -> JobDefinition[P, R]: ...
    @overload
    def __call__(self, function: Callable[P, R], /) -> JobDefinition[P, R]: ...


class ContextJobDecorator(Protocol):
    """What ``@job(takes_context=True)`` returns: the function's first argument is the context."""

    @overload
    def __call__(self, f: Callable[Concatenate[Context, P], Coro[R]], /) -> JobDefinition[P, R]: ...
    @overload
    def __call__(self, f: Callable[Concatenate[Context, P], R], /) -> JobDefinition[P, R]: ...


BatchJobDecorator = Callable[[Callable[..., Any]], JobDefinition[..., Any]]


@overload
def job(function: Callable[P, Coro[R]], /) -> JobDefinition[P, R]: ...
@overload
def job(function: Callable[P, R], /) -> JobDefinition[P, R]: ...
@overload
def job(*, takes_context: Literal[False] = ..., **options: Unpack[JobOptions]) -> JobDecorator: ...
@overload
def job(*, takes_context: Literal[True], **options: Unpack[JobOptions]) -> ContextJobDecorator: ...
@overload
def job(*, batch: int, **options: Unpack[JobOptions]) -> BatchJobDecorator: ...
def job(function: Any = None, /, *, name: str | None = None, **options: Any) -> Any:
    """Declare a function, sync or ``async def``, as a job's handler.

    Durations are timedeltas or numbers of seconds.

    :param name: the registered name, ``<app label>.<function>`` if not given; at most 100
        characters. It is stored with every job: give the old name before you rename a function that
        has open jobs. Example: ``name="shop.remind"``.
    :param queue: the queue of its jobs. Put slow jobs into another queue than urgent ones: a worker
        can serve a part of the queues. Example: ``queue="mails"``.
    :param key: the name of an argument, or a function of the arguments. Jobs with the same value
        run one at a time, in the order in which they were enqueued. Jobs without a key have no
        order. Example: ``key="order_id"``.
    :param priority: from -100 to 100; waiting jobs with the highest priority run first. On Kafka
        and Redis Streams it has an effect only if the queue has several ``priorities``. A job with
        a key has the priority of its level. Example: ``priority=50``.
    :param max_attempts: number of executions, the first one included, before a job becomes a dead
        letter; by default that of the queue, else ``KJO["MAX_ATTEMPTS"]``. Use 1 for a job that
        must not run again after an error. Example: ``max_attempts=3``.
    :param timeout: the maximum run time of an attempt, a timedelta or seconds; after it the attempt
        has failed, and the next one follows. By default that of the queue, else ``KJO["TIMEOUT"]``.
        Example: ``timeout=60``.
    :param backoff: the delay before the next attempt: ``exponential(2, max=600)``, a delay, an
        ascending list of delays whose last one repeats, or a function of the failed attempt's
        number and its error. Delays are timedeltas or seconds. By default it doubles from
        ``KJO["BACKOFF_BASE"]`` to ``KJO["BACKOFF_MAX"]``. Example: ``backoff=[1, 10, 60]``.
    :param retry_on: the exceptions after which there is another attempt, in addition to ``Retry``
        and those that pause; after others the job becomes a dead letter immediately. By default all
        exceptions. Example: ``retry_on=(ConnectionError, TimeoutError)``.
    :param give_up_on: the exceptions after which the job becomes a dead letter immediately. Use it
        for errors that another attempt cannot resolve, such as wrong input. It has precedence over
        ``retry_on``. Example: ``give_up_on=ValueError``.
    :param result_ttl: how long a job's result or error is kept after its end, a timedelta or
        seconds; by default that of the queue, else ``KJO["RESULT_TTL"]``. During this time, an
        enqueue with the ``id`` of a completed job returns its result. Example:
        ``result_ttl=timedelta(days=1)``.
    :param atomic: True: the handler runs in the one transaction that also records the outcome, so
        its writes to the database happen once. False: it runs outside any transaction, under a
        renewed lease, and its effects are repeated if the worker dies before the outcome is
        recorded. Use False for slow calls to other systems, with ``context.idempotency_key``, and
        if others must see its writes before it ends. Example: ``atomic=False``.
    :param database_only: True promises that the handler has effects only in the job's database: no
        mail, no call, no file, no cache. Then its jobs share a transaction without savepoints; if
        one fails, all jobs of its group are undone and run again with savepoints, in the same
        attempt. It makes quick handlers cheaper. Example: ``database_only=True``.
    :param takes_context: pass a ``JobContext`` as the first argument; it is not an argument of
        ``enqueue``. It has the idempotency key, the number of the attempt, progress, requests to
        end early, and the other steps of a workflow. Example: ``takes_context=True``.
    :param batch: the maximum number of jobs in one call: the function gets a list of ``BatchItem``
        instead of arguments, and returns None or a list with one result for each. It is called with
        the jobs that are ready, and does not wait for a full batch. Not with ``takes_context``.
        Example: ``batch=100``.
    :param serializer: the object that converts payloads and results to bytes, with
        ``content_type``, ``dumps()`` and ``loads()``. Use it for arguments or results that are not
        JSON, or for a format that other programs read. Example: ``serializer=JSON``.
    :param rate: how many of its jobs all workers together start per period: ``"5/s"``, ``"100/m"``,
        ``"10/30s"``. Further jobs wait; they occupy no lane and spend no attempt. Retries are
        starts, too. Use it for a service that limits the number of calls. Example:
        ``rate="100/m"``.
    :param burst: how many jobs can start together if none has started for some time; with ``rate``.
        In its period at most ``rate + burst - 1`` start. Example: ``rate="10/s", burst=20``.
    :param rate_key: the name of an argument, or a function of the arguments: each value has a
        separate rate. With ``rate``. Example: ``rate="5/s", rate_key="order_id"``.
    :param concurrency: how many of its jobs run at the same time in all workers together. Others
        wait, and occupy no lane. Use it for a limited resource, such as memory or licences.
        Example: ``concurrency=3``.
    :param concurrency_key: the name of an argument, or a function of the arguments: the jobs of
        each value are counted separately. With ``concurrency``. Example:
        ``concurrency=1, concurrency_key="order_id"``.
    :param redact: fields of payloads and results that no screen shows, in addition to those of
        ``KJO["REDACT"]``: those whose name contains one of these texts, in upper or lower case.
        They are stored and sent unchanged. Example: ``redact=["iban", "birthday"]``.
    :param schedule: enqueue the job periodically: a cron expression, a timedelta, or a dict of
        options as in ``KJO["SCHEDULES"]``. The schedule has the job's name.
        Example: ``schedule="0 3 * * *"``.
    :param timezone: the time zone of the cron expression, by default Django's ``TIME_ZONE``. With
        ``schedule``. Example: ``schedule="0 3 * * *", timezone="Europe/Berlin"``.
    :param unique_for: within this time, a timedelta or seconds, only the first of the enqueues with
        the same arguments stores a job; the handles of the others are those of this job. The time
        begins when the job is stored. Use it for a double click, or a webhook that is sent twice.
        Example: ``unique_for=3600``.
    :param unique_by: the names of the arguments that ``unique_for`` and ``debounce`` compare: by
        default all; none for an empty list. Example: ``unique_for=3600, unique_by=["order_id"]``.
    :param debounce: of the enqueues with the same arguments only the last one runs, after no
        further one has come for this time, a timedelta or seconds. Use it for a row that is saved
        many times. Not with ``unique_for``. Example: ``debounce=30``.
    :param debounce_max: a debounced job is due at the latest this time after the first enqueue, a
        timedelta or seconds. Without it, enqueues without a pause delay the job for ever. Example:
        ``debounce=30, debounce_max=300``.
    :param on_conflict: what to do if there is already a job within ``unique_for``: ``"keep"`` that
        job (the default); ``"replace"`` it if it is not running and has not ended; or ``"raise"``
        ``JobExistsError``. Example: ``unique_for=3600, on_conflict="raise"``.
    :raises TypeError: there is no such option.
    :raises ValueError: a value is not valid, or two options exclude each other.
    :raises ImproperlyConfigured: the function does not fit the options, or the name is taken.
    """
    refuse_unknown(options, {"name", *_CHECKS}, "job")
    _check_options(options)
    if (burst := options.pop("burst", None)) is not None:
        options["rate"] = replace(options["rate"], burst=burst)
    _read_schedule(options)

    def declare(function: Callable[..., Any]) -> JobDefinition[..., Any]:
        own = registry.HandlerOptions(name=name or registry.default_name(function), **options)
        unique.check_declared(own)
        handler = registry.Handler(function, own)
        if own.schedule is not None:
            _check_scheduled(handler, own.schedule)
        definition: JobDefinition[..., Any] = JobDefinition(handler)
        registry.register(handler)
        return definition

    return declare if function is None else declare(function)


def _check_options(options: dict[str, Any]) -> None:
    """Replace the options of a job by what they mean.

    :raises ValueError: one means nothing, or nothing beside another.
    """
    for option, check in _CHECKS.items():
        if options.get(option) not in (None, ()):
            try:
                options[option] = check(options[option])
            except (TypeError, ValueError) as error:
                message = f"job({option}={options[option]!r}): {option} must be {error}"
                raise ValueError(message) from None
    final = options.get("give_up_on", ())
    for kind in options.get("retry_on", ()):
        if issubclass(kind, final):
            raise ValueError(f"job(retry_on=…): {kind.__name__} is among those of give_up_on")
    for option, other in _BELONG_TO.items():
        if options.get(option) is not None and options.get(other) is None:
            raise ValueError(f"job({option}=…): {option} means nothing without {other}=…")
    if options.get("database_only") and not options.get("atomic", True):
        raise ValueError("job(database_only=True): atomic=False has no roll-back")


def _read_schedule(options: dict[str, Any]) -> None:
    """Replace the options ``schedule`` and ``timezone`` of a job by what they declare together."""
    given, zone = options.pop("schedule", None), options.pop("timezone", None)
    if given is None:
        if zone is not None:
            raise ValueError(f"job(timezone={zone!r}): timezone needs schedule=…")
        return
    if zone is not None:
        given["timezone"] = zone
    where = "job(schedule=…)"
    options["schedule"], problems = read_schedule(given, where)
    if "job" in given:
        raise ValueError(f"{where}['job']: the job is the function itself; leave it out.")
    if problems:
        raise ValueError(str(problems[0]))


def _check_scheduled(handler: registry.Handler, schedule: ScheduleOptions) -> None:
    """Check that a tick of the schedule can be enqueued.

    :raises ImproperlyConfigured: the function does not take the schedule's payload.
    """
    problem = handler.check_arguments(schedule.payload)
    if problem is not None:
        raise ImproperlyConfigured(
            f"The job {handler.name}: its schedule gives it the payload {schedule.payload!r:.80}: "
            f"{problem}. Give schedule={{…, 'payload': {{…}}}}."
        )
    if ":" in handler.name:
        raise ImproperlyConfigured(
            f"The job {handler.name}: a job with a schedule has no ':' in its name."
        )


def _check_id(id: Any) -> None:
    if not (isinstance(id, str) and len(id) <= 255 and id.strip()):
        raise ValueError("id must be text of 1 to 255 characters that are not all blank")
    if id.startswith(unique.PREFIX):
        raise ValueError(f"id must not begin with {unique.PREFIX!r}, as the ids of windows do")
    _check_storable(id, "id")


def _check_storable(text: str, what: str) -> None:
    if text and storable_text(text) != text:
        raise PayloadError(f"{what} holds a character no database keeps: {text!r:.80}")


# --- A model's save -------------------------------------------------------------------------------

M = TypeVar("M", bound=models.Model)


def enqueue_on_save(
    model: type[M],
    job: JobDefinition[..., Any],
    *,
    payload: Callable[[M], Mapping[str, Any]],
    created: bool | None = None,
    condition: Callable[[M], bool] | None = None,
    id: Callable[[M], str] | None = None,
) -> None:
    """Enqueue ``job`` whenever an instance of ``model`` is saved. Call it once, when the app is
    loaded: in ``jobs.py``.

    Django sends ``post_save`` after an autocommitted save has been committed; a crash in between
    would lose the job. So each save of the model gets a transaction here: the row and its job are
    committed together or not at all. ``bulk_create`` and ``QuerySet.update`` send no signals, so
    they enqueue nothing.

    An instance of a proxy of the model counts as an instance of the model. Models that inherit its
    fields have their own rows: they enqueue nothing, unless you call this function for them as
    well.

    A save in another database than that of the job's queue raises ``ImproperlyConfigured`` and is
    rolled back, because the row and the job could not be committed together.

    :param model: the model. An abstract model has no rows, so give the models that inherit from it.
    :param job: the job, with the options that ``using()`` has given it.
    :param payload: function that makes the handler's keyword arguments from the instance.
    :param created: True for new rows only, False for changed rows only, None for both.
    :param condition: function that says whether to enqueue for this instance; by default for all.
    :param id: function that makes the job's unique id from the instance.
    """
    if id is not None:
        job.using(id="checked here, not at the first save")
    _commit_save_and_signals_together(model)
    save_hooks.append((model, job))

    def receiver(sender: Any, instance: Any, raw: bool = False, **kwargs: Any) -> None:
        if raw:
            return  # a fixture is being loaded, its jobs have long run
        is_wanted = created in (None, kwargs.get("created"))
        if not is_wanted or (condition is not None and not condition(instance)):
            return
        if fault := save_fault(model, job, kwargs["using"]):
            raise ImproperlyConfigured(fault)
        definition = job if id is None else job.using(id=id(instance))
        definition.enqueue(**payload(instance))

    # A module imported twice hooks once; two hooks of one job may differ in their functions.
    uid = ":".join(["kjo_django", job.name, str(created), *map(_place, (payload, condition, id))])

    def connect(sender: type[models.Model], **kwargs: Any) -> None:
        # Django sends the signal for the class of the instance: a proxy for itself.
        is_same_table = sender._meta.concrete_model is model._meta.concrete_model
        if is_same_table and issubclass(sender, model):
            post_save.connect(receiver, sender=sender, weak=False, dispatch_uid=uid)

    for known in _with_subclasses(model):
        connect(known)
    class_prepared.connect(connect, weak=False, dispatch_uid=f"{uid}:{model._meta.label}")


save_hooks: list[tuple[type[models.Model], JobDefinition[..., Any]]] = []
"""The models whose saves enqueue a job, and these jobs."""


def save_fault(model: type[models.Model], job: JobDefinition[..., Any], using: str) -> str | None:
    """Return why a save of the model in the database ``using`` cannot enqueue the job, or None."""
    queue = job.options.queue or job.handler.options.queue
    if (jobs := database_of(queue)) == using:
        return None
    return (
        f"enqueue_on_save({model._meta.label}, {job.name}): the model is saved in the database "
        f"{using!r}, and the jobs of the queue {queue!r} are in {jobs!r}: no transaction holds "
        f"both. Give the job a queue with KJO['QUEUES'][…]['database'] = {using!r}, or let a "
        f"router send the model to {jobs!r}."
    )


def _with_subclasses(model: type[models.Model]) -> Iterator[type[models.Model]]:
    yield model
    for subclass in model.__subclasses__():
        yield from _with_subclasses(subclass)


def _place(function: Callable[..., Any] | None) -> str:
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _commit_save_and_signals_together(model: type[models.Model]) -> None:
    original = model.save_base
    if getattr(original, "_kjo_is_atomic", False):
        return

    @functools.wraps(original)
    def save_base(self: models.Model, *args: Any, **kwargs: Any) -> None:
        using = kwargs.get("using") or router.db_for_write(type(self), instance=self)
        with transaction.atomic(using=using, savepoint=False):
            original(self, *args, **kwargs)

    save_base._kjo_is_atomic = True  # type: ignore[attr-defined]
    model.save_base = save_base  # type: ignore[method-assign]
