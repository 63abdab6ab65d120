"""Claiming and releasing leases on SQLite: a statement for all names, where Django would prepare
each value of each row for three."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from django.db import connections
from django.utils import timezone

from kjo_django.coordination.base import Claim

_TAKE_WRITE_LOCK = "UPDATE kjo_lease SET deliveries = 0 WHERE name IS NULL"

# WHERE true tells SQLite that ON belongs to the conflict, not to a join.
_CLAIM = """
INSERT INTO kjo_lease (name, token, expires_at, deliveries)
SELECT column1, %s, %s, 1 FROM (VALUES {names}) WHERE true
ON CONFLICT (name) DO UPDATE SET token = excluded.token, expires_at = excluded.expires_at,
    deliveries = kjo_lease.deliveries + (kjo_lease.expires_at <= %s)
WHERE kjo_lease.expires_at <= %s OR kjo_lease.token = excluded.token
RETURNING name, deliveries
"""
_DELIVERIES = "SELECT name, deliveries FROM kjo_lease WHERE name IN ({names})"
_RELEASE = "DELETE FROM kjo_lease WHERE name IN ({names}) AND token = %s"


def can_claim(alias: str) -> bool:
    """Return whether the library knows RETURNING (3.35); Django asks for 3.31."""
    return bool(connections[alias].features.can_return_columns_from_insert)


def claim(alias: str, names: Sequence[str], token: str, ttl: timedelta) -> dict[str, Claim]:
    """Claim the names in the caller's transaction, which must be of its own.

    :param names: without repeats, no more than one statement binds.
    """
    connection = connections[alias]
    with connection.cursor() as cursor:
        # Only who may write knows what time it is: waiting for that takes seconds at times.
        cursor.execute(_TAKE_WRITE_LOCK)
        moment = timezone.now()
        now = connection.ops.adapt_datetimefield_value(moment)
        until = connection.ops.adapt_datetimefield_value(moment + ttl)
        statement = _CLAIM.format(names=", ".join(["(%s)"] * len(names)))
        cursor.execute(statement, [token, until, *names, now, now])
        claims = {name: Claim(True, deliveries) for name, deliveries in cursor.fetchall()}
        held = [name for name in names if name not in claims]
        if held:
            cursor.execute(_DELIVERIES.format(names=_places(held)), held)
            claims.update((name, Claim(False, deliveries)) for name, deliveries in cursor)
    return claims


def release(alias: str, names: Sequence[str], token: str) -> None:
    """Delete those that ``token`` still holds.

    :param names: no more than one statement binds.
    """
    with connections[alias].cursor() as cursor:
        cursor.execute(_RELEASE.format(names=_places(names)), [*names, token])


def _places(names: Sequence[str]) -> str:
    return ", ".join(["%s"] * len(names))
