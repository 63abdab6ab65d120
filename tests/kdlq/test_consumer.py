"""``KDLQMessageConsumer.accept``: what becomes of each message, and its headers."""

from __future__ import annotations

import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest
from django.db import connections
from django.utils import timezone

from kjo_django import signals
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job
from kjo_django.operations import dead_letters
from kjo_django.outbox.relay import Relay
from kjo_django.patterns.kdlq import (
    DlqConfig,
    KDLQException,
    KDLQLifecycleException,
    KDLQMessageConsumer,
    KDLQMessageLifecycleListener,
    KDLQMessageMustBeRedeliveredException,
    MustBeKilled,
    ProcessingStatus,
    Status,
)
from kjo_django.patterns.kdlq.consumer import as_record
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from kjo_django.transports.base import Published, Record
from tests.events.bench import MEMORY, read_all
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)
NOW = timedelta(0)
STAMP = datetime(2026, 1, 2, 3, 4, 5, 678_000, UTC)


@pytest.fixture(autouse=True)
def _memory(settings) -> None:
    settings.KJO = {"SERVICE_NAME": "tests", **MEMORY}


def record(**changes) -> Record:
    found = Record("tq", 2, 41, b"\x00\x00\x00\x07", b"7", {"theirs": b"x"}, STAMP)
    return replace(found, **changes)


def as_confluent(record: Record, **changes) -> SimpleNamespace:
    """The record as confluent-kafka gives it."""
    told = {
        **{name: getattr(record, name) for name in ("topic", "partition", "offset")},
        "key": record.key,
        "value": record.value,
        "headers": list(record.headers.items()),
        **changes,
    }
    return SimpleNamespace(**{name: lambda value=value: value for name, value in told.items()})


def relay_all() -> None:
    Job.objects.update(available_at=timezone.now())
    Relay().publish_due()


def accept(processor, message=None, **config) -> Status:
    config = {"redelivery_delay": NOW, "redelivery_topic": "again", **config}
    with KDLQMessageConsumer("test", DlqConfig("DLQ", **config), processor) as consumer:
        return consumer.accept(message or record())


def answers(status):
    return lambda record: status


def raises(error):
    def processor(record):
        raise error

    return processor


def the_one(topic: str) -> Record:
    (found,) = read_all(topic)
    return found


@pytest.mark.parametrize("answer", [ProcessingStatus.OK, None])
def test_nothing_is_sent_for_what_was_processed(answer) -> None:
    """KDLQ-22."""
    assert accept(answers(answer)) is Status.OK
    assert read_all("again") + read_all("DLQ") == []


@pytest.mark.parametrize(
    "processor",
    [
        answers(ProcessingStatus.MUST_BE_REDELIVERED),
        raises(KDLQMessageMustBeRedeliveredException("later")),
    ],
)
def test_a_message_is_redelivered(processor) -> None:
    """KDLQ-09, 14, 16, 18: key, value and headers as they were; counter 1, marker, no partition."""
    assert accept(processor) is Status.REDELIVERED
    again = the_one("again")
    assert (again.key, again.value) == (b"\x00\x00\x00\x07", b"7")
    assert again.headers == {
        "theirs": b"x",
        "KDLQ_Redelivered": b"\x00\x00\x00\x01",
        "KDLQ_PrcMarker": b"test",
        "KDLQ_OrigTopic": b"tq",
    }


@pytest.mark.parametrize(
    "processor", [answers(ProcessingStatus.ERROR), raises(ValueError("wrong")), answers("OK")]
)
def test_anything_else_is_killed(processor) -> None:
    """KDLQ-10, KDLQ-15; KDLQ-F3: with where it came from, what was raised and when."""
    before = timezone.now().timestamp() * 1000 - 1
    assert accept(processor) is Status.ROUTED_TO_DLQ
    dead = the_one("DLQ")
    assert (dead.key, dead.value, dead.headers["theirs"]) == (b"\x00\x00\x00\x07", b"7", b"x")
    assert dead.headers["KDLQ_Kills"] == b"\x00\x00\x00\x01"
    assert dead.headers["KDLQ_PrcMarker"] == b"test"
    assert dead.headers["KDLQ_OrigTopic"] == b"tq"
    assert struct.unpack(">q", dead.headers["KDLQ_FailedAt"])[0] >= before
    letter = DeadLetter.objects.get()
    assert (letter.state, letter.topic, letter.offset) == (DeadLetterState.OPEN, "tq", 41)


def test_what_was_raised_is_told() -> None:
    """KDLQ-F3: class, and at most 500 characters."""
    accept(raises(ValueError("w" * 600)))
    dead = the_one("DLQ")
    assert dead.headers["KDLQ_ErrorClass"] == b"ValueError"
    assert dead.headers["KDLQ_ErrorMessage"] == b"w" * 500


def test_what_was_raised_need_not_be_told(settings) -> None:
    settings.KJO = {**settings.KJO, "DEAD_LETTER_EXCEPTION_HEADERS": False}
    accept(raises(ValueError("Key (email)=(ada@example.org)")))
    dead = the_one("DLQ")
    assert dead.headers["KDLQ_ErrorClass"] == b"ValueError"
    assert "KDLQ_ErrorMessage" not in dead.headers


def test_informational_headers_are_of_the_first_record() -> None:
    """KDLQ-17: offset and time as 8 bytes, partition as 4; set once (KDLQ-F3)."""
    redeliver = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    accept(redeliver, informational_headers=True)
    first = the_one("again")
    accept(redeliver, first, informational_headers=True, redelivery_topic="third")
    last = the_one("third")
    assert last.headers["KDLQ_OrigOffset"] == struct.pack(">q", 41)
    assert last.headers["KDLQ_OrigPartition"] == struct.pack(">i", 2)
    assert last.headers["KDLQ_OrigTs"] == struct.pack(">q", round(STAMP.timestamp() * 1000))
    assert last.headers["KDLQ_OrigTopic"] == b"tq"
    assert last.headers["KDLQ_Redelivered"] == b"\x00\x00\x00\x02"


def test_without_a_redelivery_topic_it_goes_back_where_it_came_from() -> None:
    """KDLQ-11."""
    accept(answers(ProcessingStatus.MUST_BE_REDELIVERED), redelivery_topic=None)
    assert the_one("tq").headers["KDLQ_Redelivered"] == b"\x00\x00\x00\x01"


@pytest.mark.parametrize(
    ("limit", "counter", "status"),
    [
        (-1, 10**6, Status.REDELIVERED),
        (0, 0, Status.ROUTED_TO_DLQ),
        (2, 1, Status.REDELIVERED),
        (2, 2, Status.ROUTED_TO_DLQ),
    ],
)
def test_redeliveries_have_a_limit(limit, counter, status) -> None:
    """KDLQ-12, X-1: N redeliveries are N + 1 executions."""
    message = record(headers={"KDLQ_Redelivered": struct.pack(">i", counter)})
    redeliver = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    assert accept(redeliver, message, max_redeliveries=limit) is status


@pytest.mark.parametrize(
    ("limit", "kills", "status"),
    [
        (-1, 10**6, Status.ROUTED_TO_DLQ),
        (0, 0, Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED),
        (1, 0, Status.ROUTED_TO_DLQ),
        (1, 1, Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED),
    ],
)
def test_kills_have_a_limit(limit, kills, status) -> None:
    """KDLQ-13; what is skipped is a row, not nothing (KDLQ-F4)."""
    heard = []
    signals.message_skipped.connect(lambda sender, **told: heard.append(sender), weak=False)
    message = record(headers={"KDLQ_Kills": struct.pack(">i", kills)})
    assert accept(answers(ProcessingStatus.ERROR), message, max_kills=limit) is status
    letter = DeadLetter.objects.get()
    is_skipped = status is Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED
    assert (letter.state == DeadLetterState.DISCARDED) is is_skipped
    assert heard == (["test"] if is_skipped else [])
    assert len(read_all("DLQ")) == (not is_skipped)


def test_exhausted_redeliveries_that_may_not_be_killed_are_told_as_skipped() -> None:
    """KDLQ-F5: the real status, not ROUTED_TO_DLQ."""
    redeliver = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    status = accept(redeliver, max_redeliveries=0, max_kills=0)
    assert status is Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED


@pytest.mark.parametrize("value", [b"", b"\x01", b"\x00" * 8, b"\xff\xff\xff\xff"])
def test_counters_nobody_can_read_count_as_none(value) -> None:
    """KDLQ-14."""
    accept(
        answers(ProcessingStatus.MUST_BE_REDELIVERED),
        record(headers={"KDLQ_Redelivered": value}),
    )
    assert the_one("again").headers["KDLQ_Redelivered"] == b"\x00\x00\x00\x01"


@pytest.mark.parametrize(
    ("status", "topic"),
    [(ProcessingStatus.MUST_BE_REDELIVERED, "again"), (ProcessingStatus.ERROR, "DLQ")],
)
def test_whoever_processed_it_last_is_named(status, topic) -> None:
    """KDLQ-16: the consumer's id in UTF-8, always, and once."""
    message = record(headers={"KDLQ_PrcMarker": b"somebody before"})
    with KDLQMessageConsumer(
        "Prüfer",
        DlqConfig("DLQ", redelivery_topic="again", redelivery_delay=NOW),
        answers(status),
    ) as consumer:
        consumer.accept(message)
    assert the_one(topic).headers["KDLQ_PrcMarker"] == "Prüfer".encode()


@pytest.mark.parametrize(("before", "after"), [(0, 1), (255, 256), (2**31 - 1, 2**31 - 1)])
def test_kills_are_counted_in_four_bytes(before, after) -> None:
    """KDLQ-15: big-endian; at its largest it stays."""
    message = record(headers={"KDLQ_Kills": struct.pack(">i", before)})
    accept(answers(ProcessingStatus.ERROR), message, max_kills=-1)
    assert the_one("DLQ").headers["KDLQ_Kills"] == struct.pack(">i", after)


def test_exceptions_may_mean_redelivery() -> None:
    """KDLQ-F9: KDLQ 2's reading, with MustBeKilled as the way to the dead letters."""
    assert accept(raises(ValueError()), default_on_exception="redeliver") is Status.REDELIVERED
    killed = accept(raises(MustBeKilled("never")), default_on_exception="redeliver")
    assert killed is Status.ROUTED_TO_DLQ


@pytest.mark.parametrize(
    ("status", "hook"),
    [
        (ProcessingStatus.MUST_BE_REDELIVERED, "redelivery"),
        (ProcessingStatus.ERROR, "kill"),
    ],
)
def test_a_broker_that_refuses_is_raised(monkeypatch, status, hook) -> None:
    """KDLQ-08: the caller must not commit; the listener is told; nothing is recorded."""
    heard = []

    class Listener(KDLQMessageLifecycleListener):
        def on_message_redelivery_error(self, consumer, record, error):
            heard.append("redelivery")

        def on_message_kill_error(self, consumer, record, error):
            heard.append("kill")

    monkeypatch.setattr(
        type(get_transport()), "publish", lambda self, records: [Published("no broker")]
    )
    with pytest.raises(KDLQException, match="no broker"):
        accept(answers(status), listeners=[Listener()])
    assert heard == [hook]
    assert DeadLetter.objects.count() == 0


def test_listeners_and_signals_hear_of_everything_and_change_nothing() -> None:
    """KDLQ-07, KDLQ-F8: one that raises breaks nothing."""
    heard, told = [], []

    class Listener(KDLQMessageLifecycleListener):
        def __getattribute__(self, name):
            if not name.startswith("on_message"):
                return super().__getattribute__(name)

            def hook(consumer, record, *facts):
                heard.append((name, consumer))
                raise RuntimeError("a listener of no use")

            return hook

    for signal in (signals.message_processed, signals.message_redelivered, signals.message_killed):
        signal.connect(lambda sender, **facts: told.append(sender), weak=False)
    for status in ProcessingStatus:
        accept(answers(status), listeners=[Listener()])
    assert heard == [
        ("on_message_processing", "test"),
        ("on_message_processing", "test"),
        ("on_message_redelivery_success", "test"),
        ("on_message_processing", "test"),
        ("on_message_kill_success", "test"),
    ]
    assert told == ["test"] * 5


def test_a_delayed_redelivery_waits_in_the_outbox() -> None:
    """KDLQ-F1: no hot loop; the relay sends it when it is due, byte for byte."""
    status = accept(
        answers(ProcessingStatus.MUST_BE_REDELIVERED), redelivery_delay=timedelta(minutes=1)
    )
    assert status is Status.REDELIVERED
    job = Job.objects.get()
    assert timedelta(seconds=55) < job.available_at - timezone.now() <= timedelta(minutes=1)
    Relay().publish_due()
    assert read_all("again") == []
    relay_all()
    assert the_one("again").headers["KDLQ_Redelivered"] == b"\x00\x00\x00\x01"
    assert the_one_key() == b"\x00\x00\x00\x07"
    assert Job.objects.get().state == JobState.COMPLETED


def the_one_key() -> bytes | None:
    (found,) = read_all("again", "yet-another")
    return found.key


def test_after_close_nothing_is_accepted() -> None:
    """KDLQ-19."""
    consumer = KDLQMessageConsumer("test", DlqConfig("DLQ"), answers(None))
    consumer.close()
    with pytest.raises(KDLQLifecycleException):
        consumer.accept(record())


def test_close_waits_for_messages_in_progress() -> None:
    """The producer was released under a message that was still to be routed."""
    # Given a message that is being processed
    began, may_end = threading.Event(), threading.Event()

    def process(record: Record) -> ProcessingStatus:
        began.set()
        may_end.wait(PATIENCE)
        return ProcessingStatus.ERROR

    consumer = KDLQMessageConsumer("test", DlqConfig("DLQ"), process)
    with ThreadPoolExecutor(2) as threads:
        accepted = threads.submit(consumer.accept, record())
        assert began.wait(PATIENCE)
        # When
        closed = threads.submit(consumer.close)
        # Then it is refused no more than what comes later
        with pytest.raises(TimeoutError):
            closed.result(0.2)
        with pytest.raises(KDLQLifecycleException):
            consumer.accept(record())
        may_end.set()
        closed.result(PATIENCE)
        assert accepted.done()
        assert accepted.result() is Status.ROUTED_TO_DLQ
        threads.submit(connections.close_all).result(PATIENCE)


def test_close_waits_no_longer_than_it_is_told_and_never_for_itself() -> None:
    def process(record: Record) -> None:
        consumer.close()

    consumer = KDLQMessageConsumer("test", DlqConfig("DLQ"), process)
    assert consumer.accept(record()) is Status.OK
    with pytest.raises(KDLQLifecycleException):
        consumer.accept(record())
    consumer.close(timeout=0)


def test_a_replay_resets_redeliveries_and_keeps_kills(settings) -> None:
    """KDLQ-F6: a replayed message has its whole budget of redeliveries again."""
    settings.KJO = {"SERVICE_NAME": "tests", "QUEUES": {"tq": {}}, **MEMORY}
    message = record(
        headers={"KDLQ_Redelivered": struct.pack(">i", 3), "KDLQ_Kills": struct.pack(">i", 1)}
    )
    accept(answers(ProcessingStatus.ERROR), message, max_redeliveries=3)
    assert dead_letters.replay(dead_letters.DeadLetterFilter()).replayed == 1
    replayed = the_one("tq")
    assert "KDLQ_Redelivered" not in replayed.headers
    assert replayed.headers["KDLQ_Kills"] == struct.pack(">i", 2)


def test_what_was_processed_from_the_dead_letter_topic_is_closed() -> None:
    """KDLQ-21: the same consumer, attached to the dead-letter topic."""
    accept(raises(ValueError("not yet")))
    assert accept(answers(None), the_one("DLQ")) is Status.OK
    assert DeadLetter.objects.get().state == DeadLetterState.REPLAYED


def test_a_timestamp_no_calendar_holds_is_none():
    message = as_confluent(record(), timestamp=(1, 2**62))
    assert as_record(message) == record(timestamp=None)


@pytest.mark.parametrize("delay", [NOW, timedelta(milliseconds=1)])
def test_names_given_twice_and_headers_without_a_value_are_redelivered_and_killed(delay) -> None:
    """The last of a name was left, and an empty value."""
    # Given a message as confluent-kafka gives it
    theirs = [("zeta", b"1"), ("h", b"1"), ("nul", None), ("h", b"2"), ("alpha", b"\xff")]
    message = as_confluent(record(), headers=theirs, timestamp=(1, 1_700_000_000_000))
    # When
    again = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    accept(again, message, redelivery_delay=delay)
    relay_all()
    accept(answers(ProcessingStatus.ERROR), message)
    # Then
    (redelivered,), (killed,) = read_all("again"), read_all("DLQ")
    letter = names.listed(names.from_json(DeadLetter.objects.get().headers))
    for headers in (redelivered.header_list, killed.header_list, letter):
        assert [one for one in headers if one[0] in dict(theirs)] == theirs


def test_what_is_too_long_to_wait_here_is_killed_and_not_refused_for_ever(settings) -> None:
    """A broker may take more than our table: the offset must come to be committed."""
    settings.KJO = {**settings.KJO, "MAX_PAYLOAD_BYTES": 1000}
    message = record(value=b"x" * 1001)
    again = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    delay = timedelta(seconds=1)
    assert accept(again, message, redelivery_delay=delay) is Status.ROUTED_TO_DLQ
    assert [each.value for each in read_all("DLQ")] == [message.value]
    assert DeadLetter.objects.get().error_type.endswith("PayloadError")


@pytest.mark.parametrize("value", [None, b""])
def test_a_message_without_a_value_has_none_after_it_has_waited(value) -> None:
    """A tombstone deletes; an empty value does not."""
    again = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    message = record(value=value)
    accept(again, message, redelivery_delay=timedelta(milliseconds=1))
    relay_all()
    (redelivered,) = read_all("again")
    assert redelivered.value == value
    assert not {name for name in redelivered.headers if name.startswith("kjo-")}


def test_what_only_rows_say_is_not_believed_of_others() -> None:
    message = record(headers={"kjo-raw-key": b"other", "kjo-no-value": b"1"})
    again = answers(ProcessingStatus.MUST_BE_REDELIVERED)
    accept(again, message, redelivery_delay=timedelta(milliseconds=1))
    relay_all()
    (redelivered,) = read_all("again")
    assert (redelivered.key, redelivered.value) == (message.key, message.value)


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite takes any text
def test_a_place_no_database_keeps_is_no_error() -> None:
    told = {"KDLQ_Kills": b"\0\0\0\1", "kjo-dlq-message-id": b"a\0b"}
    assert accept(answers(None), record(headers=told)) is Status.OK
