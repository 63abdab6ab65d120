"""Leases in job rows: taken, for all of a group, by whoever still finds the row as it was judged.

No row is locked meanwhile. A transaction that reads and then writes would hold its rows while it
asks coordination about their holders, and SQLite refuses such a write at once, whatever its
time-out, when somebody else has written after our read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections

from kjo_django import states
from kjo_django.engine import failures
from kjo_django.models import Job
from kjo_django.store.postgres import array_text
from kjo_django.store.rows import JobRow


def take(
    using: str, rows: Sequence[JobRow], token: str, now: datetime, expires_at: datetime
) -> set[UUID]:
    """Write a worker's lease into rows, unless they have changed since they were read.

    :param rows: as ``load_rows`` returns them.
    :returns: the ids of the jobs whose lease it got.
    """
    if not rows:
        return set()
    if connections[using].vendor == "postgresql":
        return _take_at_once(using, rows, token, now, expires_at)
    return _take_alike(using, rows, token, now, expires_at)


def give_back(using: str, ids: Collection[UUID], token: str) -> None:
    """Take a worker's lease out of the rows of jobs it has not begun."""
    if not ids:
        return
    if connections[using].vendor == "postgresql":
        with connections[using].cursor() as cursor:
            cursor.execute(_GIVE_BACK, [array_text(ids), token])
        return
    Job.objects.using(using).filter(pk__in=ids, lease_token=token).update(
        lease_token="", lease_expires_at=None, started_at=None
    )


# Locked in one order first: two workers that want the same rows wait for each other, and no more.
_TAKE = """
WITH locked AS MATERIALIZED (
    SELECT id FROM kjo_job WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE
)
UPDATE kjo_job SET lease_token = %s, lease_expires_at = %s, started_at = %s
FROM locked JOIN unnest(%s::uuid[], %s::int[], %s::int[], %s::text[], %s::timestamptz[])
    AS v (id, generation, attempts, lease_token, lease_expires_at) ON v.id = locked.id
WHERE kjo_job.id = ANY(%s::uuid[]) AND kjo_job.id = locked.id AND CASE
    WHEN kjo_job.generation = v.generation AND kjo_job.attempts = v.attempts
        AND kjo_job.lease_token = v.lease_token
        AND kjo_job.lease_expires_at IS NOT DISTINCT FROM v.lease_expires_at
        AND kjo_job.state = ANY(%s) THEN true ELSE false END
RETURNING kjo_job.id
"""

_GIVE_BACK = """
UPDATE kjo_job SET lease_token = '', lease_expires_at = NULL, started_at = NULL
WHERE id IN (
    SELECT id FROM kjo_job WHERE id = ANY(%s::uuid[]) ORDER BY id FOR NO KEY UPDATE
) AND lease_token = %s
"""


def _take_at_once(
    using: str, rows: Sequence[JobRow], token: str, now: datetime, expires_at: datetime
) -> set[UUID]:
    ids = array_text(row.id for row in rows)
    judged: list[Any] = [
        ids,
        array_text(row.generation for row in rows),
        array_text(row.attempts for row in rows),
        [row.lease_token for row in rows],
        [row.lease_expires_at for row in rows],
    ]
    with connections[using].cursor() as cursor:
        cursor.execute(
            _TAKE, [ids, token, expires_at, now, *judged, ids, sorted(map(str, states.OPEN))]
        )
        return {row[0] for row in cursor.fetchall()}


def _take_alike(
    using: str, rows: Sequence[JobRow], token: str, now: datetime, expires_at: datetime
) -> set[UUID]:
    """The same for other databases: a statement for all that were read alike, mostly one."""
    alike: dict[tuple[Any, ...], list[UUID]] = {}
    for row in rows:
        judged = (row.generation, row.attempts, row.lease_token, row.lease_expires_at)
        alike.setdefault(judged, []).append(row.id)
    won: set[UUID] = set()
    # It begins with a write, so SQLite waits for its turn.
    with failures.in_transaction(using):
        for (generation, attempts, holder, until), ids in alike.items():
            lease = {"lease_expires_at": until} if until else {"lease_expires_at__isnull": True}
            jobs = Job.objects.using(using).filter(pk__in=ids)
            changed = jobs.filter(
                generation=generation,
                attempts=attempts,
                lease_token=holder,
                state__in=states.OPEN,
                **lease,
            ).update(lease_token=token, lease_expires_at=expires_at, started_at=now)
            if changed < len(ids):
                ours = jobs.filter(lease_token=token, lease_expires_at=expires_at)
                won.update(ours.values_list("pk", flat=True))
            else:
                won.update(ids)
    return won
