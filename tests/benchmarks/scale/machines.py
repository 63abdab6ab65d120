"""One machine for each server and each process: a network namespace and a group of the CPU."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

from tests.acceptance.program import Program
from tests.benchmarks.engines import POSTGRES_SETTINGS
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.scale.cpu import CpuGroup
from tests.benchmarks.scale.points import SERVERS
from tests.cluster.machines import (
    CONTROLLER_PORT,
    KAFKA_PORT,
    POSTGRES_PORT,
    OnMachine,
    Redis,
)
from tests.cluster.network import Machine, make_network
from tests.services.kafka import KafkaServer
from tests.services.postgres import PostgresServer

KINDS = {"web": 1, "relay": 2, "worker": 4}
"""How many machines there are of each kind, besides one for each server."""


class _Kafka(OnMachine, KafkaServer):
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        settings = {
            "controller.quorum.voters": f"1@{machine.address}:{CONTROLLER_PORT}",
            "listeners": f"BROKER://:{KAFKA_PORT},CONTROLLER://:{CONTROLLER_PORT}",
            "advertised.listeners": f"BROKER://{machine.address}:{KAFKA_PORT}",
        }
        super().__init__(
            controller_ports={1: CONTROLLER_PORT}, settings=settings, heap_mb=512, port=KAFKA_PORT
        )


class _Postgres(OnMachine, PostgresServer):
    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        # What autovacuum does is a point of its own, and not in some of the windows.
        settings = {**POSTGRES_SETTINGS, "listen_addresses": "*", "autovacuum": "off"}
        super().__init__(settings, port=POSTGRES_PORT)

    @property
    def host(self) -> str:
        return self.machine.address

    def _prepare(self) -> None:
        super()._prepare()
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 0.0.0.0/0 trust\n")


def kind_of(name: str) -> str:
    """Return what a machine is for: ``worker`` of ``worker2``."""
    return name.rstrip("0123456789")


class Deployment:
    """Use as a context manager, in a process under `tests.cluster.network.COMMAND`.

    :param logs: an empty folder for what processes write.
    """

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._stack = ExitStack()
        names = [*SERVERS, *(f"{kind}{n}" for kind, many in KINDS.items() for n in range(many))]
        self.machines = {name: Machine(name, number) for number, name in enumerate(names, 10)}
        self.groups: dict[str, CpuGroup] = {}
        self.kafka = _Kafka(self.machines["kafka"])
        self.postgres = _Postgres(self.machines["postgres"])
        self.redis = Redis(self.machines["redis"])
        self._started = 0

    @property
    def environment(self) -> dict[str, str]:
        """The variables that name the servers."""
        return {
            **os.environ,
            "DATABASE_URL": self.postgres.url,
            "KAFKA_BOOTSTRAP_SERVERS": self.kafka.address,
            "REDIS_URL": f"redis://{self.redis.address}/0",
        }

    def __enter__(self) -> Self:
        make_network(list(self.machines.values()))
        try:
            for name in self.machines:
                self.groups[name] = CpuGroup(f"kjo-scale-{os.getppid()}-{time.time_ns()}-{name}")
                self._stack.callback(self.groups[name].close)
            servers: dict[str, OnMachine] = {
                "postgres": self.postgres,
                "kafka": self.kafka,
                "redis": self.redis,
            }
            for server in servers.values():
                self._stack.callback(server.close)
            with ThreadPoolExecutor(len(servers)) as pool:
                list(pool.map(lambda server: server.start(), servers.values()))
            for name, server in servers.items():
                self.groups[name].add(server.pid)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    @contextmanager
    def processes(
        self, commands: Mapping[str, Sequence[str]], environment: Mapping[str, str]
    ) -> Iterator[list[Program]]:
        """Run each command on the machine it is named by, in its group; kill them afterwards.

        :raises BenchmarkError: one has failed.
        """
        programs: list[Program] = []
        try:
            for name, command in commands.items():
                self._started += 1
                log = self._logs / f"{self._started:03}-{name}.log"
                with self.machines[name]:
                    program = Program(command, environment, log)
                programs.append(program)
                self.groups[name].add(program.pid)
            yield programs
            for program in programs:
                if not program.is_running and program.wait():
                    raise BenchmarkError(f"{program} ended:\n{program.log_tail()}")
        finally:
            for program in programs:
                program.end()

    @contextmanager
    def held(self, shares: Mapping[str, float]) -> Iterator[None]:
        """Hold machines to their shares, by kind; let them free afterwards."""
        for name, group in self.groups.items():
            group.hold_to(shares[kind_of(name)])
        try:
            yield
        finally:
            for group in self.groups.values():
                group.release()
