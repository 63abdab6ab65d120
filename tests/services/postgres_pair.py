"""A PostgreSQL and its synchronous standby, which takes its place when it is lost or retired."""

import time
from collections.abc import Callable
from typing import Self
from urllib.parse import urlencode, urlsplit, urlunsplit

import psycopg

from tests.services.databases import create_database, drop_database
from tests.services.errors import ServerFailed
from tests.services.postgres import PostgresServer
from tests.services.server import POLL_SECONDS

OPTIONS = {
    "target_session_attrs": "read-write",
    "connect_timeout": "3",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "tcp_user_timeout": "10000",
}
"""Of clients, as docs/how-to/production.md recommends them."""
DONE_WITHIN = 30.0


class StandbyServer(PostgresServer):
    """A copy of a running primary that follows it, until it is promoted."""

    name = "standby"

    def __init__(self, primary: PostgresServer, *, port: int | None = None) -> None:
        source = f"host={primary.host} port={primary.port} user=postgres"
        super().__init__({"primary_conninfo": source}, port=port)
        self._source = source

    def _prepare(self) -> None:
        self._make_data(
            "pg_basebackup",
            f"--dbname={self._source}",
            f"--pgdata={self._data}",
            "--checkpoint=fast",
            "--wal-method=stream",
            "--no-sync",
            # Writes standby.signal.
            "--write-recovery-conf",
        )
        # What was set on the primary, and where that had been copied from, is not to be set here.
        (self._data / "postgresql.auto.conf").write_text("")


class PostgresPair:
    """A primary whose commits wait for its standby: what a client was told is on both.

    The standby waits for nobody when it is promoted, as a cluster manager would have it: else
    nothing could be committed until there is another one.
    """

    def __init__(self, primary: PostgresServer | None = None) -> None:
        self.primary = primary or PostgresServer()
        self.standby: PostgresServer = StandbyServer(self.primary)
        self._former: PostgresServer | None = None
        """A primary that was lost or retired, and has no successor with a standby yet."""

    @property
    def url(self) -> str:
        """Of both: a client connects to the one that takes writes."""
        servers = sorted(f"{each.host}:{each.port}" for each in (self.primary, self.standby))
        hosts = ",".join(servers)
        return f"postgresql://postgres@{hosts}/postgres?{urlencode(OPTIONS)}"

    def createdb(self, name: str, template: str = "") -> str:
        """Create a database, empty or as its template, and return its URL."""
        create_database(self.primary.url, name, template)
        return urlunsplit(urlsplit(self.url)._replace(path=f"/{name}"))

    def dropdb(self, name: str) -> None:
        """Drop a database if it exists, whoever is connected to it."""
        drop_database(self.primary.url, name)

    def kill_primary(self) -> None:
        """SIGKILL: what the standby has is all there is left."""
        self._former = self.primary
        self.primary.kill()

    def retire_primary(self) -> None:
        """Let the primary refuse to write, and wait until the standby has all that it has written.
        It stays up, and nobody is disconnected."""
        self._former = self.primary
        with _connected(self.primary) as session:
            session.execute("ALTER SYSTEM SET default_transaction_read_only TO on")
            session.execute("SELECT pg_reload_conf()")
        # A new session has the setting once all others have been sent the signal.
        _wait_until(
            lambda: _answer(self.primary, "SHOW default_transaction_read_only") == "on",
            "The primary still takes writes",
        )
        since = _answer(self.primary, "SELECT clock_timestamp()")
        earlier = (
            "SELECT count(*) FROM pg_stat_activity"
            f" WHERE backend_type = 'client backend' AND xact_start < '{since}'"
        )
        _wait_until(lambda: _answer(self.primary, earlier) == 0, "A transaction does not end")
        written = _answer(self.primary, "SELECT pg_current_wal_insert_lsn()")
        has_it = f"SELECT pg_last_wal_replay_lsn() >= '{written}'::pg_lsn"
        _wait_until(lambda: _answer(self.standby, has_it), "The standby does not catch up")

    def promote(self) -> None:
        """Make the standby the primary. The other server is left as it is, dead or retired."""
        if not _answer(self.standby, f"SELECT pg_promote(true, {DONE_WITHIN:.0f})"):
            raise ServerFailed("The standby was not promoted")
        self.primary, self.standby = self.standby, self.primary

    def restore(self) -> None:
        """Make a new standby in the place of the server that was lost or retired, if one was, and
        let commits wait for it."""
        if self._former is None:
            return
        if self._former is self.primary:
            self.promote()
        self.standby.close()
        self.standby = self._follower(self.standby)
        self._attach_standby()
        self._former = None

    def _follower(self, former: PostgresServer) -> PostgresServer:
        """Return a standby of the primary for the place of another server."""
        return StandbyServer(self.primary, port=former.port)

    def _attach_standby(self) -> None:
        self.standby.start()
        with _connected(self.primary) as session:
            session.execute("ALTER SYSTEM SET synchronous_standby_names TO '*'")
            session.execute("SELECT pg_reload_conf()")
        synchronous = "SELECT count(*) FROM pg_stat_replication WHERE sync_state = 'sync'"
        _wait_until(lambda: _answer(self.primary, synchronous) == 1, "No standby is synchronous")

    def has_waiting_commits(self) -> bool:
        """Return whether a client waits for the standby to have its commit."""
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'"
        return _answer(self.primary, waiting) != 0

    def close(self) -> None:
        """End both at once and remove their data."""
        self.standby.close()
        self.primary.close()

    def __enter__(self) -> Self:
        try:
            self.primary.start()
            self._attach_standby()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _connected(server: PostgresServer) -> "psycopg.Connection[tuple[object, ...]]":
    return psycopg.connect(server.url, autocommit=True, application_name="pair")


def _answer(server: PostgresServer, question: str) -> object:
    with _connected(server) as session:
        row = session.execute(question).fetchone()
    return row[0] if row else None


def _wait_until(condition: Callable[[], object], complaint: str) -> None:
    deadline = time.monotonic() + DONE_WITHIN
    while not condition():  # timed loop: an error of its own
        if time.monotonic() > deadline:
            raise ServerFailed(f"{complaint} within {DONE_WITHIN:g} s")
        time.sleep(POLL_SECONDS)  # sleep: until the next look
