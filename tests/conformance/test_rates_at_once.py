"""Two sessions of PostgreSQL that use the rows of coordination at once: none of them fails.

Each test has a third session that holds a row, so that the two meet in the order it wants.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeVar

import pytest
from django.db import connections, transaction
from django.utils import timezone

from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.coordination.starts import Ask, Pace
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Lease, Mark, RateWindow
from kjo_django.store import store_for
from kjo_django.store.postgres import plain_connection
from tests.waiting import PATIENCE, wait_until

T = TypeVar("T")
pytestmark = pytest.mark.postgres
WAITING = (
    "SELECT count(*) FROM pg_stat_activity"
    " WHERE datname = current_database() AND wait_event_type = 'Lock'"
)


@pytest.fixture
def at_once(postgres_alias: str) -> Iterator[Callable[..., Future[Any]]]:
    """Return a function that starts a call in another thread, with a connection of its own."""
    with ThreadPoolExecutor(2) as threads:

        def start(call: Callable[..., T], *arguments: Any) -> Future[T]:
            def run() -> T:
                try:
                    return call(*arguments)
                finally:
                    connections[postgres_alias].close()

            return threads.submit(run)

        yield start


def waiting_sessions(alias: str) -> int:
    """Return how many sessions wait for a row that another one holds."""
    with connections[alias].cursor() as cursor:
        cursor.execute(WAITING)
        return int(cursor.fetchone()[0])


@pytest.mark.parametrize("model", [RateWindow, Lease, Mark])
def test_a_prune_leaves_what_somebody_has_locked(
    postgres_alias: str, at_once: Callable[..., Future[Any]], model: Any
) -> None:
    """It waited, in another order than those who write: the database broke one of them off."""
    # Given two expired rows, the second of which is locked
    long_ago = timezone.now() - timedelta(days=2)
    rows = model.objects.using(postgres_alias)
    for name in ("b", "a"):
        rows.create(name=name, expires_at=long_ago)
    coordination = DatabaseCoordination({"DATABASE": postgres_alias})
    with transaction.atomic(using=postgres_alias):
        rows.select_for_update().get(name="a")
        # When, then
        assert at_once(coordination.prune).result(PATIENCE) == 1
    assert [row.name for row in rows.all()] == ["a"]
    assert coordination.prune() == 1


def test_a_prune_and_a_write_of_rates_do_not_wait_for_each_other(
    postgres_alias: str, at_once: Callable[..., Future[Any]]
) -> None:
    # Given rows that have expired, and lie in another order than that of their names
    long_ago = timezone.now() - timedelta(days=2)
    rows = RateWindow.objects.using(postgres_alias)
    for name in ("b", "a"):
        rows.create(name=name, starts="", expires_at=long_ago)
    store = store_for(postgres_alias)
    coordination = DatabaseCoordination({"DATABASE": postgres_alias})
    changes = [(name, "", "1 1:1", timezone.now()) for name in ("a", "b")]
    with plain_connection(postgres_alias) as other, other.transaction():
        # When a write waits for the first, and a prune has the second
        other.execute("SELECT FROM kjo_rate_window WHERE name = 'a' FOR UPDATE")
        written = at_once(store.write_windows, changes)
        wait_until(lambda: waiting_sessions(postgres_alias) == 1)
        pruned = at_once(coordination.prune)
        wait_until(lambda: pruned.done() or waiting_sessions(postgres_alias) == 2)
    # Then neither fails
    written.result(PATIENCE)
    pruned.result(PATIENCE)


def test_a_permit_is_given_where_the_isolation_refuses_the_first_write(
    postgres_alias: str, at_once: Callable[..., Future[Any]]
) -> None:
    """At REPEATABLE READ a row that another session has written since is an error, 40001."""
    # Given a rate that is known to a process
    pace = Pace("RATE:queue:emails", 10, 3600.0, 360.0, 3600.0)
    coordination = DatabaseCoordination({"DATABASE": postgres_alias})
    asks = [Ask([pace], 1.0)]
    assert all(coordination.permit(asks)[0].stamp for _ in range(2))

    def permit() -> Any:
        with connections[postgres_alias].cursor() as cursor:
            cursor.execute("SET default_transaction_isolation TO 'repeatable read'")
        return coordination.permit(asks)

    with plain_connection(postgres_alias) as other, other.transaction():
        # When it writes what another session is writing
        other.execute("UPDATE kjo_rate_window SET starts = starts || ''")
        given = at_once(permit)
        wait_until(lambda: waiting_sessions(postgres_alias) == 1)
    # Then
    assert given.result(PATIENCE)[0].stamp


def test_leases_are_claimed_where_the_prune_after_it_fails(
    postgres_alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were taken, and the caller was told of an outage."""
    coordination = DatabaseCoordination({"DATABASE": postgres_alias})
    coordination._prune_at = 0.0

    def fail() -> int:
        raise CoordinationError("the connection is lost")

    monkeypatch.setattr(coordination, "prune", fail)
    assert coordination.claim(["a"], "me", timedelta(minutes=1))[0].acquired
