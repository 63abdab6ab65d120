"""The matrix itself: what it simulates is what happens, and what it records is all there is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kjo_django.transports.base import Subscription, Transport
from tests.faults.boundary import Died, Fault
from tests.faults.killed import left_behind
from tests.faults.scenarios import SCENARIOS
from tests.faults.test_matrix import SEED
from tests.faults.world import World, run
from tests.unit.conftest import led_to, sqlite_settings

ROOT = Path(__file__).parents[2]
BY_NAME = {each.name: each for each in SCENARIOS}


@pytest.mark.parametrize("world", ["sqlite-database"], indirect=True)
@pytest.mark.parametrize("name", ["atomic-mixed", "outside-retried"])
def test_a_simulated_death_leaves_behind_what_a_real_one_does(
    name: str, world: World, _migrated_file: Path, tmp_path: Path
) -> None:
    # Given one of the scenario's calls
    scenario = BY_NAME[name]
    world.queues = scenario.queues
    assert run(world, scenario.act, None, -1) == []
    at = random.Random(SEED).randrange(len(world.recorded))
    print(f"call {at}, {world.recorded[at]}, seed {SEED}")
    # When a process dies after it, really
    path = tmp_path / "killed.sqlite3"
    shutil.copyfile(_migrated_file, path)
    command = [sys.executable, "-m", "tests.faults.killed", name, str(at), "database"]
    environment = {**os.environ, "DATABASE_URL": f"sqlite:///{path}"}
    killed = subprocess.run(
        command, cwd=ROOT, env=environment, timeout=150, capture_output=True, text=True
    )
    assert killed.returncode == -9, killed.stderr
    # And when it is simulated
    process = world.begin(Fault.DIES_AFTER, at)
    with pytest.raises(Died):
        scenario.act(world, process)
    process.bury()
    simulated = left_behind()
    world.end()
    # Then
    with led_to(sqlite_settings(path)):
        assert simulated == left_behind()


@pytest.mark.parametrize("world", ["sqlite-memory"], indirect=True)
def test_every_call_of_a_scenario_is_recorded_alike_each_time(world: World) -> None:
    """A case is named by its number: the same one must be struck next time."""
    scenario = BY_NAME["atomic-mixed"]
    world.queues = scenario.queues
    recorded = []
    for _ in range(2):
        assert run(world, scenario.act, None, -1) == []
        recorded.append(world.recorded)
    assert recorded[0] == recorded[1]
    kinds = {call.partition(".")[0] for call in recorded[0]}
    assert {Transport.__name__.lower(), Subscription.__name__.lower(), "coordination"} <= kinds
    assert {"commit", "BEGIN"} <= set(recorded[0])
