"""PJQ-66: the database transport on a SQLite file passes the suite of every transport; it is what
FileStorage was: one node, persistent, no server."""

from __future__ import annotations

from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections, transaction

from kjo_django.testing.conformance import TransportConformance
from kjo_django.transports.database import DatabaseTransport
from tests.conformance.databases import SQLITE


class DatabaseConformance(TransportConformance):
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
