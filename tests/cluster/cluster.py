"""The cluster, and what keeps it running where no person does: a supervisor, as systemd is one, and
a manager of PostgreSQL, as Patroni is one."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Self

import psycopg
from django.db import DatabaseError, InterfaceError, connections

from kjo_django.exceptions import KjoError
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.program import Program
from tests.cluster.machines import (
    PRIMARY_NAME,
    SENTINEL_PORT,
    Broker,
    OnMachine,
    Pair,
    Redis,
    Sentinel,
)
from tests.cluster.network import Machine, make_network
from tests.databases import migrate
from tests.services.binaries import find_faketime, needed
from tests.services.errors import ServerFailed
from tests.services.kafka import new_cluster_id
from tests.settings import database as settings_of

BROKERS, SENTINELS, WORKERS, RELAYS, WEBS = 3, 3, 4, 2, 2
PARTITIONS = 4
RATE = 6.0
"""Saves a second of each web process."""
TICK = 0.1
STARTED_WITHIN = 120.0
RESTART_AFTER = 1.0
"""Seconds between two starts of a process that ends at once."""
FAILOVER_AFTER = 3.0
"""Seconds without an answer after which the standby takes the primary's place."""
KAFKA_OPTIONS: dict[str, Any] = {
    # Long enough that a busy machine alone ends no session.
    "consumer": {"session.timeout.ms": 5000, "heartbeat.interval.ms": 1000},
    "request_timeout": timedelta(seconds=15),
}
OPTIONS: dict[str, Any] = {
    "TOPIC_OPTIONS": {"partitions": PARTITIONS, "replication_factor": BROKERS},
    # Partitions of a worker that is away go to others after the session timeout, not before.
    "RECORD_LEASE": 5,
    "RESCUE_AFTER": 10,
}


class Member:
    """A process of the application on its machine, started again whenever it ends."""

    def __init__(self, machine: Machine, start: Callable[[], Program]) -> None:
        self.machine = machine
        self._start = start
        self.programs: list[Program] = []
        self.is_killed = False

    @property
    def program(self) -> Program:
        return self.programs[-1]

    @property
    def is_running(self) -> bool:
        return bool(self.programs) and self.program.is_running

    def launch(self) -> None:
        with self.machine:
            self.programs.append(self._start())
        self.is_killed = False

    def kill(self) -> None:
        self.is_killed = True
        self.program.kill()

    def stop(self) -> str:
        """End it as a deployment would; return what it should not have said, in words."""
        self.is_killed = True
        code = self.program.stop()
        return f"{self.program} ended with {code}:\n{self.program.log_tail()}" if code else ""

    def pause(self) -> None:
        self.program.freeze()

    def resume(self) -> None:
        self.program.thaw()


class Cluster:
    """Use as a context manager, in a process under `network.COMMAND`.

    :param logs: an empty folder for the logs and histories of processes.
    :param is_small: whether it has half as many workers, relays and web processes.
    """

    def __init__(self, logs: Path, *, is_small: bool = False) -> None:
        self._logs = logs
        self._stack = ExitStack()
        numbers = iter(range(10, 100))

        def machines(kind: str, count: int) -> list[Machine]:
            return [Machine(f"{kind}{n}", next(numbers)) for n in range(1, count + 1)]

        brokers, databases = machines("kafka", BROKERS), machines("postgres", 2)
        redis, sentinels = machines("redis", 2), machines("sentinel", SENTINELS)
        share = 2 if is_small else 1
        workers, relays = machines("worker", WORKERS // share), machines("relay", RELAYS // share)
        webs = machines("web", WEBS // share)
        self.machines = [*brokers, *databases, *redis, *sentinels, *workers, *relays, *webs]
        cluster_id = new_cluster_id()
        self.brokers = [
            Broker(machine, node, brokers, cluster_id)
            for node, machine in enumerate(brokers, start=1)
        ]
        self.pair = Pair(*databases)
        first = Redis(redis[0])
        self.redis = [first, Redis(redis[1], first)]
        self.sentinels = [Sentinel(machine, first) for machine in sentinels]
        self.workers = [Member(each, self._worker) for each in workers[:-1]]
        self.clock = logs / "clock"
        """The last worker's clock: seconds that it is ahead."""
        self.workers.append(Member(workers[-1], self._worker_with_a_clock))
        self.relays = [Member(each, lambda: self.engine.relay()) for each in relays]
        self.webs = [Member(each, self._web(each.name)) for each in webs]
        self.held: set[int] = set()
        """What is to stay down, by id()."""
        self._started_at: dict[int, float] = {}
        self._silent_since: float | None = None
        self._asked_at = 0.0
        self.failovers = 0
        self.ends: list[str] = []
        """Processes of the application that ended without having been killed."""

    # --- Start and end ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        make_network(self.machines)
        try:
            self._start()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._keep_logs()
        self._stack.close()

    def _keep_logs(self) -> None:
        pair = [self.pair.primary, self.pair.standby]
        servers: list[Any] = [*self.brokers, *pair, *self.redis, *self.sentinels]
        for server in servers:
            # One that could not be made anew has none.
            with suppress(ServerFailed, OSError):
                shutil.copy(server.log_file, self._logs / f"{server.machine.name}.log")

    def _start(self) -> None:
        servers: list[OnMachine] = [*self.brokers, *self.redis, *self.sentinels]
        for server in servers:
            self._stack.callback(server.close)
        with ThreadPoolExecutor(len(servers) + 1) as pool:
            database = pool.submit(self._start_database)
            list(pool.map(lambda server: server.launch(), servers))
            list(pool.map(lambda server: server.wait_ready(), servers))
            url = database.result()
        watching = ",".join(f"{each.machine.address}:{SENTINEL_PORT}" for each in self.sentinels)
        redis = f"sentinel://{watching}/{PRIMARY_NAME}/0"
        kafka = ",".join(broker.address for broker in self.brokers)
        engine = Engine(Servers(url, kafka, redis), self._logs, OPTIONS)
        engine.kafka_options |= KAFKA_OPTIONS
        engine.forks = False  # each process is of the machine that its thread is on
        self.engine = self._stack.enter_context(engine)
        self.until(self._has_topics, "No topics", STARTED_WITHIN)
        self.until(self._has_sentinels, "No sentinels", STARTED_WITHIN)
        self.clock.write_text("+0")
        for member in [*self.workers, *self.relays, *self.webs]:
            member.launch()

    def _start_database(self) -> str:
        self._stack.enter_context(self.pair)
        url = self.pair.createdb("kjo")
        migrate(settings_of(url))
        return url

    def _has_topics(self) -> bool:
        self.engine.create_topics()
        return True

    def _has_sentinels(self) -> bool:
        return all(each.is_complete() for each in self.sentinels)

    def _worker(self) -> Program:
        return self.engine.worker("--concurrency", "2", "--no-relay")

    def _worker_with_a_clock(self) -> Program:
        self.engine.variables = {
            "LD_PRELOAD": str(needed("libfaketime", find_faketime())),
            "FAKETIME_TIMESTAMP_FILE": str(self.clock),
            "FAKETIME_CACHE_DURATION": "1",
            # As a jump of a real clock does, it leaves the one that only counts alone.
            "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        }
        try:
            return self._worker()
        finally:
            self.engine.variables = {}

    def _web(self, name: str) -> Callable[[], Program]:
        def start() -> Program:
            return self.engine.run("tests.cluster.web", name, str(RATE), str(self.history_of(name)))

        return start

    def history_of(self, name: str) -> Path:
        """Where a web process writes what it was told."""
        return self._logs / f"{name}.jsonl"

    def stop(self, members: Sequence[Member]) -> None:
        """End processes of the application, and do not start them again."""
        for member in members:
            self.held.add(id(member))
            if complaint := member.stop():
                self.ends.append(complaint)

    @property
    def histories(self) -> list[Path]:
        return [self.history_of(web.machine.name) for web in self.webs]

    # --- Roles ------------------------------------------------------------------------------------

    def find(self, role: str, choice: int) -> Any:
        """Return who has a role now."""
        candidates = getattr(self, f"_find_{role}")(choice)
        return candidates[choice % len(candidates)]

    def _find_leader(self, choice: int) -> Sequence[Any]:
        from confluent_kafka.admin import AdminClient

        servers = {"bootstrap.servers": self.engine.servers.kafka, "log_level": 0}
        topic = self.engine.topic
        topics = AdminClient(servers).list_topics(topic, timeout=10).topics
        leader = topics[topic].partitions[choice % PARTITIONS].leader
        return [broker for broker in self.brokers if broker.node_id == leader] or self.brokers

    def _find_follower(self, choice: int) -> Sequence[Any]:
        leaders = self._find_leader(choice)
        return [broker for broker in self.brokers if broker not in leaders] or self.brokers

    def _find_controller(self, choice: int) -> Sequence[Any]:
        _, leader = max(broker.quorum() for broker in self.brokers)
        return [broker for broker in self.brokers if broker.node_id == leader] or self.brokers

    def _find_primary(self, choice: int) -> Sequence[Any]:
        return [self.pair.primary]

    def _find_standby(self, choice: int) -> Sequence[Any]:
        return [self.pair.standby]

    def _find_redis(self, choice: int) -> Sequence[Any]:
        address = self.sentinels[0].primary_address()
        return [each for each in self.redis if each.machine.address == address]

    def _find_sentinel(self, choice: int) -> Sequence[Any]:
        return self.sentinels

    def _find_worker(self, choice: int) -> Sequence[Any]:
        return self.workers

    def _find_relay(self, choice: int) -> Sequence[Any]:
        return self.relays

    def peers_of(self, server: Any) -> list[Machine]:
        """Return the machines of servers of its own kind."""
        groups: list[list[Any]] = [
            list(self.brokers),
            [self.pair.primary, self.pair.standby],
            [*self.redis, *self.sentinels],
        ]
        (group,) = [group for group in groups if server in group]
        return [each.machine for each in group if each is not server]

    # --- Keeping it running -----------------------------------------------------------------------

    def run_for(self, seconds: float) -> None:
        """Let time pass."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:  # timed loop: what a supervisor does goes on meanwhile
            self.tick()

    def until(self, condition: Callable[[], Any], complaint: str, timeout: float) -> None:
        """Wait for what should come by itself. Servers that are away mean not yet."""
        deadline = time.monotonic() + timeout
        while True:  # timed loop: what a supervisor does goes on meanwhile
            error = ""
            try:
                if condition():
                    return
            except (DatabaseError, InterfaceError, KjoError, OSError) as outage:
                error = f" ({outage})"
                connections[ALIAS].close()
            if time.monotonic() > deadline:
                raise AssertionError(f"{complaint} within {timeout:g} s{error}")
            self.tick()

    def tick(self) -> None:
        """Start what has ended, and let the standby take over where the primary is away."""
        time.sleep(TICK)  # sleep: until the supervisor looks again
        for server in [*self.brokers, *self.redis, *self.sentinels]:
            self._supervise(server)
        for member in [*self.workers, *self.relays, *self.webs]:
            self.supervise_member(member)
        self._manage_database()

    def supervise_member(self, member: Member) -> None:
        """Start a process of the application again if it has ended, and note that it did.

        One that was never launched is left alone: the cluster waits for its servers first.
        """
        if not member.programs:
            return
        if not (member.is_running or member.is_killed):
            member.is_killed = True
            self.ends.append(f"{member.program} ended:\n{member.program.log_tail()}")
        self._supervise(member)

    def _supervise(self, server: Any) -> None:
        now = time.monotonic()
        if server.is_running or id(server) in self.held:
            return
        if now - self._started_at.get(id(server), 0.0) > RESTART_AFTER:
            self._started_at[id(server)] = now
            server.launch()

    def _manage_database(self) -> None:
        now = time.monotonic()
        if now - self._asked_at < 0.5:
            return
        primary, standby = self.pair.primary, self.pair.standby
        if self.pair.has_lost_one:
            self._asked_at = time.monotonic()
            if not (standby.machine.is_disturbed or primary.machine.is_disturbed):
                self.pair.restore()
                self._silent_since = None
            return
        self._supervise(standby)
        if _answers(primary):
            self._silent_since = None
        else:
            self._silent_since = self._silent_since or now
            has_waited = time.monotonic() - self._silent_since >= FAILOVER_AFTER
            if has_waited and _answers(standby):
                # Killed first, so that there are never two that take writes.
                self.pair.kill_primary()
                self.pair.promote()
                self.failovers += 1
                self._silent_since = None
        self._asked_at = time.monotonic()


def _answers(server: Any) -> bool:
    try:
        with psycopg.connect(server.url, connect_timeout=2, autocommit=True) as session:
            session.execute("SET statement_timeout = 2000; SELECT 1")
    except psycopg.Error:
        return False
    return True
