"""On PostgreSQL a claim is one round trip, and takes what the queries for other databases take."""

from __future__ import annotations

import copy
import math
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from datetime import timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.store.session_changes import changed, notice
from kjo_django.transports.base import OutgoingRecord, Record
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.database.claims import MOST_AHEAD, MOST_LOST, Asked
from kjo_django.transports.database.subscription import DatabaseSubscription
from kjo_django.values import ANY_SIZE
from tests.clocks import SetClock
from tests.conformance.any_rows import any_row
from tests.conformance.due_by_orm import due_by_orm

pytestmark = pytest.mark.postgres


@pytest.fixture
def alias(postgres_alias: str) -> str:
    return postgres_alias


@pytest.mark.parametrize("seed", range(12))
def test_a_claim_at_once_takes_what_one_step_by_step_takes(alias: str, seed: int) -> None:
    """The queries that other databases get are the meaning of the one statement."""
    draw = random.Random(seed)
    transport = DatabaseTransport("test", {"DATABASE": alias})
    topics = ["t", "u", "v", "w"][: draw.randint(1, 4)]
    # Given rows of every kind: of priorities, keys, sizes, delayed, in flight here and elsewhere
    with (
        closing(transport.subscribe(topics, "g")) as me,
        closing(transport.subscribe(topics, "g")) as other,
    ):
        now = timezone.now()
        TransportMessage.objects.using(alias).bulk_create(
            any_row(draw, draw.choice(topics), now, mine=me._token, theirs=other._token)
            for _ in range(draw.choice((20, 200)))
        )
        me.limit({topic: draw.randint(1, 9) for topic in topics if draw.random() < 0.3})
        me.skip_keys([(topic, b"k1") for topic in topics if draw.random() < 0.3])
        is_fair = draw.random() < 0.5
        if is_fair:  # it begins with a lower priority
            for topic in topics:
                me._order._fair[topic] = 0, draw.randint(-1, 1)
        limit = draw.choice((1, 7, 40))
        below = {topics[0]: draw.randint(0, 2)} if draw.random() < 0.2 else None
        # When
        before = list(TransportMessage.objects.using(alias).order_by("id"))
        order = copy.deepcopy(me._order)
        available = {
            topic: due_by_orm(
                *(alias, "g", me._token, Asked(topic, 1, below=(below or {}).get(topic, 99))),
                *(me._skipped.get(topic, ()), now),
            ).count()
            for topic in topics
        }
        if below is None:
            available |= {topic: min(most, available[topic]) for topic, most in me._most.items()}
        at_once = me._claim(limit, ANY_SIZE, below)
        statements, me._statements, me._order = me._statements, None, order
        assert statements is not None
        TransportMessage.objects.using(alias).bulk_update(
            before, ["lease_token", "lease_expires_at"]
        )
        step_by_step = me._claim(limit, ANY_SIZE, below)
        # Then the first rows of each topic, in their order
        missing = len(at_once) - len(step_by_step)
        assert missing == 0 or (is_fair and missing > 0), "steps leave room there"
        one, two = _by_topic(at_once), _by_topic(step_by_step)
        for topic in topics:
            fewer, more = sorted((one[topic], two[topic]), key=len)
            assert more[: len(fewer)] == fewer
        # And evenly many of each at once, as long as it has any
        for topic in below or topics:
            had_more = len(one[topic]) < available[topic]
            assert not had_more or len(one[topic]) >= max(map(len, one.values())) - 1


@pytest.mark.parametrize("seed", range(12))
def test_a_claim_tells_what_is_ahead_as_the_query_of_other_databases_does(
    alias: str, seed: int
) -> None:
    draw = random.Random(seed)
    transport = DatabaseTransport("test", {"DATABASE": alias})
    topics = ["t", "u"]
    with (
        closing(transport.subscribe(topics, "g")) as me,
        closing(transport.subscribe(topics, "g")) as other,
    ):
        now = timezone.now()
        rows = [
            any_row(draw, draw.choice(topics), now, mine=me._token, theirs=other._token)
            for _ in range(draw.choice((0, 2, 20)))
        ]
        for row in rows:
            row.available_at = now + timedelta(seconds=draw.choice((-9, 60, 70)))
        TransportMessage.objects.using(alias).bulk_create(rows)
        statements = me._statements
        assert statements is not None
        asked = [Asked(topic, 40) for topic in topics]
        until = now + timedelta(seconds=30)
        # When
        most = draw.choice((1, 40))
        claimed = statements.claim(
            asked, {}, now, until, limit=most, max_bytes=ANY_SIZE, asks_ahead=True
        )
        due, ahead = statements.due_topics(asked, {}, now)
        # Then
        left = [
            row.available_at
            for row in TransportMessage.objects.using(alias).filter(consumer_group="g")
            if row.lease_expires_at is None or row.lease_expires_at <= now
        ]
        expected = (min(left) - now).total_seconds() if left else math.inf
        assert claimed.ahead == pytest.approx(expected)
        assert ahead == (None if due else pytest.approx(expected))


def test_what_is_ahead_of_many_rows_is_asked_apart(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    later = timezone.now() + timedelta(hours=1)
    transport.publish([OutgoingRecord("t", b"", available_at=later)] * MOST_AHEAD)
    with closing(transport.subscribe(["t"], "g")) as subscription:
        subscription.hears_publishers = True
        statements = subscription._statements
        assert statements is not None
        assert statements.due_topics([Asked("t", 1)], {}, timezone.now()) == ([], None)
        subscription.poll(10, 0)
        assert not subscription._plan.is_idle, "the first claim has found nothing"
        subscription.poll(10, 0)
        assert subscription._plan.is_idle


def _by_topic(records: Iterable[Record]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = defaultdict(list)
    for record in records:
        found[record.topic].append((record.offset, record.value, record.key, record.priority))
    return found


def test_a_claim_at_once_ends_with_the_row_that_reaches_its_bytes(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    with closing(transport.subscribe(["t", "u"], "g")) as subscription:
        for topic in ("t", "u"):
            transport.publish([OutgoingRecord(topic, b"x" * 100) for _ in range(10)])
        for max_bytes, count in ((1, 1), (100, 1), (101, 2), (500, 5), (ANY_SIZE, 11)):
            assert len(subscription._claim(40, max_bytes)) == count


def test_a_claim_is_one_round_trip_and_so_is_a_look(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    transport.clock = SetClock()
    topics = ["t", "u", "v"]
    with closing(transport.subscribe(topics, "g")) as subscription:
        subscription.poll(10, 0)
        for topic in topics:
            transport.publish([OutgoingRecord(topic, b"1"), OutgoingRecord(topic, b"x" * 90_000)])
        for expected in (6, 0, 0):  # a look that finds some is followed by a claim
            with CaptureQueriesContext(connections[alias]) as captured:
                assert len(subscription.poll(10, 0)) == expected
            told = [query["sql"] for query in captured.captured_queries]
            statements = [sql for sql in told if sql not in ("BEGIN", "COMMIT")]  # Django's notes
            assert len(statements) == (2 if expected else 1), told


def test_an_idle_consumer_asks_once_a_second_and_seldom_besides(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    transport.clock = SetClock()
    with closing(transport.subscribe(["t", "u"], "g")) as subscription:
        subscription.hears_publishers = True
        subscription.poll(10, 5.0)
        with _told(alias) as told:
            subscription.poll(10, 20.0)
        looks = [sql for sql in told if "kjo_look" in sql or "WITH" in sql]
        assert 19 <= len(looks) <= 21
        assert len(told) <= len(looks) + 4, "what it is registered for, each five seconds"


def test_a_lone_job_costs_its_consumer_one_round_trip(alias: str) -> None:
    """It begins with its claim, which is followed by no look, and what is due besides comes
    later."""
    transport = DatabaseTransport("test", {"DATABASE": alias})
    transport.clock = clock = SetClock()
    with closing(transport.subscribe(["t"], "g")) as subscription:
        subscription.hears_publishers = True
        subscription.begin_at_once("worker", lambda: 1)
        for number in range(3):
            clock.advance(5.0)
            subscription.poll(10, 0.5)
            transport.publish([OutgoingRecord("t", b"")])
            subscription.wake()
            subscription.poll(10, 0.5)
            with _told(alias) as told:
                records = subscription.poll(10, 0.5)
                assert subscription.begin(records, "worker") == [1]
            if number:  # the first one inserts the row of its run
                assert len(told) == 1
            with _told(alias) as told:
                assert subscription.poll(10, 0.5) == []
            assert len(told) <= 1, "the end of a poll is a look"
            subscription.acknowledge(records)


@contextmanager
def _told(alias: str) -> Iterator[list[str]]:
    """Collect what is asked of a database, a text for each round trip."""
    told: list[str] = []
    with CaptureQueriesContext(connections[alias]) as captured:
        yield told
    sent = (query["sql"] for query in captured.captured_queries)
    told += [sql for sql in sent if sql not in ("BEGIN", "COMMIT")]  # Django's notes


@pytest.mark.parametrize("at_once", [True, False], ids=["at-once", "step-by-step"])
@pytest.mark.parametrize(
    ("topics", "limit", "max_bytes", "most"),
    [
        ("t", 1, ANY_SIZE, None),
        ("t", 8, ANY_SIZE, None),
        ("t u", 1, ANY_SIZE, None),
        ("t u", 8, ANY_SIZE, None),
        ("t u v w x y z", 4, ANY_SIZE, None),
        ("t", 100, ANY_SIZE, 5),
        ("t u", 100, 300, None),
    ],
    ids=str,
)
def test_a_lower_priority_gets_its_share_of_a_backlog_however_a_claim_is_cut(
    alias: str, topics: str, limit: int, max_bytes: int, most: int | None, at_once: bool
) -> None:
    # Given topics of each of which much is urgent, and some is not
    transport = DatabaseTransport("test", {"DATABASE": alias})
    names = topics.split()
    with closing(transport.subscribe(names, "g")) as subscription:
        for topic in names:
            for priority, count in ((0, 300), (-5, 30)):
                value = OutgoingRecord(topic, b"x" * 100, priority=priority)
                transport.publish([value] * count)
        if most is not None:
            subscription.limit(dict.fromkeys(names, most))
        if not at_once:
            subscription._statements = None
        # When the first 8 claims of each topic
        claimed: Counter[tuple[str, int]] = Counter()
        for _ in range(8 * len(names)):
            records = subscription._claim(limit, max_bytes)
            claimed.update((record.topic, record.priority) for record in records)
            TransportMessage.objects.using(alias).filter(
                id__in=[record.offset for record in records]
            ).delete()
    # Then each topic has had rows of both
    assert {topic for topic, priority in claimed if priority == -5} == {*names}
    assert {topic for topic, priority in claimed if priority == 0} == {*names}


def test_a_topic_with_one_row_has_no_backlog_beside_another_one(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    with closing(transport.subscribe(["t", "u"], "g")) as subscription:
        transport.publish([OutgoingRecord("t", b"1")] * 50 + [OutgoingRecord("u", b"1")])
        assert len(subscription._claim(10, ANY_SIZE)) == 10
        assert [*subscription._order._fair] == ["t"]


def test_a_topic_that_a_claim_of_few_has_cut_has_a_backlog(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    with closing(transport.subscribe(["t", "u"], "g")) as subscription:
        for _ in range(2):  # each begins with another topic
            TransportMessage.objects.using(alias).all().delete()
            transport.publish([OutgoingRecord("t", b"1")] + [OutgoingRecord("u", b"1")] * 50)
            assert len(subscription._claim(2, ANY_SIZE)) == 2
            assert "u" in subscription._order._fair


def test_a_topic_of_which_little_may_be_claimed_keeps_no_other_waiting(alias: str) -> None:
    transport = DatabaseTransport("test", {"DATABASE": alias})
    with closing(transport.subscribe(["t", "u"], "g")) as subscription:
        subscription.limit({"t": 0})
        for _ in range(2):  # each begins with another topic
            transport.publish([OutgoingRecord("t", b"1")] * 9 + [OutgoingRecord("u", b"1")] * 9)
            assert [each.topic for each in subscription._claim(2, ANY_SIZE)] == ["u", "u"]
        subscription.limit({"t": 1})
        for _ in range(2):
            assert [*_by_topic(subscription._claim(2, ANY_SIZE))] in (["t", "u"], ["u", "t"])


def test_leases_that_took_long_to_get_are_given_back(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a pooler that has no connection, or a lock on the whole table, they may be over."""
    transport = DatabaseTransport("test", {"DATABASE": alias})
    clock = transport.clock = SetClock()
    with closing(transport.subscribe(["t"], "g", lease=timedelta(seconds=10))) as subscription:
        transport.publish([OutgoingRecord("t", b"1", b"a"), OutgoingRecord("t", b"2", b"a")])
        statements = subscription._statements
        assert statements is not None
        claim = statements.claim

        def claim_late(*arguments: Any, **options: Any) -> Any:
            claimed = claim(*arguments, **options)
            clock.advance(6)
            return claimed

        with monkeypatch.context() as patch:
            patch.setattr(statements, "claim", claim_late)
            assert subscription.poll(1, 0) == []
        assert [record.value for record in subscription.poll(2, 0)] == [b"1", b"2"]


def test_a_claim_leaves_no_setting_behind(alias: str) -> None:
    """Nor is its session taken for one that a handler has changed, and closed for that."""
    transport = DatabaseTransport("test", {"DATABASE": alias})
    with closing(transport.subscribe(["t"], "g")) as subscription:
        transport.publish([OutgoingRecord("t", b"1")])
        with connections[alias].execute_wrapper(notice):
            assert len(subscription.poll(1, 0)) == 1
        assert connections[alias] not in changed
        with connections[alias].cursor() as cursor:
            cursor.execute(
                "SELECT current_setting('enable_seqscan'), current_setting('kjo.claimed_topics'), "
                "current_setting('enable_sort'), current_setting('plan_cache_mode')"
            )
            assert cursor.fetchone() == ("on", "", "on", "auto")


# --- Statements that are prepared -----------------------------------------------------------------


def _prepared(alias: str) -> dict[str, int]:
    """Return which statements the present session has, and how often each plan was used."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT name, generic_plans + custom_plans FROM pg_prepared_statements")
        return {name.rpartition("_")[0]: count for name, count in cursor.fetchall()}


@contextmanager
def _published(alias: str) -> Iterator[DatabaseSubscription]:
    """A consumer for which five records wait, in a session of its own."""
    connections[alias].close()
    transport = DatabaseTransport("test", {"DATABASE": alias})
    try:
        with closing(transport.subscribe(["t"], "g")) as subscription:
            transport.publish([OutgoingRecord("t", str(n).encode()) for n in range(5)])
            yield subscription
    finally:
        connections[alias].close()


def test_a_claim_and_a_look_are_planned_once(alias: str) -> None:
    with _published(alias) as subscription:
        for _ in range(5):
            assert len(subscription._claim(1, ANY_SIZE)) == 1
        assert subscription._topics_with_rows(["t"]) == []
        told = {"kjo_lock": 5, "kjo_claim": 5, "kjo_claim_ahead": 0, "kjo_look": 1}
        assert _prepared(alias) == told
        with connections[alias].cursor() as cursor:
            cursor.execute("SELECT sum(custom_plans) FROM pg_prepared_statements")
            assert cursor.fetchone() == (0,)


def test_a_new_session_has_them_prepared_anew(alias: str) -> None:
    with _published(alias) as subscription:
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        connections[alias].close()
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        assert _prepared(alias)["kjo_claim"] == 1


@pytest.mark.parametrize("lost", ["DEALLOCATE ALL", "DISCARD ALL"])
def test_where_a_session_loses_them_again_and_again_they_are_sent_as_they_are(
    alias: str, lost: str
) -> None:
    """As behind a pooler whose transactions have a session of their own each."""
    with _published(alias) as subscription:
        for _ in range(MOST_LOST + 1):
            assert len(subscription._claim(1, ANY_SIZE)) == 1
            with connections[alias].cursor() as cursor:
                cursor.execute(lost)
        assert subscription._topics_with_rows(["t"]) == ["t"]
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        assert _prepared(alias) == {}
        assert subscription.last_error is None


def test_a_table_that_is_changed_meanwhile_does_not_stop_claims(alias: str) -> None:
    """Its plans become invalid, as with a migration while workers run."""
    change = "ALTER TABLE kjo_transport_message ALTER COLUMN topic TYPE varchar({})"
    with _published(alias) as subscription:
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        with connections[alias].cursor() as cursor:
            try:
                cursor.execute(change.format(300))
                assert len(subscription._claim(4, ANY_SIZE)) == 4
            finally:
                cursor.execute(change.format(249))
        assert subscription.last_error is None


def test_consumers_of_one_session_share_them(alias: str) -> None:
    """Else each that comes and goes would leave half a megabyte in the server."""
    with _published(alias) as subscription:
        transport = DatabaseTransport("test", {"DATABASE": alias})
        with closing(transport.subscribe(["t"], "g")) as other:
            for consumer in (subscription, other, subscription, other):
                assert len(consumer._claim(1, ANY_SIZE)) == 1
            told = {"kjo_lock": 4, "kjo_claim": 4, "kjo_claim_ahead": 0, "kjo_look": 0}
            assert _prepared(alias) == told


def test_in_a_transaction_of_the_callers_nothing_is_set_for_its_rest(alias: str) -> None:
    with _published(alias) as subscription:
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            assert subscription._topics_with_rows(["t"]) == ["t"]
            cursor.execute("SELECT current_setting('enable_sort')")
            assert cursor.fetchone() == ("on",)
            cursor.execute("DEALLOCATE ALL")
            assert subscription._topics_with_rows(["t"]) == ["t"]


def test_the_locks_are_found_by_their_index_among_many(alias: str) -> None:
    """Where sorting is off, the whole table was read in the order of its key."""
    with _published(alias) as subscription:
        TransportSubscription.objects.using(alias).bulk_create(
            TransportSubscription(topic=f"t{n}", consumer_group="others") for n in range(2000)
        )
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        with connections[alias].cursor() as cursor:
            cursor.execute("ANALYZE kjo_transport_subscription")
            cursor.execute("SELECT name FROM pg_prepared_statements WHERE name LIKE 'kjo_lock%'")
            ((name,),) = cursor.fetchall()
            cursor.execute(
                "SET plan_cache_mode TO force_generic_plan; SET enable_sort TO off; "
                f"SET enable_seqscan TO off; EXPLAIN EXECUTE {name} ('{{t}}', 'g')"
            )
            cursor.cursor.set_result(3)
            plan = "\n".join(line for (line,) in cursor.fetchall())
        assert "Filter" not in plan, plan
        assert "consumer_group" in plan


@pytest.mark.parametrize("has_statistics", [True, False])
def test_what_renews_and_settles_reads_no_rows_of_others(alias: str, has_statistics: bool) -> None:
    """FINDINGS 2.11: whichever index it uses, it finds rows by their ids or by its own lease, and
    the one that is to lock many of them does so in the order of their ids."""
    with _published(alias) as subscription:
        TransportMessage.objects.using(alias).bulk_create(
            TransportMessage(topic="t", consumer_group="g", value=b"{}", headers={})
            for _ in range(5000)
        )
        taken = subscription._new(subscription._claim(100, ANY_SIZE))
        assert len(taken) == 100
        if has_statistics:
            with connections[alias].cursor() as cursor:
                cursor.execute("ANALYZE kjo_transport_message")
        # When
        with _explained(alias) as plans:
            subscription._renew()
            with transaction.atomic(using=alias):
                subscription.acknowledge_in_transaction(taken[:50])
            subscription.acknowledge(taken[50:])
            subscription.flush()
        # Then the rows to be renewed are locked, those are changed, and twice some are deleted
        locks, *changes = plans
        assert re.search(r"LockRows.*\n.*Sort.*\n.*Sort Key: id\n", locks), locks
        assert len(changes) == 3
        for plan in plans:
            assert re.search(r"Index Cond: \(.*(lease_token|id = ANY).*\)", plan), plan
            assert "Seq Scan" not in plan, plan


@contextmanager
def _explained(alias: str) -> Iterator[list[str]]:
    """Yield a list that grows by the plan of each statement about messages meanwhile."""
    plans: list[str] = []

    def explain(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        if "kjo_transport_message" in sql:
            with connections[alias].connection.cursor() as own:
                rows = own.execute(f"EXPLAIN {sql}", params).fetchall()
                plans.append("\n".join(line for (line,) in rows))
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(explain):
        yield plans


def test_a_refused_claim_is_raised_and_the_next_one_works(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with _published(alias) as subscription:
        assert len(subscription._claim(1, ANY_SIZE)) == 1
        with connections[alias].cursor() as cursor:
            cursor.execute("SET statement_timeout TO '50ms'")
        other = connections.create_connection(alias)
        try:
            with other.cursor() as cursor:
                cursor.execute("BEGIN; LOCK TABLE kjo_transport_message")
                with pytest.raises(OperationalError, match="statement timeout"):
                    subscription._claim(1, ANY_SIZE)
        finally:
            other.close()
        assert len(subscription._claim(4, ANY_SIZE)) == 4


def test_where_the_server_binds_parameters_claims_are_the_same(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {**connections[alias].settings_dict["OPTIONS"], "server_side_binding": True}
    monkeypatch.setitem(connections[alias].settings_dict, "OPTIONS", options)
    connections[alias].close()
    transport = DatabaseTransport("test", {"DATABASE": alias})
    try:
        with closing(transport.subscribe(["t", 'q"\\,{'], "g")) as subscription:
            subscription.skip_keys([("t", b"skipped")])
            for topic in ("t", 'q"\\,{'):
                transport.publish([OutgoingRecord(topic, b"1", b"a"), OutgoingRecord(topic, None)])
            transport.publish([OutgoingRecord("t", b"1", b"skipped")])
            assert len(subscription._claim(2**40, 2**70)) == 4
            assert subscription._claim(10, 10) == []
    finally:
        connections[alias].close()
