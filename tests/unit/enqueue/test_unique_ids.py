"""Once per unique id, for as long as its result is kept."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from kjo_django.enqueue.storing import result_of
from kjo_django.exceptions import StorageError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import dump_result
from kjo_django.models import Job
from tests.factories import JobFactory
from tests.ledger.jobs import write, write_keyed
from tests.unit.enqueue.stored import messages

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]


@pytest.mark.parametrize(
    ("state", "columns", "expected"),
    [
        ("pending", {}, "queued"),
        ("queued", {}, "queued"),
        ("failing", {"attempts": 1}, "failing"),
        ("queued", {"lease_expires_at": datetime(2999, 1, 1, tzinfo=UTC)}, "processing"),
        ("failed", {"result_expires_at": datetime(2999, 1, 1, tzinfo=UTC)}, "failed"),
    ],
)
def test_a_known_id_is_a_duplicate_that_tells_the_state(state, columns, expected):
    """PJQ-15, PJQ-F1."""
    # Given
    known = JobFactory(queue="ledger", unique_id="u", state=state, **columns)
    # When
    answer = write.using(id="u", result_ttl=5).enqueue(job="second")
    # Then
    assert (answer.answer, answer.existing_state, answer.job_id) == (
        "duplicate",
        expected,
        known.pk,
    )
    assert not answer.is_new


def test_the_first_enqueue_decides_payload_and_lifetime():
    """PJQ-42."""
    write.using(id="u", result_ttl=1).enqueue(job="first")
    write.using(id="u", result_ttl=2).enqueue(job="second")
    job = Job.objects.get()
    assert (job.arguments["job"], job.result_ttl) == ("first", 1000)


def test_an_id_is_unique_within_its_queue_only():
    assert write.using(id="u").enqueue(job="a").is_new
    assert write.using(id="u", queue="other").enqueue(job="a").is_new
    assert not write.using(id="u", queue="other").enqueue(job="a").is_new


LATER, EARLIER = timedelta(hours=1), -timedelta(seconds=1)


def finished(state: str, expires: timedelta, **columns) -> Job:
    return JobFactory(
        queue="ledger",
        unique_id="u",
        **{state: True},
        result_expires_at=timezone.now() + expires,
        **columns,
    )


@pytest.mark.parametrize("value", [42, 0, "", [], False, {"a": None}])
def test_a_completed_job_answers_with_its_cached_result(value):
    """PJQ-16."""
    known = finished("completed", LATER, result=dump_result(value))
    answer = write.using(id="u").enqueue(job="again")
    assert (answer.answer, answer.job_id, answer.existing_state) == (
        "completed",
        known.pk,
        "completed",
    )
    assert answer.result == value
    assert type(answer.result) is type(value)


def test_a_handler_that_returned_none_has_completed_all_the_same():
    """PJQ-F16: None is a result, and the job does not run again."""
    known = finished("completed", LATER, result=None)
    answer = write.using(id="u").enqueue(job="again")
    assert (answer.answer, answer.result) == ("completed", None)
    assert result_of(known) is None
    known.refresh_from_db()
    assert known.generation == 1


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_once_the_result_or_error_has_expired_the_id_runs_again(state, transport):
    """PJQ-F1, PJQ-F2."""
    # Given
    known = finished(state, EARLIER)
    # When
    answer = write.using(id="u").enqueue(job="again")
    # Then
    assert (answer.answer, answer.job_id) == ("queued", known.pk)
    known.refresh_from_db()
    assert known.generation == 2
    assert (known.attempts, known.error, known.result, known.result_expires_at) == (
        0,
        "",
        None,
        None,
    )
    assert known.finished_at is None
    assert known.arguments == {"job": "again"}


def test_a_cancelled_job_begins_a_new_generation_with_the_new_payload(transport):
    """PJQ-F6."""
    # Given
    known = JobFactory(queue="ledger", unique_id="u", cancelled=True, key="old", attempts=3)
    # When
    answer = write_keyed.using(id="u", max_attempts=2).enqueue(job="new", key="k")
    # Then
    known.refresh_from_db()
    assert answer.is_new
    assert (known.generation, known.attempts, known.max_attempts) == (2, 0, 2)
    assert (known.handler, known.key) == ("ledger.write_keyed", "k")
    assert known.arguments == {"job": "new", "key": "k"}
    assert known.state == ("queued" if transport == "database" else "pending")
    for message in messages():
        headers = names.from_json(message.headers)
        assert headers[names.ID] == f"{known.pk}:2".encode()
        assert (headers[names.GENERATION], headers[names.ATTEMPT]) == (b"2", b"1")


def test_duplicates_inside_one_batch_store_one_job(transport):
    # When
    answers = write.enqueue_many([{"job": "a"}, {"job": "b"}, {"job": "c"}], ids=["u", "v", "u"])
    # Then
    assert [answer.answer for answer in answers] == ["queued", "queued", "duplicate"]
    assert answers[2].job_id == answers[0].job_id
    assert Job.objects.count() == 2
    assert Job.objects.get(unique_id="u").arguments["job"] == "a"
    assert len(messages()) == (2 if transport == "database" else 0)


def test_duplicates_inside_one_batch_revive_a_cancelled_job_once(transport):
    # Given
    known = JobFactory(queue="ledger", unique_id="u", cancelled=True)
    # When
    answers = write.enqueue_many([{"job": "a"}, {"job": "b"}], ids=["u", "u"])
    # Then
    assert [answer.answer for answer in answers] == ["queued", "duplicate"]
    known.refresh_from_db()
    assert (known.generation, known.arguments["job"]) == (2, "a")
    assert len(messages()) == (1 if transport == "database" else 0)


def test_a_row_that_is_pruned_while_it_is_revived_is_told_as_what_it_is(monkeypatch):
    # Given
    known = finished("completed", EARLIER)

    def pruned(*arguments, **changes):
        known.delete()
        return 0

    monkeypatch.setattr("kjo_django.enqueue.storing.transition", pruned)
    # When, then
    with pytest.raises(StorageError, match="Enqueue it again"), transaction.atomic():
        write.using(id="u").enqueue(job="again")


def test_a_batch_tells_new_from_known():
    write.using(id="1").enqueue(job="a")
    answers = write.enqueue_many([{"job": str(n)} for n in range(3)], ids=["0", "1", "2"])
    assert [answer.is_new for answer in answers] == [True, False, True]
