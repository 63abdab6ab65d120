"""Each scenario, with each fault at each of its calls.

By default a sample whose seed is printed; ``-m long`` runs everything, but of deaths that leave
the same behind only the first. One case again:
``KJO_FAULTS_CASE=17:dies-after pytest tests/faults -k 'atomic-mixed and sqlite-memory'``.
"""

from __future__ import annotations

import os
import random
import traceback
import zlib

import pytest

from tests.faults.boundary import Endless, Fault
from tests.faults.conftest import ENGINES
from tests.faults.scenarios import ENDINGS, KINDS, SCENARIOS, Scenario
from tests.faults.world import World, run

SEED = os.environ.get("KJO_FAULTS_SEED", "11")
SAMPLE = int(os.environ.get("KJO_FAULTS_SAMPLE", "1"))
"""Cases of each scenario and engine in the test command."""
ONE_ENDING = {f"{kind}-{ending}" for kind in KINDS for ending in ENDINGS if ending != "mixed"}
"""Scenarios whose ending is among those of a kind's mixed one, which is in the default tier."""
ONE = os.environ.get("KJO_FAULTS_CASE", "")

every_scenario = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)
a_few_scenarios = pytest.mark.parametrize(
    "scenario",
    [
        pytest.param(each, marks=pytest.mark.large(each.name) if each.name in ONE_ENDING else ())
        for each in SCENARIOS
    ],
    ids=lambda each: each.name,
)
every_engine = pytest.mark.parametrize("world", ENGINES, indirect=True)


@pytest.mark.promise(
    "stored-before-acknowledged", "one-transaction", "no-stuck-state", "steps", "order-by-key"
)
@pytest.mark.medium("sqlite-memory")
@every_engine
@a_few_scenarios
def test_a_sample_of_faults(scenario: Scenario, world: World) -> None:
    cases = record(scenario, world)
    chosen = random.Random(zlib.crc32(f"{SEED} {scenario.name}".encode()))
    check(scenario, world, sorted(chosen.sample(cases, min(SAMPLE, len(cases))), key=str))


@pytest.mark.long
@pytest.mark.timeout(3600)
@every_engine
@every_scenario
def test_every_fault(scenario: Scenario, world: World) -> None:
    cases = record(scenario, world, marks=True)
    same = world.same_deaths()
    print(f"{len(same)} deaths leave behind what another one does")
    check(scenario, world, [case for case in cases if not is_left_out(case, same)])


_NAMED = {scenario.name: scenario for scenario in SCENARIOS}
FOUND = [
    # Another worker records the same first failure before the row that sent the message is deleted.
    (_NAMED["stream-dead"], "DELETE kjo_job", Fault.TAKES_40_S, "postgres-memory"),
    # A relay records once more where it published a job that has waited for its limit since.
    (_NAMED["rate-outside"], "commit", Fault.RAISES_AFTER, "sqlite-memory"),
    # A permit that came too late for its start is waited for in a loop, until its moment is over.
    (_NAMED["rate-outside"], "SELECT kjo_rate_window", Fault.TAKES_40_S, "sqlite-memory"),
    # A relay records what it has published for a job that waits for its handler by now.
    (_NAMED["unknown-handler"], "UPDATE kjo_job", Fault.TAKES_40_S, "sqlite-memory"),
    # A rival's recorder waits for the workflow's row, which the struck transaction has locked.
    (_NAMED["workflow-group"], "SELECT kjo_workflow_stage", Fault.TAKES_40_S, "postgres-memory"),
    # What the failure of a step has ended is not announced: its workflow, and steps behind it.
    (_NAMED["workflow-fails"], "commit", Fault.RAISES_AFTER, "sqlite-memory"),
    (_NAMED["workflow-chain"], "commit", Fault.RAISES_AFTER, "postgres-memory"),
    (
        _NAMED["workflow-held"],
        "UPDATE kjo_workflow_stage + COMMIT",
        Fault.RAISES_AFTER,
        "postgres-database",
    ),
    # A worker dies when it has released a step that it runs itself, and when it begins that.
    (_NAMED["workflow-chain"], "commit", Fault.DIES_AFTER, "sqlite-memory"),
    (
        _NAMED["workflow-chain"],
        "UPDATE kjo_workflow_stage + COMMIT",
        Fault.DIES_AFTER,
        "postgres-memory",
    ),
    (_NAMED["workflow-chain"], "coordination.claim", Fault.DIES_AFTER, "sqlite-memory"),
    # The COMMIT of several steps has taken effect, and nobody has been told.
    (_NAMED["workflow-joins"], "commit", Fault.RAISES_AFTER, "sqlite-memory"),
]
"""Cases that ``test_every_fault`` found: scenario, how the call begins, fault, engine."""


@pytest.mark.timeout(900)  # up to eighty runs of a scenario
@pytest.mark.parametrize(
    ("scenario", "call", "fault", "world"),
    FOUND,
    indirect=["world"],
    ids=lambda each: str(getattr(each, "value", getattr(each, "name", each))),
)
def test_a_case_that_was_found(scenario: Scenario, call: str, fault: Fault, world: World) -> None:
    record(scenario, world)
    calls = [at for at, recorded in enumerate(world.recorded) if recorded.startswith(call)]
    assert calls
    check(scenario, world, [(at, fault) for at in calls])


def record(scenario: Scenario, world: World, *, marks: bool = False) -> list[tuple[int, Fault]]:
    """Run the scenario without a fault; return its cases."""
    world.queues, world.ticks = scenario.queues, scenario.ticks
    assert run(world, scenario.act, None, -1, marks=marks) == []
    count = len(world.recorded)
    print(f"{scenario.name}: {count} calls, seed {SEED}")
    return [(at, fault) for at in range(count) for fault in Fault]


def is_left_out(case: tuple[int, Fault], same: dict[int, int]) -> bool:
    at, fault = case
    return fault is Fault.DIES_AFTER and at in same


def check(scenario: Scenario, world: World, cases: list[tuple[int, Fault]]) -> None:
    if ONE:
        at, _, fault = ONE.partition(":")
        cases = [(int(at), Fault(fault))]
    failed = []
    for at, fault in cases:
        try:
            problems = run(world, scenario.act, fault, at)
        except (Exception, Endless):
            problems = [traceback.format_exc()]
        if ONE:
            print("\n".join(f"{number} {call}" for number, call in enumerate(world.recorded)))
        if problems:
            what = f"KJO_FAULTS_CASE={at}:{fault.value} ({world.struck})"
            failed.append("\n    ".join([what, *problems]))
            print(failed[-1])
    count = f"{len(failed)} of {len(cases)} cases of {scenario.name}, seed {SEED}"
    assert not failed, "\n".join([count, *failed])
