"""Enqueue: in the caller's transaction, once per unique id, refused before anything is written.

Every test runs on a transactional transport (the database's) and on one that needs the relay (the
memory transport).
"""

from __future__ import annotations

import json
import math
import uuid
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import pytest
from asgiref.sync import async_to_sync
from django.core.exceptions import ImproperlyConfigured
from django.db import connection, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django import signals
from kjo_django.backends import get_coordination
from kjo_django.exceptions import PayloadError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import dump_result
from kjo_django.models import Job, TransportMessage
from kjo_django.producer.enqueue import result_of
from tests.factories import JobFactory
from tests.ledger.jobs import no_op, write, write_keyed

pytestmark = pytest.mark.django_db

KJO = {"SERVICE_NAME": "tests", "QUEUES": {"ledger": {}, "other": {}}}
MEMORY = {"TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}}


@pytest.fixture(params=["database", "memory"], autouse=True)
def transport(request, settings):
    settings.KJO = KJO | (MEMORY if request.param == "memory" else {})
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """The channels woken, call by call."""
    woken: list[str] = []
    monkeypatch.setattr(get_coordination(), "notify", woken.append)
    return woken


@pytest.fixture
def told():
    """The facts of each job_enqueued signal."""
    facts = []

    def receiver(signal, sender, **kwargs):
        facts.append(kwargs)

    signals.job_enqueued.connect(receiver)
    yield facts
    signals.job_enqueued.disconnect(receiver)


def messages() -> list[TransportMessage]:
    return list(TransportMessage.objects.order_by("id"))


@contextmanager
def writing_nothing():
    """Whatever happens inside must not even try to write."""
    with CaptureQueriesContext(connection) as queries:
        yield
    assert not [q["sql"] for q in queries if not q["sql"].startswith("SELECT")]
    assert not Job.objects.exists()
    assert not messages()


# --- One job --------------------------------------------------------------------------------------


def test_a_job_is_stored_as_it_was_asked_for(transport):
    # Given
    before = timezone.now()
    # When
    answer = write.enqueue(job="a", note="é")
    # Then
    job = Job.objects.get()
    assert (answer.status, answer.is_new, answer.job_id) == ("queued", True, job.pk)
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


# --- The caller's transaction ---------------------------------------------------------------------


class Changed(Exception):
    """The caller's mind."""


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
    assert told == [
        {
            "job_id": str(job.pk),
            "unique_id": None,
            "queue": "ledger",
            "handler": "ledger.write",
        }
    ]


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
def test_an_unreachable_coordination_costs_the_call_only(monkeypatch, caplog):
    # Given
    from kjo_django.exceptions import CoordinationError

    def refuse(channel):
        raise CoordinationError("away")

    monkeypatch.setattr(get_coordination(), "notify", refuse)
    # When, then
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
    assert "receiver broke" in caplog.text


# --- Many -----------------------------------------------------------------------------------------


def count_queries(action) -> int:
    with CaptureQueriesContext(connection) as queries:
        action()
    return len(queries)


@pytest.mark.parametrize("with_ids", [False, True], ids=["anonymous", "with ids"])
def test_the_number_of_queries_does_not_grow_with_the_jobs(with_ids):
    # Given: whatever is asked once in a while has been asked
    write.enqueue(job="warm")

    def enqueue(count: int) -> int:
        ids = [f"{count}-{n}" for n in range(count)] if with_ids else None
        return count_queries(
            lambda: write.enqueue_many([{"job": str(n)} for n in range(count)], ids=ids)
        )

    # When
    few, many = enqueue(2), enqueue(30)  # SQLite binds no more in one INSERT
    # Then
    assert few == many
    assert Job.objects.count() == 33


def test_enqueue_many_of_a_log_transport_is_one_insert(transport, django_assert_num_queries):
    if transport == "memory":
        with django_assert_num_queries(1):
            write.enqueue_many([{"job": str(n)} for n in range(20)])


@pytest.mark.postgres
@pytest.mark.parametrize("with_ids", [False, True], ids=["anonymous", "with ids"])
def test_on_postgresql_a_thousand_cost_as_many_queries_as_two(postgres, with_ids):
    def enqueue(count: int) -> int:
        ids = [f"{count}-{n}" for n in range(count)] if with_ids else None
        payloads = [{"job": str(n)} for n in range(count)]
        return count_queries(lambda: write.enqueue_many(payloads, ids=ids))

    write.enqueue(job="warm")
    # Many go by COPY, which needs a transaction of its own: BEGIN and COMMIT are told apart.
    assert enqueue(1000) <= enqueue(2) + 2
    assert Job.objects.count() == 1003


@pytest.mark.parametrize("count", [1, 20])
def test_what_became_of_ids_is_asked_only_where_one_was_taken(transport, count):
    # Given
    write.enqueue(job="warm")
    payloads = [{"job": str(n)} for n in range(count)]

    def selects(ids: list[str]) -> int:
        with CaptureQueriesContext(connection) as queries:
            write.enqueue_many(payloads, ids=ids)
        return sum("kjo_job" in q["sql"] and q["sql"].startswith("SELECT") for q in queries)

    # When, then
    assert selects([f"new {n}" for n in range(count)]) == 0
    assert selects([f"new {n}" for n in range(count)]) == 1
    assert Job.objects.count() == count + 1


def test_the_answers_come_in_the_order_of_the_payloads():
    answers = write.enqueue_many([{"job": str(n)} for n in range(20)])
    stored = {job.pk: job.arguments["job"] for job in Job.objects.all()}
    assert [stored[answer.job_id] for answer in answers] == [str(n) for n in range(20)]
    assert [answer.job_id for answer in answers] == sorted(answer.job_id for answer in answers)


def test_many_may_be_none_or_a_generator():
    assert write.enqueue_many([]) == []
    assert len(write.enqueue_many({"job": str(n)} for n in range(3))) == 3


def test_ids_and_payloads_must_be_as_many():
    with writing_nothing(), pytest.raises(ValueError, match="zip"):
        write.enqueue_many([{"job": "a"}], ids=["1", "2"])


def test_one_bad_payload_among_many_stores_none():
    with writing_nothing(), pytest.raises(TypeError, match="unexpected keyword argument"):
        write.enqueue_many([{"job": "a"}, {"job": "b", "wrong": 1}])


# --- Unique ids -----------------------------------------------------------------------------------


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
    assert (answer.status, answer.existing_state, answer.job_id) == (
        "duplicate",
        expected,
        known.pk,
    )
    assert not answer.is_new


def test_the_first_enqueue_decides_payload_and_lifetime():
    """PJQ-42."""
    write.using(id="u", result_ttl=1000).enqueue(job="first")
    write.using(id="u", result_ttl=2000).enqueue(job="second")
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
    assert (answer.status, answer.job_id, answer.existing_state) == (
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
    assert (answer.status, answer.result) == ("completed", None)
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
    assert (answer.status, answer.job_id) == ("queued", known.pk)
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
    assert [answer.status for answer in answers] == ["queued", "queued", "duplicate"]
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
    assert [answer.status for answer in answers] == ["queued", "duplicate"]
    known.refresh_from_db()
    assert (known.generation, known.arguments["job"]) == (2, "a")
    assert len(messages()) == (1 if transport == "database" else 0)


def test_a_batch_tells_new_from_known():
    write.using(id="1").enqueue(job="a")
    answers = write.enqueue_many([{"job": str(n)} for n in range(3)], ids=["0", "1", "2"])
    assert [answer.is_new for answer in answers] == [True, False, True]


# --- Refused before anything is written -----------------------------------------------------------


@pytest.mark.parametrize(
    "ttl",
    [0, -1, 1.5, 1000.0, math.nan, math.inf, True, False, "1000", [], 2**53 + 1,
     timedelta(0), timedelta(-1), timedelta(microseconds=999)],
    ids=repr,
)  # fmt: skip
def test_a_lifetime_of_a_result_that_means_nothing_is_refused(ttl):
    """PJQ-40."""
    with writing_nothing(), pytest.raises((TypeError, ValueError), match="result_ttl"):
        write.using(result_ttl=ttl).enqueue(job="a")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"run_at": datetime(2030, 1, 1)}, "run_at must be an aware datetime"),
        ({"expires_at": datetime(2030, 1, 1)}, "expires_at must be an aware datetime"),
        ({"run_at": "tomorrow"}, "run_at must be"),
        ({"delay": 5}, "delay must be a timedelta"),
        ({"delay": timedelta.max}, "delay"),
        ({"delay": timedelta(1), "run_at": datetime(2030, 1, 1, tzinfo=UTC)}, "not both"),
        ({"id": ""}, "id must be text"),
        ({"id": 7}, "id must be text"),
        ({"id": "x" * 256}, "id must be text"),
        ({"key": "x" * 256}, "key must"),
        ({"key": 7}, "key must"),
        ({"max_attempts": 0}, "max_attempts must"),
        ({"max_attempts": "3"}, "max_attempts must"),
        ({"max_attempts": True}, "max_attempts must"),
        ({"headers": {"trace": 1}}, "headers must"),
        ({"headers": {1: "a"}}, "headers must"),
        ({"headers": {"a": "\ud800"}}, "headers must"),
        ({"headers": "a"}, "headers must"),
        ({"priority": 1}, "no option 'priority'"),
        ({"queue": "legder"}, "No queue is named 'legder'.*Did you mean 'ledger'"),
        ({"queue": "xyz"}, "No queue is named 'xyz'.*Known: "),
    ],
    ids=lambda value: repr(value)[:40],
)
def test_an_option_that_means_nothing_is_refused(options, says):
    with writing_nothing(), pytest.raises((TypeError, ValueError), match=says):
        write.using(**options).enqueue(job="a")


@pytest.mark.parametrize(
    "payload",
    [{}, {"jobb": "a"}, {"job": "a", "extra": 1}, {"note": "x"}],
    ids=lambda payload: ",".join(payload) or "none",
)
def test_arguments_that_do_not_fit_the_signature_are_refused(payload):
    with writing_nothing(), pytest.raises(TypeError, match=r"ledger\.write: "):
        write.enqueue(**payload)


@pytest.mark.parametrize(
    "value",
    [math.nan, object(), b"x", "\ud800", {1, 2}],
    ids=["nan", "object", "bytes", "surrogate", "set"],
)
def test_a_payload_that_is_no_json_is_refused(value):
    with writing_nothing(), pytest.raises(PayloadError):
        write.enqueue(job=value)


def test_a_payload_over_the_limit_is_refused_and_one_at_the_limit_is_not(settings):
    """RST-F12: pass ids, not contents."""
    settings.KJO = {**settings.KJO, "MAX_PAYLOAD_BYTES": len(json.dumps({"job": "é"}).encode()) - 5}
    with writing_nothing(), pytest.raises(PayloadError, match="14 bytes"):
        write.enqueue(job="éé")
    assert write.enqueue(job="é").is_new


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=["nul", "surrogate"])
def test_an_id_or_a_key_no_database_keeps_is_refused_before_anything_is_written(text):
    for options in ({"id": text}, {"key": text}):
        with pytest.raises(ValueError, match="holds a character no database keeps"):
            write.using(**options)
    with pytest.raises(ValueError, match=r"ledger\.write_keyed: the key holds a character"):
        write_keyed.enqueue(job="job", key=text)
    assert not Job.objects.exists()


def test_a_key_of_the_payload_that_is_too_long_is_refused():
    with writing_nothing(), pytest.raises(ValueError, match="256 characters"):
        write_keyed.enqueue(job="a", key="k" * 256)


def test_a_transport_that_is_not_declared_is_refused(settings):
    settings.KJO = {"QUEUES": {"ledger": {"transport": "kafak"}}}
    with writing_nothing(), pytest.raises(ImproperlyConfigured, match="'kafak'"):
        write.enqueue(job="a")


@pytest.mark.usefixtures("transport")
def test_a_job_without_arguments_has_an_empty_object():
    no_op.enqueue()
    assert bytes(Job.objects.get().payload) == b"{}"


def test_ids_grow_so_jobs_are_ordered_by_their_making():
    made = [write.enqueue(job=str(n)).job_id for n in range(10)]
    assert made == sorted(made)
    assert all(isinstance(one, uuid.UUID) for one in made)


@pytest.mark.postgres
def test_what_a_failing_handler_enqueued_first_thing_is_undone_however_many(postgres):
    # Given: COPY is not seen by the wrapper that opens a handler's savepoint
    from django.db import connection, transaction

    from kjo_django.consumer.savepoint import LazySavepoint

    # When
    with transaction.atomic():
        savepoint = LazySavepoint(connection)
        with pytest.raises(ZeroDivisionError), savepoint.group(), savepoint:
            write.enqueue_many([{"job": str(n)} for n in range(100)])
            raise ZeroDivisionError
        write.enqueue(job="other")
    # Then
    assert [job.arguments["job"] for job in Job.objects.all()] == ["other"]
