"""Redis with a replica and sentinels that make it the primary when the first is away."""

import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice

from tests.services.binaries import find_redis, needed
from tests.services.errors import ServerFailed
from tests.services.redis import RedisServer
from tests.services.server import POLL_SECONDS, Server

QUORUM = 2
KNOWN_WITHIN = 30.0


class SentinelServer(Server):
    """One sentinel. It is Redis itself, started as such."""

    name = "sentinel"

    def __init__(self, primary: RedisServer) -> None:
        super().__init__()
        self._primary = primary

    @property
    def primary_name(self) -> str:
        """One for each group: clients keep their pools by it, and a process meets many."""
        return f"kjo-primary-{self._primary.port}"

    @property
    def url(self) -> str:
        return f"127.0.0.1:{self.port}"

    def knows(self, *, replicas: int, others: int) -> bool:
        """Whether it could bring about a failover."""
        answer = self._ask(f"SENTINEL MASTER {self.primary_name}")
        facts = dict(zip(answer[::2], answer[1::2], strict=True))
        found = facts["num-slaves"], facts["num-other-sentinels"]
        return found == (str(replicas), str(others))

    def primary_port(self) -> int:
        """Of whom it tells clients."""
        return int(self._ask(f"SENTINEL GET-MASTER-ADDR-BY-NAME {self.primary_name}")[-1])

    def _prepare(self) -> None:
        lines = (
            "bind 127.0.0.1",
            f"port {self.port}",
            f"dir {self.directory}",
            f"sentinel monitor {self.primary_name} 127.0.0.1 {self._primary.port} {QUORUM}",
            f"sentinel down-after-milliseconds {self.primary_name} 1000",
            f"sentinel failover-timeout {self.primary_name} 3000",
        )
        (self.directory / "sentinel.conf").write_text("\n".join(lines) + "\n")

    def _command(self) -> Sequence[str]:
        program = needed("redis-server", find_redis())
        return [str(program), str(self.directory / "sentinel.conf"), "--sentinel"]

    def _answers(self) -> bool:
        try:
            return self._ask("PING") == ["+PONG"]
        except OSError:
            return False

    def _ask(self, command: str) -> list[str]:
        # By hand, so that the package needs no Redis client: a word, or a list of texts.
        with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
            connection.sendall(f"{command}\r\n".encode())
            lines = (line.decode().rstrip("\r\n") for line in connection.makefile("rb"))
            first = next(lines, "")
            if not first.startswith("*"):
                return [first]
            # Each text has a line with its length before it.
            return [line for _ in range(int(first[1:])) for line in list(islice(lines, 2))[1:]]


@contextmanager
def sentinels(count: int = 3) -> Iterator[tuple[RedisServer, RedisServer, list[SentinelServer]]]:
    """A primary, its replica, and sentinels that know both and one another."""
    with ExitStack() as stack:
        primary = stack.enter_context(RedisServer())
        replica = stack.enter_context(RedisServer(replica_of=primary))
        watching = [stack.enter_context(SentinelServer(primary)) for _ in range(count)]
        deadline = time.monotonic() + KNOWN_WITHIN
        # timed loop: an error of its own
        while not all(each.knows(replicas=1, others=count - 1) for each in watching):
            if time.monotonic() > deadline:
                raise ServerFailed(f"sentinels did not find one another in {KNOWN_WITHIN:g} s")
            time.sleep(POLL_SECONDS)  # sleep: until the next look
        yield primary, replica, watching
