"""Schedules over REST: list, read, add, edit, and the operators' actions."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone
from rest_framework.test import APIClient

from kjo_django.models import Job, Schedule
from kjo_django.operations import schedules
from tests.api.conftest import Login, errors_of, problem_of

pytestmark = pytest.mark.django_db
NIGHTLY = {
    "name": "nightly",
    "job": "tests.greet",
    "payload": {"name": "Ada"},
    "cron": "0 3 * * *",
    "timezone": "Europe/Berlin",
}


@pytest.fixture
def row(greet: Any) -> Schedule:
    return schedules.add(**NIGHTLY)


def at(row: Schedule, action: str = "") -> str:
    return f"/kjo/schedules/{row.pk}/{action}"


def test_one_is_added_and_read(superuser: APIClient, greet: Any) -> None:
    answer = superuser.post("/kjo/schedules/", NIGHTLY)
    assert answer.status_code == 201, answer.content
    made = answer.json()
    assert answer["Location"].endswith(f"/kjo/schedules/{made['id']}/")
    assert {name: made[name] for name in NIGHTLY} == NIGHTLY
    assert (made["state"], made["source"], made["problem"]) == ("active", "admin", "")
    found = superuser.get(f"/kjo/schedules/{made['id']}/").json()
    assert len(found["next_runs"]) == 5
    assert found["runs"] == []
    assert [row["id"] for row in superuser.get("/kjo/schedules/").json()["results"]] == [made["id"]]
    entry = LogEntry.objects.get()
    assert (entry.change_message, entry.object_id) == ("Added.", made["id"])


def test_what_is_wrong_is_said_in_english_in_every_language(
    superuser: APIClient, row: Schedule, settings: Any
) -> None:
    settings.LANGUAGE_CODE = "de"
    answer = superuser.post("/kjo/schedules/", {**NIGHTLY, "name": "x", "cron": "0 25 * * *"})
    assert errors_of(answer)["cron"].startswith("Must be a cron expression whose hour is 0-23")
    Schedule.objects.update(job="no.such")
    problem = superuser.get(at(row)).json()["problem"]
    assert problem.startswith("schedule['job']: no job is named 'no.such'.")


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"cron": "61 * * * *"}, "cron"),
        ({"cron": 5}, "cron"),
        ({"timezone": "Nowhere"}, "timezone"),
        ({"job": "no.such"}, "job"),
        ({"payload": []}, "payload"),
        ({"payload": {"nosuch": 1}}, "payload"),
        ({"payload": {"name": json.loads("[" * 30 + "]" * 30)}}, "payload"),
        ({"every": 0}, "every"),
        ({"every": 60}, ""),
        ({"at": "2030-01-01T00:00:00"}, "at"),
        ({"catch_up": "some"}, "catch_up"),
        ({"jitter": -1}, "jitter"),
        ({"queue": "nosuch"}, "queue"),
        ({"name": "a:b"}, "name"),
        ({"name": ""}, "name"),
        ({"crom": "x"}, "crom"),
    ],
)
def test_what_means_nothing_is_refused_with_its_field(
    superuser: APIClient, greet: Any, change: dict[str, Any], field: str
) -> None:
    answer = superuser.post("/kjo/schedules/", {**NIGHTLY, **change})
    assert field in errors_of(answer)
    assert not Schedule.objects.exists()


def test_a_name_is_taken_once(superuser: APIClient, row: Schedule) -> None:
    assert "name" in errors_of(superuser.post("/kjo/schedules/", NIGHTLY))


def test_one_is_edited(superuser: APIClient, row: Schedule) -> None:
    answer = superuser.patch(at(row), {"cron": None, "timezone": None, "every": 300})
    assert answer.status_code == 200, answer.content
    assert answer.json()["outcome"] == "changed"
    after = answer.json()["schedule"]
    assert (after["cron"], after["every"], after["payload"]) == ("", 300, {"name": "Ada"})
    assert superuser.patch(at(row), {"every": 300}).json()["outcome"] == "unchanged"
    assert "cron" in errors_of(superuser.patch(at(row), {"every": None, "cron": "0 25 * * *"}))
    row.refresh_from_db()
    assert row.every == 300


def test_it_runs_now_and_shows_its_runs(superuser: APIClient, row: Schedule) -> None:
    answer = superuser.post(at(row, "run-now/"), {})
    assert (answer.status_code, answer.json()["outcome"]) == (200, "enqueued")
    job = Job.objects.get()
    assert job.arguments == {"name": "Ada"}
    found = superuser.get(at(row)).json()
    assert [run["job"] for run in found["runs"]] == [str(job.pk)]
    assert found["last_job"] == str(job.pk)


def test_it_pauses_and_resumes(superuser: APIClient, row: Schedule) -> None:
    paused = superuser.post(at(row, "pause/"), {}).json()
    assert (paused["outcome"], paused["schedule"]["state"]) == ("changed", "paused")
    assert paused["schedule"]["next_at"] is None
    assert superuser.post(at(row, "pause/"), {}).json()["outcome"] == "unchanged"
    resumed = superuser.post(at(row, "resume/"), {}).json()
    assert (resumed["outcome"], resumed["schedule"]["state"]) == ("changed", "active")


def test_it_is_deleted_unless_the_code_declares_it(superuser: APIClient, row: Schedule) -> None:
    Schedule.objects.update(source="code")
    assert "declares" in problem_of(superuser.post(at(row, "delete/"), {}), 409)["detail"]
    Schedule.objects.update(source="admin")
    answer = superuser.post(at(row, "delete/"), {})
    assert answer.json() == {"outcome": "deleted", "schedule": None}
    problem_of(superuser.get(at(row)), 404)
    problem_of(superuser.post(at(row, "pause/"), {}), 404)


def test_a_broken_one_says_so_and_does_not_run(superuser: APIClient) -> None:
    row = Schedule.objects.create(name="gone", job="no.such", every=60, next_at=timezone.now())
    found = superuser.get(at(row)).json()
    assert found["state"] == "broken"
    assert "no.such" in found["problem"]
    assert "problem" in problem_of(superuser.post(at(row, "run-now/"), {}), 409)["detail"]


def test_a_late_one_says_for_how_long(superuser: APIClient, row: Schedule) -> None:
    Schedule.objects.update(next_at=timezone.now() - timedelta(minutes=5))
    assert 299 < superuser.get(at(row)).json()["late_seconds"] < 400


def test_payloads_are_for_those_who_may_see_them(login: Login, row: Schedule) -> None:
    assert login("view_schedule").get(at(row)).json()["payload"] is None
    seen = login("view_schedule", "view_payload").get(at(row)).json()["payload"]
    assert seen == {"name": "Ada"}


def test_pages_and_names(superuser: APIClient, greet: Any) -> None:
    for number in range(3):
        schedules.add(**{**NIGHTLY, "name": f"n{number}"})
    first = superuser.get("/kjo/schedules/", {"limit": 2}).json()
    assert [row["name"] for row in first["results"]] == ["n2", "n1"]
    rest = superuser.get("/kjo/schedules/", {"limit": 2, "cursor": first["next_cursor"]}).json()
    assert ([row["name"] for row in rest["results"]], rest["next_cursor"]) == (["n0"], None)
    named = superuser.get("/kjo/schedules/", {"name": "n1"}).json()["results"]
    assert [row["name"] for row in named] == ["n1"]
    for id in (uuid.uuid4(), "x", "%00"):
        problem_of(superuser.get(f"/kjo/schedules/{id}/"), 404)
