"""What workers do for one another: rescue, and the sessions of the dead."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import psycopg
import pytest
from django.db import connections
from django.test import override_settings
from django.utils import timezone

from kjo_django import Queue
from kjo_django.coordination.base import alive_name
from kjo_django.engine.handler.running import dump_progress
from kjo_django.enqueue.job_status import load_progress
from kjo_django.ids import uuid7_floor
from kjo_django.runtime import current_runtime, get_coordination
from kjo_django.worker.duties import DutyThread, Rescuer
from kjo_django.worker.sessions import end_sessions_of_dead_workers
from tests.factories import JobFactory, WorkerFactory
from tests.queueing.conftest import QUICK
from tests.waiting import PATIENCE, wait_until


@pytest.mark.promise("no-stuck-state")
def test_a_worker_rescues_jobs_whose_message_is_gone(queue: Queue, settings: Any) -> None:
    """PJQ-10, PJQ-70, PJQ-F8, PJQ-F15: a periodic scan, wherever the message was lost."""
    stalled: list[Any] = []
    undo = queue.on("stalled", stalled.append)
    settings.KJO = {**settings.KJO, "RESCUE_AFTER": 0.6}
    # Given a job that was queued long ago, and no message
    moment = timezone.now() - timedelta(hours=1)
    JobFactory(
        id=uuid.UUID(int=uuid7_floor(moment).int + 1),
        queue=queue.name,
        handler=queue.job_type,
        unique_id="lost",
        payload=b"7",
        state="queued",
        queued_at=moment,
        available_at=moment,
        topic=queue.name,
        partition=0,
        offset=0,
    )
    # When two workers run
    queue.execute(lambda job: job.payload)
    queue.start()
    # Then
    assert queue.wait("lost") == 7
    undo()
    assert stalled == ["lost"]


@contextmanager
def running(thread: DutyThread) -> Iterator[None]:
    """Have a thread run: one that outlives its test would work on the tables of the next ones."""
    thread.start()
    try:
        yield
    finally:
        thread.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


def test_one_rescuer_works_at_a_time(file_queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    """PJQ-75, O-04: by lease; the next takes over when the first stops."""
    # Given leases that a busy machine does not let expire: of 0.9 s, extended every 0.3 s
    settings_of = {"RESCUE_AFTER": 0.9}
    working: list[str] = []
    monkeypatch.setattr(
        "kjo_django.worker.duties.rescue",
        lambda: working.append(threading.current_thread().name),
    )
    with override_settings(KJO={**QUICK, **settings_of}):
        runtime = current_runtime()
        first, second = (
            DutyThread(runtime, name, [Rescuer(runtime, name)]) for name in ("first", "second")
        )
        # When both work
        with running(first):
            wait_until(lambda: working)
            with running(second):
                wait_until(lambda: len(working) > 4)
                # Then only the first does
                assert set(working) == {"first"}
                # And when it stops, the other
                first.stop()
                first.join(PATIENCE)
                working.clear()
                wait_until(lambda: working)
                assert set(working) == {"second"}
        wait_until(lambda: not get_coordination().holders(["RESCUE"]))


@pytest.fixture
def frozen(postgres: None, settings: Any) -> Iterator[Callable[[str], psycopg.Connection[Any]]]:
    """Open a session as a worker's lane does, in the middle of a transaction."""
    settings.KJO = QUICK
    opened: list[psycopg.Connection[Any]] = []

    def open_session(token: str) -> psycopg.Connection[Any]:
        parameters = connections["default"].get_connection_params()
        for name in ("context", "cursor_factory", "prepare_threshold"):
            parameters.pop(name, None)
        session = psycopg.connect(**{**parameters, "application_name": f"kjo-{token} shop"})
        session.execute("SELECT 1")
        opened.append(session)
        return session

    yield open_session
    for session in opened:
        session.close()


def is_ended(session: psycopg.Connection[Any]) -> bool:
    try:
        session.execute("SELECT 1")
    except psycopg.OperationalError:
        return True
    return False


@pytest.mark.postgres
def test_only_sessions_of_proven_dead_workers_are_ended(
    frozen: Callable[[str], psycopg.Connection[Any]],
) -> None:
    """PJQ-F9, PJQ-F10: dead is who neither the database nor coordination has heard of."""
    ttl = timedelta(seconds=0.2)
    living, quiet, dead = (WorkerFactory(heartbeat_at=timezone.now()) for _ in range(3))
    for worker, hours in ((living, 1), (quiet, -1), (dead, -1)):
        worker.heartbeat_at += timedelta(hours=hours)
        worker.save()
    get_coordination().claim([alive_name(quiet.pk.hex)], quiet.pk.hex, timedelta(minutes=1))
    sessions = {worker.pk: frozen(worker.pk.hex) for worker in (living, quiet, dead)}
    unknown = frozen("not-a-token")
    # When nothing has stood still for long enough, nothing is ended
    assert end_sessions_of_dead_workers(current_runtime(), timedelta(minutes=5)) == 0
    wait_until(lambda: end_sessions_of_dead_workers(current_runtime(), ttl) == 1)
    # Then
    assert is_ended(sessions[dead.pk])
    assert not is_ended(sessions[living.pk])
    assert not is_ended(sessions[quiet.pk])
    assert not is_ended(unknown)
    assert end_sessions_of_dead_workers(current_runtime(), ttl) == 0


@pytest.mark.postgres
def test_a_worker_of_another_project_is_nobodys_to_end(
    frozen: Callable[[str], psycopg.Connection[Any]],
) -> None:
    """Two projects share a database, each with a schema of its own: neither has a row of the
    other's workers, nor hears their signs of life, and a handler may compute for minutes."""
    # Given
    WorkerFactory(heartbeat_at=timezone.now())
    theirs = frozen(uuid.uuid4().hex)
    ours = WorkerFactory(heartbeat_at=timezone.now() - timedelta(hours=1))
    dead = frozen(ours.pk.hex)
    # When
    wait_until(lambda: end_sessions_of_dead_workers(current_runtime(), timedelta(seconds=0.2)) == 1)
    # Then
    assert is_ended(dead)
    assert not is_ended(theirs)


@pytest.mark.postgres
@pytest.mark.parametrize("engine", ["postgres"], indirect=True)
def test_sessions_of_lanes_bear_their_workers_name(queue: Queue) -> None:
    names: list[str] = []

    def handle(job: Any) -> None:
        with connections["default"].cursor() as cursor:
            cursor.execute("SELECT current_setting('application_name')")
            names.append(cursor.fetchone()[0])

    queue.execute(handle)
    queue.start()
    queue.enqueue_and_wait("a", 1)
    token = queue._worker._worker.leases.token  # type: ignore[union-attr]
    assert names[0].startswith(f"kjo-{token}")


@pytest.mark.parametrize(
    ("percent", "text"),
    [(None, ""), (33.3, "a third"), (100, '\\"' * 500), (0, "\x00\n" * 300), (1, "✓" * 999)],
)
def test_progress_fits_a_mark(percent: Any, text: str) -> None:
    value = dump_progress(percent, text)
    assert len(value) <= 255
    loaded = load_progress(value)
    assert loaded is not None
    assert loaded.percent == percent
    assert text.replace("\x00", "").startswith(loaded.text)
    assert load_progress("nonsense") is None
    assert load_progress("7") is None
