"""Clocks that a test sets."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from kjo_django.clock import Clock

BEGINS_AT = 1000.0


def set_now(patch: pytest.MonkeyPatch, now: Callable[[], datetime]) -> None:
    """Let this be the present, for Django and for this app."""
    patch.setattr(timezone, "now", now)
    patch.setattr(Clock, "now", staticmethod(now))


class SetClock(Clock):
    """A clock that stands still until a test sets it on. Whoever waits on it for an event sets it
    on by that much, and waits no longer."""

    def __init__(self) -> None:
        self.seconds = BEGINS_AT
        """What the monotonic clock reads."""
        self._began = timezone.now()

    def now(self) -> datetime:
        return self._began + timedelta(seconds=self.seconds - BEGINS_AT)

    def monotonic(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds

    def wait(self, event: threading.Event | threading.Condition, seconds: float | None) -> bool:
        if seconds is None or isinstance(event, threading.Condition):
            return super().wait(event, seconds)
        if not event.is_set():
            self.advance(seconds)
        return event.is_set()
