"""A real MySQL, which outlives its own death, not that of the machine: it waits for no disk."""

import os
from collections.abc import Sequence
from pathlib import Path

from tests.services.binaries import find_mysql, mysql_directory, needed
from tests.services.errors import ServerFailed
from tests.services.mariadb import MariaDbServer
from tests.services.tools import ran

ACCOUNT = """
CREATE USER 'root'@'127.0.0.1' IDENTIFIED BY '';
GRANT ALL ON *.* TO 'root'@'127.0.0.1' WITH GRANT OPTION;
"""
"""The server's own `root` may come through its socket only."""


class MySqlServer(MariaDbServer):
    """As MariaDB's: user `root`, no password. It runs as whoever starts it, root included."""

    name = "mysql"

    def _prepare(self) -> None:
        self._scratch.mkdir()
        account = self.directory / "account.sql"
        account.write_text(ACCOUNT)
        options = ["--initialize-insecure", f"--init-file={account}"]
        done = ran([*self._command(), *options], cwd=self.directory)
        if done.returncode:
            raise ServerFailed(f"mysqld failed with code {done.returncode}:\n{done.stdout}")

    def _command(self) -> Sequence[str]:
        program = needed("mysql-server-core", find_mysql())
        return [
            *_loader(program),
            str(program),
            *self._arguments(),
            f"--basedir={program.parents[1]}",
            f"--pid-file={self.directory / 'pid'}",
            *(["--user=root"] if os.geteuid() == 0 else []),
            "--mysqlx=OFF",
            "--skip-log-bin",
            "--secure-file-priv=NULL",
            "--performance-schema=OFF",
            "--innodb-doublewrite=OFF",
            "--innodb-redo-log-capacity=64M",
            # Tests ask it how far a table has counted, which it would know from yesterday.
            "--information-schema-stats-expiry=0",
        ]

    def _run_as(self) -> tuple[int, int] | None:
        return None


def _loader(program: Path) -> Sequence[str]:
    """What starts a program that was unpacked with a C library of its own: the loader of that."""
    unpacked = mysql_directory() / "usr"
    if not program.is_relative_to(unpacked):
        return []
    loader = next(unpacked.glob("lib*/ld-linux-*.so.*"), None)
    libraries = next(unpacked.glob("lib/*-linux-gnu"), None)
    return [
        str(needed("the loader of MySQL's libraries", loader)),
        "--library-path",
        str(needed("what MySQL needs of libraries", libraries)),
    ]
