"""Ten schedulers on one database, killed at random for an hour of virtual time (issue 16, 1)."""

from __future__ import annotations

import random
from collections import Counter
from datetime import datetime
from typing import Any

import pytest
from django.db import connection, connections

from kjo_django.models import Job, Schedule
from kjo_django.runtime import current_runtime
from kjo_django.schedules.ticker import Ticker, tick_id
from tests.faults import boundary
from tests.faults.boundary import Boundary, Fault, within
from tests.schedules.conftest import now

pytestmark = pytest.mark.timeout(600)

SCHEDULES = 500
SCHEDULERS = 10
KILLED = 1 / 4
"""Share of the looks at due schedules in which the scheduler is killed at some call."""


class Scheduler:
    """A process that looks at the schedules."""

    def __init__(self) -> None:
        self.boundary = Boundary()
        self.ticker = Ticker(current_runtime(), synchronizes=False)

    def look(self, dies_at: int | None) -> bool:
        """Take one step; return whether the process has survived it.

        :param dies_at: number of the call after which it is killed.
        """
        if dies_at is not None:
            self.boundary = Boundary(Fault.DIES_AFTER, dies_at)
        try:
            with within(self.boundary):
                while self.ticker.step() == 0.0:
                    pass
        except BaseException:
            if not self.boundary.is_dead:
                raise  # whatever its session's end made of it otherwise
            connections["default"].close()
            del connections["default"]
            return False
        return True


def columns(number: int) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"every": 60 * (5 + number % 25)},
        {"cron": f"{number % 60} * * * *", "timezone": "Europe/Berlin"},
        {"cron": f"*/{10 + number % 20} * * * *", "timezone": "Asia/Kathmandu"},
        {"every": 30 + number},
    ]
    return kinds[number % len(kinds)]


@pytest.mark.large
def test_each_tick_is_one_job(real_database, clock, monkeypatch):
    if connection.vendor == "mysql":
        pytest.skip("a death is a connection that is closed, which PyMySQL does not take twice")
    boundary.install(monkeypatch, [])
    began = now()
    rows = [
        Schedule(name=f"s{number}", job="shop.report", catch_up="all", **columns(number))
        for number in range(SCHEDULES)
    ]
    for row in rows:
        row.next_at = row.timetable.next_after(began)
    Schedule.objects.bulk_create(rows)
    draw = random.Random(16)
    schedulers = [Scheduler() for _ in range(SCHEDULERS)]
    deaths = 0
    while (now() - began).total_seconds() < 3600:
        clock.advance(draw.uniform(0, 10))
        clock.advances = 0
        for number in draw.sample(range(SCHEDULERS), 3):
            dies_at = draw.randrange(2, 9) if draw.random() < KILLED else None
            if not schedulers[number].look(dies_at):
                deaths += 1
                schedulers[number] = Scheduler()
    schedulers[0].look(None)
    assert deaths > 20, "killed often enough"
    expected = {
        tick_id(row.name, tick) for row in rows for tick in ticks_between(row, began, now())
    }
    stored = Counter(Job.objects.values_list("unique_id", flat=True))
    assert stored.keys() == expected
    assert set(stored.values()) == {1}
    assert len(expected) > 3000


def ticks_between(row: Schedule, began: datetime, end: datetime) -> list[datetime]:
    ticks, tick = [], row.timetable.next_after(began)
    while tick is not None and tick <= end:
        ticks.append(tick)
        tick = row.timetable.next_after(tick, tick)
    return ticks
