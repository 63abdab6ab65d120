"""Rows by COPY are those an INSERT would store, whatever they hold."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest
from django.db import connection, transaction
from django.db.models.signals import post_init
from hypothesis import HealthCheck, given
from hypothesis import settings as how
from hypothesis import strategies as st

from kjo_django import tracing
from kjo_django.enqueue.definition import JobDefinition, unsaved_job
from kjo_django.enqueue.storing import store
from kjo_django.exceptions import PayloadError
from kjo_django.models import Job
from kjo_django.runtime import get_coordination
from kjo_django.store.postgres import COPY_FROM, PostgresStore
from tests.clocks import set_now
from tests.ledger.jobs import write, write_keyed

pytestmark = pytest.mark.postgres

HOSTILE = [
    *("", " ", "\\", "\\N", "\\.", "\\\\", "\\x41", "\\t", "\\n", "\\101", "NULL", "null"),
    *("\t", "\n", "\r", "\r\n", "a\tb", "a\nb", "\n\\.\n", "\\\n", "\\\t\\", "trailing\\"),
    *("\x01", "\x08", "\x0b", "\x0c", "\x1b[31m", "\x7f", "\x85", "\u2028", "\ufeff", "\ufffd"),
    *("é", "😀", "\U0010ffff", '"', "'", "'; DROP TABLE kjo_job; --", "{}", "%s", "$1", "x" * 255),
]
NOON = datetime(2030, 1, 1, 12, 0, 0, 123456, tzinfo=UTC)


@pytest.fixture(autouse=True)
def on_a_log_transport(settings, postgres, monkeypatch):
    settings.KJO = {
        "SERVICE_NAME": "tests",
        "QUEUES": {"ledger": {}, "other": {}},
        "TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}},
    }
    set_now(monkeypatch, lambda: NOON)


@pytest.fixture
def copies(monkeypatch):
    """How many rows each COPY was asked for."""
    asked = []
    may = PostgresStore.may_copy

    def note(store: PostgresStore, count: int) -> bool:
        answer = may(store, count)
        asked.append(count if answer else 0)
        return answer

    monkeypatch.setattr(PostgresStore, "may_copy", note)
    return asked


def by_insert(action: Callable[[], object]) -> None:
    with connection.execute_wrapper(lambda execute, *arguments: execute(*arguments)):
        action()


def rows() -> list[dict[str, Any]]:
    """Return all columns but the ids, in the order of those."""
    names = [field.attname for field in Job._meta.local_concrete_fields if field.name != "id"]
    found = list(Job.objects.order_by("id").values(*names))
    for row in found:
        row["payload"] = bytes(row["payload"])
    return found


def stored_by(action: Callable[[], object]) -> list[dict[str, Any]]:
    Job.objects.all().delete()
    action()
    found = rows()
    Job.objects.all().delete()
    return found


def assert_alike(definition: JobDefinition, payloads: list[dict[str, Any]]) -> None:
    def enqueue() -> None:
        definition.enqueue_many(payloads)

    copied = stored_by(enqueue)
    assert copied == stored_by(lambda: by_insert(enqueue))
    assert copied == stored_by(lambda: store([unsaved_job(definition, each) for each in payloads]))
    assert copied == stored_by(
        lambda: Job.objects.bulk_create([unsaved_job(definition, each) for each in payloads])
    )
    ids = [f"{number}\t\\N" for number in range(len(payloads))]
    named = stored_by(lambda: definition.enqueue_many(payloads, ids=ids))
    assert [row.pop("unique_id") for row in named] == ids
    assert named == [{k: v for k, v in row.items() if k != "unique_id"} for row in copied]
    assert len(copied) == len(payloads)


def hostile_payloads() -> list[dict[str, Any]]:
    return [{"job": text, "key": text} for text in HOSTILE]


# --- The same rows --------------------------------------------------------------------------------


def test_hostile_keys_and_payloads_are_stored_as_they_are(copies):
    # When
    write_keyed.enqueue_many(hostile_payloads())
    # Then
    assert copies == [len(HOSTILE)]
    stored = list(Job.objects.order_by("id"))
    assert [job.key for job in stored] == HOSTILE
    assert [job.arguments for job in stored] == hostile_payloads()


def test_every_column_is_that_of_an_insert():
    assert_alike(write_keyed, hostile_payloads())


@pytest.mark.parametrize(
    "options",
    [
        {"headers": {text: text for text in HOSTILE}},
        {"delay": timedelta(microseconds=1)},
        {"run_at": datetime(2031, 2, 3, 4, 5, 6, 7, tzinfo=timezone(timedelta(hours=-3.5)))},
        {"expires_at": datetime(8999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC)},
        {"expires_at": datetime(1970, 1, 1, tzinfo=UTC)},
        {"max_attempts": 2**31 - 1, "result_ttl": timedelta(days=36_500)},
        {"queue": "other", "key": "one\t\\for\nall"},
    ],
    ids=lambda options: ",".join(options),
)
def test_every_option_is_stored_as_by_an_insert(options):
    assert_alike(write.using(**options), [{"job": str(number)} for number in range(30)])


KEYS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=255)


@given(st.lists(KEYS, min_size=COPY_FROM, max_size=60))
@how(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_text_a_database_keeps_comes_back(keys):
    # Given
    Job.objects.all().delete()
    # When
    write_keyed.enqueue_many([{"job": "a", "key": key} for key in keys])
    # Then
    assert list(Job.objects.order_by("id").values_list("key", flat=True)) == keys


class Bytes:
    """A serializer of bytes, as they are."""

    content_type = "application/x\\bytes"

    def dumps(self, value: Any) -> bytes:
        return bytes(value["job"])

    def loads(self, data: bytes) -> Any:
        return data


def test_a_payload_may_be_any_bytes(monkeypatch):
    # Given
    from dataclasses import replace

    from kjo_django.registry import Handler

    options = replace(write.handler.options, serializer=Bytes())
    definition = JobDefinition(Handler(write.handler.function, options))
    wanted = [b"", bytes(range(256)), b"\\x41", b"\0", *(bytes([each]) for each in range(256))]
    # When
    definition.enqueue_many([{"job": each} for each in wanted])
    # Then
    stored = list(Job.objects.order_by("id"))
    assert [bytes(job.payload) for job in stored] == wanted
    assert {job.content_type for job in stored} == {Bytes.content_type}
    assert_alike(definition, [{"job": each} for each in wanted])


@pytest.mark.parametrize("size", [1, 1000, 65_000, 65_536, 200_000])
def test_rows_larger_and_smaller_than_a_block_are_all_stored(size):
    payloads = [{"job": f"{number}{'x' * size}"} for number in range(45)]
    write.enqueue_many(payloads)
    assert [job.arguments for job in Job.objects.order_by("id")] == payloads


# --- And nothing else is different ----------------------------------------------------------------


def test_the_answers_tell_the_ids_in_the_order_of_the_payloads(copies):
    answers = write.enqueue_many({"job": str(number)} for number in range(3000))
    stored = {job.pk: job.arguments["job"] for job in Job.objects.all()}
    assert copies == [3000]
    assert [stored[answer.job_id] for answer in answers] == [str(n) for n in range(3000)]
    assert [answer.job_id for answer in answers] == sorted(stored)
    assert all(answer.is_new for answer in answers)


def test_no_instance_is_made_of_a_row():
    made: list[Job] = []

    def note(instance: Job, **kwargs: Any) -> None:
        made.append(instance)

    post_init.connect(note, sender=Job)
    try:
        write.enqueue_many([{"job": str(number)} for number in range(100)])
    finally:
        post_init.disconnect(note, sender=Job)
    assert len(made) == 1


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ({"job": "\ud800"}, PayloadError),
        ({"job": object()}, PayloadError),
        ({"job": "x" * 2_000_000}, PayloadError),
        ({"wrong": 1}, TypeError),
        ({"job": "a", "key": "\0"}, PayloadError),
        ({"job": "a", "key": "k" * 256}, ValueError),
    ],
    ids=["surrogate", "object", "too large", "argument", "nul in the key", "long key"],
)
def test_one_bad_payload_stores_none_and_is_named(bad, kind, copies):
    definition = write_keyed if "key" in bad else write
    good = {"job": "a", "key": "k"} if "key" in bad else {"job": "a"}
    with pytest.raises(kind) as raised, transaction.atomic():
        definition.enqueue_many([good] * 33 + [bad] + [good] * 33)
    assert raised.value.__notes__ == ["Raised by payloads[33] of enqueue_many()."]
    assert copies == []
    assert not Job.objects.exists()


@pytest.fixture
def told(monkeypatch, hear):
    """What is woken, and the facts of each job_enqueued signal."""
    facts = hear("job_enqueued")
    monkeypatch.setattr(get_coordination(), "notify", facts.append)
    return facts


def test_it_is_told_once_and_after_the_commit(told):
    with transaction.atomic():
        answers = write.enqueue_many([{"job": str(number)} for number in range(100)])
        assert told == []
    assert told[0] == "kjo:relay"
    common = {"unique_id": None, "queue": "ledger", "handler": "ledger.write"}
    common |= {"signal": "job_enqueued", "sender": "ledger.write"}
    assert told[1:] == [{"job_id": str(answer.job_id), **common} for answer in answers]


def test_a_rollback_leaves_nothing_and_tells_nobody(told):
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        write.enqueue_many([{"job": str(number)} for number in range(100)])
        raise ZeroDivisionError
    assert not Job.objects.exists()
    assert told == []


def test_a_savepoint_takes_its_own_rows_only(told):
    with transaction.atomic():
        write.enqueue_many([{"job": f"kept {number}"} for number in range(30)])
        with pytest.raises(ZeroDivisionError), transaction.atomic():
            write.enqueue_many([{"job": f"gone {number}"} for number in range(30)])
            raise ZeroDivisionError
    assert {job.arguments["job"][:4] for job in Job.objects.all()} == {"kept"}
    assert len(told) == 31


class Tracer:
    """Leaves a header with every job."""

    def __init__(self) -> None:
        self.enclosed: list[int] = []

    def headers(self) -> dict[str, str]:
        return {}

    @contextmanager
    def enqueuing(self, jobs: list[Job]) -> Iterator[None]:
        self.enclosed.append(len(jobs))
        for job in jobs:
            job.headers = {**(job.headers or {}), "traceparent": "00-1"}
        yield


@pytest.mark.parametrize("count", [3, 100], ids=["by INSERT", "by COPY"])
def test_what_a_tracer_leaves_all_of_them_carry(monkeypatch, count):
    # Given
    tracer = Tracer()
    monkeypatch.setattr(tracing, "tracer", tracer)
    # When
    write.using(headers={"a": "b"}).enqueue_many([{"job": str(n)} for n in range(count)])
    # Then
    assert tracer.enclosed == [count]
    headers = [job.headers for job in Job.objects.all()]
    assert headers == [{"a": "b", "traceparent": "00-1"}] * count


def test_with_unique_ids_each_is_stored_once_with_what_it_was_given():
    # Given
    write.using(id="id 3").enqueue(job="before")
    ids = [f"id {number}" for number in range(40)]
    # When
    answers = write_keyed.enqueue_many([{"job": id, "key": f"key of {id}"} for id in ids], ids=ids)
    # Then
    assert [n for n, answer in enumerate(answers) if not answer.is_new] == [3]
    stored = {job.unique_id: job for job in Job.objects.all()}
    assert set(stored) == set(ids)
    assert stored["id 3"].arguments == {"job": "before"}
    for id, answer in zip(ids, answers, strict=True):
        assert stored[id].pk == answer.job_id
    assert stored["id 7"].arguments == {"job": "id 7", "key": "key of id 7"}
    assert stored["id 7"].key == "key of id 7"


def test_many_jobs_do_not_have_python_look_for_garbage_through_everything(copies):
    payloads = [{"job": str(number)} for number in range(10_000)]
    write.enqueue_many(payloads[:100])
    looks: list[int] = []

    def note(phase: str, info: dict[str, int]) -> None:
        looks.append(info["generation"])

    gc.collect()
    gc.callbacks.append(note)
    try:
        write.enqueue_many(payloads)
    finally:
        gc.callbacks.remove(note)

    assert copies == [100, 10_000]
    assert not [generation for generation in looks if generation]
    assert gc.isenabled()
