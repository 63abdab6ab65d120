"""Scenarios of limits: jobs that wait for a rate or for a slot."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from django.utils import timezone

from kjo_django import job
from kjo_django.models import Job
from kjo_django.operations import jobs as operations
from tests.faults.process import Process
from tests.faults.scenarios import Kinds, scenario
from tests.faults.world import World
from tests.ledger.models import Entry

SOON = 5.0
"""Seconds for which nothing is done but to wait for the next job with a limit."""
MOST_STARTS = 40


def declare(kinds: Kinds, **options: Any) -> Any:
    """Declare a handler with a limit."""

    def write(job: str, ending: str) -> None:
        Entry.objects.create(job=job)
        if error := kinds.behave(job, ending):
            raise error

    return job(name="faults.limited", queue="faults", **options)(write)


def next_start(world: World, jobs: Any) -> float:
    """Return in how many seconds one of the jobs that are on their way may start: a permit is void
    if nobody looks at its moment. 0: none is, soon."""
    now = timezone.now()
    dues = jobs.filter(available_at__gt=now).values_list("available_at", flat=True)
    seconds = [(due - now).total_seconds() for due in dues]
    for process in world.processes:
        until = [moment for moment, *_ in process.worker.scheduler._delayed]
        seconds += [moment - time.monotonic() for moment in until]
    return min((each for each in seconds if 0.0 < each < SOON), default=0.0)


def start_all(world: World, work: Callable[[], object]) -> None:
    """Work, and have time pass until the next job may start, until none may soon."""
    for _ in range(MOST_STARTS):
        work()
        seconds = next_start(world, Job.objects.open())
        if not seconds:
            break
        world.clock.advance(seconds)
        world.clock.advances = 0


def turn_all(world: World) -> None:
    """Give each process its turn."""
    for process in world.processes:
        process.turn()


def _act(world: World, process: Process, *, cancels: bool = False, **options: Any) -> None:
    limited = declare(world.kinds, **options)
    world.recovering = partial(start_all, world, partial(turn_all, world))
    is_outside = not options.get("atomic", True)
    for number, ending in enumerate(["retried", "completed", "completed"]):
        name = f"f{number}"
        put = partial(limited.enqueue, job=name, ending=ending)
        world.enqueue(process, name, put, many=is_outside)
    process.work()
    if cancels:
        process.ask(lambda: operations.cancel(Job.objects.open().order_by("id")[2:3]))
    start_all(world, process.work)


scenario("rate", stands=True)(partial(_act, rate="1/s"))
scenario("rate-outside", stands=True)(partial(_act, rate="1/s", atomic=False))
scenario("rate-cancelled", stands=True)(partial(_act, rate="1/s", cancels=True))
scenario("slots", stands=True)(partial(_act, concurrency=1))
scenario("slots-outside", stands=True)(partial(_act, concurrency=1, atomic=False))
scenario("rate-and-slots", stands=True)(partial(_act, rate="2/s", concurrency=1))
