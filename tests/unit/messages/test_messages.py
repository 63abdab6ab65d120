"""What travels: serializers, headers and the envelope."""

from __future__ import annotations

import json
import math
import uuid
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import record_of
from kjo_django.exceptions import MessageError, PayloadError
from kjo_django.messages import headers as names
from kjo_django.messages import serializers
from kjo_django.messages.headers import (
    HEADER_LIST,
    MAX_ID_LENGTH,
    MAX_TYPE_LENGTH,
    folded,
    in_order,
    listed,
    read_message,
)
from kjo_django.messages.serializers import (
    JSON,
    canonical_json,
    content_id,
    dump_result,
    load_result,
    loads_for_display,
    serializer_for,
    storable_text,
)
from kjo_django.store.rows import DueJob

texts = st.text(st.characters(codec="utf-8"))
any_text = st.text(st.characters())  # lone surrogates and NUL included
numbers = st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(texts, inner, max_size=5),
    max_leaves=20,
)

# --- JSON -----------------------------------------------------------------------------------------


@given(values)
def test_what_is_written_is_read_again(value):
    assert JSON.loads(JSON.dumps(value)) == value


def test_dates_decimals_and_uuids_become_text():
    id = uuid.uuid4()
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    written = JSON.dumps({"id": id, "price": Decimal("1.10"), "at": moment})
    assert json.loads(written) == {"id": str(id), "price": "1.10", "at": "2026-01-02T03:04:05Z"}


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "value",
    [
        pytest.param(math.nan, id="NaN"),
        pytest.param([-math.inf], id="infinity"),
        pytest.param({"a": "\ud800"}, id="lone surrogate"),
        pytest.param(nested(100_000), id="100 000 deep"),
        pytest.param(object(), id="object"),
        pytest.param({1, 2}, id="set"),
        pytest.param(b"bytes", id="bytes"),
        pytest.param(10**5000, id="huge integer"),
        pytest.param({("a", "b"): 1}, id="tuple as key"),
    ],
)
@pytest.mark.parametrize("write", [JSON.dumps, canonical_json], ids=["payload", "canonical"])
def test_what_is_no_json_is_refused_before_it_travels(write, value):
    with pytest.raises(PayloadError, match="cannot be written as JSON"):
        write(value)


def test_a_value_that_contains_itself_is_refused():
    value: list = []
    value.append(value)
    with pytest.raises(PayloadError):
        JSON.dumps(value)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(b"{not json", id="broken"),
        pytest.param(b"", id="empty"),
        pytest.param(b'{"a": 1} trailing', id="trailing"),
        pytest.param(b'{"a": NaN}', id="NaN"),
        pytest.param(b"[Infinity]", id="infinity"),
        pytest.param(b"[-Infinity]", id="minus infinity"),
        pytest.param(b"\xff\xfe", id="no UTF-8"),
        pytest.param(b'"\xed\xa0\x80"', id="encoded surrogate"),
        pytest.param(b"[" * 100_000 + b"]" * 100_000, id="100 000 deep"),
        pytest.param(b"9" * 10_000, id="huge integer"),
    ],
)
def test_what_cannot_be_read_is_poison_with_a_reason(data):
    with pytest.raises(MessageError) as raised:
        JSON.loads(data)
    assert raised.value.reason == "deserialization"


def test_a_hundred_thousand_levels_are_refused_never_fatal():
    """Promise: no message takes the process down. Python 3.14 reads some tens of thousands."""
    data = b'{"a":' * 100_000 + b"1" + b"}" * 100_000
    with pytest.raises(MessageError, match="too deeply"):
        JSON.loads(data)


@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_read_or_refused_with_a_message_error(data):
    try:
        JSON.loads(data)
    except MessageError as error:
        assert error.reason == "deserialization"


def test_a_serializer_is_found_by_content_type_whatever_its_parameters_and_case():
    assert serializer_for("application/json; charset=utf-8") is JSON
    assert serializer_for(" Application/JSON ") is JSON


def test_an_unknown_content_type_is_poison():
    with pytest.raises(MessageError, match="application/x-pickle") as raised:
        serializer_for("application/x-pickle")
    assert raised.value.reason == "deserialization"


def test_a_registered_serializer_is_found(monkeypatch):
    # Given
    class Shouting:
        content_type = "text/shouting"

        def dumps(self, value):
            return str(value).upper().encode()

        def loads(self, data):
            return data.decode()

    monkeypatch.setattr(serializers, "_serializers", dict(serializers._serializers))
    shouting = Shouting()
    # When
    serializers.register_serializer(shouting)
    # Then
    assert isinstance(shouting, serializers.Serializer)
    assert serializer_for("text/shouting") is shouting


# --- Results --------------------------------------------------------------------------------------


@given(values)
def test_every_value_survives_as_a_result(value):
    """PJQ-F16."""
    assert load_result(dump_result(value)) == value


@pytest.mark.parametrize("value", [None, 0, "", [], {}, False])
def test_an_empty_result_is_told_from_no_result(value):
    assert dump_result(value)
    found = load_result(dump_result(value))
    assert found == value
    assert type(found) is type(value)


# --- Identity -------------------------------------------------------------------------------------


def reordered(value):
    """The same value with every dict's keys the other way round."""
    if isinstance(value, dict):
        return {key: reordered(inner) for key, inner in reversed(value.items())}
    return [reordered(inner) for inner in value] if isinstance(value, list) else value


@given(values)
def test_canonical_json_does_not_depend_on_the_order_of_keys(value):
    """PJQ-F11."""
    assert canonical_json(value) == canonical_json(reordered(value))
    assert JSON.loads(canonical_json(value)) == value


def test_the_content_id_is_the_beginning_of_a_sha_256():
    """PJQ-69."""
    assert content_id({"b": 1, "a": 2}) == content_id({"a": 2, "b": 1})
    assert len(content_id({})) == 16
    assert content_id({}, 64).startswith(content_id({}))
    assert content_id({"a": 1}) != content_id({"a": 2})


# --- Text -----------------------------------------------------------------------------------------


@given(any_text, st.none() | st.integers(0, 50))
def test_storable_text_has_no_nul_no_surrogate_and_keeps_the_limit(text, limit):
    """RST-27, RST-F14."""
    stored = storable_text(text, limit)
    assert "\x00" not in stored
    stored.encode()
    assert len(stored) == min(len(text), limit if limit is not None else len(text))


@given(texts.filter(lambda text: "\x00" not in text))
def test_what_is_storable_is_stored_as_it_is(text):
    assert storable_text(text) == text


def test_the_limit_counts_code_points_and_cuts_none_in_two():
    assert storable_text("😀" * 501, 500) == "😀" * 500


def test_bytes_nobody_can_read_are_shown_as_text_that_says_so():
    assert loads_for_display(b'{"a":1}', "application/json") == {"a": 1}
    assert "Not valid UTF-8" in loads_for_display(b"\xff", "application/json")
    assert "text/odd" in loads_for_display(b"x", "text/odd")


# --- Headers --------------------------------------------------------------------------------------


@given(st.dictionaries(texts.filter(lambda name: "\x00" not in name), st.binary()))
def test_headers_survive_a_json_column_byte_for_byte(headers):
    stored = names.to_json(headers)
    assert names.from_json(json.loads(json.dumps(stored))) == headers


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        ({"a": "YQ", "b": "Yg=="}, {"a": b"YQ", "b": b"b"}),
        ({"a": "\u00e9", "b": ""}, {"a": "\u00e9".encode(), "b": b""}),
        ({"a": 7, "b": None, "c": {"d": 1}}, {"a": b"7", "b": b"null", "c": b'{"d": 1}'}),
        (["a"], {}),
        (None, {}),
        ("text", {}),
    ],
)
def test_stored_headers_that_somebody_else_wrote_are_taken_as_they_are(
    stored: Any, read: dict[str, bytes]
) -> None:
    """Refused, they would be met by each claim, which would bring none of the rows behind them."""
    assert names.from_any_json(stored) == read


@given(st.dictionaries(texts, texts))
def test_text_headers_are_read_as_they_were_written(values):
    encoded = names.encode(values)
    assert {name: names.text(encoded, name) for name in values} == values


def test_what_is_none_has_no_header():
    assert names.encode({"a": None, "b": 0}) == {"b": b"0"}


@given(st.binary())
def test_a_header_of_any_bytes_is_read_as_text(value):
    assert isinstance(names.text({"a": value}, "a"), str)


@given(st.integers(0, 2**31 - 1))
def test_numbers_are_read_as_they_were_written(number):
    assert names.number({"a": b"%d" % number}, "a", -1) == number


@pytest.mark.parametrize(
    "value",
    [None, b"", b"-1", b"+1", b"1.5", b" 1", b"1e3", b"0x10", "²".encode(), "١".encode(), b"\xff"],
)
def test_what_is_no_number_is_the_default(value):
    headers = {} if value is None else {"a": value}
    assert names.number(headers, "a", 7) == 7


@pytest.mark.parametrize("value", [b"2147483648", b"9" * 18, b"9" * 5000])
def test_a_number_no_column_can_hold_is_the_default(value):
    """A poison message must not make its own dead letter impossible to store."""
    assert names.number({"a": value}, "a", 7) == 7


# --- Envelope -------------------------------------------------------------------------------------

identifiers = texts.filter(lambda text: text and "\x00" not in text)


def envelope_of(
    type: str, job_id: str, service: str, generation: int, attempt: int, extra: dict[str, str]
) -> dict[str, bytes]:
    """Return the headers of a job's message."""
    job = DueJob(
        job_id, "default", type, "", generation, attempt - 1, b"{}", "application/json", "", extra
    )  # fmt: skip
    return record_of(job, get_settings().queue("default"), service=service).headers


@given(
    type=identifiers.filter(lambda text: len(text) <= MAX_TYPE_LENGTH),
    job_id=identifiers.filter(lambda text: len(text) <= MAX_ID_LENGTH - len(":2147483647")),
    service=texts,
    generation=st.integers(1, 2**31 - 1),
    attempt=st.integers(1, 2**31 - 1),
    extra=st.dictionaries(texts, texts),
)
def test_a_jobs_envelope_is_read_as_it_was_written(extra, **facts):
    # Given
    headers = envelope_of(**facts, extra=extra)
    # When
    message = read_message(b"{}", headers, max_bytes=10)
    # Then
    for name, value in facts.items():
        assert getattr(message, name) == value
    assert message.id == names.message_id(facts["job_id"], facts["generation"])
    assert message.content_type == "application/json"


def test_our_headers_win_over_extra_ones():
    extra = {names.ID: "forged", "traceparent": "00-1-2-01"}
    headers = envelope_of("t", "j", "s", 1, 1, extra)
    assert headers[names.ID] == b"j"
    assert headers["traceparent"] == b"00-1-2-01"


def test_a_foreign_message_needs_only_an_id_and_a_type():
    message = read_message(b"{}", {names.ID: b"a", names.TYPE: b"t"}, max_bytes=10)
    assert (message.job_id, message.service) == (None, "")
    assert (message.generation, message.attempt, message.replay_count) == (1, 1, 0)
    assert message.content_type == "application/json"


GOOD = {names.ID: b"a", names.TYPE: b"t"}


@pytest.mark.parametrize(
    ("value", "headers", "reason", "says"),
    [
        (None, GOOD, "invalid", "tombstone"),
        (b"", GOOD, "invalid", "empty"),
        (b"x" * 11, GOOD, "too_large", "11 bytes; the limit is 10"),
        (b"{}", {names.TYPE: b"t"}, "invalid", "no 'kjo-id'"),
        (b"{}", {names.ID: b"a"}, "invalid", "no 'kjo-type'"),
        (b"{}", GOOD | {names.ID: b""}, "invalid", "no 'kjo-id'"),
        (b"{}", GOOD | {names.ID: b"\xff"}, "invalid", "not valid UTF-8"),
        (b"{}", GOOD | {names.ID: b"a\x00b"}, "invalid", "not a usable"),
        (b"{}", GOOD | {names.ID: b"a" * 201}, "invalid", "not a usable"),
        (b"{}", GOOD | {names.TYPE: b"t" * 101}, "invalid", "not a usable"),
        (b"{}", GOOD | {names.JOB_ID: b"a\x00b"}, "invalid", "not a usable"),
        (b"{}", GOOD | {names.JOB_ID: b"j" * 201}, "invalid", "not a usable"),
    ],
)
def test_what_no_retry_could_make_readable_is_poison(value, headers, reason, says):
    with pytest.raises(MessageError, match=says) as raised:
        read_message(value, headers, max_bytes=10)
    assert raised.value.reason == reason


def test_a_value_of_exactly_the_limit_is_accepted():
    assert read_message(b"x" * 10, GOOD, max_bytes=10).payload == b"x" * 10


# --- Headers a mapping cannot hold: names given twice, headers without a value, and their order ---


pairs = st.lists(
    st.tuples(
        st.sampled_from(["h", "a", "", "kjo-id", HEADER_LIST]) | st.text(max_size=5),
        st.none() | st.binary(max_size=8),
    ),
    max_size=8,
)


@given(pairs)
def test_a_list_of_headers_is_kept_by_the_mapping_made_of_it(given_):
    assert listed(folded(given_)) == given_


@given(pairs)
def test_the_mapping_has_the_last_of_each_name(given_):
    last = {name: value or b"" for name, value in given_}
    assert {**folded(given_), HEADER_LIST: b""} == {**last, HEADER_LIST: b""}


def test_plain_headers_are_a_plain_mapping():
    assert folded([("b", b"1"), ("a", b"")]) == {"b": b"1", "a": b""}


@given(st.dictionaries(st.text(st.characters(codec="ascii", min_codepoint=32)), st.binary()))
def test_a_column_of_json_that_sorts_names_keeps_their_order(headers):
    for write, read in ((names.to_json, names.from_json), (names.for_row, names.from_row)):
        column = json.loads(json.dumps(write(in_order(headers)), sort_keys=True))
        assert list(read(column).items()) == list(headers.items())


def test_what_is_replaced_takes_the_place_of_all_of_its_name_and_what_is_added_comes_last():
    # Given
    found = folded([("a", b"1"), ("h", b"1"), ("b", None), ("h", b"2"), ("c", b"3")])
    # When
    changed = {**found, "h": b"new", "added": b"x"}
    del changed["c"]
    # Then
    assert listed(changed) == [("a", b"1"), ("h", b"new"), ("b", None), ("added", b"x")]


@pytest.mark.parametrize("told", [b"", b"{", b"5", b"[5]", b'[["a"]]', b'[[1, "eA=="]]', b"\xff"])
def test_a_list_made_up_by_others_is_none(told):
    assert listed({"a": b"1", HEADER_LIST: told}) == [("a", b"1")]


def test_handlers_are_not_told_of_it():
    assert names.texts(folded([("h", b"1"), ("h", b"2")])) == {"h": "2"}


@pytest.mark.parametrize("told", [b"", b"5", b"[]", b'{"kjo-id": 1}', b'{"kjo-id": "x"}', b"\xff"])
def test_an_envelope_made_up_by_others_is_none(told):
    headers = {names.ID: b"1", "a": b"1", names.CONTENT_TYPE: b"t", names.ORIGIN_ENVELOPE: told}
    assert names.without_envelope(headers).keys() - {names.CONTENT_TYPE} == {"a"}
