"""What the project decides: throttling, renderers, its own error handler, no admin."""

from __future__ import annotations

from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.core.cache import cache
from rest_framework.renderers import BrowsableAPIRenderer, JSONRenderer
from rest_framework.test import APIRequestFactory, force_authenticate
from rest_framework.throttling import ScopedRateThrottle

from kjo_django.api.endpoints import KjoView, address
from kjo_django.api.jobs import enqueue_job
from kjo_django.models import Job
from tests.api.conftest import Login, problem_of, user_with
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db


@pytest.fixture
def rates(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let the project set rates by scope."""

    def set_rates(rates: dict[str, str]) -> None:
        settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "DEFAULT_THROTTLE_RATES": rates}
        monkeypatch.setattr(ScopedRateThrottle, "THROTTLE_RATES", rates)
        monkeypatch.setattr(KjoView, "throttle_classes", [ScopedRateThrottle])

    cache.clear()
    yield set_rates
    cache.clear()


def test_too_many_requests_are_told_to_wait(rates: Any, login: Login, greet: Any) -> None:
    # Given a project that allows one change a minute
    rates({"kjo-write": "1/min", "kjo-read": "100/min"})
    client, body = login("enqueue_job", "view_job"), {"handler": "tests.greet"}
    client.post("/kjo/jobs/", body)
    # When there is a second one
    answer = client.post("/kjo/jobs/", {**body, "payload": {"name": "Ada"}})
    # Then
    assert problem_of(answer, 429)["type"] == "urn:kjo:problem:throttled"
    assert 0 < int(answer["Retry-After"]) <= 60
    assert not Job.objects.exists()
    # and reading has a rate of its own
    assert client.get("/kjo/jobs/").status_code == 200


def test_a_project_without_rates_for_us_is_not_in_error(rates: Any, login: Login) -> None:
    rates({"others": "1/min"})
    client = login("view_job")
    assert [client.get("/kjo/jobs/").status_code for _ in range(3)] == [200, 200, 200]


def test_problems_are_told_so_whatever_the_projects_handler_does(
    settings: Any, login: Login
) -> None:
    handler = "rest_framework.views.exception_handler"
    settings.REST_FRAMEWORK = {**settings.REST_FRAMEWORK, "EXCEPTION_HANDLER": handler}
    problem_of(login("view_job").get("/kjo/jobs/?limit=x"), 400)


def test_pages_for_people_are_there_if_the_project_has_them(
    monkeypatch: pytest.MonkeyPatch, login: Login
) -> None:
    # Given a payload that would do something on a page
    monkeypatch.setattr(KjoView, "renderer_classes", [JSONRenderer, BrowsableAPIRenderer])
    client = login("view_job", "view_payload")
    JobFactory(handler="<script>alert(1)</script>")
    # Then a program gets JSON, whatever it accepts
    for accept in ("application/json", "*/*"):
        assert client.get("/kjo/jobs/", HTTP_ACCEPT=accept)["Content-Type"] == "application/json"
    problem_of(client.get("/kjo/jobs/", HTTP_ACCEPT="image/png"), 406)
    problem_of(client.get("/kjo/jobs/?format=xml"), 406)
    assert client.get("/kjo/jobs/?format=json").status_code == 200


def test_without_the_admin_changes_are_logged(
    settings: Any, login: Login, greet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    client = login("enqueue_job")
    apps = [app for app in settings.INSTALLED_APPS if app != "django.contrib.admin"]
    settings.INSTALLED_APPS = apps
    with caplog.at_level("INFO", logger="kjo_django"):
        answer = client.post("/kjo/jobs/", {"handler": "tests.greet", "payload": {"name": "Ada"}})
    assert answer.status_code == 201
    assert f"Enqueued. by {client.user}: {answer.json()['id']}" in caplog.text


def test_a_fault_of_the_server_is_not_hidden(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr("kjo_django.operations.search.page", fail)
    client = login("view_job")
    with pytest.raises(RuntimeError):
        client.get("/kjo/jobs/")
    client.raise_request_exception = False
    assert client.get("/kjo/jobs/").status_code == 500


def test_what_fails_in_the_audit_trail_is_not_done(
    login: Login, greet: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a log that cannot be written
    def fail(*arguments: Any, **options: Any) -> None:
        raise RuntimeError("no log")

    monkeypatch.setattr(LogEntry.objects.__class__, "log_actions", fail)
    client = login("enqueue_job", "view_job", "cancel_job")
    client.raise_request_exception = False
    job = JobFactory()
    # When something is changed
    client.post("/kjo/jobs/", {"handler": "tests.greet", "payload": {"name": "Ada"}})
    client.post(f"/kjo/jobs/{job.pk}/cancel/")
    # Then it was not
    assert Job.objects.get().state == "pending"


def test_a_view_can_be_called_without_an_address(greet: Any) -> None:
    """As the tests of a project may."""
    body = {"handler": "tests.greet", "payload": {"name": "Ada"}}
    request = APIRequestFactory().post("/", body, format="json")
    force_authenticate(request, user_with("enqueue_job"))
    answer = address(enqueue_job)(request)
    assert answer["Location"] == f"/kjo/jobs/{Job.objects.get().pk}/"
