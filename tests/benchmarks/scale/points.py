"""What is measured, and from which of it the costs are taken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

SERVERS = ("postgres", "kafka", "redis")
SHARES = {
    "web": 0.2,
    "relay": 0.2,
    "worker": 0.2,
    "postgres": 0.6,
    "kafka": 0.3,
    "redis": 0.25,
}
"""Of one processor, for each process. Together they stay within the two of a small machine. Servers
have what four workers need of them and a third more, so that none of them has to rest."""
LARGE, MIDDLE = 0.8, 0.4
"""Shares of processes that are to be faster: nearly a processor, as in production, and half of
that."""
NARROW = 0.15
"""The share of a PostgreSQL that is to be what is full."""
MANY = 1000
"""Jobs of one `enqueue_many()`."""
GROUPS = {"no_op": 500, "insert": 25}
"""Most jobs in a transaction of a worker, by what its handler does: as many as share one where the
worker has a processor for itself."""
ONE_QUEUE, FIRST, SECOND, BOTH = ("ledger",), ("ledger",), ("second",), ("ledger", "second")


@dataclass(frozen=True)
class Point:
    """One deployment under a full load of one kind, or of several."""

    name: str
    workers: int = 0
    handler: str = "no_op"
    """One of `tests.benchmarks.workloads`; what workers run."""
    partitions: int = 4
    relays: tuple[tuple[str, ...], ...] = ()
    """For each relay the queues that it is told to publish."""
    enqueue: str = ""
    """``single`` or ``many``: how a web process stores jobs meanwhile."""
    coordination: str = "redis"
    postgres: float = SHARES["postgres"]
    worker: float = SHARES["worker"]
    relay: float = SHARES["relay"]
    web: float = SHARES["web"]
    """Shares of a processor: of PostgreSQL, and of each process of a kind."""
    is_fitted: bool = False
    """Whether the costs are taken from it; all others are predicted."""
    is_idle: bool = False
    """Whether its queue is paused, so that nothing but being there is counted."""
    is_prune: bool = False
    """Whether rows of jobs that have ended are deleted, and the tables vacuumed after it."""

    def as_dict(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)

    @property
    def steps(self) -> tuple[str, ...]:
        """What is done with each job, as the costs are named."""
        found = [f"enqueue {self.enqueue}"] if self.enqueue else []
        found += ["relay"] if self.relays else []
        found += ["prune"] if self.is_prune else []
        if self.workers and not self.is_idle:
            beside = "" if self.coordination == "redis" else ", coordination in the database"
            found.append(f"work {self.handler}{beside}")
        return tuple(found)

    @property
    def shares(self) -> dict[str, float]:
        """The share of a processor that each server, and each process of a kind, is held to."""
        return {
            **SHARES,
            "postgres": self.postgres,
            "worker": self.worker,
            "relay": self.relay,
            "web": self.web,
        }

    @property
    def busy_workers(self) -> int:
        """Workers that have a partition."""
        return min(self.workers, self.partitions)

    @property
    def busy_relays(self) -> int:
        """Relays that publish: of a queue that several are told to publish, one has the lease."""
        taken: set[str] = set()
        count = 0
        for queues in self.relays:
            count += not taken.issuperset(queues)
            taken.update(queues)
        return count


def from_dict(found: dict[str, Any]) -> Point:
    """Return a point as JSON had it."""
    return Point(**{**found, "relays": tuple(map(tuple, found["relays"]))})


POINTS = (
    Point("enqueue, one at a time, at 80 %", enqueue="single", web=LARGE, is_fitted=True),
    Point("enqueue, one at a time, at 40 %", enqueue="single", web=MIDDLE),
    Point("enqueue, many", enqueue="many", is_fitted=True),
    Point("1 worker", workers=1),
    Point("2 workers", workers=2, is_fitted=True),
    Point("3 workers", workers=3),
    Point("4 workers", workers=4),
    Point("1 worker at 40 %", workers=1, worker=MIDDLE),
    Point("1 worker at 80 %", workers=1, worker=LARGE, is_fitted=True),
    Point("4 workers, 1 partition", workers=4, partitions=1),
    Point("4 workers, 2 partitions", workers=4, partitions=2),
    Point("4 workers, 8 partitions", workers=4, partitions=8),
    Point("1 worker, narrow PostgreSQL", workers=1, postgres=NARROW),
    Point("2 workers, narrow PostgreSQL", workers=2, postgres=NARROW),
    Point("3 workers, narrow PostgreSQL", workers=3, postgres=NARROW),
    Point("4 workers, narrow PostgreSQL", workers=4, postgres=NARROW),
    Point("1 worker at 40 %, INSERT", workers=1, handler="insert", worker=MIDDLE),
    Point("2 workers at 40 %, INSERT", workers=2, handler="insert", worker=MIDDLE),
    Point("1 worker at 80 %, INSERT", workers=1, handler="insert", worker=LARGE, is_fitted=True),
    Point("2 workers at 40 %, no Redis", workers=2, coordination="database", worker=MIDDLE),
    Point(
        "1 worker at 80 %, no Redis",
        workers=1,
        coordination="database",
        worker=LARGE,
        is_fitted=True,
    ),
    Point("1 relay", relays=(ONE_QUEUE,), is_fitted=True),
    Point("2 relays of one queue", relays=(ONE_QUEUE, ONE_QUEUE)),
    Point("1 relay of two queues", relays=(BOTH,)),
    Point("2 relays, a queue each", relays=(FIRST, SECOND)),
    Point("1 relay at 40 %", relays=(ONE_QUEUE,), relay=MIDDLE),
    Point("1 relay at 80 %", relays=(ONE_QUEUE,), relay=LARGE, is_fitted=True),
    Point("prune and VACUUM", is_prune=True, is_fitted=True),
    # Not the first: a server that has just started compiles, and fills its caches.
    Point("idle", workers=1, is_idle=True, is_fitted=True),
    # What is stored and published is more than the worker can do.
    Point(
        "all at once",
        enqueue="many",
        relays=(ONE_QUEUE,),
        workers=1,
        postgres=LARGE,
        worker=0.3,
        relay=0.25,
        web=0.05,
    ),
)
