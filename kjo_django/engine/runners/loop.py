"""Coroutines in flight: ``async def`` handlers outside a transaction, on one event loop.

A lane claims a group of them, hands them over, and is free. Each ends when it ends: the slowest
holds up nobody. What has ended since the last look is recorded and settled together, by a thread of
its own, and then frees its keys.

    lane: claim ─> boarding ─> event loop ─> landed ─> landing thread: record, settle, free keys

What handlers call by ``sync_to_async``, the ORM's asynchronous methods among it, takes turns in one
thread with one database connection, as in any asynchronous process of Django's.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from asgiref.sync import async_to_sync, sync_to_async
from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.utils import timezone

from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.call import Ran
from kjo_django.engine.handler.connections import (
    drop_broken_connections,
    freshen_connections,
    undone_with_others,
)
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import OUTAGES
from kjo_django.engine.recorder import Recorder
from kjo_django.engine.runners.batch import Started, call_step, concurrent_steps
from kjo_django.engine.runners.leased import PlainRunner

logger = logging.getLogger("kjo_django")

RESTART_DELAY = 1.0
"""Seconds before another event loop begins when one has ended."""
LANDING_GROUP = 1000
"""Most endings that are settled in one transaction."""


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


class Flight:
    """One worker's coroutines. Its threads start with the first.

    :param recorder: makes endings durable.
    :param on_landed: told which deliveries have landed, and which of them are deferred.
    :param on_thread: called first in each of its threads.
    """

    def __init__(
        self,
        plain: PlainRunner,
        leases: LeaseBook,
        watch: TimeoutWatch,
        recorder: Recorder,
        *,
        on_landed: Callable[[Sequence[Delivery], Collection[Delivery]], None],
        on_thread: Callable[[], None],
    ) -> None:
        self._plain = plain
        self._leases = leases
        self._watch = watch
        self._recorder = recorder
        self._on_landed = on_landed
        self._on_thread = on_thread
        self._boarding: deque[list[Started]] = deque()
        self._landed: deque[tuple[list[Started], list[Ran]]] = deque()
        self._has_landed = threading.Event()
        self._is_closed = False
        self._has_closed = threading.Event()
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._wake: asyncio.Event | None = None
        self._is_up = threading.Event()
        # Of the thread that all of them share for their database calls.
        self._connections: list[BaseDatabaseWrapper] = []
        self._undone: list[Exception] = []

    def take_off(self, started: Sequence[Started]) -> None:
        """Start coroutines whose rows are claimed; returns at once."""
        with self._lock:
            if not self._threads:
                self._start_threads()
        self._is_up.wait()
        self._boarding.extend(concurrent_steps(started))
        self._call()

    def close(self, timeout: float) -> None:
        """End its threads; what has not landed is nobody's any more.

        :param timeout: seconds to wait for them.
        """
        with self._lock:
            self._is_closed = True
            self._has_closed.set()
            threads = self._threads
        if not threads:
            return
        self._is_up.wait()
        self._call()
        self._has_landed.set()
        for thread in threads:
            thread.join(timeout)

    def _call(self) -> None:
        """Make the loop look at what boards, and whether it is closed."""
        assert self._loop is not None
        assert self._wake is not None
        try:
            self._loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:
            pass  # the loop has ended, and the next one looks when it begins

    def _start_threads(self) -> None:
        for target, name in ((self._fly, "kjo-flight"), (self._land, "kjo-landing")):
            thread = threading.Thread(target=target, name=name, daemon=True)
            self._threads.append(thread)
            thread.start()

    # --- In the air -------------------------------------------------------------------------------

    def _fly(self) -> None:
        self._on_thread()
        try:
            while not self._is_closed:
                try:
                    async_to_sync(self._run_loop)()
                except BaseException:
                    # A callback that calls sys.exit(), or no loop can be made. What was in the air
                    # was cancelled, and lands so.
                    logger.exception("The event loop of coroutines ended, another one begins")
                    self._has_closed.wait(RESTART_DELAY)
        finally:
            connections.close_all()

    async def _run_loop(self) -> None:
        self._loop, self._wake = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_task_factory(_contained_task)  # type: ignore[arg-type]
        self._wake.set()
        self._is_up.set()
        tasks: dict[asyncio.Task[None], list[Started] | None] = {}

        def ended(task: asyncio.Task[None]) -> None:
            boarded = tasks.pop(task)
            if boarded is not None and task.cancelled() and not self._is_closed:
                # With the loop itself, before it had begun: the next loop's.
                self._boarding.append(boarded)

        def spawn(coroutine: Any, boarded: list[Started] | None = None) -> None:
            task = asyncio.create_task(coroutine)
            tasks[task] = boarded
            task.add_done_callback(ended)

        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._is_closed:
                break
            # In its turn, ahead of what the handlers that start now will ask of the database.
            spawn(sync_to_async(self._freshen)())
            while self._boarding:
                boarded = self._boarding.popleft()
                spawn(self._run(boarded), boarded)
        for task in tasks:
            task.cancel()

    async def _run(self, step: list[Started]) -> None:
        undone = len(self._undone)
        try:
            ran = await call_step(step, self._watch)
            if self._may_be_left_open():
                # In its turn: what another one is doing in a block of its own is left by then.
                await sync_to_async(self._freshen)()
            if len(self._undone) > undone:
                # Whoever did it, what this one has written may have been undone with it.
                for one in ran:
                    one.error = one.error or self._undone[-1]
        except BaseException as error:
            # Even what is to end a process ends one attempt here: the loop is everybody's.
            if self._is_closed:
                raise
            ran = [Ran(timezone.now(), 0.0, error=error) for _ in step]
        self._landed.append((step, ran))
        if not self._has_landed.is_set():
            self._has_landed.set()

    def _freshen(self) -> None:
        """Put the connections in order; in the thread of the coroutines' database calls."""
        self._connections = [connections[alias] for alias in connections]
        if left := freshen_connections(is_own=True):
            self._undone.append(undone_with_others(left))

    def _may_be_left_open(self) -> bool:
        return any(
            each.in_atomic_block
            or each.closed_in_transaction
            or (each.connection is not None and each.autocommit != each.settings_dict["AUTOCOMMIT"])
            for each in self._connections
        )

    # --- On the ground ----------------------------------------------------------------------------

    def _land(self) -> None:
        self._on_thread()
        try:
            while not self._is_closed:
                self._has_landed.wait()
                self._has_landed.clear()
                while self._landed and not self._is_closed:
                    self._land_group()
        finally:
            connections.close_all()

    def _land_group(self) -> None:
        started: list[Started] = []
        ran: list[Ran] = []
        while self._landed and len(started) < LANDING_GROUP:
            step, endings = self._landed.popleft()
            started += step
            ran += endings
        deliveries = [delivery for delivery, _, _ in started]
        deferred: list[Delivery] = deliveries
        try:
            deferred = self._recorder.record(started, ran)
        except Exception:
            # Nothing was acknowledged: they run again, and so it is seen.
            logger.exception("%d coroutines could not be settled", len(deliveries))
            names = [delivery.lease for delivery in deliveries]
            self._leases.release(names, count_delivery=True)
        finally:
            back = set(deferred)
            self._give_back([one for one in started if one[0] in back])
            self._plain.let_go(started)
            self._on_landed(deliveries, back)

    def _give_back(self, started: Sequence[Started]) -> None:
        """Let others have at once what comes again; its lease would expire by itself."""
        try:
            self._plain.give_back(started)
        except OUTAGES as error:
            logger.warning("Leases of %d jobs are not given back: %s", len(started), error)
            drop_broken_connections()
