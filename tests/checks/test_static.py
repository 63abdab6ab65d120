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


def test_no_function_is_complex() -> None:
    need("complexipy")
    import complexipy

    package, found, count = ROOT / "kjo_django", [], 0
    for path in sorted(package.rglob("*.py")):
        for function in complexipy.file_complexity(str(path)).functions:
            count += 1
            if function.complexity > MOST_COMPLEX:
                name = f"{path.relative_to(package)}: {function.name}"
                found.append(f"{name} {function.complexity}")
    assert found == []
    assert count > 3_000, "it finds some"


def test_mypy_finds_nothing() -> None:
    run("mypy", sys.executable, "-m", "mypy")
