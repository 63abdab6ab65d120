"""Runs schedules: ``python -m tests.simulation --seed 7 --steps 60 --seeds 100``."""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django

TRANSPORTS = ("memory", "database")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--steps", type=int, default=60, help="steps of a schedule")
    parser.add_argument("--transport", choices=TRANSPORTS, help="both, if not given")
    parser.add_argument("--replay", type=Path, help="a file with a schedule to run instead")
    parser.add_argument("--keep-all", action="store_true", help="do not shrink what fails")
    options = parser.parse_args()
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    transports = [options.transport] if options.transport else TRANSPORTS
    failed = sum(explore(transport, options) for transport in transports)
    return 1 if failed else 0


def explore(transport: str, options: Any) -> int:
    """Run the schedules on one transport; return how many failed."""
    from tests.simulation.schedule import drawn, dumped, loaded, shrunk

    failed, began, steps_run = 0, time.perf_counter(), 0
    with simulated(transport) as simulation:
        for seed in range(options.seed, options.seed + options.seeds):
            steps = drawn(seed, options.steps)
            if options.replay:
                steps = loaded(options.replay.read_text())
            problems = problems_of(simulation, steps)
            steps_run += len(steps)
            if not problems:
                continue
            failed += 1
            print(f"seed {seed} fails on {transport}:", *problems, sep="\n    ", flush=True)
            if not options.keep_all:
                kinds = {kind_of(problem) for problem in problems}

                def fails(part: list[Any], kinds: set[str] = kinds) -> bool:
                    return bool(kinds & {kind_of(p) for p in problems_of(simulation, part)})

                steps = shrunk(steps, fails)
                print("still fails:", *problems_of(simulation, steps), sep="\n    ")
            print(dumped(steps), flush=True)
    minutes = (time.perf_counter() - began) / 60
    print(
        f"{transport}: {options.seeds} schedules, {steps_run} steps, {failed} failed, "
        f"{options.seeds / minutes:.0f} schedules per minute"
    )
    return failed


def problems_of(simulation: Any, steps: Any) -> list[str]:
    """Run a schedule; what it raises is a problem of it, too."""
    try:
        found: list[str] = simulation.run(steps)
        return found
    except Exception:
        return [traceback.format_exc()]


def kind_of(problem: str) -> str:
    """Return what kind of problem it is, whatever the names in it."""
    return " ".join(word for word in problem.split()[-6:] if word.isalpha())


@contextmanager
def simulated(transport: str) -> Iterator[Any]:
    """Yield a simulation on SQLite files of its own."""
    import pytest
    from django.core.management import call_command
    from django.test import override_settings

    from tests.faults.building import TASKS, built, kjo
    from tests.faults.conftest import _file_of
    from tests.simulation.running import Simulation
    from tests.unit.conftest import led_to, sqlite_settings

    monkeypatch = pytest.MonkeyPatch()
    logging.getLogger("django_tasks").setLevel("CRITICAL")
    with tempfile.TemporaryDirectory() as folder:
        template, path = Path(folder) / "template.sqlite3", Path(folder) / "db.sqlite3"
        with led_to(sqlite_settings(template)):
            call_command("migrate", verbosity=0)
        shutil.copyfile(template, path)
        with (
            led_to(sqlite_settings(path)),
            override_settings(KJO=kjo(transport), TASKS=TASKS),
            built(monkeypatch, _file_of(path, template), Simulation, stands=True) as simulation,
        ):
            try:
                yield simulation
            finally:
                monkeypatch.undo()


if __name__ == "__main__":
    sys.exit(main())
