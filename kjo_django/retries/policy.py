"""One canonical rule for every failed attempt; other ways to count are adapters."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import timedelta

from kjo_django.exceptions import Retry
from kjo_django.retries.backoff import Backoff
from kjo_django.retries.classification import Verdict, classify, error_class

LONGEST_DELAY = timedelta(days=3650)
"""What somebody asks for beyond this would overflow the calendar sooner or later."""


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens after a failed attempt."""

    retry: bool
    """False: the job is dead-lettered."""
    delay: timedelta
    """Until the next attempt; zero when there is none."""
    pause: timedelta | None
    """How long the partition rests, or None: it goes on."""
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
        """Judge attempt number ``attempt`` (from 1) that ended with ``error``."""
        verdict = classify(error, self.pausable)
        floor = timedelta(seconds=float(self.floors.get(error_class(error), 0)))
        pause = floor if verdict is Verdict.PAUSE else None
        if verdict is Verdict.PERMANENT:
            return Decision(False, timedelta(0), None, "fatal")
        if attempt >= max_attempts:
            return Decision(False, timedelta(0), pause, "exhausted")
        if isinstance(error, Retry) and isinstance(error.delay, timedelta):
            delay = min(max(error.delay, timedelta(0)), LONGEST_DELAY)
            return Decision(True, delay, None, "retry")
        delay = min(max(self.backoff.delay(attempt), floor), LONGEST_DELAY)
        return Decision(True, delay, pause, "retry")


# --- What "3 retries" means elsewhere, as executions ----------------------------------------------


def max_attempts_from_queue_retries(max_retries: int) -> int:
    """Of `Queue`: ``maxRetries=3`` is 3 executions."""
    return max(1, max_retries)


def max_attempts_from_stream_retries(max_retry_count: int) -> int:
    """Of streams and events: ``MAX_RETRY_COUNT=3`` is 4 executions."""
    return max_retry_count + 1


def max_attempts_from_redeliveries(max_redeliveries: int) -> int | None:
    """Of KDLQ: N redeliveries are N+1 executions; negative is without end (None)."""
    return None if max_redeliveries < 0 else max_redeliveries + 1
