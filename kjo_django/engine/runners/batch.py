"""Handlers that take several jobs in one call (``@job(batch=…)``), with every promise per item.

A batch is called once for all its items. What it raises says nothing about which of them is to
blame, so its writes are undone and each item runs again alone, in the same attempt: the guilty one
fails by itself, the innocent spend nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from asgiref.sync import async_to_sync
from django.utils import timezone

from kjo_django.engine.admission import Start
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.call import (
    ENDINGS,
    Ran,
    acall,
    acall_batch,
    call_batch,
    describe,
    is_interrupt,
    make_context,
    wrapped,
)
from kjo_django.engine.handler.context import Abort, BatchItem
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.exceptions import JobCancelledError, PermanentError, text_of
from kjo_django.messages.serializers import load_value
from kjo_django.store.rows import JobRow

logger = logging.getLogger("kjo_django")

UNWANTED = (Abort.CANCELLED, Abort.SHUTDOWN, Abort.LOST)
"""Reasons to end for which nobody is to run it again now."""

Started = tuple[Delivery, Start, JobRow | None]
"""A delivery that may run, how it starts, and its job's row."""


def in_steps(
    deliveries: Sequence[Delivery], keys: Mapping[Delivery, object]
) -> Sequence[list[Delivery]]:
    """Arrange a group: each step is one call, of one delivery or of a batch handler's several.

    A batch has at most one item of a key, and of two records of one message at most one: the later
    one's step comes later.

    :param keys: what tells the deliveries' messages apart.
    """
    if not any(delivery.batch for delivery in deliveries):
        return [[delivery] for delivery in deliveries]
    steps: list[list[Delivery]] = []
    last: dict[object, int] = {}
    open_steps: dict[object, list[int]] = {}
    for delivery in deliveries:
        order = (delivery.shard, keys[delivery])
        earliest = 1 + max((last.get(one, -1) for one in order), default=-1)
        limit = delivery.batch or 1
        mine = open_steps.setdefault(delivery.handler, []) if delivery.batch else []
        at = bisect_left(mine, earliest)
        if at < len(mine):
            number = mine[at]
            steps[number].append(delivery)
        else:
            number = len(steps)
            steps.append([delivery])
            mine.append(number)
        if len(steps[number]) >= limit:
            mine.remove(number)
        last.update(dict.fromkeys(order, number))
    return steps


class Batch:
    """One call of a batch handler."""

    def __init__(self, started: Sequence[Started]) -> None:
        self.started = started
        handler = started[0][0].handler
        assert handler is not None
        self.handler = handler
        self.items: list[BatchItem] = []
        self._ended: dict[Delivery, Ran] = {}
        self._items: dict[Delivery, BatchItem] = {}
        for delivery, start, row in started:
            item = describe(BatchItem, delivery, start.attempt, start.max_attempts, row)
            message = delivery.message
            assert message is not None
            try:
                payload = load_value(message.payload, message.content_type)
                ((item.payload,), _) = handler.arguments(payload)
            except Exception as error:
                self._ended[delivery] = Ran(timezone.now(), 0.0, error=error)
            else:
                self._items[delivery] = item
                self.items.append(item)

    def call(self, watch: TimeoutWatch) -> list[Ran]:
        """Call the handler and return how each of ``started`` ended.

        :raises Exception: what the handler raises.
        """
        if not self.items:
            return self._endings([], timezone.now(), 0.0)
        started_at, clock = timezone.now(), time.perf_counter()
        value = call_batch(self.items, watch)
        return self._endings(value, started_at, time.perf_counter() - clock)

    async def acall(self, watch: TimeoutWatch) -> list[Ran]:
        """The same on an event loop."""
        if not self.items:
            return self._endings([], timezone.now(), 0.0)
        started_at, clock = timezone.now(), time.perf_counter()
        value = await acall_batch(self.items, watch)
        return self._endings(value, started_at, time.perf_counter() - clock)

    def after(self, error: BaseException) -> list[Ran | Batch]:
        """Return for each of ``started`` how it ended when the call raised, or the batch of it
        alone that tells."""
        if len(self.items) > 1:
            logger.warning(
                "A batch of %d of %s failed, its items run again one by one: %s: %s",
                len(self.items),
                self.handler.name,
                type(error).__name__,
                text_of(error),
                extra={
                    "handler": self.handler.name,
                    "queue": self.started[0][0].queue.name,
                },
            )
        parts: list[Ran | Batch] = []
        for one in self.started:
            delivery = one[0]
            if delivery in self._ended:
                parts.append(self._ended[delivery])
            elif len(self.items) == 1 or self._items[delivery].abort_reason in UNWANTED:
                parts.append(self._failed(delivery, error))
            else:
                parts.append(Batch([one]))
        return parts

    def aborted(self, error: BaseException) -> dict[Delivery, Ran]:
        """Return how those have ended that were asked to when the call raised."""
        asked = (d for d, item in self._items.items() if item.abort_reason in UNWANTED)
        return {delivery: self._failed(delivery, error) for delivery in asked}

    def _failed(self, delivery: Delivery, error: BaseException) -> Ran:
        item = self._items[delivery]
        if len(self.items) > 1 and not isinstance(error, JobCancelledError):
            # Another's error, maybe: asked to end, it has.
            told = f"{type(error).__name__}: {text_of(error)}"
            error = JobCancelledError(f"The batch of job {item.job_id} was aborted: {told}")
        ran = Ran(timezone.now(), 0.0, error=error)
        ran.abort_reason, ran.result_ttl = item.abort_reason, item.result_ttl
        return ran

    def _endings(self, value: Any, started_at: Any, seconds: float) -> list[Ran]:
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
        for delivery, _, _ in self.started:
            item = self._items.get(delivery)
            if item is None:
                endings.append(self._ended[delivery])
                continue
            result = next(results)
            ran = Ran(started_at, seconds / count, error=item.error)
            if item.error is None:
                ran.value = wrapped(delivery, result)
            ran.abort_reason, ran.result_ttl = item.abort_reason, item.result_ttl
            endings.append(ran)
        return endings


def run_batch(
    batch: Batch,
    attempt: Callable[[Batch], list[Ran]],
    passing: tuple[type[BaseException], ...] = (),
) -> list[Ran]:
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
            part if isinstance(part, Ran) else run_batch(part, attempt, passing)[0]
            for part in batch.after(error)
        ]


async def arun_batch(batch: Batch, attempt: Callable[[Batch], Awaitable[list[Ran]]]) -> list[Ran]:
    """The same on an event loop."""
    try:
        return await attempt(batch)
    except ENDINGS as error:
        return [
            part if isinstance(part, Ran) else (await arun_batch(part, attempt))[0]
            for part in batch.after(error)
        ]


def concurrent_steps(started: Sequence[Started]) -> list[list[Started]]:
    """Arrange what is to run at the same time: each step is one call."""
    begun = {one[0]: one for one in started}
    steps = in_steps(list(begun), {delivery: delivery for delivery in begun})
    return [[begun[delivery] for delivery in step] for step in steps]


def call_concurrently(started: Sequence[Started], watch: TimeoutWatch) -> list[Ran]:
    """Run asynchronous handlers at the same time on one event loop, outside any transaction, and
    wait for all of them."""
    return async_to_sync(_gather)(started, watch)


async def _gather(started: Sequence[Started], watch: TimeoutWatch) -> list[Ran]:
    steps = concurrent_steps(started)
    ran: dict[Delivery, Ran] = {}
    for step, endings in zip(
        steps, await asyncio.gather(*(call_step(step, watch) for step in steps)), strict=True
    ):
        ran.update(zip((delivery for delivery, _, _ in step), endings, strict=True))
    return [ran[delivery] for delivery, _, _ in started]


async def call_step(step: Sequence[Started], watch: TimeoutWatch) -> list[Ran]:
    """Make one call on the loop this is awaited on; return how each of the step ended."""
    delivery, start, row = step[0]
    if delivery.batch is not None:
        return await arun_batch(Batch(step), lambda batch: batch.acall(watch))
    context = make_context(delivery, start.attempt, start.max_attempts, row)
    return [await acall(delivery, context, watch)]
