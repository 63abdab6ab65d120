"""The database coordination passes the suite of every coordination, on SQLite and PostgreSQL."""

from __future__ import annotations

import pytest
from django.db import connections

from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.testing.coordination_conformance import CoordinationConformance
from tests.conformance.databases import POSTGRES, SQLITE


class DatabaseCoordinationConformance(CoordinationConformance):
    alias: str

    def make_coordination(self) -> DatabaseCoordination:
        return DatabaseCoordination({"DATABASE": self.alias})

    def end_thread(self) -> None:
        connections.close_all()


@pytest.mark.usefixtures("sqlite_alias")
class TestSqlite(DatabaseCoordinationConformance):
    alias = SQLITE


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres_alias")
class TestPostgres(DatabaseCoordinationConformance):
    alias = POSTGRES
