"""What only Kafka can get wrong, on a mock cluster: outages, callbacks, commits, forks."""

import contextlib
import gc
import logging
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from zoneinfo import ZoneInfo

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition
from django.core.exceptions import ImproperlyConfigured

from kjo_django.exceptions import PublishError
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord, TopicPartition, timestamp_of
from kjo_django.transports.kafka import KafkaTransport, publisher, reading, subscription
from tests.mock_kafka import OFFSET_COMMIT, PRODUCE, MockKafka
from tests.waiting import PATIENCE

pytestmark = pytest.mark.medium  # the client waits in real time, for a broker that is its own mock

# The mock learns of a member that left when its session ends.
QUICK = {"session.timeout.ms": 1000, "heartbeat.interval.ms": 100}


@pytest.fixture(scope="module")
def mock() -> Iterator[MockKafka]:
    mock = MockKafka()
    yield mock
    mock.close()


@pytest.fixture(autouse=True)
def nothing_is_left_to_refuse(mock):
    """What a test's client did not ask often enough to be refused would be refused to the next."""
    yield
    mock.accept(PRODUCE, OFFSET_COMMIT)


@pytest.fixture
def topic(mock):
    name = f"kjo-{uuid.uuid4().hex[:12]}"
    mock.create_topic(name, 1)
    return name


@pytest.fixture
def group():
    return f"group-{uuid.uuid4().hex[:12]}"


@pytest.fixture
def connect(mock):
    """Make transports that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(**options):
            defaults = {"bootstrap.servers": mock.bootstrap_servers, **QUICK}
            transport = KafkaTransport("test", {**defaults, **options})
            stack.callback(transport.close)
            return transport

        yield make


@pytest.fixture
def transport(connect):
    return connect()


@pytest.fixture
def subscribe(topic, group):
    """Open subscriptions that are closed after the test."""
    with contextlib.ExitStack() as stack:

        def make(transport, **callbacks):
            made = transport.subscribe([topic], group, **callbacks)
            stack.callback(made.close)
            return made

        yield make


def publish(transport, topic, *contents, **fields):
    outcomes = transport.publish(
        [OutgoingRecord(topic, value, b"k", **fields) for value in contents]
    )
    assert [outcome.error for outcome in outcomes] == [None] * len(contents)


def numbers(start, end):
    return [b"%d" % number for number in range(start, end)]


def read(subscription, count, max_records=500):
    records = []

    def enough():
        records.extend(subscription.poll(max_records, 0.05))
        return len(records) >= count

    eventually(enough, 20, f"{count} records")
    return records


def values(records):
    return [record.value for record in records]


def join(*subscriptions):
    def joined():
        for each in subscriptions:
            assert each.poll(0, 0.02) == []
        return all(each.assignment() for each in subscriptions)

    eventually(joined, 20, "an assignment")


def committed(mock, topic, group, partition=0):
    """Ask the broker, as an outsider."""
    consumer = Consumer({"bootstrap.servers": mock.bootstrap_servers, "group.id": group})
    try:
        (found,) = consumer.committed([KafkaPartition(topic, partition)], timeout=5)
        return found.offset
    finally:
        consumer.close()


class Replaced:
    """A client with some of its methods replaced."""

    def __init__(self, client, **methods):
        self.client = client
        self.methods = methods

    def __getattr__(self, name):
        return self.methods.get(name) or getattr(self.client, name)


class Spy(Replaced):
    """The client of a subscription, with some of its methods replaced."""

    def __init__(self, subscription, **methods):
        super().__init__(subscription._consumer, **methods)
        subscription._consumer = self


# --- Publishing -----------------------------------------------------------------------------------


def test_a_record_too_large_is_its_own_error(transport, topic):
    records = [OutgoingRecord(topic, value) for value in (b"1", b"x" * 2_000_000, b"2")]

    before, large, after = transport.publish(records)

    assert before.error is after.error is None
    assert large.error == "MSG_SIZE_TOO_LARGE: larger than the client's own message.max.bytes"
    assert large.is_final
    assert large.offset is None


def test_a_partition_that_does_not_exist_is_its_own_error(transport, topic):
    publish(transport, topic, b"so that the topic is known")

    wrong, right = transport.publish(
        [OutgoingRecord(topic, b"1", partition=7), OutgoingRecord(topic, b"2")]
    )

    assert "UNKNOWN_PARTITION" in wrong.error
    assert right.error is None


def test_a_full_queue_is_waited_for(connect, topic):
    transport = connect(**{"queue.buffering.max.messages": 10, "linger.ms": 1})

    publish(transport, topic, *numbers(0, 300))


@pytest.mark.parametrize("is_connected", [True, False])
def test_a_refused_batch_is_not_overtaken_by_later_records_of_its_key(
    connect, mock, topic, subscribe, is_connected
):
    # Given many records of one key, in batches of ten
    transport = connect(**{"batch.size": 3000})
    if is_connected:
        publish(transport, topic, b"so that the topic is known")
    records = [OutgoingRecord(topic, b"%03d" % n + b"." * 200, b"k") for n in range(60)]
    # When the broker refuses the first two batches as too large
    mock.refuse(PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.MSG_SIZE_TOO_LARGE)
    outcomes = transport.publish(records)
    # Then one that was refused alone is gone for good, and all others are in their order
    taken = [n for n, outcome in enumerate(outcomes) if outcome.error is None]
    assert all(outcome.error is None or outcome.is_final for outcome in outcomes)
    assert len(taken) >= 58
    found = values(read(subscribe(transport), len(taken) + is_connected))[is_connected:]
    assert [int(value[:3]) for value in found] == taken


def test_behind_a_record_that_may_be_taken_later_its_key_is_held_back(
    connect, mock, topic, subscribe
):
    # Given
    transport = connect(**{"batch.size": 3000})
    publish(transport, topic, b"so that the topic is known")
    sent = [OutgoingRecord(topic, b"." * 200, b"k") for n in range(60)]
    # When the broker refuses a batch, for now
    mock.refuse(PRODUCE, KafkaError.TOPIC_EXCEPTION)
    outcomes = transport.publish(sent)
    # Then nothing behind it was sent
    assert None not in [outcome.error for outcome in outcomes]
    assert not any(outcome.is_final for outcome in outcomes)
    assert "held back behind an earlier record of its key" in outcomes[59].error
    assert "TOPIC_EXCEPTION" in outcomes[59].error
    # And another time all are taken, in their order
    publish(transport, topic, *numbers(0, 60))
    assert values(read(subscribe(transport), 61))[1:] == numbers(0, 60)


@pytest.mark.large
def test_a_record_that_times_out_is_not_overtaken_by_a_later_one_of_its_key(connect, mock, topic):
    # Given room in the client for one record, so that the second begins to wait later
    transport = connect(
        **{
            "delivery.timeout.ms": 2000,
            "queue.buffering.max.messages": 1,
            "reconnect.backoff.max.ms": 100,
        }
    )
    publish(transport, topic, b"connects")
    # When the broker is back just after the first has timed out
    with mock.down():
        back = threading.Timer(2.1, mock.come_back)
        back.start()
        first, second = transport.publish([OutgoingRecord(topic, b"1", b"k")] * 2)
        back.join()
    # Then
    assert "MSG_TIMED_OUT" in first.error
    assert second.error is not None
    # And both are taken once the broker is there
    eventually(
        lambda: (
            {each.error for each in transport.publish([OutgoingRecord(topic, b"1", b"k")])}
            == {None}
        ),
        20,
        "recovery",
    )


def test_records_that_are_refused_together_are_not_refused_for_good(
    connect, mock, topic, monkeypatch
):
    """Each was to be tried alone, and time was up before: what is refused for good is given up."""
    # Given
    transport = connect(**{"delivery.timeout.ms": 3000})
    publish(transport, topic, b"so that the topic is known")
    send_in_halves = publisher.OrderedSend._send_in_halves

    def lose_the_broker(*arguments):
        with mock.down():
            send_in_halves(*arguments)

    monkeypatch.setattr(publisher.OrderedSend, "_send_in_halves", lose_the_broker)
    # When
    mock.refuse(PRODUCE, KafkaError.MSG_SIZE_TOO_LARGE)
    outcomes = transport.publish([OutgoingRecord(topic, value, b"k") for value in numbers(0, 8)])
    # Then
    assert None not in [outcome.error for outcome in outcomes]
    assert not any(outcome.is_final for outcome in outcomes)


def test_calls_at_once_have_a_producer_each(transport, topic):
    with ThreadPoolExecutor(8) as pool:
        calls = [
            pool.submit(publish, transport, topic, *numbers(20 * n, 20 * n + 20)) for n in range(24)
        ]
    for call in calls:
        call.result()
    made = [client for client in transport._publisher._free.queue if client is not None]
    assert 1 <= len(made) <= 4


@pytest.mark.long  # asserts how long it takes
def test_one_record_does_not_wait_for_a_second_poll(transport, topic):
    publish(transport, topic, b"connects")

    started = time.monotonic()
    publish(transport, topic, b"1")

    assert time.monotonic() - started < 0.5


@pytest.mark.large
def test_an_outage_fails_every_record_and_says_why(connect, mock, topic):
    transport = connect(**{"delivery.timeout.ms": 1000})

    def attempt():
        return transport.publish([OutgoingRecord(topic, b"value")])[0].error

    # Given a connection, which a new mock may take longer for than one record's timeout
    eventually(lambda: attempt() is None, 60, "a connection")

    with mock.down():
        # When the client has been refused a new one: until then nobody knows why
        eventually(lambda: attempt() and transport._publisher._refusals.last_error, 60, "a refusal")
        outcomes = transport.publish([OutgoingRecord(topic, value) for value in numbers(0, 3)])

    assert all("MSG_TIMED_OUT" in outcome.error for outcome in outcomes)
    assert "Connection refused" in outcomes[0].error or "TRANSPORT" in outcomes[0].error
    eventually(lambda: attempt() is None, 60, "recovery")


def test_a_fatal_error_replaces_the_producer(transport, topic):
    publish(transport, topic, b"1")
    free = transport._publisher._free
    first = free.get()
    fatal = KafkaError(KafkaError._FATAL, "broken for good", fatal=True)

    class Broken:
        def produce(self, *_, **__):
            raise KafkaException(fatal)

        def poll(self, _):
            return 0

    free.put(first._replace(producer=Broken()))
    (outcome,) = transport.publish([OutgoingRecord(topic, b"2")])

    assert "broken for good" in outcome.error
    publish(transport, topic, b"3")
    assert free.get().producer is not first.producer


def test_a_forked_child_publishes_with_a_producer_of_its_own(transport, topic, subscribe):
    publish(transport, topic, b"parent")

    child = os.fork()
    if child == 0:  # no test framework may unwind in here
        outcomes = transport.publish([OutgoingRecord(topic, b"child", b"k")])
        os._exit(0 if outcomes[0].error is None else 1)

    assert os.waitpid(child, 0)[1] == 0
    publish(transport, topic, b"parent again")
    assert values(read(subscribe(transport), 3)) == [b"parent", b"child", b"parent again"]


def test_a_subscription_forgotten_in_a_child_stays_open_in_the_parent(transport, topic, group):
    """The client's destructor would abort the child, whose threads it misses."""
    open_one = transport.subscribe([topic], group)
    join(open_one)

    child = os.fork()
    if child == 0:
        open_one.close()
        del open_one
        gc.collect()
        os._exit(0)

    assert os.waitpid(child, 0)[1] == 0
    publish(transport, topic, b"1")
    assert values(read(open_one, 1)) == [b"1"]
    open_one.close()


def test_a_subscription_that_was_forgotten_is_closed(transport, mock, topic, group, caplog):
    """The client's destructor alone may freeze the whole process."""
    publish(transport, topic, b"1")
    forgotten = transport.subscribe([topic], group)
    forgotten.acknowledge(read(forgotten, 1))

    del forgotten
    gc.collect()

    assert committed(mock, topic, group) == 1
    assert "never closed" in caplog.text


def test_the_group_is_left_before_the_client_is_closed(transport, topic, subscribe):
    """Closing it with partitions still in hand may freeze the whole process."""
    open_one = subscribe(transport)
    join(open_one)
    held = []
    spy = Spy(open_one, close=lambda: (held.append(open_one.assignment()), spy.client.close()))

    open_one.close()

    assert held == [[]]


# --- Committing -----------------------------------------------------------------------------------


def test_poll_commits_the_watermark_by_itself(transport, mock, topic, group, subscribe):
    publish(transport, topic, *numbers(0, 5))
    subscription = subscribe(transport)
    records = read(subscription, 5)

    subscription.acknowledge(records[:2] + records[3:])

    def commits():
        assert subscription.poll(10, 0.05) == []
        return committed(mock, topic, group) == 2

    eventually(commits, 10, "offset 2 committed, before the unsettled record")


def test_lost_partitions_are_not_committed(connect, mock, topic, group, subscribe, monkeypatch):
    transport = connect(
        **{
            "max.poll.interval.ms": 1000,
            "commit_interval": timedelta(minutes=1),
        }
    )
    publish(transport, topic, *numbers(0, 3))
    lost = []
    first = subscribe(
        transport, on_revoked=lambda tps, was_lost: lost.append((list(tps), was_lost))
    )
    first.acknowledge(read(first, 3))
    commits = []
    monkeypatch.setattr(first._committer, "now", lambda *arguments: commits.append(arguments))
    time.sleep(1.6)  # sleep: past max.poll.interval.ms, which nothing but time can reach

    eventually(lambda: (first.poll(0, 0.05), lost)[1], 10, "the partition was lost")

    assert lost == [([TopicPartition(topic, 0)], True)]
    assert commits == []
    assert committed(mock, topic, group) < 0
    assert values(read(first, 3)) == numbers(0, 3)


def test_a_partition_lost_while_it_was_paused_is_read_once_it_is_back(connect, topic, subscribe):
    """The client remembers a pause beyond the assignment."""
    transport = connect(**{"max.poll.interval.ms": 1000})
    publish(transport, topic, *numbers(0, 3))
    lost = []
    open_one = subscribe(transport, on_revoked=lambda tps, was_lost: lost.append(was_lost))
    read(open_one, 3)
    open_one.pause(open_one.assignment())
    assert open_one.poll(0, 0.05) == []
    time.sleep(1.6)  # sleep: past max.poll.interval.ms, which nothing but time can reach
    eventually(lambda: (open_one.poll(0, 0.05), lost)[1], 10, "the partition was lost")

    open_one.resume([TopicPartition(topic, 0)])

    assert lost == [True]
    assert values(read(open_one, 3)) == numbers(0, 3)


@pytest.mark.large
@pytest.mark.parametrize(
    "code",
    [
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.NOT_COORDINATOR,
        KafkaError.OFFSET_METADATA_TOO_LARGE,
    ],
)
def test_a_refused_commit_is_survived_and_made_up_for(
    transport, mock, topic, group, subscribe, code
):
    publish(transport, topic, *numbers(0, 3))
    subscription = subscribe(transport)
    records = read(subscription, 3)
    mock.refuse(OFFSET_COMMIT, code)

    subscription.acknowledge(records)
    subscription.flush()

    def commits():
        subscription.acknowledge(subscription.poll(10, 0.05))
        return committed(mock, topic, group) == 3

    eventually(commits, 15, "the commit was repeated")


def test_a_failed_commit_is_reported(transport, mock, topic, subscribe):
    publish(transport, topic, b"1")
    subscription = subscribe(transport)
    records = read(subscription, 1)
    mock.refuse(OFFSET_COMMIT, KafkaError.OFFSET_METADATA_TOO_LARGE)

    subscription.acknowledge(records)
    subscription.flush()

    assert "commit failed" in subscription.last_error
    eventually(
        lambda: subscription.poll(0, 0.05) == [] and subscription.last_error is None, 10, "healthy"
    )


@pytest.mark.large
def test_closing_while_a_revocation_waits_does_not_hang(connect, topic, group):
    transport = connect(**{"partition.assignment.strategy": "range"})
    first = transport.subscribe([topic], group)
    join(first)
    second = transport.subscribe([topic], group)
    for _ in range(25):
        second.poll(0, 0.02)

    first.close()
    second.close()


# --- Callbacks that fail, polls that are torn -----------------------------------------------------


def fail(*_):
    raise RuntimeError("a callback that fails")


def test_failing_callbacks_of_the_project_lose_nothing(connect, topic, subscribe):
    transport = connect(
        **{
            "statistics.interval.ms": 5,
            "stats_cb": fail,
            "error_cb": fail,
            "throttle_cb": fail,
        }
    )
    publish(transport, topic, *numbers(0, 3000))
    subscription = subscribe(transport, on_assigned=fail, on_revoked=fail)

    assert values(read(subscription, 3000, max_records=50)) == numbers(0, 3000)


@pytest.mark.large
def test_an_outage_is_logged_in_a_few_lines(transport, mock, subscribe, caplog):
    caplog.set_level(logging.INFO, "kjo_django.kafka")
    open_one = subscribe(transport)
    join(open_one)
    caplog.clear()

    with mock.down():
        for _ in range(40):
            open_one.poll(10, 0.05)

    assert 0 < len(caplog.records) < 15


def test_a_failing_log_handler_loses_nothing(connect, topic, subscribe):
    class Broken(logging.Filter):
        def filter(self, _):
            fail()

    logger = logging.getLogger("kjo_django.kafka")
    broken = Broken()
    transport = connect(debug="cgrp")
    publish(transport, topic, *numbers(0, 300))
    logger.addFilter(broken)
    logger.setLevel(logging.DEBUG)
    try:
        subscription = subscribe(transport)
        assert values(read(subscription, 300, max_records=50)) == numbers(0, 300)
    finally:
        logger.removeFilter(broken)
        logger.setLevel(logging.NOTSET)


def test_a_poll_that_is_torn_apart_loses_nothing(transport, topic, subscribe, monkeypatch):
    publish(transport, topic, *numbers(0, 200))
    records = []
    open_one = subscribe(transport)
    records += read(open_one, 20, max_records=20)
    real, calls = reading.record_of, iter(range(1, 1000))

    def interrupted(*arguments):
        if next(calls) in (7, 60):
            raise KeyboardInterrupt
        return real(*arguments)

    monkeypatch.setattr(reading, "record_of", interrupted)
    interrupts = []

    def all_read():
        try:
            records.extend(open_one.poll(50, 0.05))
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
        return len(records) >= 200

    eventually(all_read, 20, "200 records")

    assert len(interrupts) == 2
    assert values(records) == numbers(0, 200)


def test_an_interrupt_inside_a_callback_is_raised_and_loses_nothing(transport, topic, subscribe):
    publish(transport, topic, *numbers(0, 50))
    raised = []

    def interrupt(_):
        if not raised:
            raised.append(True)
            raise KeyboardInterrupt

    open_one = subscribe(transport, on_assigned=interrupt)
    with pytest.raises(KeyboardInterrupt):
        read(open_one, 50)

    assert values(read(open_one, 50)) == numbers(0, 50)


def test_a_batch_the_client_failed_to_return_is_read_again(transport, topic, subscribe):
    publish(transport, topic, *numbers(0, 100))
    open_one = subscribe(transport)
    records = read(open_one, 5, max_records=5)
    failures = iter([True, True])

    def consume(wanted, timeout):
        messages = spy.client.consume(wanted, timeout)
        if next(failures, False):
            raise KafkaException(KafkaError(KafkaError._FAIL, "the batch is gone"))
        return messages

    spy = Spy(open_one, consume=consume)
    records += read(open_one, 100 - len(records), max_records=40)

    assert values(records) == numbers(0, 100)


def test_records_of_an_assignment_made_during_the_call_are_not_trusted(
    transport, mock, topic, group, subscribe
):
    """A batch may hold records from before a partition went and came back in one call: they may lie
    beyond the committed offset, and to settle them first would skip the ones before."""
    publish(transport, topic, *numbers(0, 100))
    open_one = subscribe(transport)
    open_one.acknowledge(read(open_one, 10, max_records=10)[:4])
    pending = iter([True])

    def consume(wanted, timeout):
        messages = spy.client.consume(wanted, timeout)
        if next(pending, False):
            partition = [KafkaPartition(topic, 0)]
            open_one._revoke(spy.client, partition)
            open_one._assign(spy.client, partition)
        return messages

    spy = Spy(open_one, consume=consume)
    records = read(open_one, 96, max_records=40)

    assert values(records) == numbers(4, 100)


# --- Pausing, the stash, waking -------------------------------------------------------------------


@pytest.mark.large
def test_polling_for_nothing_keeps_a_bounded_stash(transport, topic, subscribe, monkeypatch):
    monkeypatch.setattr(reading, "STASH_RECORDS", 50)
    contents = numbers(0, 2000)
    publish(transport, topic, *contents)
    open_one = subscribe(transport)
    join(open_one)
    taken = []

    for _ in range(5):
        for _ in range(3):
            assert open_one.poll(0, 0.1) == []
            assert len(open_one._reading._stash) <= 51
        taken += open_one.poll(30, 0.1)
    taken += read(open_one, 2000 - len(taken), max_records=200)

    assert values(taken) == contents


def test_the_stash_of_a_paused_partition_is_handed_out_after_the_resume(
    transport, topic, subscribe
):
    publish(transport, topic, *numbers(0, 20))
    open_one = subscribe(transport)
    join(open_one)
    eventually(lambda: open_one.poll(0, 0.05) == [] and open_one._reading._stash, 10, "a stash")
    partitions = open_one.assignment()

    open_one.pause(partitions)
    assert open_one.poll(100, 0.2) == []
    open_one.resume(partitions)

    assert values(read(open_one, 20)) == numbers(0, 20)


def test_a_partition_silent_after_a_resume_is_read_again(transport, topic, subscribe, monkeypatch):
    monkeypatch.setattr(reading, "VERIFY_AFTER", 0.3)
    publish(transport, topic, *numbers(0, 10))
    open_one = subscribe(transport)
    records = read(open_one, 5, max_records=5)
    partitions = open_one.assignment()
    open_one.pause(partitions)
    open_one.poll(0, 0.05)
    spy = Spy(open_one, resume=lambda _: None)  # the resume is lost, as in librdkafka#5591
    open_one.resume(partitions)
    open_one.poll(0, 0.05)
    spy.methods.clear()

    records += read(open_one, 10 - len(records))

    assert values(records) == numbers(0, 10)


def test_a_log_that_is_another_is_read_from_where_it_begins(
    transport, mock, topic, group, subscribe, caplog
):
    """Promise 1. A topic that is deleted and made again, or truncated since its leader was lost,
    has new records at offsets that have been read: the client goes back to them by itself."""
    # Given
    publish(transport, topic, *numbers(0, 5))
    open_one = subscribe(transport)
    before = read(open_one, 5)
    open_one.acknowledge(before[:4])
    # When
    open_one._consumer.seek(KafkaPartition(topic, 0, 0))
    # Then
    after = read(open_one, 5)
    assert values(after) == numbers(0, 5)
    assert "is read from offset 0" in caplog.text
    # And what still ends of the former log moves nothing
    open_one.acknowledge(after[:2])
    open_one.acknowledge(before[4:])
    open_one.close()
    assert committed(mock, topic, group) == 2


def test_wake_takes_less_than_a_tenth_of_a_second(transport, subscribe):
    open_one = subscribe(transport)
    join(open_one)
    woken, delays = [], []

    def wake():
        woken.append(time.monotonic())
        open_one.wake()

    for _ in range(5):
        timer = threading.Timer(0.15, wake)
        timer.start()
        open_one.poll(10, 10)
        delays.append(time.monotonic() - woken[-1])
        timer.join()

    assert sorted(delays)[2] < 0.1


# --- Outages --------------------------------------------------------------------------------------


def test_an_outage_is_reported_and_over_without_help(transport, mock, topic, subscribe):
    publish(transport, topic, *numbers(0, 3))
    open_one = subscribe(transport)
    open_one.acknowledge(read(open_one, 3))

    with mock.down():
        eventually(
            lambda: open_one.poll(10, 0.05) == [] and open_one.last_error, 15, "an error is shown"
        )
    eventually(
        lambda: open_one.poll(10, 0.05) == [] and open_one.last_error is None, 20, "it recovered"
    )

    publish(transport, topic, b"3")
    assert values(read(open_one, 1)) == [b"3"]


@pytest.mark.large
def test_an_outage_has_one_text_however_long_it_lasts(transport, mock, topic, subscribe):
    """What a worker has not told of yet it tells: by each other text, a line a second."""
    publish(transport, topic, b"1")
    open_one = subscribe(transport)
    read(open_one, 1)
    told = []

    with mock.down():

        def has_lasted():
            open_one.poll(1, 0.05)
            if open_one.last_error is not None:
                told.append((open_one.last_error, time.monotonic()))
            return told and told[-1][1] - told[0][1] > 3

        eventually(has_lasted, 30, "an outage of three seconds")

    assert len({text for text, _ in told if not text.startswith("commit failed")}) == 1


def test_subscribing_during_an_outage_works_once_it_is_over(transport, mock, topic, subscribe):
    publish(transport, topic, b"1")
    with mock.down():
        open_one = subscribe(transport)
        for _ in range(10):
            assert open_one.poll(10, 0.05) == []

    assert values(read(open_one, 1)) == [b"1"]


def test_a_consumer_that_failed_for_good_is_replaced(transport, topic, subscribe):
    publish(transport, topic, *numbers(0, 3))
    lost = []
    open_one = subscribe(transport, on_revoked=lambda tps, was_lost: lost.append(was_lost))
    read(open_one, 3)
    first = open_one._consumer

    open_one._health.note(KafkaError(KafkaError._FATAL, "fenced", fatal=True))

    assert values(read(open_one, 3)) == numbers(0, 3)
    assert open_one._consumer is not first
    assert lost == [True]


def no_answer(*_, **__):
    raise KafkaException(KafkaError(KafkaError._TRANSPORT))


def test_a_consumer_that_forgot_its_brokers_is_replaced(transport, mock, topic, group, monkeypatch):
    """librdkafka#5301: a broker that starts names no brokers, and the client never connects again.
    It reports no error for that."""
    # Given
    for name in ("IDLE_CHECK_INTERVAL", "CHECK_INTERVAL", "LOST_AFTER"):
        monkeypatch.setattr(subscription, name, 0.1)
    # When a client never gets partitions, nor an answer, while the cluster is there
    missing = f"{topic}-later"
    open_one = transport.subscribe([missing], group)
    with contextlib.closing(open_one):
        closed = threading.Event()
        spy = Spy(open_one, list_topics=no_answer, close=closed.wait)
        eventually(lambda: open_one.poll(1, 0.05) or open_one._consumer is not spy, 20, "it left")
        # Then another one reads, whether or not the first one can be closed
        mock.create_topic(missing, 1)
        publish(transport, missing, *numbers(0, 3))
        assert values(read(open_one, 3)) == numbers(0, 3)
    closed.set()
    spy.client.close()


LEAVES_WITH_A_PARTITION = """
import os
import sys

from kjo_django.transports.kafka import KafkaTransport, subscription
from tests.mock_kafka import MockKafka
from tests.unit.transports.kafka.test_kafka import QUICK, Spy, join

subscription.LEAVE_TIMEOUT = 0.2
mock = MockKafka()
mock.create_topic("orders", 1)
transport = KafkaTransport("test", {"bootstrap.servers": mock.bootstrap_servers, **QUICK})
member = transport.subscribe(["orders"], "group")
join(member)
Spy(member, poll=lambda _: None)
if sys.argv[1] == "silent":
    member._committer.is_silent = True
member.close()
os._exit(0)  # librdkafka's own end of a mock cluster would wait for the client that is left
"""


@pytest.mark.parametrize("broker", ["answers", "silent"])
def test_a_client_that_keeps_its_partitions_is_not_closed(broker):
    """librdkafka#4884: to close it locks the interpreter for ever, so a process of its own does."""
    command = [sys.executable, "-c", LEAVES_WITH_A_PARTITION, broker]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)

    assert ended.returncode == 0, ended.stderr
    assert "the client did not give its partitions back in time" in ended.stderr


def test_a_consumer_is_kept_while_the_cluster_answers_nobody(
    transport, mock, subscribe, monkeypatch
):
    for name in ("IDLE_CHECK_INTERVAL", "CHECK_INTERVAL", "LOST_AFTER", "OTHER_TIMEOUT"):
        monkeypatch.setattr(subscription, name, 0.1)
    asked = []
    other = subscription.Health._is_answered_to_another
    monkeypatch.setattr(
        subscription.Health, "_is_answered_to_another", lambda self: asked.append(other(self))
    )
    with mock.down():
        open_one = subscribe(transport)
        first = open_one._consumer
        eventually(lambda: open_one.poll(10, 0.05) or len(asked) > 1, 20, "another client asked")

    assert open_one._consumer is first
    assert not any(asked)


@pytest.mark.large
def test_a_member_without_partitions_is_kept_while_the_cluster_answers(
    transport, topic, subscribe, monkeypatch
):
    # Given one partition for two members
    for name in ("IDLE_CHECK_INTERVAL", "CHECK_INTERVAL", "LOST_AFTER"):
        monkeypatch.setattr(subscription, name, 0.1)
    members = subscribe(transport), subscribe(transport)
    asked = []
    spies = [Spy(each, list_topics=None) for each in members]
    for spy in spies:
        spy.methods["list_topics"] = lambda spy=spy, **options: (
            asked.append(spy) or spy.client.list_topics(**options)
        )
    # When the one that has none asks again and again
    eventually(
        lambda: [each.poll(10, 0.02) for each in members] and len(asked) > 20, 20, "questions"
    )
    # Then nobody is replaced
    assert [each._consumer for each in members] == spies


def test_a_producer_is_replaced_after_a_publish_nobody_answered(connect, mock, topic):
    """It may have forgotten its brokers, and would never connect again (librdkafka#5301)."""
    transport = connect(producer={"delivery.timeout.ms": 300})
    with mock.down():
        (refused,) = transport.publish([OutgoingRecord(topic, b"1")])

    assert refused.error
    assert set(transport._publisher._free.queue) == {None}


def test_what_the_client_refuses_is_one_error_and_no_second_one(
    connect, topic, monkeypatch, caplog
):
    # Given
    transport = connect(consumer={"session.timeout.ms": "soon"})
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    # When
    with pytest.raises(ImproperlyConfigured, match=r"session\.timeout\.ms"):
        transport.subscribe([topic], "group")
    gc.collect()
    # Then
    assert unraisable == []
    assert "never closed" not in caplog.text


def test_questions_nobody_answered_are_asked_by_another_client(transport, topic, group):
    """The client may have forgotten its brokers, and would get no answer (librdkafka#5301)."""
    publish(transport, topic, *numbers(0, 3))
    assert sum(transport.lag([topic], group).values()) == 3
    for name in ("list_topics", "committed"):
        # Given
        questions = transport._questions_of(group)
        first = questions._consumer
        closed = threading.Event()
        asked = Replaced(first, close=closed.set, **{name: no_answer})
        questions._consumer = asked
        # When
        with pytest.raises(PublishError):
            transport.lag([topic], group)
        # Then
        assert sum(transport.lag([topic], group).values()) == 3
        assert questions._consumer not in (None, first, asked)
        assert closed.wait(PATIENCE)
        first.close()


def test_a_probe_names_what_answered_or_why_nothing_did(transport, mock):
    assert mock.bootstrap_servers in transport.probe(5)


def test_a_header_name_that_is_not_text_holds_nothing_up(transport, mock, topic, subscribe):
    """Read often enough for the interpreter to specialize the call, it killed the process."""
    publish(transport, topic, *numbers(0, 100), headers={"a": b"b"})
    for _ in range(20):
        mock.publish_with_header(topic, b"foreign", b"caf\xe9")
    publish(transport, topic, b"ours", headers={"a": b"b"})

    *before, ours = read(subscribe(transport), 121)

    assert ours.headers == before[99].headers == {"a": b"b"}
    for record in before[100:]:
        assert record.value == b"foreign"
        assert list(record.headers) == [reading.UNREADABLE_HEADERS]


@pytest.mark.parametrize("milliseconds", [-1, 0, 1_700_000_000_123, 2**62, -(2**62)])
def test_any_timestamp_is_survived(milliseconds):
    found = timestamp_of(milliseconds)

    assert found is None or found.utcoffset() is not None


@pytest.mark.parametrize("milliseconds", [-62_135_596_800_000, 253_402_300_799_000])
@pytest.mark.parametrize("zone", ["Asia/Tokyo", "America/New_York"])
def test_a_timestamp_can_be_shown_in_every_time_zone(milliseconds, zone):
    """A row that took it over as its time of creation broke every page that lists it."""
    found = timestamp_of(milliseconds)

    assert found is None or found.astimezone(ZoneInfo(zone))


def test_a_revocation_ends_the_epoch_whatever_the_commit_raises(
    transport, topic, subscribe, monkeypatch
):
    publish(transport, topic, b"1")
    open_one = subscribe(transport)
    (record,) = read(open_one, 1)

    def fail(*arguments):
        raise RuntimeError("not from the client")

    monkeypatch.setattr(open_one._committer, "now", fail)
    with pytest.raises(RuntimeError):
        open_one._revoke(open_one._consumer, [KafkaPartition(topic, 0)])

    assert not open_one.holds(record)
    monkeypatch.undo()
