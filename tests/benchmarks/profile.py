"""Where a worker's processor time goes while it drains no-ops on the real engine.

    python -m tests.benchmarks.profile --name after --out docs/explanation/performance/profile.json

py-spy samples the threads that use a processor, in an environment of its own; the microseconds are
those of a second run without it. Results are kept by name, beside those that are in the file.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import child, facts
from tests.benchmarks.cases import Input
from tests.benchmarks.engines import POSTGRES_SETTINGS, RealEngine
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.peers import environments
from tests.benchmarks.rounds import rounded
from tests.services import ServiceError, running

RATE = 250
"""Samples a second."""

STAGES: Mapping[str, Sequence[str]] = {
    "reading records from Kafka": ("KafkaSubscription.poll",),
    "reading the envelope": ("Poller.read",),
    "scheduling groups for lanes": ("GroupScheduler.",),
    "leases, one script a group": ("LeaseBook.claim",),
    "markers and rows, one INSERT and one SELECT a group": (
        "PostgresStore.insert_markers",
        "PostgresStore.job_rows",
        "load_rows ",
    ),
    "calling handlers": ("LaneRunner._call",),
    "outcomes, one UPDATE a group": ("PostgresStore.complete ", "Store.complete "),
    "BEGIN and COMMIT": ("Atomic.__enter__", "Atomic.__exit__"),
    "acknowledging, releasing leases": ("LeaseBook.settle", "Pipeline._settle"),
    "statistics, signals": ("Pipeline._announce",),
}
"""The beginnings of the frames of each stage; of the frames in a stack, the innermost counts."""
REST = "the rest of the pipeline"
AROUND = "everything else: heartbeat, listener, main thread"


def main(arguments: Sequence[str] | None = None) -> int:
    """Profile and write; the exit code."""
    options = _parser().parse_args(arguments)
    try:
        profiled = _profile(options.jobs)
    except (BenchmarkError, ServiceError) as error:
        print(f"The profile failed: {error}", file=sys.stderr)
        return 1
    kept = json.loads(options.out.read_text()) if options.out.exists() else {}
    kept[options.name] = profiled
    options.out.write_text(f"{json.dumps(kept, indent=1)}\n")
    print(f"{profiled['cpu_us_per_job']:.1f} µs of CPU for each job")
    for name, share in profiled["stages"].items():
        print(f"{share * profiled['cpu_us_per_job']:7.1f} µs  {name}")
    return 0


def _profile(jobs: int) -> dict[str, Any]:
    spy = environments.python_of("py-spy", ("py-spy",)).with_name("py-spy")
    arguments = {"workload": "no_op", "count": jobs}
    input = Input("no_op", jobs)
    with (
        running(postgres_settings=POSTGRES_SETTINGS) as environment,
        RealEngine(environment) as engine,
    ):
        engine.prepare(input, 2)
        with engine.fresh(input) as variables:
            plain = child.run("measures.drain.run", arguments, variables)
        with engine.fresh(input) as variables, tempfile.TemporaryDirectory() as directory:
            stacks = Path(directory, "stacks")
            record = [str(spy), "record", "--rate", str(RATE), "--format", "raw", "--nonblocking"]
            record += ["--threads", "--output", str(stacks), "--"]
            command = [*record, *child.command("measures.drain.run", arguments)]
            done = subprocess.run(command, env=variables, capture_output=True, text=True)
            if done.returncode or not stacks.exists():
                raise BenchmarkError(f"py-spy failed: {done.stderr[-500:]}")
            counted = by_stage(stacks.read_text().splitlines())
        versions = facts.versions(environment)
    samples = sum(counted.values())
    return {
        "jobs": jobs,
        "jobs_per_second": rounded(plain["jobs_per_second"]),
        "cpu_us_per_job": rounded(plain["cpu_us_per_job"]),
        "samples": samples,
        "stages": {name: rounded(count / samples) for name, count in counted.most_common()},
        "versions": versions,
    }


def by_stage(lines: Iterable[str]) -> Counter[str]:
    """Count the samples of each stage; a line has a stack, outermost first, and a number.

    What happens before the worker runs is left out.
    """
    counted: Counter[str] = Counter()
    for line in lines:
        stack, _, number = line.rpartition(" ")
        stage = stage_of(stack.split(";"))
        if stage:
            counted[stage] += int(number)
    return counted


def stage_of(frames: Sequence[str]) -> str | None:
    """Return the stage a stack belongs to; None where it is none of the worker's."""
    told = ("kjo_django/", "django/db/transaction")
    names = [f"{f.partition(' (')[0]} " for f in frames if any(part in f for part in told)]
    for name in reversed(names):
        for stage, beginnings in STAGES.items():
            if name.startswith(tuple(beginnings)):
                return stage
    thread = frames[0].partition(": ")[2]
    if thread.startswith(("kjo-lane", "kjo-poll")):
        return REST
    is_worker = thread.startswith("kjo-") or any(name == "Worker.run " for name in names)
    return AROUND if is_worker else None


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.benchmarks.profile", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=50_000, metavar="N")
    parser.add_argument("--name", default="after", help="what the result is kept as")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    return parser


if __name__ == "__main__":
    sys.exit(main())
