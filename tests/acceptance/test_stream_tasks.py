"""Tasks of a stream on real servers, with a relay that sends and a consumer that is quicker."""

from __future__ import annotations

import time
from typing import Any

import psycopg
import pytest
from django.db import transaction

from kjo_django.patterns.streams import AbstractStreamProducer
from tests.acceptance.conftest import REAL
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.program import Program
from tests.acceptance.test_redis_streams import StreamEngine

pytestmark = [pytest.mark.redis, pytest.mark.postgres, pytest.mark.timeout(300)]

BURST = 5000


class Producer(AbstractStreamProducer[str]):
    task_display_name = "ledger entry"
    stream_key = "-"

    def __init__(self, stream: str) -> None:
        self.stream_key = stream  # type: ignore[misc]
        super().__init__()

    def build_message(self, payload: str) -> dict[str, Any]:
        return {"job": payload}

    def payload_identifier(self, payload: str) -> str:
        return payload

    def on_send_failed(self, payload: str, error: str) -> None:
        raise AssertionError(error)

    def send(self, names: list[str]) -> list[Any]:
        """Send tasks in one transaction, as a view or a command does; return their ids."""
        with transaction.atomic(using=ALIAS):
            return [self.send_task(name) for name in names]


@pytest.fixture
def streams(redis_server: Any, database_url: str, tmp_path: Any) -> Any:
    with StreamEngine(Servers(database_url, redis=redis_server.url), tmp_path) as engine:
        yield engine


@pytest.fixture(params=["streams", REAL])
def tasks(request: pytest.FixtureRequest, monkeypatch: Any) -> Engine:
    """An engine whose workers take tasks of a stream of the test's own."""
    engine: Engine = request.getfixturevalue(request.param)
    monkeypatch.setenv("KJO_TEST_STREAM", stream_of(engine))
    return engine


def stream_of(tasks: Engine) -> str:
    return tasks.topic.replace("ledger-", "tasks-")


def worker_of(tasks: Engine) -> Program:
    """Start a worker of the stream, with its relay, and wait until it may be sent tasks."""
    worker = tasks.manage("kjo_consume", stream_of(tasks), "--status-interval", "0")
    tasks.wait_until(
        lambda: bool(tasks.partitions_of(worker.pid)), f"{worker} never had a partition"
    )
    return worker


def await_all(tasks: Engine, names: list[str], timeout: float = 120) -> None:
    """Wait until all have run; once nothing comes any more, say how many are lost."""
    seen, since = -1, time.monotonic()
    deadline = time.monotonic() + timeout
    # timed loop: it gives up where nothing comes any more
    while time.monotonic() < deadline and (count := tasks.entries.count()) < len(names):
        if count != seen:
            seen, since = count, time.monotonic()
        if time.monotonic() - since > 20 and not tasks.jobs.exclude(state="completed").exists():
            break
        time.sleep(0.05)  # sleep: until the next look
    tasks.assert_each_ran_once(names)


@pytest.mark.medium("streams")
def test_a_task_runs_while_the_relay_cannot_note_that_it_was_sent(tasks: Engine) -> None:
    """It was taken for a message that bears the id of an open job of ours: acknowledged, no run."""
    # Given a task whose row is locked, as by a slow commit
    (id,) = Producer(stream_of(tasks)).send(["held"])
    with psycopg.connect(tasks.servers.database_url) as other:
        other.execute("SELECT 1 FROM kjo_job WHERE id = %s FOR UPDATE", [id])
        # When it is sent and read
        worker_of(tasks)
        # Then it runs
        tasks.wait_until(lambda: tasks.ledger() == {"held": 1}, "The task never ran")
        assert tasks.jobs.get(pk=id).state == "pending"
    tasks.wait_until(
        lambda: tasks.jobs.get(pk=id).state == "completed", "The row was never noted as sent"
    )
    tasks.assert_each_ran_once(["held"])


def test_no_task_of_a_burst_is_lost(tasks: Engine) -> None:
    # Given
    worker = worker_of(tasks)
    names = [f"task-{number}" for number in range(600)]
    # When
    Producer(stream_of(tasks)).send(names)
    # Then
    await_all(tasks, names)
    assert worker.stop() == 0, worker.log_tail()


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("run", range(10))
def test_no_task_of_5000_is_lost(tasks: Engine, run: int) -> None:
    """In natural bursts: one transaction of many tasks, then some of few."""
    worker = worker_of(tasks)
    names = [f"task-{number}" for number in range(BURST)]
    producer, sent = Producer(stream_of(tasks)), 0
    while sent < BURST:
        size = (600, 1, 25, 200, 3)[sent % 5]
        producer.send(names[sent : sent + size])
        sent += size
    await_all(tasks, names, 600)
    assert worker.stop() == 0, worker.log_tail()
