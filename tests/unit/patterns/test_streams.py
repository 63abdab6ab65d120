"""Stream templates through a worker in this process: RST-01 … RST-28 and their flaws.

What only a real Redis and killed processes show is in tests/acceptance/test_redis_streams.py.
"""

from __future__ import annotations

import itertools
import json
import time
from datetime import timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from kjo_django.exceptions import PermanentError
from kjo_django.models import DeadLetter, Job
from kjo_django.patterns.streams import (
    BACKOFF,
    AbstractStreamConsumer,
    AbstractStreamProducer,
    truncate_error,
)
from kjo_django.retries import Backoff
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from kjo_django.worker import Worker

pytestmark = [
    pytest.mark.medium,  # threads and waits of a worker, in real time
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("forgotten_definitions"),
]
numbers = itertools.count(1)


@pytest.fixture
def quick(settings, sqlite_file, monkeypatch):
    settings.KJO = {"SERVICE_NAME": "tests", "POLL_INTERVAL": 0.1, "HEARTBEAT_INTERVAL": 0.3}
    fast = Backoff(timedelta(milliseconds=20), timedelta(milliseconds=50))
    monkeypatch.setattr("kjo_django.patterns.streams.BACKOFF", fast)


def task(business=lambda payload: None, **methods: Any) -> Any:
    """Define a producer and a consumer of a stream of its own; return what they told, and both."""
    stream = f"resume:analyze-{next(numbers)}:stream"
    told: list[tuple[Any, ...]] = []

    class Producer(AbstractStreamProducer[dict]):
        task_display_name = "resume analysis"
        stream_key = stream

        def build_message(self, payload):
            return {"resumeId": payload["id"]}

        def payload_identifier(self, payload):
            return str(payload["id"])

        def on_send_failed(self, payload, error):
            told.append(("send_failed", error))

    class Consumer(AbstractStreamConsumer[dict]):
        task_display_name = "resume analysis"
        stream_key = stream
        group_name = "analyze-group"

        def parse_payload(self, fields):
            return {"id": int(fields["resumeId"]), "retryCount": fields.get("retryCount")}

        def payload_identifier(self, payload):
            return str(payload["id"])

        def mark_processing(self, payload):
            told.append(("processing", payload["id"]))

        def process_business(self, payload):
            business(payload)

        def mark_completed(self, payload):
            told.append(("completed", payload["id"]))

        def mark_failed(self, payload, error):
            told.append(("failed", payload["id"], error))

        def retry_message(self, payload, retry_count):
            told.append(("retry", retry_count))

        locals().update(methods)

    return told, Producer(), Consumer, stream


def work(stream: str, until: Any, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    Worker([stream]).run(lambda: bool(until()) or time.monotonic() > deadline)


def publish(stream: str, value: bytes) -> None:
    assert get_transport().publish([OutgoingRecord(stream, value)])[0].error is None


def test_a_task_is_sent_processed_and_completed_in_order_RST_04_RST_12(quick):
    # Given
    told, producer, _, stream = task()
    # When
    assert producer.send_task({"id": 7}) is not None
    work(stream, lambda: ("completed", 7) in told)
    # Then
    assert told == [("processing", 7), ("completed", 7)]


def test_the_first_message_has_the_retry_count_zero_as_text_RST_06(quick):
    # Given
    seen: list[Any] = []
    _, producer, _, stream = task(lambda payload: seen.append(payload["retryCount"]))
    # When
    producer.send_task({"id": 1})
    work(stream, lambda: seen)
    # Then
    assert seen == ["0"]


def test_a_task_is_sent_with_the_callers_transaction_RST_F6(quick):
    # Given
    told, producer, _, stream = task()
    # When
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        producer.send_task({"id": 1})
        raise ZeroDivisionError
    producer.send_task({"id": 2})
    work(stream, lambda: ("completed", 2) in told)
    # Then
    assert ("processing", 1) not in told


def test_a_task_that_cannot_be_stored_is_told_and_leaves_the_transaction_usable_RST_07(quick):
    # Given
    told, producer, _, _ = task()
    # When
    with transaction.atomic():
        assert producer.send_task({"no id": "x" * 900}) is None
        Job.objects.count()
    # Then
    ((kind, error),) = told
    assert kind == "send_failed"
    assert len(error) <= 500


def test_three_retries_are_four_executions_RST_13_RST_18_X_1(quick):
    """RST-33: what is exhausted is a dead letter."""

    # Given
    def fail(payload):
        raise RuntimeError("the model is overloaded " + "x" * 900)

    told, producer, _, stream = task(fail)
    # When
    producer.send_task({"id": 1})
    work(stream, lambda: told and told[-1][0] == "failed")
    # Then
    assert [one for one in told if one[0] == "processing"] == [("processing", 1)] * 4
    assert [one for one in told if one[0] == "retry"] == [("retry", n) for n in (1, 2, 3)]
    error = told[-1][2]
    assert error.startswith("resume analysis failed (retried 3 times): the model")
    assert len(error) == 500
    assert DeadLetter.objects.get().reason == "exhausted"


def test_a_permanent_error_is_not_tried_again_RST_25_RST_F4(quick):
    # Given
    def fail(payload):
        raise PermanentError("an unsupported format")

    told, producer, _, stream = task(fail)
    # When
    producer.send_task({"id": 1})
    work(stream, lambda: told and told[-1][0] == "failed")
    # Then
    assert [one[0] for one in told] == ["processing", "failed"]
    assert DeadLetter.objects.get().reason == "fatal"


@pytest.mark.parametrize(
    "value", [b'{"other": "1"}', b'{"resumeId": "x"}', b"[]", b"{", b""], ids=lambda v: v.decode()
)
def test_an_invalid_entry_is_a_dead_letter_with_its_bytes_and_the_next_one_runs_RST_15_RST_F5(
    quick, value
):
    # Given
    told, producer, _, stream = task()
    # When
    publish(stream, value)
    producer.send_task({"id": 2})
    work(stream, lambda: ("completed", 2) in told and DeadLetter.objects.exists())
    # Then
    letter = DeadLetter.objects.get()
    assert bytes(letter.value) == value
    assert letter.error
    assert [one for one in told if one[0] == "failed"] == []


def test_what_there_is_nothing_to_do_about_is_skipped_and_counts_as_done_RST_16_RST_32(quick):
    # Given
    ended: list[int] = []
    told, producer, _, stream = task(
        should_skip=lambda self, payload: ended.append(payload["id"]) or True
    )
    # When
    producer.send_task({"id": 9})
    work(stream, lambda: ended)
    # Then
    assert told == []
    assert not DeadLetter.objects.exists()


def test_a_copy_of_a_completed_task_does_not_run_again_RST_F11(quick):
    # Given
    told, producer, _, stream = task()
    producer.send_task({"id": 1})
    job = Job.objects.get()
    work(stream, lambda: ("completed", 1) in told)
    # When: the relay sent it twice
    get_transport().publish(
        [OutgoingRecord(stream, bytes(job.payload), headers={"kjo-id": str(job.pk).encode()})]
    )
    producer.send_task({"id": 2})
    work(stream, lambda: ("completed", 2) in told)
    # Then
    assert told.count(("processing", 1)) == 1


def test_an_error_while_the_state_is_written_fails_the_attempt_RST_F7(quick):
    # Given
    completions = iter([RuntimeError("the database is away"), None])
    done: list[int] = []

    def mark_completed(self, payload):
        error = next(completions)
        if error:
            raise error
        done.append(payload["id"])

    told, producer, _, stream = task(mark_completed=mark_completed)
    # When
    producer.send_task({"id": 1})
    work(stream, lambda: done)
    # Then
    assert done == [1]
    assert ("retry", 1) in told


def test_the_delay_grows_to_a_minute_RST_24():
    delays = [BACKOFF.delay(attempt, 0).total_seconds() for attempt in range(1, 9)]
    assert delays == [1, 2, 4, 8, 16, 32, 60, 60]
    assert all(60 <= BACKOFF.delay(n).total_seconds() <= 72 for n in range(7, 100))


def test_no_delay_is_under_its_minimum_RST_24():
    """A fifth of it was taken off, where the page says a second, two, four."""
    drawn = [BACKOFF.delay(attempt, draw) for attempt in (1, 2, 3) for draw in (0, 0.5, 1)]
    assert [delay.total_seconds() for delay in drawn] == [1, 1.1, 1.2, 2, 2.2, 2.4, 4, 4.4, 4.8]


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, None), ("", ""), ("x" * 500, "x" * 500), ("\U0001f600" * 600, "\U0001f600" * 500)],
)
def test_errors_are_cut_by_characters_RST_27_RST_F14(given, expected):
    assert truncate_error(given) == expected


def test_a_consumer_without_its_names_is_refused_at_its_definition_RST_14():
    with pytest.raises(ImproperlyConfigured, match="group_name"):

        class Nameless(AbstractStreamConsumer[dict]):
            stream_key = "x"
            parse_payload = payload_identifier = mark_processing = None
            process_business = mark_completed = mark_failed = None


def test_the_value_on_the_wire_is_the_fields_as_text_RST_21(quick):
    # Given
    _, producer, _, _ = task()
    # When
    producer.send_task({"id": 5})
    # Then
    assert json.loads(bytes(Job.objects.get().payload)) == {"resumeId": "5", "retryCount": "0"}


def test_an_error_without_a_text_fails_the_task_all_the_same(quick):
    class Unspeakable(PermanentError):
        def __str__(self) -> str:
            raise AttributeError("self.response")

    def business(payload):
        raise Unspeakable

    told, producer, _, stream = task(business)
    producer.send_task({"id": 1})
    work(stream, lambda: DeadLetter.objects.exists())
    assert [each[0] for each in told] == ["processing", "failed"]
    assert told[-1][2].endswith("Unspeakable")
