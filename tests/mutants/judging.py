"""Running the tests on a mutant until one of them fails."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.sites import Mutant

MOST_SECONDS = 1800
"""Seconds that a run of tests may take. A mutant that makes them hang is noticed by that."""
WORKERS = 4
TRIES = 3
"""Tests of a stage that may fail for other reasons, before it is given up."""
OPTIONS = ("-x", "-q", "-p", "no:randomly", "-p", "no:cacheprovider", "--tb=no")
NOT_OF_A_TIER = ("tests/checks", "tests/mutants")
"""Tests that look at the text of the package: the form of a mutant's line would fail them."""
_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+?\.py(?:::.+?)?)(?: - .*)?$", re.MULTILINE)
"""A test, or a file that cannot be imported."""
_TESTS_FAILED, _INTERRUPTED, _NONE_CHOSEN = 1, 2, 5
"""Exit codes of pytest's; files that cannot be imported interrupt it."""


class JudgingError(Exception):
    """The tests could not be run, so nothing is known of the mutant."""


@dataclass
class Verdict:
    """What became of a mutant."""

    mutant: Mutant
    killed_by: str
    """The test that fails with the mutant each time, and passes without it; "": there is none."""
    stage: str
    """Which tests it took: ``own`` are those of its module; "": it survived."""
    seconds: float


def judge(mutant: Mutant, copy: Path, stages: Sequence[str]) -> Verdict:
    """Run the tests on a mutant, one stage after the other, until a test fails.

    :param copy: a copy of the repository; is the original again afterwards.
    :param stages: ``own``, or names of tiers.
    :raises JudgingError: pytest ended in another way than with failed tests, or too many of them
        fail for other reasons.
    """
    began = time.monotonic()
    for stage in stages:
        if killed_by := _killer(mutant, _tests_of(stage, mutant, copy), copy):
            return Verdict(mutant, killed_by, stage, round(time.monotonic() - began, 1))
    return Verdict(mutant, "", "", round(time.monotonic() - began, 1))


@contextmanager
def _changed(mutant: Mutant, copy: Path) -> Iterator[None]:
    module = copy / mutant.path
    source = module.read_bytes()
    module.write_bytes(mutant.apply(source))
    try:
        yield
    finally:
        module.write_bytes(source)


def _tests_of(stage: str, mutant: Mutant, copy: Path) -> Sequence[str]:
    """Return the arguments that choose the tests of a stage."""
    if stage != "own":
        return [f"--tier={stage}", "tests", *(f"--ignore={each}" for each in NOT_OF_A_TIER)]
    return [str(path) for path in own_tests(mutant.path, copy)]


def own_tests(path: str, root: Path) -> Sequence[Path]:
    """Return where the tests of a module are: ``test_loop.py`` and what begins as its name does,
    beside the others of its package; where there are none, those of the package.

    :param path: of the module, relative to the repository.
    """
    module = Path(path)
    directory = Path("tests/unit", *module.parent.parts[1:])
    while not (root / directory).is_dir():
        directory = directory.parent
    named = sorted((root / directory).glob(f"test_{module.stem}*.py"))
    return [each.relative_to(root) for each in named] or [directory]


def _killer(mutant: Mutant, chosen: Sequence[str], copy: Path) -> str:
    """Return which of the tests fails because of the mutant; "" if none does."""
    others: list[str] = []
    while len(others) < TRIES:
        with _changed(mutant, copy):
            failed = _first_failure([*chosen, *(f"--deselect={each}" for each in others)], copy)
            if not failed:
                return ""
            fails_again = bool(_first_failure([failed], copy))
        if fails_again and not _first_failure([failed], copy):
            return failed
        others.append(failed)
    raise JudgingError(f"these fail without it, or not each time: {', '.join(others)}")


def _first_failure(chosen: Sequence[str], copy: Path) -> str:
    """Run tests in the copy until one fails; return its name."""
    is_one = len(chosen) == 1 and "::" in chosen[0]
    workers = [f"--numprocesses={0 if is_one else WORKERS}", "--maxschedchunk=4"]
    command = [sys.executable, "-m", "pytest", *OPTIONS, *workers, *chosen]
    variables = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        told, _ = process.communicate(timeout=MOST_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with the servers and workers it has started
        process.communicate()
        return "a time limit"
    if process.returncode in (0, _NONE_CHOSEN):
        return ""
    found = _FAILED.search(told)
    if process.returncode not in (_TESTS_FAILED, _INTERRUPTED) or found is None:
        raise JudgingError(f"pytest ended with {process.returncode}:\n{told[-2000:]}")
    return found[1]
