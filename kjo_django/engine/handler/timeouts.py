"""Ending handlers that run too long.

Python cannot stop a thread. Past its time a handler's abort flag is set and ``HandlerTimeout`` is
raised inside it at its next bytecode; a call into C (a long sleep, a socket without a timeout) is
only interrupted when it returns. One that still runs ``HUNG_AFTER`` its time limit has hung: its
worker gives up the thread, records the attempt as failed and goes on in another. What the handler
returns later does not count. Give such calls a timeout of their own all the same: until they return
their thread stays.
"""

from __future__ import annotations

import asyncio
import ctypes
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TypeVar

from kjo_django.engine.handler.context import Abort, BatchContext, JobContext
from kjo_django.engine.handler.running import RunningJobs
from kjo_django.exceptions import HandlerTimeout, JobTimeoutError

ENDINGS = BaseException
"""What ends an attempt: ``sys.exit()``, a cancelled task or a panic of a library in Rust must not
end the lane with it. All but ``is_interrupt``."""
T = TypeVar("T")

HUNG_AFTER = 10.0
"""Seconds past its time limit after which a handler that was interrupted counts as hung."""


class RunAbandoned(BaseException):
    """Raised in a thread that its worker has given up, before it could change anything."""


def _exceeded(seconds: float) -> str:
    return f"The handler exceeded its timeout of {seconds:g} s"


async def with_limit(
    awaitable: Awaitable[T], context: JobContext | BatchContext, seconds: float | None
) -> T:
    """Await a handler's coroutine, ending it after so many seconds.

    :raises HandlerTimeout: it took longer.
    """
    if seconds is None:
        return await awaitable
    try:
        async with asyncio.timeout(seconds) as scope:
            return await awaitable
    except TimeoutError as error:
        if not scope.expired() or isinstance(error, JobTimeoutError):
            raise
        context.abort(Abort.TIMEOUT)
        raise HandlerTimeout(_exceeded(seconds), timeout=seconds) from None


class _Limit:
    """One run under a limit: entered around the handler's call, by the thread that makes it."""

    __slots__ = (
        "_seconds",
        "_watch",
        "context",
        "deadline",
        "interrupts",
        "is_abandoned",
        "is_fired",
        "thread_id",
    )

    def __init__(
        self,
        watch: TimeoutWatch,
        context: JobContext | BatchContext,
        seconds: float,
        interrupts: bool,
    ) -> None:
        self._watch = watch
        self._seconds = seconds
        self.context = context
        self.deadline = time.monotonic() + seconds
        self.thread_id = threading.get_ident()
        self.interrupts = interrupts
        self.is_fired = False
        self.is_abandoned = False

    def __enter__(self) -> None:
        self._watch.begin(self, self._seconds)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        # Raised before this line, the timeout has been delivered: nothing is left to take back.
        self._watch.end(self)
        if self.is_abandoned:
            raise RunAbandoned
        if isinstance(error, HandlerTimeout):
            error.args = (_exceeded(self._seconds),)
            error.timeout = self._seconds
        elif kind is None and self.is_fired:
            raise HandlerTimeout(_exceeded(self._seconds), timeout=self._seconds)


_UNLIMITED = nullcontext()


class TimeoutWatch:
    """Watches running handlers; one thread, started with the first handler that has a limit.

    :param on_hung: told of a thread whose handler has hung; returns whether the thread is given up.
    """

    def __init__(self, on_hung: Callable[[int], bool] = lambda thread_id: False) -> None:
        self._on_hung = on_hung
        self._fired: set[_Limit] = set()
        self._abandoned: set[int] = set()
        self.running = RunningJobs()
        """Every handler that runs, with a limit or without."""
        self._runs: set[_Limit] = set()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        self.is_resting = False
        """Whether the watch sleeps until it is called: it had nothing to watch."""

    def limit(
        self,
        context: JobContext | BatchContext,
        seconds: float | None,
        *,
        interrupts: bool = True,
    ) -> AbstractContextManager[object, bool | None]:
        """Raise ``HandlerTimeout`` in this thread if the block takes longer.

        :param interrupts: False: an event loop does that, the block is only watched for hanging.
        :raises RunAbandoned: the thread was given up meanwhile.
        """
        return _UNLIMITED if seconds is None else _Limit(self, context, seconds, interrupts)

    def abandon(self, thread_id: int) -> None:
        """Note that what this thread does has no effect from now on."""
        self._abandoned.add(thread_id)

    def forget(self, thread_id: int) -> None:
        """The thread ends; another one may get its id."""
        self._abandoned.discard(thread_id)

    @property
    def is_abandoned(self) -> bool:
        """Whether this thread was given up."""
        return bool(self._abandoned) and threading.get_ident() in self._abandoned

    def check(self) -> None:
        """Called before anything becomes durable.

        :raises RunAbandoned: this thread was given up.
        """
        if self.is_abandoned:
            raise RunAbandoned

    def begin(self, run: _Limit, seconds: float) -> None:
        """Watch a run."""
        # The lock itself, not the condition: raised within the condition's own Python code, the
        # timeout would leave it locked for ever, and every lane waiting for it.
        with self._lock:
            self._runs.add(run)
            # Far deadlines are found by the regular look, which there is none of while the watch
            # rests; waking it costs a switch.
            if self._thread is None or seconds < self._LOOK or self.is_resting:
                self.is_resting = False
                self._ensure_thread()
                self._changed.notify()

    def end(self, run: _Limit) -> None:
        """Watch it no longer."""
        with self._lock:
            self._runs.discard(run)
            self._fired.discard(run)
            if run.is_fired:
                # Not delivered yet? Then it must not hit what this thread does next.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(run.thread_id), None)

    _LOOK = 0.5

    def _ensure_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._watch, name="kjo-timeouts", daemon=True)
            self._thread.start()

    def _watch(self) -> None:
        with self._changed:
            while not self._is_stopped:
                now = time.monotonic()
                for run in [run for run in self._runs if run.deadline <= now]:
                    # Its thread may be torn from noting its end by this very exception.
                    self._runs.discard(run)
                    self._fired.add(run)
                    if not run.interrupts:
                        continue
                    run.is_fired = True
                    run.context.abort(Abort.TIMEOUT)
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(
                        ctypes.c_ulong(run.thread_id), ctypes.py_object(HandlerTimeout)
                    )
                for run in [r for r in self._fired if r.deadline + HUNG_AFTER <= now]:
                    self._fired.discard(run)
                    if self._on_hung(run.thread_id):
                        run.is_abandoned = True
                        self._abandoned.add(run.thread_id)
                pending = [run.deadline for run in self._runs]
                pending += [run.deadline + HUNG_AFTER for run in self._fired]
                self.is_resting = not pending
                wait = max(0.0, min(min(pending) - now, self._LOOK)) if pending else None
                self._changed.wait(wait)

    def abort_all(self) -> None:
        """Set the abort flag of every handler: the worker stops."""
        self.running.abort_all(Abort.SHUTDOWN)
        with self._changed:
            for run in self._runs:
                run.context.abort(Abort.SHUTDOWN)

    def stop(self) -> None:
        """End the watch's thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
