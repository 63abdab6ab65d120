"""Around a handler's call: what it publishes inherits, its trace goes on, log records know it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from contextvars import Token
from typing import Any

from kjo_django import tracing
from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.context import JobContext
from kjo_django.messages import headers as names
from kjo_django.messages.carried import carry, drop
from kjo_django.running_job import Run, running

_TRACE_ID = re.compile(r"[0-9a-f]{2}-([0-9a-f]{32})-")


class Running:
    """A handler's run: entered around its call, in its thread or task.

    :param deliveries: one, or those of a batch.
    :param contexts: of each of them.
    :param inherited: by what is published meanwhile; see ``messages.carried``.
    """

    __slots__ = ("_carried", "_contexts", "_deliveries", "_inherited", "_scope", "_token")

    def __init__(
        self,
        deliveries: Sequence[Delivery],
        contexts: Sequence[JobContext],
        inherited: Mapping[str, str],
    ) -> None:
        self._deliveries = deliveries
        self._contexts = contexts
        self._scope: AbstractContextManager[object] | None = None
        self._inherited = inherited

    def __enter__(self) -> Running:
        self._token: Token[Run | None] = running.set(self)
        self._carried = carry(self._inherited)
        if tracing.tracer is not None:
            self._scope = tracing.tracer.running(self._deliveries, self._contexts)
            self._scope.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self._scope is not None:
            self._scope.__exit__(*error)
        drop(self._carried)
        running.reset(self._token)

    @property
    def facts(self) -> dict[str, Any]:
        """What ``facts_of`` says of the run; of a batch, what its items have in common."""
        first, *others = [
            facts_of(delivery, context.attempt)
            for delivery, context in zip(self._deliveries, self._contexts, strict=True)
        ]
        for other in others:
            first = {name: value for name, value in first.items() if other[name] == value}
        return first

    @property
    def trace_id(self) -> str:
        """Of the trace its message carries, or ""; of a batch, of its first."""
        headers = self._deliveries[0].record.headers
        found = _TRACE_ID.match(names.text(headers, names.TRACEPARENT))
        return found[1] if found else ""


def facts_of(delivery: Delivery, attempt: int | None = None) -> dict[str, Any]:
    """Return what a log record that concerns a delivery says in its ``extra``; never a payload."""
    message, record = delivery.message, delivery.record
    handler = delivery.kind or (message.type if message is not None else "")
    return {
        "job_id": (message.job_id or message.id) if message is not None else "",
        "handler": handler or names.text(record.headers, names.TYPE),
        "queue": delivery.queue.name,
        "attempt": attempt,
        "message_id": message.id if message is not None else "",
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
    }
