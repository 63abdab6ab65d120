"""The screen of groups, members and partitions (DASHBOARD.md §1, 6)."""

from __future__ import annotations

import re
import uuid
from datetime import timedelta
from html import unescape

import pytest
from confluent_kafka import Consumer
from confluent_kafka import TopicPartition as KafkaPartition
from confluent_kafka.admin import AdminClient, OffsetSpec
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.exceptions import PublishError
from kjo_django.runtime import get_transport
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import GroupOffsets, OutgoingRecord, TopicPartition, TopicSpec
from kjo_django.transports.memory import MemoryTransport
from tests.dashboard.conftest import url
from tests.factories import JobFactory, MetricBucketFactory, QueueControlFactory, WorkerFactory
from tests.unit.deliveries import kafka_at
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db

NOTHING = "–"
GROUP = "mailers"
QUEUES = {"emails": {"consumer_group": GROUP}}


def page_of(client):
    cache.clear()
    response = client.get(url("consumers"))
    assert response.status_code == 200
    return response.content.decode()


def cells(row):
    """Return the texts of a row's cells."""
    found = re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row, re.DOTALL)
    return [" ".join(unescape(re.sub(r"<[^>]+>", " ", cell)).split()) for cell in found]


def table(page, caption):
    """Return a table's rows, each with its cells by their column; a cell over several rows is in
    the first."""
    start = page.index(caption, page.index("<caption"))
    text = page[start : page.index("</table>", start)]
    heads, *rows = re.findall(r"<tr.*?</tr>", text, re.DOTALL)
    names = cells(heads)
    return [dict(zip(names[-len(found) :], found, strict=True)) for found in map(cells, rows)]


def partitions(client, group=GROUP):
    return {row["Partition"]: row for row in table(page_of(client), f"Partitions of group {group}")}


def workers(client):
    return {row["Worker"].split()[0]: row for row in table(page_of(client), "Workers")}


def held(partition=0, *, topic="emails", group=GROUP, minutes_ago=1.0, **more):
    """What a worker's row tells of a partition."""
    at = timezone.now() - timedelta(minutes=minutes_ago)
    return {
        "group": group,
        "topic": topic,
        "partition": partition,
        "rebalanced_at": at.isoformat(),
        **more,
    }


def answer_with(monkeypatch, found):
    """Let the transport answer like a log."""

    def offsets(self, topics, group):
        return {where: each for where, each in found.items() if where.topic in topics}

    monkeypatch.setattr(MemoryTransport, "offsets", offsets)


@pytest.fixture
def log(settings, monkeypatch):
    """One queue, on a log of three partitions."""
    settings.KJO = {**settings.KJO, "QUEUES": QUEUES}
    found = {
        TopicPartition("emails", 0): GroupOffsets(lag=13, committed=123_456_789, end=123_456_802),
        TopicPartition("emails", 1): GroupOffsets(lag=0, committed=0, end=0),
        TopicPartition("emails", 2): GroupOffsets(lag=4, committed=None, end=4),
    }
    answer_with(monkeypatch, found)
    return found


# --- Partitions -----------------------------------------------------------------------------------


@pytest.mark.usefixtures("log")
def test_each_partition_tells_where_the_group_is(everybody):
    # Given
    WorkerFactory(name="host-1", queues=["emails"], partitions=[held(0), held(1)])
    # When
    found = partitions(everybody)
    # Then
    told = {
        number: (row["Committed"], row["End"], row["Lag"], row["State"], row["Worker"])
        for number, row in found.items()
    }
    assert told == {
        "0": ("123456789", "123456802", "13", "Running", "host-1"),
        "1": ("0", "0", "0", "Running", "host-1"),
        "2": (NOTHING, "4", "4", NOTHING, "nobody"),
    }


@pytest.mark.usefixtures("log")
def test_the_last_rebalance_is_that_of_the_worker_and_of_the_group(everybody):
    # Given
    earlier, later = held(0, minutes_ago=90), held(1, minutes_ago=3)
    WorkerFactory(name="host-1", queues=["emails"], partitions=[earlier])
    WorkerFactory(name="host-2", queues=["emails"], partitions=[later])
    # When
    page = page_of(everybody)
    # Then
    rows = table(page, f"Partitions of group {GROUP}")
    rebalances = [row["Last rebalance"] for row in rows]
    assert NOTHING not in rebalances[:2]
    assert (len(set(rebalances)), rebalances[2]) == (3, NOTHING)
    heading = re.search(rf"<h2>Group {GROUP} .*?</h2>", page)[0]
    assert later["rebalanced_at"] in heading
    assert earlier["rebalanced_at"] not in heading
    first, second = re.search(r"host-1: .*?</p>", page)[0].split(" · ")
    assert earlier["rebalanced_at"] in first
    assert later["rebalanced_at"] in second


@pytest.mark.usefixtures("log")
def test_the_lag_of_a_group_is_unknown_while_that_of_one_topic_is(everybody, settings, monkeypatch):
    """The sum of the others would be taken for all."""
    away = {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}
    transports = {**settings.KJO["TRANSPORTS"], "away": away}
    stock = {"consumer_group": GROUP, "transport": "away"}
    settings.KJO = {
        **settings.KJO,
        "TRANSPORTS": transports,
        "QUEUES": {**QUEUES, "stock": stock},
    }
    heading = f'Group {GROUP} <span class="kjo-quiet">lag '
    assert f"{heading}17" in page_of(everybody)
    known = MemoryTransport.offsets

    def offsets(self, topics, group):
        if "stock" in topics:
            raise PublishError("the broker is away")
        return known(self, topics, group)

    monkeypatch.setattr(MemoryTransport, "offsets", offsets)
    assert f"{heading}{NOTHING}" in page_of(everybody)


@pytest.mark.usefixtures("log")
def test_members_without_a_partition_are_named(everybody):
    WorkerFactory(name="host-1", queues=["emails"], partitions=[held(0), held(1)])
    WorkerFactory(name="host-2", queues=["emails"])
    WorkerFactory(name="host-3", queues=["other"])
    WorkerFactory(name="host-4", queues=["emails"], stale=True)
    page = page_of(everybody)
    members = re.search(r"host-1: 2 partitions.*?</p>", page)[0]
    assert members.endswith(" · host-2: 0 partitions</p>")


@pytest.mark.usefixtures("log")
def test_the_worker_that_was_given_a_partition_last_has_it(everybody):
    """The row of one that was killed tells its partitions until its heartbeat is old."""
    WorkerFactory(name="a-killed", queues=["emails"], partitions=[held(0, minutes_ago=9)])
    WorkerFactory(name="b-heir", queues=["emails"], partitions=[held(0, minutes_ago=1)])
    WorkerFactory(name="c-old", queues=["emails"], partitions=[{"topic": "emails", "partition": 0}])
    assert partitions(everybody)["0"]["Worker"] == "b-heir"


@pytest.mark.usefixtures("log")
def test_two_groups_of_one_topic_are_told_apart(everybody, settings):
    copies = {"topic": "emails", "consumer_group": "copiers"}
    settings.KJO = {**settings.KJO, "QUEUES": {**QUEUES, "copies": copies}}
    WorkerFactory(
        name="host-1",
        queues=["emails", "copies"],
        partitions=[held(0), held(1, group="copiers")],
    )
    assert partitions(everybody)["0"]["Worker"] == "host-1"
    assert partitions(everybody)["1"]["Worker"] == "nobody"
    assert partitions(everybody, "copiers")["0"]["Worker"] == "nobody"
    assert partitions(everybody, "copiers")["1"]["Worker"] == "host-1"


@pytest.mark.usefixtures("log")
def test_a_partition_rests_is_quiet_or_is_paused(everybody):
    soon = (timezone.now() + timedelta(minutes=1)).isoformat()
    past = (timezone.now() - timedelta(minutes=1)).isoformat()
    WorkerFactory(
        queues=["emails"], partitions=[held(0, resting_until=soon), held(1, resting_until=past)]
    )
    WorkerFactory(queues=["emails"], partitions=[held(2)], state="quiet")
    states = {number: row["State"] for number, row in partitions(everybody).items()}
    assert states == {"0": "Paused by an error", "1": "Running", "2": "Quiet"}
    QueueControlFactory(queue="emails", is_paused=True)
    assert {row["State"] for row in partitions(everybody).values()} == {"Paused"}


@pytest.mark.usefixtures("log")
def test_trend_and_pace_are_those_of_the_last_minutes(everybody):
    whole = timezone.now().replace(second=0, microsecond=0)
    for ago, lag in ((4, 200), (1, 20)):
        minute = whole - timedelta(minutes=ago)
        MetricBucketFactory(minute=minute, queue="emails", handler="", completed_count=0, lag=lag)
        MetricBucketFactory(minute=minute, queue="emails", completed_count=100)
    first = partitions(everybody)["0"]
    assert first["Lag's trend"] == "shrinking by 60 a minute"
    assert first["Records per minute"] == "40"


@pytest.mark.usefixtures("log")
def test_what_is_not_known_is_a_dash(everybody):
    WorkerFactory(queues=["emails"], partitions=[{"topic": "emails", "partition": 0}])
    first = partitions(everybody)["0"]
    assert (first["Lag's trend"], first["Last rebalance"]) == (NOTHING, NOTHING)
    (worker,) = workers(everybody).values()
    assert worker["Current jobs"] == NOTHING


def test_workers_that_share_records_are_all_named(everybody, settings):
    """The database and Redis Streams have neither partitions nor offsets."""
    settings.KJO = {"QUEUES": QUEUES}
    for name in ("host-1", "host-2"):
        WorkerFactory(name=name, queues=["emails"], partitions=[held(0)])
    page = page_of(everybody)
    rows = table(page[page.index("<h2>Queues") :], "Queues")
    (row,) = [row for row in rows if row["Queue"] == "emails"]
    assert (row["Lag"], row["State"]) == ("0", "Running")
    assert sorted(row["Workers"].split(", ")) == ["host-1", "host-2"]
    assert not {"Partition", "Committed", "End", "Last rebalance"} & row.keys()


@pytest.mark.usefixtures("log")
def test_a_broker_that_is_away_leaves_what_workers_told(everybody, monkeypatch):
    def away(self, topics, group):
        raise PublishError("no answer in time")

    monkeypatch.setattr(MemoryTransport, "offsets", away)
    WorkerFactory(name="host-1", queues=["emails"], partitions=[held(0)])
    first, why = table(page_of(everybody), f"Partitions of group {GROUP}")
    assert (first["Committed"], first["Lag"], first["Worker"]) == (NOTHING, NOTHING, "host-1")
    assert list(why.values()) == ["no answer in time"]


def test_a_topic_of_many_partitions_is_shown_to_a_limit(everybody, settings, monkeypatch):
    settings.KJO = {**settings.KJO, "QUEUES": QUEUES}
    found = {TopicPartition("emails", number): GroupOffsets(1, 1, 2) for number in range(600)}
    answer_with(monkeypatch, found)
    page = page_of(everybody)
    assert "100 more" in page
    assert 'class="kjo-number">499</td>' in page
    assert ">500</td>" not in page


# --- Workers --------------------------------------------------------------------------------------


def test_a_worker_tells_what_it_runs(everybody, operator):
    # Given
    job = JobFactory(queue="emails")
    since = (timezone.now() - timedelta(seconds=90)).isoformat()
    running = [
        {"id": str(job.pk), "handler": "shop.send", "started_at": since},
        {"id": "no-uuid", "handler": "shop.hear", "started_at": since},
    ]
    WorkerFactory(queues=["emails"], partitions=[held(0, running=running)])
    # Then
    (worker,) = workers(everybody).values()
    assert worker["Current jobs"] == "shop.send 1.5 min shop.hear 1.5 min"
    # And who may see jobs is led to it
    assert url("job", job.pk) in page_of(everybody)
    assert url("job", job.pk) not in page_of(operator("view_dashboard"))


def test_what_an_operator_asked_is_seen_at_once(everybody):
    worker = WorkerFactory(queues=["emails"])
    page_of(everybody)
    page = everybody.post(url("worker_quiet", worker.pk), follow=True).content.decode()
    assert "→ Start nothing more" in page


HOSTILE = [
    "x",
    5,
    {"topic": "emails"},
    [[]],
    [["emails", "0"]],
    [["emails", 10**40]],
    [{"topic": ["emails"], "partition": 0}],
    [held(0, rebalanced_at="soon", resting_until=5, running="all", group=["g"])],
    [held(0, rebalanced_at="9999-12-31T23:59:59+00:00")],
    [held(0, running=[5, {}, {"id": 1}, {"id": "x", "handler": None, "started_at": 0}])],
    [held(0, topic="<script>alert(1)</script>")],
    [held(0, group="\u202egnp.exe")],
]


@pytest.mark.usefixtures("log")
@pytest.mark.parametrize("told", HOSTILE, ids=lambda told: str(told)[:40])
@pytest.mark.parametrize("queues", [["emails"], 5, {"a": 1}, [["emails"], None]], ids=str)
def test_a_row_that_makes_no_sense_breaks_nothing(everybody, told, queues):
    WorkerFactory(name="host-1", queues=queues, partitions=told)
    page = page_of(everybody)
    assert "host-1" in page
    assert "<script>alert" not in page
    assert "\u202e" not in page
    assert everybody.get(url("queues")).status_code == 200


@pytest.mark.usefixtures("log")
def test_queries_do_not_grow_with_workers_or_partitions(everybody):
    def cost():
        cache.clear()
        with CaptureQueriesContext(connection) as queries:
            everybody.get(url("consumers"))
        return len(queries)

    WorkerFactory(queues=["emails"], partitions=[held(0)])
    few = cost()
    for number in range(20):
        WorkerFactory(queues=["emails"], partitions=[held(n) for n in range(number)])
        MetricBucketFactory(queue="emails", handler=f"shop.{number}")
    assert cost() == few <= 6


# --- A real broker --------------------------------------------------------------------------------


@pytest.mark.kafka
def test_offsets_are_those_kafka_tells(everybody, settings, kafka_server):
    # Given a group that has settled a part of one of three partitions
    topic = f"it-screen-{uuid.uuid4().hex[:8]}"
    servers = {"bootstrap.servers": kafka_server.bootstrap_servers}
    settings.KJO = {
        **kafka_at(kafka_server.bootstrap_servers),
        "QUEUES": {"emails": {"topic": topic, "consumer_group": topic}},
    }
    transport = get_transport()
    transport.ensure_topics([TopicSpec(topic, partitions=3)])
    for partition, count in ((0, 5), (1, 2)):
        records = [OutgoingRecord(topic, b"x", partition=partition)] * count
        assert not [each.error for each in transport.publish(records) if each.error]
    subscription = transport.subscribe([topic], topic)
    taken = []
    eventually(lambda: taken.extend(subscription.poll(10, 0.1)) or len(taken) == 7, 60, "records")
    subscription.acknowledge(
        record for record in taken if record.partition == 0 and record.offset < 3
    )
    subscription.close()
    # When
    shown = {
        int(number): (row["Committed"], row["End"], row["Lag"])
        for number, row in partitions(everybody, topic).items()
    }
    # Then
    places = [KafkaPartition(topic, number) for number in range(3)]
    # An admin client asked for a group takes the process along where the coordinator has moved
    # (librdkafka#5040), so a client of the group is asked.
    asked = Consumer({**servers, "group.id": topic})
    committed = {each.partition: each.offset for each in asked.committed(places, 30)}
    asked.close()
    admin = AdminClient(servers)
    answers = admin.list_offsets({place: OffsetSpec.latest() for place in places})
    ends = {place.partition: future.result(PATIENCE).offset for place, future in answers.items()}
    assert (committed[0], ends) == (3, {0: 5, 1: 2, 2: 0})
    assert shown == {
        number: (
            str(committed[number]) if committed[number] >= 0 else NOTHING,
            str(end),
            str(end - max(0, committed[number])),
        )
        for number, end in ends.items()
    }
