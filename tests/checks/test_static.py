"""ruff, the import contracts, mypy and the complexity of functions, as tests: one command and one
last line for everything."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.timeout(600)


def need(module: str) -> None:
    """Skip where a tool is not installed, but not in CI."""
    if importlib.util.find_spec(module) is None and not os.environ.get("CI"):
        pytest.skip(f"{module} is not installed: pip install --group dev")


def run(module: str, *command: str) -> None:
    """Run a tool in the repository; its output is the failure's message."""
    need(module)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"


def test_ruff_finds_nothing() -> None:
    run("ruff", sys.executable, "-m", "ruff", "check", ".")


def test_every_file_is_formatted() -> None:
    run("ruff", sys.executable, "-m", "ruff", "format", "--check", ".")


def test_the_import_contracts_hold() -> None:
    run("importlinter", str(Path(sysconfig.get_path("scripts"), "lint-imports")), "--no-cache")


MOST_COMPLEX = 15
"""Cognitive complexity: what a function asks of who reads it, as SonarSource counts it."""
LEFT = {
    "engine": 20,
    "enqueue": 1,
    "outbox": 1,
    "transports": 1,
    "worker": 1,
}
"""Functions above it, by package; none in those that are not named. These numbers only become
smaller."""


def test_few_functions_are_complex() -> None:
    need("complexipy")
    import complexipy

    found: dict[str, list[str]] = {}
    package = ROOT / "kjo_django"
    for path in sorted(package.rglob("*.py")):
        for function in complexipy.file_complexity(str(path)).functions:
            if function.complexity > MOST_COMPLEX:
                name = f"{path.relative_to(package)}: {function.name} {function.complexity}"
                found.setdefault(path.relative_to(package).parts[0], []).append(name)
    assert {room: names for room, names in found.items() if len(names) > LEFT.get(room, 0)} == {}
    assert found, "it finds some"


def test_mypy_finds_nothing() -> None:
    run("mypy", sys.executable, "-m", "mypy")
