"""The threads that run groups of jobs, and what becomes of one whose handler hangs."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from django.db import connections
from django.db.backends.base.base import BaseDatabaseWrapper

from kjo_django.engine.attempt import Departed, Mode
from kjo_django.engine.group import HELD_ELSEWHERE_DELAY, Pipeline
from kjo_django.engine.handler.connections import sever
from kjo_django.engine.handler.context import facts_of
from kjo_django.engine.handler.timeouts import RunAbandoned, RunningJob, TimeoutWatch
from kjo_django.engine.scheduler import Group, GroupScheduler
from kjo_django.logs import get_logger

logger = get_logger("kjo_django")


class LaneRun(NamedTuple):
    """A group that a lane runs."""

    group: Group
    connections: Sequence[BaseDatabaseWrapper]
    """Those of the lane's thread."""
    departed: Departed
    """What has left the group."""


class Lanes:
    """Threads that take groups from the scheduler and run them to their end.

    :param on_thread: called first in each thread.
    """

    def __init__(
        self,
        scheduler: GroupScheduler,
        pipeline: Pipeline,
        watch: TimeoutWatch,
        on_thread: Callable[[], None],
    ) -> None:
        self._scheduler = scheduler
        self._pipeline = pipeline
        self._watch = watch
        self._on_thread = on_thread
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._numbers = itertools.count()
        self._runs: dict[int, LaneRun] = {}
        """What each lane runs, by the id of its thread. The thread that takes a run out of here
        ends it."""
        scheduler.on_late = self._relieve

    @property
    def threads(self) -> list[threading.Thread]:
        """Those that were started, but for those given up."""
        return list(self._threads)

    def start(self, count: int) -> None:
        """Start so many threads."""
        with self._lock:
            self._start(count)

    def _start(self, count: int, begin: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            name = f"kjo-lane-{next(self._numbers)}"
            thread = threading.Thread(target=self._run, args=(begin,), name=name, daemon=True)
            thread.start()
            # Known once it runs: one of these that does not has died.
            self._threads.append(thread)

    def _run(self, begin: Callable[[], None]) -> None:
        self._on_thread()
        try:
            begin()
            while self.run_group():
                pass
        finally:
            self._watch.forget(threading.get_ident())
            connections.close_all()

    def run_group(self, timeout: float | None = None) -> bool:
        """Take one group and run it to its end, on this thread.

        :param timeout: seconds to wait for a group; None for as long as the worker runs.
        :returns: whether there was one, and this thread may take another.
        """
        group = self._scheduler.take(timeout)
        if group is None:
            return False
        thread_id = threading.get_ident()
        deferred: Any = group.deliveries
        departed = Departed()
        self._runs[thread_id] = LaneRun(group, connections.all(), departed)
        try:
            deferred = self._pipeline.run(group.deliveries, departed)
        except RunAbandoned:
            return False
        except BaseException:
            # Nothing of the group was acknowledged: it is tried again, and so is seen. A lane that
            # ended here would be missed by the groups to come.
            logger.exception("A lane failed on a group of %d", len(group.deliveries))
        finally:
            if self._runs.pop(thread_id, None) is not None:
                self._scheduler.finish(group, deferred, HELD_ELSEWHERE_DELAY, departed=departed)
        return True

    def _relieve(self, group: Group) -> None:
        """Let free lanes run what the lane of a group has not begun. Called by a free lane."""
        run = next((each for each in list(self._runs.values()) if each.group is group), None)
        taken = [] if run is None else run.departed.take(group.deliveries)
        if not taken:
            return
        try:
            self._pipeline.give_back_taken(taken)
        except Exception:
            logger.exception("%d jobs were not given back in good order", len(taken))
        finally:
            self._scheduler.finish_departed(taken, taken)

    # --- Handlers that hang -----------------------------------------------------------------------

    def replace(self, thread_id: int) -> bool:
        """Give up a thread whose handler hangs, and start another one in its place; return whether
        it was given up."""
        run = self._runs.get(thread_id)
        if run is None:
            return False
        group = set(run.departed.remaining(run.group.deliveries))
        hung = [job for job in self._watch.jobs() if job.delivery in group]
        if not hung or self._runs.pop(thread_id, None) is None:
            return False  # it has just ended
        for context, seconds, delivery in hung:
            message = (
                "%s still runs after %.0f s, its timeout has no effect: its thread is given up"
            )
            facts = facts_of(delivery, context.attempt)
            logger.error(message, delivery.kind, seconds, extra=facts)
        with self._lock:
            self._threads = [each for each in self._threads if each.ident != thread_id]
            self._start(1, lambda: self._end(run, hung))
        return True

    def _end(self, run: LaneRun, hung: Sequence[RunningJob]) -> None:
        """End what a thread that was given up had begun, in the thread that takes its place."""
        run.departed.keep()
        left = run.departed.remaining(run.group.deliveries)
        deferred: Any = left
        try:
            for connection in run.connections:
                sever(connection)
            deferred = self._pipeline.abandon(left, hung)
        except Exception:
            logger.exception("A group of %d is run again", len(left))
        finally:
            self._scheduler.finish(run.group, deferred, departed=run.departed)

    def abandon_all(self) -> None:
        """Undo what jobs that still run have written, so that others can run them: on SQLite nobody
        could write before. What they still do has no effect."""
        for thread_id in list(self._runs):
            run = self._runs.pop(thread_id, None)
            if run is not None and run.group.mode is not Mode.CONCURRENT:
                self._watch.abandon(thread_id)
                for connection in run.connections:
                    sever(connection, terminates=False)
