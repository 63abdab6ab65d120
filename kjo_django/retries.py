"""When and whether to try again. Pure: no clock, no database, no I/O.

Errors are matched by class through the MRO and by class name, so exceptions of libraries that use
these names need no import here.
"""

from __future__ import annotations

import errno
import random
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from kjo_django.exceptions import (
    JobTimeoutError,
    MessageError,
    PayloadError,
    PermanentError,
    Retry,
    StalledError,
)

LONGEST_DELAY = timedelta(days=3650)
"""What somebody asks for beyond this would overflow the calendar sooner or later."""


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
        most = max(self.maximum.total_seconds(), 0.0)
        exact = min(self.base.total_seconds() * 2.0 ** min(attempt - 1, 62), most)
        draw = random.random() if draw is None else draw  # noqa: S311 - no secret
        jitter = self.jitter if self.is_minimum else -self.jitter
        return timedelta(seconds=exact * (1 + jitter * draw))


PAUSABLE_NAMES = frozenset(
    {
        "DatabaseConnectionError",
        "ServiceUnavailableError",
        "RateLimitExceededError",
        "CircuitBreakerOpenError",
        "PausableError",
    }
)
_CLASSES = {
    "rate_limit": {"RateLimitExceededError"},
    "network": {"ServiceUnavailableError", "CircuitBreakerOpenError"},
    "database": {"DatabaseConnectionError", "OperationalError", "InterfaceError"},
}
"""Names of exceptions by the class of error they are."""
_NETWORK_ERRNOS = frozenset(
    {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def error_class(error: BaseException) -> str:
    """Return ``rate_limit``, ``network``, ``database`` or ``default``."""
    names = _names(error)
    found = next(
        (kind for kind, known in _CLASSES.items() if not known.isdisjoint(names)), "default"
    )
    if not isinstance(error, OSError) or isinstance(error, JobTimeoutError):
        return found
    if found == "rate_limit":
        return found
    # Of an OSError of somebody's own ``errno`` is its first argument, whatever that is.
    number = error.errno if isinstance(error.errno, int) else None
    if isinstance(error, (ConnectionError, TimeoutError)) or number in _NETWORK_ERRNOS:
        return "network"
    return "database" if found == "database" else "default"


def import_path(kind: type[BaseException]) -> str:
    """Return ``module.QualName``; builtins without their module."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def classify(
    error: BaseException, pausable: Collection[str] = ()
) -> Literal["retry", "permanent", "pause"]:
    """Return how a failed attempt is treated.

    :param pausable: import paths or names of further exceptions that pause a partition.
    """
    if isinstance(error, StalledError):
        return "retry"
    if isinstance(error, (PermanentError, MessageError, PayloadError)):
        return "permanent"
    names = _names(error)
    if not PAUSABLE_NAMES.isdisjoint(names):
        return "pause"
    if pausable:
        paths = {import_path(kind) for kind in type(error).__mro__}
        if not paths.isdisjoint(pausable) or not names.isdisjoint(pausable):
            return "pause"
    return "retry"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens after a failed attempt."""

    retry: bool
    """False: the job is dead-lettered."""
    delay: timedelta
    """Until the next attempt; zero when there is none."""
    pause: timedelta | None
    """How long the partition is paused; None: not at all."""
    reason: str
    """``exhausted`` or ``fatal`` of a dead letter; ``retry`` otherwise."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides whether and when to try again.

    :param floors: least seconds before the next attempt by class of error.
    """

    backoff: Backoff
    floors: Mapping[str, float] = field(default_factory=dict)
    pausable: Collection[str] = ()

    def decide(self, error: BaseException, attempt: int, max_attempts: int) -> Decision:
        """Return what follows attempt number ``attempt`` (from 1), which ended with ``error``."""
        treatment = classify(error, self.pausable)
        floor = timedelta(seconds=float(self.floors.get(error_class(error), 0)))
        pause = floor if treatment == "pause" else None
        if treatment == "permanent":
            return Decision(False, timedelta(0), None, "fatal")
        if attempt >= max_attempts:
            return Decision(False, timedelta(0), pause, "exhausted")
        if isinstance(error, Retry) and isinstance(error.delay, timedelta):
            delay = min(max(error.delay, timedelta(0)), LONGEST_DELAY)
            return Decision(True, delay, None, "retry")
        delay = min(max(self.backoff.delay(attempt), floor), LONGEST_DELAY)
        return Decision(True, delay, pause, "retry")
