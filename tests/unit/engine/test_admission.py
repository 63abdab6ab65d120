"""Whether a delivery may run, given its job's row: a table."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.test import override_settings
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.engine.admission import admit
from kjo_django.engine.attempt import Delivery, Ending
from kjo_django.engine.leases import LeaseBook
from kjo_django.messages import headers as names
from kjo_django.messages.headers import read_message
from kjo_django.models import Job
from kjo_django.runtime import current_runtime
from kjo_django.store.rows import COLUMNS, JobRow, row_of
from kjo_django.transports.base import Record
from tests.factories import JobFactory
from tests.unit.deliveries import Silent

NOW = timezone.now()
PAST, FUTURE = NOW - timedelta(seconds=1), NOW + timedelta(seconds=60)


class Leases(LeaseBook):
    """Ours is ``me``; of the others, ``dead`` shows no sign of life."""

    def __init__(self) -> None:
        super().__init__(current_runtime(), "me")

    def is_vanished(self, token: str) -> bool:
        return token == "dead"


def delivery(*, deliveries: int = 1, is_foreign: bool = False, **told) -> Delivery:
    facts = {"generation": 1, "attempt": 1, "service": "tests", **told}
    if is_foreign:
        headers = {names.ID: b"foreign", names.TYPE: b"ledger.write"}
    else:
        headers = names.encode(
            {
                names.ID: "id",
                names.TYPE: "ledger.write",
                names.JOB_ID: "id",
                names.SERVICE: facts["service"],
                names.GENERATION: facts["generation"],
                names.ATTEMPT: facts["attempt"],
            }
        )
    made = Delivery(
        Record("ledger", 0, 0, None, b"{}", headers),
        Silent(),
        get_settings().queue("ledger"),
        "tests",
        read_message(b"{}", headers, max_bytes=100),
        registry.find("ledger.write"),
    )
    made.deliveries = deliveries
    return made


def row(**columns) -> JobRow:
    job = JobFactory.build(**{"state": "queued", "max_attempts": 3, **columns})
    return row_of(job)


def verdict(one: Delivery, of: JobRow | None, *, is_fresh: bool = True) -> tuple | str:
    """``(attempt, limit)`` of a start, else the result and its reason."""
    with override_settings(KJO={"SERVICE_NAME": "tests", "QUEUES": {"ledger": {}}}):
        answer = admit(one, of, is_fresh=is_fresh, leases=Leases(), now=NOW)
    if answer.ending is None:
        return (answer.number, answer.limit)
    assert answer.delivery is one
    return f"{answer.ending.value} {answer.reason}".strip()


@pytest.mark.parametrize(
    ("told", "columns", "expected"),
    [
        # Runs
        ({}, {}, (1, 3)),
        ({}, {"state": "pending"}, (1, 3)),
        ({"attempt": 2}, {"state": "failing", "attempts": 1}, (2, 3)),
        ({"attempt": 2}, {"attempts": 1}, (2, 3)),
        ({"deliveries": 2}, {}, (2, 3)),
        ({"deliveries": 3}, {}, (3, 3)),
        ({"attempt": 2, "deliveries": 2}, {"attempts": 1}, (3, 3)),
        # Ended meanwhile
        ({}, {"state": "completed"}, "skipped completed"),
        ({}, {"state": "failed"}, "skipped failed"),
        ({}, {"state": "cancelled"}, "skipped cancelled"),
        # Of an earlier generation or attempt, or of one not heard of
        ({"generation": 1}, {"generation": 2}, "skipped generation"),
        ({"generation": 2}, {"generation": 1}, "skipped generation"),
        ({"attempt": 1}, {"attempts": 1}, "skipped attempt"),
        ({"attempt": 1}, {"attempts": 2}, "skipped attempt"),
        # In other hands
        ({}, {"lease_token": "other", "lease_expires_at": FUTURE}, "deferred leased"),
        ({}, {"lease_token": "other", "lease_expires_at": PAST}, (1, 3)),
        ({}, {"lease_token": "other", "lease_expires_at": None}, (1, 3)),
        ({}, {"lease_token": "dead", "lease_expires_at": FUTURE}, (1, 3)),
        ({}, {"lease_token": "me", "lease_expires_at": FUTURE}, (1, 3)),
        # Too late
        ({}, {"expires_at": PAST}, "dead expired"),
        ({}, {"expires_at": NOW}, "dead expired"),
        ({}, {"expires_at": FUTURE}, (1, 3)),
        # Its workers died
        ({"deliveries": 4}, {}, "dead stalled"),
        ({"attempt": 3, "deliveries": 2}, {"attempts": 2}, "dead stalled"),
        # What comes first
        ({"deliveries": 9}, {"state": "cancelled", "expires_at": PAST}, "skipped cancelled"),
        ({"deliveries": 9}, {"expires_at": PAST}, "dead expired"),
    ],
)  # fmt: skip
def test_a_job_is_judged_by_its_row(told, columns, expected):
    assert verdict(delivery(**told), row(**columns)) == expected


def test_what_took_effect_is_a_duplicate_whatever_its_row_says():
    for state in ("queued", "completed", "cancelled"):
        assert verdict(delivery(), row(state=state), is_fresh=False) == "duplicate"
    assert verdict(delivery(), None, is_fresh=False) == "duplicate"


def test_a_job_whose_row_is_gone_was_deleted_by_somebody_who_meant_it():
    assert verdict(delivery(), None) == "skipped deleted"


def test_a_job_of_another_service_has_no_row_here():
    assert verdict(delivery(service="elsewhere"), None) == (1, 5)


@pytest.mark.parametrize(
    ("deliveries", "columns", "expected"),
    [
        (1, None, (1, 5)),
        (5, None, (5, 5)),
        (6, None, "dead stalled"),
        (1, {"state": "failing", "attempts": 1}, "skipped has_row"),
        (1, {"state": "completed", "attempts": 1}, "skipped completed"),
        (1, {"state": "pending"}, "skipped has_row"),
    ],
)
def test_a_message_nobody_enqueued_here_runs_until_it_has_a_row(deliveries, columns, expected):
    one = delivery(is_foreign=True, deliveries=deliveries)
    assert verdict(one, None if columns is None else row(**columns)) == expected


def test_what_dies_unrun_tells_how_many_attempts_there_were():
    with override_settings(KJO={"SERVICE_NAME": "tests", "QUEUES": {"ledger": {}}}):
        stalled = admit(delivery(deliveries=9), row(), is_fresh=True, leases=Leases(), now=NOW)
        expired = admit(
            delivery(attempt=2), row(attempts=1, expires_at=PAST), is_fresh=True,
            leases=Leases(), now=NOW,
        )  # fmt: skip
    assert (stalled.ending, stalled.number) == (Ending.DEAD, 3)
    assert "died or froze during attempt 3 of 3" in str(stalled.error)
    assert expired.number == 1
    assert str(PAST.isoformat()) in str(expired.error)


def test_every_column_it_reads_exists():
    assert {field.attname for field in Job._meta.concrete_fields} >= set(COLUMNS)
