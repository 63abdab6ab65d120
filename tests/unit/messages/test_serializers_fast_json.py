"""Payloads mean the same with orjson and without."""

from __future__ import annotations

import enum
import json
import math
import uuid
from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kjo_django.exceptions import MessageError, PayloadError
from kjo_django.messages import serializers
from kjo_django.messages.serializers import JSON

pytestmark = pytest.mark.medium  # many random values

pytest.importorskip("orjson")

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(min_value=2**62, max_value=2**66)
    | st.floats()
    | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


def answer(data: bytes) -> Any:
    try:
        return JSON.loads(data)
    except MessageError as error:
        return str(error)


def is_same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(is_same(one[name], other[name]) for name in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, float):
        return one == other and math.copysign(1, one) == math.copysign(1, other)
    return bool(one == other)


def assert_both_agree(data: bytes) -> None:
    with pytest.MonkeyPatch.context() as patch:
        quick = answer(data)
        patch.setattr(serializers, "_quick_loads", None)
        plain = answer(data)
    assert is_same(quick, plain), (data, quick, plain)


def test_it_is_used_where_it_is_present(monkeypatch):
    asked = []
    monkeypatch.setattr(serializers, "_quick_loads", lambda data: asked.append(data) or 7)
    assert JSON.loads(b"7") == 7
    assert asked == [b"7"]


@pytest.mark.large
@given(VALUES, st.sampled_from([None, 2]), st.booleans())
def test_what_any_encoder_wrote_is_read_alike(value, indent, is_ascii):
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert_both_agree(text.encode("utf-8", "surrogatepass"))


@given(st.text(alphabet='0123456789-+.eE[]{}",:\\ \nNaIfitrulsd\u0000\ud800é', max_size=12))
@example("123456789012345678901234567890")
@example("[18446744073709551616]")
@example("-9223372036854775809")
@example("1e400")
@example("-0")
@example("NaN")
@example('"\\ud800"')
@example('{"a":1,"a":2}')
@example("\ufeff1")
@example("01")
def test_what_somebody_made_up_is_read_or_refused_alike(text):
    assert_both_agree(text.encode("utf-8", "surrogatepass"))


@given(st.binary(max_size=20))
def test_bytes_of_any_kind_are_read_or_refused_alike(data):
    assert_both_agree(data)


def test_absurd_nesting_is_refused_alike():
    assert_both_agree(b"[" * 100_000 + b"]" * 100_000)


# --- Writing --------------------------------------------------------------------------------------


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Name(enum.StrEnum):
    ANN = "ann"


class Text(str):
    pass


WRITABLE = st.one_of(
    VALUES,
    st.text(st.characters(max_codepoint=0x9F)),
    st.text(st.characters(categories=["Cs", "Cc", "Lu", "Zl", "Zp"])),
    st.sampled_from([*Colour, *Number, *Name, Text("x"), object(), b"x", {1}, (1, "a")]),
    st.sampled_from([uuid.UUID(int=1), Decimal("1.50"), date(2030, 1, 1), datetime(2030, 1, 1)]),
)


def written(value: Any) -> bytes | str:
    try:
        return JSON.dumps(value)
    except PayloadError as error:
        return str(error)


def assert_both_write(value: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        quick = written(value)
        patch.setattr(serializers, "_quick_dumps", None)
        plain = written(value)
    assert quick == plain


def test_plain_payloads_are_written_by_it_where_it_is_present(monkeypatch):
    monkeypatch.setattr(serializers, "_quick_dumps", lambda value: b"quick")
    assert JSON.dumps({"id": 7, "name": "a", "is_new": True, "none": None}) == b"quick"
    assert JSON.dumps({"ratio": 0.5}) == b'{"ratio":0.5}'


@given(st.dictionaries(st.text(), WRITABLE))
@example({"a": 2**63, "b": -(2**63), "c": 2**64, "d": -(2**63) - 1})
@example({"a": "".join(map(chr, range(0x300))), "b": "\u2028\u2029\ufeff\U0001f600"})
@example({"a": "\ud800"})
@example({"\ud800": "a"})
@example({"a": math.nan})
@example({"a": Colour.RED})
def test_both_write_the_same_bytes_or_refuse_alike(payload):
    assert_both_write(payload)


@pytest.mark.large
@given(
    st.dictionaries(st.sampled_from([1, 2.5, True, None, (1,), Name.ANN, Number.ONE, "a"]), VALUES)
)
def test_both_take_the_same_names(payload):
    assert_both_write(payload)
