"""The tests, with the servers they need: `python -m tests [--all] [--strict] [PYTEST ARGUMENTS]`.

Installs Kafka, Redis, PostgreSQL with PgBouncer, MariaDB and Chromium where they are missing, for
all tests also Valkey and the compilers of other languages, then runs pytest. ruff, the import
contracts and mypy are tests too (`tests/checks`), so the last line tells of everything. Without the
servers the rest is run all the same, and the exit code says that something is missing.

Tests that fail are run again by themselves, twice at most. A test that passes then is *unsteady*:
it is named, with its first failure, and does not fail the run, unless there are many.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.outcomes import Outcomes
from tests.repeats import Verdict, repeat
from tests.services.clients import LANGUAGES
from tests.services.errors import ServiceError
from tests.services.provisioning import provision
from tests.tiers import NAMES, Tier

WORKERS = 4
"""Many tests wait: for servers to come back, leases to end, processes to start. Side by side they
wait at the same time. Each worker has servers of its own, but for Kafka."""

CHUNK = 4
"""Tests that a worker is given at a time. By default its first share is a sixteenth of all tests,
and it may be left with slow ones when the others have ended."""


def parse(arguments: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return what is meant for this command, and what is meant for pytest."""
    parser = argparse.ArgumentParser(
        prog="python -m tests",
        description="Run the tests with real servers, which are installed where they are missing.",
        epilog="All other arguments are pytest's: python -m pytest --help",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--tier",
        choices=[*NAMES],
        default=Tier.MEDIUM.value,
        help="run the tests of this tier and of those before it (default: %(default)s)",
    )
    parser.add_argument(
        "--all",
        dest="tier",
        action="store_const",
        const=Tier.LARGE.value,
        help="run everything that is not marked long: --tier large",
    )
    repeats = parser.add_mutually_exclusive_group()
    repeats.add_argument(
        "--strict", action="store_true", help="a test that fails once has failed: repeat nothing"
    )
    repeats.add_argument(
        "--unsteady-to",
        metavar="FILE",
        type=Path,
        help="write to this file, as JSON, which tests failed and passed when they were repeated",
    )
    known, others = parser.parse_known_args(arguments)
    if known.unsteady_to and not known.unsteady_to.absolute().parent.is_dir():
        parser.error(f"--unsteady-to {known.unsteady_to}: there is no such directory")
    return known, others


def keep_bytecode() -> None:
    """Let this process and those it starts write what they compile to `__pycache__`.

    Where PYTHONDONTWRITEBYTECODE is set, as in many images of containers, each of the processes
    that the tests start compiles the whole package again: a third of the CPU time of a start.
    """
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False


def main(arguments: list[str]) -> int:
    chosen, others = parse(arguments)
    keep_bytecode()
    is_complete = True
    is_on_mysql = any("mysql" in argument for argument in others)
    is_everything = NAMES[chosen.tier] is Tier.LARGE
    # Not left to the fixtures: installing may take longer than a test is given.
    try:
        provision(
            browser=True,
            mariadb=True,
            mysql=is_on_mysql,
            pgbouncer=True,
            valkey=is_everything,
            network=is_everything,
            clients=LANGUAGES if is_everything else (),
        )
    except ServiceError as error:
        print(f"error: {error}\n", file=sys.stderr)
        is_complete = False
    with tempfile.TemporaryDirectory(prefix="kjo-tests-") as directory:
        code = run(chosen, others, Path(directory))
    return code if is_complete else code or 1


def run(chosen: argparse.Namespace, others: list[str], directory: Path) -> int:
    """Run pytest and repeat what failed; return the exit code of the whole."""
    began = time.monotonic()
    options = [f"--tier={chosen.tier}", *others]
    if NAMES[chosen.tier] is not Tier.LARGE:  # where a test may take longer than that
        options = ["--override-ini=faulthandler_exit_on_timeout=true", *options]
    first = Outcomes()
    parallel = [f"--numprocesses={WORKERS}", f"--maxschedchunk={CHUNK}"]
    code = int(pytest.main([*parallel, *options], plugins=[first]))
    verdict = Verdict(first)
    if code == pytest.ExitCode.TESTS_FAILED and first.is_whole and not chosen.strict:
        try:
            repeat(verdict, options, directory)
            code = verdict.exit_code
        except KeyboardInterrupt:
            print("interrupted: what has not passed in a repeat counts as failed")
            code = int(pytest.ExitCode.INTERRUPTED)
        print(verdict.summary(time.monotonic() - began))
    if chosen.unsteady_to:
        chosen.unsteady_to.write_text(verdict.as_json())
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
