"""What a caller learns of a job's end: errors with their facts, and what has expired."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import transaction
from django.utils import timezone

from kjo_django import Queue, registry
from kjo_django.exceptions import (
    HandlerTimeout,
    JobFailedError,
    JobNotFoundError,
    JobTimeoutError,
    UncommittedJobError,
)
from kjo_django.models import Job, JobFailure
from kjo_django.testing import drain

pytestmark = pytest.mark.django_db


class Refused(Exception):
    """What a payment service would raise."""

    code = "CARD_EXPIRED"

    def __init__(self, message: str, **details: Any) -> None:
        super().__init__(message)
        self.details = details


class Described(Exception):
    def to_dict(self) -> dict[str, Any]:
        return {"code": 402, "retryable": False, "at": datetime(2026, 1, 31, tzinfo=UTC)}


class Broken(Exception):
    code = object()

    def to_dict(self) -> Any:
        raise RuntimeError("not even this")


@pytest.fixture
def queue(forgotten_definitions: None) -> Queue:
    queue = Queue("ending", max_attempts=2)
    queue.execute(_raise)
    return queue


ERRORS: dict[str, Exception] = {
    "refused": Refused("the card is refused", card="1234", tries=3),
    "described": Described("described"),
    "broken": Broken("broken"),
    "plain": ValueError("plain"),
    "odd": Refused("odd", what={1, 2}),
    "binary": Refused("binary", what="\x00"),
    "huge": Refused("huge", what="x" * 100_000),
    "deep": Refused("deep", what=json.loads("[" * 40 + "]" * 40)),
}


def _raise(job: Any) -> Any:
    if job.payload in ERRORS:
        raise ERRORS[job.payload]
    return job.payload


def in_the_past() -> datetime:
    return timezone.now() - timedelta(seconds=1)


# --- The facts of an error ------------------------------------------------------------------------


def test_a_failed_job_tells_the_type_code_and_details_of_its_error(queue: Queue) -> None:
    # Given
    queue.enqueue("a", "refused")
    drain(raise_errors=False, with_retries=True)
    # When
    status = queue.get_status("a")
    # Then
    assert status is not None
    assert (status.state, status.error) == ("failed", "the card is refused")
    assert status.error_type == f"{__name__}.Refused"
    assert status.error_code == "CARD_EXPIRED"
    assert status.error_details == {"card": "1234", "tries": 3}
    told = status.to_dict()
    assert (told["errorType"], told["errorCode"]) == (status.error_type, "CARD_EXPIRED")
    assert told["errorDetails"] == {"card": "1234", "tries": 3}


def test_who_waits_for_a_failed_job_is_told_the_same(queue: Queue) -> None:
    # Given
    queue.enqueue("a", "refused")
    drain(raise_errors=False, with_retries=True)
    for wait in (lambda: queue.wait("a"), lambda: queue.enqueue_and_wait("a", 1)):
        # When
        with pytest.raises(JobFailedError, match="the card is refused") as raised:
            wait()
        # Then
        error = raised.value
        assert (error.job_id, error.attempts) == ("a", 2)
        assert error.original_error == "the card is refused"
        assert error.error_type == f"{__name__}.Refused"
        assert (error.error_code, error.error_details) == (
            "CARD_EXPIRED",
            {"card": "1234", "tries": 3},
        )
        assert error.to_dict()["job_id"] == "a"
        assert error.to_dict()["error_code"] == "CARD_EXPIRED"


@pytest.mark.parametrize(
    ("payload", "code", "details"),
    [
        (
            "described",
            "402",
            {"code": 402, "retryable": False, "at": "2026-01-31T00:00:00Z"},
        ),
        ("broken", "", None),
        ("plain", "", None),
        ("odd", "CARD_EXPIRED", None),
        ("binary", "CARD_EXPIRED", None),
        ("huge", "CARD_EXPIRED", None),
        ("deep", "CARD_EXPIRED", None),
    ],
)
def test_what_cannot_be_kept_of_an_error_hurts_nobody(
    queue: Queue, payload: str, code: str, details: Any
) -> None:
    queue.enqueue("a", payload)
    drain(raise_errors=False)
    # On a busy machine the retry is due before the drain has ended.
    failures = JobFailure.objects.values_list("code", "details")
    assert next(iter(failures.order_by("attempt"))) == (code, details)
    status = queue.get_status("a")
    assert status is not None
    assert (status.error_code, status.error_details) == (code or None, details)


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")
@pytest.mark.django_db(databases=[])
def test_postgresql_keeps_no_nul_and_the_failure_is_recorded_all_the_same(queue: Queue) -> None:
    queue.enqueue("nul", "binary")
    drain("ending", raise_errors=False, with_retries=True)
    assert queue.get_status("nul").state == "failed"  # type: ignore[union-attr]


def test_the_failures_of_an_earlier_generation_are_not_told(queue: Queue) -> None:
    queue.enqueue("a", "refused")
    drain(raise_errors=False, with_retries=True)
    queue.enqueue("a", "plain", retry_failed=True)
    drain(raise_errors=False)
    status = queue.get_status("a")
    assert status is not None
    assert (status.state, status.error_type, status.error_code) == ("failing", "ValueError", None)


@pytest.mark.django_db(transaction=True)
def test_a_timeout_of_the_wait_says_of_which_job(queue: Queue) -> None:
    queue.enqueue("a", "plain", delay=timedelta(hours=1))
    Job.objects.update(attempts=1)
    with pytest.raises(JobTimeoutError, match="did not end within") as raised:
        queue.wait("a", timeout=0.05)
    assert (raised.value.job_id, raised.value.timeout, raised.value.attempts) == ("a", 0.05, 1)
    assert raised.value.to_dict()["timeout"] == 0.05


def test_a_timeout_of_the_handler_has_the_name_that_screens_show(queue: Queue) -> None:
    # Given
    def slow(job: Any) -> None:
        while True:
            pass

    registry.unregister(queue.job_type)
    queue.execute(slow, timeout=timedelta(seconds=0.05))
    queue.enqueue("a", 1)
    # When
    with pytest.raises(HandlerTimeout) as raised:
        drain()
    # Then
    assert raised.value.timeout == 0.05
    assert JobFailure.objects.get().error_type == "kjo_django.exceptions.HandlerTimeout"


# --- What has expired -----------------------------------------------------------------------------


@pytest.mark.parametrize("payload", ["fine", "refused"])
def test_an_expired_job_says_so_and_no_longer_that_it_completed(queue: Queue, payload: str) -> None:
    # Given
    queue.enqueue("a", payload)
    drain(raise_errors=False, with_retries=True)
    assert queue.get_states(["a"]) == {"a": "completed" if payload == "fine" else "failed"}
    # When
    Job.objects.update(result_expires_at=in_the_past())
    # Then
    status = queue.get_status("a")
    assert status is not None
    assert (status.state, status.error, status.error_type) == ("expired", None, None)
    assert queue.get_states(["a"]) == {"a": "expired"}
    with pytest.raises(JobNotFoundError, match="'a' has expired"):
        queue.wait("a")


def test_a_wait_inside_a_transaction_is_refused_unless_the_job_has_ended(queue: Queue) -> None:
    queue.enqueue("a", "fine")
    with transaction.atomic(), pytest.raises(UncommittedJobError, match="'a'"):
        queue.wait("a", timeout=5)
    drain()
    with transaction.atomic():
        assert queue.wait("a", timeout=5) == "fine"
