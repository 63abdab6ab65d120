"""The jobs of ``enqueue_many`` and their messages in the database are those of single enqueues."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connection, transaction

from kjo_django import tracing
from kjo_django.conf import get_settings
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.models import Job, TransportMessage
from kjo_django.runtime import get_coordination, get_transport
from kjo_django.store.postgres import PostgresStore
from kjo_django.testing import drain
from tests.clocks import set_now
from tests.ledger.jobs import write, write_keyed
from tests.ledger.models import Entry

NOON = datetime(2030, 1, 1, 12, tzinfo=UTC)
COUNTS = [3, 60]


@pytest.fixture(
    autouse=True, params=[pytest.param("postgres", marks=pytest.mark.postgres), "sqlite_file"]
)
def _database_transport(request: pytest.FixtureRequest, settings: Any) -> None:
    request.getfixturevalue(request.param)
    settings.KJO = {"SERVICE_NAME": "tests", "QUEUES": {"ledger": {}}}


@pytest.fixture
def noon(monkeypatch: pytest.MonkeyPatch) -> None:
    set_now(monkeypatch, lambda: NOON)


def rows() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Return each job with its message, in the order of the messages, which say "the id" for the
    id of the job."""
    jobs = {str(job.pk): job for job in Job.objects.all()}
    found = []
    for message in TransportMessage.objects.order_by("id"):
        headers = {name: base64.b64decode(text) for name, text in message.headers.items()}
        id = headers["kjo-job-id"].decode()
        job, told = _columns(jobs.pop(id)), _columns(message)
        told["headers"] = {k: v.replace(id.encode(), b"the id") for k, v in headers.items()}
        if told["key"] == id.encode():
            told["key"] = told["key_hash"] = "the id"
        found.append((job, told))
    assert jobs == {}
    return found


def _columns(row: Any) -> dict[str, Any]:
    values = {
        f.attname: getattr(row, f.attname) for f in row._meta.concrete_fields if f.name != "id"
    }
    return {k: bytes(v) if isinstance(v, memoryview) else v for k, v in values.items()}


def stored_by(action: Callable[[], object]) -> list[Any]:
    action()
    found = rows()
    TransportMessage.objects.all().delete()
    Job.objects.all().delete()
    return found


@pytest.mark.usefixtures("noon")
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize(
    "definition",
    [
        write,
        write_keyed,
        write.using(priority=7, delay=timedelta(seconds=90), headers={"naïve": 'x"\\', "a": ""}),
        write.using(key="one", max_attempts=3, expires_at=NOON + timedelta(days=1)),
    ],
    ids=["plain", "keys", "priority, delay, headers", "one key"],
)
def test_rows_are_those_of_single_enqueues(definition: JobDefinition[..., Any], count: int) -> None:
    keys = ["", "a", "b", "naïve \\ \"'"] if definition is write_keyed else []
    payloads: list[dict[str, Any]] = [
        {"job": f"{number} é\\", **({"key": keys[number % 4]} if keys else {})}
        for number in range(count)
    ]
    many = stored_by(lambda: definition.enqueue_many(payloads))
    assert many == stored_by(lambda: [definition.enqueue(**payload) for payload in payloads])
    assert len(many) == count
    assert {job["state"] for job, _ in many} == {"queued"}


@pytest.mark.parametrize("count", COUNTS)
def test_they_run_once_each_in_the_order_of_a_key(count: int) -> None:
    write_keyed.enqueue_many([{"job": str(n), "key": f"k{n % 2}"} for n in range(count)])
    assert drain().completed == count
    for key in ("k0", "k1"):
        done = Entry.objects.filter(note=key).order_by("pk").values_list("job", flat=True)
        assert list(done) == [str(n) for n in range(count) if f"k{n % 2}" == key]


@pytest.mark.parametrize("count", COUNTS)
def test_a_rollback_leaves_neither_jobs_nor_messages_and_wakes_nobody(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    woken: list[str] = []
    monkeypatch.setattr(get_coordination(), "notify", lambda *channels: woken.extend(channels))
    payloads = [{"job": str(number)} for number in range(count)]
    # When
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        write.enqueue_many(payloads)
        raise ZeroDivisionError
    # Then
    assert (rows(), woken) == ([], [])
    with transaction.atomic():
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            write.enqueue_many(payloads)
            raise ZeroDivisionError
        write.enqueue_many(payloads)
        assert woken == []
    assert len(rows()) == count
    assert len(woken) == len(set(woken)) == 1


@pytest.mark.parametrize("count", COUNTS)
def test_a_message_that_cannot_be_written_leaves_no_job(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(records: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(get_transport(), "publish", refuse)
    with pytest.raises(ZeroDivisionError):
        write.enqueue_many([{"job": str(number)} for number in range(count)])
    assert not Job.objects.exists()


def test_jobs_whose_unique_ids_are_taken_have_no_second_message() -> None:
    # Given
    write.using(id="id 3").enqueue(job="before")
    ids = [f"id {number}" for number in range(40)]
    # When
    answers = write.enqueue_many([{"job": id} for id in ids], ids=ids)
    # Then
    assert [n for n, answer in enumerate(answers) if not answer.is_new] == [3]
    messages = [message["value"] for _, message in rows()]
    assert messages[0] == b'{"job":"before"}'
    assert messages[1:] == [b'{"job":"%s"}' % id.encode() for id in ids if id != "id 3"]


@pytest.mark.parametrize("count", COUNTS)
def test_each_consumer_group_of_the_topic_has_its_messages(count: int) -> None:
    # Given
    queue = get_settings().queue("ledger")
    others = get_transport().subscribe([queue.topic], "audit")
    get_transport().subscribe([queue.topic], queue.consumer_group).close()
    # When
    write.enqueue_many([{"job": str(number)} for number in range(count)])
    # Then
    records = []
    while found := others.poll(1000, 0.0):
        records += found
    assert [record.value for record in records] == [b'{"job":"%d"}' % n for n in range(count)]
    others.close()
    assert drain().completed == count


@pytest.mark.parametrize("count", COUNTS)
def test_what_a_tracer_leaves_their_messages_carry(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Tracer:
        def headers(self) -> dict[str, str]:
            return {}

        @contextmanager
        def enqueuing(self, jobs: list[Job]) -> Iterator[None]:
            for job in jobs:
                job.headers = {"traceparent": "00-1"}
            yield

    monkeypatch.setattr(tracing, "tracer", Tracer())
    write.enqueue_many([{"job": str(number)} for number in range(count)])
    assert [message["headers"]["traceparent"] for _, message in rows()] == [b"00-1"] * count


def test_many_are_copied_unless_somebody_looks_at_the_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Given
    copied, copy = list[str](), PostgresStore.copy_rows

    def note(store: Any, table: str, *arguments: Any) -> None:
        copied.append(table)
        copy(store, table, *arguments)

    monkeypatch.setattr(PostgresStore, "copy_rows", note)
    payloads = [{"job": str(number)} for number in range(50)]
    # When
    with connection.execute_wrapper(lambda execute, *arguments: execute(*arguments)):
        write.enqueue_many(payloads)
    assert copied == []
    write.enqueue_many(payloads)
    # Then
    both = ["kjo_job", "kjo_transport_message"]
    assert copied == (both if connection.vendor == "postgresql" else [])
    assert len(rows()) == 100
