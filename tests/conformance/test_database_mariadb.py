"""The database transport on MariaDB and on MySQL passes the suite of every transport."""

from __future__ import annotations

import subprocess
import sys
import uuid
from typing import Any
from urllib.parse import urlsplit

import pymysql
import pytest

from tests.conformance.databases import MARIADB, MYSQL
from tests.conformance.test_database_sqlite import DatabaseConformance

SIGN_IN = """
import sys
if sys.argv[3] == "without":
    sys.modules["cryptography"] = None
import pymysql
options = {"ssl_disabled": True} if sys.argv[4] == "plain" else {}
where = {"host": "127.0.0.1", "port": int(sys.argv[1])}
with pymysql.connect(**where, user=sys.argv[2], password="secret", **options) as connection:
    cursor = connection.cursor()
    cursor.execute("SHOW STATUS LIKE 'Ssl_cipher'")
    print("tls" if cursor.fetchone()[1] else "plain")
"""


@pytest.mark.mariadb
@pytest.mark.usefixtures("mariadb_alias")
class TestMariaDb(DatabaseConformance):
    alias = MARIADB


@pytest.mark.mysql
@pytest.mark.usefixtures("mysql_alias")
class TestMySql(DatabaseConformance):
    alias = MYSQL


@pytest.mark.mysql
@pytest.mark.parametrize(
    ("cryptography", "line", "answer"),
    [
        ("without", "tls", "tls"),
        ("with", "plain", "plain"),
        ("without", "plain", "'cryptography' package is required"),
    ],
)
def test_what_a_user_of_mysql_with_a_password_needs(
    mysql_server: Any, cryptography: str, line: str, answer: str
) -> None:
    """As ``CREATE USER`` makes one; docs/how-to/mariadb.md says what it asks of the driver."""
    parts, user = urlsplit(mysql_server.url), f"shop_{uuid.uuid4().hex[:12]}"
    where = {"host": parts.hostname, "port": parts.port, "password": parts.password or ""}
    with pymysql.connect(**where, user=parts.username) as connection:
        cursor = connection.cursor()
        # Given
        cursor.execute(f"CREATE USER '{user}'@'127.0.0.1' IDENTIFIED BY 'secret'")
        try:
            # When
            arguments = [str(parts.port), user, cryptography, line]
            done = subprocess.run(
                [sys.executable, "-c", SIGN_IN, *arguments], capture_output=True, text=True
            )
        finally:
            cursor.execute(f"DROP USER '{user}'@'127.0.0.1'")
    # Then
    assert answer in done.stdout + done.stderr
