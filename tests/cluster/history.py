"""What clients were told, what became of it, and what must hold between the two. Pure."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from tests.cluster.web import order


@dataclass(slots=True)
class Save:
    """One transaction of a client: an order, and a job with a key."""

    job: str
    key: str
    invoked_at: float
    outcome: str = "info"
    """``ok``, ``fail``, or ``info``: not known, as of a client that has not come back."""
    completed_at: float = float("inf")


@dataclass(frozen=True, slots=True)
class Effect:
    """A row, in the order of rows."""

    name: str
    committed_at: float


@dataclass
class Found:
    """What does not hold; empty if all does."""

    lost: list[str] = field(default_factory=list)
    """Acknowledged, and not there."""
    doubled: list[str] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    """Orders without their jobs' effects, or the other way round."""
    invented: list[str] = field(default_factory=list)
    """Effects of what was refused, or never saved."""
    out_of_order: list[str] = field(default_factory=list)


def read(paths: Iterable[Path]) -> dict[str, Save]:
    """Read the histories of clients; a last line may be cut off.

    :raises ValueError: if two saves have one name: nothing could be said of their effects.
    """
    saves: dict[str, Save] = {}
    for path in paths:
        for line in path.read_text().splitlines() if path.exists() else ():
            try:
                facts = json.loads(line)
            except ValueError:
                continue
            if facts["type"] == "invoke":
                if facts["job"] in saves:
                    raise ValueError(f"{facts['job']} was saved twice: two clients of one name")
                saves[facts["job"]] = Save(facts["job"], facts["key"], facts["at"])
            else:
                save = saves[facts["job"]]
                save.outcome, save.completed_at = facts["type"], facts["at"]
    return saves


def check(saves: dict[str, Save], effects: list[Effect], failed: Collection[str] = ()) -> Found:
    """Compare what is there with what clients were told.

    :param effects: orders and effects of jobs, as they were written.
    :param failed: jobs that had a failed attempt: these run again after others of their key.
    """
    counts = Counter(effect.name for effect in effects)
    found = Found(doubled=sorted(name for name, count in counts.items() if count > 1))
    for save in saves.values():
        has_order, has_run = order(save.job) in counts, save.job in counts
        if has_order != has_run:
            found.torn.append(save.job)
        if save.outcome == "ok" and not (has_order and has_run):
            found.lost.append(save.job)
        if save.outcome == "fail" and (has_order or has_run):
            found.invented.append(save.job)
    known = saves.keys() | {order(job) for job in saves}
    found.invented += sorted(counts.keys() - known)
    by_key: dict[str, list[str]] = defaultdict(list)
    for effect in effects:
        if effect.name in saves and effect.name not in failed:
            by_key[saves[effect.name].key].append(effect.name)
    for names in by_key.values():
        # A client saves one after the other: the order of names is that of saves.
        late = [name for last, name in pairwise(names) if name < last]
        found.out_of_order += late
    return found


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a fault was survived, in seconds."""

    until_whole: float
    """From its begin until, of every key, a job that was saved since has taken effect."""
    longest_wait: float
    """Of a job that was saved meanwhile, from its acknowledgement to its effect."""


def recovery(
    saves: Collection[Save], effects: dict[str, float], began: float, over: float
) -> Recovery:
    """Return how long a fault was felt.

    :param effects: when each job took effect.
    :param over: when the cluster was whole again.
    """
    first: dict[str, float] = {}
    longest = 0.0
    for save in saves:
        if save.outcome != "ok" or not began <= save.invoked_at <= over:
            continue
        took_effect = effects[save.job]
        first[save.key] = min(took_effect, first.get(save.key, took_effect))
        longest = max(longest, took_effect - save.completed_at)
    return Recovery(max(first.values(), default=over) - began, longest)
