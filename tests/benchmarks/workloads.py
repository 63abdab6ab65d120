"""What the measured jobs do: a handler, its payloads, and what is there once it has run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEYS = 50
"""Of jobs that keep the order of their key."""


@dataclass(frozen=True)
class Workload:
    """A handler by its registered name, and the payload of its nth job."""

    handler: str
    payload: Callable[[int], dict[str, Any]] = lambda number: {}
    has_entries: bool = False
    """Whether each job adds one entry to the ledger."""
    is_ordered: bool = False
    """Whether the entries of each key must come in the order of their jobs."""


def _named(number: int) -> dict[str, Any]:
    return {"job": f"job-{number}"}


def _keyed(number: int) -> dict[str, Any]:
    return {"job": f"{number:08}", "key": f"key-{number % KEYS}", "milliseconds": 5}


WORKLOADS = {
    "no_op": Workload("ledger.no_op"),
    "insert": Workload("ledger.write", _named, has_entries=True),
    "insert_only": Workload("benchmarks.write_only", _named, has_entries=True),
    "batch": Workload("benchmarks.write_batch", _named, has_entries=True),
    "outside": Workload("benchmarks.no_op_outside"),
    "sleep": Workload("benchmarks.sleep"),
    "async": Workload("benchmarks.sleep_async"),
    "keyed": Workload("ledger.write_keyed", _keyed, has_entries=True, is_ordered=True),
}
