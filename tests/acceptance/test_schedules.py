"""Schedulers that are killed: each tick is one job (issue 16, point 1)."""

from __future__ import annotations

import itertools
import random
import time
from collections import defaultdict
from datetime import datetime, timedelta

import pytest
from django.utils import timezone

from kjo_django.models import Schedule
from tests.acceptance.conftest import MARIADB, MYSQL, POSTGRES
from tests.acceptance.engine import ALIAS, Engine
from tests.acceptance.program import Program

pytestmark = pytest.mark.timeout(300)

SCHEDULERS = 4
SCHEDULES = 20
SECONDS = 20.0


def schedule(name: str, **columns: object) -> Schedule:
    row = Schedule(name=name, job="ledger.write", payload={"job": name}, **{"every": 1, **columns})
    row.next_at = row.timetable.next_after(timezone.now())
    row.save(using=ALIAS)
    return row


def ticks_of(engine: Engine) -> dict[str, list[datetime]]:
    ticks: dict[str, list[datetime]] = defaultdict(list)
    for id in engine.jobs.values_list("unique_id", flat=True):
        _, name, tick = id.split(":", 2)
        ticks[name].append(datetime.fromisoformat(tick))
    return {name: sorted(found) for name, found in ticks.items()}


@pytest.mark.promise("tick")
@pytest.mark.parametrize("kind", ["embedded", POSTGRES, MARIADB, MYSQL])
def test_four_schedulers_that_are_killed(kind: str, request: pytest.FixtureRequest) -> None:
    engine: Engine = request.getfixturevalue(kind)
    # Given a tick of each schedule in each second
    rows = [schedule(f"s{number}", catch_up="all") for number in range(SCHEDULES)]
    draw = random.Random(7)
    schedulers = [engine.manage("kjo_schedule") for _ in range(SCHEDULERS)]
    engine.wait_until(lambda: engine.jobs.exists(), "nothing was stored")
    # When schedulers are killed, one or two a second, and others are started
    deadline, deaths = time.monotonic() + SECONDS, 0
    while time.monotonic() < deadline:  # timed loop: so many ticks become due meanwhile
        time.sleep(draw.uniform(0.3, 1.2))  # sleep: the moment of a crash
        killed = draw.randrange(SCHEDULERS)
        schedulers[killed].kill()
        deaths += 1
        schedulers[killed] = engine.manage("kjo_schedule")
    until = timezone.now()
    engine.wait_until(lambda: is_past(until), "the schedulers do not catch up")
    for each in schedulers:
        each.kill()
    # Then no tick is missing, and none has two jobs
    found = ticks_of(engine)
    assert found.keys() == {row.name for row in rows}
    for row in rows:
        ticks = found[row.name]
        assert ticks[0] == row.next_at
        assert {later - tick for tick, later in itertools.pairwise(ticks)} == {timedelta(seconds=1)}
        assert ticks[-1] >= until - timedelta(seconds=1)
    assert deaths > 10


def is_past(moment: datetime) -> bool:
    return not Schedule.objects.using(ALIAS).filter(next_at__lte=moment).exists()


@pytest.mark.parametrize("kind", ["embedded", POSTGRES])
def test_a_worker_stores_each_tick_within_a_second(
    kind: str, request: pytest.FixtureRequest
) -> None:
    engine: Engine = request.getfixturevalue(kind)
    # Given ticks of many schedules in each second
    for number in range(SCHEDULES):
        schedule(f"s{number}")
    # When a worker stores and runs them
    worker: Program = engine.ready_worker()
    engine.wait_until(lambda: len(lateness(engine)) > 6 * SCHEDULES, "no job ran")
    assert worker.stop() == 0
    # Then none of them was late
    latest = max(lateness(engine))
    print(f"{len(lateness(engine))} ticks, the latest after {latest:.2f} s")
    assert latest < 1


def lateness(engine: Engine) -> list[float]:
    """Return how late jobs that have completed were stored, but for those of ticks from before the
    first was."""
    jobs = list(engine.jobs.order_by("id"))
    ticks = [datetime.fromisoformat(job.unique_id.split(":", 2)[2]) for job in jobs]
    return [
        (job.created_at - tick).total_seconds()
        for job, tick in zip(jobs, ticks, strict=True)
        if job.state == "completed" and tick > jobs[0].created_at
    ]


def test_a_worker_without_schedules_stores_none(embedded: Engine) -> None:
    schedule("each")
    worker = embedded.ready_worker("--no-schedules")
    time.sleep(2.5)  # sleep: ticks that nobody must store become due
    assert worker.stop() == 0
    assert not embedded.jobs.exists()
