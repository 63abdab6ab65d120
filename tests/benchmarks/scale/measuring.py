"""Measuring one point: what is done in seconds of full load, and what each part takes for it."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psycopg
from confluent_kafka import KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic, OffsetSpec

from tests.benchmarks import child
from tests.benchmarks.cases import Input
from tests.benchmarks.engines import RealEngine
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.scale.cpu import awake
from tests.benchmarks.scale.machines import Deployment, kind_of
from tests.benchmarks.scale.points import GROUPS, MANY, SHARES, Point
from tests.benchmarks.workloads import WORKLOADS

WARM_UP, WINDOW = 3.0, 8.0
"""Seconds after the first job that was done: not counted, and counted."""
PATIENCE = 60.0
OF_EACH = {"no_op": 60_000, "insert": 11_000}
"""Jobs for each worker: more than it does in this time with its share of a processor."""
RELAYED = 140_000
"""Jobs for each relay, likewise."""
RELAYS_AT_MOST = 0.6
"""The share with which a relay is about as fast as with more: it waits."""
PRUNED = 30_000
MOST_DONE = 0.85
"""Of a backlog. Past that, one partition may be empty, and its worker idle."""
SETTINGS = "tests.benchmarks.scale.settings"
PROGRAM = "tests.acceptance.manage"
MOMENTS = {"enqueue": "created_at", "relay": "queued_at", "work": "finished_at"}
"""The column that says when a step of a job was done."""
_PAUSE = """
INSERT INTO kjo_queue_control (queue, is_paused, changed_by, updated_at)
VALUES ('ledger', true, '', now())
"""
_RESUME = "DELETE FROM kjo_queue_control"
_OTHERS = """
SELECT count(*) FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""
_GROUPS = """
SELECT coalesce(count(*)::float8 / nullif(count(DISTINCT finished_at), 0), 0)
FROM kjo_job WHERE finished_at > %s AND finished_at <= %s
"""
"""Jobs for each commit: those of one have the same end."""
_COMPLETE = """
UPDATE kjo_job SET state = 'completed', attempts = 1, finished_at = created_at;
INSERT INTO processed_events
    (id, event_id, event_type, service_name, processed_at, created_at, updated_at)
SELECT id, id::text, handler, 'benchmarks', created_at, created_at, created_at FROM kjo_job;
"""
"""Leaves all jobs as workers do."""

Figures = dict[str, Any]


def backlog(point: Point) -> Input | None:
    """Return what is there before; none where jobs are enqueued meanwhile."""
    if point.enqueue or point.is_idle:
        return None
    count = PRUNED
    if point.relays:
        share = min(point.relay, RELAYS_AT_MOST)
        count = round(RELAYED * point.busy_relays * share / SHARES["relay"])
    elif point.workers:
        # A partition may be a worker's only one.
        parts = 1 << (point.busy_workers - 1).bit_length()
        count = round(OF_EACH[point.handler] * parts * point.worker / SHARES["worker"])
    return Input(
        point.handler,
        count,
        is_published=bool(point.workers),
        partitions=point.partitions,
    )


def measure_all(
    deployment: Deployment,
    points: Sequence[Point],
    *,
    rounds: int,
    most_seconds: float,
    before_first: Callable[[], None],
    after_round: Callable[[dict[str, Figures]], None],
    tell: Callable[[str], None],
) -> None:
    """Measure every point, and hand over the figures so far after each round, by point."""
    engine = _Engine(deployment.environment)
    inputs = [backlog(point) for point in points]
    for one in dict.fromkeys(filter(None, inputs)):
        tell(f"preparing {one}")
        engine.prepare(one, rounds * inputs.count(one))
    found: dict[str, list[Figures]] = {point.name: [] for point in points}
    before_first()
    began = time.monotonic()
    with awake() as unused:
        for number in range(rounds):
            if number and time.monotonic() - began > most_seconds:
                break
            # Each round in the opposite order of the one before: who comes first is favoured in
            # turn.
            for point in points if number % 2 == 0 else reversed(points):
                try:
                    with engine.fresh(backlog(point)) as environment:
                        figures = _Measurement(deployment, point, environment, unused).figures()
                except (BenchmarkError, KafkaException, psycopg.Error, TimeoutError) as error:
                    tell(f"{number + 1}/{rounds} {point.name} was not measured: {error}")
                    continue
                found[point.name].append(figures)
                rate, others = figures["jobs_per_second"], figures["others"]
                took = f"others took {100 * others:.0f} % of a processor"
                tell(f"{number + 1}/{rounds} {point.name}: {rate:,.0f}/s; {took}")
            after_round({name: with_middle(each) for name, each in found.items() if each})


def with_middle(rounds: Sequence[Figures]) -> Figures:
    """Return the figures of the round with the median rate, since those of one round belong
    together; and those of all rounds.

    Of an even number of rounds it is the slower one in the middle.
    """
    rates = [each["jobs_per_second"] for each in rounds]
    middle = rounds[rates.index(statistics.median_low(rates))]
    return {**middle, "rates": list(map(round, rates)), "rounds": list(rounds)}


class _Engine(RealEngine):
    """Fills its inputs in a way that is quick enough for so many jobs."""

    def _fill(self, input: Input, topics: list[str], variables: dict[str, str]) -> None:
        arguments = {**asdict(input), "topics": topics}
        del arguments["rows"]
        child.run("scale.steps.fill", arguments, variables)


class _Measurement:
    """:param unused: returns the processor seconds that nothing has used so far."""

    def __init__(
        self,
        deployment: Deployment,
        point: Point,
        environment: Mapping[str, str],
        unused: Callable[[], float],
    ) -> None:
        self._deployment, self._point, self._unused = deployment, point, unused
        self._environment = {
            **environment,
            "DJANGO_SETTINGS_MODULE": SETTINGS,
            "KJO_SCALE_GROUP": str(GROUPS[point.handler]),
            "KJO_SCALE_PARTITIONS": str(point.partitions),
            "PYTHONUNBUFFERED": "1",
        }
        if point.coordination == "database":
            del self._environment["REDIS_URL"]
        self._topic = environment["KJO_BENCHMARK_TOPIC"]
        self._database = psycopg.connect(environment["DATABASE_URL"], autocommit=True)
        self._admin = AdminClient({"bootstrap.servers": environment["KAFKA_BOOTSTRAP_SERVERS"]})

    def figures(self) -> Figures:
        """Run the point's processes under load, and return what a window of time has shown."""
        point = self._point
        try:
            self._prepare()
            with self._deployment.processes(self._commands(), self._environment) as programs:
                self._wait_for_members()
                with self._deployment.held(self._shares()):
                    if not point.is_idle and not point.is_prune:
                        self._database.execute(_RESUME)
                        self._wait_for_first()
                    if not point.is_prune:
                        time.sleep(WARM_UP)
                    began = self._snapshot()
                    if point.is_prune:
                        programs[0].wait(PATIENCE)
                    else:
                        time.sleep(WINDOW)
                    ended = self._snapshot()
            figures = self._compared(began, ended)
            self._check()
            return figures
        finally:
            self._database.close()

    def _prepare(self) -> None:
        point = self._point
        existing = self._admin.list_topics(timeout=10).topics
        wanted = [t for t in (self._topic, f"{self._topic}-second") if t not in existing]
        new = [NewTopic(topic, point.partitions, 1) for topic in wanted]
        for made in self._admin.create_topics(new).values() if new else ():
            made.result(30)
        if any("second" in queues for queues in point.relays):
            self._database.execute(
                "UPDATE kjo_job SET queue = 'second' WHERE right(id::text, 1) < '8'"
            )
        if point.is_prune:
            self._database.execute(_COMPLETE)
        if point.workers:
            self._database.execute(_PAUSE)
        self._database.execute("VACUUM ANALYZE kjo_job")
        self._database.execute("CHECKPOINT")

    def _commands(self) -> dict[str, list[str]]:
        point, found = self._point, {}
        for number in range(point.workers):
            command = ["kjo_consume", "ledger", "--no-relay", "--verbosity", "0"]
            found[f"worker{number}"] = [PROGRAM, *command]
        for number, queues in enumerate(point.relays):
            found[f"relay{number}"] = [PROGRAM, "kjo_produce", *queues]
        if point.enqueue:
            at_once = 1 if point.enqueue == "single" else MANY
            step = ["scale.steps.enqueue", f'{{"at_once": {at_once}}}']
            found["web0"] = ["tests.benchmarks.measure", *step]
        if point.is_prune:
            found["web0"] = ["tests.benchmarks.measure", "scale.steps.prune", "{}"]
        return found

    def _shares(self) -> dict[str, float]:
        # What it costs its process is of no interest, and its start shall not take long.
        others = {"web": 1.0} if self._point.is_prune else {}
        return {**self._point.shares, **others}

    def _wait_for_members(self) -> None:
        """Wait until the workers share the partitions."""
        point = self._point
        if not point.workers:
            return

        held: list[int] = []

        def have_joined() -> bool:
            group = f"{self._topic}-group"
            try:
                found = self._admin.describe_consumer_groups([group])[group].result(5)
            except Exception:  # the group is not there yet
                return False
            held[:] = [len(member.assignment.topic_partitions) for member in found.members]
            return (
                found.state.name == "STABLE"
                and len(held) == point.workers
                and sum(held) == point.partitions
                and sum(map(bool, held)) == point.busy_workers
            )

        _wait(have_joined, lambda: f"The workers never shared the partitions: {held}")

    def _wait_for_first(self) -> None:
        column = MOMENTS[self._point.steps[-1].split()[0]]
        query = f"SELECT 1 FROM kjo_job WHERE {column} IS NOT NULL AND {column} > %s LIMIT 1"
        since = datetime.now(UTC)
        _wait(lambda: self._value(query, since) is not None, lambda: "Nothing was done")

    def _snapshot(self) -> Figures:
        # Servers that rest answer late, so what they are not asked for comes first.
        return {
            "at": datetime.now(UTC),
            "cpu": {name: group.seconds for name, group in self._deployment.groups.items()},
            "unused": self._unused(),
            "network": dict(_network(self._deployment.machines)),
            "log": float(self._log_bytes()),
            "sent": float(self._sent()),
            "sent_at": time.monotonic(),
            "wal": float(self._value("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn")),
        }

    def _log_bytes(self) -> int:
        folder: Path = self._deployment.kafka.directory / "data"
        files = folder.glob(f"{self._topic}*/*.log")
        return sum(file.stat().st_size for file in files)

    def _sent(self) -> int:
        """Return how many records have been sent; a row may have ended before it says that its
        record was."""
        topics = (self._topic, f"{self._topic}-second")
        partitions = range(self._point.partitions)
        asked = {TopicPartition(t, p): OffsetSpec.latest() for t in topics for p in partitions}
        return sum(each.result(10).offset for each in self._admin.list_offsets(asked).values())

    def _value(self, query: str, *parameters: Any) -> Any:
        row = self._database.execute(query, parameters).fetchone()
        return row[0] if row is not None else None

    def _compared(self, began: Figures, ended: Figures) -> Figures:
        seconds = (ended["at"] - began["at"]).total_seconds()
        rates = {}
        for step in self._point.steps:
            if step == "prune":
                rates[step] = PRUNED / seconds
                continue
            if step == "relay":
                sent = ended["sent"] - began["sent"]
                rates[step] = sent / (ended["sent_at"] - began["sent_at"])
                continue
            column = MOMENTS[step.split()[0]]
            query = f"SELECT count(*) FROM kjo_job WHERE {column} > %s AND {column} <= %s"
            rates[step] = self._value(query, began["at"], ended["at"]) / seconds
        cpu: dict[str, float] = {}
        network: dict[str, float] = {}
        for name in self._deployment.machines:
            kind = kind_of(name)
            used = (ended["cpu"][name] - began["cpu"][name]) / seconds
            cpu[kind] = cpu.get(kind, 0.0) + used
            sent = (ended["network"][name] - began["network"][name]) / seconds
            network[kind] = network.get(kind, 0.0) + sent
        unused = (ended["unused"] - began["unused"]) / seconds
        found = {
            "seconds": seconds,
            "jobs_per_second": list(rates.values())[-1] if rates else 0.0,
            "step_rates": rates,
            "jobs_per_commit": self._value(_GROUPS, began["at"], ended["at"]),
            "cpu": cpu,
            # This process, and whatever else runs on the machine or beside it on its host.
            "others": max(0.0, (os.cpu_count() or 1) - unused - sum(cpu.values())),
            "network": network,
            "wal": (ended["wal"] - began["wal"]) / seconds,
            "log": (ended["log"] - began["log"]) / seconds,
        }
        return {name: _rounded(value) for name, value in found.items()}

    def _check(self) -> None:
        """Look whether the load was full to the end, and every job took effect exactly once.

        :raises BenchmarkError: it did not.
        """
        point, before = self._point, backlog(self._point)
        # What killed processes have sent to be committed is committed after them.
        _wait(lambda: not self._value(_OTHERS), lambda: "Sessions of killed processes go on")
        done = self._value("SELECT count(*) FROM kjo_job WHERE state = 'completed'")
        markers = self._value("SELECT count(*) FROM processed_events")
        entries = self._value("SELECT count(*) FROM ledger_entry")
        if done != markers or (WORKLOADS[point.handler].has_entries and done != entries):
            raise BenchmarkError(f"{point.name}: {done} done, {markers} markers, {entries} entries")
        if before is None:
            return
        if point.is_prune:
            done = self._value("SELECT count(*) FROM kjo_job")
            if done:
                raise BenchmarkError(f"{point.name}: {done} were not deleted")
        if point.relays:
            done = self._value("SELECT count(*) FROM kjo_job WHERE state <> 'pending'")
        if done > MOST_DONE * before.count:
            raise BenchmarkError(f"{point.name}: {done} of {before.count} done: too few prepared")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: round(each, 6) for name, each in value.items()}
    return round(value, 3)


def _network(names: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the bytes that each machine has sent and received, as the bridge has counted them."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, colon, counts = line.strip().partition(":")
        if colon and name in names:
            fields = counts.split()
            yield name, float(fields[0]) + float(fields[8])


def _wait(condition: Callable[[], bool], complaint: Callable[[], str]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        if time.monotonic() > deadline:
            raise BenchmarkError(complaint())
        time.sleep(0.1)
