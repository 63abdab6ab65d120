"""Template producers on the memory transport: sent, skipped, refused, told of.

What only a real Redis and Kafka can show is in tests/acceptance/test_kjo_producer.py.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django import AbstractProducer, ModelProducer
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.patterns.items import producer
from kjo_django.runtime import close_backends, get_coordination, get_transport
from kjo_django.transports.base import Published
from tests.items.models import Item
from tests.unit.deliveries import MEMORY

pytestmark = pytest.mark.django_db(transaction=True)


class Source(AbstractProducer):
    """Items that are dicts, in a list."""

    topic = "source"
    key_prefix = "SOURCE"
    key_field = "name"

    def __init__(self, items, **config):
        super().__init__(config)
        self.items = items
        self.succeeded = []
        self.failed = []
        self.asked = []

    def get_next_processing_items(self, criteria, limit, excluded_ids):
        self.asked.append((criteria, limit, set(excluded_ids)))
        matching = [i for i in self.items if all(i.get(k) == v for k, v in criteria.items())]
        return [i for i in matching if str(i["id"]) not in excluded_ids][:limit]

    def get_item_id(self, item):
        return str(item["id"])

    def get_item_key(self, item):
        return item["name"]

    def on_success(self, item_id):
        self.succeeded.append(item_id)

    def on_failed(self, item_id, error):
        self.failed.append((item_id, str(error)))


def items(count, **more):
    return [{"id": n, "name": f"item {n}", "state": 1, **more} for n in range(1, count + 1)]


@pytest.fixture(autouse=True)
def memory(settings):
    settings.KJO = {"SERVICE_NAME": "tests", **MEMORY}
    yield
    close_backends()


def records(topic="source"):
    """Everything sent so far."""
    subscription = get_transport().subscribe([topic], f"look-{time.monotonic_ns()}")
    found = []
    while batch := subscription.poll(1000, 0.01):
        found += batch
    subscription.close()
    return found


def ids(topic="source"):
    return [record.headers["item-id"].decode() for record in records(topic)]


class Unreachable:
    """Coordination during an outage."""

    def __getattr__(self, name):
        def refuse(*args, **kwargs):
            raise CoordinationError("Redis cannot be reached")

        return refuse


@pytest.fixture
def redis_down(monkeypatch):
    monkeypatch.setattr("kjo_django.patterns.items.producer.get_coordination", Unreachable)


# --- The contract ---------------------------------------------------------------------------------


def test_the_base_cannot_be_instantiated():
    """KJO-01, KJO-95: three methods are required."""
    assert AbstractProducer.__abstractmethods__ == {
        "get_next_processing_items",
        "get_item_id",
        "get_item_key",
    }
    with pytest.raises(TypeError, match="abstract"):
        AbstractProducer()


@pytest.mark.parametrize("name", ["on_success", "on_failed"])
def test_two_hooks_are_optional(name):
    """KJO-95."""
    assert name not in AbstractProducer.__abstractmethods__


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"topic": None}, "needs a topic"),
        ({"key_prefix": None}, "needs a key_prefix"),
        ({"key_prefix": "EMAIL:VIP"}, "ends the prefix"),
        ({"sent_ttl": -1}, "sent_ttl"),
        ({"sent_ttl": "20"}, "sent_ttl"),
        ({"redisOptions": {"sentTTL": 1}}, "unknown key"),
        ({"redisOptions": {"sentTtl": 0}}, "sent_ttl"),
        ({"hash_algorithm": "crc32"}, "hash_algorithm"),
        ({"key_format": "{nothing}"}, "key_format"),
        ({"topik": "x"}, "Did you mean 'topic'"),
        ({"without_coordination": "ignore"}, "without_coordination"),
    ],
)
def test_configuration_is_checked_when_a_producer_is_made(config, complaint):
    """KJO-86, KJO-87, KJO-F8."""
    with pytest.raises(ImproperlyConfigured, match=complaint):
        Source([], **config)


def test_seed_1s_spelling_of_the_configuration_is_understood():
    """KJO-87."""
    source = Source([], redisOptions={"keyPrefix": "EMAIL", "processingTtl": 100, "sentTtl": 50})
    assert source.target.key_prefix == "EMAIL"
    assert source.target.sent_ttl == timedelta(seconds=50)


@pytest.mark.parametrize(
    ("kjo", "config", "seconds"),
    [
        ({}, {}, 20),
        ({}, {"processing_ttl": 100}, 200),
        ({}, {"processing_ttl": 100, "sent_ttl": 30}, 30),
        ({"PROCESSING_TTL": 60}, {}, 120),
        ({"PROCESSING_TTL": 60, "SENT_TTL": 7}, {}, 7),
    ],
)
def test_the_sent_ttl_is_twice_a_processing_ttl_that_was_chosen(settings, kjo, config, seconds):
    """KJO-29, KJO-F4: the literals 300 and 20 stay reachable."""
    settings.KJO = {**settings.KJO, **kjo}
    assert Source([], **config).target.sent_ttl == timedelta(seconds=seconds)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((None, 10), TypeError),
        (({}, 0), ValueError),
        (({}, -1), ValueError),
        (({}, "10"), ValueError),
        (({}, True), ValueError),
        (({}, 10, ""), ValueError),
    ],
)
def test_wrong_arguments_are_refused(arguments, error):
    """KJO-07."""
    with pytest.raises(error):
        Source([]).produce_messages(*arguments)


# --- One run --------------------------------------------------------------------------------------


def test_items_are_sent_and_told_of():
    """KJO-02 … 07, KJO-11, KJO-31, KJO-33: the result says what became of them."""
    source = Source([*items(5, kind="a"), {"id": 9, "name": "other", "state": 2}])
    result = source.produce_messages({"state": 1}, 3)
    assert (result.total, result.sent, result.skipped, result.failed) == (3, 3, 0, 0)
    assert result.item_ids == source.succeeded == ["1", "2", "3"] == ids()
    assert len(bytes.fromhex(result.batch_id)) == 8
    assert result.reason is None
    assert source.asked[0] == ({"state": 1}, 3, set())


def test_nothing_to_do_is_no_error():
    """KJO-07."""
    result = Source([]).produce_messages({"state": 1}, 10)
    assert (result.sent, result.reason) == (0, "no items")


def test_the_wire_format():
    """KJO-17 … 23."""
    before = time.time() * 1000
    Source(items(1)).produce_messages({}, 1, "retry")
    (record,) = records()
    hash = Source(items(1)).message_hash(items(1)[0])
    assert record.key == b"retry-1"
    assert json.loads(record.value) == {"id": "1", "data": items(1)[0], "type": "retry"}
    timestamp = record.headers.pop("timestamp")
    assert before - 1 <= int(timestamp) <= time.time() * 1000
    assert record.headers == {
        "message-type": b"retry",
        "item-id": b"1",
        "content-hash": hash.encode(),
        "stable-key": b"retry-1",
        "deduplication-strategy": b"hybrid",
    }


def test_the_key_format_is_configurable():
    """KJO-18: the other format seed 1 prints."""
    source = Source(items(1), key_format="{type}-{hash:.12}")
    source.produce_messages({}, 1)
    assert records()[0].key == f"new-{source.message_hash(items(1)[0])[:12]}".encode()


def test_an_item_has_one_partition_under_every_type(monkeypatch):
    """KJO-101, KJO-F7."""
    monkeypatch.setattr(producer, "_partition_count", lambda target: 12)
    source = Source(items(20))
    for item in source.items:
        partitions = {source.build_message(item, t).partition for t in ("new", "retry", "x")}
        assert len(partitions) == 1
    assert len({source.build_message(i, "new").partition for i in source.items}) > 1


def test_the_topic_is_that_of_the_queue():
    """KJO-86: consumer and producer agree through the queue's name."""
    source = Source([], topic=None, key_prefix=None, queue="ledger")
    assert (source.target.topic, source.target.key_prefix) == ("ledger", "LEDGER")


# --- De-duplication -------------------------------------------------------------------------------


def test_unchanged_content_is_not_sent_again():
    """KJO-13 … 15, KJO-27, KJO-30."""
    source = Source(items(3))
    source.produce_messages({}, 10)
    result = source.produce_messages({}, 10)
    assert (result.sent, result.skipped) == (0, 3)
    hash = source.message_hash(source.items[0])
    assert source.get_sent_hash("1") == hash
    assert source.is_sent_recently("1", hash)
    assert not source.is_sent_recently("1", "other")
    assert not source.is_sent_recently("99", hash)


def test_changed_content_is_sent_again():
    """KJO-16, KJO-F3: sent ids are judged after hashing, not excluded before."""
    source = Source(items(3))
    source.produce_messages({}, 10)
    source.items[1]["name"] = "changed"
    assert source.produce_messages({}, 10).item_ids == ["2"]
    assert source.asked[-1][2] == set()
    assert source.produce_messages({}, 10).sent == 0


def test_after_the_ttl_it_is_sent_again(standing_clock):
    """KJO-29."""
    source = Source(items(1), sent_ttl=0.2)
    source.produce_messages({}, 1)
    assert source.produce_messages({}, 1).sent == 0
    standing_clock.advance(0.25)
    assert source.produce_messages({}, 1).sent == 1


def test_only_the_declared_fields_make_content_new():
    """KJO-12, KJO-F6."""
    source = Source(items(1, views=1), hash_fields=["name"])
    source.produce_messages({}, 1)
    source.items[0]["views"] = 2
    assert source.produce_messages({}, 1).sent == 0
    source.items[0]["name"] = "changed"
    assert source.produce_messages({}, 1).sent == 1


def test_items_being_processed_are_excluded():
    """KJO-08, KJO-09: by the consumers' leases."""
    get_coordination().claim(["CONS:SOURCE:2"], "somebody", timedelta(seconds=30))
    source = Source(items(3))
    assert source.get_processing_ids() == {"2"}
    assert source.produce_messages({}, 10).item_ids == ["1", "3"]
    assert source.asked[0][2] == {"2"}


@pytest.mark.parametrize("other", ["SOURCES", "SOURC?", "SOURC*", "OURCE", "source"])
def test_prefixes_do_not_collide(other):
    """KJO-F8."""
    get_coordination().claim([f"CONS:{other}:2"], "somebody", timedelta(seconds=30))
    assert Source([]).get_processing_ids() == set()
    assert Source([], key_prefix=other).get_processing_ids() == {"2"}


def test_sent_items_do_not_hide_those_behind_them():
    """KJO-F9: windows go on past what was sent a moment ago."""
    source = Source(items(50))
    assert [source.produce_messages({}, 10).sent for _ in range(6)] == [10, 10, 10, 10, 10, 0]
    assert sorted(map(int, ids())) == list(range(1, 51))


def test_a_source_that_ignores_the_exclusion_does_not_loop():
    """KJO-F9."""

    class Careless(Source):
        def get_next_processing_items(self, criteria, limit, excluded_ids):
            return self.items[:limit]

    source = Careless(items(20))
    get_coordination().claim(["CONS:SOURCE:2"], "somebody", timedelta(seconds=30))
    sent = [source.produce_messages({}, 5).sent for _ in range(6)]
    assert sum(sent) == len(set(ids())) == 19
    assert "2" not in ids()


def test_an_item_another_producer_claimed_is_left_to_it(standing_clock):
    """KJO-34, KJO-F2."""
    get_coordination().claim(["PROD:SOURCE:1"], "another", timedelta(seconds=0.3))
    source = Source(items(2))
    result = source.produce_messages({}, 10)
    assert (result.item_ids, result.skipped) == (["2"], 1)
    # Its producer died: after the claim's time they are anybody's.
    standing_clock.advance(0.35)
    assert source.produce_messages({}, 10).item_ids == ["1"]


def test_what_another_producer_sent_between_look_and_claim_is_not_sent_again(monkeypatch):
    """KJO-F2: the marks are looked at again under the claim."""
    first, second = Source(items(3)), Source(items(3))
    original = Source.get_sent_hashes
    looks = []

    def look(self, item_ids):
        found = original(self, item_ids)
        looks.append(found)
        if len(looks) == 1:
            monkeypatch.undo()
            second.produce_messages({}, 10)
        return found

    monkeypatch.setattr(Source, "get_sent_hashes", look)
    result = first.produce_messages({}, 10)
    assert (result.sent, result.skipped) == (0, 3)
    assert sorted(ids()) == ["1", "2", "3"]


def test_equal_content_of_other_ids():
    """KJO-F6: skipped where that is asked for, and only there."""
    twins = [{"id": n, "name": "same", "state": 1} for n in (1, 2)]
    assert Source(twins, hash_fields=["name"]).produce_messages({}, 10).sent == 2
    source = Source(
        twins, hash_fields=["name"], dedup_across_ids=True, key_prefix="CROSS", batch_size=1
    )
    result = source.produce_messages({}, 10)
    assert (result.item_ids, result.skipped) == (["1"], 1)
    third = [{"id": 3, "name": "same", "state": 1}, {"id": 4, "name": "else", "state": 1}]
    source = Source(third, hash_fields=["name"], dedup_across_ids=True, key_prefix="CROSS")
    assert source.produce_messages({}, 10).item_ids == ["4"]


# --- Failure --------------------------------------------------------------------------------------


def refuse_some(monkeypatch, refused, *, is_final=False):
    original = get_transport().publish

    def publish(records):
        answers = original([r for r in records if r.headers["item-id"].decode() not in refused])
        taken = iter(answers)
        return [
            Published(error="too large", is_final=is_final)
            if record.headers["item-id"].decode() in refused
            else next(taken)
            for record in records
        ]

    monkeypatch.setattr(get_transport(), "publish", publish)


def test_failure_is_told_for_each_message(monkeypatch):
    """KJO-06, KJO-31: the others go out, the failed one is free to be sent again."""
    refuse_some(monkeypatch, {"2"})
    source = Source(items(3))
    result = source.produce_messages({}, 10)
    assert (result.item_ids, result.failed, result.reason) == (["1", "3"], 1, "too large")
    assert source.failed == [("2", "too large")]
    assert source.get_sent_hash("2") is None
    monkeypatch.undo()
    assert source.produce_messages({}, 10).item_ids == ["2"]


@pytest.mark.parametrize("bad", ["refused", "unbuildable", "unhashable"])
def test_items_that_can_never_be_sent_do_not_hide_those_behind_them(monkeypatch, bad):
    """KJO-F9: with as many of them as the limit at the head, no later item was ever sent."""
    # Given
    source = Source(items(6))
    if bad == "refused":
        refuse_some(monkeypatch, {"1", "2"}, is_final=True)
    else:
        method = "message_hash" if bad == "unhashable" else "serialize_item"
        original = getattr(Source, method)

        def fail(self, item):
            if item["id"] in (1, 2):
                raise ValueError("too odd")
            return original(self, item)

        monkeypatch.setattr(Source, method, fail)
    # When
    results = [source.produce_messages({}, 2) for _ in range(3)]
    # Then
    assert [(each.sent, each.failed) for each in results] == [(2, 2), (2, 2), (0, 2)]
    assert ids() == ["3", "4", "5", "6"]


def test_a_run_does_not_read_a_whole_table_of_items_that_can_never_be_sent(monkeypatch):
    monkeypatch.setattr(producer, "LEAST_UNSENDABLE", 20)
    refuse_some(monkeypatch, {str(n) for n in range(1, 500)}, is_final=True)
    result = Source(items(500)).produce_messages({}, 2)
    assert result.sent == 0
    assert 20 <= result.failed < 30


def test_a_run_says_why_it_skipped_items():
    # Given
    source = Source(items(2), sent_ttl=20)
    source.produce_messages({}, 1)
    get_coordination().claim(["PROD:SOURCE:2"], "another", timedelta(seconds=30))
    # When
    result = source.produce_messages({}, 10)
    # Then
    assert result.reason == (
        "1 skipped: this content was sent less than 20 s ago; "
        "1 skipped: another producer is sending this item"
    )


def test_a_broker_that_is_away_fails_every_message_and_keeps_no_claim(monkeypatch):
    """KJO-06, KJO-F2."""

    def publish(records):
        raise PublishError("no broker")

    monkeypatch.setattr(get_transport(), "publish", publish)
    source = Source(items(2), dedup_across_ids=True)
    result = source.produce_messages({}, 10)
    assert (result.sent, result.failed, result.reason) == (0, 2, "no broker")
    monkeypatch.undo()
    assert source.produce_messages({}, 10).sent == 2


def test_an_item_that_cannot_be_written_down_stops_no_other():
    """KJO-06."""
    source = Source([{"id": 1, "name": object()}, *items(3)[1:]])
    result = source.produce_messages({}, 10)
    assert (result.item_ids, result.failed, result.total) == (["2", "3"], 1, 3)
    assert source.failed[0][0] == "1"


def test_hooks_that_raise_change_nothing(caplog):
    """KJO-05, KJO-06, KJO-F12."""

    class Clumsy(Source):
        def on_success(self, item_id):
            raise RuntimeError("clumsy")

    source = Clumsy(items(2))
    assert source.produce_messages({}, 10).sent == 2
    assert source.produce_messages({}, 10).sent == 0
    assert "clumsy" in caplog.text


def test_the_mark_is_set_before_the_hook_is_called():
    """KJO-05, KJO-27."""

    class Curious(Source):
        def on_success(self, item_id):
            self.succeeded.append(self.get_sent_hash(item_id))

    source = Curious(items(1))
    source.produce_messages({}, 1)
    assert source.succeeded == [source.message_hash(source.items[0])]


def test_signals_tell_the_same(monkeypatch, hear):
    """KJO-05, KJO-06."""
    refuse_some(monkeypatch, {"2"})
    heard = hear("item_sent", "item_send_failed")
    Source(items(2)).produce_messages({}, 10)
    sent, failed = heard
    assert (sent["signal"], sent["sender"]) == ("item_sent", "Source")
    assert (sent["item_id"], sent["message_type"]) == ("1", "new")
    assert (failed["signal"], failed["item_id"]) == ("item_send_failed", "2")
    assert str(failed["error"]) == "too large"


def test_without_redis_nothing_is_sent(redis_down):
    """KJO-F8: never silently without de-duplication."""
    source = Source(items(2))
    with pytest.raises(CoordinationError):
        source.produce_messages({}, 10)
    assert ids() == []


def test_without_redis_it_goes_on_where_that_is_asked_for(redis_down, caplog):
    """KJO-F8."""
    source = Source(items(2), without_coordination="send", dedup_across_ids=True)
    assert source.produce_messages({}, 10).sent == 2
    assert source.produce_messages({}, 10).sent == 2
    assert "Sending without de-duplication" in caplog.text


# --- Models ---------------------------------------------------------------------------------------


class ItemProducer(ModelProducer):
    model = Item
    topic = "model"
    key_prefix = "MODEL"
    hash_fields = ("email", "body")


def test_a_model_and_a_list_of_fields_are_enough():
    """KJO-02 … 04, KJO-19."""
    Item.objects.bulk_create(Item(email=f"{n}@example.com") for n in range(5))
    Item.objects.filter(email="0@example.com").update(state=2)
    result = ItemProducer().produce_messages({"state": 1}, 3)
    first = Item.objects.get(email="1@example.com")
    assert result.sent == 3
    value = json.loads(records("model")[0].value)
    assert value["id"] == str(first.pk) == ItemProducer().get_item_id(first)
    assert value["data"]["email"] == "1@example.com"
    assert ItemProducer().get_item_key(first) == "1@example.com"


def test_a_name_of_a_state_stands_for_its_number():
    """KJO-70: --criteria state=FAILED --type retry."""
    item = Item.objects.create(state=3)
    assert ItemProducer().produce_messages({"state": "FAILED"}, 10, "retry").item_ids == [
        str(item.pk)
    ]


def test_a_counter_that_changes_makes_no_new_content():
    """KJO-F6."""
    item = Item.objects.create()
    ItemProducer().produce_messages({}, 10)
    Item.objects.update(looked_at=5)
    assert ItemProducer().produce_messages({}, 10).sent == 0
    Item.objects.update(body="new")
    assert ItemProducer().produce_messages({}, 10).item_ids == [str(item.pk)]


@pytest.mark.large
def test_40000_excluded_ids_are_neither_too_many_nor_in_the_way(django_assert_max_num_queries):
    """KJO-F9: more than any database takes as parameters, and all of them come first."""
    Item.objects.bulk_create((Item() for _ in range(40_010)), batch_size=5000)
    first = Item.objects.order_by("pk")[0].pk
    excluded = {str(first + n) for n in range(40_000)} | {"not a number"}
    with django_assert_max_num_queries(15):
        found = ItemProducer().get_next_processing_items({"state": 1}, 7, excluded)
    assert [item.pk for item in found] == [first + 40_000 + n for n in range(7)]


def test_a_model_is_required():
    with pytest.raises(ImproperlyConfigured, match="model"):
        type("P", (ModelProducer,), {"topic": "t", "key_prefix": "P"})()


def test_an_item_that_a_source_returns_twice_is_sent_once():
    """As a join over several rows does."""
    twice = [item for item in items(2) for _ in range(2)]
    result = Source(twice).produce_messages({}, 10)
    assert (result.total, result.sent, ids()) == (2, 2, ["1", "2"])


def test_an_error_without_a_text_fails_alone():
    class Mute(Exception):
        def __str__(self):
            raise AttributeError("customer")

    class Some(Source):
        def build_message(self, item, message_type, content_hash):
            if item["id"] == 1:
                raise Mute
            return super().build_message(item, message_type, content_hash)

        def on_failed(self, item_id, error):
            self.failed.append(item_id)

    source = Some(items(3))
    result = source.produce_messages({}, 10)
    assert (result.sent, result.failed, source.failed) == (2, 1, ["1"])
    assert ids() == ["2", "3"]


def test_an_id_that_no_database_keeps_fails_alone(caplog):
    """A name of a file, say; asking coordination for it failed the whole run."""
    found = items(2)
    found[0]["id"] = "caf\udce9"
    source = Source(found)
    result = source.produce_messages({}, 10)
    assert (result.sent, result.failed, source.succeeded) == (1, 1, ["2"])
    assert source.failed == [("caf\udce9", "Its id holds a character no database keeps")]
    assert caplog.messages[-1].startswith("Item caf\\udce9 was not sent")
