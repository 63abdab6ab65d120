"""Watching a consumer: six hooks and a signal for each. What a watcher raises changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from kjo_django import signals
from kjo_django.transports.base import Record

logger = logging.getLogger("kjo_django")


class KDLQMessageLifecycleListener:
    """Override what you want to know of. ``consumer`` is the consumer's id."""

    def on_message_processing(
        self, consumer: str, record: Record, status: Any, error: BaseException | None
    ) -> None:
        """The processor has answered, or raised ``error``."""

    def on_message_redelivery_success(self, consumer: str, record: Record) -> None:
        """It is on its way again, or durably waiting for it."""

    def on_message_redelivery_error(
        self, consumer: str, record: Record, error: BaseException
    ) -> None:
        """It could not be redelivered; the offset must not be committed."""

    def on_message_kill_success(self, consumer: str, record: Record) -> None:
        """It is in the dead-letter topic."""

    def on_message_kill_error(self, consumer: str, record: Record, error: BaseException) -> None:
        """It could not be sent there; the offset must not be committed."""

    def on_message_skip(self, consumer: str, record: Record) -> None:
        """It was killed too often and is recorded as discarded."""


_SIGNALS = {
    "on_message_processing": signals.message_processed,
    "on_message_redelivery_success": signals.message_redelivered,
    "on_message_redelivery_error": signals.message_redelivery_failed,
    "on_message_kill_success": signals.message_killed,
    "on_message_kill_error": signals.message_kill_failed,
    "on_message_skip": signals.message_skipped,
}


def tell(
    listeners: Iterable[KDLQMessageLifecycleListener],
    hook: str,
    consumer: str,
    record: Record,
    **facts: Any,
) -> None:
    """Call a hook of every listener and send its signal; what one raises is logged."""
    for listener in listeners:
        try:
            getattr(listener, hook)(consumer, record, *facts.values())
        except Exception:
            logger.exception("%s of %r failed", hook, listener)
    signals.send(_SIGNALS[hook], sender=consumer, record=record, **facts)
