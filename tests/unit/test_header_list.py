"""Headers a mapping cannot hold: names given twice, headers without a value, and their order."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.messages import headers as names
from kjo_django.messages.headers import HEADER_LIST, folded, in_order, listed

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
