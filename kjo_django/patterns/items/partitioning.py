"""The partition of an item: that of its id, whatever type of message speaks of it (KJO-F7).

The hash is the one Kafka's Java and JavaScript clients and our transport use for keys, so a record
whose key is the bare item id lands in the same partition. Pure.
"""

from __future__ import annotations

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
