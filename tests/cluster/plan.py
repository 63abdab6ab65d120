"""The faults of a run: a pure function of its seed."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

BROKERS = ("leader", "follower", "controller")
DATABASES = ("primary", "standby")
REDIS = ("redis", "sentinel")
OURS = ("worker", "relay")
PARTS = (BROKERS, DATABASES, REDIS, OURS)
EVERYBODY = tuple(role for part in PARTS for role in part)

TARGETS: dict[str, tuple[str, ...]] = {
    # SIGKILL; a supervisor starts it again, or a standby takes its place.
    "kill": EVERYBODY,
    # SIGSTOP, later SIGCONT: connections stay open and nothing answers.
    "freeze": EVERYBODY,
    # It reaches nobody, and nobody reaches it.
    "cut": EVERYBODY,
    # It hears nobody, but is heard.
    "deaf": EVERYBODY,
    # Nobody hears it, but it hears.
    "mute": EVERYBODY,
    # It is cut from servers of its own kind only; clients reach it.
    "split": (*BROKERS, *DATABASES, "redis"),
    # A share of the packets is dropped, in both directions.
    "loss": EVERYBODY,
    # A narrow line: packets wait in queues.
    "delay": EVERYBODY,
    # Its disk has no room.
    "full disk": (*BROKERS, *DATABASES),
    # Its clock jumps, and jumps back.
    "clock": ("worker",),
}
KINDS = tuple(TARGETS)
FROM, TO = 2.0, 9.0
"""Seconds that a fault lasts: about the limits that servers and clients have, 3 to 6 s."""
SHORT = 4.0
"""The same where there is no time."""
AT_ONCE = 0.7
"""Probability that a fault begins right after the one before has been survived."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is done to one machine, and undone."""

    number: int
    kind: str
    target: str
    """A role; whose it is turns out when the fault begins."""
    seconds: float
    pause: float
    """Seconds before it."""
    choice: int
    """Which of several equals is meant."""
    amount: int
    """How much: packets in a hundred, or seconds of a clock."""

    def __str__(self) -> str:
        return f"{self.number}: {self.kind} of {self.target}, {self.seconds:.1f} s"


def draw(seed: int, count: int, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return the first faults of a seed. Of each round, every kind has one."""
    generator = random.Random(f"cluster {seed}")
    faults: list[Fault] = []
    while len(faults) < count:
        for kind in generator.sample(kinds, len(kinds)):
            target = generator.choice(TARGETS[kind])
            faults.append(_fault(generator, len(faults), kind, target))
    return faults[:count]


def in_pairs(faults: Iterable[Fault]) -> Iterator[list[Fault]]:
    """Put every two that follow one another together, unless they meet the same part: each part
    bears the loss of one machine."""
    waiting: list[Fault] = []
    for fault in faults:
        if waiting and _part(waiting[0]) != _part(fault):
            yield [*waiting, fault]
            waiting = []
        else:
            if waiting:
                yield waiting
            waiting = [fault]
    if waiting:
        yield waiting


def _part(fault: Fault) -> tuple[str, ...]:
    return next(part for part in PARTS if fault.target in part)


def draw_short(seed: int) -> list[Fault]:
    """Return a plan for who has a minute: three kinds of faults, of Kafka, PostgreSQL and us."""
    generator = random.Random(f"short {seed}")
    kinds = generator.sample(("kill", "freeze", "cut"), 3)
    targets = [generator.choice(BROKERS), "primary", generator.choice(OURS)]
    pairs = zip(kinds, targets, strict=True)
    faults = [_fault(generator, number, *pair) for number, pair in enumerate(pairs)]
    return [replace(fault, seconds=SHORT, pause=0.0) for fault in faults]


def _fault(generator: random.Random, number: int, kind: str, target: str) -> Fault:
    is_at_once = generator.random() < AT_ONCE
    pause = generator.uniform(0, 0.5) if is_at_once else generator.uniform(1, 5)
    return Fault(
        number=number,
        kind=kind,
        target=target,
        seconds=round(generator.uniform(FROM, TO), 2),
        pause=round(pause, 2),
        choice=generator.randrange(60),
        amount=generator.choice([10, 20, 30]) * generator.choice([1, -1]),
    )
