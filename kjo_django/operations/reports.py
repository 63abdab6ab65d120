"""What a replay did, or would do."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from kjo_django.values import number

SAMPLES = 20
"""Refusals and failures told one by one; all are counted."""

REFUSED_LOOP = "replayed too often"
REFUSED_PROCESSED = "already processed"
REFUSED_NO_SOURCE = "no source topic"
REFUSED_INTERNAL = "an internal job"


RATE_MIN, RATE_MAX = 0.01, 100_000
"""A second. A slower run would look like one that hangs; of a faster one nobody would notice."""


def checked_rate(rate: float | None) -> float | None:
    """Return the rate, or None for no limit.

    :raises ValueError: it is out of bounds, infinite or no number.
    """
    if rate is None:
        return None
    try:
        return number(RATE_MIN, RATE_MAX)(rate)
    except ValueError as error:
        raise ValueError(f"The rate must be {error} a second, not {rate!r}") from None


@dataclass(slots=True)
class ReplayReport:
    """Counts of one run; a dry run fills ``matched`` and the histogram only."""

    source: str
    is_dry_run: bool = False
    is_capped: bool = False
    """Of a dry run: whether there are more than it looked at."""
    matched: int = 0
    """Dead letters the filter found, as far as the limit let it look."""
    replayed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    """By reason; what is refused stays open."""
    failed: int = 0
    """Not accepted by the transport; these stay open and are tried by the next run."""
    skipped: int = 0
    """Changed by somebody else meanwhile, or (from a topic) not matching the filter."""
    already_processed: int = 0
    """Of those matched, how many have taken effect here before."""
    histogram: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    """By reason, handler and error type."""
    samples: list[dict[str, str]] = field(default_factory=list)
    ended: Counter[str] = field(default_factory=Counter)
    """Of those run here and now: how, by result."""
    unknown_ids: list[str] = field(default_factory=list)
    """From a topic read to its end: the ids asked for that no record has."""
    stopped: str = ""
    """Why the run ended early, if it did."""

    @property
    def is_ok(self) -> bool:
        """Whether nothing failed; refusals are answers, not failures."""
        return not self.failed and not self.stopped

    def count(self, reason: str, handler: str, error_type: str) -> None:
        """Count one that matched."""
        self.matched += 1
        self.histogram[reason, handler, error_type] += 1

    def refuse(self, id: str, reason: str, detail: str = "") -> None:
        """Count one that is refused."""
        self.refused[reason] += 1
        self._sample(id, "refused", f"{reason}: {detail}" if detail else reason)

    def skip(self, id: str, why: str) -> None:
        """Count one that nothing is to be done with."""
        self.skipped += 1
        self._sample(id, "skipped", why)

    def fail(self, id: str, error: object) -> None:
        """Count one the transport did not take."""
        self.failed += 1
        self._sample(id, "failed", str(error))

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return {
            "source": self.source,
            "dry_run": self.is_dry_run,
            "is_capped": self.is_capped,
            "matched": self.matched,
            "replayed": self.replayed,
            "refused": dict(self.refused),
            "failed": self.failed,
            "skipped": self.skipped,
            "already_processed": self.already_processed,
            "histogram": [
                {"reason": reason, "handler": handler, "error_type": error, "count": count}
                for (reason, handler, error), count in self.histogram.most_common()
            ],
            "ended": dict(self.ended),
            "samples": self.samples,
            "stopped": self.stopped or None,
            "ok": self.is_ok,
        }

    def _sample(self, id: str, outcome: str, detail: str) -> None:
        if len(self.samples) < SAMPLES:
            self.samples.append({"id": id, "outcome": outcome, "detail": detail})


class Pace:
    """Spreads work evenly: at most ``rate`` a second, without bursts; None means no limit.

    :raises ValueError: it is no rate, see ``checked_rate``.
    """

    def __init__(self, rate: float | None) -> None:
        rate = checked_rate(rate)
        self._interval = 0.0 if rate is None else 1 / rate
        self._next = time.monotonic()

    def wait(self) -> None:
        """Sleep until the next one is due."""
        if not self._interval:
            return
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._interval
