"""A real Redis (or Valkey)."""

import socket
from collections.abc import Sequence

from tests.services.binaries import find_redis, needed
from tests.services.server import Server


class RedisServer(Server):
    """Forgets everything on a restart, unless `appendonly`: then it keeps what it acknowledged."""

    name = "redis"

    def __init__(self, *, appendonly: bool = False, port: int | None = None) -> None:
        super().__init__(port=port)
        self.appendonly = appendonly

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _prepare(self) -> None:
        needed("redis-server", find_redis())

    def _command(self) -> Sequence[str]:
        options = {
            "bind": "127.0.0.1",
            "port": str(self.port),
            "dir": str(self.directory),
            "save": "",
            "appendonly": "yes" if self.appendonly else "no",
            "daemonize": "no",
        }
        command = [str(needed("redis-server", find_redis()))]
        for name, value in options.items():
            command += [f"--{name}", value]
        return command

    def _answers(self) -> bool:
        # By hand, so that the package needs no Redis client. While loading, PING is refused.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"PING\r\nINFO server\r\nQUIT\r\n")
                answer = connection.makefile("rb").read()
        except OSError:
            return False
        return answer.startswith(b"+PONG") and b"process_id:%d\r\n" % self.pid in answer
