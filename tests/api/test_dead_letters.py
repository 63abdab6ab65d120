"""Dead letters over HTTP: found, grouped, replayed, repaired, discarded; one and many."""

from __future__ import annotations

import json
import uuid
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone
from rest_framework.test import APIClient

from kjo_django.api import paging
from kjo_django.enqueue import storing
from kjo_django.exceptions import PublishError
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import bulk
from kjo_django.testing import drain, run_job
from tests.api.conftest import Login, errors_of, problem_of
from tests.factories import DeadLetterFactory, JobFactory, ProcessedEventFactory

pytestmark = pytest.mark.django_db

URL = "/kjo/dead-letters/"


def url(letter: Any, action: str = "") -> str:
    return f"{URL}{getattr(letter, 'pk', letter)}/{action and action + '/'}"


@pytest.fixture
def operator(login: Login) -> APIClient:
    return login("view_deadletter", "replay_dlq", "discard_dlq", "edit_payload")


# --- Found ----------------------------------------------------------------------------------------


def test_the_open_ones_are_listed_unless_others_are_wanted(operator: APIClient) -> None:
    kept, discarded = DeadLetterFactory(), DeadLetterFactory(discarded=True)
    for state, wanted in (("open", kept), ("discarded", discarded)):
        (letter,) = operator.get(URL, {"state": state}).json()["results"]
        assert letter["id"] == str(wanted.pk)
    assert [each["id"] for each in operator.get(URL).json()["results"]] == [str(kept.pk)]


def test_what_may_quote_a_payload_needs_the_permission_for_payloads(login: Login) -> None:
    # Given
    letter = DeadLetterFactory(error="no ada", error_type="shop.NotFound")
    blind, seeing = login("view_deadletter"), login("view_deadletter", "view_payload")
    # When, then
    for place in (URL, f"{URL}groups/", url(letter)):
        hidden, shown = blind.get(place).content.decode(), seeing.get(place).content.decode()
        assert "no ada" not in hidden
        assert "no ada" in shown
        assert "shop.NotFound" in hidden, "by which errors are told apart"
    # Nor is it found by guessing
    acting = login("view_deadletter", "replay_dlq", "discard_dlq")
    for answer in (
        blind.get(URL, {"error": "ada"}),
        blind.get(f"{URL}groups/", {"error": "ada"}),
        acting.post(f"{URL}replay/", {"error": "ada", "dry_run": True}),
        acting.post(f"{URL}discard/", {"error": "ada", "note": "x", "dry_run": True}),
    ):
        assert "takes the permission to see payloads" in problem_of(answer, 403)["detail"]


@pytest.mark.parametrize("state", ["open", "discarded"])
def test_every_filter_restricts(login: Login, state: str) -> None:
    operator = login("view_deadletter", "view_payload")
    now = timezone.now()
    closed = {"discarded": True} if state == "discarded" else {}
    DeadLetterFactory(failed_at=now - timedelta(days=1), **closed)
    wanted = DeadLetterFactory(
        queue="mails",
        handler="shop.send",
        reason="fatal",
        error="Too many messages",
        fingerprint="f-2",
        **closed,
    )
    for query in (
        {"queue": "mails"},
        {"handler": "shop.send"},
        {"reason": "fatal"},
        {"error": "TOO MANY"},
        {"fingerprint": "f-2"},
        {"since": (now - timedelta(hours=1)).isoformat()},
    ):
        (letter,) = operator.get(URL, {"state": state, **query}).json()["results"]
        assert letter["id"] == str(wanted.pk), query
    until = {"state": state, "until": (now - timedelta(hours=1)).isoformat()}
    (letter,) = operator.get(URL, until).json()["results"]
    assert letter["id"] != str(wanted.pk)


def test_a_rare_one_is_found_page_by_page_within_the_window(
    operator: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given rows of which each request looks at three
    monkeypatch.setattr(paging, "WINDOW", 3)
    wanted = DeadLetterFactory(handler="shop.rare")
    DeadLetterFactory.create_batch(7)
    # When all pages are read
    found, pages, query = [], 0, {"handler": "shop.rare"}
    while True:
        told = operator.get(URL, query).json()
        found += [letter["id"] for letter in told["results"]]
        pages += 1
        if told["next_cursor"] is None:
            break
        query["cursor"] = told["next_cursor"]
    # Then
    assert found == [str(wanted.pk)]
    assert pages == 3


def test_equal_errors_are_one_group(operator: APIClient) -> None:
    DeadLetterFactory.create_batch(3, fingerprint="a")
    DeadLetterFactory(fingerprint="b", handler="shop.send")
    told = operator.get(f"{URL}groups/").json()["results"]
    assert [(group["fingerprint"], group["count"]) for group in told] == [("a", 3), ("b", 1)]
    (group,) = operator.get(f"{URL}groups/", {"handler": "shop.send"}).json()["results"]
    assert group["fingerprint"] == "b"


def test_what_it_held_needs_the_permission_for_payloads(login: Login) -> None:
    letter = DeadLetterFactory(value=b'{"a": 1, "password": "x"}')
    told = login("view_deadletter").get(url(letter)).json()
    assert not {"key", "payload", "headers", "traceback"} & told.keys()
    told = login("view_deadletter", "view_payload").get(url(letter)).json()
    assert told["payload"] == {"a": 1, "password": "[redacted]"}
    assert told["key"] == "key-1"
    assert told["traceback"].startswith("Traceback")


# --- One ------------------------------------------------------------------------------------------


def test_one_of_a_job_is_replayed_by_running_the_job_again(operator: APIClient) -> None:
    letter = DeadLetterFactory(of_job=True)
    answer = operator.post(url(letter, "replay"))
    assert answer.json()["outcome"] == "replayed"
    assert answer.json()["dead_letter"]["state"] == "replayed"
    assert Job.objects.get().state == "queued"
    # and not twice
    told = problem_of(operator.post(url(letter, "replay")), 409)
    assert told["detail"] == "The dead letter is replayed already."
    assert LogEntry.objects.count() == 1


def test_what_has_taken_effect_is_refused_unless_forced(operator: APIClient) -> None:
    letter = DeadLetterFactory()
    ProcessedEventFactory(
        event_id=letter.message_id, event_type=letter.handler, service_name="tests"
    )
    told = problem_of(operator.post(url(letter, "replay")), 409)
    assert "already processed" in told["detail"]
    assert operator.post(url(letter, "replay"), {"force": True}).status_code == 200


def test_while_the_broker_is_away_it_stays_open(
    operator: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise PublishError("no broker")

    monkeypatch.setattr(storing, "publish", refuse)
    letter = DeadLetterFactory()
    assert "no broker" in problem_of(operator.post(url(letter, "replay")), 503)["detail"]
    assert DeadLetter.objects.get().state == "open"


def test_a_repaired_one_runs_with_what_it_was_given(operator: APIClient, greet: Any) -> None:
    # Given one that died of its payload
    job = JobFactory(failed=True, handler="tests.greet", payload=b'{"nmae": "Ada"}')
    letter = DeadLetterFactory(job=job, value=b'{"nmae": "Ada"}')
    # When
    answer = operator.post(url(letter, "edit-and-replay"), {"payload": {"name": "Ada"}})
    # Then
    assert answer.status_code == 200, answer.content
    assert drain().results == ["Hello Ada"]
    assert bytes(DeadLetter.objects.get().value) == b'{"nmae": "Ada"}'


@pytest.mark.parametrize(
    ("action", "body", "expected"),
    [
        ("replay", {}, "Hello Old"),
        ("replay", {"force": True}, "Hello Old"),
        ("edit-and-replay", {"payload": {"name": "Repaired"}}, "Hello Repaired"),
    ],
    ids=["replay", "force", "edit"],
)
def test_one_whose_id_was_enqueued_again_runs_what_it_holds(
    operator: APIClient, greet: Any, action: str, body: dict[str, Any], expected: str
) -> None:
    # Given a job that began anew under its id, and has completed
    job = JobFactory(failed=True, handler="tests.greet", payload=b'{"name": "Old"}')
    letter = DeadLetterFactory(job=job, handler="tests.greet", value=b'{"name": "Old"}')
    Job.objects.update(generation=2, state="completed", payload=b'{"name": "New"}')
    # When
    answer = operator.post(url(letter, action), body)
    # Then
    assert answer.status_code == 200, answer.content
    assert drain().results == [expected]
    job.refresh_from_db()
    assert (job.generation, job.state, job.arguments) == (2, "completed", {"name": "New"})
    assert DeadLetter.objects.get().state == "replayed"


def test_what_the_editor_was_not_shown_is_kept(login: Login, greet: Any) -> None:
    # Given a payload with a secret, as it is shown
    stored = b'{"name": "Ada", "customer": "c", "password": "hunter2"}'
    job = JobFactory(failed=True, handler="tests.greet", payload=stored)
    letter = DeadLetterFactory(job=job, value=stored)
    client = login("view_deadletter", "view_payload", "replay_dlq", "edit_payload")
    shown = client.get(url(letter)).json()["payload"]
    assert shown["password"] == "[redacted]"
    # When something else is repaired
    client.post(url(letter, "edit-and-replay"), {"payload": {**shown, "name": "Bo"}})
    # Then
    kept = json.loads(bytes(Job.objects.get().payload))
    assert kept == {"name": "Bo", "customer": "c", "password": "hunter2"}


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"payload": None},
        {"payload": {"b": "[redacted]"}},
        {"payload": {"name": "x" * 1_000_000}},
        {"value": 1},
    ],
)
def test_a_repair_that_is_none_is_refused(operator: APIClient, body: Any) -> None:
    letter = DeadLetterFactory(of_job=True)
    errors_of(operator.post(url(letter, "edit-and-replay"), body))
    assert DeadLetter.objects.get().state == "open"


@pytest.mark.parametrize("payload", [{"a": 1}, 5, "x", [1]])
def test_what_is_no_bytes_does_not_become_some(operator: APIClient, payload: Any) -> None:
    """The content type is whatever the message said; a number would be as many zeros."""
    pytest.importorskip("kjo_django.kdlq")
    letter = DeadLetterFactory(content_type="application/octet-stream", value=b"\x00")
    errors_of(operator.post(url(letter, "edit-and-replay"), {"payload": payload}))
    assert DeadLetter.objects.get().state == "open"


def test_one_that_cannot_be_written_is_refused(operator: APIClient) -> None:
    letter = DeadLetterFactory(content_type="application/x-unknown")
    errors_of(operator.post(url(letter, "edit-and-replay"), {"payload": {}}))


@pytest.mark.parametrize("note", ["", "   ", None, 7, "x" * 301, "nul\0"])
def test_discarding_needs_a_note(operator: APIClient, note: Any) -> None:
    letter = DeadLetterFactory()
    assert "note" in errors_of(operator.post(url(letter, "discard"), {"note": note}))
    assert DeadLetter.objects.get().state == "open"


def test_a_discarded_one_says_why_and_who(operator: APIClient) -> None:
    letter = DeadLetterFactory()
    told = operator.post(url(letter, "discard"), {"note": "<b>spam</b>"}).json()
    assert told["dead_letter"]["note"] == f"<b>spam</b> ({operator.user.username})"
    problem_of(operator.post(url(letter, "discard"), {"note": "again"}), 409)


@pytest.mark.parametrize(
    ("action", "body"),
    [("replay", {}), ("discard", {"note": "x"}), ("edit-and-replay", {"payload": {}})],
)
def test_one_that_is_not_there(operator: APIClient, action: str, body: Any) -> None:
    for id in (uuid.uuid4(), "x"):
        problem_of(operator.post(url(id, action), body), 404)


# --- Many -----------------------------------------------------------------------------------------


def test_a_dry_run_tells_and_changes_nothing(operator: APIClient) -> None:
    DeadLetterFactory.create_batch(3, of_job=True)
    told = operator.post(f"{URL}replay/", {"queue": "default", "dry_run": True}).json()
    assert (told["dry_run"], told["matched"], told["replayed"]) == (True, 3, 0)
    told = operator.post(
        f"{URL}discard/", {"queue": "default", "note": "x", "dry_run": True}
    ).json()
    assert told == {"dry_run": True, "discarded": 3}
    assert DeadLetter.objects.filter(state="open").count() == 3
    assert not LogEntry.objects.exists()


def test_a_selection_is_replayed_up_to_its_limit(operator: APIClient) -> None:
    DeadLetterFactory.create_batch(3, of_job=True)
    other = DeadLetterFactory(of_job=True, handler="shop.send")
    told = operator.post(f"{URL}replay/", {"handler": "tests.add", "limit": 2}).json()
    assert (told["replayed"], told["ok"]) == (2, True)
    assert DeadLetter.objects.filter(state="open").count() == 2
    assert DeadLetter.objects.get(pk=other.pk).state == "open"
    assert LogEntry.objects.count() == 2


def test_a_request_looks_at_no_more_letters_than_its_limit(
    operator: APIClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many of them are refused: there may be millions."""
    # Given letters whose jobs have moved on
    DeadLetterFactory.create_batch(4, of_job=True)
    Job.objects.update(state="completed")
    # Then
    told = operator.post(f"{URL}replay/", {"all": True, "limit": 2}).json()
    assert (told["matched"], told["replayed"], told["refused"]) == (
        2,
        0,
        {"the job is completed": 2},
    )
    # And a dry run stops by itself
    monkeypatch.setattr("kjo_django.api.actions.PREVIEW_LIMIT", 3)
    told = operator.post(f"{URL}replay/", {"all": True, "dry_run": True}).json()
    assert (told["matched"], told["is_capped"]) == (3, True)


def test_ids_are_a_selection(operator: APIClient) -> None:
    letters = DeadLetterFactory.create_batch(3)
    ids = [str(letter.pk) for letter in letters[:2]]
    told = operator.post(f"{URL}discard/", {"ids": ids, "note": "x"}).json()
    assert told["discarded"] == 2
    assert DeadLetter.objects.get(state="open").pk == letters[2].pk


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"all": False},
        {"all": True, "queue": "default"},
        {"ids": []},
        {"ids": ["x"]},
        {"ids": [False]},
        {"ids": ["00000000-0000-7000-8000-000000000001"] * 501},
        {"queu": "default"},
        {"queue": "default", "rate": 0},
        {"queue": "default", "rate": -1},
        {"queue": "default", "rate": 1e-300},
        {"queue": "default", "limit": 0},
        {"queue": "default", "since": "2026-01-01T00:00:00"},
        {"reason": "because"},
    ],
    ids=lambda body: f"{body!r:.60}",
)
def test_a_selection_that_is_unclear_takes_nothing(operator: APIClient, body: Any) -> None:
    DeadLetterFactory()
    errors_of(operator.post(f"{URL}replay/", body))
    errors_of(operator.post(f"{URL}discard/", {**body, "note": "x"}))
    assert DeadLetter.objects.get().state == "open"


def test_all_is_taken_when_that_is_said(operator: APIClient) -> None:
    DeadLetterFactory.create_batch(2)
    told = operator.post(f"{URL}discard/", {"all": True, "note": "x"}).json()
    assert told["discarded"] == 2


def test_many_are_done_by_a_job(login: Login, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given more than a request does itself
    monkeypatch.setattr(bulk, "SYNCHRONOUS_LIMIT", 2)
    old, *_ = DeadLetterFactory.create_batch(3, of_job=True)
    DeadLetterFactory.create_batch(3, handler="shop.send")
    # One of which has begun anew under its id, with another payload
    Job.objects.filter(pk=old.job_id).update(generation=2, payload=b'{"a": 2}')
    client = login("view_deadletter", "replay_dlq", "discard_dlq", "view_job", "view_payload")
    # When
    replay = client.post(f"{URL}replay/", {"handler": "tests.add"})
    discard = client.post(f"{URL}discard/", {"handler": "shop.send", "note": "spam"})
    # Then a job each is told of, with who asked in its log
    assert (replay.status_code, discard.status_code) == (202, 202)
    assert replay["Location"] == replay.json()["url"]
    assert DeadLetter.objects.filter(state="open").count() == 6
    entries = LogEntry.objects.order_by("pk").values_list("object_id", "change_message")
    assert list(entries) == [
        (replay.json()["job"], "Replays dead letters."),
        (discard.json()["job"], "Discards dead letters: spam"),
    ]
    # and when they have run, so have the letters
    for answer in (replay, discard):
        run_job(answer.json()["job"])
        assert client.get(answer.json()["url"]).json()["status"] == "completed"
    assert client.get(replay.json()["url"]).json()["result"]["replayed"] == 3
    assert Job.objects.get(pk=old.job_id).state == "failed"
    again = Job.objects.filter(handler="tests.add", generation=1)
    assert [each.arguments for each in again] == [{"a": 1}]
    states = DeadLetter.objects.order_by("handler").values_list("state", "note")
    assert states[0] == ("discarded", f"spam ({client.user.username})")
    assert {state for state, _ in states} == {"replayed", "discarded"}


def test_a_slow_pace_is_kept_by_a_job(operator: APIClient) -> None:
    DeadLetterFactory.create_batch(2, of_job=True)
    slow = {"queue": "default", "rate": 0.1}
    assert operator.post(f"{URL}replay/", slow).status_code == 202
    assert "limit" in errors_of(operator.post(f"{URL}replay/", {**slow, "limit": 2}))


def test_where_no_worker_would_do_it_that_is_told(
    operator: APIClient, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nobody() -> str:
        raise ValueError("No worker would run it")

    monkeypatch.setattr(bulk, "SYNCHRONOUS_LIMIT", 0)
    monkeypatch.setattr(bulk, "operations_queue", nobody)
    DeadLetterFactory()
    problem_of(operator.post(f"{URL}replay/", {"queue": "default"}), 409)
