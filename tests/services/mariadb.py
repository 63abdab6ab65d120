"""A real MariaDB, which outlives its own death, not that of the machine: it waits for no disk."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from tests.services.account import unprivileged
from tests.services.binaries import find_mariadb, needed
from tests.services.databases import create_database, drop_database
from tests.services.errors import ServerFailed
from tests.services.server import Server
from tests.services.tools import ran

TABLES = ("system_tables", "performance_tables", "system_tables_data")
"""What `mariadb-install-db` makes a server's own tables of; that program wants the client's."""


class MariaDbServer(Server):
    """User `root`, no password; `createdb` makes databases.

    mariadbd refuses root, so as root the server runs as `postgres` or, failing that, `nobody`.
    """

    name = "mariadb"

    def __init__(self, options: Sequence[str] = ()) -> None:
        super().__init__()
        self._options = options

    @property
    def url(self) -> str:
        return f"mysql://root@127.0.0.1:{self.port}/mysql"

    def createdb(self, name: str) -> str:
        """Create an empty database, with the server's usual collation, and return its URL."""
        return create_database(self.url, name)

    def dropdb(self, name: str) -> None:
        """Drop a database if it exists."""
        drop_database(self.url, name)

    def _prepare(self) -> None:
        for path in (self._data, self._scratch):
            path.mkdir()
            if user := self._run_as():
                shutil.chown(path, *user)
        share = Path("/usr/share/mysql")
        found = [next(share.glob(f"m*_{name}.sql"), None) for name in TABLES]
        texts = [needed("mariadb's tables", path).read_text() for path in found]
        user = self._run_as()
        done = ran(
            [*self._command(), "--bootstrap"],
            input="\n".join(["CREATE DATABASE mysql;", "USE mysql;", *texts]),
            cwd=self.directory,
            user=user[0] if user else None,
            group=user[1] if user else None,
            extra_groups=[] if user else None,
        )
        if done.returncode:
            raise ServerFailed(f"mariadbd failed with code {done.returncode}:\n{done.stdout}")

    def _command(self) -> Sequence[str]:
        return [
            str(needed("mariadb-server-core", find_mariadb())),
            *self._arguments(),
            "--innodb-log-file-size=64M",
        ]

    def _arguments(self) -> Sequence[str]:
        """What MariaDB and MySQL are told alike; the first one must stay the first."""
        return [
            "--no-defaults",
            f"--datadir={self._data}",
            f"--tmpdir={self._scratch}",
            f"--socket={self.directory / 'socket'}",
            f"--port={self.port}",
            "--bind-address=127.0.0.1",
            "--character-set-server=utf8mb4",
            "--max-connections=300",
            "--innodb-flush-method=nosync",
            "--innodb-flush-log-at-trx-commit=2",
            "--skip-name-resolve",
            *self._options,
        ]

    def _answers(self) -> bool:
        return "ready for connections" in self.log_since_start()

    def _run_as(self) -> tuple[int, int] | None:
        return unprivileged("MariaDB")

    def _create_directory(self) -> Path:
        directory = super()._create_directory()
        if user := self._run_as():
            shutil.chown(directory, *user)
        return directory

    @property
    def _data(self) -> Path:
        return self.directory / "data"

    @property
    def _scratch(self) -> Path:
        return self.directory / "tmp"
