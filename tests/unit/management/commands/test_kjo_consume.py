"""``kjo_consume``: what is refused before anything runs, and what is left as the project has it."""

from __future__ import annotations

import gc
import io
import os
import signal
import sys

import pytest
from django.core.management import CommandError, call_command
from django.db import connections

from kjo_django.management.commands.kjo_consume import Command
from kjo_django.worker import Worker, report, supervisor
from tests.unit.deliveries import KJO


@pytest.fixture(autouse=True)
def _embedded(settings):
    settings.KJO = KJO


@pytest.fixture
def _never_run(monkeypatch):
    monkeypatch.setattr(Worker, "run", lambda self, *_: pytest.fail("a worker ran"))
    monkeypatch.setattr(supervisor.os, "fork", lambda: pytest.fail("it forked"))


def refusal(*arguments: str) -> CommandError:
    with pytest.raises(CommandError) as raised:
        call_command("kjo_consume", *arguments)
    return raised.value


@pytest.mark.usefixtures("_never_run")
@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_misspelt_queue_is_wrong_usage_and_not_a_child_that_dies_for_ever(processes):
    error = refusal("ledgr", "--processes", processes)
    assert error.returncode == 2
    assert "No queue is named 'ledgr'" in str(error)
    assert "Did you mean 'ledger'?" in str(error)


@pytest.mark.usefixtures("_never_run")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["ledgr=4"], "No queue is named 'ledgr'"),
        (["ledger=0"], "'ledger=0': the weight of a queue must be a whole number from 1 to 1,000"),
        (["ledger=-1"], "'ledger=-1': the weight of a queue must be a whole number from 1 to "),
        (["ledger=1.5"], "'ledger=1.5': the weight of a queue must be a whole number from 1 to "),
        (["ledger="], "'ledger=': the weight of a queue must be a whole number from 1 to 1,000"),
        (["ledger=1001"], "'ledger=1001': the weight of a queue must be a whole number from 1 to "),
        (["ledger=2", "ledger"], "The queue 'ledger' is named twice."),
    ],
)
def test_a_weight_that_means_nothing_is_wrong_usage(given, says):
    error = refusal(*given)
    assert error.returncode == 2
    assert says in str(error)


def test_weights_are_those_of_the_worker(settings, monkeypatch):
    # Given a queue whose name looks as if it had a weight
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "bulk": {}, "a=2": {}}}
    seen = []

    def run(self, until=None, begin=None):
        seen.append(([queue.name for queue in self.queues], dict(self.scheduler._weights)))
        return 0

    monkeypatch.setattr(Worker, "run", run)
    # When
    call_command("kjo_consume", "ledger=4", "bulk", "a=2")
    # Then
    assert seen == [(["ledger", "bulk", "a=2"], {"ledger": 4})]


@pytest.mark.usefixtures("_never_run")
def test_a_topic_of_others_is_not_consumed_by_mistake(settings):
    """Their messages, which nobody here handles, would become dead letters."""
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "theirs": {"consume": False}}}
    error = refusal("ledger", "theirs")
    assert error.returncode == 2
    assert "KJO['QUEUES']['theirs'] has consume=False" in str(error)


@pytest.mark.usefixtures("_never_run")
def test_settings_that_are_wrong_are_named_without_a_traceback(settings):
    settings.KJO = {**KJO, "CONCURRENCY": "many"}
    assert "KJO['CONCURRENCY'] must be a whole number" in str(refusal())


@pytest.mark.usefixtures("_never_run")
def test_a_heartbeat_file_nobody_can_write_is_refused_at_once(tmp_path):
    error = refusal("--heartbeat-file", str(tmp_path / "missing" / "alive"))
    assert error.returncode == 2
    assert "--heartbeat-file" in str(error)
    assert "No such file or directory" in str(error)


@pytest.mark.usefixtures("_never_run")
def test_processes_are_pinned_only_where_there_are_several_and_the_platform_can(monkeypatch):
    error = refusal("--pin")
    assert error.returncode == 2
    assert "--pin goes with --processes above 1" in str(error)
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    error = refusal("--pin", "--processes", "2")
    assert error.returncode == 2
    assert f"--pin does not work on {sys.platform}" in str(error)


@pytest.mark.usefixtures("_never_run")
@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--concurrency", "0", "'0' is not a whole number above 0"),
        ("--processes", "two", "'two' is not a whole number above 0"),
        ("--status-interval", "-5", "'-5' is not a number of seconds"),
        ("--status-interval", "nan", "'nan' is not a number of seconds"),
    ],
)
def test_numbers_that_are_none_are_said_to_be(option, value, words):
    assert words in str(refusal(f"{option}={value}"))


def test_what_the_settings_forbid_is_told_without_a_traceback(settings, monkeypatch):
    # Given a transport nobody can make, and system checks that were skipped
    settings.KJO = {**KJO, "TRANSPORTS": {"default": {"BACKEND": "no.such"}}}
    # Then
    assert "KJO['TRANSPORTS']['default']['BACKEND']" in str(refusal())


def test_a_projects_own_pace_of_the_collector_is_kept(monkeypatch):
    """Decision 67."""
    # Given
    before, seen = gc.get_threshold(), []
    monkeypatch.setattr(Worker, "run", lambda self, *_: seen.append(gc.get_threshold()) or 0)
    gc.set_threshold(50_000, 5, 5)
    try:
        # When it is started as from the command line
        command = Command()
        command._called_from_command_line = True
        call_command(command, "--status-interval", "0")
    finally:
        gc.set_threshold(*before)
    # Then
    assert seen == [(50_000, 5, 5)]


@pytest.fixture
def empty_database(settings, tmp_path):
    """Of a newcomer who has not migrated it."""
    alias = "kjo_empty"
    declared = {"ENGINE": "django.db.backends.sqlite3", "NAME": str(tmp_path / "empty.sqlite3")}
    known = connections.configure_settings({"default": {}, alias: declared})
    connections.settings[alias] = known[alias]
    settings.KJO = {**KJO, "DATABASE": alias}
    yield alias
    settings.KJO = KJO
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


def test_without_tables_it_says_what_to_do_and_begins_all_the_same(
    empty_database, monkeypatch, django_db_blocker
):
    ran, out = [], io.StringIO()
    monkeypatch.setattr(Worker, "run", lambda self, *_: ran.append(self) or 0)
    with django_db_blocker.unblock():
        call_command("kjo_consume", "--status-interval", "0", stdout=out, stderr=out)
    assert "Run manage.py migrate --database kjo_empty." in out.getvalue()
    assert ran


def test_without_tables_a_drain_ends_since_it_could_not(
    empty_database, monkeypatch, django_db_blocker
):
    monkeypatch.setattr(Worker, "run", lambda self, *_: pytest.fail("It has begun"))
    with django_db_blocker.unblock(), pytest.raises(CommandError, match=r"tables .* are missing"):
        call_command("kjo_consume", "--drain", "--status-interval", "0")


def test_other_commands_say_so_too(empty_database, django_db_blocker):
    with django_db_blocker.unblock(), pytest.raises(CommandError) as raised:
        call_command("kjo_status")
    assert "no such table" in str(raised.value)
    assert str(raised.value).endswith("Run manage.py migrate --database kjo_empty.")


@pytest.mark.medium  # a worker, which starts and ends
@pytest.mark.usefixtures("sqlite_file")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda each: each.name)
def test_a_stop_signal_is_heard_once_it_says_that_it_consumes(monkeypatch, number):
    """It ended with -15: the line was written before the signal was heard."""
    # Given: in the main thread, which is where Python hears signals
    announce = report.StatusReporter.announce

    def announce_and_stop(self):
        announce(self)
        os.kill(os.getpid(), number)

    monkeypatch.setattr(report.StatusReporter, "announce", announce_and_stop)
    out = io.StringIO()
    before = signal.getsignal(number)
    # When
    call_command("kjo_consume", "ledger", stdout=out)
    # Then
    assert "Consuming ledger" in out.getvalue()
    assert signal.getsignal(number) is before
