"""A database that looks like one in its seventh day of work, in minutes.

    python -m tests.benchmarks.seed --jobs 10000000 --dead-letters 200000 --database-url …

Needs PostgreSQL and empty tables; migrates first. The same numbers and the same ``--now`` give the
same rows: states, queues, handlers, keys, failed attempts, dead letters of a few dozen errors,
markers of every completed job, and the minute buckets that add up to just these jobs. After them
come jobs that wait for a limit, workflows and schedules.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import datetime


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the database; the exit code."""
    options = _parser().parse_args(arguments)
    os.environ["DATABASE_URL"] = options.database_url
    os.environ.setdefault("KJO_BENCHMARK_TOPIC", "seed")
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.benchmarks.settings"
    import django
    from django.core.management import call_command

    django.setup()
    from django.utils import timezone

    from tests.benchmarks.errors import BenchmarkError
    from tests.benchmarks.seeding.features import add_features
    from tests.benchmarks.seeding.filling import fill

    call_command("migrate", verbosity=0)
    try:
        now = options.now or timezone.now()
        counts = fill(options.jobs, options.dead_letters, now=now, tell=_tell)
        add_features(options.jobs, options.dead_letters, now, tell=_tell)
    except BenchmarkError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    for table, count in counts.items():
        print(f"{table}: {count:,}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m tests.benchmarks.seed", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--jobs", type=int, default=1_000_000, metavar="N")
    parser.add_argument("--dead-letters", type=int, default=20_000, metavar="N")
    parser.add_argument(
        "--now", type=_moment, help="end of the seven days, ISO 8601 with offset; default: now"
    )
    given = os.environ.get("DATABASE_URL")
    parser.add_argument(
        "--database-url", default=given, required=given is None, help="default: DATABASE_URL"
    )
    return parser


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    if moment.tzinfo is None:
        raise ValueError(text)
    return moment


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
