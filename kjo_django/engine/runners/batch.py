"""Handlers that take several jobs in one call (``@job(batch=…)``), with every promise per item.

A batch is called once for all its items. What it raises says nothing about which of them is to
blame, so its writes are undone and each item runs again alone, in the same attempt: the guilty one
fails by itself, the innocent spend nothing.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from django.utils import timezone

from kjo_django.engine.attempt import Attempt
from kjo_django.engine.handler.call import (
    ENDINGS,
    CallResult,
    acall,
    call_batch,
    is_interrupt,
    make_context,
    wrapped,
)
from kjo_django.engine.handler.context import Abort, BatchItem, JobContext
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.exceptions import JobCancelledError, PermanentError, text_of
from kjo_django.messages.serializers import load_value

logger = logging.getLogger("kjo_django")

UNWANTED = (Abort.CANCELLED, Abort.SHUTDOWN, Abort.LOST)
"""Reasons to end for which nobody is to run it again now."""


def in_steps(attempts: Sequence[Attempt]) -> Sequence[Sequence[Attempt]]:
    """Arrange a group: each step is one call, of one handler or of a batch handler's several.

    A batch has at most one item of a key, and of two records of one message at most one: the later
    one's step comes later.
    """
    if not any(attempt.delivery.batch for attempt in attempts):
        return [[attempt] for attempt in attempts]
    steps: list[list[Attempt]] = []
    last: dict[object, int] = {}
    open_steps: dict[object, list[int]] = {}
    for attempt in attempts:
        delivery = attempt.delivery
        order = (delivery.shard, attempt.key)
        earliest = 1 + max((last.get(one, -1) for one in order), default=-1)
        limit = delivery.batch or 1
        mine = open_steps.setdefault(delivery.handler, []) if delivery.batch else []
        at = bisect_left(mine, earliest)
        if at < len(mine):
            number = mine[at]
            steps[number].append(attempt)
        else:
            number = len(steps)
            steps.append([attempt])
            mine.append(number)
        if len(steps[number]) >= limit:
            mine.remove(number)
        last.update(dict.fromkeys(order, number))
    return steps


class Batch:
    """One call of a batch handler."""

    def __init__(self, attempts: Sequence[Attempt]) -> None:
        self.attempts = attempts
        handler = attempts[0].delivery.handler
        assert handler is not None
        self.handler = handler
        self.items: list[BatchItem] = []
        self._ended: dict[Attempt, CallResult] = {}
        self._items: dict[Attempt, BatchItem] = {}
        for attempt in attempts:
            item, message = make_context(BatchItem, attempt), attempt.delivery.message
            assert message is not None
            try:
                payload = load_value(message.payload, message.content_type)
                ((item.payload,), _) = handler.arguments(payload)
            except Exception as error:
                self._ended[attempt] = CallResult(timezone.now(), 0.0, error=error)
            else:
                self._items[attempt] = item
                self.items.append(item)

    def call(self, watch: TimeoutWatch) -> list[CallResult]:
        """Call the handler and return how each attempt ended.

        :raises Exception: what the handler raises.
        """
        if not self.items:
            return self._endings([], timezone.now(), 0.0)
        started_at, clock = timezone.now(), time.perf_counter()
        value = call_batch(self.items, watch)
        return self._endings(value, started_at, time.perf_counter() - clock)

    async def acall(self, watch: TimeoutWatch) -> list[CallResult]:
        """Call the handler on an event loop and return how each attempt ended.

        :raises Exception: what the handler raises.
        """
        if not self.items:
            return self._endings([], timezone.now(), 0.0)
        started_at, clock = timezone.now(), time.perf_counter()
        value = await call_batch(self.items, watch, on_loop=True)
        return self._endings(value, started_at, time.perf_counter() - clock)

    def after(self, error: BaseException) -> list[CallResult | Batch]:
        """Return for each attempt how it ended when the call raised, or the batch of it alone that
        is to be called instead."""
        if len(self.items) > 1:
            logger.warning(
                "A batch of %d of %s failed, its items run again one by one: %s: %s",
                len(self.items),
                self.handler.name,
                type(error).__name__,
                text_of(error),
                extra={
                    "handler": self.handler.name,
                    "queue": self.attempts[0].delivery.queue.name,
                },
            )
        parts: list[CallResult | Batch] = []
        for attempt in self.attempts:
            if attempt in self._ended:
                parts.append(self._ended[attempt])
            elif len(self.items) == 1 or self._items[attempt].abort_reason in UNWANTED:
                parts.append(self._failed(attempt, error))
            else:
                parts.append(Batch([attempt]))
        return parts

    def aborted(self, error: BaseException) -> dict[Attempt, CallResult]:
        """Return how those have ended that were asked to when the call raised."""
        asked = (a for a, item in self._items.items() if item.abort_reason in UNWANTED)
        return {attempt: self._failed(attempt, error) for attempt in asked}

    def _failed(self, attempt: Attempt, error: BaseException) -> CallResult:
        item = self._items[attempt]
        if len(self.items) > 1 and not isinstance(error, JobCancelledError):
            # Another's error, maybe: asked to end, it has.
            why = f"{type(error).__name__}: {text_of(error)}"
            error = JobCancelledError(f"The batch of job {item.job_id} was aborted: {why}")
        ran = CallResult(timezone.now(), 0.0, error=error)
        ran.abort_reason, ran.result_ttl = item.abort_reason, item.result_ttl
        return ran

    def _endings(self, value: Any, started_at: Any, seconds: float) -> list[CallResult]:
        """Give each item its ending, and its share of the time.

        :raises PermanentError: the handler did not return one result for each item, or one that
            cannot be stored.
        """
        count = len(self.items)
        if value is None:
            values: Sequence[Any] = [None] * count
        elif isinstance(value, list | tuple) and len(value) == count:
            values = value
        else:
            what = f"{len(value)}" if isinstance(value, list | tuple) else type(value).__name__
            raise PermanentError(
                f"The batch handler {self.handler.name} must return None or a list of one result "
                f"for each of its {count} items, not {what}"
            )
        results = iter(values)
        endings = []
        for attempt in self.attempts:
            item = self._items.get(attempt)
            if item is None:
                endings.append(self._ended[attempt])
                continue
            result = next(results)
            ran = CallResult(started_at, seconds / count, error=item.error)
            if item.error is None:
                ran.value = wrapped(attempt.delivery, result)
            ran.abort_reason, ran.result_ttl = item.abort_reason, item.result_ttl
            endings.append(ran)
        return endings


def run_batch(
    batch: Batch,
    attempt: Callable[[Batch], list[CallResult]],
    passing: tuple[type[BaseException], ...] = (),
) -> list[CallResult]:
    """Run a batch, and its items one by one if it fails; return how each ended.

    :param attempt: calls a batch, undoing its writes if it raises.
    :param passing: exceptions that are nobody's of the batch; raised on.
    """
    try:
        return attempt(batch)
    except passing:
        raise
    except ENDINGS as error:
        if is_interrupt(error):
            raise
        return [
            part if isinstance(part, CallResult) else run_batch(part, attempt, passing)[0]
            for part in batch.after(error)
        ]


async def arun_batch(
    batch: Batch, attempt: Callable[[Batch], Awaitable[list[CallResult]]]
) -> list[CallResult]:
    """Run a batch on an event loop, and its items one by one if it fails; return how each ended."""
    try:
        return await attempt(batch)
    except ENDINGS as error:
        return [
            part if isinstance(part, CallResult) else (await arun_batch(part, attempt))[0]
            for part in batch.after(error)
        ]


async def call_step(step: Sequence[Attempt], watch: TimeoutWatch) -> list[CallResult]:
    """Make one call on the loop this is awaited on; return how each of the step ended."""
    first = step[0]
    if first.delivery.batch is not None:
        return await arun_batch(Batch(step), lambda batch: batch.acall(watch))
    context = make_context(JobContext, first)
    return [await acall(first.delivery, context, watch)]
