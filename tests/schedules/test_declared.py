"""Schedules as code: what is refused where they are declared, and how they come into the table."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.core.checks import run_checks
from django.core.exceptions import ImproperlyConfigured

from kjo_django import job, registry
from kjo_django.models import Schedule
from kjo_django.operations import schedules
from kjo_django.runtime import current_runtime
from kjo_django.schedules.declarations import synchronize
from tests.schedules.conftest import minutes, now, scheduled, step, ticks_of


def declare(settings, **entries):
    settings.KJO = {**settings.KJO, "SCHEDULES": entries}


def row(name="cleanup"):
    return Schedule.objects.get(name=name)


def nested(levels):
    """Return lists within one another."""
    return [nested(levels - 1)] if levels > 1 else []


# --- What is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"schedule": "0 25 * * *"}, r"job\(schedule='0 25 .*whose hour is 0-23"),
        ({"schedule": "@dayly"}, "Did you mean '@daily'"),
        ({"schedule": timedelta(milliseconds=5)}, r"\['every'\] must be a timedelta"),
        ({"schedule": 5}, "a cron expression, a timedelta or a dict"),
        ({"schedule": {"cron": "* * * * *", "every": 5}}, "has cron and every; give one"),
        ({"schedule": {}}, "does not say when"),
        ({"schedule": {"evry": 5}}, "unknown key 'evry'. Did you mean 'every'?"),
        ({"schedule": {"every": 5, "job": "x"}}, "the job is the function itself"),
        ({"schedule": timedelta(minutes=5), "timezone": "UTC"}, "goes with cron"),
        ({"timezone": "UTC"}, "timezone needs schedule"),
        ({"schedule": "@daily", "timezone": "Europe/Berln"}, "Did you mean 'Europe/Berlin'"),
    ],
)
def test_a_wrong_schedule_of_a_job_is_refused_where_it_is_declared(options, text):
    with pytest.raises(ValueError, match=text):
        job(name="shop.other", **options)(lambda: None)


def test_a_job_that_needs_arguments_is_refused_without_a_payload():
    def clean(days: int) -> None: ...

    with pytest.raises(ImproperlyConfigured, match="missing a required argument: 'days'"):
        job(name="shop.other", schedule="@daily")(clean)
    job(name="shop.other", schedule={"cron": "@daily", "payload": {"days": 3}})(clean)


@pytest.mark.parametrize(
    ("entry", "text", "hint"),
    [
        (
            {"job": "shop.cleen", "every": 5},
            "['job']: no job is named 'shop.cleen'",
            "'shop.clean'",
        ),
        ({"job": "shop.clean", "every": 5}, "['payload']: the job shop.clean: missing", ""),
        ({"job": "shop.report"}, "does not say when", ""),
        ({"job": "shop.report", "every": 0}, "['every'] must be a timedelta or number", ""),
        ({"job": "shop.report", "cron": "0 99 * * *"}, "whose hour is 0-23", ""),
        ({"job": "shop.report", "every": 5, "catchup": 1}, "unknown key 'catchup'", "'catch_up'"),
        ({"job": "shop.report", "every": 5, "catch_up": "two"}, "'none', 'one', 'all'", ""),
        ({"job": "shop.report", "every": 5, "queue": "no"}, "['queue']: no queue is named", ""),
        ({"job": "shop.report", "at": "2026-01-01"}, "a datetime with a time zone", ""),
        ({"job": "shop.report", "every": 5, "payload": {"a": {1}}}, "levels of JSON", ""),
        ({"job": "shop.report", "every": 5, "payload": {"a": "\0"}}, "levels of JSON", ""),
        ({"job": "shop.report", "every": 5, "payload": {"a": nested(30)}}, "most 30 levels", ""),
        ({"job": "shop.report", "every": 5, "payload": {"a": nested(900)}}, "most 30 levels", ""),
        ({"job": "shop.report", "every": 5, "payload": {"a": [2**64]}}, "64-bit numbers", ""),
        ({"job": "shop.report", "every": 5, "payload": {"a": -1e20}}, "64-bit numbers", ""),
        ("shop.report", "must be a dict, not str", ""),
        (
            {
                "job": "shop.report",
                "every": 5,
                "starts_at": "2026-01-02T00:00Z",
                "ends_at": "2026-01-01T00:00Z",
            },
            "['ends_at'] is before starts_at",
            "",
        ),
    ],
)
def test_a_wrong_entry_of_the_settings_is_found_by_the_checks(settings, entry, text, hint):
    declare(settings, cleanup=entry)
    (found,) = run_checks(tags=["kjo"])
    assert found.id == "kjo.E015"
    assert found.msg.startswith("KJO['SCHEDULES']['cleanup']")
    assert text in found.msg
    assert hint in (found.hint or "")


def test_a_name_that_no_schedule_can_have(settings):
    declare(settings, **{"a:b": {"job": "shop.report", "every": 5}})
    (found,) = run_checks(tags=["kjo"])
    assert "has no ':'" in found.msg


def test_right_entries_are_let_pass(settings):
    declare(
        settings,
        one={"job": "shop.clean", "every": timedelta(minutes=5), "payload": {"days": 30}},
        two={"job": "shop.report", "cron": "0 3 * * *", "timezone": "Europe/Berlin"},
        three={"job": "shop.report", "at": datetime(2030, 1, 1, tzinfo=UTC), "jitter": 60},
    )
    assert run_checks(tags=["kjo"]) == []


# --- How they come into the table -----------------------------------------------------------------


@pytest.mark.django_db
def test_a_worker_brings_them_into_the_table(settings, clock):
    job(name="shop.nightly", schedule="0 3 * * *", timezone="Europe/Berlin")(lambda: None)
    declare(settings, cleanup={"job": "shop.clean", "every": 300, "payload": {"days": 30}})
    step()
    nightly, cleanup = row("shop.nightly"), row()
    assert (nightly.job, nightly.cron, nightly.timezone) == (
        *("shop.nightly", "0 3 * * *", "Europe/Berlin"),
    )
    assert (cleanup.job, cleanup.every, cleanup.payload) == ("shop.clean", 300, {"days": 30})
    assert cleanup.next_at == now() + minutes(5)
    assert {each.source for each in (nightly, cleanup)} == {"code"}
    # And its ticks are stored
    clock.advance(301)
    step()
    assert len(ticks_of("cleanup")) == 1


def test_a_payload_of_as_many_levels_as_are_let_pass_is_kept_by_every_database(
    settings, any_database, clock
):
    """MariaDB keeps no JSON of more than 32, and the row has what the code declares as well."""
    # Given
    payload = {"days": [-(2**63), 2**64 - 1, 1.5e15, -1e-300, True, nested(28)]}
    declare(settings, cleanup={"job": "shop.clean", "every": 300, "payload": payload})
    # When
    step()
    # Then
    assert (row().payload, row().declaration["payload"]) == (payload, payload)
    # And its ticks are stored
    clock.advance(301)
    step()
    assert len(ticks_of("cleanup")) == 1


def test_a_schedule_of_a_large_payload_holds_up_no_other(settings, any_database, clock):
    """MySQL sorts no rows whose JSON is larger than its buffer for sorting, of 256 kB."""
    # Given
    large = {"job": "shop.clean", "every": 300, "payload": {"days": "x" * 700_000}}
    declare(settings, large=large, cleanup={**large, "payload": {"days": 30}})
    step()
    # When
    clock.advance(301)
    step()
    # Then
    assert [len(ticks_of(name)) for name in ("large", "cleanup")] == [1, 1]


@pytest.mark.django_db
def test_of_one_name_the_settings_count(settings):
    job(name="shop.nightly", schedule="0 3 * * *")(lambda: None)
    declare(settings, **{"shop.nightly": {"job": "shop.nightly", "cron": "0 4 * * *"}})
    synchronize(current_runtime())
    assert row("shop.nightly").cron == "0 4 * * *"


@pytest.mark.django_db
def test_what_is_changed_in_code_changes_what_is_not_declared_is_disabled(settings, clock):
    declare(settings, cleanup={"job": "shop.report", "every": 300})
    synchronize(current_runtime())
    declare(settings, cleanup={"job": "shop.report", "every": 600, "queue": "ledger"})
    synchronize(current_runtime())
    assert (row().every, row().queue, row().next_at) == (600, "ledger", now() + minutes(10))
    declare(settings)
    synchronize(current_runtime())
    assert (row().is_enabled, row().problem) == (False, "The code does not declare it any more.")
    # And it comes back, without making up for what it would have done
    clock.advance(86_400)
    declare(settings, cleanup={"job": "shop.report", "every": 600, "queue": "ledger"})
    step()
    assert (row().is_enabled, row().problem, ticks_of("cleanup")) == (True, "", [])
    assert row().next_at == now() + minutes(10)


@pytest.mark.django_db
def test_a_worker_of_an_older_release_loses_no_tick_of_a_newer_one(settings, clock):
    old, new = {}, {"cleanup": {"job": "shop.report", "every": 60}}
    declare(settings, **new)
    newer = step()
    # An older worker is started in the midst of the deploy, and does not know the schedule
    declare(settings, **old)
    step()
    assert not row().is_enabled
    declare(settings, **new)
    clock.advance(61)
    step(newer, times=2)
    assert row().is_enabled
    step(times=2)
    assert len(ticks_of("cleanup")) == 1


@pytest.mark.django_db
def test_what_an_operator_changed_stays_and_the_rest_follows_the_code(settings):
    declare(settings, cleanup={"job": "shop.report", "every": 300})
    synchronize(current_runtime())
    schedules.edit(row(), actor="ann", every=120)
    schedules.pause([row()], actor="ann")
    declare(settings, cleanup={"job": "shop.report", "every": 400, "catch_up": "all"})
    synchronize(current_runtime())
    assert (row().every, row().catch_up, row().is_paused) == (120, "all", True)
    assert row().overridden == ["every"]
    assert schedules.reset([row()], actor="ann").changed_count == 1
    assert (row().every, row().overridden) == (400, [])


@pytest.mark.django_db
def test_a_schedule_of_an_operator_is_not_taken_by_the_code(settings, caplog):
    scheduled("cleanup", every=77)
    declare(settings, cleanup={"job": "shop.report", "every": 300})
    synchronize(current_runtime())
    assert (row().every, row().source) == (77, "admin")
    assert "was added by an operator" in caplog.text


@pytest.mark.django_db
def test_a_faulty_entry_leaves_its_row_as_it_is(settings, caplog):
    declare(settings, cleanup={"job": "shop.report", "every": 300})
    synchronize(current_runtime())
    declare(settings, cleanup={"job": "shop.report", "every": -1})
    synchronize(current_runtime())
    assert (row().is_enabled, row().every) == (True, 300)
    assert "must be a timedelta" in caplog.text


@pytest.mark.django_db
def test_nothing_is_written_when_nothing_has_changed(settings, django_assert_num_queries):
    declare(
        settings, cleanup={"job": "shop.report", "every": 300, "starts_at": "2030-01-01T00:00Z"}
    )
    synchronize(current_runtime())
    with django_assert_num_queries(1):
        synchronize(current_runtime())


def test_the_function_is_an_ordinary_job_too():
    @job(name="shop.nightly", schedule="0 3 * * *")
    def nightly() -> int:
        return 7

    assert nightly() == 7
    assert registry.find("shop.nightly").options.schedule.cron == "0 3 * * *"
