"""Limits over REST: list, read, change and give back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rest_framework.test import APIClient

from kjo_django import job, registry
from kjo_django.models import NEVER, HeldJob, LimitControl
from tests.api.conftest import Login, errors_of, problem_of
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db
ADDRESS = "/kjo/limits/job:tests.limited/"


@pytest.fixture(autouse=True)
def limited() -> Iterator[None]:
    @job(name="tests.limited", rate="5/s", concurrency=3)
    def limited() -> None:
        pass

    yield
    registry.unregister("tests.limited")


def test_they_are_listed_and_read(superuser: APIClient) -> None:
    (row,) = superuser.get("/kjo/limits/").json()["results"]
    assert (row["name"], row["rate"], row["concurrency"]) == ("job:tests.limited", "5/s", 3)
    assert (row["waiting_count"], row["taken_count"]) == (0, 0)
    assert superuser.get(ADDRESS).json() == row
    unlimited = superuser.get("/kjo/limits/queue:mails/").json()
    assert (unlimited["rate"], unlimited["waiting_count"]) == (None, 0)
    for name in ("job:nosuch", "queue:nosuch", "nosuch"):
        problem_of(superuser.get(f"/kjo/limits/{name}/"), 404)
        problem_of(superuser.patch(f"/kjo/limits/{name}/", {"rate": "1/s"}), 404)


def test_one_is_changed_and_given_back(superuser: APIClient) -> None:
    answer = superuser.patch(ADDRESS, {"rate": "2/m"})
    assert answer.status_code == 200, answer.content
    changed = answer.json()
    assert changed["is_changed"]
    assert (changed["limit"]["rate"], changed["limit"]["declared"]["rate"]) == ("2/m", "5/s")
    assert not superuser.patch(ADDRESS, {"rate": "2/m"}).json()["is_changed"]
    back = superuser.post(f"{ADDRESS}clear/", {}).json()
    assert (back["is_changed"], back["limit"]["rate"]) == (True, "5/s")
    assert not LimitControl.objects.exists()


@pytest.mark.parametrize("body", [{"rate": "fast"}, {"rate": 5}, {"burst": 0}, {"slots": 1}])
def test_what_means_nothing_is_refused(superuser: APIClient, body: dict[str, object]) -> None:
    assert next(iter(body)) in errors_of(superuser.patch(ADDRESS, body))
    assert not LimitControl.objects.exists()


def test_each_needs_its_permission(login: Login) -> None:
    viewer = login("view_limitcontrol")
    assert viewer.get(ADDRESS).status_code == 200
    problem_of(viewer.patch(ADDRESS, {"rate": "1/s"}), 403)
    problem_of(viewer.post(f"{ADDRESS}clear/", {}), 403)
    problem_of(login("view_job").get("/kjo/limits/"), 403)


def test_a_job_that_waits_for_a_limit_says_for_which(login: Login) -> None:
    row = JobFactory(handler="tests.limited", queue="default", available_at=NEVER)
    HeldJob.objects.create(job_id=row.pk, limit="RATE:job:tests.limited:secret", queue="default")
    client = login("view_job", "retry_job")
    (listed,) = client.get("/kjo/jobs/").json()["results"]
    detail = client.get(f"/kjo/jobs/{row.pk}/").json()
    for shown in (listed, detail):
        assert (shown["status"], shown["waits_for"]) == (
            "scheduled",
            "rate 5/s of job:tests.limited",
        )
        assert shown["available_at"] is None
    problem = problem_of(client.post(f"/kjo/jobs/{row.pk}/run-now/", {}), 409)
    assert "waits for a limit" in problem["detail"]
