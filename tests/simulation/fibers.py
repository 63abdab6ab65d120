"""Threads of which exactly one runs at a time: the one that the schedule lets run.

A fiber runs what it is given until it pauses; whoever resumes it waits meanwhile. So the order in
which processes make their calls is the schedule's alone, and a seed repeats it.
"""

from __future__ import annotations

import contextlib
import enum
import threading
import time
from _thread import allocate_lock
from collections.abc import Callable
from math import inf
from typing import Any

from django.db import OperationalError, connections

from tests.faults.boundary import Boundary, Died

LOCK_PATIENCE = 20.0
"""Seconds of virtual time for which a statement waits for another transaction's lock."""


class CallFault(enum.Enum):
    """What befalls a call over the boundary of a process."""

    RAISES_BEFORE = "raises-before"
    RAISES_AFTER = "raises-after"
    DIES_AFTER = "dies-after"
    PAUSES_BEFORE = "pauses-before"
    """Its thread makes the call when the schedule resumes it."""
    PAUSES_AFTER = "pauses-after"


class _Current(threading.local):
    fiber: Fiber | None = None


_current = _Current()


def current_fiber() -> Fiber | None:
    """Return the fiber this thread is, None for any other thread."""
    return _current.fiber


class Fiber:
    """:param now: reads the virtual clock."""

    def __init__(self, now: Callable[[], float]) -> None:
        self.name = ""
        self.boundary: Boundary | None = None
        """That of the process it belongs to."""
        self.is_busy = False
        self.is_blocked = False
        """Whether it waits for something, and not only for the schedule."""
        self.until = inf
        """Virtual moment at which what it waits for is given up."""
        self.is_in_transaction = False
        self.paused_at = 0.0
        self.error: BaseException | None = None
        self.trace: list[str] = []
        self.struck = ""
        """The call that met a fault or a pause since it was last resumed."""
        self._fault: CallFault | None = None
        self._at, self._nth = "", 0
        self._now = now
        self._function: Callable[[], object] | None = None
        self._is_stale = False
        self._go, self._back = allocate_lock(), allocate_lock()
        self._go.acquire()
        self._back.acquire()
        self._thread = threading.Thread(target=self._run, name="simulated", daemon=True)
        self._thread.start()

    # --- Called by the schedule -------------------------------------------------------------------

    @property
    def thread_id(self) -> int | None:
        return self._thread.ident

    def begin(self, function: Callable[[], object]) -> None:
        """Let the next ``resume`` begin this."""
        self._function, self.is_busy = function, True

    def resume(self, fault: CallFault | None = None, at: str = "", nth: int = 0) -> None:
        """Let it run until it pauses, waits or has ended.

        :param fault: befalls its call number ``nth`` from now whose name begins with ``at``.
        """
        self._fault, self._at, self._nth, self.struck = fault, at, nth, ""
        self._go.release()
        self._back.acquire()
        if self.error is not None:
            error, self.error = self.error, None
            raise error

    def lose_connection(self) -> None:
        """Let its next use of the database open another connection: its process has died."""
        self._is_stale = True

    def close(self) -> None:
        """End the thread."""
        self.begin(connections.close_all)
        self.resume()
        self._function = None
        self._go.release()
        self._thread.join()

    # --- Called within its thread -----------------------------------------------------------------

    def _run(self) -> None:
        _current.fiber = self
        while True:
            self._go.acquire()
            function = self._function
            if function is None:
                return
            if self._is_stale:
                with contextlib.suppress(AttributeError):  # it had none
                    del connections["default"]
                self._is_stale = False
            try:
                function()
            except Died:
                pass
            except BaseException as error:
                self.error = error
            self.is_busy = self.is_blocked = self.is_in_transaction = False
            self._back.release()

    def pause(self) -> None:
        """Let the schedule go on elsewhere until it resumes this fiber.

        :raises Died: its process died meanwhile.
        """
        self.paused_at = self._now()
        self._back.release()
        self._go.acquire()
        if self.boundary is not None and self.boundary.is_dead:
            raise Died

    def wait(self, seconds: float, is_over: Callable[[], bool] = lambda: False) -> bool:
        """Wait in virtual time; return whether it is over."""
        return self._wait_until(self._now() + seconds, is_over)

    def wait_once(self, seconds: float = inf) -> None:
        """Wait until the schedule resumes it; what it waits for may be there then, or not."""
        self.until, self.is_blocked = self._now() + seconds, True
        try:
            self.pause()
        finally:
            self.is_blocked, self.until = False, inf

    def _wait_until(self, moment: float, is_over: Callable[[], bool]) -> bool:
        while not is_over():
            if self._now() >= moment:
                return False
            self.wait_once(moment - self._now())
        return True

    def cross(
        self, name: str, effect: Callable[[], Any], fail: Callable[[bool], Any] | None
    ) -> Any:
        """Make a call over the boundary of its process, with what befalls it."""
        self.trace.append(f"{self.name} {name}")
        fault = self._take_fault(name)
        if fault is CallFault.RAISES_BEFORE and fail is not None:
            return fail(True)
        if fault is CallFault.PAUSES_BEFORE:
            self.pause()
        answer = self._effect(effect)
        if name in ("BEGIN", "commit", "rollback"):
            self.is_in_transaction = name == "BEGIN"
        if fault is CallFault.RAISES_AFTER and fail is not None:
            return fail(False)
        if fault is CallFault.DIES_AFTER:
            assert self.boundary is not None
            self.boundary.die()
            raise Died
        if fault is CallFault.PAUSES_AFTER:
            self.pause()
        return answer

    def _take_fault(self, name: str) -> CallFault | None:
        if self._fault is None or not name.startswith(self._at):
            return None
        if self._nth:
            self._nth -= 1
            return None
        fault, self._fault = self._fault, None
        self.struck = name
        return fault

    def _effect(self, effect: Callable[[], Any]) -> Any:
        """Do what the call does; again, where somebody who is paused holds SQLite's lock."""
        until = self._now() + LOCK_PATIENCE
        while True:
            try:
                return effect()
            except OperationalError as error:
                if not _is_locked_out(error) or self._now() >= until:
                    raise
            self.wait_once(until - self._now())


def _is_locked_out(error: BaseException) -> bool:
    """Return whether SQLite would have waited for this lock."""
    # SQLITE_BUSY, not SQLITE_BUSY_SNAPSHOT, which no wait helps.
    return getattr(error.__cause__, "sqlite_errorcode", None) == 5


class FiberLock:
    """A lock that lets the schedule go on elsewhere while another fiber has it."""

    def __init__(self) -> None:
        self._lock = allocate_lock()

    def __enter__(self) -> None:
        while not self._lock.acquire(False):
            fiber = current_fiber()
            if fiber is None:
                raise AssertionError("a fiber that is paused has this lock")
            fiber.wait_once()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


class Threading:
    """The module ``threading`` with locks of fibers."""

    Lock = FiberLock

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def install(monkeypatch: Any) -> None:
    """Let fibers wait in virtual time."""
    monkeypatch.setattr(threading, "_time", lambda: time.monotonic())  # of ``wait_for``
    for owner, name in ((threading.Event, "wait"), (threading.Condition, "wait")):
        monkeypatch.setattr(owner, name, _virtual(getattr(owner, name)))


def _virtual(really_wait: Any) -> Any:
    def wait(self: Any, timeout: float | None = None) -> bool:
        fiber = current_fiber()
        if fiber is None or timeout is None or timeout <= 0:
            return bool(really_wait(self, timeout))
        if isinstance(self, threading.Event):
            return fiber.wait(timeout, self.is_set)
        # Whoever waits for a condition looks again for what it waits for.
        self.release()
        try:
            fiber.wait_once(timeout)
        finally:
            self.acquire()
        return True

    return wait
