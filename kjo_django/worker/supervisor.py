"""Stop signals, and ``--processes N``: a supervisor forks workers and replaces those that died."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType

from django.db import connections

from kjo_django import garbage_collection
from kjo_django.logs import get_logger

logger = get_logger("kjo_django")

STOP_SIGNALS = [
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGUSR2")
    if hasattr(signal, name)  # not every system has the last one
]
LEFT_RUNNING = 3
"""Exit code of a worker an operator stopped while jobs went on past the grace period: it is not
started again, as one that ends with 1 is."""
WAS_SIGNALLED = 4
"""Exit code of a worker that a signal has stopped in good order. One whose supervisor did not send
the signal is started again: so the workers of a supervisor are restarted one after the other."""
THREAD_DIED = 70
"""Exit code of a worker that has ended because one of its threads had died."""
QUICK_DEATH = 5.0
"""A child that lived shorter than this many seconds is started again with growing delay."""
LONGEST_DELAY = 30.0
"""Seconds until such a child is started again, at most."""
TICK = 0.1
"""Seconds between looks at the children. A signal that comes when Python has looked for one and is
about to wait is not handled before that wait ends, so there must be none without an end."""


def stop_on_signals(stopping: threading.Event) -> Callable[[], bool]:
    """Set ``stopping`` on the first stop signal, and end the process on a second. To be called in
    the main thread.

    :returns: a function that restores the signal handlers there were, and returns whether a stop
        signal has come.
    """
    heard: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        heard.append(number)  # at first: a second signal may come while this one is logged
        if len(heard) > 1:
            logger.warning("Second signal: stopping at once")
            os._exit(128 + number)
        stopping.set()
        logger.info("%s: finishing what runs", signal.Signals(number).name)

    previous = {number: signal.signal(number, handle) for number in STOP_SIGNALS}

    def restore() -> bool:
        for number, handler in previous.items():
            signal.signal(number, handler)
        return bool(heard)

    return restore


def supervise(count: int, work: Callable[[int], int], *, pins: bool = False) -> int:
    """Run ``work`` in ``count`` child processes until told to stop or all have ended by themselves.

    Forks before any connection or thread exists, so children share no socket. A child that ends
    with 0 has finished (``--drain``, ``--max-messages``, an operator's stop); one that dies is
    replaced.

    :param work: called with the place of the child, from 0 on, which its successors have too.
    :param pins: give each child one of the processors this process may use, in turn; who takes the
        place of a dead one has that one's.
    :returns: 0 when every child ended with 0.
    """
    connections.close_all()
    for connection in connections.all(initialized_only=True):
        # Django's pool on PostgreSQL: its idle connections would be shared by all children.
        if close_pool := getattr(connection, "close_pool", None):
            close_pool()
    garbage_collection.set_apart()
    supervisor = _Supervisor(work, sorted(os.sched_getaffinity(0)) if pins else [])
    for number in STOP_SIGNALS:
        signal.signal(number, supervisor.pass_on)
    for place in range(count):
        supervisor.fork(place)
    return supervisor.wait()


class _Supervisor:
    def __init__(self, work: Callable[[int], int], processors: Sequence[int]) -> None:
        self._work = work
        self._processors = processors
        """Those to pin children to, by their places; empty: they run wherever they may."""
        self._children: dict[int, tuple[int, float]] = {}
        """The place of each child, and when it was started, by its process id."""
        self._is_stopping = False
        self._worst = 0
        self._quick_deaths = 0
        self._due: list[tuple[float, int]] = []
        """When those are to be started that take the place of the dead, and which place."""

    def fork(self, place: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        # A stop that came between the fork and the note of it would reach every child but this one,
        # and the supervisor would wait for that one for ever.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            if not self._is_stopping:
                self._fork(before, place)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _fork(self, mask: set[signal.Signals | int], place: int) -> None:
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
                if self._processors:
                    os.sched_setaffinity(0, {self._processors[place % len(self._processors)]})
                code = self._work(place)
            except SystemExit as exit:
                code = exit.code if isinstance(exit.code, int) else 1
            except BaseException:
                logger.exception("The worker process failed")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                # Not sys.exit: the parent's atexit handlers are not this process' to run.
                os._exit(code)
        self._children[pid] = (place, time.monotonic())

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self._is_stopping = True
        for pid in list(self._children):
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                pass

    def wait(self) -> int:
        while self._children or (self._due and not self._is_stopping):
            for due in [due for due in self._due if due[0] <= time.monotonic()]:
                self._due.remove(due)
                self.fork(due[1])
            pid, status = os.waitpid(-1, os.WNOHANG) if self._children else (0, 0)
            if not pid:
                time.sleep(TICK)
                continue
            child = self._children.pop(pid, None)
            if child is not None:
                self._note_end(pid, os.waitstatus_to_exitcode(status), *child)
        return self._worst if self._worst >= 0 else 128 - self._worst

    def _note_end(self, pid: int, code: int, place: int, started: float) -> None:
        """Note that a process has ended; another one takes its place if it was not to end.

        :param code: its exit code; below 0: the signal that has ended it.
        """
        if self._is_stopping and (-code in STOP_SIGNALS or code == WAS_SIGNALLED):
            code = 0  # Without an exit code of its own it did not listen yet, and did nothing.
        if code in (0, LEFT_RUNNING) or self._is_stopping:
            self._worst = self._worst or code
            return
        now, delay = time.monotonic(), 0.0
        if code == WAS_SIGNALLED:
            logger.info("Worker process %d was told to stop; starting another", pid)
        else:
            delay = self._delay_after(now - started)
            how = f"signal {-code}" if code < 0 else f"exit code {code}"
            message = "Worker process %d died (%s); starting another in %g s"
            logger.error(message, pid, how, delay)
        self._due.append((now + delay, place))

    def _delay_after(self, seconds: float) -> float:
        """Return how long to wait before another process is started in place of one that has died
        after so many seconds."""
        if seconds >= QUICK_DEATH:
            self._quick_deaths = 0
            return 0.0
        self._quick_deaths += 1
        return float(min(2.0 ** (self._quick_deaths - 1), LONGEST_DELAY))
