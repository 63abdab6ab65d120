"""What is done to the network of a machine does what it says, and the host notices nothing."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.network import COMMAND, obstacle
from tests.cluster.probe import PACKETS
from tests.services.fixtures import require

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    """What two machines have heard of one another: from the one disturbed, and to it."""
    require(network=True)
    if reason := obstacle():
        pytest.skip(reason)
    command = [*COMMAND, sys.executable, "-m", "tests.cluster.probe"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_disturbed_machines_hear_what_they_should(facts: dict[str, Any]) -> None:
    both, none = [1, 1], [0, 0]
    assert facts["at first"] == facts["connected"] == both
    assert facts["cut"] == none
    assert facts["deaf"] == [1, 0]
    assert facts["mute"] == [0, 1]
    assert facts["split"] == none
    assert facts["split, others"] == both
    # Of 200 packets about 60 are lost: by chance never as few as 20, or as many as 100
    assert all(PACKETS - 100 <= count <= PACKETS - 20 for count in facts["loss"])


def test_a_slow_line_takes_its_time(facts: dict[str, Any]) -> None:
    # 14 kB at 24 kB a second, of which a burst of 3 kB passes at once
    assert facts["slow"] > 0.35
    assert facts["slow"] > facts["quick again"]


def test_the_host_is_left_as_it_was(facts: dict[str, Any]) -> None:
    # When machines have been made, and disturbed
    assert facts
    # Then none of their interfaces, namespaces and mounts is seen here
    for look in (["ip", "-br", "link"], ["ip", "netns"], ["findmnt", "-rn", "-o", "TARGET"]):
        seen = subprocess.run(look, capture_output=True, text=True).stdout
        assert "machine0" not in seen
        assert "switch" not in seen
        assert "/run/tests" not in seen
