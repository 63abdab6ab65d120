"""Running ``atomic=False`` handlers: outside any transaction, under a lease in the job's row.

The lease is durable, so of two workers one runs the job even when coordination has vanished. The
ending is recorded with the marker in one transaction afterwards, and only by whoever still holds
the lease: a worker that was frozen past it loses.

The jobs of a group are admitted together, run one by one, and recorded together. What has run and
is not recorded yet would run again after a crash, so it is recorded before another starts as soon
as it has taken a small part of the groups' budget; of handlers that take longer than that, each is.
Where one keeps its lane although those before it were quick, the recorder records these meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from django.utils import timezone

from kjo_django.engine import failures
from kjo_django.engine.attempt import Attempt
from kjo_django.engine.handler.call import ENDINGS, CallResult, call, is_interrupt, make_context
from kjo_django.engine.handler.connections import freshen_connections, open_blocks
from kjo_django.engine.handler.context import JobContext
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.recorder import EndedQueue
from kjo_django.engine.runners.batch import Batch, in_steps, run_batch
from kjo_django.runtime import Runtime


class LeasedRunner:
    """Calls handlers one after the other, outside a transaction; used by every lane's thread.

    :param on_measure: is called with a handler's name and the seconds that its call took.
    :param stopping: set when the worker stops.
    :param is_own: whether the threads that call handlers are a worker's own.
    """

    def __init__(
        self,
        runtime: Runtime,
        watch: TimeoutWatch,
        on_measure: Callable[[str, float], None],
        stopping: threading.Event,
        *,
        is_own: bool,
    ) -> None:
        self._runtime = runtime
        self._watch = watch
        self._on_measure = on_measure
        self._stopping = stopping
        self._is_own = is_own

    def run(self, attempts: Sequence[Attempt], ended: EndedQueue) -> None:
        """Call the handlers of the attempts that have no ending, as long as their admission is
        good: for the groups' budget. When the worker stops, nothing begins any more but the first.

        :param ended: takes what has ended; what has not begun is left without an ending.
        """
        until = time.monotonic() + self._runtime.settings.group_budget.total_seconds()
        has_begun = False
        for step in in_steps(attempts):
            not_run = [attempt for attempt in step if attempt.ending is not None]
            ended.put_not_run(not_run)
            ended.held_back.after(not_run)
            if has_begun and (self._stopping.is_set() or time.monotonic() >= until):
                continue
            calls = [
                attempt
                for attempt in step
                if attempt.ending is None and not ended.held_back.covers(attempt.delivery)
            ]
            if calls:
                has_begun = True
                ended.before_handler()
                began = time.monotonic()
                for attempt in calls:
                    attempt.started_at = timezone.now()
                self._call(calls)
                ended.held_back.after(calls)
                ended.put(began, calls)

    def _call(self, step: Sequence[Attempt]) -> None:
        """Make one call, of a handler or of a batch handler's several, and judge how it ended."""
        first = step[0]
        # The blocks of atomic() a call is made in: none, in a thread of a worker's own.
        outer = None if self._is_own else open_blocks()
        if first.delivery.batch is not None:
            endings = run_batch(Batch(step), lambda batch: self._call_batch(batch, outer))
            seconds = sum(one.seconds for one in endings) / len(endings)
            self._on_measure(first.delivery.kind, seconds)
            for attempt, called in zip(step, endings, strict=True):
                failures.judge(self._runtime, attempt, called)
            return
        context = make_context(JobContext, first)
        called, clock = CallResult(timezone.now(), 0.0), time.perf_counter()
        try:
            called.value = call(first.delivery, context, self._watch)
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            called.error, called.abort_reason = error, context.abort_reason
        called.seconds, called.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(first.delivery.kind, called.seconds)
        # Nor is what it has left of its connection the next one's fault.
        left = freshen_connections(is_own=self._is_own, outer=outer)
        if left is not None and called.error is None:
            called.error, called.value = left, None
        failures.judge(self._runtime, first, called)

    def _call_batch(self, batch: Batch, outer: Mapping[str, int] | None) -> list[CallResult]:
        left: Exception | None = None
        try:
            endings = batch.call(self._watch)
        finally:
            left = freshen_connections(is_own=self._is_own, outer=outer)
        if left is not None:
            raise left
        return endings
