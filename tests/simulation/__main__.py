"""Runs schedules: ``python -m tests.simulation --seed 7 --steps 60 --seeds 100``."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import django

TRANSPORTS = ("memory", "database")
STEPS = 60
really_now, cpu_seconds = time.perf_counter, time.process_time


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="the first seed")
    parser.add_argument("--seeds", type=int, default=1, help="how many, one after the other")
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of a schedule")
    parser.add_argument("--transport", choices=TRANSPORTS, help="both, if not given")
    parser.add_argument("--replay", type=Path, help="a file with a schedule to run instead")
    parser.add_argument("--keep-all", action="store_true", help="do not shrink what fails")
    parser.add_argument("--trace", action="store_true", help="print every call of every thread")
    parser.add_argument("--first", action="store_true", help="end with the first that fails")
    options = parser.parse_args()
    if os.environ.get("PYTHONHASHSEED") != "0":
        # Else the order of sets differs from run to run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-m", "tests.simulation", *sys.argv[1:]])
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    logging.getLogger("django_tasks").setLevel("CRITICAL")
    transports = [options.transport] if options.transport else TRANSPORTS
    with tempfile.TemporaryDirectory() as folder:
        template = migrated(Path(folder))
        failed = sum([explore(transport, template, options) for transport in transports])
    return 1 if failed else 0


def migrated(folder: Path) -> Path:
    """Return an empty SQLite file with all tables."""
    from django.core.management import call_command

    from tests.databases import led_to, sqlite_settings

    path = folder / "template.sqlite3"
    with led_to(sqlite_settings(path)):
        call_command("migrate", verbosity=0)
    return path


def explore(transport: str, template: Path, options: Any) -> int:
    """Run the schedules on one transport; return how many failed."""
    from tests.simulation.running import simulated
    from tests.simulation.schedule import drawn, dumped, loaded, shrunk

    failed, count, steps_run = 0, 0, 0
    began, cpu_began = really_now(), cpu_seconds()
    with simulated(transport, template) as simulation:
        for seed in range(options.seed, options.seed + options.seeds):
            steps = drawn(seed, options.steps)
            if options.replay:
                steps = loaded(options.replay.read_text())
            problems = problems_of(simulation, steps)
            if options.trace:
                print(*simulation.trace, sep="\n")
            count, steps_run = count + 1, steps_run + len(steps)
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
            if options.first:
                break
    minutes, cpu_minutes = (really_now() - began) / 60, (cpu_seconds() - cpu_began) / 60
    print(
        f"{transport}: {count} schedules, {steps_run} steps, {failed} failed, "
        f"{count / minutes:.0f} schedules per minute, {count / cpu_minutes:.0f} per minute of CPU"
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


if __name__ == "__main__":
    sys.exit(main())
