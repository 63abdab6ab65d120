"""A program asks to erase what is kept of a person, and reads the report."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kjo_django.models import Job
from kjo_django.testing import drain
from tests.api.conftest import problem_of
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db

URL = "/kjo/personal-data/"
ADA = {"fields": ["customer.email=ada@example.org"]}


@pytest.fixture
def client(login: Any) -> Any:
    return login("erase_personal_data")


def test_a_person_is_counted_and_erased(client: Any, greet: Any) -> None:
    # Given
    payload = json.dumps({"customer": {"email": "ada@example.org"}}).encode()
    done = JobFactory(completed=True, payload=payload)
    for is_dry in (True, False):
        # When
        asked = client.post(URL, {**ADA, "dry_run": is_dry, "reference": "R-17"})
        # Then
        assert (asked.status_code, asked.json()["report"]) == (202, None)
        # When
        drain()
        told = client.get(asked["Location"]).json()
        # Then
        assert told["found_by"] == "the field customer.email"
        assert (told["state"], told["reference"]) == ("completed", "R-17")
        report = told["report"]
        assert (report["erased"], report["complete"], report["dry_run"]) == (
            {"jobs": 1},
            True,
            is_dry,
        )
        assert "Logs, traces, error trackers and backups." in report["left"]
        assert Job.objects.filter(pk=done.pk).exists() is is_dry


@pytest.mark.parametrize(
    ("body", "field", "text"),
    [
        ({}, "", "give at least one key, id or value"),
        ({"fields": ["email"]}, "", "not PATH=VALUE, such as customer.email=ada@example.org"),
        ({"keys": [""]}, "keys.0", "blank"),
        ({"keys": "ada"}, "keys", "list"),
        ({"keys": ["ada"], "mode": "shred"}, "mode", "Not one of delete, redact"),
        ({"keys": ["ada"], "dry": True}, "dry", "Unknown"),
    ],
)
def test_what_is_wrong_is_refused(client: Any, body: dict[str, Any], field: str, text: str) -> None:
    (error,) = problem_of(client.post(URL, body), 400)["errors"]
    assert error["field"] == field
    assert text in error["detail"]
    assert not Job.objects.exists()


def test_another_job_is_no_request(client: Any) -> None:
    problem_of(client.get(f"{URL}{JobFactory(completed=True).pk}/"), 404)
    problem_of(client.get(f"{URL}x/"), 404)


def test_where_no_worker_would_do_it_that_is_said(client: Any, monkeypatch: Any) -> None:
    def nobody() -> str:
        raise ValueError("No worker would run it")

    monkeypatch.setattr("kjo_django.personal_data.erasure.operations_queue", nobody)
    problem_of(client.post(URL, ADA), 409)
