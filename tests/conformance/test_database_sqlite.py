"""PJQ-66: the database transport on a SQLite file passes the suite of every transport; it is what
FileStorage was: one node, persistent, no server."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from kjo_django.clock import CLOCK, Clock
from kjo_django.testing.conformance import TransportConformance
from kjo_django.transports.base import OutgoingRecord, Subscription
from kjo_django.transports.database import DatabaseTransport, plans
from kjo_django.transports.database.subscription import CommitWatcher
from tests.clocks import SetClock
from tests.conformance.databases import SQLITE
from tests.conformance.published_rows import RowConformance


class DatabaseConformance(RowConformance, TransportConformance):
    alias: str
    lease = timedelta(seconds=2)
    rebalances = False

    def make_transport(self) -> DatabaseTransport:
        return DatabaseTransport("test", {"DATABASE": self.alias})

    def atomic(self) -> AbstractContextManager[Any]:
        return transaction.atomic(using=self.alias)

    def end_thread(self) -> None:
        connections.close_all()


@pytest.mark.usefixtures("sqlite_alias")
class TestSqlite(DatabaseConformance):
    alias = SQLITE

    def test_what_others_commit_is_not_waited_for_until_the_next_look(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given
        subscription = self._subscription_that_seldom_looks(monkeypatch)
        assert subscription.poll(10, 0.3) == []
        # When
        publisher = threading.Timer(0.3, self._publish)
        publisher.start()
        records = subscription.poll(10, 3600.0)
        # Then
        assert [record.value for record in records] == [b"a"]
        publisher.join()
        subscription.close()

    def test_a_commit_between_two_waits_is_not_missed(self) -> None:
        commits, woken = CommitWatcher(self.alias, CLOCK), threading.Event()
        commits.wait(woken, 0.0)
        publisher = threading.Thread(target=self._publish)
        publisher.start()
        publisher.join()
        assert commits.wait(woken, 3600.0) is False

    def test_where_nobody_commits_nothing_is_looked_for(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given
        subscription = self._subscription_that_seldom_looks(monkeypatch, SetClock())
        subscription.poll(10, 0.3)
        # When
        with CaptureQueriesContext(connections[self.alias]) as queries:
            assert subscription.poll(10, 0.5) == []
        # Then: when it begins to wait, and when that is over
        assert len(queries) <= 2
        subscription.close()

    def _subscription_that_seldom_looks(
        self, monkeypatch: pytest.MonkeyPatch, clock: Clock = CLOCK
    ) -> Subscription:
        monkeypatch.setattr(plans, "SHORTEST_WAIT", 60.0)
        transport = DatabaseTransport("test", {"DATABASE": self.alias, "POLL_INTERVAL": 60})
        transport.clock = clock
        return transport.subscribe(["orders"], "shop")

    def _publish(self) -> None:
        self.make_transport().publish([OutgoingRecord("orders", b"a")])
        self.end_thread()
