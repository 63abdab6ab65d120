"""A sample of schedules, and what the simulation itself promises.

``-m long`` runs a million steps; `python -m tests.simulation --seed 7` runs and shrinks one.
"""

from __future__ import annotations

import os
import time

import pytest

from kjo_django.models import Job
from kjo_django.store.base import Store
from tests.simulation.__main__ import TRANSPORTS, problems_of
from tests.simulation.running import Simulation
from tests.simulation.schedule import Step, drawn, dumped, is_calm, loaded, shrunk

SEED = int(os.environ.get("KJO_SIMULATION_SEED", "1"))
STEPS = 60
SAMPLE_SECONDS = 15.0
"""Of each transport, in the test command; fewer schedules on a slower machine."""
MOST = 40
MANY = 1_000_000
"""Steps of `-m long`."""

every_transport = pytest.mark.parametrize("simulation", TRANSPORTS, indirect=True)
in_memory = pytest.mark.parametrize("simulation", ["memory"], indirect=True)


def check(simulation: Simulation, seed: int) -> None:
    problems = problems_of(simulation, drawn(seed, STEPS))
    told = f"python -m tests.simulation --seed {seed} --steps {STEPS}"
    assert not problems, "\n".join([told, *problems])


@every_transport
def test_a_sample_of_schedules(simulation: Simulation) -> None:
    end, seed = time.perf_counter() + SAMPLE_SECONDS, SEED
    while seed < SEED + MOST and (seed == SEED or time.perf_counter() < end):
        check(simulation, seed)
        seed += 1
    print(f"{seed - SEED} schedules of {STEPS} steps from seed {SEED}")


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@every_transport
def test_a_million_steps(simulation: Simulation) -> None:
    for seed in range(SEED, SEED + MANY // STEPS // len(TRANSPORTS) + 1):
        check(simulation, seed)


@every_transport
def test_a_seed_repeats_exactly(simulation: Simulation) -> None:
    steps = drawn(SEED, STEPS)
    runs = [(simulation.run(steps), simulation.trace) for _ in range(2)]
    assert runs[0] == runs[1]
    assert simulation.struck_count, "no fault struck"


@in_memory
def test_processes_take_turns_on_one_thread_with_sessions_of_their_own(
    simulation: Simulation,
) -> None:
    # Given a sign of life of one process, during whose first call another one works
    steps = [
        Step("start", 0),
        Step("start", 1),
        Step("enqueue", 0, ("atomic", "k1", "completed")),
        Step("relay", 0),
        Step("poll", 0),
        Step("beat", 1, fault="overlaps", at=0, meanwhile=Step("lanes", 0)),
    ]
    completed: list[int] = []
    nested = simulation._nested

    def seen(step: Step) -> None:
        nested(step)
        completed.append(Job.objects.filter(state="completed").count())

    simulation._nested = seen  # type: ignore[method-assign]
    # When
    problems = simulation.run(steps)
    # Then
    assert problems == []
    assert completed == [1]


@in_memory
def test_what_breaks_a_promise_is_found_and_shrunk(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that leaves the markers of failed attempts behind
    monkeypatch.setattr(Store, "delete_markers", lambda self, keys: None)
    seed = next(s for s in range(1, 200) if problems_of(simulation, drawn(s, STEPS)))
    # When
    whole = drawn(seed, STEPS)
    part = shrunk(whole, lambda steps: bool(problems_of(simulation, steps)))
    # Then
    assert problems_of(simulation, part)
    assert len(part) <= len(whole) / 3
    for at in range(len(part)):
        assert not problems_of(simulation, part[:at] + part[at + 1 :])


def test_a_schedule_is_written_and_read_back() -> None:
    steps = drawn(3, 200)
    assert loaded(dumped(steps)) == steps
    assert drawn(3, 200) == steps != drawn(4, 200)


def test_some_seeds_meet_overlaps_only() -> None:
    calm = sum(is_calm(drawn(seed, 200)) for seed in range(60))
    assert 10 <= calm <= 30
