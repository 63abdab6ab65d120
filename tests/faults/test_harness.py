"""The matrix itself: what it simulates is what happens, and what it records is all there is."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from django.db import connection
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.ids import uuid7
from kjo_django.runtime import get_transport
from kjo_django.transports.base import OutgoingRecord, Subscription, Transport
from tests.databases import led_to, sqlite_settings
from tests.faults.boundary import Boundary, Died, Fault, within
from tests.faults.clock import Clock
from tests.faults.conftest import ENGINES
from tests.faults.killed import left_behind
from tests.faults.scenarios import SCENARIOS, Scenario
from tests.faults.test_matrix import SEED
from tests.faults.world import FACTS, World, _be_impatient, run
from tests.ledger.models import Entry
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
TIME_STANDS = True
"""On a machine that stalls for a second, a retry that waits for one would be due by itself, and
every later call have another number."""
BY_NAME = {each.name: each for each in SCENARIOS}


@pytest.mark.parametrize("world", ["sqlite-database"], indirect=True)
@pytest.mark.parametrize("name", ["atomic-mixed", "outside-retried"])
def test_a_simulated_death_leaves_behind_what_a_real_one_does(
    name: str, world: World, sqlite_template: Path, tmp_path: Path
) -> None:
    # Given one of the scenario's calls
    scenario = BY_NAME[name]
    world.queues = scenario.queues
    for _ in range(3):
        assert run(world, scenario.act, None, -1) == []
        at = random.Random(SEED).randrange(len(world.recorded))
        print(f"call {at}, {world.recorded[at]}, seed {SEED}")
        # When a process dies after it, really
        path = tmp_path / "killed.sqlite3"
        shutil.copyfile(sqlite_template, path)
        command = [sys.executable, "-m", "tests.faults.killed", name, str(at), "database"]
        environment = {**os.environ, "DATABASE_URL": f"sqlite:///{path}"}
        killed = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=150, capture_output=True, text=True
        )
        assert killed.returncode == -9, killed.stderr
        # And when it is simulated
        process = world.begin(Fault.DIES_AFTER, at)
        with pytest.raises(Died):
            scenario.act(world, process)
        process.bury()
        simulated = left_behind()
        world.end()
        # A thread beside the steps renews leases in real time: on a busy machine that is a call
        # more, and the call of this number another one.
        calls = process.boundary.calls
        if killed.stdout.splitlines() == calls:
            break
    assert killed.stdout.splitlines() == calls
    # Then
    with led_to(sqlite_settings(path)):
        assert simulated == left_behind()


@pytest.mark.parametrize("world", ["sqlite-memory"], indirect=True)
def test_every_call_of_a_scenario_is_recorded_alike_each_time(world: World) -> None:
    """A case is named by its number: the same one must be struck next time."""
    scenario = BY_NAME["atomic-mixed"]
    world.queues = scenario.queues
    recorded = []
    for _ in range(2):
        assert run(world, scenario.act, None, -1) == []
        recorded.append(world.recorded)
    assert recorded[0] == recorded[1]
    kinds = {call.partition(".")[0] for call in recorded[0]}
    assert {Transport.__name__.lower(), Subscription.__name__.lower(), "coordination"} <= kinds
    assert {"commit", "BEGIN"} <= set(recorded[0])


@pytest.mark.parametrize("world", ["sqlite-memory"], indirect=True)
def test_a_machine_that_is_slow_makes_the_same_calls(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second that passes while a job waits for its retry must not make it due."""
    # Given
    scenario = BY_NAME["outside-retried"]
    world.queues = scenario.queues
    assert run(world, scenario.act, None, -1) == []
    recorded = world.recorded
    # When the machine stalls after the first failure is recorded
    cross, sleep, failures = Boundary.cross, time.sleep, []

    def stalling(boundary: Boundary, name: str, *arguments: Any) -> Any:
        if name == "INSERT kjo_job_failure" and not failures:
            failures.append(name)
        elif name == "commit" and len(failures) == 1:
            failures.append(name)
            with within(None):
                sleep(1.5)
        return cross(boundary, name, *arguments)

    monkeypatch.setattr(Boundary, "cross", stalling)
    assert run(world, scenario.act, None, -1) == []
    # Then
    assert len(failures) == 2
    assert world.recorded == recorded


@pytest.mark.parametrize("world", ENGINES, indirect=True)
@pytest.mark.parametrize("name", ["atomic-mixed", "outside-retried"])
def test_a_death_that_is_left_out_leaves_behind_what_the_one_in_its_place_does(
    name: str, world: World
) -> None:
    # Given
    scenario = BY_NAME[name]
    world.queues = scenario.queues
    assert run(world, scenario.act, None, -1, marks=True) == []
    same = world.same_deaths()
    assert same
    at = random.Random(SEED).choice(list(same))
    print(f"calls {at} and {same[at]}, seed {SEED}")
    # When
    found = [after_death(world, scenario, number) for number in (at, same[at])]
    # Then
    assert found[0] == found[1]


def after_death(world: World, scenario: Scenario, at: int) -> object:
    process = world.begin(Fault.DIES_AFTER, at)
    with pytest.raises(Died):
        scenario.act(world, process)
    process.bury()
    facts = [getattr(world, name) for name in FACTS if name != "announced"]  # ids differ
    ends = Counter(signal for signal, _ in world.announced.elements())
    queues = [get_settings().queue(name) for name in world.queues]
    waiting = [get_transport(q.transport).lag([q.topic], q.consumer_group) for q in queues]
    found = left_behind(), facts, ends, waiting
    world.end()
    return found


@pytest.mark.parametrize("world", ["sqlite-database"], indirect=True)
def test_a_process_that_died_with_rows_unread_holds_no_lock(world: World) -> None:
    """SQLite's own close leaves it locked for as long as somebody keeps the cursor."""
    # Given
    process = world.begin()
    with process.unwatched():
        cursor = connection.cursor()
        cursor.execute("BEGIN IMMEDIATE")
        columns = "INSERT INTO ledger_entry (job, note, created_at)"
        cursor.execute(f"{columns} VALUES ('lost', '', '2026-01-01') RETURNING id")
    # When
    process.bury()
    # Then
    _be_impatient()
    Entry.objects.create(job="another's")
    assert [entry.job for entry in Entry.objects.all()] == ["another's"]
    world.end()


@pytest.mark.postgres
@pytest.mark.parametrize("world", ["postgres-memory"], indirect=True)
def test_a_session_that_goes_on_has_forgotten_whose_it_was(world: World) -> None:
    """PostgreSQL's sessions are kept for the next connection: whoever had one has lost it."""
    # Given a process in the midst of a transaction, with all that a session may hold
    process = world.begin()
    with process.unwatched():
        cursor = connection.cursor()
        cursor.execute("SELECT pg_backend_pid()")
        (session,) = cursor.fetchone()
        cursor.execute("SELECT pg_advisory_lock(1), set_config('work_mem', '123kB', false)")
        cursor.execute("LISTEN anything")
        cursor.execute("BEGIN")
        Entry.objects.create(job="lost")
    # When
    process.bury()
    # Then nobody holds or finds anything, and the next connection has the session
    with connection.cursor() as next_one:
        next_one.execute("SELECT pg_backend_pid(), current_setting('work_mem')")
        assert next_one.fetchone() == (session, "4MB")
        next_one.execute("SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'")
        assert next_one.fetchone() == (0,)
        next_one.execute("SELECT count(*) FROM pg_listening_channels()")
        assert next_one.fetchone() == (0,)
    assert not Entry.objects.exists()
    with pytest.raises(psycopg.OperationalError):
        cursor.cursor.execute("SELECT 1")
    world.end()


@pytest.mark.parametrize("world", ["sqlite-database"], indirect=True)
@pytest.mark.parametrize("fetches", [False, True])
def test_a_death_waits_for_the_call_that_another_thread_is_in(
    world: World, *, fetches: bool
) -> None:
    """SQLite's library crashes when a session is closed in the midst of a statement, or while the
    next row is fetched, which is when it is made."""
    # Given a thread of the process within a statement
    process = world.begin()
    entered, goes_on = threading.Event(), threading.Event()

    def wait() -> int:
        entered.set()
        return int(goes_on.wait(PATIENCE))

    def ask() -> None:
        with within(process.boundary), connection.cursor() as cursor:
            connection.connection.create_function("wait", 0, wait)
            if fetches:
                cursor.execute("SELECT 1 UNION ALL SELECT 2 UNION ALL SELECT wait()")
                cursor.fetchall()
            else:
                cursor.execute("SELECT wait()")

    with ThreadPoolExecutor(2) as threads:
        asked = threads.submit(ask)
        assert entered.wait(PATIENCE)
        # When
        died = threads.submit(process.boundary.die)
        # Then
        assert not wait_for([died], 0.1).done
        goes_on.set()
        asked.result(PATIENCE)
        died.result(PATIENCE)
    process.bury()
    world.end()


@pytest.mark.parametrize("world", ["sqlite-database", "sqlite-memory"], indirect=True)
def test_a_message_that_waits_for_its_time_is_not_at_its_end(world: World) -> None:
    """No lag tells of it: a redelivery was left where it was, and passed for a lost message."""
    # Given
    world.queues = BY_NAME["kdlq-retried"].queues
    world.begin()
    assert world.is_done()
    # When
    topic = get_settings().queue(world.queues[0]).topic
    later = timezone.now() + timedelta(seconds=5)
    get_transport().publish([OutgoingRecord(topic, b"later", available_at=later)])
    # Then
    assert not world.lag()
    assert not world.is_done()
    world.end()


def test_ids_made_after_a_case_are_of_their_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given an id made while the clock of a case stood two days ahead
    with monkeypatch.context() as patched:
        clock = Clock(stands=True)
        clock.install(patched)
        clock.advance(2 * 86_400)
        ahead = uuid7()
    # Then
    assert uuid7() < ahead
