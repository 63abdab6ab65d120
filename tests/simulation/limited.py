"""Jobs with limits that hold over all processes, and what must hold of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from kjo_django import job
from kjo_django.models import HeldJob
from kjo_django.values import rate
from tests.faults.boundary import Boundary, current
from tests.faults.scenarios import QUEUE, Kinds, _key_of
from tests.ledger.models import Entry
from tests.simulation.fibers import Fiber, current_fiber

LIMITS: dict[str, dict[str, Any]] = {
    "rated": {"rate": "2/3s", "burst": 2, "rate_key": "job"},
    "rated-outside": {"rate": "1/s", "atomic": False},
    "rated-coroutine": {"rate": "1/s", "atomic": False},
    "slots": {"concurrency": 1, "concurrency_key": "job"},
    "slots-outside": {"concurrency": 1, "atomic": False, "concurrency_key": "job"},
    "two-slots-outside": {"concurrency": 2, "atomic": False},
    "slots-coroutine": {"concurrency": 1, "atomic": False},
    "rate-and-slots": {"rate": "2/s", "concurrency": 1},
}
"""The kinds of jobs with limits, and the options they are declared with."""
LASTS = 25.0
"""Seconds for which a slot is held after its process has last renewed what it holds, at least."""
TOLERANCE = 2e-6
"""Seconds by which a window may seem shorter: its begin and its end are read in whole microseconds,
of which each may have lost a part."""


def limit_of(kind: str, name: str) -> str:
    """Return what is limited together with this job: all of its kind, or those of one key."""
    has_key = {"rate_key", "concurrency_key"} & {*LIMITS[kind]}
    return f"{kind} {crc32(name.encode()) % 2}" if has_key else kind


@dataclass(eq=False)
class Run:
    """A call of a handler that has not returned."""

    limit: str
    boundary: Boundary
    fiber: Fiber | None
    is_given_up: bool = False
    """Whether its thread was given up, and its slot with it."""


class Round(threading.local):
    """What a thread has started in its round."""

    def __init__(self) -> None:
        self.started: set[str] = set()


class Limited:
    """Handlers with limits, which note when they start and how many of them run at once."""

    def __init__(self, kinds: Kinds) -> None:
        self._kinds = kinds
        self.jobs = {kind: self._declare(kind, **options) for kind, options in LIMITS.items()}
        self.forget()

    def forget(self) -> None:
        """Forget what was noted."""
        self.starts: dict[str, list[float]] = {}
        self.renewed_at: dict[Boundary, float] = {}
        """When each process last renewed what it holds."""
        self._round = Round()
        self._running: list[Run] = []
        self._problems: list[str] = []

    def begin_round(self) -> None:
        """Note that this thread begins another round: of a lane, another group. What a group calls
        once more has been undone, and goes on in the same attempt: it starts once."""
        self._round.started = set()

    def give_up(self, fiber: Fiber) -> None:
        """Note that this thread was given up in the midst of a handler."""
        for run in self._running:
            run.is_given_up |= run.fiber is fiber

    def _declare(self, kind: str, **options: Any) -> Any:
        for name in ("rate_key", "concurrency_key"):
            if name in options:
                options[name] = lambda job, ending: limit_of(kind, job)

        def write(job: str, ending: str) -> None:
            with self._run(kind, job):
                Entry.objects.create(job=job)
                if error := self._kinds.behave(job, ending):
                    raise error

        async def awrite(job: str, ending: str) -> None:
            with self._run(kind, job):
                await Entry.objects.acreate(job=job)
                if error := self._kinds.behave(job, ending):
                    raise error

        handler: Any = awrite if kind.endswith("coroutine") else write
        options["key"] = lambda job, ending: _key_of(job)
        return job(name=f"simulation.{kind}", queue=QUEUE, **options)(handler)

    @contextmanager
    def _run(self, kind: str, name: str) -> Iterator[None]:
        boundary = current()
        assert boundary is not None
        run = Run(limit_of(kind, name), boundary, current_fiber())
        if name not in self._round.started:
            self._round.started.add(name)
            self.starts.setdefault(run.limit, []).append(time.monotonic())
        self._running.append(run)
        at_once = sum(each.limit == run.limit and self._holds(each) for each in self._running)
        slots = LIMITS[kind].get("concurrency")
        if slots and at_once > slots:
            self._problems.append(f"{at_once} jobs of {run.limit} run at once, not {slots}")
        try:
            yield
        finally:
            self._running.remove(run)

    def _holds(self, run: Run) -> bool:
        """Return whether its process must still have the slot: it lives, and was not frozen."""
        is_fresh = time.monotonic() - self.renewed_at.get(run.boundary, 0.0) < LASTS
        return is_fresh and not run.boundary.is_dead and not run.is_given_up

    def problems(self) -> list[str]:
        """Return what does not hold, once everything has come to its end."""
        found = list(self._problems)
        for limit, starts in self.starts.items():
            options = LIMITS[limit.partition(" ")[0]]
            if "rate" in options:
                paced = rate(options["rate"])
                most = paced.count + options.get("burst", 1) - 1
                counts = [
                    sum(first <= each < first + paced.seconds - TOLERANCE for each in starts)
                    for first in starts
                ]
                if max(counts) > most:
                    found.append(f"{max(counts)} jobs of {limit} start in one window, not {most}")
        held = list(HeldJob.objects.values_list("limit", "is_released"))
        return found + [f"a job stands in the line of {limit} for ever" for limit, _ in held]
