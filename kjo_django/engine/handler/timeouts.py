"""The calls of handlers that run now, and ending those that run too long.

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
import math
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from kjo_django.clock import CLOCK, Clock
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.context import Abort, BatchContext, JobContext, runs_of
from kjo_django.exceptions import HandlerTimeout, JobCancelledError, JobTimeoutError

T = TypeVar("T")

HUNG_AFTER = 10.0
"""Seconds past its time limit after which a handler that was interrupted counts as hung."""
LOOK = 0.5
"""Seconds between looks at what runs. A shorter limit wakes the watch."""
LONG_RUN = 1.0
"""Seconds. A run that takes longer is long: nothing that a free lane could run waits behind it."""


class RunAbandoned(BaseException):
    """Raised in a thread that its worker has given up, before it could change anything."""


class RunningJob(NamedTuple):
    """One job whose handler runs."""

    context: JobContext
    seconds: float
    """For how long it has run."""
    delivery: Delivery


def _exceeded(seconds: float) -> HandlerTimeout:
    text = f"The handler exceeded its timeout of {seconds:g} s"
    return HandlerTimeout(text, timeout=seconds)


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
        raise _exceeded(seconds) from None


@dataclass(slots=True, eq=False)
class RunningCall:
    """One call of a handler: entered around it, by the thread that makes it. Raises
    ``HandlerTimeout`` in this thread if the call takes longer than its limit.

    Should the timeout be raised while the block is left, the call stays in ``watch.calls``: whoever
    enters it removes it there afterwards.

    :raises RunAbandoned: the thread was given up meanwhile.
    """

    watch: TimeoutWatch
    context: JobContext | BatchContext
    limit: float | None
    """Seconds; None: the call is only known to the watch."""
    interrupts: bool = True
    """False: an event loop interrupts the call, which is only watched for hanging."""
    thread_id: int = field(default_factory=threading.get_ident)
    began_at: float = 0.0
    due_at: float = math.inf
    """When the watch has to do something about the call."""
    is_over: bool = False
    is_fired: bool = False
    is_lost: bool = False
    """Whether it is interrupted because its worker was frozen and has lost its slot."""

    def __enter__(self) -> None:
        watch, limit = self.watch, self.limit
        self.began_at = watch.clock.monotonic()
        if limit is None:
            watch.calls.add(self)
        else:
            self.due_at = self.began_at + limit
            # The lock itself, not the condition: raised within the condition's own Python code, the
            # timeout would leave it locked for ever, and every lane waiting for it.
            with watch.lock:
                watch.calls.add(self)
                if limit < LOOK or watch.thread is None:
                    watch.wake()
        # Last: what is done before is no part of the start.
        context = self.context
        for run in context.items if isinstance(context, BatchContext) else (context,):
            if run.delivery is not None and run.delivery.limit_state is not None:
                watch.on_start(run.delivery)

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        watch, limit = self.watch, self.limit
        if limit is None:
            watch.calls.discard(self)
            return
        # The timeout may come while this thread waits for the lock, which the watch holds. Python
        # 3.14 raises it when ``with`` has the lock and would not give it back; here C notes both.
        held: list[bool] = []
        try:
            held.extend(map(watch.lock.acquire, (True,)))
            watch.calls.discard(self)
            if self.is_fired:
                # Not delivered yet? Then it must not hit what this thread does next.
                ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self.thread_id), None)
        finally:
            if held:
                watch.lock.release()
        watch.check()
        if self.is_lost:
            if isinstance(error, HandlerTimeout):
                text = "The handler was interrupted: its worker was frozen, and has lost its slot"
                raise JobCancelledError(text) from None
        elif isinstance(error, HandlerTimeout):
            error.args, error.timeout = _exceeded(limit).args, limit
        elif kind is None and self.is_fired:
            raise _exceeded(limit)


class TimeoutWatch:
    """Watches running handlers. Its thread starts with the first handler that has a limit.

    :param on_hung: called with the id of a thread whose handler has hung; returns whether the
        thread is given up.
    :param frozen_after: seconds between two looks after which this process counts as frozen.
    :param has_slot: returns whether the run under this lease needs a slot, which a worker that was
        frozen has lost. Such a run is interrupted.
    :param has_lost_slot: returns whether the slot of the run under this lease is known to be
        another worker's. Such a run is interrupted, too.
    """

    def __init__(
        self,
        on_hung: Callable[[int], bool] = lambda thread_id: False,
        clock: Clock = CLOCK,
        *,
        frozen_after: float = math.inf,
        has_slot: Callable[[str], bool] = lambda lease: False,
        has_lost_slot: Callable[[str], bool] = lambda lease: False,
    ) -> None:
        self.clock = clock
        self.on_start: Callable[[Delivery], None] = lambda delivery: None
        """Is called with each delivery that has limits, when its handler is called."""
        self.on_long: Callable[[str, float], None] = lambda kind, seconds: None
        """Is called with the handler of each long run in a transaction, and for how many seconds it
        has run."""
        self._on_hung = on_hung
        self._frozen_after = frozen_after
        self._has_slot = has_slot
        self._has_lost_slot = has_lost_slot
        self._looked_at = math.inf
        self.calls: set[RunningCall] = set()
        """Every call that runs, with a limit or without."""
        self._abandoned: set[int] = set()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self.thread: threading.Thread | None = None
        self._is_stopped = False

    # --- Threads that were given up ---------------------------------------------------------------

    def abandon(self, thread_id: int) -> None:
        """Note that what this thread does has no effect from now on."""
        self._abandoned.add(thread_id)

    def forget(self, thread_id: int) -> None:
        """Note that a thread ends: another one may get its id."""
        self._abandoned.discard(thread_id)

    @property
    def is_abandoned(self) -> bool:
        """Whether this thread was given up."""
        return bool(self._abandoned) and threading.get_ident() in self._abandoned

    def check(self) -> None:
        """Called before anything becomes durable.

        :raises RunAbandoned: this thread was given up.
        """
        if self._abandoned and threading.get_ident() in self._abandoned:
            raise RunAbandoned

    # --- What runs --------------------------------------------------------------------------------

    def jobs(self) -> list[RunningJob]:
        """Return every job whose handler runs; thread-safe."""
        now = self.clock.monotonic()
        return [
            RunningJob(context, now - call.began_at, context.delivery)
            for call in list(self.calls)
            for context in runs_of(call.context)
            if context.delivery is not None
        ]

    def abort_all(self) -> None:
        """Set the abort flag of every handler: the worker stops."""
        for call in list(self.calls):
            call.context.abort(Abort.SHUTDOWN)

    # --- Looking ----------------------------------------------------------------------------------

    def step(self) -> float:
        """Interrupt the calls whose time is over, and have the threads of those given up that have
        hung; return the seconds until the next look."""
        with self.lock:
            return self._look()

    def _look(self) -> float:
        now = self.clock.monotonic()
        calls = list(self.calls)
        was_frozen = now - self._looked_at > self._frozen_after
        is_lost = self._has_slot if was_frozen else self._has_lost_slot
        for call in calls:
            if call.limit is None or call.is_over:
                continue
            if any(is_lost(run.lease) for run in runs_of(call.context)):
                call.is_lost, call.due_at = True, now
                call.context.abort(Abort.LOST)
        self._looked_at = now
        for call in calls:
            if now - call.began_at >= LONG_RUN:
                self._note_long(call, now - call.began_at)
            if call.due_at <= now:
                self._act_on(call)
        return max(0.0, min([LOOK, *(call.due_at - now for call in calls)]))

    def _note_long(self, call: RunningCall, seconds: float) -> None:
        delivery = runs_of(call.context)[0].delivery
        if delivery is not None and delivery.is_in_transaction:
            self.on_long(delivery.kind, seconds)

    def _act_on(self, call: RunningCall) -> None:
        """Interrupt a call whose time is over. One that was interrupted, and has not ended, hangs:
        its thread is given up."""
        if call.is_over:
            call.due_at = math.inf
            if self._on_hung(call.thread_id):
                self.abandon(call.thread_id)
                self.calls.discard(call)
            return
        call.is_over = True
        call.due_at += HUNG_AFTER
        if not call.interrupts:
            return
        call.is_fired = True
        if not call.is_lost:
            call.context.abort(Abort.TIMEOUT)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(
            ctypes.c_ulong(call.thread_id), ctypes.py_object(HandlerTimeout)
        )

    def wake(self) -> None:
        """Look now, in the watch's thread; the caller holds the lock."""
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="kjo-timeouts", daemon=True)
            thread.start()
            self.thread = thread
        self._changed.notify()

    def _run(self) -> None:
        with self._changed:
            while not self._is_stopped:
                self.clock.wait(self._changed, self._look())

    def stop(self) -> None:
        """End the watch's thread."""
        with self._changed:
            self._is_stopped = True
            self._changed.notify()
