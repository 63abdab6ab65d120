"""The database transport on PostgreSQL passes the suite of every transport."""

from __future__ import annotations

import pytest

from tests.conformance.databases import POSTGRES
from tests.conformance.test_database_sqlite import DatabaseConformance


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres_alias")
class TestPostgres(DatabaseConformance):
    alias = POSTGRES
