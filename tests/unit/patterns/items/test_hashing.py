"""Content hashes and partitions of items: KJO-12, KJO-101, KJO-F5, KJO-F6, KJO-F7."""

from __future__ import annotations

import hashlib
from datetime import UTC, date, datetime
from decimal import Decimal
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kjo_django.exceptions import PayloadError
from kjo_django.patterns.items.hashing import content_hash, murmur2, partition_of


def test_it_is_sha256_over_canonical_json():
    """KJO-F5."""
    expected = hashlib.sha256(b'{"a":1,"b":"x"}').hexdigest()
    assert content_hash({"b": "x", "a": 1}) == expected


def test_md5_is_an_opt_in():
    """KJO-F5: for producers that have always used it."""
    assert content_hash({"a": 1}, "md5") == hashlib.md5(b'{"a":1}').hexdigest()


def test_parts_without_separators_do_not_collide():
    """KJO-F5: md5("1" + "23") was md5("12" + "3")."""
    assert content_hash({"a": "1", "b": "23"}) != content_hash({"a": "12", "b": "3"})


@given(st.dictionaries(st.text(), st.integers() | st.text() | st.none()))
def test_the_order_of_fields_does_not_matter(fields):
    """KJO-12."""
    assert content_hash(fields) == content_hash(dict(reversed(fields.items())))


def test_values_of_model_fields_are_understood():
    """KJO-19."""
    values = {
        "date": date(2026, 1, 31),
        "time": datetime(2026, 1, 31, 12, tzinfo=UTC),
        "price": Decimal("1.10"),
        "id": UUID(int=7),
    }
    assert len(content_hash(values)) == 64
    assert content_hash(values) != content_hash({**values, "price": Decimal("1.1")})


def test_what_json_cannot_write_is_refused():
    with pytest.raises(PayloadError):
        content_hash({"a": object()})


@pytest.mark.parametrize(
    ("text", "signed"),
    [
        ("21", -973932308),
        ("foobar", -790332482),
        ("a-little-bit-long-string", -985981536),
        ("a-little-bit-longer-string", -1486304829),
        ("lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58897971),
        ("abc", 479470107),
    ],
)
def test_murmur2_is_kafkas(text, signed):
    """KJO-101: the vectors of Kafka's own tests."""
    assert murmur2(text.encode()) == signed % 2**32


@given(st.text(), st.integers(1, 500))
def test_a_partition_is_one_of_the_topics(item_id, partitions):
    """KJO-101."""
    assert 0 <= partition_of(item_id, partitions) < partitions
