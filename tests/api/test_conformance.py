"""The API does what its schema says, whatever it is asked: Schemathesis asks.

Within the process and on SQLite. Every other request is about rows that are there, so that more is
seen than 404; the rest is as generated.
"""

from __future__ import annotations

import base64
import os
import uuid
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from django.contrib.auth.models import User
from django.core.handlers.wsgi import WSGIHandler
from django.core.signals import request_finished, request_started
from django.db import close_old_connections
from drf_spectacular.generators import SchemaGenerator
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import positive_data_acceptance

from kjo_django.models import Schedule, Workflow
from kjo_django.personal_data.erasure import start_erasure
from kjo_django.personal_data.person import Person
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    JobFailureFactory,
    ProcessedEventFactory,
    WorkerFactory,
)

EXAMPLES = int(os.environ.get("KJO_API_EXAMPLES", "3"))
"""Of each operation, beside those Schemathesis makes of every limit the schema names."""

# What a schema cannot say: which handlers and queues there are, which members exclude others, that
# text holds no NUL, from when to when moments are taken.
EXCLUDED = [positive_data_acceptance]
# 503 is an answer of the health check like any other.
EXCLUDED_FROM_HEALTH = [*EXCLUDED, not_a_server_error]

schema = schemathesis.openapi.from_dict(
    SchemaGenerator(urlconf="tests.api.urls").get_schema(public=True)
).exclude(path="/schema/")
schema.app = WSGIHandler()

AUTHORIZATION = f"Basic {base64.b64encode(b'root:secret').decode()}"


@pytest.fixture(autouse=True)
def one_connection() -> Iterator[None]:
    """A server ends the connection with each request; here it holds the test's transaction."""
    for signal in (request_started, request_finished):
        signal.disconnect(close_old_connections)
    yield
    for signal in (request_started, request_finished):
        signal.connect(close_old_connections)


@pytest.fixture(autouse=True)
def rows(db: None, greet: Any, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[Any]]:
    """Ids that are there, by the beginning of the address."""
    User.objects.create_superuser("root", password="secret")
    # Its probes have threads and connections of their own, which do not see this transaction.
    monkeypatch.setattr("kjo_django.api.system.TIMEOUT", 0.0)
    ProcessedEventFactory()
    jobs = [JobFactory(handler="tests.greet"), JobFactory(completed=True), JobFailureFactory().job]
    letters = [DeadLetterFactory(), DeadLetterFactory(of_job=True), DeadLetterFactory()]
    return {
        "jobs": [row.pk for row in jobs],
        "wait": [row.pk for row in jobs[1:]],
        "dead-letters": [row.pk for row in letters],
        "personal-data": [start_erasure(Person.of(keys=["customer-7"]), actor="ops").pk],
        "schedules": [Schedule.objects.create(name="nightly", job="tests.greet", every=60).pk],
        "workflows": [Workflow.objects.create(name="import").pk],
        "workers": [WorkerFactory().pk, WorkerFactory(stale=True).pk],
    }


def about_rows(case: Any, rows: dict[str, list[Any]]) -> None:
    """Let the request be about a row that is there, if what it is about could be one."""
    _, _, kind, *rest = case.path.split("/")
    given = (case.path_parameters or {}).get("id")
    try:
        number = uuid.UUID(str(given)).int
    except ValueError:
        return
    known = rows["wait" if "wait" in rest else kind]
    case.path_parameters["id"] = str(known[number % len(known)])


@schema.parametrize()
@hypothesis.settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(hypothesis.HealthCheck),
)
def test_no_request_breaks_it_and_no_answer_breaks_the_schema(
    case: Any, rows: dict[str, list[Any]]
) -> None:
    if hash(str(case.path_parameters)) % 4:
        about_rows(case, rows)
    if isinstance(case.body, dict) and case.body.get("handler") == "shop.send_confirmation":
        case.body["handler"] = "tests.greet"
    is_health = case.path == "/kjo/health/"
    case.call_and_validate(
        headers={"Authorization": AUTHORIZATION},
        excluded_checks=EXCLUDED_FROM_HEALTH if is_health else EXCLUDED,
    )
