"""Filling the tables within the server, a million jobs at a time.

Secondary indexes and constraints are taken off and built once at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import Any

from django.db import connection
from django.db.models import Model
from django.utils import timezone

from kjo_django.models import (
    DeadLetter,
    Job,
    JobFailure,
    MetricBucket,
    MetricRollup,
    ProcessedEvent,
)
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.seeding import kinds, statements

CHUNK = 1_000_000
STEP = 1_000
"""Jobs that are added, and end, together."""
SESSION = {"synchronous_commit": "off", "maintenance_work_mem": "512MB", "work_mem": "128MB"}
BUILT_LAST = (Job, ProcessedEvent, DeadLetter)
COUNTED: tuple[type[Model], ...] = (
    Job,
    JobFailure,
    DeadLetter,
    ProcessedEvent,
    MetricBucket,
    MetricRollup,
)


def fill(
    jobs: int,
    dead_letters: int,
    *,
    now: datetime | None = None,
    service: str = "shop",
    tell: Callable[[str], None] = lambda line: None,
) -> dict[str, int]:
    """Write so many jobs of seven days, and everything that came of them.

    :param now: the end of the seven days; the present if not given.
    :param service: whose markers the completed jobs have.
    :returns: rows by table.
    :raises BenchmarkError: not on PostgreSQL, the tables are not empty, or more dead letters than
        jobs are wanted.
    """
    _check(jobs, dead_letters)
    values = {
        "jobs": jobs,
        "dead": dead_letters,
        "now": now or timezone.now(),
        "service": service,
    }
    began = time.monotonic()
    with connection.cursor() as cursor:
        for name, value in SESSION.items():
            cursor.execute(f"SET {name} = '{value}'")
        write_kinds(cursor)
        _write_failures(cursor)
        with _indexes_built_last(tell):
            for first in range(1, jobs + 1, CHUNK):
                last = min(first + CHUNK - 1, jobs)
                _write_jobs(cursor, {**values, "first": first, "last": last})
                tell(f"{last:,} of {jobs:,} jobs after {time.monotonic() - began:,.0f} s")
        for what, statement in statements.CONSEQUENCES.items():
            tell(what)
            cursor.execute(statement, values)
        tell("VACUUM ANALYZE")
        cursor.execute("VACUUM ANALYZE")
        for name in SESSION:
            cursor.execute(f"RESET {name}")
        for table in ("seed_kind", "seed_error", "seed_worker"):
            cursor.execute(f"DROP TABLE {table}")
        counts = {model._meta.db_table: _count(cursor, model) for model in COUNTED}
    tell(f"done after {time.monotonic() - began:,.0f} s")
    return counts


def _check(jobs: int, dead_letters: int) -> None:
    if connection.vendor != "postgresql":
        raise BenchmarkError("seeding needs PostgreSQL")
    if not 0 <= dead_letters <= jobs or jobs < 1:
        raise BenchmarkError("at least one job, and no more dead letters than jobs")
    if Job.objects.exists() or ProcessedEvent.objects.exists():
        raise BenchmarkError("the tables have rows already; give a database of its own")


def write_kinds(cursor: Any) -> None:
    """Write the temporary table of kinds."""
    cursor.execute(statements.KINDS)
    cursor.executemany(
        "INSERT INTO seed_kind VALUES (%s, %s, %s, %s, %s)",
        [(n, kind.queue, kind.handler, kind.keys, kind.run_power) for n, kind in kinds.slots()],
    )
    cursor.execute("ANALYZE seed_kind")


def _write_failures(cursor: Any) -> None:
    cursor.execute(statements.ERRORS)
    cursor.executemany(
        "INSERT INTO seed_error VALUES (%s, %s, %s, %s, %s, %s, %s)",
        [
            (f.handler, f.slot, f.error_type, f.error, f.fingerprint, f.reason, f.traceback)
            for f in kinds.failures()
        ],
    )
    cursor.execute(statements.WORKERS)
    cursor.executemany(
        "INSERT INTO seed_worker VALUES (%s, md5(%s)::uuid, %s)",
        [(n, name, name) for n, name in enumerate(kinds.WORKERS)],
    )
    cursor.execute("ANALYZE seed_error")


def _write_jobs(cursor: Any, values: dict[str, Any]) -> None:
    """Let jobs live as the product has them live: each is a small row first, and grows as it ends.

    Where new rows find room in a large table depends on what old ones left, so they are moved and
    vacuumed as in production, where autovacuum comes when a fifth has changed.
    """
    cursor.execute(statements.JOBS, values)
    cursor.execute("CREATE INDEX ON seed_job (n)")
    cursor.execute("ANALYZE seed_job")
    # The table was analyzed when it was small, if ever.
    cursor.execute("SET enable_hashjoin = off")
    cursor.execute("SET enable_mergejoin = off")
    for first in range(values["first"], values["last"] + 1, STEP):
        step = {"first": first, "last": min(first + STEP - 1, values["last"])}
        cursor.execute(statements.ADDED, step)
        cursor.execute(statements.ENDED, step)
    cursor.execute("RESET enable_hashjoin")
    cursor.execute("RESET enable_mergejoin")
    cursor.execute(statements.MARKERS, values)
    cursor.execute("DROP TABLE seed_job")
    cursor.execute("VACUUM kjo_job")


@contextmanager
def _indexes_built_last(tell: Callable[[str], None]) -> Iterator[None]:
    with connection.schema_editor() as editor:
        for model in BUILT_LAST:
            for constraint in model._meta.constraints:
                editor.remove_constraint(model, constraint)
            for index in model._meta.indexes:
                editor.remove_index(model, index)
    yield
    tell("building indexes")
    with connection.schema_editor() as editor:
        for model in BUILT_LAST:
            for constraint in model._meta.constraints:
                editor.add_constraint(model, constraint)
            for index in model._meta.indexes:
                editor.add_index(model, index)


def _count(cursor: Any, model: type[Model]) -> int:
    cursor.execute(f"SELECT count(*) FROM {connection.ops.quote_name(model._meta.db_table)}")
    return int(cursor.fetchone()[0])
