"""The command line; see the package."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import FrameType

from tests.benchmarks import facts, report
from tests.benchmarks.cases import ENGINES, REAL, Case, all_cases, choose
from tests.benchmarks.engines import open_engine
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.rounds import measure
from tests.services import ServiceError, running

MOST_SECONDS = 150.0
"""After this no further round is begun, so that the default run ends in under three minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    engines = ENGINES if options.engine == "both" else (options.engine,)
    every = [case for name in engines for case in all_cases(name, options.jobs, options.lanes)]
    cases = choose(every, options.scenario)
    for wanted in options.scenario:
        if not choose(every, [wanted]):
            known = sorted({case.scenario for case in every} | {case.name for case in every})
            parser.error(f"no scenario is named {wanted!r}; there are {', '.join(known)}")
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        result = _run(cases, options)
    except (BenchmarkError, ServiceError) as error:
        print(f"The benchmark failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    print(json.dumps(result) if options.json else report.as_text(result))
    return 0


def _run(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, object]:
    began = time.monotonic()
    machine = facts.machine()
    with ExitStack() as stack:
        environment: Mapping[str, str] = os.environ
        has_servers = any(case.engine == REAL for case in cases)
        if has_servers:
            _tell("starting Kafka, Redis and PostgreSQL")
            environment = stack.enter_context(running())
        engines = {
            name: stack.enter_context(open_engine(name, environment))
            for name in dict.fromkeys(case.engine for case in cases)
        }
        left = options.max_seconds - (time.monotonic() - began) if options.max_seconds else 0.0
        everything = measure(
            cases,
            engines,
            repeat=options.repeat,
            most_seconds=max(left, 1e-9 if left else 0.0),
            tell=_tell,
        )
        versions = facts.versions(environment if has_servers else None)
    return report.as_dict(
        everything,
        versions=versions,
        machine=machine,
        parameters={"jobs": options.jobs, "repeat": options.repeat, "lanes": options.lanes},
        seconds=time.monotonic() - began,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--scenario",
        action="append",
        default=[],
        metavar="NAME",
        help="drain, enqueue, relay, latency, wait, memory or a case such as drain.insert; may be "
        "given several times",
    )
    parser.add_argument("--engine", choices=(*ENGINES, "both"), default="both")
    parser.add_argument(
        "--jobs", type=_positive, metavar="N", help="jobs of every bulk measurement"
    )
    parser.add_argument(
        "--repeat", type=_positive, default=3, metavar="K", help="rounds, default 3"
    )
    parser.add_argument(
        "--lanes", type=_positive, metavar="N", help="lanes of the worker; its default if not given"
    )
    parser.add_argument(
        "--max-seconds",
        type=float,
        default=MOST_SECONDS,
        metavar="S",
        help="begin no further round after this; 0: no limit; default %(default)g",
    )
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
