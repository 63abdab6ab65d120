"""A real Redis, or a real Valkey."""

import re
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.services.binaries import find_redis, find_valkey, needed
from tests.services.server import Server


class RedisServer(Server):
    """Forgets everything on a restart, unless `appendonly`: then it keeps what it acknowledged."""

    name = "redis"

    def __init__(
        self,
        *,
        appendonly: bool = False,
        replica_of: "RedisServer | None" = None,
        port: int | None = None,
    ) -> None:
        super().__init__(port=port)
        self._replica_of = replica_of
        self.appendonly = appendonly

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def has_replica(self) -> bool:
        """Whether it is a primary that another server follows."""
        return b"\nslave0:" in self._ask(b"INFO replication")

    def calls_of(self, command: str) -> int:
        """How often clients have sent it a command, by its name in lower case."""
        found = re.search(
            rf"cmdstat_{command}:calls=(\d+)".encode(), self._ask(b"INFO commandstats")
        )
        return int(found[1]) if found else 0

    def _prepare(self) -> None:
        self._program()

    def _program(self) -> Path:
        return needed("redis-server", find_redis())

    def _command(self) -> Sequence[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes" if self.appendonly else "no",
            "daemonize": "no",
            # What a replica is sent first goes by way of no disk, and at once.
            "repl-diskless-sync-delay": "0",
        }
        if self._replica_of is not None:
            options["replicaof"] = f"127.0.0.1 {self._replica_of.port}"
        command = [str(self._program())]
        for name, value in options.items():
            command += [f"--{name}", value]
        return command

    def _answers(self) -> bool:
        # While loading, PING is refused.
        try:
            answer = self._ask(b"PING\r\nINFO server")
        except OSError:
            return False
        return answer.startswith(b"+PONG") and b"process_id:%d\r\n" % self.pid in answer

    def _ask(self, commands: bytes) -> bytes:
        # By hand, so that the package needs no Redis client.
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(commands + b"\r\nQUIT\r\n")
            return connection.makefile("rb").read()


class ValkeyServer(RedisServer):
    """The fork of Redis that distributions have taken in its place."""

    name = "valkey"

    def _program(self) -> Path:
        return needed("valkey-server", find_valkey())
