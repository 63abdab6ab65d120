"""One call of one handler, behind its middleware; how it ended is noted in its attempt.

    log context → inherited headers → tracing → time limit → KJO["MIDDLEWARE"] → the handler

A lane calls a chain of functions. An event loop calls a chain of coroutine functions. An ``async
def`` handler in a transaction is called by a lane: it runs, with the middleware next to it that is
asynchronous too, on an event loop of its own, whose database calls come back to the lane's thread.

A batch handler (``@job(batch=…)``) is called once for several jobs, with every promise for each of
them. What the call raises does not show which of them is to blame. So its writes are undone and
each item runs again alone, in the same attempt: only the guilty one fails.
"""

from __future__ import annotations

import contextvars
import functools
import inspect
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import Token, copy_context
from functools import partial
from typing import Any, cast

from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured, MiddlewareNotUsed
from django.db import connections
from django.utils.module_loading import import_string

from kjo_django import tracing
from kjo_django.clock import CLOCK
from kjo_django.engine.attempt import UNWANTED, Attempt, Mode
from kjo_django.engine.handler.connections import TransactionGuard, watching
from kjo_django.engine.handler.context import BatchContext, BatchItem, JobContext
from kjo_django.engine.handler.log_lines import log_starts, logs_all
from kjo_django.engine.handler.timeouts import RunAbandoned, RunningCall, TimeoutWatch, with_limit
from kjo_django.enqueue.storing import AfterCommit
from kjo_django.exceptions import (
    JobCancelledError,
    PayloadError,
    PermanentError,
    is_ctrl_c,
    text_of,
)
from kjo_django.logs import get_logger
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import dump_result, load_value, serializer_for
from kjo_django.registry import Handler, handlers
from kjo_django.running_job import running
from kjo_django.runtime import Runtime
from kjo_django.store import Store
from kjo_django.tracing import Tracer

Context = JobContext | BatchContext
Call = Callable[[Any], Any]
"""Takes a context; returns the handler's result, or a coroutine that does."""
Middleware = Callable[[Call], Call]
_NOTHING = nullcontext()

logger = get_logger("kjo_django")


def is_interrupt(error: BaseException) -> bool:
    """Return whether an exception is not the handler's: its thread was given up, or somebody
    pressed Ctrl-C to end the command that runs the handler. Python raises that in the main thread;
    in any other the handler raised it itself.

    All else ends an attempt and not its lane: ``sys.exit()``, a cancelled task or a panic of a
    library in Rust too.
    """
    if isinstance(error, KeyboardInterrupt):
        return is_ctrl_c(error)
    return isinstance(error, RunAbandoned)


def call_isolated(
    call: Callable[[], object],
    what: str,
    facts: Mapping[str, Any],
    around: AbstractContextManager[object] = _NOTHING,
) -> None:
    """Call a hook or a callback, and log what it raises. Context variables that it sets, such as
    the active language, end with it.

    :param what: what has failed then.
    :param facts: for the log record.
    :param around: is entered for the call.
    """
    try:
        with around:
            copy_context().run(call)
    except BaseException as error:
        if is_interrupt(error):
            raise
        # Also what would end the process.
        logger.exception("%s", what, extra=facts)


def call_watched(call: Callable[[], object], what: str, facts: Mapping[str, Any]) -> None:
    """Call a hook or a callback of the project's; see ``call_isolated``. What it changes in a
    session nobody is to find there."""
    call_isolated(call, what, facts, watching())


@contextmanager
def recording(store: Store, *, calls_handlers: bool = False) -> Iterator[list[Attempt]]:
    """A transaction that makes endings durable. A worker's is always the outermost; within a test's
    own, a savepoint keeps a failure from breaking that one.

    Yields a list for the attempts it records: recorded with its commit; should it raise, in doubt,
    since nobody knows whether the COMMIT took effect.

    Blocks of ``atomic()`` that handlers have entered in it and not left end with it: it would take
    itself for one of them, and never be committed. What their ``on_commit`` callbacks raise is
    logged: the commit stands, and the callbacks of others in the group come after it. Django's own
    robust callbacks fail when they log one without a ``__qualname__``, such as a partial.

    :param calls_handlers: whether handlers, or hooks of theirs, are called in it.
    """
    attempts: list[Attempt] = []
    connection = connections[store.alias]
    try:
        with store.transaction(calls_handlers=calls_handlers):
            savepoints, blocks = len(connection.savepoint_ids), len(connection.atomic_blocks)
            # Those of a test's own transaction are not of this block, nor of the next ones.
            start = len(connection.run_on_commit)
            try:
                yield attempts
                callbacks: list[Any] = connection.run_on_commit
                callbacks[start:] = [
                    (
                        sids,
                        partial(call_watched, call, f"An on_commit callback failed: {call!r}", {}),
                        False,
                    )
                    for sids, call, _ in callbacks[start:]
                ]
            finally:
                del connection.savepoint_ids[savepoints:]
                del connection.atomic_blocks[blocks:]
    except Exception:
        for attempt in attempts:
            attempt.is_in_doubt = True
            attempt.delivery.attempt = attempt
        raise
    for attempt in attempts:
        attempt.is_recorded = True


# --- The call -------------------------------------------------------------------------------------


def in_steps(attempts: Sequence[Attempt]) -> Sequence[Sequence[Attempt]]:
    """Arrange a group: each step is one call, of one handler or of a batch handler's several.

    A batch has at most one item of a key, and of two records of one message at most one: the later
    one's step comes later.
    """
    if not any(attempt.delivery.batch for attempt in attempts):
        return [[attempt] for attempt in attempts]
    steps: list[list[Attempt]] = []
    last: dict[object, int] = {}
    open_steps: dict[object, list[int]] = {}
    for attempt in attempts:
        delivery = attempt.delivery
        order = (delivery.shard, attempt.key)
        earliest = 1 + max((last.get(one, -1) for one in order), default=-1)
        limit = delivery.batch or 1
        mine = open_steps.setdefault(delivery.handler, []) if delivery.batch else []
        at = bisect_left(mine, earliest)
        if at < len(mine):
            number = mine[at]
            steps[number].append(attempt)
        else:
            number = len(steps)
            steps.append([attempt])
            mine.append(number)
        if len(steps[number]) >= limit:
            mine.remove(number)
        last.update(dict.fromkeys(order, number))
    return steps


def call_step(
    runtime: Runtime,
    watch: TimeoutWatch,
    step: Sequence[Attempt],
    around: AbstractContextManager[object] = _NOTHING,
    guard: TransactionGuard | None = None,
) -> BaseException | None:
    """Make one call of a handler from this thread, and note in its attempts how it ended.

    An ``async def`` handler runs on an event loop whose database calls come back to this thread, so
    they are part of its transaction.

    :param step: one attempt, or several of a batch handler's.
    :param around: is entered for the call. What that raises fails the call.
    :param guard: of the transaction it is made in; None: it is made outside any.
    :returns: what the call raised. The attempts that have no error then are to run again alone.
    """
    handler = step[0].delivery.handler
    runs = [(each, made) for each in step if (made := _context_of(runtime, each, guard))]
    if not runs:
        return None
    if logs_all():
        log_starts(attempt for attempt, _ in runs)
    context = runs[0][1] if handler.options.batch is None else _batch_of(runs)
    # Variables that the handler sets, such as the active language and time zone, are its own.
    variables = copy_context()
    connection = connections[runtime.database] if guard is None else guard.connection
    count, began = len(connection.run_on_commit), time.perf_counter()
    try:
        with around:
            call = chain(handler, watch, tracing.tracer, False, runtime.settings.middleware)
            _note_results(handler, runs, began, variables.run(call, context))
            if len(connection.run_on_commit) > count:
                _bind_callbacks(connection.run_on_commit, count, variables)
    except BaseException as error:
        if is_interrupt(error):
            raise
        _note_error(runs, began, error)
        return error
    return None


def _bind_callbacks(registered: list[Any], count: int, variables: contextvars.Context) -> None:
    """Let the ``on_commit`` callbacks of a call find the variables that its handler has left.

    :param registered: the connection's.
    :param count: number of those that were there before the call.
    """
    for number, (sids, callback, is_robust) in enumerate(registered[count:], count):
        if not isinstance(getattr(callback, "__self__", None), AfterCommit):
            registered[number] = sids, partial(variables.run, callback), is_robust


async def acall_step(runtime: Runtime, watch: TimeoutWatch, step: Sequence[Attempt]) -> None:
    """Make one call of an asynchronous handler on the loop this is awaited on, outside any
    transaction, and note in its attempts how it ended. The items of a batch that raises are called
    again one by one."""
    handler = step[0].delivery.handler
    runs = [(each, made) for each in step if (made := _context_of(runtime, each))]
    if not runs:
        return
    if logs_all():
        log_starts(attempt for attempt, _ in runs)
    context = runs[0][1] if handler.options.batch is None else _batch_of(runs)
    began = time.perf_counter()
    try:
        call = chain(handler, watch, tracing.tracer, True, runtime.settings.middleware)
        _note_results(handler, runs, began, await call(context))
    except BaseException as error:
        _note_error(runs, began, error)
    else:
        return
    for attempt in step:
        if attempt.error is None:
            await acall_step(runtime, watch, [attempt])


Runs = Sequence[tuple[Attempt, JobContext]]
"""The attempts that one call runs, each with the context of its job."""


def _context_of(
    runtime: Runtime, attempt: Attempt, guard: TransactionGuard | None = None
) -> JobContext | None:
    """Return the context of an attempt that is about to run, a batch's item where its handler takes
    batches. One whose payload cannot be read has failed instead: None.

    :param guard: of the transaction it runs in, if it runs in one.
    """
    delivery, row, message = attempt.delivery, attempt.row, attempt.delivery.message
    handler, queue, headers = delivery.handler, delivery.queue, delivery.record.headers
    is_batch = handler.options.batch is not None
    attempt.started_at = CLOCK.now()
    try:
        payload = load_value(message.payload, message.content_type)
        if attempt.step is not None:
            payload = attempt.step.begin_run(payload)
        if is_batch:
            ((payload,), _) = handler.arguments(payload)
    except BaseException as error:
        if is_interrupt(error):
            raise
        attempt.error = error
        return None
    unique_id = row.unique_id if row is not None else None
    if original := headers.get(names.UNIQUE_ID):
        # It replays the dead letter of another job, which was enqueued under this id.
        unique_id = original.decode("utf-8", "replace")
    # Reading headers takes its time, and mostly nobody is going to see them.
    is_seen = is_batch or handler.options.takes_context or runtime.settings.middleware
    limit = handler.options.timeout or queue.timeout
    kind: type[JobContext] = BatchItem if is_batch else JobContext
    # By place: made for every job, and by name takes half as long again.
    context = kind(
        message.job_id or message.id,
        attempt.number,
        attempt.limit,
        message.id,
        queue.name,
        names.texts(headers) if is_seen else {},
        row.created_at if row is not None else message.timestamp,
        unique_id,
        message.generation,
        None,
        delivery.lease,
        delivery.mode is Mode.ATOMIC,
        None,
        delivery,
        limit.total_seconds() if limit is not None else None,
        payload,
    )
    context.workflow = attempt.step
    context.is_shared = guard is not None and guard.is_shared
    return context


def _batch_of(runs: Runs) -> BatchContext:
    """Return the context of the call of a batch handler."""
    items = [cast(BatchItem, context) for _, context in runs]
    return BatchContext(items, items[0].time_limit)


def _values_of_items(handler: Handler, value: Any, count: int) -> Sequence[Any]:
    """Return what a batch handler has returned for each of its items.

    :raises PermanentError: it did not return so many results.
    """
    values = [None] * count if value is None else value
    if isinstance(values, list | tuple) and len(values) == count:
        return values
    what = f"{len(value)}" if isinstance(value, list | tuple) else type(value).__name__
    raise PermanentError(
        f"The batch handler {handler.name} must return None or a list of one result "
        f"for each of its {count} items, not {what}"
    )


def _note_results(handler: Handler, runs: Runs, began: float, value: Any) -> None:
    """Note in the attempts what their call has returned, and how long it took.

    :param began: what ``time.perf_counter`` said before the call.
    :raises PermanentError: a batch handler did not return one result for each item, or a result
        cannot be stored.
    """
    seconds, count = time.perf_counter() - began, len(runs)
    is_batch = handler.options.batch is not None
    values = _values_of_items(handler, value, count) if is_batch else (value,)
    for (attempt, context), result in zip(runs, values, strict=True):
        attempt.seconds, attempt.result_ttl = seconds / count, context.result_ttl
        attempt.abort_reason, attempt.worker = context.abort_reason, context.worker
        attempt.log_lines = context.log_lines
        attempt.error = context.error if isinstance(context, BatchItem) else None
        if attempt.step is not None and attempt.error is None:
            attempt.step.end_run()
        if result is None or attempt.error is not None:
            continue
        # A result travels as its payload does: whoever reads the row knows how to read both.
        payloads = serializer_for(attempt.delivery.message.content_type)
        try:
            attempt.result = dump_result(result, payloads, handler.options.result_serializer)
        except PayloadError as error:
            raise PermanentError(f"The handler's result cannot be stored: {error}") from error


def _note_error(runs: Runs, began: float, raised: BaseException) -> None:
    """Note in the attempts how long a call took that has raised, and which of them have failed: the
    only one, or those that were asked to end."""
    seconds = time.perf_counter() - began
    for attempt, context in runs:
        attempt.seconds, attempt.result_ttl = seconds / len(runs), context.result_ttl
        attempt.abort_reason, attempt.log_lines = context.abort_reason, context.log_lines
        attempt.result = attempt.error = None
        if len(runs) == 1 or (
            context.abort_reason in UNWANTED and isinstance(raised, JobCancelledError)
        ):
            attempt.error = raised
        elif context.abort_reason in UNWANTED:
            # Another's error, maybe: asked to end, it has.
            why = f"{type(raised).__name__}: {text_of(raised)}"
            why = f"The batch of job {context.job_id} was aborted: {why}"
            attempt.error = JobCancelledError(why)
    if len(runs) > 1:
        first = runs[0][1]
        logger.warning(
            "A batch of %d of %s failed, its items run again one by one: %s: %s",
            len(runs),
            first.handler,
            type(raised).__name__,
            text_of(raised),
            extra={"handler": first.handler, "queue": first.queue},
        )


# --- The chain ------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def chain(
    handler: Handler,
    watch: TimeoutWatch,
    tracer: Tracer | None,
    on_loop: bool,
    paths: Sequence[str],
) -> Call:
    """Return what calls a handler, behind all middleware; made once for each handler.

    :param on_loop: whether an event loop calls it, and not a lane.
    :param paths: of the project's middleware.
    :raises ImproperlyConfigured: a middleware cannot stand around this handler.
    """
    behind, interrupts = _behind_middleware(handler, on_loop, paths), not handler.is_async

    def run(context: Context) -> Any:
        call, tokens = RunningCall(watch, context, context.time_limit, interrupts), _enter(context)
        try:
            with _NOTHING if tracer is None else _span(context, tracer):
                try:
                    with call:
                        return behind(context)
                finally:
                    watch.calls.discard(call)
        finally:
            names.inheriting.reset(tokens[1])
            running.reset(tokens[0])

    async def run_on_loop(context: Context) -> Any:
        tokens = _enter(context)
        try:
            span = _NOTHING if tracer is None else _span(context, tracer)
            with span, RunningCall(watch, context, None):
                return await with_limit(behind(context), context, context.time_limit)
        finally:
            names.inheriting.reset(tokens[1])
            running.reset(tokens[0])

    return run_on_loop if on_loop else run


def _enter(context: Context) -> tuple[Token[Any], Token[Any]]:
    """Let log records know the run, see ``contrib.logging``, and let what is published during it
    inherit headers of its message, of a batch those that all its messages have in common. Return
    the tokens that end both. A context manager would cost every job two microseconds more."""
    runs = context.items if isinstance(context, BatchContext) else (context,)
    first, *others = [run.delivery.record.headers if run.delivery else {} for run in runs]
    found: dict[str, str] = {}
    if not first.keys().isdisjoint(names.INHERITED):
        found = {
            name: first[name].decode("utf-8", "replace")
            for name in names.INHERITED
            if first.get(name) and all(other.get(name) == first[name] for other in others)
        }
    return running.set(context), names.inheriting.set(names.usable(found) if found else found)


def _span(context: Context, tracer: Tracer) -> AbstractContextManager[object]:
    """Return what has the run traced."""
    runs = context.items if isinstance(context, BatchContext) else (context,)
    return tracer.running([run.delivery for run in runs], runs)


# --- The project's middleware ---------------------------------------------------------------------


def import_middleware(paths: Sequence[str]) -> list[tuple[str, Middleware]]:
    """Return what ``KJO["MIDDLEWARE"]`` names, with its path, innermost first.

    :raises ImproperlyConfigured: a path leads to nothing that can be called.
    """
    found: list[tuple[str, Middleware]] = []
    for path in reversed(paths):
        try:
            middleware = import_string(path)
        except ImportError as error:
            raise ImproperlyConfigured(
                f"KJO['MIDDLEWARE'] names {path!r}, which cannot be imported: {error}"
            ) from error
        if not callable(middleware):
            raise ImproperlyConfigured(f"KJO['MIDDLEWARE'] names {path!r}, which cannot be called.")
        found.append((path, middleware))
    return found


def refusals(paths: Sequence[str]) -> Iterator[str]:
    """Yield why middleware cannot stand around a handler of the project's, for the system checks.

    :param paths: of the project's middleware.
    :raises ImproperlyConfigured: a path leads to nothing that can be called.
    """
    named = import_middleware(paths)
    for handler in handlers():
        try:
            _fit(handler, handler.is_async and not handler.options.atomic, named)
        except ImproperlyConfigured as error:
            yield str(error)


def _fit(
    handler: Handler, on_loop: bool, named: Sequence[tuple[str, Middleware]]
) -> list[tuple[str, Middleware, bool]]:
    """Return the middleware of a handler, innermost first, and whether each surrounds, as a
    coroutine function, what is one.

    What cannot stand around a handler could be made to fit by threads, at a price nobody would
    find: coroutines that run one at a time, or a time limit that cannot interrupt.

    :raises ImproperlyConfigured: one cannot stand around this handler.
    """
    is_async, fitted = handler.is_async, []
    for path, middleware in named:
        is_capable = getattr(middleware, "async_capable", False)
        if on_loop and not is_capable:
            raise ImproperlyConfigured(
                f"KJO['MIDDLEWARE'] names {path!r}, which is not asynchronous, and the job "
                f"{handler.name!r} is an async function outside a transaction: all its coroutines "
                "run on one event loop, which this middleware would block."
            )
        if not is_async and not getattr(middleware, "sync_capable", True):
            raise ImproperlyConfigured(
                f"KJO['MIDDLEWARE'] names {path!r}, which is only asynchronous, but it "
                f"surrounds a synchronous function in the job {handler.name!r}."
            )
        is_async = is_async and is_capable
        fitted.append((path, middleware, is_async))
    return fitted


def _behind_middleware(handler: Handler, on_loop: bool, paths: Sequence[str]) -> Call:
    call, is_async = _invocation(handler), handler.is_async
    named = import_middleware(paths if handler.runs_middleware else ())
    for path, middleware, stays_async in _fit(handler, on_loop, named):
        if is_async and not stays_async:
            call, is_async = _on_loop_of_its_own(call), False
        try:
            call = middleware(call)
        except MiddlewareNotUsed:
            continue
        if not callable(call):
            raise ImproperlyConfigured(f"The middleware {path} must return a function, not {call}.")
    return _on_loop_of_its_own(call) if is_async and not on_loop else call


def _invocation(handler: Handler) -> Call:
    """Return what calls the handler itself."""
    function, takes_context = handler.function, handler.options.takes_context

    def invoke(context: Any) -> Any:
        if isinstance(context, BatchContext):
            result = function(list(context.items))
        else:
            positional, named = handler.arguments(context.payload)
            first = (context,) if takes_context else ()
            result = function(*first, *positional, **named)
        if result is not None and not handler.is_async and inspect.iscoroutine(result):
            result.close()
            raise PermanentError(
                f"{handler.name} has returned a coroutine that nobody awaits: a decorator hides "
                "that its function is an `async def`. Make the decorator's own function an "
                "`async def` that awaits it."
            )
        return result

    async def await_invoked(context: Any) -> Any:
        return await invoke(context)

    return await_invoked if handler.is_async else invoke


def _on_loop_of_its_own(call: Call) -> Call:
    """Return a function that runs a coroutine function to its end."""

    async def contained(context: Context) -> tuple[Any, BaseException | None]:
        # What would end the event loop instead of the attempt is kept from it.
        try:
            return await with_limit(call(context), context, context.time_limit), None
        except BaseException as error:
            return None, error

    def run(context: Context) -> Any:
        value, error = async_to_sync(contained)(context)
        if error is not None:
            raise error
        return value

    return run
