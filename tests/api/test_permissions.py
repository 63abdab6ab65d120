"""Who may do what: as in the admin (DASHBOARD.md), at every address."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.urls import get_resolver
from django.utils import timezone
from rest_framework.test import APIClient

from kjo_django.models import LimitControl, QueueControl, Schedule
from kjo_django.personal_data.erasure import start_erasure
from kjo_django.personal_data.person import Person
from tests.api.conftest import Login, problem_of
from tests.factories import DeadLetterFactory, JobFactory, ProcessedEventFactory, WorkerFactory
from tests.ledger.workflows import ended, imported

pytestmark = pytest.mark.django_db


@dataclass(frozen=True)
class Endpoint:
    """A method of an address, and what it takes to be allowed to."""

    method: str
    path: str
    permissions: tuple[str, ...]
    body: Any = None
    status: int = 200
    audited: str = ""

    def __str__(self) -> str:
        return f"{self.method} {self.path}"


LETTER_FILTER = {"queue": "default"}
ENDPOINTS = [
    Endpoint("GET", "jobs/", ("view_job",)),
    Endpoint(
        "POST",
        "jobs/",
        ("enqueue_job",),
        {"handler": "tests.greet", "payload": {"name": "Ada"}},
        201,
        "Enqueued.",
    ),
    Endpoint("GET", "jobs/{job}/", ("view_job",)),
    Endpoint("GET", "jobs/{done}/wait/", ("view_job",)),
    Endpoint("POST", "jobs/{job}/cancel/", ("view_job", "cancel_job"), {}, audited="Cancelled."),
    Endpoint("POST", "jobs/{job}/requeue/", ("view_job", "retry_job"), {}, audited="Requeued."),
    Endpoint("POST", "jobs/{later}/run-now/", ("view_job", "retry_job"), {}, audited="Run now."),
    Endpoint(
        "POST",
        "jobs/{job}/change-queue/",
        ("view_job", "retry_job"),
        {"queue": "mails"},
        audited="Moved to mails.",
    ),
    Endpoint(
        "POST",
        "jobs/{job}/change-expiry/",
        ("view_job", "retry_job"),
        {"expires_in": 60},
        audited="Expiry changed: expires_in: 60.0.",
    ),
    Endpoint("GET", "dead-letters/", ("view_deadletter",)),
    Endpoint("GET", "dead-letters/groups/", ("view_deadletter",)),
    Endpoint("GET", "dead-letters/{letter}/", ("view_deadletter",)),
    Endpoint(
        "POST",
        "dead-letters/{letter}/replay/",
        ("view_deadletter", "replay_dlq"),
        {},
        audited="Replayed.",
    ),
    Endpoint(
        "POST",
        "dead-letters/{letter}/edit-and-replay/",
        ("view_deadletter", "replay_dlq", "edit_payload"),
        {"payload": {"name": "Bo"}},
        audited="Replayed with another payload.",
    ),
    Endpoint(
        "POST",
        "dead-letters/{letter}/discard/",
        ("view_deadletter", "discard_dlq"),
        {"note": "spam"},
        audited="Discarded: spam",
    ),
    Endpoint(
        "POST",
        "dead-letters/replay/",
        ("view_deadletter", "replay_dlq"),
        LETTER_FILTER,
        audited="Replayed.",
    ),
    Endpoint(
        "POST",
        "dead-letters/discard/",
        ("view_deadletter", "discard_dlq"),
        {**LETTER_FILTER, "note": "spam"},
        audited="Discarded: spam",
    ),
    Endpoint("GET", "queues/", ("view_queuecontrol",)),
    Endpoint("GET", "queues/mails/", ("view_queuecontrol",)),
    Endpoint(
        "PATCH",
        "queues/mails/",
        ("view_queuecontrol", "change_queuecontrol"),
        {"concurrency": 2, "max_attempts": None},
        audited="Limits: concurrency: 2, max_attempts: None.",
    ),
    Endpoint(
        "POST", "queues/mails/pause/", ("view_queuecontrol", "pause_queue"), {}, audited="Paused."
    ),
    Endpoint(
        "POST",
        "queues/paused/resume/",
        ("view_queuecontrol", "pause_queue"),
        {},
        audited="Resumed.",
    ),
    Endpoint("GET", "limits/", ("view_limitcontrol",)),
    Endpoint("GET", "limits/queue:mails/", ("view_limitcontrol",)),
    Endpoint(
        "PATCH",
        "limits/queue:mails/",
        ("view_limitcontrol", "change_limitcontrol"),
        {"rate": "5/s"},
        audited="Limit: rate: 5/s.",
    ),
    Endpoint(
        "POST",
        "limits/queue:default/clear/",
        ("view_limitcontrol", "change_limitcontrol"),
        {},
        audited="As declared.",
    ),
    Endpoint("GET", "schedules/", ("view_schedule",)),
    Endpoint(
        "POST",
        "schedules/",
        ("view_schedule", "add_schedule"),
        {"name": "new", "job": "tests.greet", "payload": {"name": "Ada"}, "every": 60},
        201,
        "Added.",
    ),
    Endpoint("GET", "schedules/{schedule}/", ("view_schedule",)),
    Endpoint(
        "PATCH",
        "schedules/{schedule}/",
        ("view_schedule", "change_schedule"),
        {"every": 90},
        audited="Changed: every: 90.",
    ),
    *(
        Endpoint(
            "POST", f"schedules/{{schedule}}/{name}/", ("view_schedule", codename), {}, 200, audited
        )
        for name, codename, audited in (
            ("run-now", "run_schedule", "Run now."),
            ("pause", "pause_schedule", "Paused."),
            ("reset", "change_schedule", ""),
            ("delete", "delete_schedule", "Deleted."),
        )
    ),
    Endpoint(
        "POST",
        "schedules/{paused}/resume/",
        ("view_schedule", "pause_schedule"),
        {},
        audited="Resumed.",
    ),
    Endpoint("GET", "workers/", ("view_worker",)),
    Endpoint("GET", "workers/{worker}/", ("view_worker",)),
    Endpoint(
        "POST",
        "workers/{worker}/quiet/",
        ("view_worker", "control_worker"),
        {},
        audited="Asked to start nothing more.",
    ),
    Endpoint(
        "POST",
        "workers/{quiet}/unquiet/",
        ("view_worker", "control_worker"),
        {},
        audited="Asked to go on.",
    ),
    Endpoint(
        "POST",
        "workers/{worker}/stop/",
        ("view_worker", "control_worker"),
        {},
        audited="Asked to stop.",
    ),
    Endpoint("GET", "workflows/", ("view_workflow",)),
    Endpoint("GET", "workflows/{workflow}/", ("view_workflow",)),
    Endpoint(
        "POST",
        "workflows/{workflow}/cancel/",
        ("view_workflow", "cancel_workflow"),
        {},
        audited="Cancelled.",
    ),
    Endpoint(
        "POST",
        "workflows/{torn}/retry/",
        ("view_workflow", "retry_workflow"),
        {},
        audited="Retried from the failed steps.",
    ),
    Endpoint(
        "POST",
        "workflows/{workflow}/change-deadline/",
        ("view_workflow", "cancel_workflow"),
        {"seconds": 60},
        audited="Deadline changed: seconds: 60.0.",
    ),
    Endpoint(
        "POST",
        "personal-data/",
        ("erase_personal_data",),
        {"keys": ["customer-7"]},
        202,
        "Asked to erase personal data, found by keys (1).",
    ),
    Endpoint("GET", "personal-data/{erasure}/", ("erase_personal_data",)),
    Endpoint("GET", "processed-events/?event_id=e-1", ("view_processedevent",)),
    Endpoint("GET", "metrics/", ("view_job",)),
    Endpoint("GET", "metrics/queues/", ("view_job",)),
    Endpoint("GET", "metrics/handlers/", ("view_job",)),
    Endpoint("GET", "health/", ("view_job",), status=503),
]
each_endpoint = pytest.mark.parametrize("endpoint", ENDPOINTS, ids=str)


def name_of(path: str) -> str | None:
    """Return the name of an endpoint's address."""
    address = "/kjo/" + path.partition("?")[0].replace("{", "").replace("}", "")
    return get_resolver("tests.api.urls").resolve(address).url_name


def nightly(name: str, **columns: Any) -> Schedule:
    payload = {"name": "Ada"}
    row = Schedule(name=name, job="tests.greet", payload=payload, every=60, **columns)
    row.save()
    return row


@pytest.fixture
def ask(greet: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Send an endpoint's request about rows that are there."""
    # Its probes have threads and connections of their own: see the tests of operations.monitoring.
    monkeypatch.setattr("kjo_django.api.system.health", lambda timeout, thresholds: [])
    monkeypatch.setattr("kjo_django.api.system.is_healthy", lambda checks: False)
    ProcessedEventFactory(event_id="e-1")
    QueueControl.objects.create(queue="paused", is_paused=True)
    LimitControl.objects.create(name="queue:default", rate="1/s")
    places: dict[str, Any] = {  # some of them only where they are asked for
        "job": JobFactory(handler="tests.greet").pk,
        "later": JobFactory(available_at=timezone.now() + timedelta(hours=1)).pk,
        "done": JobFactory(completed=True).pk,
        "letter": DeadLetterFactory(of_job=True).pk,
        "erasure": start_erasure(Person.of(keys=["customer-7"]), actor="ops").pk,
        "worker": WorkerFactory().pk,
        "quiet": WorkerFactory(asked_to="quiet").pk,
        "torn": lambda: ended(loads=1, fails=True).pk,
        "workflow": lambda: imported(loads=1).pk,
        "schedule": nightly("one").pk,
        "paused": nightly("paused", is_paused=True).pk,
    }

    def made(name: str) -> Any:
        places[name] = place() if callable(place := places[name]) else place
        return places[name]

    def send(client: APIClient, endpoint: Endpoint) -> Any:
        path = re.sub(r"{(\w+)}", lambda found: str(made(found[1])), f"/kjo/{endpoint.path}")
        return client.generic(
            endpoint.method, path, *client._encode_data(endpoint.body, "json", None)
        )

    return send


@each_endpoint
def test_nobody_unknown_is_let_in(endpoint: Endpoint, ask: Any) -> None:
    answer = ask(APIClient(), endpoint)
    assert problem_of(answer, 401)["type"] == "urn:kjo:problem:not-authenticated"
    assert answer["WWW-Authenticate"].startswith("Basic")


@each_endpoint
def test_each_permission_is_needed(endpoint: Endpoint, ask: Any, login: Login) -> None:
    for missing in endpoint.permissions:
        others = [name for name in endpoint.permissions if name != missing]
        answer = ask(login(*others), endpoint)
        assert problem_of(answer, 403)["type"] == "urn:kjo:problem:permission-denied"
    assert not LogEntry.objects.exists()


@each_endpoint
def test_with_its_permissions_it_answers_and_tells_who_did_it(
    endpoint: Endpoint, ask: Any, login: Login
) -> None:
    # Given somebody with these permissions and no others
    client = login(*endpoint.permissions)
    # When
    answer = ask(client, endpoint)
    # Then
    assert answer.status_code == endpoint.status, answer.content
    assert answer["Content-Type"] == "application/json"
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert answer["Cache-Control"] == "private, no-store"
    entries = list(LogEntry.objects.values_list("user__username", "change_message"))
    wanted = [(client.user.username, endpoint.audited)] if endpoint.audited else []
    assert entries == wanted


@pytest.mark.large  # no method of these does anything
@each_endpoint
def test_another_method_is_refused_as_such(endpoint: Endpoint, ask: Any, login: Login) -> None:
    for method in ("DELETE", "PUT", "OPTIONS"):
        answer = ask(login(), Endpoint(method, endpoint.path, (), endpoint.body))
        assert problem_of(answer, 405)["type"] == "urn:kjo:problem:method-not-allowed"
        assert method not in answer["Allow"]
        assert endpoint.method in answer["Allow"]


def test_a_change_in_a_session_needs_the_csrf_token(login: Login, greet: Any) -> None:
    user = login("enqueue_job").user
    client = APIClient(enforce_csrf_checks=True)
    client.force_login(user)
    told = problem_of(client.post("/kjo/jobs/", {"handler": "tests.greet"}), 403)
    assert "CSRF" in told["detail"]


def test_a_user_who_was_deactivated_is_nobody(login: Login) -> None:
    client = login("view_job")
    User.objects.update(is_active=False)
    problem_of(client.get("/kjo/jobs/"), 401)


def test_every_address_is_in_this_table() -> None:
    tried = {name_of(endpoint.path) for endpoint in ENDPOINTS}
    from kjo_django.api.urls import urlpatterns

    assert tried == {pattern.name for pattern in urlpatterns}
