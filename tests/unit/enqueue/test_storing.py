"""One job: the row, its message and its options."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from asgiref.sync import async_to_sync
from django.utils import timezone

from kjo_django.messages import headers as names
from kjo_django.models import Job
from tests.ledger.jobs import no_op, write, write_keyed
from tests.unit.enqueue.stored import messages

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("transport")]


def test_a_job_is_stored_as_it_was_asked_for(transport):
    # Given
    before = timezone.now()
    # When
    answer = write.enqueue(job="a", note="é")
    # Then
    job = Job.objects.get()
    assert (answer.answer, answer.is_new, answer.job_id) == ("queued", True, job.pk)
    assert (job.queue, job.handler, job.unique_id, job.key) == ("ledger", "ledger.write", None, "")
    assert bytes(job.payload) == '{"job":"a","note":"é"}'.encode()
    assert (job.max_attempts, job.result_ttl) == (5, 3_600_000)
    assert (job.generation, job.attempts) == (1, 0)
    assert before <= job.created_at == job.available_at <= timezone.now()
    assert job.state == ("queued" if transport == "database" else "pending")


def test_a_transactional_transport_gets_the_message_with_the_row(transport):
    # When
    answer = write_keyed.using(headers={"traceparent": "00-1"}).enqueue(job="a", key="k")
    # Then
    if transport == "memory":
        assert not messages()  # the relay's work
        return
    (message,) = messages()
    headers = names.from_json(message.headers)
    assert bytes(message.key) == b"k"
    assert bytes(message.value) == b'{"job":"a","key":"k"}'
    assert headers[names.ID] == headers[names.JOB_ID] == str(answer.job_id).encode()
    assert headers[names.TYPE] == b"ledger.write_keyed"
    assert headers[names.SERVICE] == b"tests"
    assert (headers[names.GENERATION], headers[names.ATTEMPT]) == (b"1", b"1")
    assert headers["traceparent"] == b"00-1"


def test_a_job_without_a_key_is_its_own_key(transport):
    answer = write.enqueue(job="a")
    if transport == "database":
        assert bytes(messages()[0].key) == str(answer.job_id).encode()


def test_options_of_one_enqueue_win_over_the_jobs_and_the_queues():
    # Given
    soon, late = timezone.now() + timedelta(minutes=5), timezone.now() + timedelta(hours=1)
    chosen = write_keyed.using(
        id="u",
        key="mine",
        run_at=soon,
        expires_at=late,
        max_attempts=2,
        result_ttl=timedelta(seconds=1.5),
        queue="other",
        headers={"a": "b"},
    )
    # When
    chosen.enqueue(job="a", key="theirs")
    # Then
    job = Job.objects.get()
    assert (job.unique_id, job.key, job.queue) == ("u", "mine", "other")
    assert (job.available_at, job.expires_at) == (soon, late)
    assert (job.max_attempts, job.result_ttl, job.headers) == (2, 1500, {"a": "b"})


def test_a_delayed_job_is_due_later():
    write.using(delay=timedelta(minutes=5)).enqueue(job="a")
    job = Job.objects.get()
    assert job.available_at - job.created_at == timedelta(minutes=5)
    assert job.status == "scheduled"
    for message in messages():
        assert message.available_at == job.available_at


def test_the_lifetime_of_a_result_is_resolved_when_it_is_enqueued(settings):
    """PJQ-41."""
    settings.KJO = {**settings.KJO, "RESULT_TTL": 7}
    write.enqueue(job="a")
    settings.KJO = {**settings.KJO, "RESULT_TTL": 9}
    assert Job.objects.get().result_ttl == 7000


@pytest.mark.django_db(transaction=True)
def test_it_can_be_awaited_too():
    answer = async_to_sync(write.aenqueue)(job="a")
    assert Job.objects.get().pk == answer.job_id


@pytest.mark.usefixtures("transport")
def test_a_job_without_arguments_has_an_empty_object():
    no_op.enqueue()
    assert bytes(Job.objects.get().payload) == b"{}"


def test_ids_grow_so_jobs_are_ordered_by_their_making():
    made = [write.enqueue(job=str(n)).job_id for n in range(10)]
    assert made == sorted(made)
    assert all(isinstance(one, uuid.UUID) for one in made)
