"""``kjo_schedule``."""

from __future__ import annotations

import io
import json
import signal

import pytest
from django.core.management import CommandError, call_command

from kjo_django.management.commands import kjo_schedule
from kjo_django.models import Job, Schedule
from tests.schedules.conftest import scheduled, ticks_of

pytestmark = pytest.mark.django_db


def run(*arguments: str) -> str:
    out = io.StringIO()
    call_command("kjo_schedule", *arguments, stdout=out)
    return out.getvalue()


def test_listing(clock):
    scheduled()
    scheduled("broken", job="shop.gone", cron="0 3 * * *", is_paused=True)
    lines = run("list").splitlines()
    assert lines[0].split() == ["name", "job", "when", "next", "last", "job", "state"]
    assert "no job is named 'shop.gone'" in lines[1]
    assert "every 60 s" in lines[2]
    assert lines[2].split()[-1] == "active"  # as the dashboard and REST have it
    found = json.loads(run("list", "--json"))["schedules"]
    assert [one["name"] for one in found] == ["broken", "nightly"]
    assert found[1]["every"] == 60


def test_the_next_ticks(clock):
    scheduled()
    assert len(json.loads(run("next", "nightly", "--json", "--count", "3"))["next"]["nightly"]) == 3
    assert run("next", "nightly").count("\n") == 6


def test_running_pausing_and_resuming(clock):
    scheduled()
    assert run("run", "nightly") == "1 enqueued\n"
    assert Job.objects.count() == 1
    assert run("pause", "nightly") == "1 changed\n"
    assert Schedule.objects.get().is_paused
    assert run("resume", "nightly") == "1 changed\n"
    assert Schedule.objects.get().changed_by == "kjo_schedule"


def test_one_whose_job_is_gone_cannot_be_run(clock):
    scheduled(job="shop.gone")
    with pytest.raises(SystemExit) as caught:
        run("run", "nightly")
    assert caught.value.code == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run"], "Name the schedules"),
        (["run", "nighly"], "No schedule is named 'nighly'. Did you mean 'nightly'?"),
        (["import-celery-beat", "--job", "x"], "--job 'x' is not TASK=JOB"),
        (["import-celery-beat"], "no dict is named CELERY_BEAT_SCHEDULE"),
        (["import-celery-beat", "--from", "tests.nothing.X"], "cannot be imported"),
    ],
)
def test_wrong_usage(clock, arguments, text):
    scheduled()
    with pytest.raises(CommandError) as caught:
        run(*arguments)
    assert text in str(caught.value)
    assert caught.value.returncode == 2


def test_once(clock):
    scheduled()
    assert run("--once") == "Stored 0 jobs.\n"
    clock.advance(61)
    assert run("--once") == "Stored 1 jobs.\n"
    assert len(ticks_of()) == 1


@pytest.fixture
def stopped_at_once(monkeypatch):
    """The duty's thread, as one whose start is also the signal to stop."""
    monkeypatch.setattr(kjo_schedule.DutyThread, "start", lambda self: signal.raise_signal(15))
    monkeypatch.setattr(kjo_schedule.DutyThread, "join", lambda self, timeout: None)


def test_at_its_start_it_says_what_it_serves(clock, stopped_at_once, settings):
    """Given schedules in code, more than one line should hold."""
    many = {
        f"s-{n:02}": {"job": "shop.clean", "payload": {"days": n}, "every": 60} for n in range(12)
    }
    settings.KJO = {"SERVICE_NAME": "shop", "SCHEDULES": many}
    # When it is started
    first, second, third, last = run().splitlines()
    # Then it names the first ten, and what it works with.
    assert first.startswith("Storing the jobs of all schedules; those in code: s-00, s-01, ")
    assert first.endswith("s-09 and 2 more. Stop with Ctrl-C.")
    assert second.startswith("  Service shop; database: django.db.backends.")
    assert third.startswith("  Python ")
    assert last == "Stored 0 jobs."


def test_without_schedules_in_code_it_says_so(clock, stopped_at_once):
    assert "those in code: none. Stop" in run()


def test_as_json_it_prints_one_object(clock, stopped_at_once):
    assert json.loads(run("--json")) == {"action": "worked", "stored": 0}
