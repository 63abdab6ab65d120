"""What a seed draws: a list of steps, each by itself, so that any of them can be left out."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tests.faults.boundary import Fault

PARTS = ("beat", "relay", "poll", "lanes", "turn")
"""What a worker's threads do, one round of each; a turn is a round of all of them."""
WEIGHTS = (1, 3, 3, 4, 5)
CALLS = {"beat": 3, "relay": 10, "poll": 6, "lanes": 25, "turn": 50, "stop": 8, "produce": 10}
"""Calls of a step among which the one that is struck is drawn; a step may have fewer."""
KINDS = (
    *("atomic", "atomic", "database-only", "outside", "async"),
    *("batch", "batch-outside", "queue", "task", "stream"),
)
"""Not coroutines outside a transaction: these run at once, on threads of their own."""
ENDINGS = ("completed", "completed", "completed", "retried", "dead", "paused")
MOST_PROCESSES = 3


@dataclass(frozen=True)
class Step:
    """One step of one process, or of the world.

    :param who: number of the process; one that is dead, or never began, does nothing.
    :param fault: what befalls the step's call number ``at``.
    :param meanwhile: the step of another process that comes in between then.
    """

    action: str
    who: int = 0
    what: tuple[str, ...] = ()
    seconds: float = 0.0
    fault: str = ""
    at: int = 0
    meanwhile: Step | None = None


def drawn(seed: int, count: int) -> list[Step]:
    """Return the schedule of a seed.

    One in three meets overlaps only: without outages and deaths more is promised.
    """
    chance = random.Random(f"schedule {seed}")
    is_calm = chance.random() < 1 / 3
    steps = [Step("start", number) for number in range(2)]
    alive = {0, 1}
    for number in range(count):
        step = _step(chance, number, alive, is_calm)
        if step.action == "start":
            alive.add(step.who)
        elif step.action in ("stop", "die"):
            alive.discard(step.who)
        steps.append(_with_fault(step, chance, alive, is_calm))
    return steps


def _step(chance: random.Random, number: int, alive: set[int], is_calm: bool) -> Step:
    draw = chance.random()
    missing = set(range(MOST_PROCESSES)) - alive
    if not alive or (missing and draw < 0.04):
        return Step("start", min(missing))
    who = chance.choice(sorted(alive))
    if draw < 0.25:
        return _request(chance, number, who)
    if draw < 0.33:
        return Step("time", seconds=chance.choice((0.5, 2.0) if is_calm else (0.5, 2.0, 5.0, 40.0)))
    if draw < 0.36:
        return Step("stop" if is_calm or chance.random() < 0.3 else "die", who)
    return Step(*chance.choices(PARTS, WEIGHTS), who)


def _request(chance: random.Random, number: int, who: int) -> Step:
    draw = chance.random()
    if draw < 0.15:
        return Step("others", who, (f"r{number}",))
    if draw < 0.22:
        return Step("produce", who)
    if draw < 0.26:
        return Step("cancel", who)
    if draw < 0.30:
        return Step("replay", who)
    jobs: list[str] = []
    kinds = [chance.choice(KINDS)] if chance.random() < 0.5 else KINDS
    for each in range(chance.randint(1, 4)):
        prefix = "too-large-" if chance.random() < 0.02 else chance.choice("kf")
        jobs += chance.choice(kinds), f"{prefix}{number}.{each}", chance.choice(ENDINGS)
    return Step("enqueue", who, tuple(jobs))


def _with_fault(step: Step, chance: random.Random, alive: set[int], is_calm: bool) -> Step:
    if step.action in ("time", "start", "die") or chance.random() > 0.3:
        return step
    fault = Fault.OVERLAPS if is_calm else chance.choice(list(Fault))
    meanwhile = None
    others = sorted(alive - {step.who})
    if others and fault in (Fault.OVERLAPS, Fault.TAKES_40_S):
        meanwhile = Step(*chance.choices((*PARTS, "produce"), (*WEIGHTS, 3)), chance.choice(others))
    at = chance.randrange(CALLS.get(step.action, 4))
    return replace(step, fault=fault.value, at=at, meanwhile=meanwhile)


def is_calm(steps: Sequence[Step]) -> bool:
    """Return whether nothing worse than an overlap befalls anybody."""
    return all(
        step.action != "die" and step.fault in ("", Fault.OVERLAPS.value) and step.seconds < 5
        for step in steps
    )


def dumped(steps: Sequence[Step]) -> str:
    """Return a schedule as JSON, a step a line."""
    return "[\n" + ",\n".join(json.dumps(asdict(step)) for step in steps) + "\n]"


def loaded(text: str) -> list[Step]:
    """Undo ``dumped``."""
    return [_loaded(each) for each in json.loads(text)]


def _loaded(given: dict[str, Any]) -> Step:
    meanwhile = _loaded(given["meanwhile"]) if given["meanwhile"] else None
    return Step(**{**given, "what": tuple(given["what"]), "meanwhile": meanwhile})


def shrunk(steps: list[Step], fails: Callable[[list[Step]], bool]) -> list[Step]:
    """Return a part of a schedule that still fails, of which no step and no fault can be left out.

    :param fails: whether a schedule fails.
    """
    size = len(steps) // 2
    while size:
        at = 0
        while at < len(steps):
            without = steps[:at] + steps[at + size :]
            if fails(without):
                steps = without
            else:
                at += size
        size //= 2
    for at, step in enumerate(steps):
        if step.fault:
            calmer = [*steps[:at], replace(step, fault="", at=0, meanwhile=None), *steps[at + 1 :]]
            if fails(calmer):
                steps = calmer
    return steps
