"""A clock that stands until a test moves it, and jobs that schedules may name."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest

from kjo_django import job, registry
from kjo_django.models import Job, Schedule
from kjo_django.runtime import current_runtime
from kjo_django.schedules.ticker import Ticker
from tests.faults.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(stands=True)
    clock.install(monkeypatch)
    # Begin at a whole minute, so that ticks are where a test expects them.
    now = current_runtime().clock.now()
    clock.advance(60 - now.second - now.microsecond / 1e6)
    return clock


@pytest.fixture(autouse=True)
def jobs() -> Iterator[None]:
    """Jobs that schedules may name."""
    with registry.isolated():

        @job(name="shop.report", takes_context=True)
        def report(context: Any) -> Any:
            return context.scheduled_for.isoformat()

        @job(name="shop.clean")
        def clean(days: int, kind: str = "carts") -> None: ...

        yield


def now() -> Any:
    return current_runtime().clock.now()


def scheduled(name: str = "nightly", **columns: Any) -> Schedule:
    """Store a schedule of ``shop.report``, every minute unless it says otherwise."""
    when = {} if columns.keys() & {"cron", "every", "at"} else {"every": 60}
    row = Schedule(name=name, **{"job": "shop.report", **when, **columns})
    row.next_at = row.timetable.next_after(now())
    row.save()
    return row


def ticks_of(name: str = "nightly") -> list[str]:
    """Return the ticks that a schedule's jobs stand for, as their unique ids have them."""
    ids = Job.objects.filter(unique_id__startswith=f"schedule:{name}:").values_list("unique_id")
    return sorted(id.removeprefix(f"schedule:{name}:") for (id,) in ids)


def step(ticker: Ticker | None = None, times: int = 1) -> Ticker:
    ticker = ticker or Ticker(current_runtime())
    for _ in range(times):
        ticker.step()
    return ticker


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)
