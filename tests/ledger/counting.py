"""When a worker has taken the start of a job for the count of its rate."""

from __future__ import annotations

import threading
import time

from kjo_django.limits.permits import Permits, Starting

_call = threading.local()
_note_start = Permits.note_start


def _note_call(permits: Permits, delivery: Starting) -> None:
    before = time.monotonic()
    _note_start(permits, delivery)
    _call.noted = before, time.monotonic()


Permits.note_start = _note_call  # type: ignore[method-assign]


def counted_or_repeated() -> tuple[float, float] | None:
    """Return the monotonic moments between which the start of the handler that runs here was taken
    for the count; None where this call was not counted."""
    noted: tuple[float, float] | None = getattr(_call, "noted", None)
    _call.__dict__.clear()
    return noted


def counted() -> tuple[float, float]:
    """Return the same; this moment twice, where the handler has no rate."""
    now = time.monotonic()
    return counted_or_repeated() or (now, now)
