"""Enqueueing over HTTP: once per id, refused before anything is written, never executed as text."""

from __future__ import annotations

import json
import threading
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.db import connections
from django.utils import timezone
from rest_framework.test import APIClient

from kjo_django import BatchItem, job, registry
from kjo_django.models import Job
from kjo_django.testing import drain
from tests.api.conftest import Login, errors_of, problem_of

URL = "/kjo/jobs/"
BODY = {"handler": "tests.greet", "payload": {"name": "Ada"}}


@pytest.fixture
def client(login: Login, db: None, greet: Any) -> APIClient:
    return login("enqueue_job")


def test_a_job_is_stored_and_runs(client: APIClient) -> None:
    # When
    answer = client.post(URL, {**BODY, "payload": {"name": "Ada", "customer": "c-1"}})
    # Then
    told = answer.json()
    assert answer.status_code == 201
    assert answer["Location"] == f"/kjo/jobs/{told['id']}/"
    assert told == {
        "id": told["id"],
        "is_new": True,
        "queue": "default",
        "handler": "tests.greet",
        "unique_id": None,
        "state": "queued",
    }
    assert Job.objects.get().key == "c-1"
    assert drain().results == ["Hello Ada"]


def test_a_job_that_is_run_in_batches_is_stored_and_runs(client: APIClient) -> None:
    # Given
    ran: list[str] = []

    @job(name="tests.greet_all", batch=10)
    def greet_all(items: list[BatchItem]) -> None:
        ran.extend(item.payload["name"] for item in items)

    try:
        # When
        answer = client.post(URL, {**BODY, "handler": "tests.greet_all"})
        drain()
    finally:
        registry.unregister("tests.greet_all")
    # Then
    assert (answer.status_code, ran) == (201, ["Ada"])


def test_the_same_id_again_is_the_same_job(client: APIClient) -> None:
    # Given a job with an id of the caller's
    first = client.post(URL, {**BODY, "unique_id": "greeting-1"})
    # When it is sent again, as after an answer that was lost
    second = client.post(URL, {**BODY, "unique_id": "greeting-1"})
    # Then nothing was stored, and nobody is said to have done anything
    assert (first.status_code, second.status_code) == (201, 200)
    assert second.json() == {**first.json(), "is_new": False}
    assert second["Location"] == first["Location"]
    assert Job.objects.count() == LogEntry.objects.count() == 1
    # and so it is while the result is kept
    drain()
    third = client.post(URL, {**BODY, "unique_id": "greeting-1"})
    assert third.status_code == 200
    assert third.json()["state"] == "completed"


def test_a_cancelled_job_begins_anew_under_its_id(client: APIClient) -> None:
    first = client.post(URL, {**BODY, "unique_id": "greeting-1"}).json()
    Job.objects.update(state="cancelled")
    again = client.post(URL, {**BODY, "unique_id": "greeting-1"})
    assert again.status_code == 201
    assert again.json()["id"] == first["id"]
    assert Job.objects.get().generation == 2


def test_options_are_those_of_using(client: APIClient) -> None:
    now = timezone.now()
    expires = now + timedelta(days=1)
    answer = client.post(
        URL,
        {
            **BODY,
            "queue": "mails",
            "key": "k",
            "priority": -7,
            "delay": 90.5,
            "expires_at": expires.isoformat(),
            "max_attempts": 2,
            "result_ttl": 0.5,
        },
    )
    assert answer.status_code == 201, answer.content
    job = Job.objects.get()
    assert (job.queue, job.key, job.max_attempts, job.result_ttl) == ("mails", "k", 2, 500)
    assert job.priority == -1  # a job with a key has the priority of its level (decision 195)
    assert timedelta(seconds=90) < job.available_at - now < timedelta(seconds=100)
    assert job.expires_at == expires


def test_a_moment_is_taken_with_any_offset(client: APIClient) -> None:
    client.post(URL, {**BODY, "run_at": "2035-01-31T12:00:00+05:30"})
    assert Job.objects.get().available_at.isoformat() == "2035-01-31T06:30:00+00:00"


def test_the_signal_and_the_log_know_of_it(
    client: APIClient, hear: Any, django_capture_on_commit_callbacks: Any
) -> None:
    heard = hear("job_enqueued")
    with django_capture_on_commit_callbacks(execute=True):
        client.post(URL, {**BODY, "unique_id": "greeting-1"})
    assert [each["unique_id"] for each in heard] == ["greeting-1"]
    entry = LogEntry.objects.get()
    assert entry.is_addition()
    assert (entry.user, entry.object_id) == (client.user, str(Job.objects.get().pk))


# --- Refusals: before anything is written ---------------------------------------------------------

HUGE = 10**400
REFUSED = [
    ({}, "handler"),
    ([], ""),
    ("text", ""),
    (None, ""),
    ({**BODY, "handler": "tests.gret"}, "handler"),
    ({**BODY, "handler": 7}, "handler"),
    ({**BODY, "handler": None}, "handler"),
    ({**BODY, "payload": {}}, "payload"),
    ({**BODY, "payload": {"name": "Ada", "nmae": "Ada"}}, "payload"),
    ({**BODY, "payload": ["Ada"]}, "payload"),
    ({**BODY, "payload": None}, "payload"),
    ({**BODY, "payload": {"name": "x" * 1_000_000}}, "payload"),
    ({**BODY, "payload": {"name": "Ada", "customer": "\0"}}, "payload"),
    ({**BODY, "payload": {"name": "Ada", "customer": "x" * 256}}, ""),
    ({**BODY, "uniqe_id": "a"}, "uniqe_id"),
    ({**BODY, "unique_id": ""}, "unique_id"),
    ({**BODY, "unique_id": "x" * 256}, "unique_id"),
    ({**BODY, "unique_id": "a\0b"}, "unique_id"),
    ({**BODY, "unique_id": 7}, "unique_id"),
    ({**BODY, "unique_id": {"a": 1}}, "unique_id"),
    ({**BODY, "key": "\0"}, "key"),
    ({**BODY, "queue": "mail"}, ""),
    ({**BODY, "queue": "\0"}, "queue"),
    ({**BODY, "delay": -1}, "delay"),
    ({**BODY, "delay": "60"}, "delay"),
    ({**BODY, "delay": True}, "delay"),
    ({**BODY, "delay": HUGE}, "delay"),
    ({**BODY, "delay": 10**12}, "delay"),
    ({**BODY, "delay": 1, "run_at": "2035-01-31T12:00:00Z"}, ""),
    ({**BODY, "run_at": "2035-01-31T12:00:00"}, "run_at"),
    ({**BODY, "run_at": "2035-01-31"}, "run_at"),
    ({**BODY, "run_at": "tomorrow"}, "run_at"),
    ({**BODY, "run_at": 7}, "run_at"),
    ({**BODY, "run_at": "0001-01-01T00:00:00+14:00"}, "run_at"),
    ({**BODY, "run_at": "9999-12-31T23:59:59-14:00"}, "run_at"),
    ({**BODY, "expires_at": "2035-13-31T12:00:00Z"}, "expires_at"),
    ({**BODY, "max_attempts": 0}, "max_attempts"),
    ({**BODY, "max_attempts": 1.5}, "max_attempts"),
    ({**BODY, "max_attempts": 2**31}, "max_attempts"),
    ({**BODY, "max_attempts": HUGE}, "max_attempts"),
    ({**BODY, "max_attempts": "3"}, "max_attempts"),
    ({**BODY, "result_ttl": 0}, "result_ttl"),
    ({**BODY, "priority": 101}, "priority"),
    ({**BODY, "priority": -101}, "priority"),
    ({**BODY, "priority": 1.5}, "priority"),
    ({**BODY, "priority": "high"}, "priority"),
]


@pytest.mark.parametrize(("body", "field"), REFUSED, ids=lambda value: f"{value!r:.60}")
def test_what_is_wrong_is_told_and_nothing_is_written(
    client: APIClient, body: Any, field: str, django_assert_max_num_queries: Any
) -> None:
    with django_assert_max_num_queries(4):  # the session, the user and the permissions
        answer = client.generic("POST", URL, json.dumps(body), content_type="application/json")
    assert field in errors_of(answer)
    assert not Job.objects.exists()
    assert not LogEntry.objects.exists()


RAW = [
    (b"", 400),
    (b"{", 400),
    (b"\xff\xfe", 400),
    (b"[" * 100_000, 400),
    (b'{"handler": ' + b'{"a":' * 50_000, 400),
    (b'{"handler": "tests.greet", "payload": {"name": ' + b"[" * 300 + b"]" * 300 + b"}}", 400),
    (b'{"handler": "tests.greet", "payload": {"name": NaN}}', 400),
    (b'{"handler": "tests.greet", "payload": {"name": 1e999}}', 400),
    (b'{"handler": "tests.greet", "payload": {"name": "\\ud800"}}', 400),
    (b'{"handler": "tests.greet", "unique_id": "\\ud800"}', 400),
    (b'{"handler": "tests.greet", "delay": ' + b"9" * 5000 + b"}", 400),
    (b'{"handler": "' + b"x" * 3_000_000 + b'"}', 413),
]


@pytest.mark.parametrize(("raw", "status"), RAW, ids=lambda value: f"{value!r:.50}")
def test_bytes_that_are_no_good_are_told_so(client: APIClient, raw: bytes, status: int) -> None:
    problem_of(client.generic("POST", URL, raw, content_type="application/json"), status)
    assert not Job.objects.exists()


def test_a_form_is_not_json(client: APIClient) -> None:
    for content_type in ("application/x-www-form-urlencoded", "text/plain", "application/xml", ""):
        answer = client.generic("POST", URL, b"handler=tests.greet", content_type=content_type)
        assert answer.status_code in (400, 415), content_type
        problem_of(answer, answer.status_code)


@pytest.mark.parametrize(
    "value",
    [
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(1)>',
        "x" * 800_000,
        "\u202eevil\u2066",
        "nul\0nul",
        {"__proto__": {"a": 1}, "$where": "1"},
        [[[[[[]]]]]],
        12345678901234567890,
        None,
    ],
    ids=lambda value: f"{value!r:.30}",
)
def test_whatever_a_payload_holds_is_data(client: APIClient, login: Login, value: Any) -> None:
    # Given
    told = client.post(URL, {**BODY, "payload": {"name": value}}).json()
    # When somebody looks at it
    answer = login("view_job", "view_payload").get(f"/kjo/jobs/{told['id']}/")
    # Then it is JSON, and the same
    assert answer["Content-Type"] == "application/json"
    assert answer.json()["payload"] == {"name": value}


@pytest.mark.parametrize("name", ["tests.other", "kjo_django.replay_dead_letters"])
def test_what_the_project_did_not_declare_as_a_job_is_not_called_from_outside(
    client: APIClient, forgotten_definitions: None, name: str
) -> None:
    # Given what an event's, a queue's or a task's handler looks like; one of our own is there
    class Other(registry.Handler):
        """Takes messages that its own side makes."""

    registry.register(Other(print, registry.HandlerOptions(name="tests.other")))
    assert registry.find(name) is not None
    # Then
    told = errors_of(client.post(URL, {"handler": name}))
    assert told == {"handler": f"No job is named {name!r}."}


# --- Races ----------------------------------------------------------------------------------------


@pytest.mark.postgres
def test_of_many_who_send_one_id_one_stores_it(postgres: None, greet: Any, login: Login) -> None:
    # Given
    users = [login("enqueue_job").user for _ in range(4)]
    start = threading.Barrier(len(users))
    answers: list[Any] = []

    def send(user: Any, id: str) -> None:
        client = APIClient()
        client.force_login(user)
        start.wait()
        answers.append(client.post(URL, {**BODY, "unique_id": id}))
        connections.close_all()

    for _ in range(5):
        answers.clear()
        id = uuid.uuid4().hex
        # When all send it at once
        threads = [threading.Thread(target=send, args=(user, id)) for user in users]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Then one stored it, and all were told of the same job
        assert sorted(answer.status_code for answer in answers) == [200, 200, 200, 201]
        assert len({answer.json()["id"] for answer in answers}) == 1
        assert Job.objects.filter(unique_id=id).count() == 1


@pytest.mark.parametrize(
    ("on_conflict", "code", "runs"),
    [("keep", 200, "first"), ("replace", 200, "second"), ("raise", 409, "first")],
)
def test_a_jobs_window_holds_over_http(
    client: APIClient, on_conflict: Any, code: int, runs: str
) -> None:
    # Given
    ran: list[str] = []
    hour = timedelta(hours=1)
    declared = job(name="tests.hourly", unique_for=hour, unique_by=(), on_conflict=on_conflict)
    declared(lambda text: ran.append(text))
    try:
        # When
        for text in ("first", "second"):
            answer = client.post(URL, {"handler": "tests.hourly", "payload": {"text": text}})
        # Then
        assert answer.status_code == code
        if code == 200:
            assert not answer.json()["is_new"]
            assert answer.json()["id"] == str(Job.objects.get().pk)
        assert LogEntry.objects.count() == (2 if on_conflict == "replace" else 1)
        drain()
        assert ran == [runs]
    finally:
        registry.unregister("tests.hourly")
