"""What a measurement is: cases, and the input each starts from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

REAL, POSTGRES, EMBEDDED = "real", "postgres", "embedded"
ENGINES = (REAL, POSTGRES, EMBEDDED)


@dataclass(frozen=True)
class Input:
    """What is in the database, and on the topic, before a measurement starts."""

    workload: str
    """One of `workloads`."""
    count: int
    is_published: bool = True
    """Rows are queued and their messages are on the topic; otherwise rows wait for the relay."""
    partitions: int = 4
    rows: int = 0
    """Rows of other jobs the tables are filled with before."""


@dataclass(frozen=True)
class Step:
    """One process that measures: a function in `measures/` or `limits/`, and its arguments."""

    function: str
    arguments: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A figure, and what it is compared with.

    A step answers with figures by name. One that measures both sides in turns, in one process,
    answers with ``{"ours": figures, "limit": figures}`` and the case names no limit.
    """

    name: str
    engine: str
    ours: Step
    limit: Step | None = None
    input: Input | None = None
    limit_input: Input | None = None
    """Where the other side starts from another input."""
    compared: str = "jobs_per_second"
    """The figure of both sides that makes the ratio."""
    most_rounds: int | None = None
    about: str = ""
    against: str = "the loop written by hand"
    """What the other side is."""
    peer: str = ""
    """The job queue that is measured instead of ours, if it is not ours."""

    @property
    def scenario(self) -> str:
        """What `--scenario` calls it: the part before the dot."""
        return self.name.partition(".")[0]

    @property
    def inputs(self) -> list[Input]:
        """The inputs of one round, one for each side that has one."""
        sides = [self.input]
        if self.limit is not None:
            sides.append(self.limit_input or self.input)
        return [side for side in sides if side is not None]

    def rounds_of(self, wanted: int) -> int:
        """How many rounds it is given where so many are wanted."""
        return min(wanted, self.most_rounds or wanted)


def choose(cases: Sequence[Case], scenarios: Sequence[str]) -> list[Case]:
    """Return the cases of these scenarios, or those named in full; all if none is named."""
    if not scenarios:
        return list(cases)
    return [case for case in cases if case.scenario in scenarios or case.name in scenarios]
