"""Every case, and how much of everything each takes.

A new case is a line here and a function in `measures/`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tests.benchmarks.cases import EMBEDDED, POSTGRES, REAL, Case, Input, Step
from tests.benchmarks.peers.catalogue import TIMED_PEERS

BATCH = 500
"""Messages in one transaction of the hand-written loops."""
RATES = (20, 100, 250)
"""Jobs a second that people run."""
LIMITS = {
    REAL: "limits.kafka_postgres.run",
    POSTGRES: "limits.postgres.run",
    EMBEDDED: "limits.sqlite.run",
}
"""The loop written by hand, by engine."""
FAR = {"2ms": 1, "20ms": 10}
"""Milliseconds that the database is away in each direction, by the name of the case: with what the
delaying proxy adds, a round trip takes 2.5 and 20.7."""
CONCURRENT = 5_000
"""Of the loop whose handlers only wait: messages in one transaction, and waits at once."""


@dataclass(frozen=True)
class Sizes:
    """How much of everything: jobs, unless said otherwise."""

    drain: int
    outside: int
    """Each commits by itself."""
    insert: int
    sleep: int
    waiting: int
    single: int
    many: int
    memory: int
    keyed: int = 0
    processes: int = 0
    tables: tuple[int, ...] = ()
    """Rows in the tables whose size must not matter."""
    latency_seconds: float = 5
    idle_seconds: float = 3
    rate_seconds: float = 10
    loaded_rate: int = 1_000
    database: int = 10_000
    """Of what is measured at the database."""
    crowd: int = 0
    """Enqueued one by one while a worker runs them."""
    lone: int = 0
    """Each with nothing beside it."""
    together: int = 0
    """Stored at once, with the database some milliseconds away."""


QUICK = {
    REAL: Sizes(
        drain=10_000,
        outside=10_000,
        insert=3_000,
        sleep=1_000,
        waiting=5_000,
        single=400,
        many=10_000,
        memory=20_000,
        keyed=600,
        processes=20_000,
    ),
    POSTGRES: Sizes(
        drain=10_000,
        outside=10_000,
        insert=3_000,
        sleep=1_000,
        waiting=5_000,
        single=400,
        many=30_000,
        memory=20_000,
        loaded_rate=200,
        idle_seconds=10,
        database=5_000,
        crowd=3_000,
        lone=15,
        together=1_000,
    ),
    EMBEDDED: Sizes(
        drain=3_000,
        outside=3_000,
        insert=1_000,
        sleep=300,
        waiting=1_000,
        single=100,
        many=3_000,
        memory=5_000,
        loaded_rate=200,
    ),
}
FULL = {
    REAL: Sizes(
        drain=50_000,
        outside=50_000,
        insert=20_000,
        sleep=4_000,
        waiting=50_000,
        single=2_000,
        many=10_000,
        memory=1_000_000,
        keyed=2_000,
        processes=200_000,
        tables=(1_000_000, 10_000_000),
        database=20_000,
        latency_seconds=20,
        idle_seconds=10,
    ),
    POSTGRES: Sizes(
        drain=100_000,
        outside=50_000,
        insert=20_000,
        sleep=4_000,
        waiting=50_000,
        single=2_000,
        many=30_000,
        memory=300_000,
        loaded_rate=200,
        latency_seconds=20,
        idle_seconds=30,
        rate_seconds=15,
        database=20_000,
        crowd=3_000,
        lone=40,
        together=1_000,
    ),
    EMBEDDED: Sizes(
        drain=20_000,
        outside=20_000,
        insert=10_000,
        sleep=2_000,
        waiting=5_000,
        single=1_000,
        many=10_000,
        memory=100_000,
        latency_seconds=20,
        idle_seconds=10,
        loaded_rate=200,
    ),
}


def sizes_for(engine: str, jobs: int | None, full: bool = False) -> Sizes:
    """Return the sizes of a quick or a full run, or with ``jobs`` in every bulk measurement."""
    sizes = (FULL if full else QUICK)[engine]
    if jobs is None:
        return sizes
    return replace(
        sizes,
        drain=jobs,
        outside=jobs,
        insert=jobs,
        sleep=jobs,
        waiting=jobs,
        many=jobs,
        memory=3 * jobs,
        keyed=jobs if sizes.keyed else 0,
        processes=3 * jobs if sizes.processes else 0,
        database=jobs,
        single=min(sizes.single, jobs),
        crowd=min(sizes.crowd, jobs),
        together=min(sizes.together, jobs),
    )


def all_cases(
    engine: str,
    jobs: int | None = None,
    concurrency: int | None = None,
    *,
    full: bool = False,
    tables: Sequence[int] = (),
) -> list[Case]:
    """Return every case of an engine, the most telling first.

    :param full: with the sizes results are published with, and the cases that take minutes.
    :param tables: rows in the tables whose size must not matter, instead of those of the size.
    """
    sizes = sizes_for(engine, jobs, full)
    catalogue = _Catalogue(
        engine, replace(sizes, tables=tuple(tables) or sizes.tables), concurrency
    )
    return [
        *catalogue.drains(),
        *catalogue.enqueues(),
        *(catalogue.on_kafka() if engine == REAL else ()),
        *(catalogue.on_postgres() if engine == POSTGRES else ()),
        *catalogue.latencies(),
        *catalogue.rates(),
        *catalogue.rest(),
    ]


class _Catalogue:
    def __init__(self, engine: str, sizes: Sizes, concurrency: int | None) -> None:
        self.engine = engine
        self.sizes = sizes
        self.worker = {"concurrency": concurrency}
        self.limit = LIMITS[engine]

    def drains(self) -> list[Case]:
        sizes = self.sizes
        insert = "atomic handler with one ORM create()"
        cases = [
            self._drain("no_op", "no_op", sizes.drain, "atomic handler that does nothing"),
            self._drain(
                "outside", "outside", sizes.outside, "atomic=False handler that does nothing"
            ),
            self._with_orm(self._drain("insert", "insert", sizes.insert, insert)),
            self._with_orm(
                self._drain(
                    "insert_only", "insert_only", sizes.insert, f"{insert}, database_only=True"
                )
            ),
            self._drain(
                "batch", "batch", sizes.drain, "batch=500 handler with one bulk INSERT for all"
            ),
            self._drain("sleep", "sleep", sizes.sleep, "atomic handler that sleeps for 5 ms"),
            self._drain(
                "async",
                "async",
                sizes.waiting,
                "async atomic=False handler that waits for 100 ms",
                batch=CONCURRENT,
            ),
        ]
        if self.engine != EMBEDDED:
            cases.insert(4, self._drain("insert_raw", "insert", sizes.insert, insert))
        return cases

    def _with_orm(self, case: Case) -> Case:
        """The loop too makes its writes through the ORM."""
        if self.engine == EMBEDDED or case.limit is None:
            return case
        step = Step(case.limit.function, {**case.limit.arguments, "orm": True})
        return replace(
            case, limit=step, against="the loop with the ORM's create(), without savepoints"
        )

    def _drain(self, name: str, workload: str, count: int, about: str, batch: int = BATCH) -> Case:
        return Case(
            f"drain.{name}",
            self.engine,
            self._ours(workload, count),
            Step(
                self.limit, {"workload": workload, "count": count, "batch": min(batch, count // 4)}
            ),
            Input(workload, count),
            about=about,
        )

    def _ours(self, workload: str, count: int, **worker: int) -> Step:
        return Step(
            "measures.drain.run", {"workload": workload, "count": count, **self.worker, **worker}
        )

    def enqueues(self) -> list[Case]:
        single, many = {"count": self.sizes.single}, {"count": self.sizes.many}
        alone = self._by_peers("enqueue.single", "enqueue", single, "enqueue one by one, no worker")
        return [
            Case(
                "enqueue.single",
                self.engine,
                Step("measures.enqueue.single", single),
                about="enqueue() in its own transaction",
                against="Django's create() of the same row",
            ),
            *alone,
            Case(
                "enqueue.in_transaction",
                self.engine,
                Step("measures.enqueue.in_transaction", single),
                about="enqueue() in a transaction with a row of the project's own",
                against="Django's create() of both rows",
            ),
            Case(
                "enqueue.many",
                self.engine,
                Step("measures.enqueue.many", many),
                about="enqueue_many()",
                against=(
                    "COPY and produce by hand"
                    if self.engine == REAL
                    else "Django's bulk_create() of the same rows"
                ),
            ),
        ]

    def on_kafka(self) -> list[Case]:
        return [
            self._relay(),
            self._lanes(),
            *self._processes(),
            *self._tables(),
            *self._database(),
        ]

    def on_postgres(self) -> list[Case]:
        """What matters most where PostgreSQL is the only server."""
        sizes = self.sizes
        crowd = {"count": sizes.crowd}
        about = "enqueued one by one in one process while a worker runs them"
        return [
            Case(
                "lone",
                self.engine,
                Step(
                    "measures.lone.run", {"count": sizes.lone, "idle_seconds": sizes.idle_seconds}
                ),
                most_rounds=3,
                about="a job with nothing beside it, and a worker that has none",
            ),
            *(self._far(name, each_way) for name, each_way in FAR.items()),
            Case("crowd", self.engine, Step("measures.crowd.run", crowd), about=about),
            *self._by_peers("crowd", "crowd", crowd, about),
            *self._database(),
        ]

    def _far(self, name: str, each_way: float) -> Case:
        arguments = {
            "each_way": each_way,
            "lone": self.sizes.lone,
            "together": self.sizes.together,
        }
        return Case(
            f"far.{name}",
            self.engine,
            Step("measures.far.run", arguments),
            most_rounds=3,
            about=f"{self.sizes.together:,} jobs that write a row, stored at once, and a lone job "
            f"from stored to finished; the worker is {each_way} ms away from the database in each "
            "direction",
        )

    def _by_peers(
        self, case: str, function: str, arguments: dict[str, Any], about: str, compared: str = ""
    ) -> list[Case]:
        """The same measurement of each other queue on PostgreSQL, right after ours."""
        if self.engine != POSTGRES:
            return []
        return [
            Case(
                f"{case}.{peer.name}",
                self.engine,
                Step(f"measures.peers.{function}", {"peer": peer.name, **arguments}),
                compared=compared or "jobs_per_second",
                about=about,
                peer=peer.name,
            )
            for peer in TIMED_PEERS
        ]

    def _relay(self) -> Case:
        count = self.sizes.drain
        return Case(
            "relay",
            self.engine,
            Step("measures.relay.run", {"count": count}),
            Step("limits.relay_loop.run", {"count": count, "batch": 1000}),
            Input("no_op", count, is_published=False),
            about="pending rows to the topic",
            against="SELECT, produce, flush, UPDATE by hand",
        )

    def _lanes(self) -> Case:
        count = self.sizes.keyed
        return Case(
            "lanes",
            self.engine,
            self._ours("keyed", count, concurrency=8),
            self._ours("keyed", count, concurrency=1),
            Input("keyed", count, partitions=1),
            about="eight lanes on one partition, handlers of 5 ms, fifty keys, each in order",
            against="one lane",
        )

    def _processes(self) -> list[Case]:
        count = self.sizes.processes
        return [
            Case(
                "processes",
                self.engine,
                Step("measures.processes.run", {"count": count, "processes": 2}),
                Step("measures.processes.run", {"count": count, "processes": 1}),
                Input("no_op", count),
                about="kjo_consume --processes 2, servers on the same processors",
                against="one process",
            )
        ]

    def _tables(self) -> list[Case]:
        count = min(self.sizes.drain, 20_000)
        cases = []
        for rows in self.sizes.tables:
            million, left = divmod(rows, 1_000_000)
            name, against = str(rows) if left else f"{million}m", "with empty tables"
            cases += [
                Case(
                    f"table.consumer_{name}",
                    self.engine,
                    self._ours("no_op", count),
                    self._ours("no_op", count),
                    Input("no_op", count, rows=rows),
                    Input("no_op", count),
                    about=f"drain of no-ops with {rows:,} jobs in the table",
                    against=against,
                ),
                Case(
                    f"table.relay_{name}",
                    self.engine,
                    Step("measures.relay.run", {"count": count}),
                    Step("measures.relay.run", {"count": count}),
                    Input("no_op", count, is_published=False, rows=rows),
                    Input("no_op", count, is_published=False),
                    about=f"relay with {rows:,} jobs in the table",
                    against=against,
                ),
            ]
        return cases

    def _database(self) -> list[Case]:
        count = self.sizes.database
        step = Step("measures.database.steps", {"count": count})
        about = "what no-ops cost the database: all stored, then all published, then all run"
        only_topic = Input("no_op", 0, is_published=False)
        if self.engine == POSTGRES:
            about = "what no-ops cost the database: all stored, then all run"
        cases = [
            Case("database.steps", self.engine, step, input=only_topic, most_rounds=1, about=about),
            Case(
                "database.steady",
                self.engine,
                Step("measures.database.steady", {"rate": 100, "seconds": count / 1000}),
                input=only_topic,
                most_rounds=1,
                about="what no-ops cost the database that come one by one, 100 a second",
            ),
        ]
        for rows in self.sizes.tables:
            million, left = divmod(rows, 1_000_000)
            cases.append(
                Case(
                    f"database.steps_{rows if left else f'{million}m'}",
                    self.engine,
                    step,
                    input=replace(only_topic, rows=rows),
                    most_rounds=1,
                    about=f"{about}; with {rows:,} jobs in the table",
                )
            )
        return cases

    def latencies(self) -> list[Case]:
        sizes = self.sizes
        about = "from before enqueue() in another process to the commit of the job's outcome"

        def latency(name: str, rate: float, idle_seconds: float) -> Case:
            arguments = {
                "rate": rate,
                "seconds": sizes.latency_seconds,
                "idle_seconds": idle_seconds,
                **self.worker,
            }
            return Case(
                name,
                self.engine,
                Step("measures.latency.run", arguments),
                about=f"{about}; {rate:g} a second",
            )

        cases = [
            latency("latency", 50, sizes.idle_seconds),
            latency("latency.loaded", sizes.loaded_rate, 0),
        ]
        if self.engine != EMBEDDED:
            half = Step("measures.latency.half", {"seconds": sizes.latency_seconds})
            cases.append(
                Case(
                    "latency.half",
                    self.engine,
                    half,
                    most_rounds=3,
                    about="the same at half of the rate that one process can save and a worker run",
                )
            )
        return cases

    def rates(self) -> list[Case]:
        """What a job costs when there are few."""
        is_real = self.engine == REAL
        cases = []
        for rate in RATES:
            arguments = {"rate": rate, "seconds": self.sizes.rate_seconds}
            name, compared = f"rates.{rate}", "jobs_per_cpu_second"
            about = f"jobs for a second of all processors' time; {rate} a second, one at a time"
            cases += [
                Case(
                    name,
                    self.engine,
                    Step("measures.rates.run", {**arguments, "has_celery": is_real}),
                    compared=compared,
                    about=about,
                    against="Celery, late acknowledgement, two processes, Redis, no row"
                    if is_real
                    else "",
                ),
                *self._by_peers(name, "rate", arguments, about, compared),
            ]
        return cases

    def rest(self) -> list[Case]:
        is_real = self.engine == REAL
        return [
            Case(
                "wait",
                self.engine,
                Step("measures.wait.run", {"count": 200, "has_celery": is_real}),
                most_rounds=1,
                about="enqueue_and_wait() of a no-op",
                against="Celery's delay().get() on Redis alone" if is_real else "",
            ),
            Case(
                "chain",
                self.engine,
                Step("measures.chain.run", {"count": 100, "has_celery": is_real}),
                most_rounds=1,
                about="a chain of five no-ops, from before its enqueue() to its end",
                against="Celery's chain on Redis alone" if is_real else "",
            ),
            Case(
                "chain.database_only",
                self.engine,
                Step("measures.chain.run_database_only", {"count": 100, "has_celery": is_real}),
                most_rounds=1,
                about="the same of jobs declared database_only",
                against="Celery's chain on Redis alone" if is_real else "",
            ),
            Case(
                "memory",
                self.engine,
                self._ours("no_op", self.sizes.memory),
                input=Input("no_op", self.sizes.memory),
                most_rounds=1,
                about="resident memory of the worker while it drains",
            ),
        ]
