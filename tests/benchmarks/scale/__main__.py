"""The command line; see the package."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from tests.benchmarks import facts
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.scale import page
from tests.benchmarks.scale.points import POINTS, SHARES
from tests.cluster.network import COMMAND, make_folder, obstacle
from tests.services import ServiceError

INSIDE = "KJO_TEST_SCALE"
"""Set in the process that has namespaces of its own."""


def main() -> int:
    """Measure, or draw; the exit code."""
    parser = argparse.ArgumentParser("python -m tests.benchmarks.scale", description=__doc__)
    add = parser.add_argument
    add("--plots", action="store_true", help="measure nothing: write tables and plots anew")
    add("--out", type=Path, metavar="FILE", default=page.RESULTS, help="for the raw results")
    add("--rounds", type=int, default=3, metavar="K")
    add("--minutes", type=float, default=60.0, help="no round is begun later")
    add("--at", metavar="HH:MM", help="prepare now, measure from then on (UTC): a quiet hour")
    add("--point", action="append", default=[], metavar="NAME", help="only this one")
    options = parser.parse_args()
    if options.plots:
        for path in page.write():
            print(f"wrote {path.name}")
        return 0
    if not os.environ.get(INSIDE):
        if reason := obstacle():
            parser.error(reason)
        os.environ[INSIDE] = "1"
        python = [sys.executable, "-m", "tests.benchmarks.scale"]
        os.execvp(COMMAND[0], [*COMMAND, *python, *sys.argv[1:]])
    make_folder()
    logs = Path(tempfile.mkdtemp(prefix="kjo-scale-"))
    try:
        _run(options, logs)
    except (BenchmarkError, ServiceError, AssertionError) as error:
        print(f"The measurement failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    finally:
        shutil.rmtree(logs)
    return 0


def _run(options: argparse.Namespace, logs: Path) -> None:
    from tests.benchmarks.scale.machines import Deployment
    from tests.benchmarks.scale.measuring import WARM_UP, WINDOW, measure_all

    points = [each for each in POINTS if not options.point or each.name in options.point]
    machine: dict[str, object] = {}
    versions: dict[str, str] = {}

    began = 0.0

    def begin() -> None:
        nonlocal began
        _wait_until(options.at)
        began = time.monotonic()
        machine.update(facts.machine())
        versions.update(facts.versions(deployment.environment))

    def write(found: Mapping[str, Mapping[str, Any]]) -> None:
        result = {
            "versions": versions,
            "machine": machine,
            "parameters": {
                "rounds": min(len(each["rates"]) for each in found.values()),
                "warm_up": WARM_UP,
                "window": WINDOW,
                "shares": SHARES,
            },
            "seconds": round(time.monotonic() - began, 1),
            "points": [
                {**point.as_dict(), "found": found[point.name]}
                for point in points
                if point.name in found
            ],
        }
        options.out.write_text(f"{json.dumps(result, indent=1)}\n")

    with Deployment(logs) as deployment:
        measure_all(
            deployment,
            points,
            rounds=options.rounds,
            most_seconds=options.minutes * 60,
            before_first=begin,
            after_round=write,
            tell=_tell,
        )


def _wait_until(moment: str | None) -> None:
    if moment:
        now = datetime.now(UTC)
        hour, minute = map(int, moment.split(":"))
        begin = now.replace(hour=hour, minute=minute, second=0, microsecond=0)
        time.sleep(max(0.0, (begin - now).total_seconds()))


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
