"""What is measured: cases, and the input each starts from.

A new case is a line here and a function in `measures/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

REAL, EMBEDDED = "real", "embedded"
ENGINES = (REAL, EMBEDDED)


@dataclass(frozen=True)
class Input:
    """What is in the database, and on the topic, before a measurement starts."""

    handler: str
    """`no_op` or `write` of tests.ledger.jobs."""
    count: int
    is_published: bool = True
    """Rows are queued and their messages are on the topic; otherwise rows wait for the relay."""


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
    compared: str = "jobs_per_second"
    """The figure of both sides that makes the ratio."""
    most_rounds: int | None = None
    about: str = ""

    @property
    def scenario(self) -> str:
        """What `--scenario` calls it: the part before the dot."""
        return self.name.partition(".")[0]


@dataclass(frozen=True)
class Sizes:
    """How much of everything; chosen so that the default run stays under three minutes."""

    drain: int
    insert: int
    single: int
    many: int
    memory: int
    batch: int = 500
    """Messages in one transaction of the hand-written loops."""


DEFAULT_SIZES = {
    REAL: Sizes(drain=10_000, insert=3_000, single=400, many=10_000, memory=20_000),
    EMBEDDED: Sizes(drain=3_000, insert=1_000, single=100, many=3_000, memory=5_000),
}


def sizes_for(engine: str, jobs: int | None) -> Sizes:
    """Return the default sizes, or with ``jobs`` of them in every bulk measurement."""
    sizes = DEFAULT_SIZES[engine]
    if jobs is None:
        return sizes
    return replace(sizes, drain=jobs, insert=jobs, many=jobs, memory=3 * jobs)


def all_cases(engine: str, jobs: int | None = None, concurrency: int | None = None) -> list[Case]:
    """Return every case of an engine, the most telling first."""
    sizes = sizes_for(engine, jobs)
    limit = "kafka_postgres" if engine == REAL else "sqlite"
    worker = {"concurrency": concurrency}

    def drain(name: str, handler: str, count: int, about: str) -> Case:
        return Case(
            name,
            engine,
            Step("drain.run", {"handler": handler, "count": count, **worker}),
            Step(f"{limit}.run", {"handler": handler, "count": count, "batch": sizes.batch}),
            Input(handler, count),
            about=about,
        )

    cases = [
        drain("drain.no_op", "no_op", sizes.drain, "atomic handler that does nothing"),
        drain("drain.insert", "write", sizes.insert, "atomic handler with one ORM create()"),
        Case(
            "enqueue.single",
            engine,
            Step("enqueue.single", {"count": sizes.single}),
            about="enqueue() in its own transaction; limit: Django's create() of the same row",
        ),
        Case(
            "enqueue.many",
            engine,
            Step("enqueue.many", {"count": sizes.many}),
            about="enqueue_many(); limit: Django's bulk_create() of the same rows",
        ),
    ]
    if engine == REAL:
        cases.append(
            Case(
                "relay",
                engine,
                Step("relay.run", {"count": sizes.drain}),
                Step("relay_loop.run", {"count": sizes.drain, "batch": 1000}),
                Input("no_op", sizes.drain, is_published=False),
                about="pending rows to the topic; limit: SELECT, produce, flush, UPDATE by hand",
            )
        )
    return [
        *cases,
        Case(
            "latency",
            engine,
            Step("latency.run", {"rate": 50, "seconds": 5, "idle_seconds": 3, **worker}),
            most_rounds=1,
            about="from before enqueue() in another process to the commit of the job's outcome",
        ),
        Case(
            "wait",
            engine,
            Step("wait.run", {"count": 200, "has_celery": engine == REAL}),
            most_rounds=1,
            about="enqueue_and_wait() of a no-op; limit: Celery's delay().get() on Redis alone",
        ),
        Case(
            "memory",
            engine,
            Step("drain.run", {"handler": "no_op", "count": sizes.memory, **worker}),
            input=Input("no_op", sizes.memory),
            most_rounds=1,
            about="resident memory of the worker while it drains",
        ),
    ]


def choose(cases: Sequence[Case], scenarios: Sequence[str]) -> list[Case]:
    """Return the cases of these scenarios, or those named in full; all if none is named."""
    if not scenarios:
        return list(cases)
    return [case for case in cases if case.scenario in scenarios or case.name in scenarios]
