"""Promise 4 (issue 2, item 7): what nobody can read is a dead letter, and the loop goes on."""

from __future__ import annotations

from typing import Any

import pytest

from kjo_django.conf import get_settings
from kjo_django.messages.headers import from_json
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from tests.acceptance.engine import Engine

pytestmark = pytest.mark.timeout(180)

UNREADABLE = {"deserialization"}
INVALID = {"invalid"}
# Parsers differ in how deep they go: what one refuses, the next hands on as no object.
EITHER = UNREADABLE | INVALID | {"fatal"}
# A broker takes more from others than our client may send on: the table alone can keep it.
TOO_LARGE = "over what a producer sends"


def headers(name: str, **changes: bytes | None) -> dict[str, bytes]:
    """Return good headers with changes; None leaves a header out."""
    good: dict[str, bytes | None] = {"kjo-id": name.encode(), "kjo-type": b"ledger.write"}
    good |= {key.replace("_", "-"): value for key, value in changes.items()}
    return {key: value for key, value in good.items() if value is not None}


POISON: dict[str, tuple[bytes | None, dict[str, Any], set[str]]] = {
    # name: value, changed headers, reasons that tell what is wrong
    "invalid JSON": (b'{"job": ', {}, UNREADABLE),
    "trailing data": (b'{"job": "x"} {}', {}, UNREADABLE),
    "not a number": (b'{"job": NaN}', {}, UNREADABLE),
    "invalid UTF-8": (b'{"job": "\xff\xfe"}', {}, UNREADABLE),
    "another encoding": ('{"job": "x"}'.encode("utf-16"), {}, UNREADABLE),
    "empty": (b"", {}, INVALID),
    "tombstone": (None, {}, INVALID),
    "scalar": (b"42", {}, INVALID),
    "null": (b"null", {}, INVALID),
    "list": (b"[1, 2]", {}, INVALID),
    "wrong arguments": (b'{"jobs": "x"}', {}, {"fatal"}),
    "missing id": (b'{"job": "x"}', {"kjo_id": None}, INVALID),
    "empty id": (b'{"job": "x"}', {"kjo_id": b""}, INVALID),
    "long id": (b'{"job": "x"}', {"kjo_id": b"i" * 5000}, INVALID),
    "unreadable id": (b'{"job": "x"}', {"kjo_id": b"\xff\x00"}, INVALID),
    "missing type": (b'{"job": "x"}', {"kjo_type": None}, INVALID),
    "unknown type": (b'{"job": "x"}', {"kjo_type": b"nobody.knows"}, {"unknown_type"}),
    "unknown content type": (b'{"job": "x"}', {"content_type": b"x/\xff"}, UNREADABLE),
    "deep list": (b"[" * 10_000 + b"]" * 10_000, {}, EITHER),
    "deep object": (b'{"job":' * 10_000 + b"1" + b"}" * 10_000, {}, EITHER),
    "odd headers": (
        b"{",
        {"odd \N{CHECK MARK}": b"\xff" * 100, "": b"nameless", "empty": b""},
        UNREADABLE,
    ),
    "over the limit": (b'{"job": "%s"}' % (b"x" * 950_000), {}, {"too_large"}),
    TOO_LARGE: (b'{"job": "%s"}' % (b"x" * 1_000_000), {}, {"too_large"}),
}
HARMLESS: dict[str, dict[str, Any]] = {
    # Garbage in headers that carry no meaning here, or have a sensible default.
    "generation": {"kjo_generation": b"many"},
    "attempt": {"kjo_attempt": b"\xff"},
    "replay count": {"kjo_replay_count": b"-1"},
    "foreign": {"\x00odd": b"\xff" * 100, "": b"nameless", "traceparent": b""},
    "many": {f"h{number}": b"x" * 50 for number in range(200)},
}


def publish(engine: Engine, records: list[OutgoingRecord]) -> None:
    """Publish as some other service would: with a client of its own, to one partition."""
    if not engine.servers.kafka:
        answers = get_transport().publish(records)
        assert [answer.error for answer in answers] == [None] * len(records)
        return
    from confluent_kafka import Producer

    errors: list[Any] = []
    producer = Producer(
        # As much as a broker takes by default, which is more than a client sends by default.
        {"bootstrap.servers": engine.servers.kafka, "message.max.bytes": 1_048_588}
    )
    for record in records:
        producer.produce(
            record.topic,
            value=record.value,
            key=record.key,
            headers=dict(record.headers),
            partition=0,
            on_delivery=lambda error, message: errors.append(error),
        )
    assert producer.flush(30) == 0
    assert errors == [None] * len(records)


@pytest.mark.promise("dead-letter-is-a-row")
@pytest.mark.medium("mariadb", "real")
def test_poison_on_the_topic(any_engine: Engine) -> None:
    # Given poison of every kind between good messages, keyed and not, on one partition
    engine = any_engine
    engine.configure(TOPIC_OPTIONS={"partitions": 1, "replication_factor": 1})
    engine.create_topics()
    records = []
    for number, (name, (value, changes, _)) in enumerate(POISON.items()):
        good = f"good-{number}"
        body = b'{"job": "%s"}' % good.encode()
        records.append(OutgoingRecord(engine.topic, body, b"k", headers(good)))
        key = None if number % 2 else b"k"
        records.append(OutgoingRecord(engine.topic, value, key, headers(name, **changes)))
    for name, changes in HARMLESS.items():
        body = b'{"job": "%s"}' % name.encode()
        records.append(OutgoingRecord(engine.topic, body, b"k", headers(name, **changes)))
    publish(engine, records)
    # When a worker meets it
    worker = engine.worker()
    engine.wait_until(lambda: engine.lag() == 0, "The poison is stuck")
    # Then the loop went on
    engine.assert_each_ran_once([*(f"good-{n}" for n in range(len(POISON))), *HARMLESS])
    # And each is a dead letter with its original bytes, its headers and a reason
    letters = list(engine.dead_letters.all())
    assert len(letters) == len(POISON)
    for name, (value, changes, reasons) in POISON.items():
        found = [
            letter
            for letter in letters
            if (None if letter.value is None else bytes(letter.value)) == value
            and from_json(letter.headers) == headers(name, **changes)
        ]
        assert len(found) == 1, name
        assert found[0].reason in reasons, (name, found[0].reason, found[0].error)
        assert found[0].error, name
    # And the offset moved: the next worker does not see them again
    assert worker.stop() == 0, worker.log_tail()
    engine.drain()
    assert (engine.dead_letters.count(), engine.lag()) == (len(POISON), 0)
    # And where the transport keeps what was read, the dead-letter topic holds the same bytes
    if engine.servers.kafka:
        topic = get_settings().queue("ledger").dead_letter_topic
        expected = [value for name, (value, _, _) in POISON.items() if name != TOO_LARGE]
        kept = read_topic(engine, topic, len(expected))
        assert sorted(kept, key=repr) == sorted(expected, key=repr)


def read_topic(engine: Engine, topic: str, count: int) -> list[bytes | None]:
    """Return the values of a topic of one partition."""
    from confluent_kafka import Consumer, TopicPartition

    consumer = Consumer({"bootstrap.servers": engine.servers.kafka, "group.id": "reader"})
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        values: list[bytes | None] = []
        engine.wait_until(
            lambda: (
                values.extend(message.value() for message in consumer.consume(100, 0.1))
                or len(values) >= count
            ),
            f"{topic} does not hold {count} messages",
        )
        return values
    finally:
        consumer.close()
