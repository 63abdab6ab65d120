"""The database transport on PostgreSQL passes the suite of every transport."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest
from django.db import connections

from kjo_django.exceptions import PublishError
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.database import DatabaseTransport, insertion
from tests.conformance.databases import POSTGRES
from tests.conformance.test_database_sqlite import DatabaseConformance

MANY = [OutgoingRecord("returns", b"%d" % number) for number in range(50)]


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres_alias")
class TestPostgres(DatabaseConformance):
    alias = POSTGRES

    def test_a_session_that_ends_within_a_copy_leaves_no_row(
        self, publisher: DatabaseTransport, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Given
        connection, copied = connections[self.alias], []
        compose = insertion._copied

        def end_session(row: Any) -> Any:
            copied.append(row)
            if len(copied) == 30:
                pid = connection.connection.info.backend_pid
                with psycopg.connect(connection.connection.info.dsn, autocommit=True) as other:
                    other.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            return compose(row)

        monkeypatch.setattr(insertion, "_copied", end_session)
        # When
        with pytest.raises(PublishError, match="refused the records"):
            publisher.publish(MANY)
        # Then
        assert self.rows() == []
        publisher.publish(MANY)
        assert len(self.rows()) == 50

    def test_a_role_that_may_only_insert_publishes_many_without_their_offsets(
        self, publisher: DatabaseTransport
    ) -> None:
        with connections[self.alias].cursor() as cursor:
            # Given
            cursor.execute(
                "CREATE ROLE kjo_inserts; GRANT INSERT, SELECT ON kjo_transport_message, "
                "kjo_transport_subscription TO kjo_inserts; SET ROLE kjo_inserts"
            )
            try:
                # When
                answers = publisher.publish(MANY)
            finally:
                cursor.execute("RESET ROLE; DROP OWNED BY kjo_inserts; DROP ROLE kjo_inserts")
        # Then
        assert {(answer.error, answer.offset) for answer in answers} == {(None, None)}
        assert [bytes(row.value or b"") for row in self.rows()] == [one.value for one in MANY]
