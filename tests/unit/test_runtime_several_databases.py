"""Queues with databases of their own: each has an outbox and markers there. On two SQLite files."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from django.core.exceptions import ImproperlyConfigured
from django.core.management import CommandError, call_command
from django.db import DatabaseError, connections, transaction
from django.test import Client
from django.urls import reverse
from django.utils import timezone
from rest_framework.test import APIClient, APIRequestFactory, force_authenticate

from kjo_django import Queue, chain, checks, enqueue_on_save, group, job, registry
from kjo_django.api import jobs as api_jobs
from kjo_django.api.endpoints import address
from kjo_django.contrib import job_view
from kjo_django.contrib.health import HealthView
from kjo_django.contrib.prometheus import MetricsView
from kjo_django.enqueue import definition
from kjo_django.enqueue.handle import JobHandle
from kjo_django.models import (
    Job,
    LimitControl,
    ProcessedEvent,
    Schedule,
    TransportMessage,
    Workflow,
)
from kjo_django.operations import schedules
from kjo_django.operations.monitoring.health import health_everywhere
from kjo_django.operations.rescheduling import change_queue
from kjo_django.outbox.relay import Relay
from kjo_django.patterns import streams
from kjo_django.patterns.events.event import publish_event
from kjo_django.patterns.items.producer import processing_name
from kjo_django.patterns.streams import AbstractStreamProducer
from kjo_django.runtime import (
    databases,
    get_coordination,
    get_transport,
    jobs_database,
    runtime_for,
    use_database,
)
from kjo_django.schedules.declarations import ScheduleFaults, synchronize
from kjo_django.testing import immediate
from kjo_django.worker import Worker
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests.databases import sqlite_settings
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench
from tests.unit.patterns.items.test_producer import Source, items

JOBS2 = "jobs2"
SEVERAL = {
    **KJO,
    **MEMORY,
    "QUEUES": {
        "ledger": {},
        "emails": {"database": JOBS2},
        "letters": {"database": JOBS2, "consume": False},
    },
}


@pytest.fixture
def jobs2(
    sqlite_file: Path,
    sqlite_template: Path,
    tmp_path: Path,
    forgotten_definitions: None,
    monkeypatch: pytest.MonkeyPatch,
    settings: Any,
) -> Iterator[str]:
    """A second migrated database, in which the queue ``emails`` has its jobs."""
    path = tmp_path / "jobs2.sqlite3"
    shutil.copyfile(sqlite_template, path)
    own = connections.configure_settings({"default": sqlite_settings(path)})["default"]
    monkeypatch.setitem(connections.settings, JOBS2, own)
    registry.limited.clear()
    settings.KJO = SEVERAL
    yield JOBS2
    connections[JOBS2].close()
    del connections[JOBS2]


@pytest.fixture
def send(jobs2: str) -> Any:
    """A job of the second database, which notes there that it has run."""

    def send(name: str) -> str:
        Entry.objects.using(JOBS2).create(job=name)
        if name == "fails":
            raise RuntimeError("refused")
        return name

    return job(name="tests.send", queue="emails", max_attempts=1)(send)


@pytest.fixture
def file(jobs2: str) -> Any:
    """A job of the default database."""
    return job(name="tests.file", queue="ledger")(lambda name: None)


def states(alias: str) -> list[str]:
    rows = Job.objects.using(alias).order_by("pk")
    return list(rows.values_list("state", flat=True))


def run_emails() -> Bench:
    """Let a worker of the second database run what is due there."""
    with use_database(JOBS2):
        bench = Bench("emails")
        bench.run()
        bench.close()
    return bench


# --- Enqueue --------------------------------------------------------------------------------------


def test_a_job_is_stored_in_the_database_of_its_queue(send: Any, file: Any) -> None:
    # When
    send.enqueue(name="a")
    send.enqueue_many([{"name": "b"}, {"name": "c"}])
    file.enqueue(name="d")
    # Then
    assert (states(JOBS2), states("default")) == (["pending"] * 3, ["pending"])


def test_an_enqueue_joins_the_transaction_on_its_own_database_only(send: Any) -> None:
    # When
    with transaction.atomic(using=JOBS2):
        send.enqueue(name="rolled back")
        transaction.set_rollback(True, using=JOBS2)
    with transaction.atomic():
        send.enqueue(name="stays")
        transaction.set_rollback(True)
    # Then
    assert len(states(JOBS2)) == 1
    assert states("default") == []


def test_the_relay_of_a_database_is_woken_when_that_commits(
    send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    called: list[str] = []
    for alias in databases():
        coordination = runtime_for(alias).coordination
        monkeypatch.setattr(
            coordination, "notify", lambda *names, alias=alias: called.append(alias)
        )
    # When
    with transaction.atomic(using=JOBS2):
        send.enqueue(name="a")
        assert called == []
    # Then
    assert called == [JOBS2]


def test_a_unique_id_is_known_in_the_database_of_its_queue(send: Any) -> None:
    # Given
    first = send.using(id="one").enqueue(name="a")
    # When
    second = send.using(id="one").enqueue(name="a")
    # Then
    assert (first.is_new, second.answer, second.job_id) == (True, "duplicate", first.job_id)


def test_jobs_run_at_once_in_the_database_of_their_queue(send: Any, file: Any) -> None:
    with immediate():
        handles = send.enqueue_many([{"name": "a"}, {"name": "b"}])
        assert [handle.status for handle in handles] == ["completed"] * 2
        assert file.enqueue(name="c").status == "completed"
        with transaction.atomic(using=JOBS2):
            assert send.enqueue(name="d").status == "completed"
            transaction.set_rollback(True, using=JOBS2)
    assert list(Entry.objects.using(JOBS2).values_list("job", flat=True)) == ["a", "b"]
    assert (states(JOBS2), states("default")) == (["completed"] * 2, ["completed"])


# --- From enqueue to prune ------------------------------------------------------------------------


def test_a_job_is_run_completed_and_pruned_in_its_database(send: Any) -> None:
    # Given
    handle = send.enqueue(name="a")
    # When
    bench = run_emails()
    # Then its effects, its marker and its state are there, and nothing is in the default database
    assert [ending.value for ending in bench.results] == ["completed"]
    assert Entry.objects.using(JOBS2).get().job == "a"
    assert ProcessedEvent.objects.using(JOBS2).count() == 1
    assert (states(JOBS2), states("default")) == (["completed"], [])
    assert (ProcessedEvent.objects.count(), Entry.objects.count()) == (0, 0)
    assert (handle.status, handle.result) == ("completed", "a")
    # And it is pruned with those of the default database
    old = timezone.now() - timedelta(days=365)
    Job.objects.using(JOBS2).update(result_expires_at=old, finished_at=None)
    call_command("kjo_prune", completed=timedelta(seconds=0))
    assert states(JOBS2) == []


def test_the_effects_of_a_job_that_fails_are_undone_in_its_database(send: Any) -> None:
    # Given
    send.enqueue(name="fails")
    # When
    run_emails()
    # Then
    assert states(JOBS2) == ["failed"]
    assert Entry.objects.using(JOBS2).count() == 0


def test_a_message_that_comes_twice_takes_effect_once(send: Any) -> None:
    # Given
    send.enqueue(name="a")
    with use_database(JOBS2):
        bench = Bench("emails")
        taken = bench.poll()
        # When
        bench.run(taken)
        bench.run(taken)
        bench.close()
    # Then
    assert Entry.objects.using(JOBS2).count() == 1


def test_a_handler_enqueues_into_its_own_database_within_its_transaction(
    jobs2: str, send: Any
) -> None:
    # Given a job that enqueues another of its database, and fails
    def plan() -> None:
        send.enqueue(name="never")
        raise RuntimeError

    job(name="tests.plan", queue="emails", max_attempts=1)(plan).enqueue()
    # When
    run_emails()
    # Then
    assert states(JOBS2) == ["failed"]


def test_relays_publish_the_rows_of_their_database(send: Any, file: Any) -> None:
    # Given
    send.enqueue(name="a")
    file.enqueue(name="b")
    first, second = (Relay(runtime=runtime_for(alias)) for alias in databases())
    # Then
    assert ("emails" in first.queues, "ledger" in second.queues) == (False, False)
    # When
    assert second.publish_all() == []
    # Then
    assert (states(JOBS2), states("default")) == (["queued"], ["pending"])


def test_a_relay_leaves_its_thread_with_the_database_of_before(jobs2: str) -> None:
    relay = Relay(runtime=runtime_for(JOBS2))
    relay.stop()
    relay.run()
    assert jobs_database() == "default"


def test_leases_that_each_database_has_do_not_collide(jobs2: str) -> None:
    # Given
    first, second = map(runtime_for, databases())
    # Then
    assert (first.lease_suffix, second.lease_suffix) == ("", "@jobs2")


def test_coordination_of_the_database_is_in_each(jobs2: str) -> None:
    """A worker of one database needs no other."""
    assert [runtime_for(alias).coordination.database for alias in databases()] == databases()  # type: ignore[attr-defined]


def test_a_worker_serves_one_database(send: Any) -> None:
    assert [queue.name for queue in Worker(["emails"]).queues] == ["emails"]
    with pytest.raises(ImproperlyConfigured, match="'ledger' are not in 'jobs2'"):
        Worker(["emails", "ledger"])
    with use_database(JOBS2):
        assert [queue.name for queue in Worker().queues] == ["emails"]


def test_a_worker_in_its_threads(send: Any) -> None:
    """Each of its threads works with its database."""
    # Given
    handles = send.enqueue_many([{"name": "a"}, {"name": "b"}])
    worker = Worker(["emails"], owns_process=False)
    # When
    code = worker.run(worker.is_drained)
    # Then
    assert code == 0
    assert [handle.status for handle in handles] == ["completed"] * 2
    assert Entry.objects.using(JOBS2).count() == 2


# --- Following ------------------------------------------------------------------------------------


def test_a_handle_made_again_finds_its_job(send: Any, file: Any) -> None:
    # Given
    jobs = [send.enqueue(name="a"), file.enqueue(name="b")]
    # Then
    assert [JobHandle.of(each.id).status for each in jobs] == ["pending", "pending"]
    assert JobHandle.of("00000000-0000-7000-8000-000000000000").status is None


def test_the_message_level_interface_follows_the_database_of_its_queue(jobs2: str) -> None:
    # Given
    queue = Queue("emails")
    queue.handler(lambda message: message.payload)
    # When
    queue.enqueue("a", 1)
    # Then
    assert queue.get_status("a") is not None
    assert len(states(JOBS2)) == 1
    run_emails()
    assert queue.get_result("a") == 1
    # And
    queue.enqueue("b", 2)
    assert queue.cancel("b") == "cancelled"
    registry.unregister(queue.job_type)


# --- What is refused ------------------------------------------------------------------------------


def test_a_save_in_another_database_than_its_jobs_is_refused(
    send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    enqueue = Entry.save_base
    monkeypatch.setattr(definition, "save_hooks", [])
    receivers = definition.post_save.receivers
    monkeypatch.setattr(definition.post_save, "receivers", [*receivers])
    enqueue_on_save(Entry, send, payload=lambda entry: {"name": entry.job}, created=True)
    try:
        # When
        with pytest.raises(ImproperlyConfigured, match=r"'emails' are in 'jobs2'"):
            Entry.objects.create(job="a")
        Entry.objects.using(JOBS2).create(job="b")
    finally:
        monkeypatch.undo()
        definition.post_save.sender_receivers_cache.clear()
        Entry.save_base = enqueue  # type: ignore[method-assign]
    # Then neither the row nor the job is stored, and in one database both are
    assert Entry.objects.count() == 0
    assert (Entry.objects.using(JOBS2).count(), len(states(JOBS2))) == (1, 1)


def test_a_save_hook_that_cannot_be_atomic_is_found_by_the_system_checks(
    send: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    monkeypatch.setattr(definition, "save_hooks", [(Entry, send)])
    monkeypatch.setattr(checks, "save_hooks", definition.save_hooks)
    # Then
    (found,) = [each for each in checks.check_settings() if each.is_serious()]
    assert found.id == "kjo.E022"
    assert "KJO['QUEUES'][…]['database'] = 'default'" in found.msg


def test_an_alias_that_is_not_declared_is_found_by_the_system_checks(settings: Any) -> None:
    # Given
    settings.KJO = {**KJO, **MEMORY, "QUEUES": {"emails": {"database": "jobs3"}}}
    # Then
    (found,) = [each for each in checks.check_settings() if each.is_serious()]
    assert found.id == "kjo.E007"
    assert "KJO['QUEUES']['emails']['database'] is 'jobs3'" in found.msg


def test_a_workflow_with_steps_in_two_databases_is_refused(send: Any, file: Any) -> None:
    # When
    with pytest.raises(ValueError, match=r"KJO\['QUEUES'\]\['ledger'\]\['database'\]"):
        chain(send.step(name="a"), file.step(name="b")).enqueue()
    # Then nothing is stored
    assert (states(JOBS2), states("default")) == ([], [])
    assert Workflow.objects.using(JOBS2).count() == 0


def test_a_workflow_is_in_the_database_of_its_steps(send: Any) -> None:
    # Given
    handle = group(send.step(name="a"), send.step(name="b")).enqueue()
    assert WorkflowHandle.of(handle.id).status == "running"
    # When
    run_emails()
    # Then
    assert WorkflowHandle.of(handle.id).status == "completed"
    assert Workflow.objects.count() == 0


def test_a_job_with_a_limit_is_refused_by_a_queue_in_another_database(jobs2: str) -> None:
    # Given
    slow = job(name="tests.slow", queue="ledger", concurrency=1)(lambda: None)
    # When
    with pytest.raises(ValueError, match="its limits hold within one database"):
        slow.using(queue="emails").enqueue()
    # Then
    assert (states(JOBS2), states("default")) == ([], [])
    registry.unregister(slow.name)


def test_a_schedule_is_in_the_database_of_its_jobs(jobs2: str) -> None:
    # Given
    job(name="tests.nightly", queue="emails", schedule="@daily")(lambda: None)
    job(name="tests.hourly", queue="ledger", schedule="@hourly")(lambda: None)
    # When
    for alias in databases():
        synchronize(runtime_for(alias))
    # Then
    assert Schedule.objects.using(JOBS2).get().name == "tests.nightly"
    assert Schedule.objects.get().name == "tests.hourly"
    # And operators cannot put it elsewhere
    with pytest.raises(ScheduleFaults, match="another database"):
        schedules.add("mine", job="tests.nightly", cron="@daily")


def test_a_job_cannot_be_moved_to_a_queue_of_another_database(file: Any) -> None:
    # Given
    handle = file.enqueue(name="a")
    # When
    with pytest.raises(ValueError, match="a job stays in its database"):
        change_queue([handle.job_id], "emails")
    # Then
    assert Job.objects.get().queue == "ledger"


def test_a_transport_that_joins_transactions_serves_one_database(jobs2: str, settings: Any) -> None:
    # Given
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "emails": {"database": JOBS2}}}
    # When
    with pytest.raises(ImproperlyConfigured, match="a transport of their own"):
        get_transport()


def test_the_database_transport_of_a_queue_is_in_the_database_of_its_jobs(
    jobs2: str, settings: Any
) -> None:
    # Given
    backend = "kjo_django.transports.database.DatabaseTransport"
    settings.KJO = {
        **KJO,
        "QUEUES": {"ledger": {}, "emails": {"database": JOBS2, "transport": JOBS2}},
        "TRANSPORTS": {alias: {"BACKEND": backend} for alias in ("default", JOBS2)},
    }
    send = job(name="tests.mail", queue="emails")(lambda: "sent")
    # When
    with transaction.atomic(using=JOBS2):
        handle = send.enqueue()
    # Then
    assert TransportMessage.objects.using(JOBS2).count() == 1
    assert TransportMessage.objects.count() == 0
    run_emails()
    assert handle.result == "sent"


@pytest.mark.parametrize("direct", [True, False])
def test_consumers_are_woken_for_records_that_no_job_was_stored_with(
    jobs2: str, settings: Any, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """An idle consumer relies on that: such an event was found up to a second late."""
    # Given
    backend = "kjo_django.transports.database.DatabaseTransport"
    settings.KJO = {
        **KJO,
        "QUEUES": {"ledger": {}, "emails": {"database": JOBS2, "transport": JOBS2}},
        "TRANSPORTS": {alias: {"BACKEND": backend} for alias in ("default", JOBS2)},
    }
    called: list[str] = []
    coordination = runtime_for("default").coordination
    monkeypatch.setattr(coordination, "notify", lambda *channels: called.extend(channels))
    # When it is published at once, or by the relay of another database
    if direct:
        publish_event("news", {"type": "NEWS", "data": {}}, direct=True)
    else:
        with use_database(JOBS2):
            publish_event("news", {"type": "NEWS", "data": {}})
            assert "kjo:topic:news" not in called
            Relay(runtime=runtime_for(JOBS2)).publish_all()
    # Then
    assert TransportMessage.objects.count() == 1
    assert "kjo:topic:news" in called


def test_a_record_for_others_is_undone_with_the_transaction_of_its_database(
    jobs2: str, settings: Any
) -> None:
    """No queue declares its topic, and the transport for it is in the other database: the relay
    brings it there."""
    # Given
    backend = "kjo_django.transports.database.DatabaseTransport"
    settings.KJO = {
        **KJO,
        "QUEUES": {"ledger": {}, "emails": {"database": JOBS2, "transport": JOBS2}},
        "TRANSPORTS": {alias: {"BACKEND": backend} for alias in ("default", JOBS2)},
    }
    tell = partial(publish_event, "news", {"type": "NEWS", "data": {}})
    subscription = get_transport().subscribe(["news"], "readers")
    # When
    with use_database(JOBS2):
        with transaction.atomic(using=JOBS2):
            tell()
            transaction.set_rollback(True, using=JOBS2)
        with transaction.atomic(using=JOBS2):
            tell()
        relay = Relay(runtime=runtime_for(JOBS2))
    # Then
    assert TransportMessage.objects.count() == 0
    assert states(JOBS2) == ["pending"]
    with use_database(JOBS2):
        relay.publish_all()
    assert states(JOBS2) == ["completed"]
    assert [record.topic for record in subscription.poll(10, 1.0)] == ["news"]
    subscription.close()
    # And from its own database it needs no relay
    tell()
    assert states("default") == ["completed"]


class Mails(Source):
    topic = None
    queue = "emails"


def test_a_producer_works_with_the_database_of_its_queue(jobs2: str, settings: Any) -> None:
    # Given
    backend = "kjo_django.transports.database.DatabaseTransport"
    emails = {"database": JOBS2, "transport": JOBS2, "key_prefix": "SOURCE"}
    settings.KJO = {
        **SEVERAL,
        "TRANSPORTS": {**SEVERAL["TRANSPORTS"], JOBS2: {"BACKEND": backend}},
        "QUEUES": {"ledger": {}, "emails": emails},
    }
    mails = Mails(items(3))
    # When it sends inside a transaction, which may be undone after the items are marked as sent
    with pytest.raises(RuntimeError, match="durable"), transaction.atomic(using=JOBS2):
        mails.produce_messages({}, 10)
    # And while one is being processed by a worker of its database
    with use_database(JOBS2):
        lease = processing_name(mails.target, "1")
        get_coordination().claim([lease], "worker", timedelta(seconds=60))
    sent = mails.produce_messages({}, 10)
    # Then
    assert mails.get_processing_ids() == {"1"}
    assert (sent.sent, TransportMessage.objects.using(JOBS2).count()) == (2, 2)


def test_a_task_of_a_stream_that_cannot_be_stored_spares_the_transaction_of_its_database(
    jobs2: str, settings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given
    settings.KJO = {**SEVERAL, "QUEUES": {"news": {"database": JOBS2, "topic": "news"}}}

    class News(AbstractStreamProducer[str]):
        stream_key = "news"
        task_display_name = "news"

        def payload_identifier(self, payload: str) -> str:
            return payload

        def build_message(self, payload: str) -> dict[str, Any]:
            return {"text": payload}

        def on_send_failed(self, payload: str, error: str) -> None:
            pass

    def fail(*args: Any, **kwargs: Any) -> None:
        Entry.objects.using(JOBS2).create(job="half of it")
        raise DatabaseError("The table is full")

    monkeypatch.setattr(streams, "store_record", fail)
    # When
    with transaction.atomic(using=JOBS2):
        assert News().send_task("x") is None
    # Then
    assert not Entry.objects.using(JOBS2).exists()


# --- Looking and acting ---------------------------------------------------------------------------


def test_a_command_works_with_the_database_that_it_is_told(
    send: Any, file: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given
    send.enqueue(name="a")
    # When
    queues = {}
    for alias in databases():
        call_command("kjo_status", "--json", "--database", alias)
        answer = json.loads(capsys.readouterr().out)
        queues[alias] = {row["queue"]: row["states"]["pending"] for row in answer["queues"]}
    # Then
    assert (queues[JOBS2]["emails"], "ledger" in queues[JOBS2]) == (1, False)
    assert ("emails" in queues["default"], "ledger" in queues["default"]) == (False, True)
    with pytest.raises(CommandError, match="The database 'jobs3' holds no jobs"):
        call_command("kjo_status", "--database", "jobs3")


def test_a_person_is_not_erased_in_one_database_only_by_mistake(jobs2: str) -> None:
    with pytest.raises(CommandError, match="each --database of default, jobs2"):
        call_command("kjo_erase", "--key", "7")


def test_health_is_that_of_all_databases(jobs2: str) -> None:
    # When
    found = {check.name: check.ok for check in health_everywhere()}
    # Then
    assert (found["database"], found["database@jobs2"]) == (True, True)


def test_the_dashboard_shows_one_database_and_keeps_the_choice(send: Any, file: Any) -> None:
    # Given
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    first, second = file.enqueue(name="a"), send.enqueue(name="b")
    screen = reverse("admin:kjo_django_dashboard_jobs")
    # Then
    shown = client.get(screen).content.decode()
    assert (first.id in shown, second.id in shown) == (True, False)
    # When
    client.get(screen, {"database": JOBS2})
    # Then
    shown = client.get(screen).content.decode()
    assert (first.id in shown, second.id in shown) == (False, True)
    # And an action changes the row there
    client.post(reverse("admin:kjo_django_dashboard_job_cancel", args=[second.id]))
    assert (states(JOBS2), states("default")) == (["cancelled"], ["pending"])


def test_a_form_changes_the_database_that_its_page_has_shown(send: Any) -> None:
    """Another tab may have chosen another database since."""
    # Given
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    send.enqueue(name="a")
    pages = [
        ("jobs", []),
        ("job", [Job.objects.using(JOBS2).get().pk]),
        ("queue", ["emails"]),
        ("limit", ["queue:emails"]),
        ("schedule_add", []),
        ("personal_data", []),
    ]
    # Then
    for name, arguments in pages:
        client.get(reverse("admin:kjo_django_dashboard_changelist"), {"database": JOBS2})
        address = reverse(f"admin:kjo_django_dashboard_{name}", args=arguments)
        shown = client.get(address).content.decode()
        forms = re.findall(r"<form[^>]*method=.post.*?</form>", shown, re.DOTALL)
        ours = [form for form in forms if "logout" not in form]
        assert ours, name
        assert all('name="database" value="jobs2"' in form for form in ours), name
    # When
    client.get(address, {"database": "default"})
    cancel = reverse("admin:kjo_django_dashboard_job_cancel", args=[pages[1][1][0]])
    client.post(cancel, {"database": JOBS2})
    # Then
    assert states(JOBS2) == ["cancelled"]


def test_a_page_that_refreshes_itself_keeps_its_database_and_no_other_tab_notices(
    send: Any, file: Any
) -> None:
    # Given
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    first, second = file.enqueue(name="a"), send.enqueue(name="b")
    screen = reverse("admin:kjo_django_dashboard_jobs")
    client.get(screen, {"database": JOBS2})
    # When a tab of before refreshes itself, as it was opened: by a link or by the menu
    fragment = {"X-Kjo-Fragment": "1", "X-Kjo-Database": "default"}
    for query in ({}, {"database": "default"}):
        shown = client.get(screen, query, headers=fragment).content.decode()
        assert (first.id in shown, second.id in shown) == (True, False)
    # Then
    shown = client.get(screen).content.decode()
    assert (first.id in shown, second.id in shown) == (False, True)


def test_the_dashboard_knows_no_other_database(jobs2: str) -> None:
    # Given
    client = Client()
    client.force_login(User.objects.create_superuser("root"))
    screen = reverse("admin:kjo_django_dashboard_changelist")
    # Then
    assert client.get(screen, {"database": "jobs3"}).status_code == 404
    assert client.post(screen, {"database": "jobs3"}).status_code == 404
    # And what a browser kept of a database that is gone is forgotten
    client.cookies["kjo_database"] = "jobs3"
    assert client.get(screen).status_code == 200


def test_a_limit_of_a_queue_is_set_in_the_database_of_its_jobs(jobs2: str) -> None:
    with pytest.raises(CommandError, match="The jobs of 'emails' are in 'jobs2'"):
        call_command("kjo_limits", "set", "queue:emails", "--rate", "1/h")
    call_command("kjo_limits", "set", "queue:emails", "--rate", "1/h", "--database", JOBS2)
    assert LimitControl.objects.using(JOBS2).get().rate == "1/h"


def test_a_command_that_is_asked_for_a_queue_of_another_database_says_where_it_is(
    jobs2: str,
) -> None:
    where = "The jobs of 'emails' are in 'jobs2', not in 'default'"
    with pytest.raises(CommandError, match=where):
        call_command("kjo_status", "emails")
    with pytest.raises(CommandError, match=where):
        call_command("kjo_replay_dlq", "--queue", "emails", "--dry-run")


def test_the_health_view_answers_for_the_database_that_is_named(jobs2: str, rf: Any) -> None:
    def checked(**query: str) -> set[str]:
        request = rf.get("/", query)
        request.user = User(is_superuser=True)
        answer = json.loads(HealthView.as_view()(request).content)
        return {check["name"] for check in answer.get("checks", ())}

    # Then
    assert {"workers", "workers@jobs2"} <= checked()
    assert "workers@jobs2" not in checked(database=JOBS2)
    assert "workers" in checked(database=JOBS2)
    assert checked(database="jobs3") == set()


def test_the_api_answers_from_the_database_that_it_is_told(send: Any, file: Any) -> None:
    # Given
    factory = APIRequestFactory()
    user = User.objects.create_superuser("root")
    first, second = file.enqueue(name="a"), send.enqueue(name="b")
    view = address(api_jobs.read_job)

    def status_of(handle: JobHandle[Any], **query: str) -> int:
        request = factory.get("/", query)
        force_authenticate(request, user)
        return int(view(request, id=handle.id).status_code)

    # Then
    assert (status_of(first), status_of(second)) == (200, 404)
    assert status_of(second, database=JOBS2) == 200
    assert status_of(second, database="jobs3") == 400


@pytest.mark.urls("tests.api.urls")
def test_what_the_api_stores_is_found_where_it_says(send: Any) -> None:
    # Given
    client = APIClient()
    client.force_authenticate(User.objects.create_superuser("root"))
    schedule = {"name": "daily", "job": "tests.send", "every": 60, "payload": {"name": "a"}}
    requests = [
        ("jobs", {"handler": "tests.send", "payload": {"name": "a"}}),
        ("schedules", schedule),
        ("erasures", {"keys": ["7"]}),
    ]
    for name, body in requests:
        # When
        url = reverse(f"kjo_django_api:{name}")
        answer = client.post(f"{url}?database={JOBS2}", body, format="json")
        # Then
        assert answer.status_code in (201, 202), answer.data
        assert answer["Location"].endswith("?database=jobs2")
        assert client.get(answer["Location"]).status_code == 200


def test_metrics_are_those_of_the_database_that_is_named(send: Any, rf: Any, settings: Any) -> None:
    # Given
    settings.KJO = {**SEVERAL, "METRICS_TOKEN": "secret"}
    ask = partial(rf.get, "/", HTTP_AUTHORIZATION="Bearer secret")
    # When
    first, second = MetricsView.as_view()(ask()), MetricsView.as_view()(ask({"database": JOBS2}))
    # Then
    assert b'queue="emails"' not in first.content
    assert b'queue="emails"' in second.content
    assert MetricsView.as_view()(ask({"database": "jobs3"})).status_code == 400


def test_a_user_is_shown_a_job_of_any_database(send: Any, file: Any) -> None:
    # Given
    jobs = [send.enqueue(name="a"), file.enqueue(name="b")]
    # When
    shown = job_view.read([each.job_id for each in jobs], frozenset())
    # Then
    assert [shown[each.job_id].facts["status"] for each in jobs] == ["pending", "pending"]
