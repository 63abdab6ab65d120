"""Template producers on a real Kafka and a real Redis, seen with raw clients (issue 3: 1, 2, 3)."""

from __future__ import annotations

import json
import time
from collections import Counter
from datetime import timedelta

import pytest
import redis
from confluent_kafka import Consumer, Producer

from kjo_django.conf import get_settings
from kjo_django.exceptions import CoordinationError
from kjo_django.operations.maintenance import topics
from kjo_django.patterns.items.hashing import partition_of
from kjo_django.runtime import get_coordination, get_transport
from tests.acceptance.items import ItemEngine
from tests.items.models import Item
from tests.items.producers import ItemProducer
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.kafka,
    pytest.mark.redis,
    pytest.mark.postgres,
    pytest.mark.timeout(180),
]
engine = pytest.fixture(lambda items_engine: items_engine)


@pytest.fixture
def raw(engine: ItemEngine):
    client = redis.Redis.from_url(engine.servers.redis, decode_responses=True)
    yield client
    left = list(client.scan_iter(match=f"*{engine.prefix}*", count=5000))
    for start in range(0, len(left), 1000):
        client.unlink(*left[start : start + 1000])
    client.close()


@pytest.fixture
def topic(engine: ItemEngine) -> str:
    topics.create(["items"])
    return get_settings().queue("items").topic


def read_all(engine: ItemEngine, topic: str, expected: int) -> list:
    """Read a topic with a raw client, and a little beyond what is expected."""
    consumer = Consumer(
        {
            "bootstrap.servers": engine.servers.kafka,
            "group.id": f"raw-{time.monotonic_ns()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.subscribe([topic])
    found = []

    def has_read_all() -> bool:
        messages = consumer.consume(5000, 0.5)
        found.extend(message for message in messages if message.error() is None)
        return len(found) >= expected and not messages

    wait_until(has_read_all, f"{expected} messages on {topic}", lambda: len(found))
    consumer.close()
    return found


@pytest.mark.medium
def test_what_is_on_the_wire_and_in_redis(engine: ItemEngine, raw, topic: str) -> None:
    """KJO-17 … 24, KJO-27 … 29, KJO-101, KJO-F7, KJO-F18."""
    (item_id,) = engine.fill(1, body="hello")
    producer = ItemProducer()
    before = time.time() * 1000
    producer.produce_messages({"state": 1}, 10)
    # Then Redis holds exactly this, and no claim is left
    hash = producer.message_hash(engine.items.get())
    key = f"{engine.prefix}_SENT:{item_id}"
    assert list(raw.scan_iter(match=f"*{engine.prefix}*")) == [key]
    assert raw.get(key) == hash
    # 2 x the PROCESSING_TTL of 30 s these tests have chosen
    assert 55 < raw.ttl(key) <= 60
    # And Kafka this
    (message,) = read_all(engine, topic, 1)
    assert message.key() == f"new-{item_id}".encode()
    value = json.loads(message.value())
    assert (value["id"], value["type"]) == (item_id, "new")
    assert value["data"]["body"] == "hello"
    headers = dict(message.headers())
    assert before - 1 <= int(headers.pop("timestamp")) <= time.time() * 1000
    assert headers == {
        "message-type": b"new",
        "item-id": item_id.encode(),
        "content-hash": hash.encode(),
        "stable-key": f"new-{item_id}".encode(),
        "deduplication-strategy": b"hybrid",
    }
    assert message.partition() == partition_of(item_id, 4)


@pytest.mark.medium
def test_the_literals_of_the_seed(engine: ItemEngine, raw, topic: str) -> None:
    """KJO-28, KJO-29: EMAIL_SETTINGS as printed, 20 seconds."""
    engine.configure(PROCESSING_TTL=300)
    (item_id,) = engine.fill(1)
    ItemProducer().produce_messages({"state": 1}, 10)
    assert 18 <= raw.ttl(f"{engine.prefix}_SENT:{item_id}") <= 20


@pytest.mark.medium
def test_an_item_stays_in_its_partition(engine: ItemEngine, topic: str) -> None:
    """KJO-101, KJO-F7: under every type, and where Kafka's clients put its bare id."""
    ids = engine.fill(50)
    producer = ItemProducer({"sent_ttl": 0.001})
    for kind in ("new", "retry", "other"):
        assert producer.produce_messages({}, 100, kind).sent == 50
        time.sleep(0.01)  # sleep: until what was sent may be sent again
    plain = Producer({"bootstrap.servers": engine.servers.kafka, "partitioner": "murmur2_random"})
    for item_id in ids:
        plain.produce(topic, b"{}", key=item_id.encode(), headers={"item-id": item_id})
    plain.flush(10)
    partitions: dict[str, set] = {}
    for message in read_all(engine, topic, 200):
        item_id = dict(message.headers())["item-id"].decode()
        partitions.setdefault(item_id, set()).add(message.partition())
    assert {len(found) for found in partitions.values()} == {1}
    assert len(set.union(*partitions.values())) == 4


@pytest.mark.medium
def test_changed_content_inside_the_ttl(engine: ItemEngine, raw, topic: str) -> None:
    """KJO-15, KJO-16, KJO-F3: item 3 of the issue."""
    ids = engine.fill(20)
    producer = ItemProducer()
    assert producer.produce_messages({"state": 1}, 100).sent == 20
    assert producer.produce_messages({"state": 1}, 100).sent == 0
    before = raw.get(f"{engine.prefix}_SENT:{ids[3]}")
    engine.items.filter(pk=ids[3]).update(body="changed")
    assert producer.produce_messages({"state": 1}, 100).item_ids == [ids[3]]
    assert raw.get(f"{engine.prefix}_SENT:{ids[3]}") != before
    assert producer.produce_messages({"state": 1}, 100).sent == 0
    assert len(read_all(engine, topic, 21)) == 21


def test_two_producers_over_the_same_10000_items(engine: ItemEngine, topic: str) -> None:
    """KJO-34, KJO-F2: item 2 of the issue; each is sent once."""
    engine.configure(SENT_TTL=600)
    ids = engine.fill(10_000)
    arguments = ("--criteria", "state=1", "--limit", "10000", "--json")
    both = [engine.produce(*arguments) for _ in range(2)]
    assert [program.wait(120) for program in both] == [0, 0], both[0].log_tail()
    results = [
        json.loads(next(line for line in program.log.splitlines() if line.startswith("{")))
        for program in both
    ]
    sent = Counter(dict(m.headers())["item-id"].decode() for m in read_all(engine, topic, 10_000))
    assert sent.keys() == set(ids)
    assert set(sent.values()) == {1}
    assert sum(result["sent"] for result in results) == 10_000
    # Both were at it: neither found everything done.
    assert all(result["total"] for result in results)


def test_a_producer_killed_after_claiming(engine: ItemEngine, raw, topic: str) -> None:
    """KJO-F2: item 2 of the issue; its items are sent after the claim's time."""
    ids = engine.fill(20)
    engine.more["KJO_TEST_CLAIM_TTL"] = "3"
    dead = engine.run("tests.acceptance.producer_that_dies")
    assert dead.wait() == -9, dead.log_tail()
    claims = list(raw.scan_iter(match=f"PROD:{engine.prefix}:*"))
    assert len(claims) == 20
    assert 0 < raw.pttl(claims[0]) <= 3000
    result = ItemProducer().produce_messages({"state": 1}, 100)
    assert (result.sent, result.skipped) == (0, 20)
    engine.wait_until(lambda: not raw.exists(*claims), "The claims never expired")
    assert ItemProducer().produce_messages({"state": 1}, 100).item_ids == ids
    assert len(read_all(engine, topic, 20)) == 20


def test_50000_tracking_keys(engine: ItemEngine, raw, topic: str) -> None:
    """KJO-09, KJO-10, KJO-F8, KJO-F9: item 3 of the issue; no KEYS, no collision."""
    ids = engine.fill(30)
    pipeline = raw.pipeline(transaction=False)
    for n in range(50_000):
        pipeline.set(f"CONS:{engine.prefix}:other-{n}", "token", px=120_000)
        pipeline.set(f"{engine.prefix}_SENT:other-{n}", "hash", px=120_000)
    # Names that look alike and are not meant
    pipeline.set(f"CONS:{engine.prefix}X:{ids[0]}", "token", px=120_000)
    pipeline.set(f"CONS:X{engine.prefix}:{ids[1]}", "token", px=120_000)
    pipeline.set(f"CONS:{engine.prefix}:{ids[2]}", "token", px=120_000)
    pipeline.execute()
    raw.config_resetstat()
    result = ItemProducer().produce_messages({"state": 1}, 10)
    commands = raw.info("commandstats")
    assert "cmdstat_keys" not in commands
    assert commands["cmdstat_scan"]["calls"] < 200
    assert commands["cmdstat_mget"]["calls"] <= 3
    # The one that is being processed was excluded, and only that one.
    assert result.item_ids == [item_id for item_id in ids if item_id != ids[2]][:10]


@pytest.mark.medium
def test_redis_down(engine: ItemEngine, topic: str) -> None:
    """KJO-F8: production stops with an error, and goes on without where that is configured."""
    engine.fill(2)
    from django.conf import settings
    from django.test import override_settings

    caches = {
        **settings.CACHES,
        "default": {
            "BACKEND": "django_redis.cache.RedisCache",
            "LOCATION": "redis://127.0.0.1:1/0",
            "OPTIONS": {"SOCKET_CONNECT_TIMEOUT": 1},
        },
    }
    with override_settings(CACHES=caches):
        with pytest.raises(CoordinationError):
            ItemProducer().produce_messages({"state": 1}, 10)
        result = ItemProducer({"without_coordination": "send"}).produce_messages({"state": 1}, 10)
    assert result.sent == 2
    assert "cannot be used" in result.reason


@pytest.mark.medium
def test_a_missing_topic_is_created(engine: ItemEngine) -> None:
    """KJO-88 … 93: by whoever comes first."""
    engine.configure(
        QUEUES={
            "items": {
                "topic_options": {"partitions": 3, "config_entries": {"retention.ms": "604800000"}}
            }
        }
    )
    (item_id,) = engine.fill(1)
    assert ItemProducer().produce_messages({"state": 1}, 1).item_ids == [item_id]
    queue = get_settings().queue("items")
    (found,) = get_transport().describe_topics([queue.topic])
    assert (found.partitions, found.config["retention.ms"]) == (3, "604800000")


@pytest.mark.medium
def test_claims_end_with_the_send(engine: ItemEngine, raw, topic: str) -> None:
    """KJO-F2: an error releases them too."""
    (item_id,) = engine.fill(1, body="x" * 200)
    huge = ItemProducer({"key_format": "{type}-{id}" + "x" * 1_100_000})
    result = huge.produce_messages({"state": 1}, 1)
    assert result.failed == 1
    assert list(raw.scan_iter(match=f"*{engine.prefix}*")) == []
    claimed = get_coordination().claim(
        [f"PROD:{engine.prefix}:{item_id}"], "another", timedelta(seconds=5)
    )
    assert claimed[0].acquired
    assert Item.objects.count() == 1
