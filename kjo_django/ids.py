"""Time-ordered identifiers.

UUIDv7 (RFC 9562): rows of one time lie together in the index, so inserts touch its right edge
only and pruning by age is a range of the primary key.
"""

from __future__ import annotations

import os
import struct
import threading
import time
import uuid
from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)

_POOLED = 512

_lock = threading.Lock()
_last_tick = 0
_randoms: list[int] = []


def _forget() -> None:
    """In the child of a fork, forget what would make it repeat its parent's ids."""
    global _lock
    _lock = threading.Lock()
    _randoms.clear()


os.register_at_fork(after_in_child=_forget)


def uuid7() -> uuid.UUID:
    """Return a UUIDv7; within one process each is greater than the one before."""
    return uuid.UUID(int=uuid7_values(1)[0])


def uuid7s(count: int) -> list[uuid.UUID]:
    """Return so many UUIDv7, in order, for one look at the clock.

    They count on from it, 4096 for each millisecond: more of them are ahead of it by so much.
    """
    return [uuid.UUID(int=value) for value in uuid7_values(count)]


def uuid7_values(count: int) -> list[int]:
    """Return so many UUIDv7 as whole numbers, which ``f"{value:032x}"`` writes for a statement.

    The 12 bits after the millisecond carry its fraction (RFC 9562, method 3), pushed forward by
    one when the clock stands still or steps back, so ids keep the order of their creation.
    """
    global _last_tick
    if count < 1:
        return []
    milliseconds, rest = divmod(time.time_ns(), 1_000_000)
    now = (milliseconds << 12) | ((rest << 12) // 1_000_000)
    with _lock:
        first = max(now, _last_tick + 1)
        _last_tick = first + count - 1
        if len(_randoms) < count:
            # One system call for many: each releases the interpreter lock for other threads.
            more = max(count, _POOLED)
            _randoms.extend(struct.unpack(f"{more}Q", os.urandom(8 * more)))
        randoms = _randoms[-count:]
        del _randoms[-count:]
    return [
        (tick >> 12) << 80 | 0x7 << 76 | (tick & 0xFFF) << 64 | 0b10 << 62 | random >> 2
        for tick, random in zip(range(first, first + count), randoms, strict=True)
    ]


def ago(now: datetime, age: timedelta) -> datetime:
    """Return the moment so long before ``now``, but none before 1970, since no id is older."""
    return now - age if age < now - _EPOCH else _EPOCH


def uuid7_floor(moment: datetime) -> uuid.UUID:
    """Return the smallest UUIDv7 of ``moment`` (aware): ``id__lt`` it means created before it."""
    # Whole numbers: a float of this size may round up, past ids of the same millisecond.
    milliseconds = (moment - _EPOCH) // timedelta(milliseconds=1)
    return uuid.UUID(int=milliseconds << 80 | 0x7 << 76 | 0b10 << 62)
