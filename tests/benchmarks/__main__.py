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
from pathlib import Path
from types import FrameType
from typing import Any

from tests.benchmarks import facts, report
from tests.benchmarks.cases import EMBEDDED, ENGINES, POSTGRES, REAL, Case, choose
from tests.benchmarks.catalogue import all_cases
from tests.benchmarks.engines import POSTGRES_SETTINGS, RealEngine, open_engine
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.peers import timed
from tests.benchmarks.peers.catalogue import PEERS, TIMED_PEERS, Peer, chosen
from tests.benchmarks.peers.running import Peers
from tests.benchmarks.published import page
from tests.benchmarks.rounds import measure
from tests.services import ServiceError, running

USUAL = (REAL, EMBEDDED)
"""The engines of a quick run."""
MOST_SECONDS = 150.0
"""After this no further round is begun, so that the quick run ends in under three minutes."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.plots:
        for path in page.write():
            print(f"wrote {path.name}")
        return 0
    cases = _cases(parser, options)
    try:
        result = _run(cases, options)
    except (BenchmarkError, ServiceError) as error:
        print(f"The benchmark failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("Interrupted", file=sys.stderr)
        return 130
    if options.out:
        options.out.write_text(f"{json.dumps(result, indent=1)}\n")
    print(json.dumps(result) if options.json else report.as_text(result))
    for name in report.failures(result):
        print(f"not measured: {name}", file=sys.stderr)
    return 1 if report.failures(result) else 0


def _cases(parser: argparse.ArgumentParser, options: argparse.Namespace) -> list[Case]:
    peers = {peer.name for peer in _timed(options)}
    every = [
        case
        for name in dict.fromkeys(options.engine or USUAL)
        for case in all_cases(
            name, options.jobs, options.lanes, full=options.full, tables=options.rows
        )
        if not case.peer or case.peer in peers
    ]
    for wanted in options.scenario:
        if not choose(every, [wanted]):
            known = sorted({case.scenario for case in every} | {case.name for case in every})
            parser.error(f"no scenario is named {wanted!r}; there are {', '.join(known)}")
    return [case for case in choose(every, options.scenario) if case.name not in options.leave_out]


def _timed(options: argparse.Namespace) -> list[Peer]:
    """Return the peers that are cases of the engine that is PostgreSQL alone."""
    return chosen(options.peer, TIMED_PEERS) if options.peers else []


def _drained(cases: Sequence[Case], options: argparse.Namespace) -> list[Peer]:
    """Return the peers that are measured after each round."""
    is_postgres_alone = {case.engine for case in cases} == {POSTGRES}
    return chosen(options.peer) if options.peers and not is_postgres_alone else []


def _run(cases: Sequence[Case], options: argparse.Namespace) -> dict[str, Any]:
    began = time.monotonic()
    machine = facts.machine()
    drained = _drained(cases, options)
    told = timed.prepared([p for p in _timed(options) if p.name in {c.peer for c in cases}], _tell)
    with ExitStack() as stack:
        environment: Mapping[str, str] = os.environ
        has_all = bool(drained) or any(case.engine == REAL for case in cases)
        has_servers = has_all or any(case.engine != EMBEDDED for case in cases)
        if has_servers:
            _tell(f"starting {'Kafka, Redis and ' if has_all else ''}PostgreSQL")
            servers = running(kafka=has_all, redis=has_all, postgres_settings=POSTGRES_SETTINGS)
            environment = stack.enter_context(servers)
        engines = {
            name: stack.enter_context(open_engine(name, environment))
            for name in dict.fromkeys(case.engine for case in cases)
        }
        peers = None
        if drained:
            engine = stack.enter_context(RealEngine(environment))
            peers = Peers(drained, engine, jobs=options.jobs, tell=_tell)
            peers.prepare()
        most = options.max_seconds
        if most is None:
            most = 0.0 if options.full else MOST_SECONDS
        left = most - (time.monotonic() - began) if most else 0.0
        everything = measure(
            cases,
            engines,
            rounds=options.rounds,
            most_seconds=max(left, 1e-9 if left else 0.0),
            tell=_tell,
            after_round=peers.run_round if peers else lambda number: None,
        )
        versions = facts.versions(environment if has_servers else None)
    return report.as_dict(
        everything,
        peers=(peers.as_dict() if peers else {}) | told,
        versions=versions,
        machine=machine,
        parameters={
            "full": options.full,
            "jobs": options.jobs,
            "rounds": options.rounds,
            "lanes": options.lanes,
        },
        seconds=time.monotonic() - began,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.benchmarks", description=__doc__)
    add = parser.add_argument
    add("--json", action="store_true", help="print one JSON object")
    add("--out", type=Path, metavar="FILE", help="write the JSON object there too")
    add(
        "--engine",
        action="append",
        choices=ENGINES,
        help=f"may be given several times; {' and '.join(USUAL)} if none is",
    )
    add(
        "--scenario",
        action="append",
        default=[],
        metavar="NAME",
        help="drain, enqueue, relay, lanes, processes, table, lone, far, crowd, database, latency, "
        "rates, wait, chain, memory or a "
        "case such as drain.insert; may be given several times",
    )
    add("--leave-out", action="append", default=[], metavar="CASE", help="all but this case")
    add("--rounds", "--repeat", type=_positive, default=3, metavar="K", help="default 3")
    add("--full", action="store_true", help="the sizes results are published with; takes an hour")
    add("--jobs", type=_positive, metavar="N", help="jobs of every bulk measurement")
    add(
        "--rows",
        type=_positive,
        action="append",
        default=[],
        metavar="N",
        help="rows in the table, for the scenarios table and database; 1,000,000 and 10,000,000 "
        "with --full",
    )
    add("--lanes", type=_positive, metavar="N", help="lanes of the worker instead of its default")
    add(
        "--max-seconds",
        type=float,
        default=None,
        metavar="S",
        help=f"begin no further round after this; 0: no limit; {MOST_SECONDS:g} unless --full",
    )
    add("--peers", action="store_true", help="other job queues too")
    names = [peer.name for peer in (*PEERS, *TIMED_PEERS)]
    add("--peer", action="append", default=[], choices=names, help="only this peer")
    add(
        "--plots",
        action="store_true",
        help="measure nothing: write the tables and plots of docs/explanation/performance.md from "
        "its raw results",
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
    signal.signal(signal.SIGTERM, _interrupt)
    sys.exit(main())
