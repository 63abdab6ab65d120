"""Ending handlers that run too long."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from kjo_django.coordination.database.coordination import LocalListener, call_local_listeners
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.timeouts import RunningCall, TimeoutWatch, with_limit
from kjo_django.exceptions import HandlerTimeout, JobCancelledError, JobTimeoutError
from tests.waiting import PATIENCE

SOON, NEVER = 0.05, 3600.0


def context_of(kind: type[JobContext] = JobContext) -> JobContext:
    return kind("id", 1, 5, "id", "q")


@pytest.fixture
def watch():
    watch = TimeoutWatch()
    yield watch
    watch.stop()


@pytest.fixture
def context():
    return context_of()


def spin_until(condition) -> None:
    """A busy loop, as a handler that computes."""
    while not condition():
        pass


def test_a_busy_loop_is_ended(watch, context):
    started = time.monotonic()
    with (
        pytest.raises(HandlerTimeout, match=r"timeout of 0\.05 s"),
        RunningCall(watch, context, SOON),
    ):
        spin_until(lambda: False)
    assert time.monotonic() - started > 0.04
    assert context.aborted


def test_it_is_the_timeout_error_everybody_knows():
    assert issubclass(HandlerTimeout, JobTimeoutError)
    assert issubclass(HandlerTimeout, TimeoutError)
    assert HandlerTimeout().to_dict()["code"] == "TIMEOUT"


def test_a_handler_in_time_is_left_alone(watch, context):
    with RunningCall(watch, context, NEVER):
        pass
    assert not context.aborted


@pytest.mark.promise("no-timeout")
def test_without_a_limit_nothing_is_watched(watch, context):
    with RunningCall(watch, context, None):
        pass
    assert watch.thread is None


def test_nothing_is_raised_once_the_handler_has_ended(watch, context):
    """An exception that came late would hit whatever the lane does next."""
    # Given: a handler that ends just before its time
    with RunningCall(watch, context, SOON):
        pass
    # When: its time passes, proven by another run that began later and is fired
    with pytest.raises(HandlerTimeout), RunningCall(watch, context_of(), SOON):
        spin_until(lambda: False)
    # Then
    for _ in range(1000):
        pass
    assert not context.aborted


def test_a_handler_that_swallows_the_timeout_has_exceeded_it_all_the_same(watch, context):
    with pytest.raises(HandlerTimeout), RunningCall(watch, context, SOON):
        try:
            spin_until(lambda: False)
        except Exception:
            pass


def test_a_handler_that_minds_the_abort_flag_may_end_by_itself(watch, context):
    with pytest.raises((HandlerTimeout, JobCancelledError)), RunningCall(watch, context, SOON):
        while True:
            context.raise_if_aborted()


def test_a_handler_interrupted_in_c_is_told_when_it_returns(watch, context):
    event = threading.Event()
    with pytest.raises(HandlerTimeout), RunningCall(watch, context, SOON):
        event.wait(0.3)
        spin_until(lambda: False)


def test_each_thread_meets_its_own_timeout_only(watch):
    # Given
    outcomes: dict[str, bool] = {}
    release = threading.Event()

    def run(name: str, seconds: float) -> None:
        try:
            with RunningCall(watch, context_of(), seconds):
                spin_until(release.is_set)
            outcomes[name] = False
        except HandlerTimeout:
            outcomes[name] = True
        finally:
            if name == "short":
                release.set()

    threads = [
        threading.Thread(target=run, args=arguments)
        for arguments in [("long", NEVER), ("short", SOON)]
    ]
    # When
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    # Then
    assert outcomes == {"long": False, "short": True}


def test_a_far_deadline_is_not_forgotten_when_a_near_one_comes_first(watch):
    with (
        RunningCall(watch, context_of(), 0.6),
        pytest.raises(HandlerTimeout),
        RunningCall(watch, context_of(), SOON),
    ):
        spin_until(lambda: False)
    with pytest.raises(HandlerTimeout), RunningCall(watch, context_of(), 0.55):
        spin_until(lambda: False)


def test_a_handler_that_ends_at_the_very_moment_it_is_fired_leaves_no_lock_behind():
    """The exception may come while the handler's thread waits for the watch itself."""
    # Given
    watch = TimeoutWatch()  # of its own: nobody could stop one that is locked
    firing = threading.Event()
    leaving = threading.Event()
    ended = threading.Event()

    class Slow(JobContext):
        def abort(self, *reason: object) -> None:  # called by the watch just before it raises
            firing.set()
            leaving.wait(PATIENCE)
            # Now the thread is about to wait for the watch, which is busy here.
            time.sleep(0.05)  # sleep: the thread waits in no place that can be seen
            super().abort(*reason)

    def run() -> None:
        try:
            with RunningCall(watch, context_of(Slow), SOON):
                firing.wait(PATIENCE)
                leaving.set()
        except HandlerTimeout:
            pass
        finally:
            ended.set()

    thread = threading.Thread(target=run, daemon=True)
    # When
    thread.start()
    assert ended.wait(PATIENCE)
    # Then: the watch still serves others
    served = threading.Event()

    def another() -> None:
        with RunningCall(watch, context_of(), NEVER):
            served.set()

    threading.Thread(target=another, daemon=True).start()
    assert served.wait(PATIENCE), "the watch is locked for ever"
    watch.stop()


def test_a_wake_up_call_that_a_timeout_tears_leaves_no_lock_behind():
    """A handler outside a transaction that enqueues calls the relay of its own process: locked for
    ever, it would relay nothing more, and keep everybody who enqueues."""

    class Torn(threading.Condition):
        def __enter__(self) -> bool:
            super().__enter__()
            raise HandlerTimeout  # as it comes within the condition's own Python code

    # Given
    listener = LocalListener("here", ["a"])

    def call() -> None:
        try:
            call_local_listeners("here", ["a"])
        except HandlerTimeout:
            pass

    listener.condition.__class__ = Torn
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(PATIENCE)
    listener.condition.__class__ = threading.Condition
    # When, then
    heard: list[set[str]] = []
    waiting = threading.Thread(target=lambda: heard.append(listener.wait(0)), daemon=True)
    waiting.start()
    waiting.join(PATIENCE)
    assert heard == [{"a"}], "locked for ever"


def test_a_shutdown_sets_every_abort_flag(watch):
    contexts = [context_of(), context_of()]
    with RunningCall(watch, contexts[0], NEVER), RunningCall(watch, contexts[1], NEVER):
        watch.abort_all()
        assert all(context.aborted for context in contexts)


def test_a_stopped_watch_ends_its_thread(watch, context):
    with RunningCall(watch, context, NEVER):
        thread = watch.thread
    assert thread is not None
    watch.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_the_context_tells_its_abort(context):
    assert not context.aborted
    context.raise_if_aborted()
    context.abort()
    assert context.aborted
    with pytest.raises(JobCancelledError, match="job id was aborted"):
        context.raise_if_aborted()


# --- Coroutines -----------------------------------------------------------------------------------


def runwith_limit(coroutine, context, seconds):
    return asyncio.run(with_limit(coroutine, context, seconds))


async def linger(seconds: float = NEVER) -> str:
    await asyncio.sleep(seconds)
    return "done"


def test_a_coroutine_is_ended(context):
    with pytest.raises(HandlerTimeout, match=r"0\.05 s"):
        runwith_limit(linger(), context, SOON)
    assert context.aborted


@pytest.mark.parametrize("limit", [None, NEVER])
def test_a_coroutine_in_time_returns_its_value(context, limit):
    assert runwith_limit(linger(0), context, limit) == "done"
    assert not context.aborted


def test_a_timeout_of_the_coroutines_own_is_its_own_error(context):
    async def impatient() -> None:
        async with asyncio.timeout(0.001):
            await asyncio.sleep(NEVER)

    with pytest.raises(TimeoutError) as raised:
        runwith_limit(impatient(), context, NEVER)
    assert not isinstance(raised.value, HandlerTimeout)
    assert not context.aborted
