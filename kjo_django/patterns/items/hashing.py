"""Hashes of content, and the partition of an item. Pure."""

from __future__ import annotations

import hashlib
from typing import Any

from kjo_django.messages.serializers import canonical_json

ALGORITHMS = ("sha256", "md5")


def content_hash(fields: Any, algorithm: str = "sha256") -> str:
    """Return the hex digest of the fields' canonical JSON.

    Names and separators are part of it, so ``("1", "23")`` and ``("12", "3")`` differ. The order of
    keys does not matter.

    :param algorithm: use ``md5`` only for compatibility with producers that use it; it is not
        secure.
    :raises PayloadError: the fields cannot be written as JSON.
    """
    data = canonical_json(fields)
    if algorithm == "md5":
        return hashlib.md5(data, usedforsecurity=False).hexdigest()
    return hashlib.new(algorithm, data).hexdigest()


# --- Partitions -----------------------------------------------------------------------------------


_MASK = 0xFFFFFFFF
_SEED = 0x9747B28C
_FACTOR = 0x5BD1E995


def murmur2(data: bytes) -> int:
    """Return Kafka's 32-bit murmur2 as an unsigned number."""
    size = len(data)
    whole = size - size % 4
    result = _SEED ^ size
    for start in range(0, whole, 4):
        word = int.from_bytes(data[start : start + 4], "little") * _FACTOR & _MASK
        word = (word ^ word >> 24) * _FACTOR & _MASK
        result = (result * _FACTOR & _MASK) ^ word
    if whole < size:
        result = (result ^ int.from_bytes(data[whole:], "little")) * _FACTOR & _MASK
    result = (result ^ result >> 13) * _FACTOR & _MASK
    return result ^ result >> 15


def partition_of(item_id: str, partitions: int) -> int:
    """Return the partition of an item in a topic with this many partitions."""
    return (murmur2(item_id.encode()) & 0x7FFFFFFF) % partitions
