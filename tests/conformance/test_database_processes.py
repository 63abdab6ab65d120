"""The database transport across processes: sharing, dying, and a server that restarts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from kjo_django.coordination.database import DatabaseCoordination
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord
from kjo_django.transports.database import DatabaseTransport
from tests.conformance.databases import added_database
from tests.databases import migrate
from tests.services import PostgresServer
from tests.services.fixtures import require
from tests.services.mariadb import MariaDbServer
from tests.services.mysql import MySqlServer
from tests.settings import database as settings_of
from tests.waiting import PATIENCE, wait_until


@pytest.fixture
def start(alias: str) -> Iterator[Any]:
    """Start a process on the database; those still running are killed after the test."""
    keys = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
    settings = {key: str(connections[alias].settings_dict[key]) for key in keys}
    started: list[subprocess.Popen[str]] = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "tests.conformance.database_process", json.dumps(settings)]
        process = subprocess.Popen(
            [*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.large
def test_two_processes_drain_what_a_third_publishes(alias: str, start: Any) -> None:
    """Each record once, and each key in order, whoever got it (promise 1; DESIGN 5)."""
    consumers = [start("consume", "shared", "group", "3") for _ in "ab"]
    for consumer in consumers:
        assert consumer.stdout.readline() == "subscribed\n", consumer.communicate()[1]
    subscribed = DatabaseTransport("test", {"DATABASE": alias})
    # What is published before a group is known is adopted by it a moment later, out of turn.
    groups = TransportSubscription.objects.using(alias).filter(topic="shared")
    eventually(groups.exists, 30, "the group is known")
    publisher = start("publish", "shared", "500")

    lines: list[tuple[int, str, int, int]] = []
    for number, consumer in enumerate(consumers):
        output, errors = consumer.communicate(timeout=120)
        assert consumer.returncode == 0, errors
        for line in output.splitlines():
            at, key, value = line.split()
            lines.append((int(at), key, int(value), number))
    _, errors = publisher.communicate(timeout=60)
    assert publisher.returncode == 0, errors

    assert sorted(value for _, _, value, _ in lines) == list(range(500)), "lost or repeated"
    by_key: dict[str, list[int]] = defaultdict(list)
    for _, key, value, _ in sorted(lines):
        by_key[key].append(value)
    assert all(found == sorted(found) for found in by_key.values()), "a key out of order"
    assert {number for *_, number in lines} == {0, 1}, "one process did everything"
    assert sum(subscribed.lag(["shared"], "group").values()) == 0


@pytest.mark.promise("lease-expires")
def test_rows_of_a_killed_worker_come_back(alias: str, start: Any) -> None:
    """KJO-69 for records: the lease ends, nobody cleans up, the order stays."""
    transport = DatabaseTransport("test", {"DATABASE": alias})
    contents = [b"%d" % number for number in range(20)]
    transport.publish([OutgoingRecord("t", each, b"k") for each in contents])
    worker = start("hold", "t", "group")
    assert worker.stdout.readline() == "held 20\n"
    claimed = time.monotonic()
    os.kill(worker.pid, signal.SIGKILL)

    subscription = transport.subscribe(["t"], "group", lease=timedelta(seconds=30))
    assert subscription.poll(100, 0.3) == [], "taken from a lease that was still live"
    records = wait_until(lambda: subscription.poll(100, 1), "what a dead consumer held")
    assert [record.value for record in records] == contents
    assert time.monotonic() - claimed > 1
    subscription.close()


POSTGRES = pytest.param(PostgresServer, marks=pytest.mark.postgres, id="postgres")
MARIADB = pytest.param(MariaDbServer, marks=pytest.mark.mariadb, id="mariadb")
MYSQL = pytest.param(MySqlServer, marks=pytest.mark.mysql, id="mysql")


@pytest.mark.large
class TestRestarts:
    """A server of its own, to be stopped under its clients."""

    @pytest.fixture(params=[POSTGRES])
    def server(
        self, request: pytest.FixtureRequest, django_db_setup: None, django_db_blocker: Any
    ) -> Iterator[PostgresServer | MariaDbServer]:
        require(**{request.param.name: True})
        with (
            request.param() as server,
            django_db_blocker.unblock(),
            added_database("kjo_restarting", settings_of(server.url)),
        ):
            migrate(settings_of(server.url))
            yield server

    @pytest.mark.parametrize("server", [POSTGRES, MARIADB, MYSQL], indirect=True)
    def test_a_subscription_survives_a_restart(
        self, server: PostgresServer | MariaDbServer
    ) -> None:
        transport = DatabaseTransport("test", {"DATABASE": "kjo_restarting"})
        subscription = transport.subscribe(["t"], "group")
        transport.publish([OutgoingRecord("t", b"1", b"k"), OutgoingRecord("t", b"2", b"k")])
        (first, _) = subscription.poll(10, 5)
        subscription.acknowledge([first])

        server.stop()
        assert subscription.poll(10, 0.5) == []
        assert subscription.last_error
        subscription.flush()  # nothing raised, nothing forgotten
        with pytest.raises(PublishError, match="kjo_restarting"):
            transport.publish([OutgoingRecord("t", b"3")])
        with pytest.raises(PublishError, match="kjo_restarting"):
            transport.probe(5)
        server.start()

        eventually(lambda: subscription.poll(10, 0.2) == [] and not subscription.last_error)
        rows = TransportMessage.objects.using("kjo_restarting")
        assert [bytes(row.value) for row in rows.all()] == [b"2"]
        transport.publish([OutgoingRecord("t", b"4", b"k")])
        assert [record.value for record in subscription.poll(10, 5)] == [b"4"]
        subscription.close()

    def test_a_worker_starts_before_its_database(self, server: PostgresServer) -> None:
        transport = DatabaseTransport("test", {"DATABASE": "kjo_restarting"})
        server.stop()
        subscription = transport.subscribe(["t"], "group")
        assert subscription.last_error
        server.start()

        eventually(lambda: subscription.poll(10, 0.2) == [] and not subscription.last_error)
        transport.publish([OutgoingRecord("t", b"1")])
        assert [record.value for record in subscription.poll(10, 5)] == [b"1"]
        subscription.close()

    def test_a_listener_hears_again_after_a_restart(self, server: PostgresServer) -> None:
        coordination = DatabaseCoordination({"DATABASE": "kjo_restarting"})
        listener = coordination.listen(["c"])
        coordination.notify("c")
        assert listener.wait(PATIENCE) == {"c"}

        server.restart()
        # What was called meanwhile is unknown, so everything counts as called.
        assert listener.wait(PATIENCE) == {"c"}
        connections["kjo_restarting"].close()
        coordination.notify("c")
        assert listener.wait(PATIENCE) == {"c"}
        assert listener.wait(0.1) == set()
        listener.close()

    def test_without_its_server_everything_says_so(self, server: PostgresServer) -> None:
        coordination = DatabaseCoordination({"DATABASE": "kjo_restarting"})
        listener = coordination.listen(["c"])
        server.stop()
        for call in (
            lambda: coordination.claim(["n"], "me", timedelta(1)),
            lambda: coordination.get_marks(["n"]),
            lambda: coordination.notify("c"),
            lambda: coordination.listen(["c"]),
            lambda: coordination.probe(5),
        ):
            with pytest.raises(CoordinationError, match=r"kjo_restarting.*KJO\['COORDINATION'\]"):
                call()
        started = time.monotonic()
        assert listener.wait(0.5) == set()
        assert time.monotonic() - started > 0.4
        listener.close()
        server.start()
