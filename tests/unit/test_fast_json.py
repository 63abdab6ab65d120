"""Payloads mean the same with orjson and without."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kjo_django.exceptions import MessageError
from kjo_django.messages import serializers
from kjo_django.messages.serializers import JSON

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
    assert_both_agree(b"[" * 5000 + b"]" * 5000)
