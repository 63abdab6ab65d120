"""The database transport on MariaDB passes the suite of every transport."""

from __future__ import annotations

import pytest

from tests.conformance.databases import MARIADB
from tests.conformance.test_database_sqlite import DatabaseConformance


@pytest.mark.mariadb
@pytest.mark.usefixtures("mariadb_alias")
class TestMariaDb(DatabaseConformance):
    alias = MARIADB
