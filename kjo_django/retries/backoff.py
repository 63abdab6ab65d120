"""Exponential back-off with jitter and a cap."""

from __future__ import annotations

import random
from dataclasses import dataclass
from datetime import timedelta


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before the next attempt: ``base · 2^(attempt-1)``, at most ``maximum``.

    :param jitter: the share of the delay, 0 to 1, drawn at random, so that jobs which failed
        together do not come back together. The delay never exceeds ``maximum`` and never falls
        below ``(1 - jitter)`` of the undisturbed one.
    :param is_minimum: the undisturbed delay is the least there is; jitter is added to it instead,
        also beyond ``maximum``.
    """

    base: timedelta
    maximum: timedelta
    jitter: float = 0.2
    is_minimum: bool = False

    def delay(self, attempt: int, draw: float | None = None) -> timedelta:
        """Return the delay after failed attempt number ``attempt`` (from 1).

        :param draw: a number from 0 to 1 in place of the random one.
        """
        # Beyond 2^62 every sensible base has long reached the cap.
        exact = min(self.base.total_seconds() * 2.0 ** min(attempt - 1, 62), self._cap)
        draw = random.random() if draw is None else draw  # noqa: S311 - no secret
        jitter = self.jitter if self.is_minimum else -self.jitter
        return timedelta(seconds=exact * (1 + jitter * draw))

    @property
    def _cap(self) -> float:
        return max(self.maximum.total_seconds(), 0.0)
