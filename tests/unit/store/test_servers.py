"""Connections to a PostgreSQL that takes no more writes, since another server has its place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial

import pytest
from django.db import InternalError, connection, transaction

from kjo_django.coordination.base import FIRST_CLAIM
from kjo_django.coordination.database.coordination import DatabaseCoordination
from kjo_django.coordination.database.postgres_listener import PostgresListener
from kjo_django.engine.handler.connections import (
    answers,
    drop_broken_connections,
    freshen_connections,
)
from kjo_django.exceptions import CoordinationError
from kjo_django.store import servers
from kjo_django.store.servers import leave_retired, mend_connection, watch_server
from tests.ledger.models import Entry
from tests.waiting import PATIENCE

pytestmark = [pytest.mark.postgres, pytest.mark.usefixtures("postgres")]

REFUSE = "SET default_transaction_read_only TO on"
"""For this session what a server that was retired is told for all; a new one takes writes."""


@pytest.fixture
def retired() -> None:
    """The connection leads to a server that refuses to write, and has met that."""
    with connection.cursor() as cursor:
        cursor.execute(REFUSE)
    with pytest.raises(InternalError, match="read-only transaction"):
        Entry.objects.create(job="refused")


LOOKS = [
    pytest.param(drop_broken_connections, id="drop"),
    pytest.param(freshen_connections, id="freshen"),
    pytest.param(partial(answers, "default"), id="answers"),
    pytest.param(partial(mend_connection, "default"), id="mend"),
    pytest.param(partial(leave_retired, "default"), id="leave"),
]


@pytest.mark.parametrize("look", LOOKS)
def test_a_server_that_refuses_to_write_is_left(look: Callable[[], object], retired: None) -> None:
    # Given a connection that answers, and takes no writes
    assert connection.is_usable()
    # When somebody looks whether it is of use
    look()
    # Then the next query goes to one that does
    Entry.objects.create(job="written")
    assert Entry.objects.get().job == "written"


@pytest.fixture
def pooled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Django's own pool, of one connection."""
    connection.close()
    options = {**connection.settings_dict["OPTIONS"], "pool": {"min_size": 1, "max_size": 1}}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    yield
    connection.close()
    connection.close_pool()


@pytest.mark.parametrize("look", LOOKS)
def test_a_pool_does_not_get_it_back(
    look: Callable[[], object], pooled: None, request: pytest.FixtureRequest
) -> None:
    """It would hand it to the next thread."""
    request.getfixturevalue("retired")
    look()
    Entry.objects.create(job="written")
    assert Entry.objects.get().job == "written"


def test_a_server_that_takes_writes_is_kept() -> None:
    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid()")
        before = cursor.fetchone()
        drop_broken_connections()
        leave_retired("default")
        cursor.execute("SELECT pg_backend_pid()")
        assert cursor.fetchone() == before


def test_a_transaction_is_not_torn_from_its_caller(retired: None) -> None:
    with transaction.atomic():
        Entry.objects.count()
        leave_retired("default")
        mend_connection("default")
        assert Entry.objects.count() == 0


def test_a_database_without_a_primary_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between the end of one primary and the promotion of the next."""
    options = {"options": "-c default_transaction_read_only=on"}
    monkeypatch.setitem(connection.settings_dict, "OPTIONS", options)
    connection.close()
    assert not answers("default")
    connection.close()


def test_coordination_there_is_an_outage(retired: None) -> None:
    # When leases are claimed where nobody can write
    coordination = DatabaseCoordination({})
    with pytest.raises(CoordinationError, match="read-only"):
        coordination.claim(["a"], "me", timedelta(seconds=9))
    # Then it is an outage that passes with the connection
    assert coordination.claim(["a"], "me", timedelta(seconds=9)) == [FIRST_CLAIM]


def test_nobody_listens_there_for_long() -> None:
    """Calls reach the listeners of the server they are made on."""
    listener = PostgresListener("default", ["calls"])
    try:
        before = listener._connection
        # Given a listener whose server is retired
        before.execute(REFUSE)
        # When it looks whether its connection is of use
        listener._alive_at = 0.0
        # Then it listens elsewhere, and takes all channels for called
        assert listener.wait(PATIENCE) == {"calls"}
        assert listener._connection is not before
    finally:
        listener.close()


# --- Which server it is ---------------------------------------------------------------------------


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The servers that the process knows."""
    known: dict[str, str] = {}
    monkeypatch.setattr(servers, "_servers", known)
    yield known
    servers.connection_created.disconnect(dispatch_uid="kjo_django.store.servers")


def test_another_server_is_told_once(
    watched: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    # Given a process whose connections led to a server that is away
    watch_server("default")
    watched["default"] = "192.0.2.1:5432"
    # When they lead elsewhere
    for _ in range(2):
        connection.close()
        connection.ensure_connection()
    # Then the log names both, once
    (line,) = [each.getMessage() for each in caplog.records if "another" in each.getMessage()]
    assert "Database 'default' is another server now: " in line
    assert line.endswith(f":{connection.settings_dict['PORT']}, before 192.0.2.1:5432")


def test_the_first_server_is_no_news(
    watched: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    connection.close()
    watch_server("default")
    connection.ensure_connection()
    assert watched["default"].endswith(f":{connection.settings_dict['PORT']}")
    assert "another server" not in caplog.text


def test_the_server_of_an_open_connection_is_known(watched: dict[str, str]) -> None:
    """A relay has asked the database before it begins."""
    connection.ensure_connection()
    watch_server("default")
    assert watched["default"]
