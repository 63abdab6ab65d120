"""Stored, told and woken with the caller's transaction."""

from __future__ import annotations

import pytest
from django.db import transaction

from kjo_django import signals
from kjo_django.models import Job
from tests.ledger.jobs import write
from tests.unit.enqueue.stored import messages

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]


class Changed(Exception):
    """The caller's mind."""


@pytest.mark.promise("rolled-back")
@pytest.mark.django_db(transaction=True)
def test_a_rollback_leaves_nothing_and_wakes_nobody(calls, told):
    """Promise 1, show 6."""
    # When
    with pytest.raises(Changed), transaction.atomic():
        write.enqueue(job="a")
        write.enqueue_many([{"job": "b"}, {"job": "c"}])
        write.using(id="u").enqueue(job="d")
        raise Changed
    # Then
    assert not Job.objects.exists()
    assert not messages()
    assert calls == told == []


@pytest.mark.django_db(transaction=True)
def test_nothing_is_seen_or_told_before_the_commit(calls, told, transport):
    with transaction.atomic():
        write.enqueue(job="a")
        assert calls == told == []
    assert calls == ["kjo:topic:ledger" if transport == "database" else "kjo:relay"]
    job = Job.objects.get()
    facts = {"unique_id": None, "queue": "ledger", "handler": "ledger.write"}
    facts |= {"signal": "job_enqueued", "sender": "ledger.write"}
    assert told == [{"job_id": str(job.pk), **facts}]


@pytest.mark.django_db(transaction=True)
def test_a_transaction_makes_one_call_however_many_jobs_it_stores(calls, told):
    with transaction.atomic():
        for number in range(10):
            write.enqueue(job=str(number))
        write.enqueue_many([{"job": "x"}] * 10)
    assert len(calls) == 1
    assert len(told) == 20


@pytest.mark.django_db(transaction=True)
def test_queues_on_topics_of_their_own_are_each_called_once(calls, transport):
    with transaction.atomic():
        for _ in range(3):
            write.enqueue(job="a")
            write.using(queue="other").enqueue(job="a")
    expected = ["kjo:topic:ledger", "kjo:topic:other"] if transport == "database" else ["kjo:relay"]
    assert sorted(calls) == expected


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_the_call_comes_at_once(calls):
    write.enqueue(job="a")
    assert len(calls) == 1
    write.enqueue_many([{"job": "b"}, {"job": "c"}])
    assert len(calls) == 2


@pytest.mark.django_db(transaction=True)
def test_an_inner_rollback_takes_its_own_jobs_only(calls, told):
    with transaction.atomic():
        write.enqueue(job="kept")
        with pytest.raises(Changed), transaction.atomic():
            write.enqueue(job="gone")
            raise Changed
        write.enqueue(job="kept too")
    assert [job.arguments["job"] for job in Job.objects.order_by("id")] == ["kept", "kept too"]
    assert {fact["job_id"] for fact in told} == {str(job.pk) for job in Job.objects.all()}
    assert len(told) == 2
    assert set(calls) == {calls[0]}


@pytest.mark.django_db(transaction=True)
def test_an_inner_rollback_of_everything_tells_nothing(calls, told):
    with transaction.atomic(), pytest.raises(Changed), transaction.atomic():
        write.enqueue(job="gone")
        raise Changed
    assert calls == told == []


@pytest.mark.django_db(transaction=True)
def test_a_duplicate_wakes_nobody(calls, told):
    write.using(id="u").enqueue(job="a")
    calls.clear(), told.clear()
    write.using(id="u").enqueue(job="a")
    assert calls == told == []


@pytest.mark.django_db(transaction=True)
def test_an_unreachable_coordination_costs_the_call_only(coordination_away, caplog):
    coordination_away("notify")
    assert write.enqueue(job="a").is_new
    assert "it will find out by polling: away" in caplog.text


@pytest.mark.django_db(transaction=True)
def test_a_receiver_that_raises_changes_nothing(caplog):
    # Given
    def receiver(**kwargs):
        raise RuntimeError("receiver broke")

    signals.job_enqueued.connect(receiver)
    # When
    try:
        answer = write.enqueue(job="a")
    finally:
        signals.job_enqueued.disconnect(receiver)
    # Then
    assert answer.is_new
    assert caplog.text.count("Traceback") == 1  # Django logs it, and we do not once more
    assert "receiver broke" in caplog.text
