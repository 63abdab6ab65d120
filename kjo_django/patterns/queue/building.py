"""From an id, a payload and options to the row of a job, everything resolved and validated."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Any

from kjo_django.conf import get_settings
from kjo_django.enqueue.definition import EnqueueOptions, dumped, new_job
from kjo_django.enqueue.storing import milliseconds
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import Serializer, register_serializer
from kjo_django.models import Job

DEFAULT_MAX_ATTEMPTS = 3
"""Executions of a job: "3 retries" are three."""


def attempts_in(queue: str, own: int | None) -> int:
    """Return how many attempts a queue's jobs get: its own number, the settings' or 3."""
    declared = get_settings().queues.get(queue, {}).get("max_attempts")
    return own or declared or DEFAULT_MAX_ATTEMPTS


class JobBuilder:
    """Builds the jobs of one queue; what it is given stands where an enqueue says nothing.

    :raises ValueError: a lifetime that means nothing.
    """

    def __init__(
        self,
        queue: str,
        handler: str,
        max_attempts: int | None,
        result_ttl: timedelta | int | None,
        serializer: Serializer,
    ) -> None:
        register_serializer(serializer)
        self._queue = queue
        self._handler = handler
        self.max_attempts = max_attempts
        self.result_ttl = None if result_ttl is None else milliseconds(result_ttl, timedelta(1))
        self._serializer = serializer

    def build(
        self,
        id: str,
        payload: Any,
        *,
        serializer: Serializer | None = None,
        correlation_id: str | None = None,
        headers: Mapping[str, str] | None = None,
        reply_to: str | None = None,
        key: str | None = None,
        delay: timedelta | None = None,
        run_at: datetime | None = None,
        expires_at: datetime | None = None,
        max_attempts: int | None = None,
        result_ttl: timedelta | int | None = None,
    ) -> Job:
        """Return the unsaved row of a job; see ``Queue.enqueue``."""
        if not isinstance(id, str):
            raise TypeError(f"id must be text, not {id!r}")
        ours = {names.CORRELATION_ID: correlation_id, names.REPLY_TO: reply_to}
        sent = {**(headers or {}), **{k: v for k, v in ours.items() if v is not None}}
        options = EnqueueOptions(
            id=id,
            key=key,
            delay=delay,
            run_at=run_at,
            expires_at=expires_at,
            max_attempts=max_attempts,
            result_ttl=result_ttl,
            headers=sent or None,
        )
        queue = get_settings().queue(self._queue)
        if serializer is not None:
            register_serializer(serializer)
        chosen = serializer or self._serializer
        lasts = result_ttl if result_ttl is not None else self.result_ttl
        return new_job(
            options,
            queue=queue,
            handler=self._handler,
            payload=dumped(payload, chosen),
            serializer=chosen,
            key=key or "",
            max_attempts=max_attempts or attempts_in(self._queue, self.max_attempts),
            result_ttl=milliseconds(lasts, queue.result_ttl),
        )
