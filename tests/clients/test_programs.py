"""Programs in other languages enqueue jobs, publish and follow events, and answer KDLQ messages, on
a real Kafka that they share with a worker."""

from __future__ import annotations

import json
import struct
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from confluent_kafka import Message, Producer

from kjo_django import BaseEvent, publish_event
from kjo_django.models import DeadLetterState
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord
from tests.clients.conftest import APPENDING, Running, Shop, run
from tests.clients.consumers import MOST_KILLS, MOST_REDELIVERIES

pytestmark = [pytest.mark.kafka, pytest.mark.timeout(120)]
SCHEMAS = Path(__file__).parents[2] / "docs" / "reference" / "protocol"
VERSION_2 = {"type": "ORDER_PAID", "source": "shop", "timestamp": 1, "version": "2", "data": {}}


def order_of(language: str) -> str:
    return f"{language}-{uuid.uuid4().hex[:8]}"


def written_by(message: Message) -> dict[str, Any]:
    """Return what the schema of its kind says a record is."""
    headers = {name: value.decode() for name, value in message.headers()}
    key = message.key().decode()
    return {"key": key, "headers": headers, "value": json.loads(message.value())}


def publish(topic: str, key: str, value: object) -> None:
    (answer,) = get_transport().publish(
        [OutgoingRecord(topic, json.dumps(value).encode(), key.encode())]
    )
    assert answer.error is None


# --- Jobs and events ------------------------------------------------------------------------------


def test_a_worker_runs_the_job_and_handles_the_event_once(shop: Shop, language: str) -> None:
    order = order_of(language)
    # Given the program, run again as after a crash
    for _ in range(2):
        run(language, "enqueue", shop.topic, shop.orders, order, kafka=shop.servers.kafka or "")
    # When the worker has taken everything that was sent
    shop.wait_until(lambda: shop.lag() == lag_of_orders(shop) == 0, "It never took all")
    # Then what was sent twice has taken effect once
    found = shop.entries.filter(job__endswith=order).order_by("job").values_list("job", "note")
    assert list(found) == [(f"mail {order}", ""), (f"paid {order}", "u7")]
    # And there is neither a row of the job nor a dead letter
    assert not shop.jobs.filter(handler="shop.mail").exists()
    assert not shop.dead_letters.filter(queue__in=["ledger", shop.orders]).exists()


def lag_of_orders(shop: Shop) -> int:
    return sum(get_transport().lag([shop.orders], "tests-group").values())


def test_what_is_sent_is_what_the_schemas_allow_and_where_this_side_sends_it(
    shop: Shop, language: str
) -> None:
    jobs, orders = (f"{shop.orders}-{kind}-{order_of(language)}" for kind in ("job", "event"))
    shop.create(jobs, orders, partitions=16)
    # When
    run(language, "enqueue", jobs, orders, "7", kafka=shop.servers.kafka or "")
    (job,), (event,) = shop.read(jobs), shop.read(orders)
    # Then
    for kind, message in (("job", job), ("event", event)):
        schema = json.loads((SCHEMAS / f"{kind}.schema.json").read_text())
        jsonschema.Draft202012Validator(schema).validate(written_by(message))
    # And an event of the same user from this side is beside it
    ours = publish_event(orders, BaseEvent(type="ORDER_PAID", data={"userId": "u7"}), direct=True)
    assert (event.key(), event.partition()) == (b"u7", ours.partition)


def test_the_program_follows_events_from_here(
    shop: Shop, language: str, started: Callable[..., Running]
) -> None:
    topic, order = f"{shop.orders}-{order_of(language)}", order_of(language)
    shop.create(topic)
    program = started(language, "follow", topic, f"followers-{order}")
    # Given what it does not handle: another type, a version to come, what is no JSON
    publish(topic, "u7", {"type": "ORDER_SEEN"})
    publish(topic, "u7", {**VERSION_2, "id": "e2"})
    (answer,) = get_transport().publish([OutgoingRecord(topic, b"{", b"u7")])
    assert answer.error is None
    # When an event is stored here, and published by the relay
    data = {"userId": "u7", "order": order}
    publish_event(topic, BaseEvent(type="ORDER_PAID", source="shop", data=data))
    # Then
    paid = f"{order} is paid by u7"
    shop.wait_until(lambda: paid in program.lines, "The program never read the event")
    told = [line for line in program.lines if line.startswith("refused") or " is paid " in line]
    assert told == ["refused: invalid", "refused: deserialization", paid]


# --- KDLQ -----------------------------------------------------------------------------------------

# Both sides redeliver to one another; the program also reads the dead letters.
# By key: which topic it is sent to first, the state that the program answers to, and what this side
# answers, as long as it has not been killed and after each kill.
AGAIN, KILL, OK = "MUST_BE_REDELIVERED", "ERROR", "OK"
SENT = {
    "both redeliver": ("", "pending", [AGAIN]),
    "both redeliver, the program first": ("-again", "pending", [AGAIN]),
    "the program kills": ("", "unknown", [AGAIN]),
    "this side kills": ("", "pending", [KILL]),
    "this side kills, then processes": ("", "pending", [KILL, OK]),
    "the program processes": ("-again", "booked", [OK]),
}
PLACES = ("", "-again", "-dlq")


def is_given_once(message: Message) -> bool:
    """Whether no header is there twice."""
    names = [name for name, _ in message.headers() or []]
    return len(set(names)) == len(names)


def counters(message: Message) -> tuple[str, int, int]:
    """Return who has sent a record, its redeliveries and its kills."""
    headers = dict(message.headers() or [])  # of a name the last counts
    numbers = [
        struct.unpack(">i", headers.get(name, bytes(4)))[0]
        for name in ("KDLQ_Redelivered", "KDLQ_Kills")
    ]
    return (headers.get("KDLQ_PrcMarker", b"").decode(), *numbers)


def test_both_redeliver_and_kill_and_their_counters_agree(
    shop: Shop, partner: str, started: Callable[..., Running]
) -> None:
    topic, theirs = shop.payments(partner), f"{shop.group}-{partner}"
    # Given
    program = started(partner, "payments", f"{topic}-again", topic, f"{topic}-dlq", theirs)
    # When
    for key, (place, state, answers) in SENT.items():
        publish(f"{topic}{place}", key, {"state": state, "django": answers})
    # Then each comes to its end: skipped by the program, or by this side, or processed
    skipped = [key for key in SENT if "redeliver" in key or key == "the program kills"]
    ends = {f"SKIPPED_DLQ_MAX_ATTEMPTS_REACHED {key}" for key in skipped}
    ends |= {"OK the program processes"}
    letters = shop.dead_letters.filter(queue=topic)
    shop.wait_until(
        lambda: (
            ends <= set(program.lines)
            and letters.filter(state=DeadLetterState.DISCARDED).exists()
            and letters.filter(state=DeadLetterState.REPLAYED).exists()
        ),
        "Not every message came to its end",
    )
    # And each side has counted on from where the other one was
    found = defaultdict(list)
    for place in PLACES:
        for message in shop.read(f"{topic}{place}"):
            found[message.key().decode(), place].append(counters(message))
    assert (MOST_REDELIVERIES, MOST_KILLS) == (4, 3)
    us, first = "django", ("", 0, 0)
    assert found == {
        ("both redeliver", ""): [first, (theirs, 2, 0), (theirs, 4, 0)],
        ("both redeliver", "-again"): [(us, 1, 0), (us, 3, 0)],
        ("both redeliver", "-dlq"): [(us, 4, 1), (theirs, 4, 2), (theirs, 4, 3)],
        ("both redeliver, the program first", ""): [(theirs, 1, 0), (theirs, 3, 0)],
        ("both redeliver, the program first", "-again"): [first, (us, 2, 0), (us, 4, 0)],
        ("both redeliver, the program first", "-dlq"): [(theirs, 4, n) for n in (1, 2, 3)],
        ("the program kills", ""): [first],
        ("the program kills", "-again"): [(us, 1, 0)],
        ("the program kills", "-dlq"): [(theirs, 1, n) for n in (1, 2, 3)],
        ("this side kills", ""): [first, *((theirs, n, n) for n in (1, 2, 3))],
        ("this side kills", "-dlq"): [(us, n, n + 1) for n in (0, 1, 2)],
        ("this side kills, then processes", ""): [first, (theirs, 1, 1)],
        ("this side kills, then processes", "-dlq"): [(us, 0, 1)],
        ("the program processes", "-again"): [first],
    }
    # And only who appends headers gives a name more than once
    if partner != APPENDING:
        assert all(is_given_once(m) for place in PLACES for m in shop.read(f"{topic}{place}"))
    # And the rows here say what this side has done last
    assert letters.get(state=DeadLetterState.DISCARDED).key == b"this side kills"
    assert letters.get(state=DeadLetterState.REPLAYED).key == b"this side kills, then processes"


def test_a_dead_letter_of_the_program_tells_of_the_error_and_the_origin(
    shop: Shop, language: str, started: Callable[..., Running]
) -> None:
    program, topic, group = book_keeper(shop, language, started)
    # When it does not know the account of one payment, and cannot read the others
    publish(topic, "p7", {"state": "unknown"})
    unreadable = [OutgoingRecord(topic, value, b"p8") for value in (b"{", b"", None)]
    assert [answer.error for answer in get_transport().publish(unreadable)] == [None] * 3
    shop.wait_until(
        lambda: sum(line.startswith("SKIPPED") for line in program.lines) == 4,
        "The program never came to the end",
    )
    # Then each is there with its value, once for each kill
    dead = shop.read(f"{topic}-dlq")
    values = [message.value() for message in dead if message.key() == b"p8"]
    assert Counter(values) == {b"{": MOST_KILLS, b"": MOST_KILLS, None: MOST_KILLS}
    # And
    known = dict(next(message for message in dead if message.key() == b"p7").headers())
    assert known["KDLQ_OrigTopic"] == topic.encode()
    assert known["KDLQ_PrcMarker"] == group.encode()
    assert known["KDLQ_ErrorMessage"] == b"no such account"
    assert known["KDLQ_ErrorClass"]
    assert struct.unpack(">q", known["KDLQ_FailedAt"])[0] > 1_700_000_000_000
    assert all(dict(message.headers())["KDLQ_ErrorClass"] for message in dead)


def test_what_others_gave_a_message_is_as_it_was_after_a_redelivery(
    shop: Shop, language: str, started: Callable[..., Running]
) -> None:
    program, topic, _ = book_keeper(shop, language, started)
    # Given no key, a name given twice, a header without a value, and bytes that are no text
    headers = [("theirs", b"1"), ("theirs", b"2"), ("empty", None), ("binary", b"\xff\x00")]
    producer = Producer({"bootstrap.servers": shop.servers.kafka})
    producer.produce(topic, key=None, value=b'{"state": "pending"}', headers=headers)
    assert producer.flush(30) == 0
    # When
    shop.wait_until(
        lambda: any(line.startswith("REDELIVERED") for line in program.lines),
        "The program never redelivered it",
    )
    # Then
    (message,) = shop.read(f"{topic}-again")
    assert (message.key(), message.value()) == (None, b'{"state": "pending"}')
    if language == "node":  # whose client cannot send a header without a value
        headers[2] = ("empty", b"")
    assert [each for each in message.headers() if not each[0].startswith("KDLQ_")] == headers


def book_keeper(
    shop: Shop, language: str, started: Callable[..., Running]
) -> tuple[Running, str, str]:
    """Start the program on topics that nobody else reads; return it, its topic and its group."""
    topic = f"{shop.payments(language)}-{uuid.uuid4().hex[:8]}"
    shop.create(topic, f"{topic}-again", f"{topic}-dlq")
    group = f"{topic}-book-keeping"
    program = started(language, "payments", topic, f"{topic}-again", f"{topic}-dlq", group)
    return program, topic, group
