"""What operators do to schedules."""

from __future__ import annotations

from datetime import UTC, datetime
from uuid import uuid4

import pytest
from django.utils import translation

from kjo_django.models import Job, Schedule
from kjo_django.operations import schedules
from kjo_django.refusals import shown as shown_text
from kjo_django.runtime import current_runtime
from kjo_django.schedules import shown
from kjo_django.schedules.declarations import ScheduleFaults, checked, synchronize
from kjo_django.schedules.shown import next_runs
from kjo_django.testing import drain
from tests.schedules.conftest import minutes, now, scheduled, step, ticks_of

pytestmark = pytest.mark.django_db


def test_adding_one(clock):
    changed = []
    row = schedules.add(
        "weekly",
        actor="ann",
        on_changed=changed.extend,
        job="shop.clean",
        payload={"days": 7},
        cron="0 3 * * MON",
        timezone="Europe/Berlin",
    )
    assert changed == [row]
    assert (row.source, row.changed_by, row.is_enabled) == ("admin", "ann", True)
    assert next_runs(row, 2) == row.timetable.next_ticks(now(), 2)
    with pytest.raises(ScheduleFaults, match="There is a schedule named 'weekly'"):
        schedules.add("weekly", job="shop.report", every=60)


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        (
            {"cron": "0 25 * * *"},
            "cron",
            "Must be a cron expression whose hour is 0-23, which '25'",
        ),
        ({"every": 0}, "every", "Must be a timedelta or number of whole seconds"),
        ({"every": 5, "job": "shop.clean"}, "payload", "missing a required argument"),
        ({"every": 5, "job": "shop.cleen"}, "job", "Did you mean 'shop.clean'?"),
        ({"every": 5, "job": ""}, "job", "Is needed."),
        ({"every": 5, "queue": "legder"}, "queue", "Did you mean 'ledger'?"),
        ({"every": 5, "evry": 6}, "evry", "Did you mean 'every'?"),
        ({"at": datetime(2020, 1, 1, tzinfo=UTC)}, "at", "There is no tick in the future."),
        ({}, "", "Does not say when; give one of cron, every and at."),
        ({"cron": "@daily", "timezone": "Mars"}, "timezone", "Must be the name of a time zone"),
    ],
)
def test_what_is_wrong_is_said_of_its_field(options, field, text):
    with pytest.raises(ScheduleFaults) as caught:
        schedules.add("x", **{"job": "shop.report", **options})
    assert text in caught.value.faults[field]
    assert not Schedule.objects.exists()


@pytest.mark.parametrize(
    ("options", "field", "text"),
    [
        (
            {"cron": "0 25 * * *"},
            "cron",
            "Erwartet wird ein Cron-Ausdruck, dessen Feld hour 0-23 ist, was '25' nicht ist; "
            "gegeben ist '0 25 * * *'.",
        ),
        (
            {"cron": "@dayly"},
            "cron",
            "Erwartet wird ein Cron-Ausdruck oder ein bekannter Kurzname (Meinten Sie '@daily'?); "
            "gegeben ist '@dayly'.",
        ),
        (
            {"every": 0},
            "every",
            "Erwartet wird ein timedelta oder eine Zahl ganzer Sekunden von 1 bis 315.360.000; "
            "gegeben ist 0.",
        ),
        (
            {"every": 5, "job": "shop.clean"},
            "payload",
            "Der Job shop.clean: es fehlt das Argument 'days'.",
        ),
        (
            {"every": 5, "job": "shop.cleen"},
            "job",
            "Kein Job heißt 'shop.cleen'. Meinten Sie 'shop.clean'?",
        ),
        ({"every": 5, "job": ""}, "job", "Wird gebraucht."),
        (
            {"every": 5, "queue": "legder"},
            "queue",
            "Keine Warteschlange heißt 'legder'. Meinten Sie 'ledger'?",
        ),
        ({}, "", "Sagt nicht, wann; geben Sie cron, every oder at an."),
        (
            {"cron": "@daily", "timezone": "Europe/Berlim"},
            "timezone",
            "Erwartet wird der Name einer Zeitzone (Meinten Sie 'Europe/Berlin'?); gegeben ist "
            "'Europe/Berlim'.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_german_where_people_read_it(options, field, text):
    with pytest.raises(ScheduleFaults) as caught:
        schedules.add("x", **{"job": "shop.report", **options})
    with translation.override("de"):
        assert caught.value.translated_faults() == {field: text}
        assert shown_text(caught.value) == (f"{field}: {text}" if field else text)
        assert str(caught.value) != shown_text(caught.value)


@pytest.mark.parametrize("name", ["", " ", "a:b", "x" * 101, "a\nb", None])
def test_names_that_no_schedule_can_have(name):
    with pytest.raises(ScheduleFaults) as caught:
        schedules.add(name, job="shop.report", every=5)
    assert list(caught.value.faults) == ["name"]


def test_internal_jobs_are_not_for_schedules():
    with pytest.raises(ScheduleFaults, match="No job is named"):
        schedules.add("x", job="kjo_django.bulk.replay", every=5)


def test_a_form_shows_the_next_runs_in_the_chosen_zone(clock):
    options = checked({"job": "shop.report", "cron": "0 3 * * *", "timezone": "Asia/Tokyo"}, now())
    runs = next_runs(options)
    assert len(runs) == 5
    assert {run.astimezone(UTC).hour for run in runs} == {18}


def test_editing_moves_the_next_tick(clock):
    row = scheduled()
    assert schedules.edit(row, actor="ann", every=600) == {"every"}
    row.refresh_from_db()
    assert (row.next_at, row.changed_by, row.overridden) == (now() + minutes(10), "ann", [])
    assert schedules.edit(row, every=600) == set()
    assert schedules.edit(row, every=None, cron="@daily") == {"every", "cron"}
    with pytest.raises(ScheduleFaults):
        schedules.edit(row, cron="@dayly")
    with pytest.raises(TypeError, match="Did you mean 'every'"):
        schedules.edit(row, evry=5)


def test_editing_repeats_no_tick(clock):
    row = scheduled(every=60)
    clock.advance(60)
    step()
    schedules.edit(row, every=None, cron="* * * * *")
    step(times=2)
    assert len(ticks_of()) == 1


def test_pausing_and_resuming(clock):
    row, other = scheduled(), scheduled("other")
    ticker = step()
    outcomes = schedules.pause([row, other.pk, str(other.pk), uuid4()], actor="ann")
    assert outcomes.counts == {"changed": 2, "unchanged": 1, "not_found": 1}
    assert outcomes.changed_count == 2
    clock.advance(3600)
    step(ticker)
    assert schedules.resume([row], actor="ann").changed_count == 1
    step(ticker)
    # What it would have done meanwhile is not made up for
    assert ticks_of() == []
    clock.advance(60)
    step(ticker)
    assert (len(ticks_of()), ticks_of("other")) == (1, [])


def test_running_now(clock):
    row = scheduled(payload={})
    for _ in range(2):
        assert schedules.run_now([row], actor="ann").counts == {"enqueued": 1}
    assert drain().completed == 2
    assert len(shown.history(row)) == 2
    row.refresh_from_db()
    assert (row.next_at, row.last_at) == (now() + minutes(1), None)
    (found,) = shown.overview()
    assert found["last_status"] == "completed"
    assert found["last_seconds"] is not None
    # A handler that asks for its tick is given the moment
    assert Job.objects.first().headers["kjo-scheduled-for"] == now().isoformat()


def test_running_one_whose_job_is_gone(clock):
    row = scheduled(job="shop.gone")
    assert schedules.run_now([row]).counts == {"broken": 1}
    (found,) = shown.overview(["nightly"])
    assert found["problem"].startswith("schedule['job']: no job is named 'shop.gone'.")


def test_deleting(clock, settings):
    settings.KJO = {**settings.KJO, "SCHEDULES": {"code": {"job": "shop.report", "every": 300}}}
    synchronize(current_runtime())
    scheduled()
    outcomes = schedules.delete(Schedule.objects.all(), actor="ann")
    assert outcomes.counts == {"declared": 1, "deleted": 1}
    settings.KJO = {**settings.KJO, "SCHEDULES": {}}
    synchronize(current_runtime())
    assert schedules.delete(Schedule.objects.all()).counts == {"deleted": 1}


def test_the_history_is_of_one_schedule_alone(clock):
    names = ["a", "a%", "a_", "ab"]
    rows = [scheduled(name) for name in names]
    schedules.run_now(rows)
    assert [len(shown.history(row)) for row in rows] == [1, 1, 1, 1]
