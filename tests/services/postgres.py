"""A real PostgreSQL, as durable as a production one."""

import shutil
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.services.account import unprivileged
from tests.services.binaries import find_postgres, needed
from tests.services.databases import create_database, drop_database
from tests.services.errors import ServerFailed
from tests.services.server import POLL_SECONDS, Server
from tests.services.tools import ran

SETTINGS = {
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    # Compiling a test's short queries costs more than running them.
    "jit": "off",
}


class PostgresServer(Server):
    """User `postgres`, no password, database `postgres`; `createdb` makes more.

    initdb refuses root, so as root the server runs as `postgres` or, failing that, `nobody`.

    `settings` are put over those of every test.
    """

    name = "postgres"
    host = "127.0.0.1"
    # "Fast": open transactions are rolled back instead of waited for.
    stop_signal = signal.SIGINT
    # "Immediate": like a crash, but the kernel's shared memory segment is given back.
    last_signal = signal.SIGQUIT

    def __init__(
        self, settings: Mapping[str, str] | None = None, *, port: int | None = None
    ) -> None:
        super().__init__(port=port)
        self._settings = settings or {}

    @property
    def url(self) -> str:
        return f"postgresql://postgres@{self.host}:{self.port}/postgres"

    def createdb(self, name: str, template: str = "") -> str:
        """Create a database, empty or as its template, and return its URL."""
        return create_database(self.url, name, template)

    def dropdb(self, name: str) -> None:
        """Drop a database if it exists, whoever is connected to it."""
        drop_database(self.url, name)

    def start(self) -> Self:
        deadline = time.monotonic() + self.start_timeout
        while True:  # timed loop: its own time to start, and its log in the error
            try:
                return super().start()
            except ServerFailed:
                # After kill() the old backends notice one by one that their postmaster is gone;
                # until the last one left, PostgreSQL rightly refuses to touch the data.
                lingering = "is still in use" in self.log_since_start()
                if not lingering or time.monotonic() > deadline:
                    raise
                time.sleep(POLL_SECONDS)  # sleep: until the next try

    def _prepare(self) -> None:
        self._make_data(
            "initdb",
            f"--pgdata={self._data}",
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--no-locale",
            # Only initdb's own files: a machine that crashes here has no data to lose yet.
            "--no-sync",
        )

    def _make_data(self, program: str, *arguments: str) -> None:
        """Run a program of PostgreSQL's as the server's own user."""
        user = self._run_as()
        done = ran(
            [str(self._binaries() / program), *arguments],
            cwd=self.directory,
            user=user[0] if user else None,
            group=user[1] if user else None,
            extra_groups=[] if user else None,
        )
        if done.returncode:
            raise ServerFailed(f"{program} failed with code {done.returncode}:\n{done.stdout}")

    def _command(self) -> Sequence[str]:
        command = [str(self._binaries() / "postgres"), "-D", str(self._data), "-p", str(self.port)]
        for name, value in {**SETTINGS, **self._settings}.items():
            command += ["-c", f"{name}={value}"]
        return command

    def _answers(self) -> bool:
        # As pg_ctl does: the first line is the pid, the last of the eight the state.
        try:
            lines = (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return False
        return len(lines) >= 8 and lines[0] == str(self.pid) and lines[7].strip() == "ready"

    def _run_as(self) -> tuple[int, int] | None:
        return unprivileged("PostgreSQL")

    def _create_directory(self) -> Path:
        directory = super()._create_directory()
        if user := self._run_as():
            shutil.chown(directory, *user)
        return directory

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @staticmethod
    def _binaries() -> Path:
        return needed("postgresql", find_postgres()).parent
