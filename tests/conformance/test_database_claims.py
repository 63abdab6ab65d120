"""Who gets which row, and when: the database transport's own promises."""

from __future__ import annotations

import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import OperationalError, connections, transaction
from django.db.models import JSONField, Value
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord, Record, TopicPartition
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.database.subscription import (
    URGENT_INTERVAL,
    DatabaseSubscription,
    key_hash,
)
from kjo_django.transports.database.transport import forget_groups
from tests.clocks import SetClock
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def transport(alias: str) -> DatabaseTransport:
    return DatabaseTransport("test", {"DATABASE": alias})


@pytest.fixture
def clock(transport: DatabaseTransport) -> SetClock:
    """Time passes for this transport, and for who subscribes to it, when the test says so."""
    transport.clock = SetClock()
    return transport.clock


Subscribe = Callable[..., DatabaseSubscription]


@pytest.fixture
def subscribe(transport: DatabaseTransport) -> Iterator[Subscribe]:
    opened: list[DatabaseSubscription] = []

    def subscribe(topics: str = "t", group: str = "g", **options: Any) -> DatabaseSubscription:
        opened.append(transport.subscribe(topics.split(), group, **options))
        return opened[-1]

    yield subscribe
    for subscription in opened:
        subscription.close()


def publish(transport: DatabaseTransport, *values: str, topic: str = "t", **more: Any) -> None:
    """Publish values such as "a1": their first letter is the key."""
    transport.publish(
        [OutgoingRecord(topic, value.encode(), value[0].encode(), **more) for value in values]
    )


def _renew_statistics(alias: str) -> None:
    table = TransportMessage._meta.db_table
    command = "ANALYZE TABLE" if connections[alias].vendor == "mysql" else "ANALYZE"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"{command} {table}")


def _wait_for_no_lock(alias: str) -> None:
    """Make this thread's session refuse to wait for a lock, as soon as the server can refuse."""
    is_mysql = connections[alias].vendor == "mysql"
    name, value = ("innodb_lock_wait_timeout", "1") if is_mysql else ("lock_timeout", "'1s'")
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SET SESSION {name} = {value}")


@contextmanager
def _uncommitted(alias: str, act: Callable[[], None], until: Callable[[], bool]) -> Iterator[None]:
    """Do something in another session, which commits when ``until`` is true."""
    has_acted = threading.Event()

    def act_and_wait() -> None:
        try:
            with transaction.atomic(using=alias):
                act()
                has_acted.set()
                wait_until(until, "The block did not come to what it was to meet")
        finally:
            connections[alias].close()

    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(act_and_wait)
        assert has_acted.wait(PATIENCE)
        yield
        other.result(PATIENCE)


def _waits_for_a_lock(alias: str) -> bool:
    """Return whether a session of PostgreSQL waits for a lock that another one has."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted)")
        return bool(cursor.fetchone()[0])


def texts(records: list[Record]) -> list[str]:
    return [(record.value or b"").decode() for record in records]


# --- Publishing -----------------------------------------------------------------------------------


@pytest.mark.parametrize("headers", [{"job": "YQ"}, {"job": 7}, ["job"], None, "\u00e9"])
def test_a_row_with_odd_headers_does_not_keep_those_behind_it_from_being_claimed(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe, headers: Any
) -> None:
    subscription = subscribe()
    transport.publish([OutgoingRecord("t", b"odd"), OutgoingRecord("t", b"good")])
    # JSON's null, not the column's, which it refuses
    odd = Value(None, JSONField()) if headers is None else headers
    TransportMessage.objects.using(alias).filter(value=b"odd").update(headers=odd)
    assert [record.value for record in subscription.poll(10, 5)] == [b"odd", b"good"]


def test_more_is_published_at_once_than_a_server_takes_in_a_statement(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    """A relay's backlog of large payloads: refused as a whole, it would be tried again for ever."""
    subscribe()
    # When 36 MB, as MariaDB's driver writes them
    with transaction.atomic(using=alias):
        results = transport.publish([OutgoingRecord("t", b"\xff" * 200_000)] * 90)
    # Then
    assert {result.error for result in results} == {None}
    assert TransportMessage.objects.using(alias).count() == 90


# --- Keys -----------------------------------------------------------------------------------------


def test_a_key_in_flight_elsewhere_waits_and_others_pass(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    first, second = subscribe(), subscribe()
    publish(transport, "a1", "a2", "b1", "a3", "b2")
    (taken,) = first.poll(1, 1)

    assert texts(second.poll(10, 0.2)) == ["b1", "b2"], "a2 would overtake a1, or run beside it"
    first.acknowledge([taken])
    first.flush()
    assert texts(second.poll(10, 1)) == ["a2", "a3"]


def test_the_holder_of_a_key_gets_its_next_records(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    first = subscribe()
    publish(transport, "a1", "a2", "a3")
    assert [texts(first.poll(1, 1)) for _ in range(3)] == [["a1"], ["a2"], ["a3"]]


def test_records_without_a_key_are_never_held_up(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    first, second = subscribe(), subscribe()
    transport.publish([OutgoingRecord("t", b"%d" % number) for number in range(4)])
    assert texts(first.poll(2, 1)) == ["0", "1"]
    assert texts(second.poll(2, 1)) == ["2", "3"]


def test_one_key_on_two_topics_is_two_keys(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    first, second = subscribe("t"), subscribe("u")
    publish(transport, "a1")
    publish(transport, "a2", topic="u")
    assert texts(first.poll(1, 1)) == ["a1"]
    assert texts(second.poll(1, 1)) == ["a2"]


def test_a_delayed_record_does_not_hold_up_its_key(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    publish(transport, "a1", available_at=clock.now() + timedelta(seconds=1))
    publish(transport, "a2")
    subscription = subscribe()
    assert texts(subscription.poll(10, 0)) == ["a2"]
    clock.advance(0.5)
    assert texts(subscription.poll(10, 0)) == []
    clock.advance(0.5)
    assert texts(subscription.poll(10, 0)) == ["a1"]


def test_equal_hashes_are_all_that_keys_are_compared_by() -> None:
    assert key_hash(b"a") == key_hash(b"a") != key_hash(b"b")
    assert all(-(2**63) <= key_hash(b"%d" % n) < 2**63 for n in range(1000))


# --- Priorities -----------------------------------------------------------------------------------


@pytest.mark.promise("priority")
def test_rows_are_claimed_by_priority_and_in_order_within_one(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, "a1", "b1")
    publish(transport, "c1", "d1", priority=-1)
    publish(transport, "e1", "f1", priority=5)
    subscription = subscribe()
    found = subscription.poll(10, 1)
    assert texts(found) == ["e1", "f1", "a1", "b1", "c1", "d1"]
    assert [record.priority for record in found] == [5, 5, 0, 0, -1, -1]


@pytest.mark.promise("no-starvation")
def test_no_priority_starves_beside_a_flood_of_higher_ones(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    # Given more urgent rows than are ever claimed, and one of each of some lower priorities
    for rank in range(5):
        publish(transport, f"x{rank}", priority=-10 * rank)
    subscription = subscribe()
    seen: list[str] = []
    for number in range(60):
        publish(transport, f"u{number}", f"v{number}", priority=50)
        # When
        found = subscription.poll(1, 1)
        seen += texts(found)
        subscription.acknowledge(found)
    # Then
    low = [text for text in seen if text.startswith("x")]
    assert low == [f"x{rank}" for rank in range(5)]
    assert seen.index("x4") < 40


def test_each_topic_has_its_share_whatever_its_priorities(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, *[f"u{number}" for number in range(50)], priority=50)
    publish(transport, *[f"x{number}" for number in range(50)], topic="low", priority=-50)
    counts = Counter(text[0] for text in texts(subscribe("t low").poll(20, 1)))
    assert min(counts["u"], counts["x"]) >= 5
    assert counts.total() == 20


def test_a_share_that_another_topic_leaves_is_claimed_by_priority(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    publish(transport, *[f"a{number}" for number in range(10)])
    publish(transport, *[f"u{number}" for number in range(10)], priority=50)
    publish(transport, "z", topic="low")
    found = texts(subscribe("t low").poll(16, 1))
    assert [text for text in found if text != "z"] == [
        *[f"u{number}" for number in range(10)],
        *[f"a{number}" for number in range(5)],
    ]


def test_urgent_rows_of_a_paused_topic_are_claimed_when_asked_for(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    # Given a consumer full of low rows
    publish(transport, *[f"x{number}" for number in range(20)], priority=-5)
    subscription = subscribe()
    assert len(subscription.poll(10, 1)) == 10
    subscription.pause([TopicPartition("t", 0)])
    subscription.limit({"t": 0})
    assert subscription.poll_urgent({"t": -5}, 8) == []
    # When
    publish(transport, "n0")
    publish(transport, *[f"u{number}" for number in range(10)], priority=50)
    # Then at most so many come, at most a few times a second
    assert subscription.poll_urgent({"t": -5}, 8) == []
    clock.advance(1.1 * URGENT_INTERVAL)
    first = subscription.poll_urgent({"t": -5}, 8)
    assert texts(first) == [f"u{number}" for number in range(8)]
    clock.advance(0.9 * URGENT_INTERVAL)
    assert subscription.poll_urgent({"t": -5}, 8) == []
    clock.advance(0.2 * URGENT_INTERVAL)
    second = subscription.poll_urgent({"t": -5}, 8)
    assert texts(second) == ["u8", "u9", "n0"]
    clock.advance(1.1 * URGENT_INTERVAL)
    assert subscription.poll_urgent({"t": -5}, 8) == [], "no lower priority than that"
    # And they are held and acknowledged like all others
    subscription.acknowledge(first + second)
    subscription.flush()
    assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 20}


# --- Leases ---------------------------------------------------------------------------------------


def test_polling_renews_leases(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    """KJO-F11 for records: slow work stays with who does it, as long as it polls."""
    first = subscribe(lease=timedelta(seconds=0.9))
    publish(transport, "a1")
    (taken,) = first.poll(10, 1)
    second = subscribe()
    for _ in range(20):
        clock.advance(0.1)
        assert first.poll(0, 0) == []
        assert second.poll(10, 0) == []
    first.acknowledge([taken])


def test_a_renewal_waits_for_no_transaction_that_settles(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str, clock: SetClock
) -> None:
    """FINDINGS 2.11: both lock rows, each in an order of its own."""
    if not connections[alias].features.has_select_for_update_skip_locked:
        pytest.skip("one transaction writes at a time")
    consumer = subscribe(lease=timedelta(seconds=90))
    publish(transport, "a1", "b1")
    settled, kept = consumer.poll(10, 1)
    # Given a transaction that has settled one and goes on
    has_settled, may_end = threading.Event(), threading.Event()

    def settle() -> None:
        with transaction.atomic(using=alias):
            consumer.acknowledge_in_transaction([settled])
            has_settled.set()
            has_ended_in_time.append(may_end.wait(PATIENCE))
        connections[alias].close()

    has_ended_in_time: list[bool] = []
    thread = threading.Thread(target=settle)
    thread.start()
    try:
        assert has_settled.wait(PATIENCE)
        # When the leases are to be renewed
        clock.advance(80)
        assert consumer.poll(0, 0) == []
        # Then that of the other one is
        (row,) = TransportMessage.objects.using(alias).filter(value=kept.value)
        assert row.lease_expires_at > clock.now() + timedelta(seconds=80)
    finally:
        may_end.set()
        thread.join(PATIENCE)
    assert has_ended_in_time == [True]
    assert not TransportMessage.objects.using(alias).filter(value=settled.value).exists()


def test_transactions_that_settle_much_of_the_table_wait_for_each_other_never(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str
) -> None:
    """A statement that names many rows reads those rows only: MariaDB would read the whole table,
    and wait for the rows that another transaction has locked."""
    if not connections[alias].features.has_select_for_update_skip_locked:
        pytest.skip("one transaction writes at a time")
    consumer, other = subscribe(), subscribe()
    publish(transport, *(f"{name}{number}" for name in "ab" for number in range(150)))
    records = consumer.poll(300, 1)
    publish(transport, *(f"c{number}" for number in range(300)))
    _renew_statistics(alias)
    # Given a transaction that has settled the first half and goes on
    has_settled, may_end = threading.Event(), threading.Event()
    has_ended_in_time: list[bool] = []

    def settle() -> None:
        with transaction.atomic(using=alias):
            consumer.acknowledge_in_transaction(records[:150])
            has_settled.set()
            has_ended_in_time.append(may_end.wait(PATIENCE))
        connections[alias].close()

    thread = threading.Thread(target=settle)
    thread.start()
    try:
        assert has_settled.wait(PATIENCE)
        _wait_for_no_lock(alias)
        # When another one settles the second half, and others are claimed
        with transaction.atomic(using=alias):
            consumer.acknowledge_in_transaction(records[150:])
        claimed = other.poll(300, 0)
    finally:
        may_end.set()
        thread.join(PATIENCE)
    # Then neither has waited for it
    assert has_ended_in_time == [True]
    assert len(claimed) == 300
    assert not TransportMessage.objects.using(alias).filter(key=b"a").exists()
    assert not TransportMessage.objects.using(alias).filter(key=b"b").exists()


def test_a_frozen_owner_loses_its_rows_and_its_late_acknowledgement(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str, clock: SetClock
) -> None:
    frozen = subscribe(lease=timedelta(seconds=0.3))
    publish(transport, "a1", "a2")
    stale = frozen.poll(10, 1)
    clock.advance(0.3)
    second = subscribe()
    assert texts(second.poll(10, 1)) == ["a1", "a2"]

    with transaction.atomic(using=alias):
        frozen.acknowledge_in_transaction(stale[:1])
    frozen.acknowledge(stale)
    frozen.close()

    assert TransportMessage.objects.using(alias).count() == 2
    assert second.poll(10, 0.1) == []


def test_a_frozen_owner_that_nobody_replaced_goes_on(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    frozen = subscribe(lease=timedelta(seconds=0.3))
    publish(transport, "a1")
    (record,) = frozen.poll(10, 1)
    clock.advance(0.3)
    assert frozen.poll(10, 0.1) == [], "its own record twice, while it works on it"
    frozen.acknowledge([record])
    frozen.flush()
    assert sum(transport.lag(["t"], "g").values()) == 0


def test_what_another_took_over_and_gave_back_is_not_handed_out_twice(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    # Given a record that waits with its owner, while another one had it for a moment
    owner, other = subscribe(lease=timedelta(seconds=30)), subscribe()
    publish(transport, "a1")
    (waiting,) = owner.poll(10, 1)
    past = timezone.now() - timedelta(seconds=1)
    TransportMessage.objects.using(alias).update(lease_expires_at=past)
    assert other.release(other.poll(10, 1)) is None
    # When its owner polls
    again = owner.poll(10, 0.1)
    # Then there is no second copy, whose acknowledgement would delete the row of the first
    assert again == []
    assert owner.holds(waiting)
    assert texts(other.poll(10, 0.1)) == []
    owner.acknowledge([waiting])
    owner.flush()
    assert not TransportMessage.objects.using(alias).exists()


def test_rows_of_a_claim_whose_answer_was_lost_are_handed_out_after_all(
    transport: DatabaseTransport, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection breaks in its commit, which the database has made. They are its own and
    nobody has them: renewed with the others, they would wait for the end of its process."""
    subscription = subscribe()
    publish(transport, "a1", "a2", "b1", "a3")
    claim, is_lost = DatabaseSubscription._claim, iter([False, True])

    def lose(self: DatabaseSubscription, *limits: int) -> list[Record]:
        records = claim(self, *limits)
        if next(is_lost, False):
            raise OperationalError("server closed the connection unexpectedly")
        return records

    monkeypatch.setattr(DatabaseSubscription, "_claim", lose)
    found = subscription.poll(1, 0)
    assert subscription.poll(2, 0) == []
    assert eventually(lambda: found.extend(subscription.poll(10, 0.1)) or len(found) >= 3)
    assert texts(found) == ["a1", "a2", "b1", "a3"]


def test_what_could_not_be_handed_back_is_later(
    transport: DatabaseTransport, subscribe: Subscribe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although its holder has others that it renews."""
    first, second = subscribe(), subscribe()
    publish(transport, "a1", "b1")
    kept, given = first.poll(2, 1)
    with monkeypatch.context() as patch:
        patch.setattr(first, "_insist", lambda action: False)
        first.release([given])
    first.poll(0, 0)
    assert texts(second.poll(10, 1)) == ["b1"]
    assert texts([kept]) == ["a1"]


def test_rows_renewed_during_a_claim_are_left_alone(
    transport: DatabaseTransport,
    subscribe: Subscribe,
    alias: str,
    clock: SetClock,
    monkeypatch: Any,
) -> None:
    """The claim sees an expired lease, its owner renews it, the claim takes nothing at all: a2
    alone would overtake a1."""
    first, second = subscribe(lease=timedelta(seconds=0.2)), subscribe()
    publish(transport, "a1")
    first.poll(10, 1)
    publish(transport, "a2")
    clock.advance(0.2)
    rows = TransportMessage.objects.using(alias)

    def renew() -> None:
        rows.filter(value=b"a1").update(lease_expires_at=clock.now() + timedelta(minutes=1))

    if connections[alias].vendor == "postgresql":
        with _uncommitted(alias, renew, until=lambda: _waits_for_a_lock(alias)):
            assert second.poll(10, 0) == []
    else:
        choose = DatabaseSubscription._choose

        def renewed_meanwhile(self: Any, *arguments: Any) -> Any:
            rows_chosen = choose(self, *arguments)
            renew()
            return rows_chosen

        with monkeypatch.context() as patched:
            patched.setattr(DatabaseSubscription, "_choose", renewed_meanwhile)
            assert second.poll(10, 0) == []
    assert list(rows.values_list("lease_token", flat=True).order_by("id"))[1] == ""


def test_closing_hands_back_at_once_and_tells(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    told: list[Any] = []
    first = subscribe(
        on_assigned=lambda partitions: told.append(list(partitions)),
        on_revoked=lambda partitions, lost: told.append((list(partitions), lost)),
    )
    publish(transport, "a1", "a2")
    records = first.poll(10, 1)
    first.poll(0, 0)
    first.acknowledge(records[:1])
    assert first.assignment() == [TopicPartition("t", 0)]
    first.close()

    assert told == [[TopicPartition("t", 0)], ([TopicPartition("t", 0)], False)]
    assert first.assignment() == []
    assert texts(subscribe().poll(10, 1)) == ["a2"]


# --- Acknowledging in a transaction ---------------------------------------------------------------


def test_an_acknowledgement_commits_with_the_outcome(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str
) -> None:
    """Promise 2: state, effects and acknowledgement are one commit."""
    subscription = subscribe()
    publish(transport, "a1", "a2")
    records = subscription.poll(10, 1)
    with pytest.raises(ZeroDivisionError), transaction.atomic(using=alias):
        subscription.acknowledge_in_transaction(records)
        raise ZeroDivisionError
    assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 2}
    with transaction.atomic(using=alias):
        subscription.acknowledge_in_transaction(records)
    assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 0}


def test_on_another_database_than_the_jobs_it_joins_no_transaction_of_theirs(
    alias: str, subscribe: Subscribe, settings: Any
) -> None:
    """Deleted there before the outcome is committed here, a message nobody enqueued were lost with
    the outcome."""
    assert not subscribe().joins_transactions
    settings.KJO = {"DATABASE": alias}
    assert subscribe(group="of the jobs").joins_transactions


def test_a_lane_settles_on_its_own_connection(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str
) -> None:
    subscription = subscribe()
    publish(transport, "a1")
    records = subscription.poll(10, 1)

    def settle() -> None:
        with transaction.atomic(using=alias):
            subscription.acknowledge_in_transaction(records)
        connections.close_all()

    thread = threading.Thread(target=settle)
    thread.start()
    thread.join(PATIENCE)
    assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 0}


# --- Groups ---------------------------------------------------------------------------------------


def test_each_known_group_gets_a_row(alias: str, subscribe: Subscribe) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias, "GROUPS": {"t": ["x", "y"]}})
    (outcome,) = transport.publish([OutgoingRecord("t", b"1")])
    rows = list(TransportMessage.objects.using(alias).values_list("consumer_group", "id"))
    assert [group for group, _ in rows] == ["x", "y"]
    # MySQL's INSERT does not say which ids it has given.
    is_told = connections[alias].features.can_return_rows_from_bulk_insert
    assert outcome.offset == (rows[0][1] if is_told else None)
    assert texts(subscribe(group="y").poll(10, 1)) == ["1"]
    assert texts(subscribe(group="x").poll(10, 1)) == ["1"]


def test_a_new_group_of_this_process_misses_nothing(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    subscribe(group="old")
    publish(transport, "a1")  # the groups are remembered now
    second = subscribe(group="new")
    publish(transport, "a2")
    assert texts(second.poll(10, 1)) == ["a2"]


def test_what_a_publisher_wrote_for_nobody_is_adopted_later(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str
) -> None:
    """Its transaction began before the group came and committed after: nothing gets stuck."""
    subscription = subscribe()
    assert subscription.poll(10, 0) == []
    TransportMessage.objects.using(alias).create(topic="t", value=b"late")
    assert texts(subscription.poll(10, 5)) == ["late"]


def test_a_group_forgotten_under_its_worker_is_registered_again(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str
) -> None:
    subscription = subscribe()
    TransportSubscription.objects.using(alias).all().delete()
    forget_groups()
    publish(transport, "a1")
    assert texts(subscription.poll(10, 5)) == ["a1"]
    assert TransportSubscription.objects.using(alias).count() == 1


# --- Topics, waiting, refusals --------------------------------------------------------------------


def test_topics_share_a_poll_and_leave_their_rest_to_who_has_more(
    transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    for topic, count in (("t", 100), ("u", 100), ("v", 1)):
        publish(transport, *(f"{topic}{number}" for number in range(count)), topic=topic)
    subscription = subscribe("t u v")
    for number in range(3):
        shares = Counter(record.topic for record in subscription.poll(9, 1))
        assert sum(shares.values()) == 9
        assert min(shares["t"], shares["u"]) >= 3
        assert shares["v"] == (number == 0)


@pytest.mark.parametrize(("topics", "limit"), [(3, 4), (4, 5), (12, 16), (20, 21)])
def test_each_topic_has_a_row_of_a_claim_where_there_are_enough(
    transport: DatabaseTransport, subscribe: Subscribe, topics: int, limit: int
) -> None:
    """The first job of an idle queue begins beside any backlog."""
    names = [f"t{number}" for number in range(topics)]
    for name in names:
        publish(transport, *(f"{letter}{name}" for letter in "abcdefgh"), topic=name)
    subscription = subscribe(" ".join(names))
    for _ in range(3):
        found = Counter(record.topic for record in subscription.poll(limit, 1))
        assert len(found) == topics
        assert found.total() == limit


def test_what_is_given_back_during_a_claim_is_not_overtaken(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    """A claim of several topics is several queries where a database has no statement for it."""
    if connections[alias].vendor != "mysql":
        pytest.skip("a claim is one statement, or nobody else writes meanwhile")
    # Given a key of which another consumer holds the first record
    other, subscription = subscribe("t u"), subscribe("t u")
    publish(transport, "a1", "b1", "c1", "d1", "a2", "e1")
    held, looked = other.poll(1, 1), 0

    def release(execute: Any, sql: str, *arguments: Any) -> Any:
        """Give it back between the queries of a claim."""
        nonlocal looked
        looked += "kjo_transport_message" in sql and "UNION" in sql
        if looked and "UNION" not in sql and held and "kjo_transport_message" in sql:
            with ThreadPoolExecutor(1) as pool:
                pool.submit(_release_and_leave, alias, other, [held.pop()]).result(PATIENCE)
        return execute(sql, *arguments)

    # When
    subscription._plan.expect_more()  # claims without a look
    with connections[alias].execute_wrapper(release):
        found = texts(subscription.poll(6, 0))
    # Then
    assert not held, "the claim has had a second query"
    assert "a2" not in found or found.index("a1") < found.index("a2")


def _release_and_leave(
    alias: str, subscription: DatabaseSubscription, records: list[Record]
) -> None:
    subscription.release(records)
    connections[alias].close()


def test_large_values_end_a_claim_before_the_rest_is_read(
    alias: str, transport: DatabaseTransport, subscribe: Subscribe
) -> None:
    """Of rows that do not fit each is as long as others: to read them takes time."""
    if connections[alias].vendor == "postgresql":
        pytest.skip("its claim ends its reading by itself")
    names = [f"t{number}" for number in range(12)]
    large = [f"{number:02}" + 4000 * "x" for number in range(20)]
    for name in names:
        publish(transport, *large, topic=name)
    subscription = subscribe(" ".join(names))
    with CaptureQueriesContext(connections[alias]) as captured:
        first = subscription.poll(240, 0, 40_000)
    queries = [query["sql"] for query in captured if "size" in query["sql"]]
    assert len(first) == 10
    assert len(queries) <= 2
    # And the next claim, which is probably like it, asks for few rows
    with CaptureQueriesContext(connections[alias]) as captured:
        assert len(subscription.poll(240, 0, 40_000)) == 10
    limits = [
        int(count) for query in captured for count in re.findall(r"LIMIT (\d+)", query["sql"])
    ]
    assert max(limits) <= 20
    # Until its values are small
    publish(transport, *(f"{number:03}" for number in range(200)), topic="t0", priority=9)
    subscription.pause([TopicPartition(name, 0) for name in names[1:]])
    assert [len(subscription.poll(180, 0, 40_000)) for _ in range(2)] == [20, 180]


@pytest.mark.parametrize("is_held_elsewhere", [True, False])
def test_many_topics_cost_a_poll_no_more_statements_than_two(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str, is_held_elsewhere: bool
) -> None:
    """Each needs a round trip, and nobody else claims these topics meanwhile."""
    if connections[alias].vendor == "sqlite":
        pytest.skip("a round trip to a file takes no time")
    counts = []
    for number in (2, 12):
        topics = [f"{number}-{each}" for each in range(number)]
        other, subscription = subscribe(" ".join(topics)), subscribe(" ".join(topics))
        subscription.poll(0, 0)
        # Given rows of each topic, of a key that is held elsewhere or free
        for topic in topics:
            publish(transport, "a1", "a2", "a3", topic=topic)
        if is_held_elsewhere:
            other.limit(dict.fromkeys(topics, 1))
            assert len(other.poll(100, 1)) == number
            assert subscription.poll(100, 0) == []
        # When
        with CaptureQueriesContext(connections[alias]) as captured:
            found = subscription.poll(100, 0)
        # Then
        assert len(found) == (0 if is_held_elsewhere else 3 * number)
        counts.append(len(captured))
    assert counts[0] == counts[1]
    assert counts[0] <= (2 if is_held_elsewhere else 8)


def test_an_idle_poll_only_reads(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str, clock: SetClock
) -> None:
    """Neither locks nor writes while nothing is due, be it delayed, or busy elsewhere."""
    first, second = subscribe(), subscribe()
    publish(transport, "a1", "a2", "a3")
    publish(
        transport, "b1", available_at=datetime(2999, 1, 1, tzinfo=timezone.get_fixed_timezone(0))
    )
    first.poll(1, 1)
    second.poll(10, 0)
    with CaptureQueriesContext(
        connections[alias],
    ) as captured:
        assert second.poll(10, 0.7) == []
    statements = [query["sql"] for query in captured.captured_queries]
    assert statements
    assert len(statements) < 40
    assert [s for s in statements if s.split()[0] not in ("SELECT", "WITH") or "UPDATE" in s] == []


def test_a_publishers_call_is_followed_by_a_claim_and_by_no_further_look(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str, clock: SetClock
) -> None:
    """Each look costs about a millisecond of CPU: at 20 jobs a second they were most of a job."""
    # Given a consumer that has claimed nothing for a while, and waits
    subscription = subscribe()
    assert subscription.poll(10, 0.1) == []
    # When a publisher wakes it
    subscription.wake()
    assert subscription.poll(10, 1) == []
    publish(transport, "a1")
    assert texts(subscription.poll(10, 1)) == ["a1"]
    with CaptureQueriesContext(connections[alias]) as captured:
        assert subscription.poll(10, 0.05) == []
    # Then it relies on being woken again, and looks once more when its time is up
    looks = [query["sql"] for query in captured.captured_queries]
    assert len(looks) == 1 or connections[alias].vendor == "sqlite"
    publish(transport, "a2")
    subscription.wake()
    assert texts(eventually(lambda: subscription.poll(10, 1))) == ["a2"]


@pytest.fixture
def listening(subscribe: Subscribe, clock: SetClock) -> DatabaseSubscription:
    """A consumer that hears of publications."""
    subscription = subscribe()
    subscription.hears_publishers = True
    return subscription


def test_an_idle_consumer_that_hears_of_publications_asks_the_table_once_a_second(
    transport: DatabaseTransport, listening: DatabaseSubscription, alias: str, clock: SetClock
) -> None:
    # Given
    publish(transport, "a1", available_at=clock.now() + timedelta(days=1))
    listening.poll(10, 1)
    # When
    with CaptureQueriesContext(connections[alias]) as captured:
        for _ in range(10):
            assert listening.poll(10, 1) == []
    # Then
    messages = [q["sql"] for q in captured.captured_queries if "kjo_transport_message" in q["sql"]]
    looks = [sql for sql in messages if "available_at" in sql]
    assert len(looks) <= 12
    assert len(messages) <= 18, "beside those, the group's membership is looked after"


def test_a_row_is_claimed_when_it_is_due_though_its_consumer_is_idle(
    transport: DatabaseTransport, listening: DatabaseSubscription, clock: SetClock
) -> None:
    publish(transport, "a1", available_at=clock.now() + timedelta(seconds=0.4))
    assert listening.poll(10, 0.1) == []
    began = clock.monotonic()
    assert texts(listening.poll(10, 5)) == ["a1"]
    assert clock.monotonic() - began == pytest.approx(0.3, abs=0.05)


def test_an_idle_consumer_is_woken_for_what_is_due_before_what_it_waits_for(
    transport: DatabaseTransport, listening: DatabaseSubscription, clock: SetClock
) -> None:
    publish(transport, "a1", available_at=clock.now() + timedelta(seconds=60))
    assert listening.poll(10, 0.5) == []
    publish(transport, "b1", available_at=clock.now() + timedelta(seconds=0.2))
    listening.wake()
    assert listening.poll(10, 5) == [], "woken, it returns"
    began = clock.monotonic()
    assert texts(listening.poll(10, 5)) == ["b1"]
    assert clock.monotonic() - began == pytest.approx(0.2, abs=0.05)


def test_what_was_published_for_no_group_is_claimed_as_soon_as_it_is_adopted(
    transport: DatabaseTransport, listening: DatabaseSubscription, alias: str, clock: SetClock
) -> None:
    """A publisher that saw no group may commit after a consumer has registered one."""
    # Given an idle consumer
    assert listening.poll(10, 1) == []
    # When
    publish(transport, "a1")
    TransportMessage.objects.using(alias).update(consumer_group="")
    listening._housekeep_at = clock.monotonic()
    # Then it does not wait for its next look
    began = clock.monotonic()
    assert listening._plan.is_idle
    assert texts(listening.poll(10, 5)) == ["a1"]
    assert clock.monotonic() == began


def test_what_others_hold_of_a_key_is_looked_for_though_publications_are_heard(
    transport: DatabaseTransport, subscribe: Subscribe, clock: SetClock
) -> None:
    """Nobody calls when the last record of a key is acknowledged elsewhere."""
    first, second = subscribe(), subscribe()
    second.hears_publishers = True
    publish(transport, "a1", "a2")
    (taken,) = first.poll(1, 1)
    assert second.poll(10, 1) == []
    first.acknowledge([taken])
    first.flush()
    began = clock.monotonic()
    assert texts(second.poll(10, 1)) == ["a2"]
    assert clock.monotonic() - began <= 0.2


def test_what_an_idle_consumer_releases_itself_is_claimed_again_soon(
    transport: DatabaseTransport, listening: DatabaseSubscription, clock: SetClock
) -> None:
    publish(transport, "a1")
    taken = listening.poll(10, 1)
    assert listening.poll(10, 1) == []
    listening.release(taken)
    began = clock.monotonic()
    assert texts(listening.poll(10, 5)) == ["a1"]
    assert clock.monotonic() - began <= 0.2


def test_a_commit_of_another_connection_ends_idleness_on_sqlite(sqlite_alias: str) -> None:
    """No call reaches another process there; the commit itself is seen."""
    transport = DatabaseTransport("test", {"DATABASE": sqlite_alias})
    transport.clock = clock = SetClock()
    subscription = transport.subscribe(["t"], "g")
    assert subscription.poll(10, 1) == []

    def publish_and_leave() -> None:
        publish(transport, "a1")
        connections[sqlite_alias].close()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(publish_and_leave).result(PATIENCE)
    began = clock.monotonic()
    assert texts(subscription.poll(10, 5)) == ["a1"]
    assert clock.monotonic() == began, "it has not waited"
    subscription.close()


def test_a_paused_topic_is_not_claimed(transport: DatabaseTransport, subscribe: Subscribe) -> None:
    subscription = subscribe("t u")
    subscription.pause([TopicPartition("t", 0)])
    publish(transport, "a1")
    publish(transport, "b1", topic="u")
    assert texts(subscription.poll(10, 1)) == ["b1"]
    subscription.resume([TopicPartition("t", 0)])
    assert texts(subscription.poll(10, 1)) == ["a1"]


def test_an_impossible_topic_is_refused_alone(transport: DatabaseTransport) -> None:
    long, good = transport.publish([OutgoingRecord("x" * 250, b""), OutgoingRecord("t", b"")])
    assert long.error
    assert good.error is None


def test_options_are_checked() -> None:
    with pytest.raises(ImproperlyConfigured, match=r"'jobs'.*'LEASE'.*positive"):
        DatabaseTransport("jobs", {"LEASE": "soon"})


def test_one_publish_is_one_insert(
    transport: DatabaseTransport, subscribe: Subscribe, alias: str
) -> None:
    subscribe()
    publish(transport, "a0")
    with CaptureQueriesContext(connections[alias]) as captured:
        publish(transport, *(f"a{number}" for number in range(15)))
    inserts = [q["sql"] for q in captured.captured_queries if q["sql"].startswith("INSERT")]
    assert len(inserts) == 1


def test_a_claim_on_sqlite_starts_with_a_write(sqlite_alias: str) -> None:
    """Started with a read it would fail at once whenever somebody wrote in between."""
    transport = DatabaseTransport("test", {"DATABASE": sqlite_alias})
    subscription = transport.subscribe(["t"], "g")
    publish(transport, "a1")
    with CaptureQueriesContext(connections[sqlite_alias]) as captured:
        assert texts(subscription.poll(1, 1)) == ["a1"]
    statements = [query["sql"].split()[0] for query in captured.captured_queries]
    begin = statements.index("BEGIN")
    assert statements[begin : begin + 3] == ["BEGIN", "UPDATE", "SELECT"]
    subscription.close()


def test_another_writer_makes_sqlite_wait_and_nothing_worse(
    sqlite_alias: str, django_db_blocker: Any
) -> None:
    """Somebody holds SQLite's write lock for longer than the busy timeout."""
    transport = DatabaseTransport("test", {"DATABASE": sqlite_alias})
    subscription = transport.subscribe(["t"], "g")
    publish(transport, "a1", "a2")
    connections[sqlite_alias].cursor().execute("PRAGMA busy_timeout = 50")
    (first,) = subscription.poll(1, 1)
    subscription.acknowledge([first])
    path = connections[sqlite_alias].settings_dict["NAME"]
    other = sqlite3.connect(path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        assert subscription.poll(10, 0.5) == []
    finally:
        other.execute("ROLLBACK")
        other.close()

    assert eventually(lambda: texts(subscription.poll(10, 1))) == ["a2"]
    assert subscription.last_error is None
    assert transport.lag(["t"], "g") == {TopicPartition("t", 0): 1}
    subscription.close()
