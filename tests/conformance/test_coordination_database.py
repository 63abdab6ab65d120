"""The database coordination passes the suite of every coordination, on SQLite,
PostgreSQL, MariaDB and MySQL."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import cast

import pytest
from django.db import connections, transaction
from django.utils import timezone

from kjo_django.coordination.base import FIRST_CLAIM, Claim
from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.engine.poller import Poller
from kjo_django.models import Lease, Mark
from kjo_django.runtime import current_runtime
from kjo_django.store.base import Store
from kjo_django.store.sqlite import SqliteStore
from kjo_django.testing.coordination_conformance import MINUTE, CoordinationConformance
from kjo_django.worker.duties import DutyThread, PublishListener
from tests.conformance.databases import MARIADB, MYSQL, POSTGRES, SQLITE
from tests.waiting import PATIENCE, wait_until


class DatabaseCoordinationConformance(CoordinationConformance):
    alias: str

    def make_coordination(self) -> DatabaseCoordination:
        return DatabaseCoordination({"DATABASE": self.alias})

    def end_thread(self) -> None:
        connections.close_all()

    def test_a_claim_inside_a_transaction_is_refused(
        self, coordination: DatabaseCoordination, name: str
    ) -> None:
        with transaction.atomic(using=self.alias), pytest.raises(RuntimeError, match=r"claim\(\)"):
            coordination.claim([name], "me", MINUTE)
        assert coordination.holders([name]) == {}

    def test_a_call_is_heard_when_its_transaction_commits(
        self, coordination: DatabaseCoordination, name: str
    ) -> None:
        listener = coordination.listen([name])
        with transaction.atomic(using=self.alias):
            coordination.notify(name)
            assert listener.wait(0.2) == set()
        self.call_until(listener, name, {name})
        listener.close()

    def test_pruning_deletes_what_expired_and_keeps_fresh_counts(
        self, coordination: DatabaseCoordination, name: str
    ) -> None:
        coordination.claim([f"{name}:{n}" for n in ("old", "ended", "live")], "me", MINUTE)
        coordination.set_marks({f"{name}:old": "x", f"{name}:live": "y"}, MINUTE)
        now = timezone.now()
        for age, which in ((timedelta(days=2), "old"), (timedelta(hours=1), "ended")):
            Lease.objects.using(self.alias).filter(name=f"{name}:{which}").update(
                expires_at=now - age
            )
        Mark.objects.using(self.alias).filter(name=f"{name}:old").update(expires_at=now)

        assert coordination.prune() == 2

        left = Lease.objects.using(self.alias).order_by("name").values_list("name", flat=True)
        assert list(left) == [f"{name}:ended", f"{name}:live"]
        assert Mark.objects.using(self.alias).get().name == f"{name}:live"

    def test_a_released_lease_leaves_no_row(
        self, coordination: DatabaseCoordination, name: str
    ) -> None:
        coordination.claim([name], "me", MINUTE)
        coordination.release([name], "me")
        assert not Lease.objects.using(self.alias).exists()

    def test_wake_ups_reach_other_processes_on_postgresql_only(
        self, coordination: DatabaseCoordination
    ) -> None:
        assert coordination.supports_wake_ups is (self.alias == POSTGRES)


@pytest.mark.usefixtures("sqlite_alias")
class TestSqlite(DatabaseCoordinationConformance):
    alias = SQLITE

    @pytest.mark.parametrize("call", ["claim", "renew"])
    def test_a_lease_lasts_from_when_it_was_taken_however_long_that_waited(
        self, coordination: DatabaseCoordination, name: str, call: str
    ) -> None:
        # Given
        answers: list[Claim | bool] = []
        if call == "renew":
            coordination.claim([name], "me", MINUTE)

        def claim() -> None:
            answers.extend(getattr(coordination, call)([name], "me", MINUTE))
            self.end_thread()

        claimer = threading.Thread(target=claim)
        # When
        with transaction.atomic(using=self.alias):
            Mark.objects.using(self.alias).create(name=name, value="", expires_at=timezone.now())
            claimer.start()
            claimer.join(0.3)
            assert not answers, "somebody else writes"
            written_at = timezone.now()
        claimer.join(PATIENCE)
        # Then
        assert answers == [FIRST_CLAIM if call == "claim" else True]
        assert Lease.objects.using(self.alias).get().expires_at >= written_at + MINUTE

    def test_names_nobody_could_have_meant_are_leased_one_by_one(
        self, coordination: DatabaseCoordination, name: str
    ) -> None:
        odd = [f"{name}\0a", f"{name}\0b", f"{name}'%s\"", name]
        assert coordination.claim(odd, "me", MINUTE) == [FIRST_CLAIM] * 4
        coordination.release(odd[:1], "me")
        assert coordination.claim(odd, "you", MINUTE) == [FIRST_CLAIM] + [Claim(False, 1)] * 3


@pytest.mark.large
@pytest.mark.usefixtures("sqlite_alias", "_without_returning")
class TestOldSqlite(DatabaseCoordinationConformance):
    alias = SQLITE

    @pytest.fixture
    def _without_returning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(SqliteStore, "claim_leases", Store.claim_leases)


@pytest.mark.mariadb
@pytest.mark.usefixtures("mariadb_alias")
class TestMariaDb(DatabaseCoordinationConformance):
    alias = MARIADB


@pytest.mark.mysql
@pytest.mark.usefixtures("mysql_alias")
class TestMySql(DatabaseCoordinationConformance):
    alias = MYSQL


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres_alias")
class TestPostgres(DatabaseCoordinationConformance):
    alias = POSTGRES

    def test_a_listener_leaves_nothing_prepared_in_its_session(
        self, coordination: DatabaseCoordination
    ) -> None:
        """A pooler in transaction mode gives the next statement another session."""
        from kjo_django.coordination.database.postgres_listener import PostgresListener

        listener = coordination.listen(["a"])
        assert isinstance(listener, PostgresListener)
        # When it has asked for a sign of life for an hour
        for _ in range(60):
            listener._alive_at = 0.0
            listener.wait(0.0)
        # Then
        session = listener._connection
        assert session is not None
        assert session.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() == (0,)
        listener.close()

    def test_pollers_look_more_often_while_the_listener_has_no_session(
        self, coordination: DatabaseCoordination, name: str
    ) -> None:
        """Else an idle consumer would wait for a call that cannot come."""
        # Given
        told: list[bool] = []
        poller = SimpleNamespace(
            topics=[name], needs_wakeup=True, wake=lambda: None, rely_on_wake_ups=told.append
        )
        runtime = replace(current_runtime(), coordination=coordination)
        listener = PublishListener(runtime, [cast("Poller", poller)])
        thread = DutyThread(runtime, "listening", [listener])
        thread.start()
        wait_until(lambda: told == [True])
        # When
        wait_until(self.listening_sessions_ended)
        # Then
        wait_until(lambda: told[:3] == [True, False, True])
        thread.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()

    def listening_sessions_ended(self) -> int:
        """End the sessions that listen; return how many there were."""
        with connections[self.alias].cursor() as cursor:
            cursor.execute(
                "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity"
                " WHERE datname = current_database() AND query LIKE 'LISTEN%'"
            )
            (ended,) = cursor.fetchone()
        return int(ended)

    def test_a_listener_whose_session_was_ended_hears_again(
        self, coordination: DatabaseCoordination, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        # Given
        channels = {f"{name}:a", f"{name}:b"}
        listener = coordination.listen(sorted(channels))
        assert listener.wait(0.05) == set()
        # When
        assert self.listening_sessions_ended()
        # Then
        assert listener.wait(PATIENCE) == channels, "nobody knows what was missed"
        assert "Lost the listening connection" in caplog.text
        coordination.notify(f"{name}:a")
        self.call_until(listener, f"{name}:a", {f"{name}:a"})
        listener.close()
