"""Running ``async def`` handlers outside a transaction: coroutines on one event loop.

A lane admits a group of them, hands them to the loop, and is free. Each ends when it ends: the
slowest holds up nobody. What has ended since the last look is recorded and settled together by the
recorder, which then frees its keys.

    lane: admit ─> waiting ─> event loop ─> ended ─> recorder: record, acknowledge, free keys

What handlers call by ``sync_to_async``, the ORM's asynchronous methods among it, is run one after
the other in one thread with one database connection, as in any asynchronous process of Django's.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.db.transaction import TransactionManagementError

from kjo_django.engine.admission import defer_limited
from kjo_django.engine.attempt import Attempt, Delivery
from kjo_django.engine.handler.call import acall_step, in_steps
from kjo_django.engine.handler.connections import freshen_connections, may_be_left_open
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.recorder import EndedQueue, Recorder
from kjo_django.logs import get_logger
from kjo_django.runtime import Runtime
from kjo_django.store.servers import leave_retired
from kjo_django.store.session_changes import changed, watch

logger = get_logger("kjo_django")

RESTART_DELAY = 1.0
"""Seconds before another event loop begins when one has ended."""
MOST_STARTS = 32
"""Coroutines that start in one turn of the loop at most."""
QUICK_TURN = 0.001
"""Seconds. After a turn that took no longer, twice as many coroutines start in the next one; else
half as many."""


class TaskExited(RuntimeError):
    """A task that a handler started called ``sys.exit()``, or raised ``KeyboardInterrupt``."""


class _ContainedCoroutine(Coroutine[Any, Any, Any]):
    """A task's coroutine that raises an ordinary exception in place of what would end the event
    loop, and with it the coroutines of all other jobs."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        self._coroutine = coroutine
        self.__name__ = getattr(coroutine, "__name__", type(coroutine).__name__)
        self.__qualname__ = getattr(coroutine, "__qualname__", self.__name__)

    def send(self, value: Any) -> Any:
        try:
            return self._coroutine.send(value)
        except (SystemExit, KeyboardInterrupt) as error:
            raise TaskExited(f"A task of the handler raised {error!r}") from error

    def throw(self, *error: Any) -> Any:
        try:
            return self._coroutine.throw(*error)
        except (SystemExit, KeyboardInterrupt) as raised:
            raise TaskExited(f"A task of the handler raised {raised!r}") from raised

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()


def _contained_task(
    loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
) -> asyncio.Task[Any]:
    """Make a task that cannot end its event loop; a task factory of asyncio's."""
    return asyncio.Task(_ContainedCoroutine(coroutine), loop=loop, **options)


class LoopRunner:
    """One worker's coroutines, on an event loop in a thread that starts with the first.

    :param ended: takes what has ended.
    :param recorder: settles what waits there.
    :param on_thread: called first in the loop's thread.
    :param use_permits: uses the permits of deliveries with a limit; returns those that may start.
    """

    def __init__(
        self,
        runtime: Runtime,
        watch: TimeoutWatch,
        ended: EndedQueue,
        recorder: Recorder,
        on_thread: Callable[[], None],
        *,
        use_permits: Callable[[Sequence[Delivery]], Sequence[Delivery]],
    ) -> None:
        self._use_permits = use_permits
        self._runtime = runtime
        self._watch = watch
        self._ended = ended
        self._recorder = recorder
        self._on_thread = on_thread
        self._waiting: deque[Sequence[Attempt]] = deque()
        self.is_closed = False
        """Whether what has not ended is nobody's any more."""
        self._has_closed = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        # Of the thread that all of them share for their database calls.
        self._connections: list[BaseDatabaseWrapper] = []
        self._undone: list[Exception] = []
        self._running = 0

    @property
    def threads(self) -> list[threading.Thread]:
        """Its thread, once that was started."""
        return [] if self._thread is None else [self._thread]

    def run(self, attempts: Sequence[Attempt]) -> None:
        """Start coroutines that are admitted; returns at once."""
        with self._lock:
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kjo-loop", daemon=True)
                thread.start()
                self._thread = thread
        self._waiting.extend(in_steps(attempts))
        self._call()

    def close(self, timeout: float) -> None:
        """End the loop; what has not ended is nobody's any more.

        :param timeout: seconds to wait for its thread.
        """
        with self._lock:
            self.is_closed = True
            self._has_closed.set()
            thread = self._thread
        if thread is not None:
            self._call()
            thread.join(timeout)

    def _call(self) -> None:
        """Make the loop look at what boards, and whether it is closed. One that begins looks by
        itself."""
        if self._wake is None or self._loop is None:
            return
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            pass  # it has ended, and the next one looks when it begins

    # --- On the loop ------------------------------------------------------------------------------

    def _run(self) -> None:
        self._on_thread()
        try:
            while not self.is_closed:
                try:
                    async_to_sync(self._run_loop)()
                except BaseException:
                    # A callback that calls sys.exit(), or no loop can be made. What ran on it was
                    # cancelled, and ends so.
                    logger.exception("The event loop of coroutines ended, another one begins")
                    self._has_closed.wait(RESTART_DELAY)
        finally:
            connections.close_all()

    async def _run_loop(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_task_factory(_contained_task)  # type: ignore[arg-type]
        self._wake.set()
        tasks: dict[asyncio.Task[None], Sequence[Attempt] | None] = {}

        def ended(task: asyncio.Task[None]) -> None:
            step = tasks.pop(task)
            if step is not None and task.cancelled() and not self.is_closed:
                # With the loop itself, before it had begun: the next loop's.
                self._waiting.append(step)

        def spawn(coroutine: Any, step: Sequence[Attempt] | None = None) -> None:
            task = asyncio.create_task(coroutine)
            tasks[task] = step
            task.add_done_callback(ended)

        while True:
            await self._wake.wait()
            self._wake.clear()
            if self.is_closed:
                break
            # In its turn, ahead of what the handlers that start now will ask of the database.
            spawn(sync_to_async(self._freshen)())
            await self._start_waiting(spawn)
        for task in tasks:
            task.cancel()

    async def _start_waiting(self, spawn: Callable[..., None]) -> None:
        """Start what waits, some in each turn of the loop."""
        starts = 1
        while self._waiting and not self.is_closed:
            for _ in range(min(starts, len(self._waiting))):
                step = self._waiting.popleft()
                spawn(self._run_step(step), step)
            # Where a start takes long, as making a client of HTTP does, those that run get their
            # answers after each. Each turn costs as much as several quick starts.
            began = time.monotonic()
            await asyncio.sleep(0)
            is_quick = time.monotonic() - began < QUICK_TURN
            starts = min(2 * starts, MOST_STARTS) if is_quick else max(1, starts // 2)

    async def _run_step(self, step: Sequence[Attempt]) -> None:
        began, undone = time.monotonic(), len(self._undone)
        try:
            self._running += 1
            try:
                # A loop that a handler has kept busy may come to a start late.
                defer_limited(step, self._use_permits)
                if calls := [attempt for attempt in step if attempt.ending is None]:
                    await acall_step(self._runtime, self._watch, calls)
            finally:
                self._running -= 1
            if may_be_left_open(self._connections) or self._has_changed():
                # In its turn: what another one is doing in a block of its own is left by then.
                await sync_to_async(self._freshen)()
            if len(self._undone) > undone:
                # Whoever did it, what this one has written may have been undone with it.
                for attempt in step:
                    if attempt.error is None:
                        attempt.error = self._undone[-1]
        except BaseException as error:
            # Even what is to end a process ends one attempt here: the loop is everybody's.
            if self.is_closed:
                raise
            for attempt in step:
                attempt.error = error
        self._ended.put(began, step)
        self._recorder.watch(self._ended)

    def _has_changed(self) -> bool:
        """Return whether something is changed in the session that nobody relies on any more."""
        return not self._running and any(each in changed for each in self._connections)

    def _freshen(self) -> None:
        """Put the connections in order; in the thread of the coroutines' database calls."""
        self._connections = [connections[alias] for alias in connections]
        for connection in self._connections:
            watch(connection)
        # Those that run share a session, and may rely on what they have set there.
        if left := freshen_connections(is_own=True, may_close=not self._running):
            what = f"One of the coroutines that ran at the same time: {left}"
            self._undone.append(TransactionManagementError(what))
        # Coroutines may only read there: their jobs are recorded by another thread.
        leave_retired(self._runtime.database)
