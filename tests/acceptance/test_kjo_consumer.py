"""Template consumers as real processes on Kafka, Redis and PostgreSQL (issue 3: 1, 4, 5)."""

from __future__ import annotations

import time

import pytest
import redis

from kjo_django.conf import get_settings
from kjo_django.models import Worker
from kjo_django.operations.maintenance import topics
from kjo_django.patterns.items.hashing import partition_of
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from tests.acceptance.engine import ALIAS, Servers
from tests.acceptance.items import ItemEngine
from tests.items.producers import ItemProducer

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
    client.close()


def create_topic(engine: ItemEngine, partitions: int = 4) -> None:
    engine.configure(QUEUES={"items": {"topic_options": {"partitions": partitions}}})
    topics.create(["items"])


def send(kind: str = "new", **criteria) -> list[str]:
    result = ItemProducer({"sent_ttl": 0.001}).produce_messages(criteria, 10_000, kind)
    assert not result.failed, result
    return result.item_ids


def publish_to(partitions: range, item_id: str) -> None:
    """One copy of an item's message in each of these partitions."""
    queue = get_settings().queue("items")
    record = ItemProducer().build_message(ItemProducer.model.objects.get(pk=item_id), "new")
    answers = get_transport().publish(
        [
            OutgoingRecord(queue.topic, record.value, record.key, record.headers, partition=n)
            for n in partitions
        ]
    )
    assert not [answer.error for answer in answers if answer.error]


def quiet(engine: ItemEngine) -> bool:
    return engine.lag_of_items() == 0 and not engine.jobs.open().exists()


@pytest.mark.medium
def test_the_lease_as_a_raw_client_sees_it(engine: ItemEngine, raw) -> None:
    """KJO-60, KJO-61, KJO-65 … 67: the key, its value, its time; nothing is stored elsewhere."""
    create_topic(engine)
    worker = engine.ready_consumer()
    (item_id,) = engine.fill(1, body="sleep 2")
    assert send() == [item_id]
    engine.wait_until(lambda: engine.calls(), "It was never processed")
    key = f"CONS:{engine.prefix}:{item_id}"
    row = Worker.objects.using(ALIAS).get(pid=worker.pid)
    assert list(raw.scan_iter(match=f"CONS:{engine.prefix}:*")) == [key]
    assert raw.get(key) == row.pk.hex
    assert 25 < raw.ttl(key) <= 30
    assert engine.items.get().state == 1
    assert ItemProducer().get_processing_ids() == {item_id}
    assert send() == []  # KJO-08
    engine.wait_until(lambda: engine.all_in_state(2), "It was never completed")
    engine.wait_until(lambda: not raw.exists(key), "The lease was never released")
    assert [line[3] for line in engine.calls("success")] == [item_id]
    assert worker.stop() == 0


def test_ten_consumers_receive_one_id_at_once(engine: ItemEngine) -> None:
    """KJO-F1, KJO-62, KJO-63: item 4 of the issue."""
    create_topic(engine, partitions=10)
    program = engine.run("tests.acceptance.many_workers", "items", "10")
    engine.wait_until(
        lambda: (
            [len(row.partitions) for row in Worker.objects.using(ALIAS).filter(pid=program.pid)]
            == [1] * 10
        ),
        "The ten never had a partition each",
        90,
    )
    (item_id,) = engine.fill(1, body="sleep 1.5")
    publish_to(range(10), item_id)
    engine.wait_until(lambda: engine.all_in_state(2), "It was never completed")
    engine.wait_until(lambda: engine.lag_of_items() == 0, "The copies were never settled")
    assert len(engine.calls()) == 1
    assert engine.runs() == {item_id: 1}
    assert program.stop() == 0


@pytest.mark.parametrize(
    "plain", [False, pytest.param(True, marks=pytest.mark.long)], ids=["atomic", "plain"]
)
def test_a_handler_three_times_longer_than_the_processing_ttl(
    engine: ItemEngine, raw, plain: bool
) -> None:
    """KJO-59, KJO-71, KJO-F10, KJO-F11: item 4 of the issue; the lease is renewed."""
    if plain:
        engine.more["KJO_TEST_ITEMS_PLAIN"] = "1"
    create_topic(engine, partitions=2)
    engine.configure(PROCESSING_TTL=2)
    workers = [engine.consume("--no-relay") for _ in range(2)]
    engine.wait_until(
        lambda: all(len(engine.partitions_of(worker.pid)) == 1 for worker in workers),
        "The two never had a partition each",
    )
    (item_id,) = engine.fill(1, body="sleep 6")
    publish_to(range(2), item_id)
    engine.wait_until(lambda: engine.calls(), "It was never processed")
    key, tokens, began = f"CONS:{engine.prefix}:{item_id}", set(), time.monotonic()
    while time.monotonic() - began < 5:  # timed loop: longer than the lease lasts
        assert 0 < raw.pttl(key) <= 2000
        tokens.add(raw.get(key))
        engine.wait_for_moment(0.1)
    assert len(tokens) == 1
    engine.wait_until(lambda: engine.all_in_state(2), "It was never completed")
    engine.wait_until(lambda: engine.lag_of_items() == 0, "The copies were never settled")
    assert len(engine.calls()) == 1
    assert engine.runs() == {item_id: 1}


def test_losing_redis_while_an_item_is_processed(engine: ItemEngine, raw) -> None:
    """KJO-F20: the claim is gone, the database decides."""
    create_topic(engine, partitions=2)
    workers = [engine.consume("--no-relay") for _ in range(2)]
    engine.wait_until(
        lambda: all(len(engine.partitions_of(worker.pid)) == 1 for worker in workers),
        "The two never had a partition each",
    )
    (item_id,) = engine.fill(1, body="sleep 4")
    publish_to(range(1), item_id)
    engine.wait_until(lambda: engine.calls(), "It was never processed")
    raw.delete(f"CONS:{engine.prefix}:{item_id}")
    publish_to(range(1, 2), item_id)
    engine.wait_until(lambda: engine.all_in_state(2), "It was never completed")
    engine.wait_until(lambda: engine.lag_of_items() == 0, "The copy was never settled")
    assert len(engine.calls()) == 1


@pytest.mark.medium
def test_the_consumer_goes_on_without_redis(engine: ItemEngine) -> None:
    """KJO-F20: retries and all."""
    create_topic(engine)
    engine.servers = Servers(
        engine.servers.database_url, engine.servers.kafka, "redis://127.0.0.1:1/0"
    )
    engine.configure()
    ids = engine.fill(3) + engine.fill(1, body="refuse")
    producer = ItemProducer({"without_coordination": "send"})
    assert producer.produce_messages({}, 10).sent == 4
    worker = engine.consume()
    engine.wait_until(lambda: not engine.items.filter(state=1).exists(), "Items were left")
    assert engine.items.filter(state=3).count() == 1
    assert engine.runs() == dict.fromkeys(ids[:3], 1)
    assert worker.stop() == 0


@pytest.mark.long
def test_a_worker_killed_while_processing(engine: ItemEngine, raw) -> None:
    """KJO-67, KJO-69: nothing to clean up; another takes the item over."""
    create_topic(engine)
    victim = engine.ready_consumer()
    (item_id,) = engine.fill(1, body="sleep 3")
    send()
    engine.wait_until(lambda: engine.calls(), "It was never processed")
    victim.kill()
    key = f"CONS:{engine.prefix}:{item_id}"
    assert 0 < raw.ttl(key) <= 30
    assert engine.items.get().state == 1
    worker = engine.consume()
    engine.wait_until(lambda: engine.all_in_state(2), "Nobody took it over")
    assert (len(engine.calls()), engine.runs()) == (2, {item_id: 1})
    engine.wait_until(lambda: not raw.exists(key), "The lease was never released")
    assert worker.stop() == 0


@pytest.mark.long
def test_failed_items_are_sent_again_by_the_command(engine: ItemEngine) -> None:
    """KJO-40, KJO-46, KJO-70."""
    create_topic(engine)
    worker = engine.ready_consumer()
    (item_id,) = engine.fill(1, body="refuse")
    send()
    engine.wait_until(lambda: engine.calls("failed"), "It never failed")
    assert engine.items.get().state == 3
    engine.items.update(body="")
    retry = engine.produce("--criteria", "state=FAILED", "--type", "retry")
    assert retry.wait() == 0, retry.log_tail()
    engine.wait_until(lambda: engine.all_in_state(2), "It was never completed")
    assert [line[3:] for line in engine.calls()] == [[item_id, "new"], [item_id, "retry"]]
    assert worker.stop() == 0


# --- Pauses ---------------------------------------------------------------------------------------


def in_partition(ids: list[str], number: int) -> set[str]:
    return {item_id for item_id in ids if partition_of(item_id, 4) == number}


def paused(engine: ItemEngine, seconds: float) -> tuple[str, int, float]:
    """A running consumer, one of whose partitions has just met a rate limit."""
    create_topic(engine)
    engine.configure(ERROR_RECOVERY_DELAYS={"rate_limit": seconds})
    engine.ready_consumer()
    (item_id,) = engine.fill(1, body="limit 1")
    send(body="limit 1")
    engine.wait_until(engine.calls, "It never met the limit")
    return item_id, partition_of(item_id, 4), float(engine.calls()[0][0])


def test_a_pause_for_a_rate_limit_ends_by_itself(engine: ItemEngine) -> None:
    """KJO-72 … 76, KJO-F15: item 5 of the issue; it resumes by itself. The next test shows that the
    others flow meanwhile: its pause does not end before they have."""
    limited, number, at = paused(engine, 6)
    ids = engine.fill(40, body="behind")
    send(body="behind")
    waiting = in_partition(ids, number)
    engine.wait_until(lambda: engine.all_in_state(2), "It never resumed")
    later = [float(line[0]) for line in engine.calls() if line[3] in waiting]
    assert min(later) >= at + 5.8
    assert engine.runs() == dict.fromkeys([limited, *ids], 1)
    assert [line[3] for line in engine.calls()].count(limited) == 2


@pytest.mark.long
def test_a_pause_survives_rebalances(engine: ItemEngine) -> None:
    """KJO-76: consumers come and go during the pause and after it; no partition stays paused."""
    limited, number, at = paused(engine, 5)
    ids = engine.fill(40, body="behind")
    second = engine.ready_consumer()
    send(body="behind")
    engine.wait_for_moment(max(0.0, at + 5.5 - time.time()))
    assert second.stop() == 0
    more = engine.fill(40, body="more")
    send(body="more")
    engine.wait_until(lambda: engine.all_in_state(2), "A partition stayed paused")
    assert engine.runs() == dict.fromkeys([limited, *ids, *more], 1)
    assert in_partition(ids + more, number)


def test_sigterm_during_the_pause(engine: ItemEngine) -> None:
    """KJO-72 … 76, KJO-F15: item 5 of the issue; only one partition is paused, the stop does not
    wait for the end of the pause, and nothing is lost."""
    limited, number, _ = paused(engine, 600)
    ids = engine.fill(20, body="behind")
    send(body="behind")
    waiting = in_partition(ids, number)
    engine.wait_until(
        lambda: engine.items.filter(state=2).count() == 20 - len(waiting), "The others flow"
    )
    assert {line[3] for line in engine.calls()} == {limited, *ids} - waiting
    worker = engine.programs[0]
    assert worker.stop() == 0
    # Neither the limited item nor what waited behind it was committed past; no attempt was spent.
    assert engine.lag_of_items() == 1 + len(waiting)
    assert not engine.jobs.exists()
    engine.consume()
    engine.wait_until(lambda: engine.all_in_state(2) and quiet(engine), "Items were lost")
    assert engine.runs() == dict.fromkeys([limited, *ids], 1)
