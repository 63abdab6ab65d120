"""Stop signals, and ``--processes N``: a supervisor forks workers and replaces those that died."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

from django.db import connections

from kjo_django import garbage_collection

logger = logging.getLogger("kjo_django")

STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR2")
    if hasattr(signal, name)  # not every system has the last one
]
LEFT_RUNNING = 3
"""Exit code of a worker an operator stopped while jobs went on past the grace period: it is not
started again, as one that ends with 1 is."""
QUICK_DEATH = 5.0
"""A child that lived shorter than this many seconds is started again with growing delay."""
TICK = 0.1
"""Seconds between looks at the children. A signal that comes when Python has looked for one and is
about to wait is not handled before that wait ends, so there must be none without an end."""


def stop_on_signals(stopping: threading.Event) -> Callable[[], None]:
    """Set ``stopping`` on the first stop signal, and end the process on a second. To be called in
    the main thread.

    :returns: a function that restores the signal handlers there were.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        if stopping.is_set():
            logger.warning("Second signal: stopping at once")
            os._exit(128 + number)
        logger.info("%s: finishing what runs", signal.Signals(number).name)
        stopping.set()

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    return restore


def supervise(count: int, work: Callable[[], int]) -> int:
    """Run ``work`` in ``count`` child processes until told to stop or all have ended by themselves.

    Forks before any connection or thread exists, so children share no socket. A child that ends
    with 0 has finished (``--drain``, ``--max-messages``, an operator's stop); one that dies is
    replaced.

    :returns: 0 when every child ended with 0.
    """
    connections.close_all()
    for connection in connections.all(initialized_only=True):
        # Django's pool on PostgreSQL: its idle connections would be shared by all children.
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()
    garbage_collection.set_apart()
    supervisor = _Supervisor(work)
    for number in STOP_SIGNALS:
        signal.signal(number, supervisor.pass_on)
    for _ in range(count):
        supervisor.fork()
    return supervisor.wait()


class _Supervisor:
    def __init__(self, work: Callable[[], int]) -> None:
        self._work = work
        self._children: dict[int, float] = {}
        self._is_stopping = False
        self._worst = 0
        self._quick_deaths = 0
        self._due: list[float] = []
        """When those are to be started that take the place of the dead."""

    def fork(self) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A stop that came between the fork and the note of it would reach every child but this one,
        # and the supervisor would wait for that one for ever.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if not self._is_stopping:
                self._fork(before)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, mask: set[signal.Signals | int]) -> None:
        pid = os.fork()
        if pid == 0:
            code = 70
            # A terminal's Ctrl-C reaches the parent only, which passes it on: a child that got it
            # twice would take it for the second, forcing signal.
            os.setpgid(0, 0)
            for number in STOP_SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            try:
                code = self._work()
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 1
            except BaseException:
                logger.exception("The worker process failed")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                # Not sys.exit: the parent's atexit handlers are not this process' to run.
                os._exit(code)
        self._children[pid] = time.monotonic()

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        for pid in list(self._children):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def wait(self) -> int:
        while self._children or (self._due and not self._is_stopping):
            for due in [due for due in self._due if due <= time.monotonic()]:
                self._due.remove(due)
                self.fork()
            pid, status = os.waitpid(-1, os.WNOHANG) if self._children else (0, 0)
            if not pid:
                time.sleep(TICK)
                continue
            started = self._children.pop(pid, None)
            if started is None:
                continue
            code, now = os.waitstatus_to_exitcode(status), time.monotonic()
            if self._is_stopping and -code in STOP_SIGNALS:
                code = 0  # It was told before it listened, and had begun nothing.
            if code in (0, LEFT_RUNNING) or self._is_stopping:
                self._worst = self._worst or code
                continue
            is_quick = now - started < QUICK_DEATH
            self._quick_deaths = self._quick_deaths + 1 if is_quick else 0
            delay = min(2.0 ** (self._quick_deaths - 1), 30.0) if is_quick else 0.0
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            message = "Worker process %d died (%s); starting another in %g s"
            logger.error(message, pid, how, delay)
            self._due.append(now + delay)
        return self._worst if self._worst >= 0 else 128 - self._worst
