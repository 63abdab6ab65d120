"""Everything that the tables hold of a person is found and erased, and nothing of anybody else."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
from django.apps import apps
from django.contrib.auth.models import Permission, User
from django.core.management import CommandError, call_command
from django.db import connection, models
from django.utils import timezone

from kjo_django import PermanentError, chain, job, registry
from kjo_django.clock import CLOCK
from kjo_django.engine.handler.running import abort_name
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.models import (
    ORIGIN_ID,
    DeadLetter,
    Job,
    JobFailure,
    Schedule,
    TransportMessage,
    Workflow,
)
from kjo_django.operations.bulk import start_bulk
from kjo_django.operations.internal import UserActor
from kjo_django.operations.jobs import cancel, requeue
from kjo_django.operations.search import JobFilter
from kjo_django.personal_data.erasure import Mode, Report, erase, start_erasure
from kjo_django.personal_data.person import Person
from kjo_django.runtime import get_coordination
from kjo_django.testing import drain, run_job
from tests.factories import DeadLetterFactory, JobFactory, ProcessedEventFactory

ADA, BOB = "ada@example.org", "bob@example.org"
EMAIL = ("customer.email", ADA)
KJO = {"SERVICE_NAME": "tests", "QUEUES": {"shop": {}}, "OPERATIONS_QUEUE": "shop"}


@pytest.fixture(params=["sqlite_file", pytest.param("postgres", marks=pytest.mark.postgres)])
def database(request: pytest.FixtureRequest, settings: Any) -> None:
    request.getfixturevalue(request.param)
    settings.KJO = KJO


pytestmark = pytest.mark.usefixtures("database")


class Shop:
    """Jobs about customers."""

    def __init__(self) -> None:
        @job(name="shop.welcome", queue="shop")
        def welcome(customer: dict[str, str]) -> str:
            return f"wrote to {customer['email']}"

        @job(name="shop.refuse", queue="shop")
        def refuse(customer: dict[str, str]) -> None:
            raise PermanentError(f"no mail goes to {customer['email']}")

        @job(name="shop.end", queue="shop")
        def end() -> None: ...

        self.welcome, self.refuse, self.end = welcome, refuse, end

    def sign_up(self, email: str) -> Any:
        """Enqueue a workflow of two steps."""
        steps = chain(self.welcome.step(**of(email)), self.end.step())
        return steps.enqueue(name="signup", id="signup-7")

    def run(self, **options: Any) -> Any:
        return drain(raise_errors=False, **options)


@pytest.fixture(autouse=True)
def shop() -> Iterator[Shop]:
    with registry.isolated():
        yield Shop()


def of(email: str) -> dict[str, Any]:
    return {"customer": {"email": email}}


def everything() -> str:
    """Return all values of all tables as one text."""
    found = []
    for model in apps.get_app_config("kjo_django").get_models():
        if not model._meta.managed:
            continue
        for row in model._default_manager.all():
            for column in model._meta.concrete_fields:
                value = column.value_from_object(row)
                if isinstance(column, models.BinaryField):
                    value = bytes(value or b"").decode("utf-8", "replace")
                if column.name == "headers" and model in (DeadLetter, TransportMessage):
                    value = {name: str(text) for name, text in names.from_json(value).items()}
                found.append(str(value))
    return "\n".join(found)


def erased(*fields: tuple[str, str], **options: Any) -> Report:
    known = {name: options.pop(name) for name in ("keys", "ids") if name in options}
    return erase(Person.of(fields=fields, **known), **options)


# --- What is found and erased ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", list(Mode))
def test_nothing_of_a_person_is_left_in_any_table_and_all_of_others_is(
    shop: Shop, mode: Mode
) -> None:
    # Given: each of them has jobs that completed and that failed, with their dead letters
    for email in (ADA, BOB):
        shop.welcome.using(key=f"key {email}", id=f"id {email}").enqueue(**of(email))
        shop.refuse.using(headers={"sent-by": email}).enqueue(**of(email))
    shop.run()
    for email in (ADA, BOB):
        JobFactory(completed=True, result=json.dumps({"v": of(email)}).encode())
        DeadLetterFactory(value=json.dumps(of(email)).encode(), error=f"no {email}")
        ProcessedEventFactory(event_data=of(email))
    before = everything()
    assert before.count(ADA) == before.count(BOB) > 10
    # When
    dry = erased(EMAIL, mode=mode, dry_run=True)
    # Then
    assert everything() == before
    # When
    report = erased(EMAIL, mode=mode)
    # Then
    assert dry.counts == report.counts
    assert report.counts == {
        "jobs": 3,
        "failures": 1,
        "dead_letters": 2,
        "messages": 2,  # drain() leaves those of the two jobs that were enqueued
        "processed_events": 1,
    }
    assert report.is_complete
    after = everything()
    assert after.count(ADA) == 0
    assert after.count(BOB) == before.count(BOB)
    assert Job.objects.count() == (3 if mode is Mode.DELETE else 6)
    # And: nothing is found any more
    assert not erased(EMAIL, mode=mode).counts


def test_a_row_is_found_by_key_by_id_by_field_or_by_the_value_of_any_field() -> None:
    by_key = JobFactory(completed=True, key="customer-7")
    by_unique_id = JobFactory(completed=True, unique_id="signup-7")
    by_own_id = JobFactory(completed=True)
    in_a_list = JobFactory(completed=True, payload=b'{"orders": [{"by": 6}, {"by": 7}]}')
    anywhere = JobFactory(completed=True, payload=b'{"deep": {"er": ["ada"]}}')
    letter = DeadLetterFactory(key=b"customer-7")
    message = DeadLetterFactory(message_id="signup-7")
    other = JobFactory(completed=True, key="customer-77", unique_id="signup-77")
    # When
    report = erased(
        ("orders.by", "7"),
        ("*", "ada"),
        keys=["customer-7"],
        ids=["signup-7", str(by_own_id.pk)],
    )
    # Then
    assert report.counts == {"jobs": 5, "dead_letters": 2}
    found = [by_key, by_unique_id, by_own_id, in_a_list, anywhere]
    assert not Job.objects.filter(pk__in=[row.pk for row in found]).exists()
    assert not DeadLetter.objects.filter(pk__in=[letter.pk, message.pk]).exists()
    assert list(Job.objects.all()) == [other]


def test_more_rows_than_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kjo_django.personal_data.erasure.WITH_PAYLOADS", 3)
    monkeypatch.setattr("kjo_django.personal_data.erasure.CHUNK", 2)
    for number in range(10):
        JobFactory(completed=True, payload=json.dumps(of(ADA if number % 3 else BOB)).encode())
    read: list[tuple[str, int]] = []
    report = erased(EMAIL, on_read=lambda kind, count: read.append((kind, count)))
    assert (report.counts["jobs"], Job.objects.count()) == (6, 4)
    assert [count for kind, count in read if kind == "jobs"] == [3, 6, 9, 10]


def test_what_cannot_be_read_is_counted_and_named() -> None:
    JobFactory(completed=True, payload=b"\xff", content_type="application/x-of-its-own")
    report = erased(EMAIL)
    assert (report.counts, report.unreadable) == ({}, {"jobs": 1})
    assert any("could not be read (1)" in text for text in report.as_dict()["left"])


def test_an_internal_job_that_searched_for_the_person_is_the_persons(shop: Shop) -> None:
    searches = [JobFilter(key="customer-7"), JobFilter(arguments=(EMAIL,)), JobFilter(key="other")]
    for search in searches:
        start_bulk("requeue", search, actor="ops")
    shop.run()
    assert erased(EMAIL, keys=["customer-7"]).counts["jobs"] == 2


def test_topics_schedules_logs_and_markers_are_named_as_left(settings: Any) -> None:
    # Given
    memory = {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}
    settings.KJO = KJO | {"TRANSPORTS": memory}
    Schedule.objects.create(name="weekly", job="shop.welcome", payload=of(ADA), every=60)
    JobFactory(completed=True, queue="shop", payload=json.dumps(of(ADA)).encode())
    # When
    report = erased(EMAIL)
    # Then
    assert report.kept == {"schedules": 1}
    left = " ".join(report.as_dict()["left"])
    for text in ("topics shop, shop-dlq", "Schedules", "processed_events", "backups"):
        assert text in left


# --- What has not ended ---------------------------------------------------------------------------


def test_open_jobs_are_kept_unless_they_are_to_be_cancelled(shop: Shop) -> None:
    # Given
    shop.welcome.enqueue(**of(ADA))
    assert TransportMessage.objects.count() == 1
    # When, then
    for is_dry in (True, False):
        report = erased(EMAIL, dry_run=is_dry)
        assert (report.counts, report.kept, report.is_complete) == ({}, {"open_jobs": 1}, False)
    assert ADA in everything()
    # When
    report = erased(EMAIL, cancel=True)
    # Then: the message that waited for it is gone, too
    assert (report.counts, report.kept) == ({"jobs": 1, "messages": 1}, {})
    assert ADA not in everything()
    assert shop.run().runs == []


def test_a_running_job_is_asked_to_end_and_kept_until_it_has(shop: Shop) -> None:
    # Given a job outside a transaction, whose row has the lease of its worker
    row = JobFactory(
        queued=True,
        payload=json.dumps(of(ADA)).encode(),
        lease_token="w",
        lease_expires_at=timezone.now() + timedelta(minutes=5),
    )
    # When
    report = erased(EMAIL, cancel=True)
    # Then
    assert (report.counts, report.kept) == ({}, {"open_jobs": 1})
    assert get_coordination().get_marks([abort_name(str(row.pk))])
    # When it has ended
    Job.objects.filter(pk=row.pk).update(state="cancelled", lease_token="", lease_expires_at=None)
    # Then
    assert erased(EMAIL).counts == {"jobs": 1}


def test_an_interrupted_run_is_begun_again(monkeypatch: pytest.MonkeyPatch) -> None:
    # Given
    monkeypatch.setattr("kjo_django.personal_data.erasure.WITH_PAYLOADS", 2)
    for _ in range(5):
        JobFactory(completed=True, payload=json.dumps(of(ADA)).encode())

    def interrupt(kind: str, count: int) -> None:
        raise KeyboardInterrupt

    # When
    with pytest.raises(KeyboardInterrupt):
        erased(EMAIL, on_read=interrupt)
    # Then
    assert Job.objects.count() == 3
    assert erased(EMAIL).counts == {"jobs": 3}


def test_steps_that_an_interrupted_run_has_left_are_found_again(shop: Shop) -> None:
    # Given steps that are found by their workflow's id alone
    shop.sign_up(ADA)
    shop.run()

    def interrupt(kind: str, count: int) -> None:
        raise KeyboardInterrupt

    # When
    with pytest.raises(KeyboardInterrupt):
        erased(ids=["signup-7"], on_read=interrupt)
    # Then
    assert erased(ids=["signup-7"]).counts == {"jobs": 2, "messages": 2, "workflows": 1}


@pytest.mark.parametrize("mode", Mode)
def test_messages_of_jobs_that_an_interrupted_run_has_erased_are_found_again(
    shop: Shop, mode: Mode
) -> None:
    """FINDINGS 2.10 k: their payload stayed until they were due, and the second run said that it
    was complete."""
    # Given a message of a job that was cancelled, which waits for its time in the database; and one
    # of a job that goes on
    later = timedelta(days=30)
    handle = shop.welcome.using(id="welcome-7", delay=later).enqueue(**of(ADA))
    shop.welcome.using(delay=later).enqueue(**of(BOB))
    cancel([handle.job_id])

    def interrupt(kind: str, count: int) -> None:
        raise KeyboardInterrupt

    # When
    with pytest.raises(KeyboardInterrupt):
        erased(ids=["welcome-7"], mode=mode, on_read=interrupt)
    assert TransportMessage.objects.count() == 2
    # Then
    assert erased(ids=["welcome-7"], mode=mode, dry_run=True).counts == {"messages": 1}
    assert erased(ids=["welcome-7"], mode=mode).counts == {"messages": 1}
    (left,) = TransportMessage.objects.all()
    assert BOB in bytes(left.value).decode()
    assert not erased(ids=["welcome-7"], mode=mode).counts


def test_a_message_that_names_a_job_of_another_service_is_not_taken_for_one_that_was_erased() -> (
    None
):
    named = {names.JOB_ID: str(uuid7()).encode(), names.SERVICE: b"others"}
    TransportMessage.objects.create(topic="shop", value=b"{}", headers=names.to_json(named))
    odd = {names.JOB_ID: b"no id", names.SERVICE: b"tests"}
    TransportMessage.objects.create(topic="shop", value=b"{}", headers=names.to_json(odd))
    # Another service reads our topic, and its copy of a job's message is a message of others to it.
    ours = names.to_json({names.JOB_ID: str(uuid7()).encode(), names.SERVICE: b"tests"})
    TransportMessage.objects.create(
        topic="shop", value=b"{}", headers=ours, consumer_group="others-shop"
    )
    assert not erased(EMAIL).counts
    assert TransportMessage.objects.count() == 3


def test_a_redacted_job_of_a_foreign_message_still_knows_its_second_copy() -> None:
    row = JobFactory(completed=True, key="customer-7", headers={ORIGIN_ID: "m-1", "sent-by": ADA})
    erased(keys=["customer-7"], mode=Mode.REDACT)
    row.refresh_from_db()
    assert row.headers == {ORIGIN_ID: "m-1"}
    assert row.message_id == "m-1"


def test_a_dry_run_cancels_nothing(shop: Shop) -> None:
    shop.welcome.enqueue(**of(ADA))
    erased(EMAIL, cancel=True, dry_run=True)
    assert shop.run().count("completed") == 1


def test_messages_of_others_are_kept_unless_open_work_is_cancelled_and_copies_never() -> None:
    # Given
    value = json.dumps(of(ADA)).encode()
    copy = names.to_json({names.DLQ_REASON: b"fatal"})
    TransportMessage.objects.create(topic="shop-dlq", value=value, headers=copy)
    TransportMessage.objects.create(topic="shop", value=value)
    other = TransportMessage.objects.create(topic="shop", value=json.dumps(of(BOB)).encode())
    # When, then
    report = erased(EMAIL)
    assert (report.counts, report.kept) == ({"messages": 1}, {"messages_of_others": 1})
    assert erased(EMAIL, cancel=True).counts == {"messages": 1}
    assert list(TransportMessage.objects.all()) == [other]


def test_a_message_that_is_being_run_is_kept_also_where_the_hosts_clock_is_ahead(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Leases end by the database's clock, which the worker goes by."""
    # Given a host that is an hour ahead, and a message that is leased for five minutes
    monkeypatch.setattr(CLOCK, "now", lambda: timezone.now() - timedelta(hours=1), raising=False)
    leased = {"lease_token": "w", "lease_expires_at": CLOCK.now() + timedelta(minutes=5)}
    value = json.dumps(of(ADA)).encode()
    TransportMessage.objects.create(topic="shop", value=value, **leased)
    # When, then
    assert erased(EMAIL, cancel=True).kept == {"messages_of_others": 1}
    # When its lease has ended
    TransportMessage.objects.update(lease_expires_at=CLOCK.now() - timedelta(seconds=1))
    assert erased(EMAIL, cancel=True).counts == {"messages": 1}


def test_steps_of_an_open_workflow_are_kept_until_it_has_ended(shop: Shop) -> None:
    # Given
    handle = shop.sign_up(ADA)
    run_job(Job.objects.get(handler="shop.welcome"))
    # When, then
    report = erased(EMAIL, ids=["signup-7"])
    assert report.counts == {}
    assert report.kept == {"workflows": 1, "steps_of_open_workflows": 1, "open_jobs": 1}
    # When
    shop.run()
    report = erased(ids=["signup-7"])
    # Then: its steps are found by the workflow's id
    assert report.counts == {"workflows": 1, "jobs": 2, "messages": 2}
    assert report.is_complete
    assert Workflow.objects.get(pk=handle.workflow_id).unique_id is None


def test_an_open_workflow_of_the_person_is_cancelled_with_its_steps(shop: Shop) -> None:
    shop.sign_up(ADA)
    report = erased(ids=["signup-7"], cancel=True)
    assert report.counts["jobs"] == 2
    assert report.kept == {}
    assert shop.run().runs == []


# --- Redacted rows --------------------------------------------------------------------------------


def test_a_redacted_job_keeps_its_state_and_cannot_run_again(shop: Shop) -> None:
    # Given
    shop.refuse.enqueue(**of(ADA))
    shop.run()
    JobFailure.objects.update(log=f"INFO shop: refusing {EMAIL}")
    # When
    erased(EMAIL, mode=Mode.REDACT)
    # Then
    row, failure, letter = Job.objects.get(), JobFailure.objects.get(), DeadLetter.objects.get()
    assert (row.state, row.handler, row.error) == ("failed", "shop.refuse", "")
    assert (failure.error_type.rpartition(".")[2], failure.error) == ("PermanentError", "")
    assert failure.log == failure.traceback == ""
    assert (letter.state, letter.value, letter.note) == ("discarded", None, "Redacted.")
    assert letter.fingerprint == ""  # the words of its error are in it
    assert "redacted" in row.arguments
    # When
    requeue([row])
    # Then
    assert shop.run().count("dead") == 1
    assert "Its payload was redacted" in DeadLetter.objects.latest("pk").error


# --- The request, the job and the command ---------------------------------------------------------


def operator(*permissions: str) -> User:
    # PostgreSQL's tests keep users.
    User.objects.filter(username="ann").delete()
    user = User.objects.create_user("ann")
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return user


def test_the_request_its_job_and_its_log_hold_no_personal_data(
    shop: Shop, caplog: pytest.LogCaptureFixture
) -> None:
    # Given
    from django.contrib.admin.models import LogEntry

    done = JobFactory(completed=True, payload=json.dumps(of(ADA)).encode())
    ann = operator("erase_personal_data")
    # When
    row = start_erasure(Person.of(fields=[EMAIL]), actor=UserActor(ann), reference="R-17")
    with caplog.at_level(logging.INFO, "kjo_django"):
        result = shop.run().results[0]
    # Then
    assert result["erased"] == {"jobs": 1}
    assert not Job.objects.filter(pk=done.pk).exists()
    assert ADA not in everything()
    entry = LogEntry.objects.get()
    assert (entry.user, entry.object_id) == (ann, str(row.pk))
    assert "found by the field customer.email: 1 jobs" in entry.change_message
    assert "reference R-17" in entry.change_message
    assert any("Erased personal data" in text for text in caplog.messages)
    assert ADA not in entry.change_message + caplog.text


def test_the_job_needs_the_permission_when_it_runs(shop: Shop) -> None:
    done = JobFactory(completed=True, payload=json.dumps(of(ADA)).encode())
    start_erasure(Person.of(fields=[EMAIL]), actor=UserActor(operator("view_job")))
    assert shop.run().count("dead") == 1
    assert Job.objects.filter(pk=done.pk).exists()


def test_a_request_of_another_secret_key_is_refused_rather_than_find_nobody(
    shop: Shop, settings: Any
) -> None:
    start_erasure(Person.of(keys=["customer-7"]), actor="ops")
    settings.SECRET_KEY = "rotated"
    assert shop.run().count("dead") == 1
    assert "another SECRET_KEY" in JobFailure.objects.get().error


@pytest.mark.parametrize("is_interrupted", [False, True])
def test_what_the_admins_log_says_of_erased_rows_is_emptied(is_interrupted: bool) -> None:
    from django.contrib.admin.models import LogEntry

    from kjo_django.operations.audit import log_entries

    letter = DeadLetterFactory(key=b"customer-7", message_id=ADA)
    ann = operator()
    log_entries(ann.pk, [letter], 2, f"Discarded: {ADA} asked")

    def note(kind: str, count: int) -> None:
        if is_interrupted and kind == "dead_letters":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) if is_interrupted else nullcontext():
        report = erased(keys=["customer-7"], on_read=note)
        assert report.counts == {"dead_letters": 1, "log_entries": 1}
    assert not DeadLetter.objects.exists()
    entry = LogEntry.objects.get()
    assert (entry.object_repr, entry.change_message, entry.user) == ("[erased]", "", ann)


def run(*arguments: str) -> tuple[str, int]:
    out, code = io.StringIO(), 0
    try:
        call_command("kjo_erase", *arguments, stdout=out, stderr=io.StringIO())
    except SystemExit as end:
        code = int(str(end.code))
    return out.getvalue(), code


def test_the_command_counts_erases_and_exits_with_1_while_rows_are_kept(shop: Shop) -> None:
    # Given
    shop.welcome.using(key="customer-7").enqueue(**of(ADA))
    arguments = ["--field", f"customer.email={ADA}", "--key", "customer-7", "--json"]
    # When, then
    text, code = run(*arguments, "--dry-run")
    assert (json.loads(text)["kept"], code) == ({"open_jobs": 1}, 1)
    shop.run()
    text, code = run("--key", "customer-7", "--dry-run")
    assert "jobs: 1 would be deleted" in text
    assert (Job.objects.count(), code) == (1, 0)
    text, code = run(*arguments, "--reference", "R-17")
    assert (json.loads(text)["erased"]["jobs"], code) == (1, 0)
    assert not Job.objects.exists()


def test_the_command_reads_what_no_process_list_is_to_show(monkeypatch: Any) -> None:
    JobFactory(completed=True, payload=json.dumps(of(ADA)).encode())
    given = {"fields": [f"customer.email={ADA}"]}
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps(given)))
    assert "jobs: 1 redacted" in run("--stdin", "--redact")[0]


@pytest.mark.parametrize(
    ("arguments", "given", "text"),
    [
        ([], "", "give at least one key, id or value"),
        (["--field", "email"], "", "not PATH=VALUE, such as customer.email="),
        (["--field", "customer..email=7"], "", "A field is a path"),
        (["--key", ""], "", "1 to 1,000 characters"),
        (["--stdin"], "ada", "Expecting value"),
        (["--stdin"], "[]", "by an object such as"),
        (["--stdin"], '{"names": []}', "by an object such as"),
        (["--stdin"], '{"keys": [7]}', "1 to 1,000 characters"),
        (["--stdin"], '{"keys": "ada", "fields": []}', "by an object such as"),
        (["--stdin"], '{"fields": ["email"]}', "not PATH=VALUE, such as customer.email="),
        (["--stdin", "--key", "ada"], "{}", "--stdin replaces --key"),
    ],
)
def test_the_command_says_what_is_wrong(
    arguments: list[str], given: str, text: str, monkeypatch: Any
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(given))
    with pytest.raises(CommandError, match=text):
        run(*arguments)


def test_a_table_that_is_new_is_thought_of() -> None:
    """Whoever adds a table decides here whether it may hold a person's data."""
    searched = {"Job", "JobFailure", "DeadLetter", "Workflow", "ProcessedEvent", "HeldJob"}
    searched |= {"TransportMessage", "Schedule"}
    holds_none = {"WorkflowStage", "WorkflowEdge", "WorkflowCount", "QueueControl", "LimitControl"}
    holds_none |= {"MetricBucket", "MetricRollup", "TransportSubscription", "Dashboard"}
    expires = {"Worker", "Lease", "Mark", "RateWindow", "TransportRun"}
    known = {model.__name__ for model in apps.get_app_config("kjo_django").get_models()}
    assert known == searched | holds_none | expires
    assert connection.introspection.table_names()
