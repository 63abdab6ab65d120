"""What librdkafka calls back while a consumer polls, commits or closes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kjo_django.transports.kafka.clients import logger


class Callbacks:
    """Keeps exceptions of our callbacks out of the client.

    One that gets into ``consume`` destroys a batch whose position has already moved on. Belongs to
    the thread that polls, in which the client calls.
    """

    def __init__(self, group: str) -> None:
        self._group = group
        self._interrupt: BaseException | None = None
        self.is_inside = False
        """Whether one runs just now: the client must not be polled again before it has returned."""

    def guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback: what it raises is logged, an interrupt waits for `raise_interrupt`."""

        def call(*arguments: Any) -> None:
            outer, self.is_inside = self.is_inside, True
            try:
                callback(*arguments)
            except Exception:
                logger.exception("A callback of consumer group %s failed", self._group)
            except BaseException as interrupt:
                self._interrupt = interrupt
            finally:
                self.is_inside = outer

        return call

    def raise_interrupt(self) -> None:
        """Raise what interrupted a callback, if anything did; to be called outside the client."""
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt
