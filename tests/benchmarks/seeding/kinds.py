"""The handlers of a seeded database, and how they fail."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

SLOTS = 100
"""Shares of the jobs are counted in hundredths."""
ERROR_SLOTS = 20


@dataclass(frozen=True)
class Kind:
    """A handler, its share of the jobs, how many keys it has, and how long it takes."""

    queue: str
    handler: str
    share: int
    keys: int
    run_power: int
    """Its usual run takes up to 1 ms · 2^n."""


KINDS = (
    Kind("emails", "shop.send_confirmation", 35, 50_000, 7),
    Kind("emails", "shop.send_newsletter", 25, 0, 6),
    Kind("stock", "shop.adjust_stock", 15, 3_000, 3),
    Kind("invoices", "shop.write_invoice", 10, 200_000, 5),
    Kind("images", "media.resize", 8, 0, 9),
    Kind("search", "search.index", 5, 20_000, 4),
    Kind("reports", "reports.nightly", 2, 0, 13),
)
QUEUES = tuple(dict.fromkeys(kind.queue for kind in KINDS))
WORKERS = ("worker-1", "worker-2", "worker-3", "worker-4")
RELEASES = ("2024.1", "2024.2", "2024.3")

ERRORS = (
    # Type, text, where it was raised, share of the failures in twentieths
    ("builtins.ConnectionError", "The remote end closed the connection", "client.py:send", 8),
    ("builtins.TimeoutError", "No answer within 10 s", "client.py:wait", 5),
    ("builtins.ValueError", "The amount must not be negative", "rules.py:check", 3),
    ("builtins.KeyError", "'postal_code'", "reading.py:address_of", 2),
    ("django.db.utils.OperationalError", "deadlock detected", "utils.py:execute", 1),
    ("kjo_django.exceptions.PermanentError", "The order was deleted", "jobs.py:find", 1),
)


@dataclass(frozen=True)
class Failure:
    """One way one handler fails."""

    handler: str
    slot: int
    error_type: str
    error: str
    fingerprint: str
    reason: str
    traceback: str


def slots() -> Iterator[tuple[int, Kind]]:
    """Yield which kind each hundredth of the jobs is."""
    slot = 0
    for kind in KINDS:
        for _ in range(kind.share):
            yield slot, kind
            slot += 1
    assert slot == SLOTS


def failures() -> Iterator[Failure]:
    """Yield how each handler fails, by twentieth of its failures."""
    for kind in KINDS:
        slot = 0
        for error_type, error, place, share in ERRORS:
            for _ in range(share):
                yield Failure(
                    kind.handler,
                    slot,
                    error_type,
                    error,
                    _fingerprint(kind.handler, error_type, place),
                    "fatal" if error_type.endswith("PermanentError") else "exhausted",
                    _traceback(kind.handler, error_type, error, place),
                )
                slot += 1
        assert slot == ERROR_SLOTS


def _fingerprint(handler: str, error_type: str, place: str) -> str:
    """As long as the real one, and like it one for each error in one place of one handler."""
    return hashlib.sha256(f"{handler}\0{error_type}\0{place}".encode()).hexdigest()[:16]


def _traceback(handler: str, error_type: str, error: str, place: str) -> str:
    file, _, function = place.partition(":")
    app, _, name = handler.partition(".")
    return (
        "Traceback (most recent call last):\n"
        f'  File "{app}/jobs.py", line 41, in {name}\n'
        f"    {function}(order)\n"
        f'  File "{app}/{file}", line 17, in {function}\n'
        "    raise\n"
        f"{error_type.removeprefix('builtins.')}: {error}\n"
    )
