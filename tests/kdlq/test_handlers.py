"""``kdlq_handler``: the same rules within the worker's pipeline, in one transaction each."""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError, OperationalError, connection

from kjo_django.conf import get_settings
from kjo_django.exceptions import MustBeKilled
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, ProcessedEvent, TransportMessage
from kjo_django.operations import dead_letters, jobs
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.topic_replay import TopicReplay, replay_topic
from kjo_django.patterns.kdlq import DlqConfig, ProcessingStatus, kdlq_handler, parking
from kjo_django.patterns.kdlq.handlers import _original_of
from kjo_django.runtime import get_transport
from kjo_django.states import OPEN
from kjo_django.transports.base import OutgoingRecord, Record
from tests.databases import engine_of
from tests.events.bench import EVENTS, MEMORY, read_all
from tests.ledger.models import Entry
from tests.unit.deliveries import Bench, make_everything_due

pytestmark = pytest.mark.django_db(transaction=True)
AGAIN = ProcessingStatus.MUST_BE_REDELIVERED


@pytest.fixture(params=["memory", "database"])
def transport(request, settings) -> str:
    settings.KJO = {**EVENTS, **(MEMORY if request.param == "memory" else {})}
    return request.param


@pytest.fixture
def memory(settings) -> None:
    settings.KJO = {**EVENTS, **MEMORY}


class Consumers:
    """Benches for every topic of the consumer."""

    def __init__(self, *queues: str) -> None:
        self.benches = [Bench(queue) for queue in queues]

    def step(self) -> None:
        make_everything_due()
        for bench in self.benches:
            bench.run()

    def run(self, rounds: int = 12) -> None:
        for _ in range(rounds):
            self.step()

    def close(self) -> None:
        for bench in self.benches:
            bench.close()


def send(key: str | None, value: str, topic: str = "pay", **headers: bytes) -> None:
    record = OutgoingRecord(topic, value.encode(), key and key.encode(), headers)
    assert get_transport().publish([record])[0].error is None


@pytest.mark.promise("dead-letter-is-a-row")
def test_ok_redelivered_and_killed(transport) -> None:
    """KDLQ-04 … 06 in the pipeline; what a refused processor wrote is undone."""
    runs = []

    @kdlq_handler("payments", topic="pay", max_attempts=3)
    def process(record: Record) -> ProcessingStatus:
        runs.append(record.value)
        Entry.objects.create(job=(record.value or b"").decode())
        if record.value == b"raise":
            raise ValueError("no")
        return AGAIN if record.value == b"again" else ProcessingStatus.OK

    consumers = Consumers("pay", "pay-redelivery", "pay-retry")
    for value in ("ok", "again", "raise"):
        send(None, value)
    consumers.run()
    consumers.close()
    # Then: bounded by default, N redeliveries are N + 1 executions
    assert sorted(runs) == [b"again"] * 3 + [b"ok", b"raise"]
    assert list(Entry.objects.values_list("job", flat=True)) == ["ok"]
    letters = {bytes(each.value): each.reason for each in DeadLetter.objects.all()}
    assert letters == {b"again": "exhausted", b"raise": "fatal"}
    assert not Job.objects.filter(state__in=OPEN).exists()
    dead = read_all("pay-dlq") if transport == "memory" else []
    for record in dead:
        assert record.headers["KDLQ_Kills"] == b"\x00\x00\x00\x01"
        assert record.headers["KDLQ_OrigTopic"] == b"pay"
    if transport == "memory":
        assert len(dead) == 2


def _refused_beside_others(transaction_of: list[bytes], error: Exception) -> Any:
    """Return a processor that fails in a transaction with others, as by their locks."""

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> None:
        transaction_of.append(record.value or b"")
        Entry.objects.create(job=(record.value or b"").decode())
        if record.value == b"locked" and transaction_of[-2:-1] == [b"locks"]:
            raise error

    return process


def test_what_the_database_refuses_beside_others_runs_again_alone(transport) -> None:
    """FINDINGS 2.4: others may be why, and their message was processed."""
    runs: list[bytes] = []
    _refused_beside_others(runs, DatabaseError("relation exists"))
    bench = Bench("pay")
    for value in ("locks", "locked", "free"):
        send(None, value)
    bench.run()
    bench.close()
    # Then none of them is killed, and each took effect once
    assert sorted(Entry.objects.values_list("job", flat=True)) == ["free", "locked", "locks"]
    assert runs == [b"locks", b"locked", b"free", b"locked"]
    assert not DeadLetter.objects.exists()
    assert not Job.objects.exists()


@pytest.mark.parametrize("error", [MustBeKilled("no"), ValueError("no")], ids=["said", "other"])
def test_what_is_not_the_databases_to_refuse_is_killed_beside_others(transport, error) -> None:
    runs: list[bytes] = []
    _refused_beside_others(runs, error)
    bench = Bench("pay")
    for value in ("locks", "locked"):
        send(None, value)
    bench.run()
    bench.close()
    assert runs == [b"locks", b"locked"]
    assert DeadLetter.objects.get().reason == "fatal"


def test_what_the_database_refuses_of_one_alone_is_killed_unless_it_may_be_repeated(
    transport,
) -> None:
    runs: list[bytes] = []

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> None:
        runs.append(record.value or b"")
        if record.value == b"never":
            raise DatabaseError("no such table")
        if runs.count(b"later") < 3:
            raise OperationalError(1213, "Deadlock found when trying to get lock")

    for value in ("never", "later"):
        bench = Bench("pay")
        send(None, value)
        bench.run()
        bench.close()
    assert runs == [b"never", *[b"later"] * 3]
    assert bytes(DeadLetter.objects.get().value) == b"never"


def test_a_second_delivery_of_a_routed_message_routes_nothing(transport) -> None:
    """The marker and the record for the dead-letter topic are one transaction: one copy."""

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> None:
        raise ValueError("no")

    bench = Bench("pay")
    send("k", "v")
    (delivery,) = deliveries = bench.poll()
    row = TransportMessage.objects.filter(pk=delivery.record.offset).first()
    bench.run(deliveries)
    if row is None:
        deliveries = [bench.read(delivery.record)]
    else:
        row.lease_token, row.lease_expires_at = "", None
        row.save(force_insert=True)
        deliveries = bench.poll()
    bench.run(deliveries)
    bench.close()
    assert [result.value for result in bench.results] == ["completed", "duplicate"]
    assert Job.objects.filter(destination="pay-dlq").count() == 1
    assert ProcessedEvent.objects.get().event_type == "payments"


@pytest.mark.parametrize("requeues", [0, 1])
def test_a_second_copy_of_a_redelivery_takes_no_effect(memory, requeues) -> None:
    """The relay publishes again what it could not note; an operator who requeues it means it."""

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> ProcessingStatus:
        Entry.objects.create(job="v")
        is_new = "KDLQ_Redelivered" not in record.headers
        return AGAIN if is_new else ProcessingStatus.OK

    consumers = Consumers("pay", "pay-redelivery")
    send("k", "v")
    consumers.run(3)
    assert Entry.objects.count() == 1
    # When its redelivery comes twice
    (sent,) = read_all("pay-redelivery-payments")
    get_transport().publish([OutgoingRecord(sent.topic, sent.value, sent.key, sent.headers)])
    jobs.requeue(Job.objects.filter(destination=sent.topic)[:requeues])
    consumers.run(3)
    consumers.close()
    # Then
    assert Entry.objects.count() == 1 + requeues


def test_a_redelivery_by_others_that_copies_our_header_is_a_message_of_its_own(memory) -> None:
    """The Java library keeps all headers and counts one further."""
    runs = []

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> None:
        runs.append(record.headers["KDLQ_Redelivered"])

    consumers = Consumers("pay")
    for count in (b"\0\0\0\1", b"\0\0\0\2"):
        send("k", "v", **{names.REDELIVERY: b"01980000-0000-7000-8000", "KDLQ_Redelivered": count})
    consumers.run(2)
    consumers.close()
    assert runs == [b"\0\0\0\1", b"\0\0\0\2"]


@pytest.mark.parametrize(
    "named",
    [
        {},
        {"content-type": b"avro/binary"},
        {"kjo-id": b"theirs", "content-type": b"application/octet-stream", "kjo-service": b"else"},
    ],
    ids=["bare", "of a type", "with names of ours"],
)
def test_an_error_of_the_routing_itself_is_retried_and_loses_nothing(
    transport, monkeypatch, named
) -> None:
    """Not the processor's error: the message comes again, as it was, and is processed."""
    fails = [True]

    @kdlq_handler("payments", topic="pay", config=DlqConfig("pay-dlq"))
    def process(record: Record) -> ProcessingStatus | None:
        if fails:
            return AGAIN
        seen.append(record)
        Entry.objects.create(job=f"{record.topic} {record.headers['binary'].hex()}")
        return None

    seen: list[Record] = []

    import kjo_django.patterns.kdlq.handlers as module

    def broken(*args, **kwargs):
        fails.clear()
        raise DatabaseError("not now")

    monkeypatch.setattr(module, "store_record", broken)
    consumers = Consumers("pay", "pay-retry")
    headers = {"binary": b"\xff\x00", **named}
    send("k", "v", **headers)
    consumers.run(4)
    consumers.close()
    assert Entry.objects.get().job == "pay ff00"
    (record,) = seen
    # PostgreSQL's jsonb and MySQL's JSON keep none.
    order = sorted if engine_of(connection) in ("postgres", "mysql") else list
    assert (order(record.header_list), record.key) == (order(headers.items()), b"k")


def test_from_the_dead_letter_topic(memory) -> None:
    """KDLQ-13, KDLQ-21: killed once, processed from the topic, failing: skipped and recorded."""
    config = DlqConfig("pay-dlq", max_kills=1)

    @kdlq_handler("payments", topic="pay", config=config, from_dlq=True)
    def process(record: Record) -> None:
        raise ValueError("never")

    consumers = Consumers("pay", "pay-from-dlq")
    send("k", "v")
    consumers.run(4)
    consumers.close()
    states = sorted(DeadLetter.objects.values_list("state", flat=True))
    assert states == ["discarded", "open"]
    assert len(read_all("pay-dlq")) == 1


@pytest.fixture
def killed(memory):
    """A message that was killed: a row in the table, a record in the topic; it would do now."""
    fails = [True]

    @kdlq_handler("payments", topic="pay", config=DlqConfig("pay-dlq"), from_dlq=True)
    def process(record: Record) -> None:
        if fails:
            raise ValueError("not yet")
        Entry.objects.create(job=record.value.decode())

    consumers = Consumers("pay", "pay-retry")
    send("k", "v")
    consumers.run(2)
    assert DeadLetter.objects.get().state == "open"
    fails.clear()
    yield consumers
    consumers.close()


def test_what_was_replayed_from_the_table_is_not_run_again_from_the_topic(killed) -> None:
    """Neither copy knew of the other."""
    # Given
    assert dead_letters.replay(DeadLetterFilter()).replayed == 1
    killed.run(2)
    assert Entry.objects.count() == 1
    # When
    report = replay_topic(TopicReplay("pay-dlq"))
    killed.run(2)
    # Then
    assert (report.replayed, report.refused.total()) == (0, 1)
    assert list(report.refused) == ["its dead letter is replayed"]
    assert Entry.objects.count() == 1
    # But by force
    assert replay_topic(TopicReplay("pay-dlq", group="again", force=True)).replayed == 1


def test_what_was_replayed_from_the_topic_is_not_run_again_from_the_table(killed) -> None:
    # Given
    assert replay_topic(TopicReplay("pay-dlq")).replayed == 1
    killed.run(2)
    assert Entry.objects.count() == 1
    # When
    report = dead_letters.replay(DeadLetterFilter())
    killed.run(2)
    # Then
    assert report.replayed == 0
    letter = DeadLetter.objects.get()
    assert (letter.state, letter.replay_count) == ("replayed", 1)
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("is_replayed", [True, False])
def test_a_consumer_of_the_dead_letter_topic_leaves_out_what_was_decided(
    killed, is_replayed
) -> None:
    # Given
    if is_replayed:
        assert dead_letters.replay(DeadLetterFilter()).replayed == 1
    else:
        dead_letters.discard(DeadLetterFilter(), note="known")
    killed.run(2)
    # When
    late = Consumers("pay-from-dlq")
    late.run(2)
    late.close()
    # Then
    assert Entry.objects.count() == is_replayed


def test_what_is_replayed_and_killed_again_is_another_dead_letter(killed, monkeypatch) -> None:
    # Given
    def fail(*args, **kwargs):
        raise ValueError("again")

    monkeypatch.setattr(Entry.objects, "create", fail)
    # When
    dead_letters.replay(DeadLetterFilter())
    killed.run(2)
    # Then
    assert sorted(DeadLetter.objects.values_list("state", flat=True)) == ["open", "replayed"]
    monkeypatch.undo()
    assert dead_letters.replay(DeadLetterFilter()).replayed == 1
    killed.run(2)
    assert Entry.objects.count() == 1


@pytest.mark.parametrize("stamp", [b"2026-13-45T00:00:00Z", b"0001-01-01T00:00:00", b"\xff"])
def test_a_time_made_up_by_others_does_not_end_the_loop(transport, stamp) -> None:
    """Whoever may write to the topic may write our headers; what is read is never an error."""

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> None: ...

    bench = Bench("pay")
    headers = {names.SERVICE: b"interview-service", names.JOB_ID: b"1", names.ID: b"1"}
    send("k", "v", **headers, **{names.DLQ_ORIGINAL_TIMESTAMP: stamp})
    send("k", "next")
    assert len(bench.poll()) == 2
    bench.close()


def test_topics_and_groups(transport) -> None:
    @kdlq_handler("payments", topic="pay", consumer_group="payers")
    def process(record: Record) -> None: ...

    conf = get_settings()
    topics = {conf.queue(name).topic for name in ("pay", "pay-redelivery", "pay-retry")}
    assert topics == {"pay", "pay-redelivery-payments", "pay-retry-payments"}
    assert conf.queue("pay-redelivery").consumer_group == "payers"


# --- ordering="key" -------------------------------------------------------------------------------


@pytest.fixture
def keyed(transport):
    """A processor that wants the first of each key again, a number of times."""
    runs: list[str] = []
    again = {"a1": 3, "a3": 1}
    config = DlqConfig(
        "pay-dlq",
        redelivery_topic="pay-again",
        redelivery_delay=timedelta(seconds=5),
        ordering="key",
    )

    @kdlq_handler("payments", topic="pay", config=config)
    def process(record: Record) -> ProcessingStatus | None:
        value = (record.value or b"").decode()
        if again.get(value, 0) > 0:
            again[value] -= 1
            return AGAIN
        runs.append(value)
        Entry.objects.create(job=value)
        return None

    consumers = Consumers("pay", "pay-redelivery", "pay-retry")
    consumers.runs = runs  # type: ignore[attr-defined]
    yield consumers
    consumers.close()


def test_later_messages_of_a_key_wait_and_other_keys_do_not(keyed) -> None:
    """KDLQ-F10: in order within the key, however often the first is redelivered."""
    for value in ("a1", "a2", "b1", "a3"):
        send(value[0], value)
    keyed.step()
    assert keyed.runs == ["b1"]
    send("a", "a4")
    keyed.run(20)
    assert keyed.runs == ["b1", "a1", "a2", "a3", "a4"]
    assert not Job.objects.filter(state__in=OPEN).exists()


def test_a_second_copy_of_a_parked_message_is_dropped(keyed, transport) -> None:
    send("a", "a1")
    keyed.step()
    if transport == "memory":
        keyed.step()
        keyed.run(10)
        copies = read_all("pay-again")
        get_transport().publish(
            [OutgoingRecord("pay-again", copy.value, copy.key, copy.headers) for copy in copies]
        )
    keyed.run(10)
    assert keyed.runs == ["a1"]


def test_a_full_line_leaves_the_next_with_the_broker(keyed, monkeypatch) -> None:
    """The cap: beyond it a message is not acknowledged and comes up again."""
    monkeypatch.setattr(parking, "LIMIT_OF_KEY", 2)
    for value in ("a1", "a2", "a3", "a4"):
        send("a", value)
    bench = keyed.benches[0]
    deferred = bench.run()
    assert [delivery.record.value for delivery in deferred] == [b"a3", b"a4"]
    for _ in range(30):
        deferred = bench.run(deferred) if deferred else []
        keyed.step()
    assert keyed.runs == ["a1", "a2", "a3", "a4"]


def test_the_counters_of_parked_messages_are_their_own(keyed) -> None:
    """Waiting is no redelivery: only what was asked for is counted."""
    for value in ("a1", "a2"):
        send("a", value)
    keyed.step()
    waiting = {bytes(job.payload): job.headers for job in Job.objects.filter(state__in=OPEN)}
    assert "KDLQ_Redelivered" not in waiting[b"a2"]
    encoded = waiting[b"a1"]["KDLQ_Redelivered"]
    assert encoded == struct.pack(">i", 1).decode() or encoded == {"base64": "AAAAAQ=="}


@pytest.mark.parametrize("key", [b"\xff\x01", b"\0\0\0\x07", b"k" * 300], ids=repr)
def test_messages_wait_for_their_turn_whatever_bytes_their_key_is(keyed, key) -> None:
    """Java's keys are often numbers: bytes that are no text, or that no column holds."""
    for value in ("a1", "a2"):
        record = OutgoingRecord("pay", value.encode(), key)
        assert get_transport().publish([record])[0].error is None
    keyed.run(20)
    assert keyed.runs == ["a1", "a2"]
    assert not Job.objects.filter(state__in=OPEN).exists()


def test_a_line_beyond_its_limit_loses_nothing(keyed, monkeypatch) -> None:
    """Several topics add to a line at once: it may grow past the limit by a few."""
    for value in ("a1", "a2", "a3", "a4", "a5"):
        send("a", value)
    keyed.step()
    monkeypatch.setattr(parking, "LIMIT_OF_KEY", 2)
    keyed.run(40)
    assert sorted(keyed.runs) == ["a1", "a2", "a3", "a4", "a5"]


def test_places_and_rows_made_up_by_others_are_not_believed(keyed) -> None:
    """Whoever may write to the topic may write our headers."""
    send("a", "a1", **{"kjo-parked-row": b"no-id", "kjo-parked-place": b"no\0id"})
    send("a", "a2")
    keyed.run(20)
    assert keyed.runs == ["a1", "a2"]


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite takes any text
@pytest.mark.parametrize("id", [b"a\0b", b"x" * 300, b""])
@pytest.mark.parametrize("job_id", [b"1", b"a\0b"])
def test_ids_made_up_by_others_hold_nothing_up(memory, id, job_id) -> None:
    """Whoever may write to the topic may write our headers."""
    runs = []

    @kdlq_handler("payments", topic="pay")
    def process(record: Record) -> None:
        runs.append(record.value)

    bench = Bench("pay")
    send("k", "v", **{names.SERVICE: b"interview-service", names.JOB_ID: job_id, names.ID: id})
    send("k", "next")
    bench.run()
    assert runs == [b"v", b"next"]
    assert bench.lag() == 0
    bench.close()


def test_a_record_far_down_its_partition_keeps_its_place() -> None:
    """Offsets have 63 bits; the place is what its effects and its dead letter are known by."""
    offset = 5_000_000_000
    told = {names.DLQ_ORIGINAL_TOPIC: b"pay", names.DLQ_ORIGINAL_OFFSET: b"%d" % offset}
    retried = Record("pay-retry", 0, 7, b"k", b"v", told)
    assert _original_of(retried).position == ("pay", 0, offset)


def test_a_redelivery_that_says_it_is_waited_for_is_completed_all_the_same(transport) -> None:
    """Its row would stay open, and be rescued, that is redelivered, again and again."""
    answers = [AGAIN, None]

    @kdlq_handler("payments", topic="pay", config=DlqConfig("pay-dlq"))
    def process(record: Record) -> ProcessingStatus | None:
        return answers.pop(0)

    consumers = Consumers("pay")
    send("k", "v", **{"kjo-parked-row": b"01980000-0000-7000-8000-000000000001"})
    consumers.run(4)
    consumers.close()
    assert answers == []
    assert not Job.objects.filter(state__in=OPEN).exists()
