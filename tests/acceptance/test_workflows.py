"""Workflows on real workers that are killed (issue 17): each step takes effect once, nothing runs
before what it waits for, every workflow reaches an end; and a callback of many members runs once.

The long versions: ``KJO_FAN_IN=100000 pytest -m long tests/acceptance/test_workflows.py -s``.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter, defaultdict
from functools import partial
from typing import Any

import pytest
from django.db import transaction

from kjo_django import Workflow, group
from kjo_django.models import Job, WorkflowEdge, WorkflowStage
from kjo_django.models import Workflow as Row
from kjo_django.states import OPEN_WORKFLOWS, JobState
from kjo_django.workflows.snapshots import snapshot
from tests.acceptance.conftest import REAL, SELDOM_ON_MARIADB
from tests.acceptance.engine import ALIAS, Engine
from tests.ledger import jobs

MANY = 100
"""Attempts of a step under fire: being killed is an attempt."""
FAN_IN = int(os.environ.get("KJO_FAN_IN", "100000"))
SEED = int(os.environ.get("KJO_FLOWS_SEED", "7"))


def enqueue_random(chance: random.Random, number: int, most_steps: int) -> Any:
    """Enqueue a workflow of steps of every kind; some fail for good."""
    kinds = [jobs.write, jobs.write, jobs.write_async, jobs.write_only, jobs.write_together]
    with Workflow("random", id=str(number), on_failure=chance.choice(("cancel", "run"))) as w:
        steps: list[Any] = []
        for each in range(chance.randint(1, most_steps)):
            name, drawn = f"w{number}-s{each}", chance.random()
            before = chance.sample(steps, min(len(steps), chance.choice((0, 1, 1, 2, 4))))
            options = {"after": before, "on_failure": chance.choice((None, "cancel", "run"))}
            if drawn < 0.04:
                step = jobs.refuse.step(job=name)
            elif drawn < 0.1:
                step = jobs.write_and_add.using(max_attempts=MANY).step(job=name, steps=2)
            elif drawn < 0.15:
                step = jobs.write_attempt.using(max_attempts=MANY).step(job=name, fail_times=1)
            else:
                step = chance.choice(kinds).using(max_attempts=MANY).step(job=name)
            steps.append(w.add(step, **options))
    return w.handle


def has_ended(engine: Engine) -> bool:
    rows = Row.objects.using(ALIAS)
    return not rows.filter(state__in=OPEN_WORKFLOWS).exists() and engine.is_settled()


def assert_all_holds(engine: Engine) -> int:
    """Compare the workflows with the ledger; return how many steps there were."""
    entries: defaultdict[str, list[int]] = defaultdict(list)
    for number, name in engine.entries.order_by("id").values_list("id", "job"):
        entries[name].append(number)
    total = 0
    for row in Row.objects.using(ALIAS):
        steps: defaultdict[Any, list[Job]] = defaultdict(list)
        for job in Job.objects.using(ALIAS).filter(stage__workflow=row):
            steps[job.stage_id].append(job)
            has_run = len(entries[job.arguments["job"]])
            assert has_run == (job.state == JobState.COMPLETED), (job.arguments, job.state, has_run)
        counted, shown = (
            Counter(job.state for some in steps.values() for job in some),
            snapshot(row.pk),
        )
        assert shown is not None
        assert shown.steps.open == 0
        assert (shown.steps.completed, shown.steps.failed, shown.steps.cancelled) == (
            counted[JobState.COMPLETED],
            counted[JobState.FAILED],
            counted[JobState.CANCELLED],
        )
        for edge in WorkflowEdge.objects.using(ALIAS).filter(stage__workflow=row):
            ran, before = (
                [number for job in steps[stage] for number in entries[job.arguments["job"]]]
                for stage in (edge.stage_id, edge.required_id)
            )
            assert not ran or not before or min(ran) > max(before), row
        total += shown.steps.total
    return total


def goes_on(engine: Engine, before: int) -> bool:
    return engine.entries.count() > before or has_ended(engine)


def kill_while_workflows_run(engine: Engine, workflows: int, steps: int, kills: int) -> int:
    chance = random.Random(SEED)
    for number in range(workflows):
        enqueue_random(chance, number, steps)
    for _ in range(kills):
        before = engine.entries.count()
        worker = engine.worker("--concurrency", "4")
        engine.wait_until(partial(goes_on, engine, before), f"{worker} did nothing")
        engine.wait_for_moment(random.uniform(0, 1.0))
        worker.kill()
    last = engine.worker("--concurrency", "4")
    # One that still imports has no handler for the signal that stops it
    engine.wait_until(lambda: "Consuming" in last.log, f"{last} does not start")
    engine.wait_until(lambda: has_ended(engine), "Workflows reach no end", 300)
    assert last.stop() == 0
    return assert_all_holds(engine)


@pytest.mark.promise("steps")
@pytest.mark.medium("real")
@pytest.mark.timeout(400)
@SELDOM_ON_MARIADB
def test_workflows_whose_workers_are_killed(engine: Engine, record_property: Any) -> None:
    record_property("steps", kill_while_workflows_run(engine, 6, 25, 4))


@pytest.mark.long
@pytest.mark.timeout(3600)
@SELDOM_ON_MARIADB
def test_workflows_of_two_hundred_steps_whose_workers_are_killed(engine: Engine) -> None:
    kill_while_workflows_run(engine, 12, 200, 30)


# --- One callback of many members -----------------------------------------------------------------


def drain(engine: Engine, count: int, is_done: Any, kill_every: float = 0.0) -> float:
    """Run two workers until all is done; return the jobs a second from the first end to the end of
    the last of so many."""
    workers = [engine.worker("--concurrency", "2") for _ in range(4 if kill_every else 2)]
    finished = engine.jobs.filter(state=JobState.COMPLETED)
    before, seconds, kills = finished.count(), 0.0, 0
    began = engine.wait_until(
        lambda: finished.count() > before and time.monotonic(), "Nothing ends"
    )
    next_kill = began + kill_every
    while not is_done():  # timed loop: kills workers meanwhile, and measures
        time.sleep(0.05)  # sleep: until the next look
        if not seconds and finished.count() >= before + count:
            seconds = time.monotonic() - began
        if not kill_every or time.monotonic() < next_kill:
            continue
        # Only one that has done something: on a busy machine a worker starts for seconds.
        victim = next((each for each in workers if engine.settled_count(each.pid)), None)
        if victim is not None:
            victim.kill()
            workers.remove(victim)
            workers.append(engine.worker("--concurrency", "2"))
            next_kill, kills = time.monotonic() + kill_every, kills + 1
    total = time.monotonic() - began
    for worker in workers:
        assert worker.stop() == 0
    print(f"{count} in {seconds or total:.1f} s, all in {total:.1f} s, {kills} killed")
    return count / (seconds or total)


def fan_in(engine: Engine, count: int, kill_every: float = 0.0) -> tuple[float, float]:
    """Run so many jobs alone, then as many members of a group with a callback; return the rates."""
    engine.create_topics()
    job = jobs.no_op.using(max_attempts=MANY)
    job.enqueue_many([{}] * count)
    open_jobs = engine.jobs.exclude(state=JobState.COMPLETED)
    alone = drain(engine, count, lambda: not open_jobs.exists())
    with transaction.atomic(using=ALIAS):
        callback = jobs.write_count.using(max_attempts=MANY).step(job="callback")
        handle = group(job.step() for _ in range(count)).then(callback).enqueue()
    with_callback = drain(engine, count, lambda: handle.status == "completed", kill_every)
    print(
        f"{count} jobs alone {alone:.0f}/s, members of a group {with_callback:.0f}/s, "
        f"ratio {with_callback / alone:.2f}"
    )
    assert engine.ledger() == {"callback": 1}
    assert handle.result == count
    assert WorkflowStage.objects.using(ALIAS).count() == 2
    return alone, with_callback


@pytest.mark.promise("steps")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [REAL])
def test_a_callback_of_many_members_runs_once(name: str, request: pytest.FixtureRequest) -> None:
    fan_in(request.getfixturevalue(name), 2000)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_callback_of_a_hundred_thousand_costs_at_most_as_much_again(real: Engine) -> None:
    alone, with_callback = fan_in(real, FAN_IN)
    assert with_callback >= 0.5 * alone


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_callback_of_a_hundred_thousand_runs_once_whoever_is_killed(real: Engine) -> None:
    fan_in(real, FAN_IN, kill_every=2.0)
