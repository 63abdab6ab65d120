"""Workflows over HTTP."""

from __future__ import annotations

import uuid

import pytest
from rest_framework.test import APIClient

from tests.api.conftest import Login, errors_of, problem_of
from tests.ledger.workflows import ended, imported

pytestmark = pytest.mark.django_db


@pytest.fixture
def operator(login: Login) -> APIClient:
    return login("view_workflow", "cancel_workflow", "retry_workflow", "view_payload")


def test_workflows_are_listed_page_by_page(operator: APIClient) -> None:
    for day in ("monday", "tuesday", "wednesday"):
        imported(id=day)
    first = operator.get("/kjo/workflows/?limit=2").json()
    assert [row["unique_id"] for row in first["results"]] == ["wednesday", "tuesday"]
    rest = operator.get(f"/kjo/workflows/?cursor={first['next_cursor']}").json()
    assert [row["unique_id"] for row in rest["results"]] == ["monday"]
    assert rest["next_cursor"] is None


def test_the_list_is_searched(operator: APIClient) -> None:
    ended(id="monday")
    imported(id="tuesday", name="export")
    for query in ("state=completed", "q=monday", "q=mon*", "q=import"):
        found = operator.get(f"/kjo/workflows/?{query}").json()["results"]
        assert [row["unique_id"] for row in found] == ["monday"], query
    assert "state" in errors_of(operator.get("/kjo/workflows/?state=odd"))


def test_one_workflow_tells_its_stages_and_what_they_require(operator: APIClient) -> None:
    row = ended(fails=True)
    told = operator.get(f"/kjo/workflows/{row.pk}/").json()
    assert (told["state"], told["steps"], told["failed"], told["cancelled"]) == ("failed", 7, 1, 1)
    first, loads, last = told["stages"]
    assert (first["states"], first["requires"]) == ({"completed": 1}, [])
    assert loads["states"] == {"completed": 4, "failed": 1}
    assert last["requires"] == [loads["id"]]
    assert first["job"] is not None
    assert loads["job"] is None
    problem_of(operator.get(f"/kjo/workflows/{uuid.uuid4()}/"), 404)


def test_unique_ids_and_reasons_are_for_those_who_see_payloads(login: Login) -> None:
    row = ended(id="customer-42", fails=True)
    told = login("view_workflow").get(f"/kjo/workflows/{row.pk}/").json()
    assert (told["unique_id"], told["reason"]) == (None, "")


def test_a_workflow_is_retried_given_a_deadline_and_cancelled(operator: APIClient) -> None:
    row = ended(fails=True)
    told = operator.post(f"/kjo/workflows/{row.pk}/retry/").json()
    assert (told["outcome"], told["workflow"]["state"]) == ("retried", "running")
    address = f"/kjo/workflows/{row.pk}/change-deadline/"
    told = operator.post(address, {"seconds": 60}, format="json").json()
    assert (told["outcome"], told["workflow"]["deadline"] is not None) == ("changed", True)
    told = operator.post(address, {"seconds": None}, format="json").json()
    assert (told["outcome"], told["workflow"]["deadline"]) == ("changed", None)
    told = operator.post(f"/kjo/workflows/{row.pk}/cancel/").json()
    assert (told["outcome"], told["workflow"]["state"]) == ("cancelled", "cancelled")


def test_what_has_ended_is_not_cancelled(operator: APIClient) -> None:
    row = ended()
    refused = problem_of(operator.post(f"/kjo/workflows/{row.pk}/cancel/"), 409)
    assert "The workflow has completed already" in refused["detail"]


@pytest.mark.parametrize("seconds", [0, -1, "1", True, 1e300])
def test_a_deadline_that_is_none_is_refused(operator: APIClient, seconds: object) -> None:
    row = imported()
    answer = operator.post(
        f"/kjo/workflows/{row.pk}/change-deadline/", {"seconds": seconds}, format="json"
    )
    assert "seconds" in errors_of(answer)
