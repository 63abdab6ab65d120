"""A real PgBouncer in front of a PostgreSQL, ours or a given one."""

import shutil
import signal
import socket
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

from tests.services.account import unprivileged
from tests.services.binaries import find_pgbouncer, needed
from tests.services.server import Server

SETTINGS = {
    "listen_addr": "127.0.0.1",
    "unix_socket_dir": "",
    # Whoever connects is let in, as the user of the server behind.
    "auth_type": "any",
    "pool_mode": "transaction",
    "max_client_conn": "500",
    "default_pool_size": "20",
    # A server that was away is asked again soon.
    "server_login_retry": "1",
}


class PgBouncerServer(Server):
    """Every database of the server at `behind`, its URL, in transaction mode.

    `settings` are put over those of every test.
    """

    name = "pgbouncer"

    def __init__(
        self, behind: str, settings: Mapping[str, str] | None = None, *, port: int | None = None
    ) -> None:
        super().__init__(port=port)
        self._behind = urlsplit(behind)
        self._settings = {**SETTINGS, **(settings or {})}

    @property
    def url(self) -> str:
        return self.through(urlunsplit(self._behind))

    def through(self, url: str) -> str:
        """The URL of a database of the server behind, by way of the pooler."""
        parts = urlsplit(url)
        address = f"{parts.username or 'postgres'}@127.0.0.1:{self.port}"
        return urlunsplit(parts._replace(netloc=address))

    def lead_to(self, behind: str) -> None:
        """Switch over to another server; clients stay connected."""
        self._behind = urlsplit(behind)
        self._prepare()
        self._signal(signal.SIGHUP)

    def _prepare(self) -> None:
        behind = {
            "host": self._behind.hostname,
            "port": self._behind.port,
            "user": self._behind.username,
            "password": self._behind.password,
        }
        target = " ".join(f"{name}={value}" for name, value in behind.items() if value)
        lines = ["[databases]", f"* = {target}", "[pgbouncer]", f"listen_port = {self.port}"]
        lines += [f"{name} = {value}" for name, value in self._settings.items()]
        self._configuration.write_text("\n".join(lines) + "\n")
        if user := unprivileged("PgBouncer"):
            # It may hold a given server's password.
            self._configuration.chmod(0o600)
            shutil.chown(self._configuration, *user)
            shutil.chown(self.directory, *user)

    def _command(self) -> Sequence[str]:
        return [str(needed("pgbouncer", find_pgbouncer())), str(self._configuration)]

    def _answers(self) -> bool:
        # By hand, as no client is needed to ask for TLS: it is refused with one letter.
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(struct.pack("!II", 8, 80877103))
                return connection.recv(1) == b"N"
        except OSError:
            return False

    def _run_as(self) -> tuple[int, int] | None:
        return unprivileged("PgBouncer")

    @property
    def _configuration(self) -> Path:
        return self.directory / "pgbouncer.ini"
