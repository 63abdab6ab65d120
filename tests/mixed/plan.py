"""A plan, drawn from a seed: what is enqueued when, and what happens to those who work on it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

PHASE = 7.0
"""Seconds of a phase: first something happens to processes or servers, then calm."""
TURBULENCE = 1.2
"""Seconds at the beginning of a phase in which it happens."""
PROBE_EVERY = 0.6
WARM_UP = 4
"""Probes before anything else, at times below 0: how soon an idle worker starts a job."""

KINDS: dict[str, int] = {
    "write": 6,
    "keyed": 6,
    "write_only": 3,
    "write_outside": 3,
    "write_async": 2,
    "write_async_outside": 2,
    "write_batch": 4,
    "task": 4,
    "event": 4,
    "kdlq": 2,
    "stream": 4,
    "item": 2,
    "foreign": 2,
    "other": 3,
    "paused": 1,
}
"""Kinds of work and how often each is drawn."""
HOWS: dict[str, tuple[str, ...]] = {
    "write": ("error", "error", "retry", "interrupt", "exit", "locked", "changes", "spoils"),
    "keyed": ("error",),
    "write_only": ("error", "interrupt", "locked", "changes", "spoils"),
    "write_outside": ("error", "retry", "interrupt", "exit", "changes", "spoils"),
    "write_async": ("error", "locked"),
    "write_async_outside": ("error",),
    "write_batch": ("error",),
    "task": ("error", "retry"),
    "event": ("error", "interrupt"),
    "kdlq": ("redeliver",),
    "stream": ("error",),
    "item": ("error",),
    "foreign": ("error",),
    "paused": ("pause",),
}
"""How a begin of each kind may go wrong before it goes well. One that only changes or spoils its
session may go well at once."""
RELAYED_BY_ALL = "relayed by all"
"""Of records for others: commands relay at the moment they are committed, beside the workers."""
RATE = 4
"""Starts a second that the limit of each rated key permits."""
RATED_KEYS = ("rate-a", "rate-b")
RATED = 15
"""Seconds of permitted starts that wait for each key from the beginning of each phase on."""
SLOTS = 2
"""Jobs of the handler with slots that may run at once."""
AWAY = (0.0, 0.0, 0.005, 0.02)
"""Seconds that a round trip to the database takes longer; each is drawn as often."""
BUSY = 8
"""Processes of a move that takes the processors away."""
UNEVEN = 60
"""Jobs that are enqueued together of which one may be long."""
EXHAUSTED = 2
"""Attempts of work that is to run out of them."""
FOREVER = 10**6


@dataclass(frozen=True, slots=True)
class Engine:
    """What a combination of transport, coordination and database can be asked for."""

    name: str
    transport: str
    is_sqlite: bool = False
    has_redis: bool = False
    has_processes: bool = True
    """Whether workers are processes, so that one can be killed without the others."""

    @property
    def has_relays(self) -> bool:
        """Whether jobs are handed over by a relay rather than with their transaction."""
        return self.transport != "database"

    @property
    def has_partitions(self) -> bool:
        """Whether a worker that comes takes partitions from others, who wait meanwhile."""
        return self.transport in ("kafka", "memory")

    @property
    def heartbeat(self) -> float:
        """Seconds between the signs of life of workers that have limits. After three without a sign
        a worker has lost its slots, and asks for no permits: a busy machine may be late by two."""
        return 2.0 if self.is_sqlite else 1.0

    @property
    def keeps_order(self) -> bool:
        """Whether the order of a key holds between workers."""
        return self.transport != "redis_streams"


ENGINES = {
    engine.name: engine
    for engine in (
        Engine("memory", "memory", is_sqlite=True, has_processes=False),
        Engine("sqlite", "database", is_sqlite=True),
        Engine("postgres", "database"),
        Engine("mariadb", "database"),
        Engine("mysql", "database"),
        Engine("kafka", "kafka", has_redis=True),
        Engine("redis_streams", "redis_streams", has_redis=True),
    )
}


@dataclass(slots=True)
class Work:
    """One piece of work: what it is, how its handler behaves and so how it must end."""

    name: str
    kind: str
    at: float
    transaction: int
    commits: bool = True
    key: str = ""
    ms: float = 0.0
    fails: int = 0
    how: str = "error"
    end: str = "complete"
    """complete, refuse (a permanent error), exhaust, expire, cancel, garbage or too_large."""
    delay: float = 0.0
    copies: int = 0
    """Further copies of its message, or enqueues of its unique id."""

    @property
    def behaviour(self) -> dict[str, Any]:
        """What its handler is told, defaults left out."""
        told: dict[str, Any] = {}
        if self.fails:
            told |= {"fails": self.fails, "how": self.how}
        if self.end == "refuse":
            told["end"] = "refuse"
        return told

    @property
    def has_one_effect(self) -> bool:
        """Whether its entry is part of the transaction that completes it."""
        return self.kind not in AT_LEAST_ONCE


AT_LEAST_ONCE = frozenset(
    ("write_outside", "write_async_outside", "slow", "hot", "long", "uneven", "stream", "slotted")
)
"""Kinds that run outside a transaction: a crash after their entry repeats it."""


@dataclass(frozen=True, slots=True)
class Move:
    """Something that happens to a process or a server."""

    at: float
    what: str
    """join, leave, kill, freeze, relay, flush, end_sessions, hold_rows, refuse, break_database,
    busy."""
    seconds: float = 0.0


@dataclass(slots=True)
class Plan:
    """What is done in one run."""

    seed: int
    engine: Engine
    seconds: float
    works: list[Work] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    away: float = 0.0
    """Seconds that a round trip of its processes to the database takes longer."""
    is_limited: bool = False
    """Whether there are jobs with rates and slots."""

    def __str__(self) -> str:
        moves = ", ".join(f"{move.what} at {move.at:.1f}" for move in self.moves)
        away = f"the database {1000 * self.away:.0f} ms away; " if self.away else ""
        count = f"{len(self.works)} pieces of work"
        return f"seed {self.seed} on {self.engine.name}: {count}; {away}{moves}"


def draw(seed: int, engine: str, phases: int = 2) -> Plan:
    """Return the plan of a seed: the same for the same arguments, in every process."""
    return _Draw(seed, ENGINES[engine], phases).plan


class _Draw:
    def __init__(self, seed: int, engine: Engine, phases: int) -> None:
        self.random = random.Random(f"{seed} {engine.name}")
        self.engine = engine
        self.plan = Plan(seed, engine, phases * PHASE)
        self._transaction = 0
        for number in range(WARM_UP):
            self._add("probe", number * 0.25 - WARM_UP * 0.25)
        for number in range(phases):
            self._phase(number * PHASE)
        # What follows came later. Numbers of its own keep the plans of older seeds as they were.
        self.random = random.Random(f"{seed} {engine.name} circumstances")
        self._circumstances(phases)
        self.plan.is_limited = self.random.random() < 0.5
        for number in range(phases):
            self._unique(number * PHASE)
            self._flows(number * PHASE)
            if self.plan.is_limited:
                self._limited(number * PHASE)
        self.plan.works.sort(key=lambda work: (work.at, work.transaction, work.name))
        self.plan.moves.sort(key=lambda move: move.at)

    # --- Work -------------------------------------------------------------------------------------

    def _add(self, kind: str, at: float, **options: Any) -> Work:
        options.setdefault("transaction", self._next())
        work = Work(f"mx{len(self.plan.works)}x", kind, at, **options)
        self.plan.works.append(work)
        return work

    def _next(self) -> int:
        self._transaction += 1
        return self._transaction

    def _many(self, least: int, most: int) -> int:
        """Draw a number; half of it where one writes at a time."""
        count = self.random.randint(least, most)
        return count // 2 if self.engine.is_sqlite else count

    def _phase(self, start: float) -> None:
        for what in self._moves(start):
            at, seconds = self.random.uniform(0.3, TURBULENCE), self.random.uniform(1, 2)
            self.plan.moves.append(Move(start + at, what, seconds))
            if what == "hold_rows":
                # Rows that are held while they are sent are found open by who reads the message.
                for number in range(8):
                    one = self._next()
                    for _ in range(4):
                        self._add("stream", start + at + 0.3 + 0.1 * number, transaction=one)
        self._backlogs(start)
        for _ in range(self._many(30, 45)):
            self._batch(start + self.random.uniform(0, PHASE - 1.5))
        self._oddities(start)
        at = start
        while at < start + PHASE:
            self._add("probe", at)
            at += PROBE_EVERY * self.random.uniform(0.8, 1.2)

    def _backlogs(self, start: float) -> None:
        """What makes others wait where it may not: slow jobs, a hot key, a long job."""
        for _ in range(self.random.randint(1, 2)):
            at = start + self.random.uniform(0, 0.3)
            # The first ones outlast the phase: what waits for them waits for long.
            ms = self.random.uniform(3000, 5000) if start else self.random.uniform(9000, 12000)
            self._add("long", at, ms=ms)
        one = self._next()
        for _ in range(self._many(40, 50) if start else self._many(130, 160)):
            self._add("slow", start + 0.1, transaction=one, ms=self.random.uniform(30, 80))
        one, key = self._next(), f"hot-{start:.0f}"
        for _ in range(self._many(40, 60)):
            ms = self.random.uniform(20, 60)
            self._add("hot", start + 0.2, transaction=one, ms=ms, key=key)
        if not self.engine.is_sqlite:  # it has fewer lanes
            self._uneven(start)

    def _uneven(self, start: float) -> None:
        """Quick jobs, by which workers know their handler; then many together of which one is long,
        with lanes free beside it."""
        for at, long in ((0.1, 0.0), (1.0, 0.0), (2.5, 8000.0)):
            one = self._next()
            for number in range(UNEVEN):
                ms = long if number == UNEVEN // 3 else 0.0
                self._add("uneven", start + at, transaction=one, ms=ms)

    def _batch(self, at: float) -> None:
        """Add what one transaction enqueues."""
        transaction, commits = self._next(), self.random.random() > 0.15
        kinds = self.random.choices([*KINDS], [*KINDS.values()], k=self.random.choice([1, 1, 2, 5]))
        for kind in kinds:
            work = self._add(kind, at, transaction=transaction, commits=commits)
            if kind == "keyed":
                work.key = f"key-{self.random.randrange(6)}"
                work.ms = self.random.choice([0, 0, 2])
            elif kind in ("write_outside", "write_async_outside"):
                work.ms = self.random.choice([0, 5, 40])
            elif kind == "write" and not self.engine.is_sqlite:
                work.ms = self.random.choice([0, 0, 0, 10])
            self._fate(work)

    def _fate(self, work: Work) -> None:
        """Draw how it ends, and what goes wrong before."""
        drawn = self.random.random()
        if work.kind == "other":
            return
        if work.kind in ("event", "foreign", "task", "write") and self.random.random() < 0.25:
            work.copies = self.random.choice([1, 2])
        if drawn < 0.2 or work.kind == "paused":
            work.fails = self.random.choice([1, 1, 2])
            work.how = self.random.choice(HOWS[work.kind])
        elif drawn < 0.28:
            work.end = "refuse"
        elif drawn < 0.34 and work.kind in ("write", "write_outside", "task", "write_only"):
            work.end, work.fails = "exhaust", FOREVER
            work.how = self.random.choice(HOWS[work.kind])
        elif drawn < 0.42 and work.kind in ("write", "task", "write_batch"):
            work.delay = self.random.uniform(0.5, 2.5)

    def _oddities(self, start: float) -> None:
        """What is there in every run: cancelled and expired work, garbage, and the like."""
        for _ in range(2):
            at = start + self.random.uniform(0, PHASE - 2)
            self._add("task", at, end="cancel", delay=4.0)
            self._add("write", at, end="expire", delay=0.6)
            self._add("foreign", at, end="garbage")
            # Somebody's business: stream tasks come in bursts.
            one = self._next()
            for _ in range(self._many(10, 20)):
                self._add("stream", at, transaction=one)
            one = self._next()
            for _ in range(self.random.randint(5, 10)):
                self._add("other", at, transaction=one)
        for how in ("interrupt", "exit"):
            self._add("write", start + 2.0, end="exhaust", fails=FOREVER, how=how)
        if self.engine.has_relays:
            # Others relay at the same moment, with the command that cron would call.
            one = self._next()
            for _ in range(30):
                self._add("other", start + 4.0, transaction=one, how=RELAYED_BY_ALL)
        if self.engine.transport == "kafka":
            self._add("large", start + 1.0, end="too_large")
            self._add("large", start + 1.0)

    def _unique(self, start: float) -> None:
        """Jobs that are enqueued several times within their window."""
        for _ in range(self._many(6, 10)):
            at, commits = start + self.random.uniform(0, PHASE - 1.5), self.random.random() > 0.15
            work = self._add("once", at, commits=commits, copies=self.random.choice([1, 2]))
            work.fails = self.random.choice([0, 0, 0, 1])

    def _flows(self, start: float) -> None:
        """Workflows: a step, some beside one another after it, and one after these. Where one of
        these fails for good, the last one is cancelled."""
        for _ in range(2):
            at = start + self.random.uniform(0, PHASE - 1.5)
            one, count = self._next(), self.random.randint(2, 6)
            flow = {"transaction": one, "key": f"flow-{one}"}
            self._add("first_step", at, **flow)
            members = [self._add("step", at, **flow) for _ in range(count)]
            last = self._add("last_step", at, **flow)
            fate = self.random.random()
            if fate < 0.2:
                members[0].end, last.end = "refuse", "cancel"
            elif fate < 0.6:
                members[0].fails = 1

    def _limited(self, start: float) -> None:
        """More jobs with a rate than may start within the phase, and jobs with slots."""
        for key in RATED_KEYS:
            one, count = self._next(), RATE * RATED
            for _ in range(self._many(count, count)):
                fails = int(self.random.random() < 0.05)
                self._add("rated", start + 0.3, transaction=one, key=key, fails=fails)
        one = self._next()
        for _ in range(self._many(8, 12)):
            # Longer than a slot takes to come to its next job: so both are taken again and again.
            ms = self.random.uniform(2000, 3000)
            self._add("slotted", start + 0.4, transaction=one, ms=ms)

    # --- Moves ------------------------------------------------------------------------------------

    def _circumstances(self, phases: int) -> None:
        """Draw how far the database is, and when the processors are taken away."""
        if not self.engine.is_sqlite:
            self.plan.away = self.random.choice(AWAY)
        for number in range(phases):
            if self.random.random() < 0.5:
                at = number * PHASE + self.random.uniform(0.3, 3)
                self.plan.moves.append(Move(at, "busy", self.random.uniform(2, 4)))

    def _moves(self, start: float) -> Iterator[str]:
        engine = self.engine
        if not engine.has_processes:
            yield from self.random.sample(["join", "leave", "refuse", "break_database"], k=2)
            return
        about_workers = ["kill", "kill", "leave", "join", "killer"]
        if not engine.is_sqlite:
            about_workers.append("freeze")
        chosen = self.random.choice(about_workers)
        if chosen == "killer":
            at = start + self.random.uniform(0.3, TURBULENCE)
            self._add("killer", at, fails=1, how="kill")
        else:
            yield chosen
        others: list[str] = []
        if engine.has_relays:
            others.append("relay")
        if engine.transport == "kafka":
            others.append("flush")
        if not engine.is_sqlite:
            others += ["end_sessions", "hold_rows", "hold_rows"]
        if others:
            yield from self.random.sample(others, k=min(2, len(others)))
