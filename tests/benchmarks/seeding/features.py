"""Limits with jobs in line, workflows and schedules, in a database that `fill` has filled."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.db import connection

from kjo_django.models import LimitControl, Schedule
from tests.benchmarks.seeding import kinds
from tests.benchmarks.seeding.filling import write_kinds
from tests.benchmarks.seeding.statements import NUMBERED

SCHEDULES = 300
JOBS_IN_LINE = 20
"""For one of so many jobs, another one waits for a limit."""
JOBS_APART = 2_000
"""One workflow for so many jobs; the first of these are its steps."""


def add_features(
    jobs: int, dead_letters: int, now: datetime, tell: Callable[[str], None] = lambda line: None
) -> None:
    """Let one more job in twenty wait for a limit, and make workflows, whose steps are some of the
    jobs, and schedules.

    :param jobs: how many ``fill`` has written; ``dead_letters``, ``now``: as it was told.
    """
    values: dict[str, Any] = {
        "jobs": jobs,
        "dead": dead_letters,
        "now": now,
        "line": jobs // JOBS_IN_LINE,
        "workflows": jobs // JOBS_APART,
        "apart": JOBS_APART,
    }
    with connection.cursor() as cursor:
        write_kinds(cursor)
        for what, statement in STATEMENTS.items():
            tell(what)
            cursor.execute(statement, values)
        _write_controls(now)
        cursor.execute("DROP TABLE seed_kind, seed_step")
        tell("VACUUM ANALYZE")
        cursor.execute("VACUUM ANALYZE")


def _write_controls(now: datetime) -> None:
    """Write a limit of each handler and queue, and schedules of which every tenth is paused."""
    limits = [f"job:{kind.handler}" for kind in kinds.KINDS]
    limits += [f"queue:{queue}" for queue in kinds.QUEUES]
    LimitControl.objects.bulk_create([LimitControl(name=name, rate="100/s") for name in limits])
    Schedule.objects.bulk_create(
        [
            Schedule(
                name=f"schedule-{number:03}",
                job=kinds.KINDS[number % len(kinds.KINDS)].handler,
                every=60_000 * (number + 1),
                is_paused=not number % 10,
                next_at=now + timedelta(minutes=number + 1),
            )
            for number in range(SCHEDULES)
        ]
    )


# --- What waits in line ---------------------------------------------------------------------------

IN_LINE = """
INSERT INTO kjo_job (id, queue, handler, unique_id, key, state, generation, attempts, max_attempts,
    payload, content_type, available_at, created_at, lease_token, result_ttl, error, destination,
    topic)
SELECT (lpad(to_hex((extract(epoch FROM since) * 1000)::bigint), 12, '0') || '7'
        || lpad(to_hex(n & 4095), 3, '0') || 'b'
        || lpad(to_hex(hashint8extended(n, 3) & 1152921504606846975), 15, '0'))::uuid,
    queue, handler, NULL, CASE WHEN keys > 0 THEN 'C' || n %% keys ELSE '' END, 'pending', 1, 0, 3,
    '{}', 'application/json', '8000-01-01Z', since, '', 3600000, '', '', ''
FROM (
    SELECT n, %(now)s::timestamptz - interval '1 second' * (%(line)s - n) / 10 AS since,
        (n %% 100)::int AS slot
    FROM generate_series(1, %(line)s::bigint) AS v (n)
) AS numbered JOIN seed_kind USING (slot)
"""
LINE = """
INSERT INTO kjo_held_job (job_id, generation, "limit", queue, key, rank, is_released, waiting_since)
SELECT id, 1, 'RATE:job:' || handler || CASE WHEN key = '' THEN '' ELSE ':' || key END, queue,
    nullif(key, ''), 0, false, created_at
FROM kjo_job WHERE available_at = '8000-01-01Z' ORDER BY id
"""

# --- Workflows ------------------------------------------------------------------------------------

_GRAPH = "(VALUES (1, 1, 1), (2, 2, 51), (3, 52, 52)) AS graph (stage, first, last)"
"""The stages of each workflow, with the first and the last of its 52 steps that are theirs."""
_STEPS = """
SELECT n FROM generate_series(1, %(jobs)s::bigint) AS v (n)
WHERE (n - 1) %% %(apart)s < 52 AND (n - 1) / %(apart)s < %(workflows)s
"""
STEPS = f"""
CREATE TEMPORARY TABLE seed_step AS
WITH numbered AS ({NUMBERED.format(numbers=_STEPS)})
SELECT numbered.id, (n - 1) / %(apart)s + 1 AS workflow, stage,
    md5('stage' || (n - 1) / %(apart)s || '/' || stage)::uuid AS stage_id
FROM numbered JOIN {_GRAPH} ON (n - 1) %% %(apart)s + 1 BETWEEN first AND last
"""
STEPPED = """
UPDATE kjo_job AS job SET stage_id = seed_step.stage_id FROM seed_step WHERE job.id = seed_step.id
"""
WORKFLOWS = """
INSERT INTO kjo_workflow (id, name, unique_id, state, reason, on_failure, step_count,
    open_stage_count, deadline, created_at, finished_at)
SELECT (left(min(job.id::text), 19) || '9' || substr(min(job.id::text), 21))::uuid,
    'shop.nightly', 'night-' || workflow,
    CASE WHEN bool_or(job.state IN ('pending', 'queued', 'failing')) THEN 'running'
        WHEN bool_or(job.state IN ('failed', 'cancelled')) THEN 'failed' ELSE 'completed' END,
    '', 'cancel', count(*),
    count(DISTINCT stage) FILTER (WHERE job.state IN ('pending', 'queued', 'failing')),
    NULL, min(job.created_at),
    CASE WHEN NOT bool_or(job.state IN ('pending', 'queued', 'failing'))
        THEN max(job.finished_at) END
FROM seed_step JOIN kjo_job AS job USING (id) GROUP BY workflow
"""
STAGES = """
INSERT INTO kjo_workflow_stage (id, workflow_id, handler, queue, on_failure, step_count, argument,
    source_id, finished_at)
SELECT seed_step.stage_id, kjo_workflow.id, min(handler), min(queue), 'cancel', count(*), '', NULL,
    max(job.finished_at)
FROM seed_step JOIN kjo_job AS job USING (id)
    JOIN kjo_workflow ON kjo_workflow.unique_id = 'night-' || workflow
GROUP BY seed_step.stage_id, kjo_workflow.id
"""
COUNTS = """
INSERT INTO kjo_workflow_count (stage_id, open_count, failed_count, cancelled_count)
SELECT seed_step.stage_id, count(*) FILTER (WHERE state IN ('pending', 'queued', 'failing')),
    count(*) FILTER (WHERE state = 'failed'), count(*) FILTER (WHERE state = 'cancelled')
FROM seed_step JOIN kjo_job AS job USING (id) GROUP BY seed_step.stage_id
"""
EDGES = """
INSERT INTO kjo_workflow_edge (required_id, stage_id, is_met)
SELECT DISTINCT before.stage_id, after.stage_id, true
FROM seed_step AS before JOIN seed_step AS after
    ON after.workflow = before.workflow AND after.stage = before.stage + 1
"""

STATEMENTS = {
    "jobs in line": IN_LINE,
    "places in line": LINE,
    "steps of workflows": STEPS,
    "workflows": WORKFLOWS,
    "stages": STAGES,
    "jobs of steps": STEPPED,
    "counts of steps": COUNTS,
    "edges": EDGES,
}
