"""The commands of example_project/services/README.md, run as they stand there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "example_project" / "services" / "README.md"
SERVERS = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")


def commands() -> list[list[str]]:
    """Return the README's commands, for this interpreter."""
    (block,) = re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL)
    return [[sys.executable, *shlex.split(line)[1:]] for line in block.splitlines()]


def run(command: list[str], environment: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def plain_environment(tmp_path: Path) -> dict[str, str]:
    found = {name: value for name, value in os.environ.items() if name not in SERVERS}
    found.pop("DJANGO_SETTINGS_MODULE", None)
    return {**found, "KJO_EXAMPLE_DB": str(tmp_path / "shared.sqlite3")}


@pytest.mark.timeout(180)
def test_the_readmes_commands_do_what_it_says(tmp_path: Path) -> None:
    environment = plain_environment(tmp_path)
    for command in commands():
        last = run(command, environment)
    assert "Ada Lovelace <ada@example.com>: 1 interviews" in last


@pytest.mark.kafka
@pytest.mark.timeout(240)
def test_the_same_on_kafka_with_a_database_each(tmp_path: Path, kafka_server) -> None:
    """Nothing is shared but the topics; each service has its own database."""
    common = plain_environment(tmp_path)
    common["KAFKA_BOOTSTRAP_SERVERS"] = kafka_server.bootstrap_servers
    for command in commands():
        service = command[-1].rpartition(".")[2]
        last = run(command, {**common, "KJO_EXAMPLE_DB": str(tmp_path / f"{service}.sqlite3")})
    assert "Ada Lovelace <ada@example.com>: 1 interviews" in last
