"""Scenarios of limits: jobs that wait for a rate or for a slot."""

from __future__ import annotations

from functools import partial
from typing import Any

from kjo_django import job
from kjo_django.models import Job
from kjo_django.operations import jobs as operations
from tests.faults.process import Process
from tests.faults.scenarios import Kinds, scenario
from tests.faults.world import World
from tests.ledger.models import Entry

SECONDS = 8
"""In which a process that nothing befalls runs all jobs of a scenario."""


def declare(kinds: Kinds, **options: Any) -> Any:
    """Declare a handler with a limit."""

    def write(job: str, ending: str) -> None:
        Entry.objects.create(job=job)
        if error := kinds.behave(job, ending):
            raise error

    return job(name="faults.limited", queue="faults", **options)(write)


def recover_in_small_steps(world: World) -> None:
    """Let the workers have time pass as it does: a permit is void if none looks at its moment."""
    for _ in range(60):
        for process in world.processes:
            process.turn()
        world.clock.advance(0.04)
    world.clock.advances = 0


def work_for(world: World, process: Process) -> None:
    for _ in range(2 * SECONDS):
        process.work()
        world.clock.advance(0.5)


def _act(world: World, process: Process, *, cancels: bool = False, **options: Any) -> None:
    limited = declare(world.kinds, **options)
    world.recovering = partial(recover_in_small_steps, world)
    is_outside = not options.get("atomic", True)
    for number, ending in enumerate(["completed", "retried", "completed", "completed"]):
        name = f"f{number}"
        put = partial(limited.enqueue, job=name, ending=ending)
        world.enqueue(process, name, put, many=is_outside)
    process.work()
    if cancels:
        process.ask(lambda: operations.cancel(Job.objects.open().order_by("id")[2:3]))
    work_for(world, process)


scenario("rate")(partial(_act, rate="1/s"))
scenario("rate-outside")(partial(_act, rate="1/s", atomic=False))
scenario("rate-cancelled")(partial(_act, rate="1/s", cancels=True))
scenario("slots")(partial(_act, concurrency=1))
scenario("slots-outside")(partial(_act, concurrency=1, atomic=False))
scenario("rate-and-slots")(partial(_act, rate="2/s", concurrency=1))
