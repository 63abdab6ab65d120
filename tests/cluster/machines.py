"""The servers of `tests.services`, each on a machine of its own."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.cluster.network import Machine
from tests.services.kafka import KafkaServer
from tests.services.postgres import PostgresServer
from tests.services.postgres_pair import PostgresPair, StandbyServer
from tests.services.redis import RedisServer
from tests.services.sentinel import QUORUM, SentinelServer
from tests.services.server import Server

KAFKA_PORT, CONTROLLER_PORT = 9092, 9093
POSTGRES_PORT, REDIS_PORT, SENTINEL_PORT = 5432, 6379, 26379
PRIMARY_NAME = "kjo"
DISK_MB = 400


class OnMachine(Server):
    """Mixed into a server: it starts on its machine, with a small disk of its own if asked."""

    machine: Machine
    has_small_disk = False

    @property
    def address(self) -> str:
        return f"{self.machine.address}:{self.port}"

    def launch(self) -> None:
        with self.machine:
            super().launch()

    def wait_ready(self) -> None:
        with self.machine:
            super().wait_ready()

    def fill_disk(self) -> None:
        """Leave no room."""
        self.machine.is_disturbed = True
        with suppress(OSError), self._filler.open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(65536))

    def free_disk(self) -> None:
        """Undo `fill_disk`."""
        self.machine.is_disturbed = False
        self._filler.unlink(missing_ok=True)

    @property
    def _filler(self) -> Path:
        return self.directory / "filler"

    def _create_directory(self) -> Path:
        directory = super()._create_directory()
        if self.has_small_disk:
            size = f"size={DISK_MB}m"
            subprocess.run(["mount", "-t", "tmpfs", "-o", size, "none", directory], check=True)
            if user := self._run_as():
                shutil.chown(directory, *user)
        return directory

    def close(self) -> None:
        directory = self._directory if self.has_small_disk else None
        super().close()
        if directory is not None:
            subprocess.run(["umount", "--lazy", directory], check=True)
            directory.rmdir()


class Broker(OnMachine, KafkaServer):
    """A broker and controller of a cluster of three."""

    has_small_disk = True

    def __init__(self, machine: Machine, number: int, brokers: Sequence[Machine], id: str) -> None:
        self.machine = machine
        voters = ",".join(
            f"{node}@{each.address}:{CONTROLLER_PORT}" for node, each in enumerate(brokers, start=1)
        )
        settings = {
            "controller.quorum.voters": voters,
            "listeners": f"BROKER://:{KAFKA_PORT},CONTROLLER://:{CONTROLLER_PORT}",
            "advertised.listeners": f"BROKER://{machine.address}:{KAFKA_PORT}",
            # Long enough that a busy machine alone ends no session.
            "broker.session.timeout.ms": "5000",
            # A follower that is away leaves the set that writes wait for.
            "replica.lag.time.max.ms": "4000",
            "controller.quorum.election.timeout.ms": "1000",
            "controller.quorum.fetch.timeout.ms": "3000",
        }
        super().__init__(
            node_id=number,
            controller_ports=dict.fromkeys(range(1, len(brokers) + 1), CONTROLLER_PORT),
            cluster_id=id,
            settings=settings,
            heap_mb=256,
            port=KAFKA_PORT,
        )

    def quorum(self) -> tuple[int, int]:
        """Return the epoch and the leader of the controllers, as this node last knew them."""
        path = self.directory / "data" / "__cluster_metadata-0" / "quorum-state"
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError):
            return -1, -1
        return state["leaderEpoch"], state["leaderId"]


class _Postgres(OnMachine, PostgresServer):
    has_small_disk = True
    settings: Mapping[str, str] = {
        "listen_addresses": "*",
        # Only a machine that crashes would lose anything by it.
        "fsync": "off",
        "full_page_writes": "off",
        "shared_buffers": "32MB",
        "track_commit_timestamp": "on",
        "max_wal_size": "64MB",
        "min_wal_size": "32MB",
        "wal_sender_timeout": "4s",
        "wal_receiver_timeout": "4s",
        "wal_receiver_status_interval": "1s",
    }

    @property
    def host(self) -> str:
        return self.machine.address


class Primary(_Postgres):
    """The PostgreSQL that takes writes at first."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        super().__init__(self.settings, port=POSTGRES_PORT)

    def _prepare(self) -> None:
        super()._prepare()
        with (self._data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 0.0.0.0/0 trust\nhost replication all 0.0.0.0/0 trust\n")


class Standby(_Postgres, StandbyServer):
    """A PostgreSQL that follows another one."""

    def __init__(self, machine: Machine, primary: PostgresServer) -> None:
        self.machine = machine
        super().__init__(primary, port=POSTGRES_PORT)
        self._settings = {**self._settings, **self.settings}


class Pair(PostgresPair):
    """Both on machines of their own."""

    def __init__(self, primary: Machine, standby: Machine) -> None:
        super().__init__(Primary(primary))
        self.standby = Standby(standby, self.primary)

    @property
    def has_lost_one(self) -> bool:
        """Whether the primary has no standby because there was a failover."""
        return self._former is not None

    def _follower(self, former: Any) -> PostgresServer:
        return Standby(former.machine, self.primary)


class Redis(OnMachine, RedisServer):
    """A Redis that may follow another one."""

    def __init__(self, machine: Machine, replica_of: Redis | None = None) -> None:
        self.machine = machine
        super().__init__(port=REDIS_PORT)
        self._follows = replica_of

    def _command(self) -> Sequence[str]:
        command = [*super()._command(), "--bind", "*", "--protected-mode", "no"]
        if self._follows is not None:
            command += ["--replicaof", f"{self._follows.machine.address} {REDIS_PORT}"]
        return command


class Sentinel(OnMachine, SentinelServer):
    """One of three that watch Redis."""

    def __init__(self, machine: Machine, primary: Redis) -> None:
        self.machine = machine
        super().__init__(primary)
        self.port = SENTINEL_PORT

    @property
    def primary_name(self) -> str:
        return PRIMARY_NAME

    def _prepare(self) -> None:
        watched = self._primary
        assert isinstance(watched, Redis)
        lines = (
            "bind *",
            "protected-mode no",
            f"port {self.port}",
            f"dir {self.directory}",
            f"sentinel monitor {PRIMARY_NAME} {watched.machine.address} {REDIS_PORT} {QUORUM}",
            f"sentinel down-after-milliseconds {PRIMARY_NAME} 1000",
            f"sentinel failover-timeout {PRIMARY_NAME} 3000",
        )
        (self.directory / "sentinel.conf").write_text("\n".join(lines) + "\n")

    def primary_address(self) -> str:
        """Of whom it tells clients."""
        with self.machine:
            return self._ask(f"SENTINEL GET-MASTER-ADDR-BY-NAME {PRIMARY_NAME}")[0]

    def is_complete(self) -> bool:
        """Whether it could bring about a failover."""
        with self.machine:
            return self.knows(replicas=1, others=2)
