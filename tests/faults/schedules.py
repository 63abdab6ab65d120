"""Scenarios of periodic schedules: ticks, declarations, and what operators do."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

from kjo_django import job
from kjo_django.models import Schedule
from kjo_django.operations import schedules
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE, scenario
from tests.faults.world import World
from tests.ledger.models import Entry


def declare(**options: Any) -> None:
    """Declare the job of the schedules: it leaves the name of its tick."""

    @job(name="faults.tick", queue=QUEUE, takes_context=True, **options)
    def tick(context: Any, prefix: str = "tick") -> None:
        Entry.objects.create(job=name_of(prefix, context.scheduled_for))


def name_of(prefix: str, tick: datetime) -> str:
    return f"{prefix}-{tick:%H:%M:%S}"


def add(process: Process, **columns: Any) -> Schedule:
    """Store a schedule with ticks 10, 20 and 30 seconds from now."""
    now = timezone.now().replace(microsecond=0)
    times = {"every": 10, "starts_at": now, "ends_at": now + timedelta(seconds=30)}
    with process.unwatched():
        defaults = {"name": "s", "job": "faults.tick", "catch_up": "all"}
        row = Schedule(**{**defaults, **times, **columns})
        row.next_at = row.timetable.next_after(now)
        row.save()
    return row


def ticks_of(row: Schedule) -> list[datetime]:
    return row.timetable.next_ticks(row.starts_at, 3)


@scenario("schedule-ticks", ticks=True)
def ticks(world: World, process: Process) -> None:
    declare()
    row = add(process)
    world.promised += [name_of("tick", tick) for tick in ticks_of(row)]
    for seconds in (11, 15, 5):
        world.clock.advance(seconds)
        process.work()


@scenario("schedule-many", ticks=True)
def many(world: World, process: Process) -> None:
    declare()
    for number in range(5):
        row = add(process, name=f"s{number}", payload={"prefix": f"t{number}"}, jitter=number)
        world.promised += [name_of(f"t{number}", tick) for tick in ticks_of(row)]
    for seconds in (11, 25):
        world.clock.advance(seconds)
        process.work()


@scenario("schedule-overlap", ticks=True)
def overlap(world: World, process: Process) -> None:
    declare()
    """Nothing is promised: of ticks that are due together, the latest alone is stored."""
    add(process, overlap="skip")
    for _ in range(3):
        world.clock.advance(10)
        process.work()


@scenario("schedule-declared", ticks=True)
def declared(world: World, process: Process) -> None:
    now = timezone.now().replace(microsecond=0)
    times = {"every": 10, "starts_at": now, "ends_at": now + timedelta(seconds=90)}
    declare(schedule={**times, "catch_up": "all"})
    process.work()
    world.clock.advance(11)
    process.work()
    # A later release has other ticks, and the one after it none.
    declare(schedule={**times, "every": 20, "catch_up": "all"})
    world.clock.advance(60)
    process.work()
    declare()
    world.clock.advance(61)
    process.work()


@scenario("schedule-operators", ticks=True)
def operators(world: World, process: Process) -> None:
    declare()
    row = add(process)
    process.ask(lambda: schedules.pause([row]))
    process.ask(lambda: schedules.resume([row]))
    process.ask(lambda: schedules.edit(row, every=15))
    process.ask(lambda: schedules.run_now([row]))
    process.ask(lambda: schedules.add("t", job="faults.tick", every=3600, payload={"prefix": "t"}))
    process.work()
    world.clock.advance(16)
    process.work()
    process.ask(lambda: schedules.delete([row]))
    process.work()
