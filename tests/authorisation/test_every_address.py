"""Every address of the dashboard, the admin's lists and the REST API, asked by users with different
permissions, on every database: it answers without an error, writes nothing for those who may only
look, and shows no text of a payload to those who may not see payloads.

The addresses are those that are registered: a new one is asked, too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib import admin
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.db import connection, transaction
from django.db.models import Model
from django.test import Client
from django.urls import reverse
from django.utils import timezone

from kjo_django.admin.base import KjoAdmin
from kjo_django.admin.dashboard import screens
from kjo_django.models import (
    DeadLetter,
    Job,
    LimitControl,
    ProcessedEvent,
    QueueControl,
    Schedule,
    Worker,
    Workflow,
)
from kjo_django.personal_data.erasure import start_erasure
from kjo_django.personal_data.person import Person
from tests.dashboard.conftest import url
from tests.databases import MARIADB, POSTGRES, SQLITE
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    JobFailureFactory,
    MetricBucketFactory,
    ProcessedEventFactory,
    WorkerFactory,
)
from tests.ledger.workflows import imported

# hundreds of requests, on the databases
pytestmark = [pytest.mark.medium, pytest.mark.usefixtures("project")]

every_database = pytest.mark.parametrize("_database", [SQLITE, POSTGRES, MARIADB], indirect=True)

SECRET = "sesame-4711"
"""Is in every text that may quote a payload."""
WRITES = re.compile(r"\s*(INSERT|UPDATE|DELETE|REPLACE)\b.*kjo_", re.IGNORECASE | re.DOTALL)
BODY = {
    "queue": "mails",
    "handler": "tests.add",
    "job": "tests.add",
    "payload": "{}",
    "name": "new",
    "note": "a note",
    "every": "60",
    "rate": "5/s",
    "concurrency": "2",
    "seconds": "60",
    "expires_in": "60",
    "keys": "customer-7",
    "post": "yes",
    "_save": "Save",
}
"""Values of fields of all forms."""

Rows = dict[str, list[Model]]
Request = tuple[str, str, dict[str, Any]]


@pytest.fixture
def project(settings: Any, monkeypatch: pytest.MonkeyPatch, _database: None) -> Iterator[None]:
    """A project with the admin and the REST API."""
    pytest.importorskip("rest_framework")
    settings.ROOT_URLCONF = "tests.authorisation.urls"
    settings.KJO = {"SERVICE_NAME": "tests", "QUEUES": {"default": {}, "mails": {}, "ledger": {}}}
    # Its probes have threads and connections of their own: see the tests of operations.monitoring.
    monkeypatch.setattr("kjo_django.api.system.health", lambda timeout, thresholds: [])
    monkeypatch.setattr("kjo_django.api.system.is_healthy", lambda checks: True)
    cache.clear()
    yield
    cache.clear()


@pytest.fixture
def rows() -> Rows:
    """Something at every address, with the secret wherever a payload may be quoted."""
    data = f'{{"card": "{SECRET}"}}'.encode()
    quoting = {"payload": data, "key": SECRET, "headers": {"t": SECRET}}
    failed = JobFactory(failed=True, unique_id=SECRET, **quoting | {"error": SECRET})
    JobFailureFactory(job=failed, error=SECRET, traceback=SECRET)
    letter = DeadLetterFactory(
        job=failed, value=data, key=SECRET.encode(), error=SECRET, traceback=SECRET
    )
    workflow = imported(loads=1, id=SECRET)
    Workflow.objects.filter(pk=workflow.pk).update(reason=SECRET)
    worker = WorkerFactory(last_error=SECRET)
    MetricBucketFactory(worker_id=worker.pk)
    nightly = Schedule(name="nightly", job="ledger.write", payload={"card": SECRET}, every=60)
    nightly.save()
    erasure = Job.objects.get(pk=start_erasure(Person.of(keys=["customer-7"]), actor="ops").pk)
    return {
        "job": [
            failed,
            JobFactory(completed=True, **quoting | {"result": data}),
            JobFactory(available_at=timezone.now() + timedelta(hours=1), **quoting),
        ],
        "letter": [letter],
        "queue": [QueueControl.objects.create(queue="default")],
        "worker": [worker],
        "workflow": [workflow],
        "limit": [LimitControl.objects.create(name="queue:default", rate="1/s")],
        "schedule": [nightly],
        "event": [ProcessedEventFactory(event_id="e-1", event_data={"card": SECRET})],
        "erasure": [erasure],
    }


# --- Addresses ------------------------------------------------------------------------------------

OF_REST = {
    "jobs": "job",
    "dead-letters": "letter",
    "queues": "queue",
    "workers": "worker",
    "workflows": "workflow",
    "limits": "limit",
    "schedules": "schedule",
    "personal-data": "erasure",
}
OF_MODEL: dict[type[Model], str] = {
    Job: "job",
    DeadLetter: "letter",
    QueueControl: "queue",
    Worker: "worker",
    Workflow: "workflow",
    LimitControl: "limit",
    Schedule: "schedule",
    ProcessedEvent: "event",
}


def rest_requests(rows: Rows) -> Iterator[Request]:
    from kjo_django.api.urls import urlpatterns
    from tests.api.test_permissions import ENDPOINTS, name_of

    bodies = {(each.method, name_of(each.path)): each.body for each in ENDPOINTS}
    for pattern in urlpatterns:
        route = str(pattern.pattern)
        kind = OF_REST.get(route.partition("/")[0], "")
        for row in rows[kind] if "<" in route else [None]:
            address = re.sub("<[^>]*>", "" if row is None else str(row.pk), route)
            if address.endswith("/wait/"):
                address += "?timeout=0"
            for method in ("GET", "POST", "PATCH"):
                yield method, f"/kjo/{address}", bodies.get((method, pattern.name)) or {}
    yield "GET", "/kjo/processed-events/?event_id=e-1", {}


def dashboard_requests(rows: Rows) -> Iterator[Request]:
    for screen in screens():
        names = re.findall(r"<\w+:(\w+)>", screen.path)
        kind = "erasure" if screen.name.startswith("erasure") else (names or [""])[0]
        values = ["requeue"] if kind == "action" else [row.pk for row in rows.get(kind, [])]
        for value in values if names else [None]:
            address = url(screen.name, *([] if value is None else [value]))
            yield "GET", address, {}
            yield "POST", address, BODY | {"chosen": [str(row.pk) for row in rows["job"]]}
    yield "GET", f"{url('jobs')}?q=state:failed", {}


def admin_requests(rows: Rows) -> Iterator[Request]:
    for model, kind in OF_MODEL.items():
        site = admin.site._registry.get(model)
        if site is None:
            continue
        assert isinstance(site, KjoAdmin)
        keys = [row.pk for row in rows[kind]]
        for action in [*(each.name for each in site.table), "delete_selected", "nothing"]:
            chosen = {"action": action, "_selected_action": [str(key) for key in keys]}
            address = reverse(f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist")
            yield "POST", address, {**BODY, **chosen, "_save": []}
        for pattern in site.get_urls():
            if pattern.name is None:
                continue
            for key in keys if "<" in str(pattern.pattern) else [None]:
                arguments = [] if key is None else [key]
                address = reverse(f"admin:{pattern.name}", args=arguments)
                yield "GET", address, {}
                yield "POST", address, BODY


def requests(rows: Rows) -> Iterator[Request]:
    """Every registered address, with the methods that it may have."""
    yield "GET", reverse("admin:index"), {}
    yield from rest_requests(rows)
    yield from dashboard_requests(rows)
    yield from admin_requests(rows)


# --- Users ----------------------------------------------------------------------------------------


def ours() -> set[str]:
    """The permissions of this app."""
    names = Permission.objects.filter(content_type__app_label="kjo_django")
    return set(names.values_list("codename", flat=True))


def views() -> set[str]:
    return {name for name in ours() if name.startswith("view_")}


USERS: dict[str, Callable[[], set[str]]] = {
    "nothing": set,
    "views but payloads": lambda: views() - {"view_payload"},
    "views": views,
    "all but payloads": lambda: ours() - {"view_payload"},
    "all": ours,
}


def client_with(codenames: set[str]) -> Client:
    user = User.objects.create_user(f"user-{User.objects.count()}", is_staff=True)
    wanted = Permission.objects.filter(content_type__app_label="kjo_django", codename__in=codenames)
    assert wanted.count() == len(codenames), codenames
    user.user_permissions.set(wanted)
    client = Client()
    client.force_login(user)
    return client


# --- Answers --------------------------------------------------------------------------------------


def faults_of(rows: Rows, codenames: set[str]) -> tuple[list[str], set[str]]:
    """Send every request as somebody with these permissions.

    :return: what is wrong with the answers, and which of "shows" and "writes" some of the admin and
        of the REST API did.
    """
    client, faults, done = client_with(codenames), list[str](), set[str]()
    may_change = any(not name.startswith("view_") for name in codenames)
    for method, address, body in requests(rows):
        written: list[str] = []

        def note(execute: Any, sql: str, *rest: Any, written: list[str] = written) -> Any:
            if WRITES.match(sql):
                written.append(sql)
            return execute(sql, *rest)

        try:
            with transaction.atomic(), connection.execute_wrapper(note):
                answer = send(client, method, address, body)
                page = answer.getvalue().decode(errors="replace")
                transaction.set_rollback(True)
        except Exception as error:  # the next address is asked all the same
            faults.append(f"{method} {address}: {error!r}")
            continue
        if answer.status_code >= 500:
            faults.append(f"{method} {address}: {answer.status_code}")
        if not codenames and answer.status_code == 200 and address != reverse("admin:index"):
            faults.append(f"{method} {address}: is shown to anybody")
        surface = address.split("/")[1]
        if written:
            done.add(f"{surface} writes")
        if written and not may_change:
            faults.append(f"{method} {address}: writes {written[0][:100]}")
        if SECRET in page:
            done.add(f"{surface} shows")
            if "view_payload" not in codenames:
                faults.append(f"{method} {address}: shows a payload")
    return faults, done


def send(client: Client, method: str, address: str, body: dict[str, Any]) -> Any:
    if method == "GET":
        return client.get(address)
    if address.startswith("/kjo/"):
        return client.generic(method, address, json.dumps(body), "application/json")
    return client.post(address, body)


# --- Tests ----------------------------------------------------------------------------------------


PARTS = 5
"""Tests that the permissions are divided into."""
SHOWN, WRITTEN = {"admin shows", "kjo shows"}, {"admin writes", "kjo writes"}
CASES: list[tuple[str, set[str]]] = [
    ("nothing", set()),
    ("views but payloads", set()),
    ("views", SHOWN),
    ("all but payloads", WRITTEN),
    ("all", SHOWN | WRITTEN),
]


# Between two others of the table; the second is asked on PostgreSQL.
@pytest.mark.large("views-does2", "views but payloads-does1", "all but payloads-does3")
@pytest.mark.parametrize("_database", [SQLITE], indirect=True)
@pytest.mark.parametrize(("user", "does"), CASES)
def test_every_address_answers_whoever_asks(rows: Rows, user: str, does: set[str]) -> None:
    faults, done = faults_of(rows, USERS[user]())
    assert faults == []
    assert done == does


@pytest.mark.large("all-postgres", "views but payloads-mariadb")  # each server has one of the two
@pytest.mark.parametrize("_database", [POSTGRES, MARIADB], indirect=True)
@pytest.mark.parametrize("user", ["views but payloads", "all"])
def test_every_address_answers_on_servers_too(rows: Rows, user: str) -> None:
    """Whoever could see jobs and not payloads was answered 500 on PostgreSQL."""
    assert faults_of(rows, USERS[user]())[0] == []


class Replica:
    """A router that sends reads elsewhere, as Django's own example does."""

    def db_for_read(self, model: type[Model], **hints: Any) -> str | None:
        return "no such replica" if model._meta.app_label == "kjo_django" else None


@pytest.mark.large
@pytest.mark.parametrize("_database", [SQLITE], indirect=True)
def test_no_address_reads_rows_of_ours_from_where_a_router_sends_reads(
    rows: Rows, settings: Any
) -> None:
    """FINDINGS 2.10 n: a replica may not have them yet."""
    settings.DATABASE_ROUTERS = [Replica()]
    assert faults_of(rows, USERS["all"]())[0] == []


@pytest.mark.long
@every_database
@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "missing"])
@pytest.mark.parametrize("part", range(PARTS))
def test_every_address_answers_with_and_without_each_permission(
    rows: Rows, part: int, is_alone: bool
) -> None:
    for name in sorted(ours())[part::PARTS]:
        assert faults_of(rows, {name} if is_alone else ours() - {name})[0] == [], name
