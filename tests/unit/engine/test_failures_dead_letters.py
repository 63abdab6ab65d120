"""What a dead letter holds: the message as it was, and why it died."""

from __future__ import annotations

import functools
from datetime import UTC, datetime

import pytest
from django.test import override_settings
from django.utils import timezone
from hypothesis import given, settings
from hypothesis import strategies as st

from kjo_django.conf import QueueConf, get_settings
from kjo_django.engine.attempt import Attempt, Ending, RefusedRecord
from kjo_django.engine.failures import (
    MAX_HEADER_MESSAGE,
    dead_letter_of,
    record_for_topic,
    source_id,
)
from kjo_django.exceptions import MessageError
from kjo_django.failure_facts import MAX_TRACEBACK_LENGTH, FailureFacts, error_text
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.messages.headers import read_message
from kjo_django.models import DeadLetter, source_of_job
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import OutgoingRecord, Record
from tests.unit.deliveries import Silent

HEADERS = {names.ID: b"m-1", names.TYPE: b"shop.pay", "traceparent": b"00-1", "odd": b"\xff\x00"}


@functools.cache
def queue() -> QueueConf:
    with override_settings(KJO={"QUEUES": {"payments": {"topic": "pay", "consumer_group": "g"}}}):
        return get_settings().queue("payments")


def outcome(
    error: BaseException | None = None, *, headers=None, attempt: int = 2, **place
) -> Attempt:
    record = Record(
        **{"topic": "pay", "partition": 3, "offset": 7, **place},
        key=b"k\xff",
        value=b"\xfe value",
        headers=dict(HEADERS if headers is None else headers),
        timestamp=datetime(2026, 1, 2, tzinfo=UTC),
    )
    message = read_message(record.value, record.headers, max_bytes=99) if headers is None else None
    delivery = RefusedRecord(
        record, Silent(), queue(), "tests", MessageError("invalid", "no"), message
    )
    return Attempt(delivery, Ending.DEAD, number=attempt, error=error, reason="exhausted")


def letter_of(outcome: Attempt) -> DeadLetter:
    return dead_letter_of(current_runtime(), outcome, None, timezone.now())


def topic_record_of(outcome: Attempt) -> OutgoingRecord:
    return record_for_topic(current_runtime(), outcome)


def raised(error: BaseException) -> BaseException:
    try:
        raise error
    except type(error) as caught:
        return caught


# --- The row --------------------------------------------------------------------------------------


def test_the_row_keeps_key_value_and_headers_byte_for_byte():
    letter = letter_of(outcome(raised(ValueError("no"))))
    assert (letter.key, letter.value) == (b"k\xff", b"\xfe value")
    assert names.from_json(letter.headers) == HEADERS
    assert (letter.topic, letter.partition, letter.offset) == ("pay", 3, 7)
    assert (letter.queue, letter.consumer_group) == ("payments", "g")
    assert (letter.message_id, letter.handler) == ("m-1", "shop.pay")
    assert (letter.reason, letter.attempts) == ("exhausted", 2)
    assert (letter.error_type, letter.error) == ("ValueError", "no")
    assert "raise error" in letter.traceback


def test_the_row_of_what_could_not_be_read_says_what_there_is():
    headers = {names.TYPE: b"\xffodd\x00type", names.ID: b"i" * 1000, names.REPLAY_COUNT: b"2"}
    letter = letter_of(outcome(MessageError("invalid", "x"), headers=headers))
    assert "odd" in letter.handler
    assert "\x00" not in letter.handler
    assert len(letter.message_id) == 255
    assert letter.replay_count == 2
    assert names.from_json(letter.headers) == headers


@given(st.dictionaries(st.text(max_size=20), st.binary(max_size=300), max_size=5))
def test_every_text_of_the_row_fits_its_column_whatever_the_headers(headers):
    named = headers | {
        names.ID: b"\x00" * 999,
        names.TYPE: b"\xff" * 999,
        names.CONTENT_TYPE: b"x" * 99,
    }
    letter = letter_of(outcome(MessageError("x", "y"), headers=named))
    for field in letter._meta.fields:
        value = getattr(letter, field.attname)
        if isinstance(value, str) and field.max_length:
            assert len(value) <= field.max_length, field.name
            assert "\x00" not in value


# --- Identity -------------------------------------------------------------------------------------


def test_a_death_is_recorded_once_by_the_job_and_its_generation():
    id = uuid7()
    one = outcome().delivery
    assert source_id(one, id) == source_id(outcome(offset=9).delivery, id)
    assert source_id(one, id) != source_of_job(id, 2)
    assert source_id(one, id) != source_id(one, uuid7())


def test_a_foreign_death_is_told_by_its_place():
    one = source_id(outcome().delivery, None)
    assert one == source_id(outcome().delivery, None)
    for place in ({"offset": 8}, {"partition": 4}, {"topic": "paid"}):
        assert source_id(outcome(**place).delivery, None) != one


def fingerprint(handler: str, error: BaseException | None) -> str:
    return FailureFacts.of(error).fingerprint(handler)


def test_failures_of_one_kind_share_a_fingerprint():
    def here() -> BaseException:
        return raised(ValueError("order 1"))

    def there() -> BaseException:
        return raised(KeyError("order 1"))

    assert fingerprint("a", here()) == fingerprint("a", raised(ValueError("order 2")))
    assert fingerprint("a", here()) != fingerprint("b", here())
    assert fingerprint("a", here()) != fingerprint("a", there())
    assert fingerprint("a", MessageError("invalid", "x")) != fingerprint(
        "a", MessageError("too_large", "x")
    )
    assert fingerprint("a", None) == ""
    assert len(fingerprint("a", here())) == 16


def fingerprint_of_text(text: str) -> str:
    return fingerprint("a", raised(ValueError(text)))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("card declined", "502 Bad Gateway"),
        ("the card has expired", "the card is unknown"),
        ("HTTP 502: bad gateway", "HTTP 404: not found"),
        ("'ada' is locked", "'ada' is unknown"),
        ("no stock of 17", "no price of 17"),
        ("expected a < b got c", "expected a < b or c > d"),
    ],
)
def test_errors_of_one_place_that_say_something_else_are_of_two_kinds(one, other):
    """Replay of the group took all, under the text of the newest."""
    assert fingerprint_of_text(one) != fingerprint_of_text(other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("order 1 is closed", "order 23.5 is closed"),
        ("order ORD-17/b is closed", "order ORD-4/c is closed"),
        (
            "no row 0193d2f4-7a1c-7000-8000-00155d000001",
            "no row 7f6212e9-9940-4b1f-8e9e-f8a0c1b2d3e4",
        ),
        ("no row 0x7f6212e99940", "no row 0xdeadbeef"),
        ("duplicate key 'ada'", "duplicate key 'O'Brien, \n2nd floor'"),
        ('duplicate key "ada"', 'duplicate key ""'),
        ("duplicate key b'ada'", "duplicate key b'grace'"),
        ("<Customer: Ada> is closed", "<Customer: Grace Hopper> is closed"),
        ("no answer from https://a.example/x?y=z", "no answer from https://b.example"),
        ("no mail to ada@example.org", "no mail to grace@example.net"),
        ("cannot read /srv/a/b", "cannot read /srv/c"),
        ("due 2026-05-04T10:37:20+00:00", "due 2027-01-01T00:00:00+00:00"),
        ("ids 1, 2, 3 are locked", "ids 4 are locked"),
        ("got {'a': 1, 'b': 2}", "got {'a': 3}"),
        ("is locked\nDETAIL: by ada", "is locked\nDETAIL: by grace"),
        ("  is\tlocked", "is locked"),
        ("is 'locked", "is 'locked by ada"),
        ("too long: '" + "x" * 499, "too long: '" + "x" * 100_000 + "'"),
        ("ids " + "1, " * 400 + "are locked", "ids 7 are locked"),
    ],
)
def test_errors_of_one_place_that_differ_in_values_only_are_of_one_kind(one, other):
    assert fingerprint_of_text(one) == fingerprint_of_text(other)


def test_an_apostrophe_begins_no_value():
    one, other = "can't pay, don't retry", "can't book, don't retry"
    assert fingerprint_of_text(one) != fingerprint_of_text(other)


def test_what_a_text_says_after_a_hundred_characters_makes_no_kind_of_its_own():
    said = "said " * 20
    assert fingerprint_of_text(f"{said} ada") == fingerprint_of_text(f"{said} grace")


def test_what_a_text_says_after_five_thousand_characters_is_not_looked_at():
    quoted = "'" + "x" * 5000 + "'"
    assert fingerprint_of_text(f"{quoted} is locked") == fingerprint_of_text(f"{quoted} is free")


@given(
    st.one_of(
        st.text(),
        st.text(st.characters(categories=["Cc", "Cs", "Zl", "Zp"])),
        st.sampled_from(["'", " '", '"', "`", "<", "“", "1", "* ", "\ud800"]).map(
            lambda text: text * 200_000
        ),
    )
)
@settings(max_examples=50, deadline=None)
def test_whatever_others_wrote_has_a_fingerprint(text):
    assert len(fingerprint_of_text(text)) == 16


def test_an_error_whose_text_cannot_be_read_has_a_fingerprint():
    class Mute(Exception):
        def __str__(self) -> str:
            raise SystemExit

    assert fingerprint("a", raised(Mute())) == fingerprint("a", raised(Mute()))


# --- Texts ----------------------------------------------------------------------------------------


def test_an_error_without_text_is_shown_by_its_type():
    assert error_text(None) == ""
    assert error_text(KeyError()) == "KeyError"
    assert error_text(ValueError("x" * 501)) == "x" * 500


def test_a_long_traceback_loses_its_beginning_and_not_the_line_that_raised():
    def deep(n: int) -> None:
        if n:
            deep(n - 1)
        raise ValueError("at the bottom " + "y" * 30_000)

    try:
        deep(50)
    except ValueError as error:
        text = FailureFacts.of(error).traceback
    assert len(text) == MAX_TRACEBACK_LENGTH
    assert text.rstrip().endswith("yyy")
    assert FailureFacts.of(ValueError("never raised")).traceback == ""


def test_an_error_is_asked_for_its_text_once_whatever_is_written_of_it():
    texts = []

    class Fickle(Exception):
        def __str__(self) -> str:
            texts.append(f"text {len(texts)}")
            return texts[-1]

    attempt = outcome(Fickle())
    # When
    record, letter = topic_record_of(attempt), letter_of(attempt)
    # Then
    assert (letter.error, record.headers[names.DLQ_EXCEPTION_MESSAGE]) == ("text 0", b"text 0")
    # Another error, as that of a commit, is another failure.
    attempt.error = Fickle()
    assert letter_of(attempt).error == "text 1"


# --- The record for the dead-letter topic ---------------------------------------------------------


def test_the_record_keeps_everything_and_adds_why():
    """KDLQ; X-5."""
    record = topic_record_of(outcome(raised(ValueError("no"))))
    assert (record.topic, record.key, record.value) == ("pay-dlq", b"k\xff", b"\xfe value")
    assert {name: record.headers[name] for name in HEADERS} == HEADERS
    expected = {
        names.DLQ_ORIGINAL_TOPIC: b"pay",
        names.DLQ_ORIGINAL_PARTITION: b"3",
        names.DLQ_ORIGINAL_OFFSET: b"7",
        names.DLQ_ORIGINAL_TIMESTAMP: b"2026-01-02T00:00:00+00:00",
        names.DLQ_GROUP: b"g",
        names.DLQ_HANDLER: b"shop.pay",
        names.DLQ_MESSAGE_ID: b"m-1",
        names.DLQ_ATTEMPTS: b"2",
        names.DLQ_REASON: b"exhausted",
        names.DLQ_EXCEPTION_TYPE: b"ValueError",
        names.DLQ_EXCEPTION_MESSAGE: b"no",
    }
    assert {name: record.headers[name] for name in expected} == expected
    assert names.DLQ_JOB_ID not in record.headers
    assert b"raise error" in record.headers[names.DLQ_EXCEPTION_STACKTRACE]


@pytest.mark.parametrize("name", sorted(names.FIRST_WINS))
def test_a_message_that_dies_again_keeps_its_first_origin(name):
    """KDLQ-F3."""
    first = outcome(headers=HEADERS | {name: b"first"})
    assert topic_record_of(first).headers[name] == b"first"


def test_everything_else_tells_of_the_last_death_and_is_replaced_not_appended():
    """KDLQ-F2."""
    old = {names.DLQ_REASON: b"fatal", names.DLQ_ATTEMPTS: b"99", names.DLQ_EXCEPTION_TYPE: b"Old"}
    headers = record_for_topic(
        current_runtime(), outcome(raised(ValueError("new")), headers=HEADERS | old)
    ).headers
    assert headers[names.DLQ_REASON] == b"exhausted"
    assert headers[names.DLQ_ATTEMPTS] == b"2"
    assert headers[names.DLQ_EXCEPTION_TYPE] == b"ValueError"


def test_headers_about_the_error_are_bounded():
    headers = topic_record_of(outcome(raised(ValueError("ü" * 5000)))).headers
    assert len(headers[names.DLQ_EXCEPTION_MESSAGE].decode()) == MAX_HEADER_MESSAGE
    assert len(headers[names.DLQ_EXCEPTION_STACKTRACE].decode()) <= 4000


def test_the_row_says_in_which_release_it_failed(settings):
    settings.KJO = {**settings.KJO, "RELEASE": "2026.11"}
    assert letter_of(outcome(ValueError("no"))).release == "2026.11"


def test_the_headers_need_not_quote_an_exception():
    """What a payload held stands in many an exception's text, and others read the topic."""
    error = raised(ValueError("Key (email)=(ada@example.org) already exists"))
    before = {names.DLQ_EXCEPTION_MESSAGE: b"an earlier ada@example.org"}
    for headers in (None, {**HEADERS, **before}):
        told = topic_record_of(outcome(error, headers=headers)).headers
        assert b"ada@example.org" in told[names.DLQ_EXCEPTION_MESSAGE]
        assert b"ada@example.org" in told[names.DLQ_EXCEPTION_STACKTRACE]
        with override_settings(KJO={"DEAD_LETTER_EXCEPTION_HEADERS": False}):
            told = topic_record_of(outcome(error, headers=headers)).headers
        assert told[names.DLQ_EXCEPTION_TYPE] == b"ValueError"
        assert b"ada@example.org" not in b"".join(told.values())
