"""Several workers take permits, use them, are late, and give them back, also while a call is on
its way, and calls get no answer: no window has more starts than its rate.

Tier: the quick one. Coordination is the rules themselves, and the clock is set.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import pytest

from kjo_django.coordination.starts import Ask, Pace, Permit, Starts, Used, paces_of, permit
from kjo_django.exceptions import CoordinationError
from kjo_django.limits.permits import LimitState, Permits
from kjo_django.values import rate
from tests.clocks import SetClock

STEPS = 400
CLOSE = 1e-6
"""Seconds within which two moments are one."""


@dataclass(eq=False)
class Waiting:
    """A delivery that wants to start."""

    limit_state: LimitState
    is_in_transaction: bool = False


@dataclass
class World:
    """A rate, and the workers that share it."""

    draw: random.Random
    pace: Pace
    clock: SetClock = field(default_factory=SetClock)
    known: Starts = field(default_factory=Starts)
    workers: list[Worker] = field(default_factory=list)
    starts: list[float] = field(default_factory=list)

    def answer(self, asks: Sequence[Ask], used: Sequence[Used]) -> list[Permit]:
        known = dict.fromkeys(paces_of(asks, used), self.known)
        return permit(asks, known, round(self.clock.monotonic() * 1e6), used)


class Worker:
    """One worker: its deliveries, and what it does next."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.permits = Permits(self._call, world.clock)
        self.waiting: list[Waiting] = []

    def _call(self, asks: Sequence[Ask], used: Sequence[Used]) -> list[Permit]:
        """Call coordination; meanwhile the worker's lanes go on."""
        draw, clock = self.world.draw, self.world.clock
        clock.advance(draw.choice((0.0, 0.005, 0.02)))
        error = draw.choices((None, "unasked", "unanswered"), (18, 1, 1))[0]
        answers = self.world.answer(asks, used) if error != "unasked" else []
        for _ in range(draw.choice((0, 0, 1, 4))):
            draw.choice((self.start, self.give_back))()
        clock.advance(draw.choice((0.0, 0.005, 0.02)))
        if error is not None:
            away = CoordinationError("away")
            away.may_have_effect = error == "unanswered" or draw.random() < 0.5
            raise away
        return answers

    def ask(self) -> None:
        draw = self.world.draw
        while len(self.waiting) < 8:
            self.waiting.append(Waiting(LimitState([self.world.pace])))
        with suppress(CoordinationError):
            self.permits.ask(draw.sample(self.waiting, draw.randint(1, 4)))

    def start(self) -> None:
        """Start what may start by now."""
        for each in list(self.waiting):
            if self.permits.use(each):
                self.world.starts.append(self.world.clock.monotonic())
                self.permits.note_start(each)
                self.waiting.remove(each)

    def give_back(self) -> None:
        """Let one wait elsewhere, and perhaps come again."""
        if self.waiting:
            each = self.world.draw.choice(self.waiting)
            self.permits.give_back([each])
            if self.world.draw.random() < 0.5:
                self.waiting.remove(each)


@pytest.mark.parametrize("seed", range(170, 210))
def test_no_window_has_more_starts_than_its_rate(seed: int) -> None:
    """Seed 196: a permit that was given back while another one was asked for in its place was
    returned twice, with the start of another worker's."""
    draw = random.Random(seed)
    wanted = rate(draw.choice(("5/s", "30/s", "2/s", "20/4s")))
    pace = Pace("rate", wanted.count, wanted.seconds, wanted.interval, wanted.ahead)
    world = World(draw, pace)
    world.workers = [Worker(world) for _ in range(draw.randint(1, 4))]
    # When
    for _ in range(STEPS):
        worker = draw.choice(world.workers)
        draw.choices((worker.ask, worker.start, worker.give_back), (4, 4, 1))[0]()
        # A lane is late now and then, by more than a permit is good for.
        world.clock.advance(draw.choices((0.0, 0.02, 0.1, 0.9), (6, 6, 3, 1))[0])
    # Then
    assert len(world.starts) > wanted.count
    for first, last in zip(world.starts, world.starts[wanted.count :], strict=False):
        assert last - first >= wanted.seconds - CLOSE
