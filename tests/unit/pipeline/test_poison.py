"""Messages that nobody can read or handle."""

from __future__ import annotations

import pytest

from kjo_django import registry
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter
from kjo_django.runtime import get_transport
from tests.ledger import jobs as ledger
from tests.unit.deliveries import as_job, entries, the_job
from tests.unit.pipeline.bench import GOOD, both, reconfigured, settled

POISON = {
    "tombstone": (None, GOOD, "invalid"),
    "empty": (b"", GOOD, "invalid"),
    "no JSON": (b"{broken", GOOD, "deserialization"),
    "no UTF-8": (b"\xff\xfe", GOOD, "deserialization"),
    "scalar": (b"42", GOOD, "invalid"),
    "array": (b"[]", GOOD, "invalid"),
    "too deep": (b"[" * 10_000 + b"]" * 10_000, GOOD, "deserialization"),
    "huge integer": (b'{"job":' + b"9" * 10_000 + b"}", GOOD, "deserialization"),
    "too large": (b'"' + b"x" * 2000 + b'"', GOOD, "too_large"),
    "no id": (b"{}", {"kjo_type": "ledger.write"}, "invalid"),
    "no type": (b"{}", {"kjo_id": "foreign-1"}, "invalid"),
    "no headers": (b"{}", {}, "invalid"),
    "id of no text": (b"{}", GOOD | {"kjo_id": b"\xff"}, "invalid"),
    "NUL in its type": (b"{}", GOOD | {"kjo_type": b"a\x00b"}, "invalid"),
    "unknown type": (b"{}", GOOD | {"kjo_type": "nobody.knows"}, "unknown_type"),
    "unknown content type": (b"{}", GOOD | {"content_type": "x/pickle"}, "deserialization"),
    "wrong arguments": (b'{"jib":1}', GOOD, "fatal"),
    "absurd numbers": (
        b'{"jib":1}',
        GOOD | {"kjo_generation": "9" * 12, "kjo_attempt": "9" * 12, "kjo_replay_count": "9" * 12},
        "fatal",
    ),
}


@both
@pytest.mark.parametrize("kind", POISON)
def test_poison_is_a_dead_letter_with_its_bytes_and_a_reason_and_the_loop_goes_on(
    settings, bench, kind
):
    """Show 7, promise 4."""
    # Given
    value, headers, reason = POISON[kind]
    if kind == "too large":
        bench = reconfigured(settings, bench, MAX_PAYLOAD_BYTES=1000)
    bench.publish(value, **headers)
    ledger.write.enqueue(job="after")
    # When
    bench.run()
    # Then
    letter = DeadLetter.objects.get()
    assert letter.reason == reason
    assert letter.error
    assert (None if letter.value is None else bytes(letter.value)) == value
    assert bytes(letter.key) == b"foreign"
    assert (letter.topic, letter.partition) == ("ledger", 0)
    assert letter.offset is not None
    stored = names.from_json(letter.headers)
    assert stored.get(names.ID) == (headers["kjo_id"] if isinstance(headers.get("kjo_id"), bytes)
                                    else headers.get("kjo_id", "").encode() or None)  # fmt: skip
    assert entries() == {"after": 1}
    assert settled(bench)


def test_poison_of_the_topic_is_on_its_dead_letter_topic_as_it_was(bench):
    bench.publish(b"\xff\xfe", **GOOD)
    bench.run()
    (record,) = get_transport().records("ledger-dlq")
    assert record.value == b"\xff\xfe"
    assert record.key == b"foreign"
    assert record.headers[names.ID] == b"foreign-1"
    assert record.headers[names.DLQ_REASON] == b"deserialization"


def test_a_record_that_dies_twice_is_one_dead_letter(bench):
    """A crash between row and offset, as of what was settled behind a message that still ran."""
    bench.publish(b"{broken", **GOOD)
    bench.publish(b"{}", **GOOD | {"kjo_type": "nobody.knows"})
    deliveries = bench.poll()
    bench.run(deliveries)
    bench.run([bench.read(delivery.record) for delivery in deliveries])
    assert DeadLetter.objects.count() == 2
    assert len(get_transport().records("ledger-dlq")) == 2
    assert settled(bench)


def test_a_job_whose_handler_is_gone_fails_visibly(bench):
    def gone(): ...

    as_job(gone).enqueue()
    registry.unregister("bench.gone")
    bench.run()
    assert DeadLetter.objects.get().reason == "unknown_type"
    assert the_job().state == "failed"
    assert settled(bench)


def test_poison_is_one_line_of_the_log_whatever_it_is_called(bench, caplog):
    """Nobody writes records of the log by way of a message's id."""
    id = b"1\n2026-11-20 ERROR root: all is lost\x1b[2J"
    bench.publish(b"{broken", **GOOD | {"kjo_id": id})
    bench.run()
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert line.isprintable()
    assert "all is lost" in line
    assert DeadLetter.objects.get().message_id == id.decode()
