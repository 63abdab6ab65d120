"""What the database transport knows of messages that are begun.

On every database of the transport, since each has its own statements; in the small tier, in which
SQLite is, the random comparison draws what no test lists.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from kjo_django.engine.handler.connections import is_busy
from kjo_django.messages import headers as names
from kjo_django.models import TransportMessage, TransportRun
from kjo_django.transports.base import OutgoingRecord, Record
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.database.subscription import DatabaseSubscription
from tests.clocks import SetClock

LEASE = timedelta(seconds=30)


@pytest.fixture
def transport(alias: str) -> DatabaseTransport:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    transport.clock = SetClock()
    return transport


@pytest.fixture
def clock(transport: DatabaseTransport) -> SetClock:
    assert isinstance(transport.clock, SetClock)
    return transport.clock


Subscribe = Callable[[], DatabaseSubscription]


@pytest.fixture
def subscribe(transport: DatabaseTransport) -> Iterator[Subscribe]:
    opened: list[DatabaseSubscription] = []

    def subscribe() -> DatabaseSubscription:
        opened.append(transport.subscribe(["t"], "g", lease=LEASE))
        return opened[-1]

    yield subscribe
    for subscription in opened:
        subscription.close()


def publish(transport: DatabaseTransport, *ids: str) -> None:
    headers = [{names.ID: id.encode()} for id in ids]
    transport.publish([OutgoingRecord("t", b"{}", headers=each) for each in headers])


def let_lease_expire(consumer: DatabaseSubscription, clock: SetClock) -> None:
    """Let a consumer be silent for too long, as one that is frozen or has died."""
    clock.advance(LEASE.total_seconds() + 1)


def begin(consumer: DatabaseSubscription, records: Sequence[Record]) -> list[int]:
    return consumer.begin(records, "worker")


def test_what_a_consumer_had_begun_when_it_died_is_begun_a_second_time(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given a consumer that dies with one of two messages begun
    publish(transport, "begun", "waiting")
    dead, heir = subscribe(), subscribe()
    first, _second = dead.poll(10, 0.0)
    assert begin(dead, [first]) == [1]
    # When another one has them
    let_lease_expire(dead, clock)
    records = heir.poll(10, 0.0)
    # Then
    assert dict(zip(map(id_of, records), begin(heir, records), strict=True)) == {
        "begun": 2,
        "waiting": 1,
    }
    # And the next one knows of both deaths, also where it waited in between
    last = subscribe()
    let_lease_expire(heir, clock)
    between = last.poll(10, 0.0)
    let_lease_expire(last, clock)
    records = subscribe().poll(10, 0.0)
    assert len(between) == len(records) == 2
    assert {id_of(each): each.deliveries for each in records} == {"begun": 2, "waiting": 1}


def test_what_was_put_off_is_not_counted(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    publish(transport, "a", "b", "c")
    first, second = subscribe(), subscribe()
    records = first.poll(10, 0.0)
    begin(first, records)
    # When one is put off, one is given back and one counts although it has no outcome
    first.end(records, [0, 0, 1])
    assert first.begin([records[2]], "worker") == [2]
    first.end([records[2]], [1])
    first.release([records[1]])
    assert [each.deliveries for each in second.poll(10, 0.0)] == [0]
    let_lease_expire(first, clock)
    # Then
    counts = {id_of(each): each.deliveries for each in subscribe().poll(10, 0.0)}
    assert counts == {"a": 0, "b": 0, "c": 1}


def test_a_message_that_is_begun_again_here_is_not_counted_once_more(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    """Its group runs again after an outage."""
    publish(transport, "a")
    consumer = subscribe()
    records = consumer.poll(10, 0.0)
    assert begin(consumer, records) == begin(consumer, records) == [1]


@pytest.mark.parametrize("renews", [False, True], ids=["at once", "after a renewal"])
def test_messages_that_others_have_by_now_are_not_begun(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock, renews: bool
) -> None:
    """They stay in hand until they are settled: what is behind them with their key waits."""
    # Given a consumer that was frozen
    publish(transport, "a")
    frozen, other = subscribe(), subscribe()
    (record,) = records = frozen.poll(10, 0.0)
    let_lease_expire(frozen, clock)
    taken = other.poll(10, 0.0)
    assert len(taken) == 1
    if renews:
        frozen.poll(0, 0.0)
    # When, then
    assert begin(frozen, records) == [0]
    assert frozen.holds(record) and frozen.has_lost(record)
    assert not transport.running()
    # And when the other one has settled it, it is forgotten
    other.acknowledge(taken)
    other.flush()
    assert begin(frozen, records) == [0]
    assert not frozen.holds(record)


def test_a_message_that_comes_back_is_begun_and_handed_out_once(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given a consumer that was frozen, and another one that has given back what it took over
    publish(transport, "a")
    frozen, other = subscribe(), subscribe()
    records = frozen.poll(10, 0.0)
    let_lease_expire(frozen, clock)
    other.release(other.poll(10, 0.0))
    # When
    again = frozen.poll(10, 0.0)
    # Then
    assert again == []
    assert not frozen.has_lost(records[0])
    assert begin(frozen, records) == [1]


def test_it_costs_one_statement_whatever_their_number(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, *map(str, range(30)))
    consumer = subscribe()
    records = consumer.poll(30, 0.0)
    begin(consumer, records[:1])  # the first time the row is inserted
    consumer.acknowledge(records[:1])
    consumer.flush()
    with CaptureQueriesContext(connections[alias]) as captured:
        begin(consumer, records[1:])
    # What begins a transaction by itself goes along with the statement on PostgreSQL
    (sent,) = (each["sql"] for each in captured if "kjo_" in each["sql"])
    assert sent.count("UPDATE kjo_transport_run") == 1


def starts_at_once(consumer: DatabaseSubscription, most: int = 10) -> None:
    """Let a consumer begin what it claims, which it does once it has a row to write it to."""
    consumer.begin_at_once("worker", lambda: most)
    (record,) = consumer.poll(1, 0.0)
    begin(consumer, [record])
    consumer.acknowledge([record])
    consumer.flush()


def test_what_starts_as_soon_as_it_is_claimed_is_begun_by_its_claim(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given a consumer with a free lane
    publish(transport, "before", "a")
    consumer = subscribe()
    starts_at_once(consumer)
    # When
    records = consumer.poll(10, 0.0)
    # Then it is begun, and to begin it writes nothing
    assert transport.running() == {"a": "worker"}
    with CaptureQueriesContext(connections[alias]) as captured:
        assert begin(consumer, records) == [1]
    assert not captured.captured_queries
    # And its death is counted
    let_lease_expire(consumer, clock)
    assert [each.deliveries for each in subscribe().poll(10, 0.0)] == [1]


@pytest.mark.postgres
def test_a_claim_that_begins_is_one_round_trip_on_postgresql(postgres_alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": postgres_alias})
    transport.clock = SetClock()
    with closing(transport.subscribe(["t"], "g", lease=LEASE)) as consumer:
        publish(transport, "before")
        starts_at_once(consumer)
        publish(transport, "a")
        consumer.resume([])  # it claims without a look
        with CaptureQueriesContext(connections[postgres_alias]) as captured:
            assert begin(consumer, consumer.poll(10, 0.0)) == [1]
        told = (each["sql"] for each in captured)
        assert len([each for each in told if each not in ("BEGIN", "COMMIT")]) == 1
        assert transport.running() == {"a": "worker"}


@pytest.mark.parametrize(
    ("most", "ids", "keys"),
    [
        (1, ["a", "b"], [None, None]),
        (2, ["a", "b"], [b"k", b"k"]),
        (2, ["a", "b"], [b"k", b"l"]),
    ],
    ids=["more than lanes are free", "one after the other", "two with a key"],
)
def test_what_may_have_to_wait_is_not_begun_by_its_claim(
    transport: DatabaseTransport,
    subscribe: Subscribe,
    most: int,
    ids: list[str],
    keys: list[bytes | None],
) -> None:
    publish(transport, "before")
    consumer = subscribe()
    starts_at_once(consumer, most)
    for id, key in zip(ids, keys, strict=True):
        transport.publish([OutgoingRecord("t", b"{}", key=key, headers={names.ID: id.encode()})])
    assert len(consumer.poll(10, 0.0)) == 2
    assert not transport.running()


def test_the_key_of_a_job_that_asks_for_no_order_is_none(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    """It is the job's id."""
    publish(transport, "before")
    consumer = subscribe()
    starts_at_once(consumer, 2)
    for id in (b"a", b"b"):
        headers = {names.ID: id, names.JOB_ID: id}
        transport.publish([OutgoingRecord("t", b"{}", key=id, headers=headers)])
    assert len(consumer.poll(10, 0.0)) == 2
    assert set(transport.running()) == {"a", "b"}


def test_a_key_of_which_something_may_run_is_not_begun_by_its_claim(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, "before")
    consumer = subscribe()
    starts_at_once(consumer)
    for id in ("a", "b"):
        transport.publish([OutgoingRecord("t", b"{}", key=b"k", headers={names.ID: id.encode()})])
        assert len(consumer.poll(10, 0.0)) == 1
    assert set(transport.running()) == {"a"}


def test_what_was_begun_before_is_not_begun_by_its_claim(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    """It may have killed its worker, so it waits until it can run alone."""
    publish(transport, "a")
    dead = subscribe()
    begin(dead, dead.poll(10, 0.0))
    heir = subscribe()
    publish(transport, "before")
    starts_at_once(heir)
    let_lease_expire(dead, clock)
    assert [each.deliveries for each in heir.poll(10, 0.0)] == [1]
    assert not transport.running()


def test_what_is_released_before_it_begins_is_not_counted_where_it_waits_next(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    publish(transport, "before", "a", "b")
    consumer = subscribe()
    starts_at_once(consumer)
    consumer.release(consumer.poll(1, 0.0))
    assert not transport.running()
    # When it comes back with more than can start
    consumer.begin_at_once("worker", lambda: 1)
    assert len(consumer.poll(10, 0.0)) == 2
    let_lease_expire(consumer, clock)
    # Then
    assert [each.deliveries for each in subscribe().poll(10, 0.0)] == [0, 0]


def test_what_waits_when_its_consumer_is_closed_goes_to_others_uncounted(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, "before", "a")
    consumer, other = subscribe(), subscribe()
    starts_at_once(consumer)
    assert len(consumer.poll(10, 0.0)) == 1
    consumer.close()
    assert [(id_of(each), each.deliveries) for each in other.poll(10, 0.0)] == [("a", 0)]
    assert not TransportRun.objects.using(alias).exists()


def test_what_waits_after_all_is_not_counted_when_what_runs_kills_its_worker(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given two pollers of a worker that has one free lane
    one = subscribe()
    with closing(transport.subscribe(["u"], "g", lease=LEASE)) as other:
        for consumer, topic in ((one, "t"), (other, "u")):
            for id in (b"before", topic.encode()):
                transport.publish([OutgoingRecord(topic, b"{}", headers={names.ID: id})])
            starts_at_once(consumer, 1)
        # When both claim before either has put what it has got
        runs, waits = one.poll(10, 0.0), other.poll(10, 0.0)
        assert (len(runs), len(waits)) == (1, 1)
        begin(one, runs)
        clock.advance(5)
        other.poll(0, 0.0)
        # Then
        assert transport.running() == {"t": "worker"}
        assert begin(other, waits) == [1]
        assert transport.running() == {"t": "worker", "u": "worker"}


def test_what_cannot_begin_beside_others_is_not_begun_by_its_claim(
    transport: DatabaseTransport, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given one message that its claim has begun, and one that it has not
    publish(transport, "before", "a")
    consumer, other = subscribe(), subscribe()
    starts_at_once(consumer)
    records = consumer.poll(10, 0.0)
    consumer.begin_at_once("worker", lambda: 0)
    publish(transport, "b")
    records += consumer.poll(10, 0.0)
    # When they begin together, and that cannot be noted
    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(consumer._runs, "store", raising)
        begin(consumer, records)
    consumer.close()
    # Then neither runs
    assert {id_of(each): each.deliveries for each in other.poll(10, 0.0)} == {"a": 0, "b": 0}


def test_what_is_released_during_an_outage_is_not_begun(
    transport: DatabaseTransport,
    subscribe: Subscribe,
    clock: SetClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(transport, "before", "a", "b")
    consumer = subscribe()
    starts_at_once(consumer)
    records = {id_of(each): each for each in consumer.poll(10, 0.0)}
    begin(consumer, [records["a"]])
    # When the database refuses once
    refusals, store = [OperationalError("away")], consumer._runs.store

    def refuse_once(*arguments: Any) -> None:
        if refusals:
            raise refusals.pop()
        store(*arguments)

    monkeypatch.setattr(consumer._runs, "store", refuse_once)
    consumer.release([records["b"]])
    # Then it does not count as begun where it waits next
    consumer.begin_at_once("worker", lambda: 0)
    assert [id_of(each) for each in consumer.poll(10, 0.0)] == ["b"]
    assert transport.running() == {"a": "worker"}


@pytest.mark.parametrize("id", ["6ba7b810-9dad-11d1-80b4-00c04fd430c8:2", "order-1"])
def test_what_a_worker_of_an_earlier_version_runs_is_told(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe, id: str
) -> None:
    """It names messages by their ids as they are."""
    publish(transport, id)
    consumer = subscribe()
    (record,) = consumer.poll(1, 0.0)
    begin(consumer, [record])
    messages = json.dumps({record.offset: id})
    TransportRun.objects.using(alias).update(messages=messages)
    assert transport.running() == {id: "worker"}


def test_a_claim_that_was_not_answered_has_begun_nothing(
    transport: DatabaseTransport,
    subscribe: Subscribe,
    clock: SetClock,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publish(transport, "before", "a", "b")
    consumer = subscribe()
    starts_at_once(consumer)
    # When a claim takes effect, and its answer is lost
    name = "_claim_step_by_step" if consumer._statements is None else "_claim_at_once"
    claim = getattr(consumer, name)

    def lose_answer(*arguments: Any) -> Any:
        claim(*arguments)
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(consumer, name, lose_answer)
        assert consumer.poll(1, 0.0) == []
    assert set(transport.running()) == {"a"}
    # Then it comes again, and counts only if it begins
    clock.advance(1)
    consumer.begin_at_once("worker", lambda: 1)
    assert len(consumer.poll(10, 0.0)) == 2
    assert not transport.running()
    let_lease_expire(consumer, clock)
    assert [each.deliveries for each in subscribe().poll(10, 0.0)] == [0, 0]


def test_a_claim_that_takes_effect_when_nobody_waits_for_its_answer_keeps_nothing(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    """Its server process waited for a lock while the connection broke."""
    publish(transport, "runs", "claimed late")
    consumer, other = subscribe(), subscribe()
    begin(consumer, consumer.poll(1, 0.0))
    rows = TransportMessage.objects.using(alias).filter(lease_token="")
    rows.update(lease_token=consumer._token, lease_expires_at=clock.now() + LEASE)
    # When its leases are renewed
    for _ in range(2):
        clock.advance(LEASE.total_seconds() / 2)
        consumer.poll(0, 0.0)
    # Then
    assert [id_of(each) for each in other.poll(10, 0.0)] == ["claimed late"]


def test_what_comes_back_and_waits_here_is_not_begun_by_its_claim(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given a consumer that was frozen, and another one that has given back what it took over
    publish(transport, "before", "a")
    frozen, other = subscribe(), subscribe()
    starts_at_once(frozen, 1)
    frozen.begin_at_once("worker", lambda: 0)
    records = frozen.poll(10, 0.0)
    let_lease_expire(frozen, clock)
    other.release(other.poll(10, 0.0))
    # When it comes back as what could start
    frozen.begin_at_once("worker", lambda: 1)
    assert frozen.poll(10, 0.0) == []
    frozen.poll(0, 0.0)
    # Then
    assert not transport.running()
    assert begin(frozen, records) == [1]


def test_what_runs_at_the_same_time_is_kept_apart(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    # Given two groups that run at the same time
    publish(transport, "a", "b", "c", "d")
    consumer = subscribe()
    a, b, c, d = consumer.poll(10, 0.0)
    begin(consumer, [a, b])
    begin(consumer, [c])
    assert set(transport.running()) == {"a", "b", "c"}
    # When one of them ends
    consumer.acknowledge([c])
    consumer.flush()
    # Then the next one takes its place
    begin(consumer, [d])
    assert transport.running() == dict.fromkeys("abd", "worker")
    assert TransportRun.objects.using(alias).count() == 2
    # And what is left of a group is not forgotten with the part that is put off
    consumer.end([a], [0])
    assert set(transport.running()) == {"b", "d"}


def test_only_what_is_asked_for_is_told(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    publish(transport, "a", "b", "c")
    consumer = subscribe()
    begin(consumer, consumer.poll(10, 0.0))
    assert transport.running(["a", "unknown"]) == {"a": "worker"}
    assert [len(transport.running(most=most)) for most in (2, 0)] == [2, 0]
    let_lease_expire(consumer, clock)
    assert not transport.running()


def test_what_cannot_be_noted_is_not_begun(
    transport: DatabaseTransport, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(transport, "a")
    consumer = subscribe()
    records = consumer.poll(10, 0.0)
    with monkeypatch.context() as patch, pytest.raises(OperationalError):
        patch.setattr(consumer._runs, "store", raising)
        begin(consumer, records)
    assert not transport.running()
    assert begin(consumer, records) == [1]


def test_tables_that_are_emptied_meanwhile_are_written_again(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, "a", "b")
    consumer = subscribe()
    first, second = consumer.poll(10, 0.0)
    begin(consumer, [first])
    consumer.acknowledge([first])
    consumer.flush()
    TransportRun.objects.using(alias).all().delete()
    begin(consumer, [second])
    assert set(transport.running()) == {"b"}


def test_what_still_runs_when_its_consumer_is_closed_goes_to_others_when_it_ends(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, "runs", "waits")
    consumer, other = subscribe(), subscribe()
    runs, _waits = records = consumer.poll(10, 0.0)
    begin(consumer, [runs])
    # When
    consumer.close()
    # Then the other one has only what waited
    assert [id_of(each) for each in other.poll(10, 0.0)] == ["waits"]
    assert begin(consumer, records) == [0, 0]
    assert set(transport.running()) == {"runs"}
    consumer.end([runs], [0])
    assert [(id_of(each), each.deliveries) for each in other.poll(10, 0.0)] == [("runs", 0)]
    assert not TransportRun.objects.using(alias).exists()


def test_what_begins_while_its_consumer_is_closed_does_not_begin(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others may have it by then."""
    publish(transport, "a")
    consumer, other = subscribe(), subscribe()
    records, store = consumer.poll(10, 0.0), consumer._runs.store
    taken: list[Record] = []

    def close_first(*arguments: Any) -> None:
        if not consumer._is_closed:
            consumer.close()
            taken.extend(other.poll(10, 0.0))
        store(*arguments)

    monkeypatch.setattr(consumer._runs, "store", close_first)
    assert begin(consumer, records) == [0]
    # Then the other one has it, and nobody else has begun it
    assert [id_of(each) for each in taken] == ["a"]
    assert not transport.running()
    assert begin(other, taken) == [1]


def test_of_whom_nobody_knows_that_he_has_died_nothing_is_counted(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    publish(transport, "of the dead", "of the living")
    heir = subscribe()
    for worker in ("dead", "living"):
        consumer = subscribe()
        consumer.begin(consumer.poll(1, 0.0), worker)
    clock.advance(LEASE.total_seconds() + 1)
    heir.ask_who_died(lambda workers: {*workers} & {"dead"})
    counts = {id_of(each): each.deliveries for each in heir.poll(10, 0.0)}
    assert counts == {"of the dead": 1, "of the living": 0}


def while_locked(change: Callable[..., object], *arguments: Any) -> None:
    """Make a change again for as long as SQLite's one writer is another, however busy the machine
    is: a lane waits, too."""
    while True:
        try:
            change(*arguments)
        except OperationalError as error:
            if not is_busy(error):
                raise
        else:
            return


def test_lanes_that_begin_and_end_at_the_same_time_keep_what_runs_apart(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    """Each lane has messages of its own, and keeps a table of what it has begun beside them."""
    lanes, each = 8, 6
    publish(transport, *(f"{lane}-{number}" for lane in range(lanes) for number in range(each)))
    consumer = subscribe()
    records = consumer.poll(lanes * each, 0.0)

    def run(lane: int) -> set[str]:
        draw = random.Random(lane)
        mine = {id_of(one): one for one in records if id_of(one).startswith(f"{lane}-")}
        begun: set[str] = set()
        try:
            for _ in range(30):
                new = draw.sample(
                    sorted(mine.keys() - begun), draw.randint(0, len(mine) - len(begun))
                )
                while_locked(consumer.begin, [mine[id] for id in new], "worker")
                begun.update(new)
                ended = draw.sample(sorted(begun), draw.randint(0, len(begun)))
                while_locked(consumer.end, [mine[id] for id in ended], [0] * len(ended))
                begun.difference_update(ended)
            return begun
        finally:
            connections.close_all()

    with ThreadPoolExecutor(lanes) as threads:
        begun = set().union(*threads.map(run, range(lanes)))
    assert set(transport.running()) == begun


def test_what_dead_consumers_have_left_is_deleted_a_day_later(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given one that has died long ago, and one whose job has run for as long
    publish(transport, "died", "runs")
    dead, living = subscribe(), subscribe()
    for consumer in (dead, living):
        begin(consumer, consumer.poll(1, 0.0))
    TransportMessage.objects.using(alias).filter(lease_token=dead._token).delete()
    for _ in range(25):
        clock.advance(3600)
        living._renew()
    # When
    subscribe()
    # Then
    left = TransportRun.objects.using(alias).values_list("consumer", flat=True)
    assert list(left) == [living._token]


@pytest.mark.promise("death-is-an-attempt")
@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_each_death_is_counted_and_nothing_else(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock, seed: int
) -> None:
    """Consumers begin, end, acknowledge, release, freeze and die as a seed draws it; a table of
    what each message must count is kept beside them."""
    draw = random.Random(seed)
    expected = dict.fromkeys(map(str, range(8)), 0)
    publish(transport, *expected)
    consumer, in_hand, begun = subscribe(), dict[str, Record](), set[str]()
    lanes = draw.choice((0, 2))
    consumer.begin_at_once("worker", lambda: lanes)

    def some(of: Sequence[str]) -> list[str]:
        return draw.sample(sorted(of), draw.randint(0, len(of)))

    for _ in range(40):
        match draw.choice(("poll", "begin", "begin", "end", "acknowledge", "release", "die")):
            case "poll":
                polled = consumer.poll(draw.randint(1, 8), 0.0)
                for record in polled:
                    in_hand[id_of(record)] = record
                    assert record.deliveries == expected[id_of(record)]
                if 0 < len(polled) <= lanes and {*transport.running()} - begun:
                    begun.update(map(id_of, polled))  # as soon as they were claimed
            case "begin":
                ids = some([*in_hand])
                found = begin(consumer, [in_hand[id] for id in ids]) if ids else []
                assert found == [expected[id] + 1 for id in ids]
                begun.update(ids)
            case "end":
                ids = some([*begun])
                counts = [draw.choice((0, expected[id], expected[id] + 1)) for id in ids]
                consumer.end([in_hand[id] for id in ids], counts)
                expected.update(zip(ids, counts, strict=True))
                begun.difference_update(ids)
            case "acknowledge":
                ids = some([*begun])[:1]
                consumer.acknowledge([in_hand.pop(id) for id in ids])
                consumer.flush()
                begun.difference_update(ids)
                for id in ids:
                    expected.pop(id)
            case "release":
                ids = some([*in_hand.keys() - begun])
                consumer.release([in_hand.pop(id) for id in ids])
            case "die":
                let_lease_expire(consumer, clock)
                expected.update((id, expected[id] + 1) for id in begun)
                consumer, in_hand, begun = subscribe(), {}, set()
                consumer.begin_at_once("worker", lambda: lanes)
        assert set(transport.running()) == begun


def id_of(record: Record) -> str:
    return names.text(record.headers, names.ID)


def raising(*arguments: Any, **options: Any) -> None:
    raise OperationalError("away")
