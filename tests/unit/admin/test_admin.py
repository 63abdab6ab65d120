"""The admin: permissions, audit, fast lists, inert payloads."""

from __future__ import annotations

import html
import json
import re
from datetime import timedelta

import pytest
from django.contrib.admin.models import CHANGE, LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.db import connection
from django.test import Client
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

from kjo_django import job, registry
from kjo_django.admin import display, filters
from kjo_django.admin import jobs as jobs_admin
from kjo_django.engine.handler.running import dump_progress
from kjo_django.enqueue.job_status import progress_name
from kjo_django.exceptions import PublishError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, LimitControl, QueueControl
from kjo_django.runtime import get_coordination
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    JobFailureFactory,
    ProcessedEventFactory,
    QueueControlFactory,
    WorkerFactory,
)
from tests.unit.deliveries import on_memory

pytestmark = [pytest.mark.medium, pytest.mark.django_db]

EVIL = "<script>alert(1)</script>"
MODELS = ("job", "deadletter", "processedevent", "worker", "queuecontrol")


@pytest.fixture(autouse=True)
def memory(settings):
    with on_memory(settings, QUEUES={"default": {}, "emails": {}}) as transport:
        yield transport


@pytest.fixture
def staff(client):
    """Log in a member of staff with these permissions, and return the client."""

    def login(*codenames):
        user = User.objects.create_user(f"staff-{len(codenames)}", is_staff=True)
        wanted = Permission.objects.filter(
            content_type__app_label="kjo_django", codename__in=codenames
        )
        assert wanted.count() == len(codenames), codenames
        user.user_permissions.set(wanted)
        client.force_login(user)
        return client

    return login


def list_url(model):
    return reverse(f"admin:kjo_django_{model}_changelist")


def page_url(obj):
    return reverse(f"admin:kjo_django_{obj._meta.model_name}_change", args=(quote(obj.pk),))


def button_url(obj, name):
    return reverse(f"admin:kjo_django_{obj._meta.model_name}_{name}", args=(obj.pk,))


def act(client, model, action, *rows, **data):
    """Run an action of the list; return its messages."""
    response = client.post(
        list_url(model),
        {"action": action, "_selected_action": [str(row.pk) for row in rows], **data},
        follow=True,
    )
    return [str(message) for message in response.context["messages"]]


# --- Every page ---------------------------------------------------------------------------------


def test_every_page_renders_without_inline_scripts_or_styles(admin_client):
    """DASHBOARD.md §4: no inline script or style."""
    job = JobFailureFactory().job
    rows = [
        job,
        DeadLetterFactory(job=job),
        ProcessedEventFactory(event_data={"a": 1}),
        WorkerFactory(),
        QueueControlFactory(),
        LimitControl.objects.create(name="queue:emails", rate="5/s"),
    ]
    for row in rows:
        for url in (list_url(row._meta.model_name), page_url(row)):
            response = admin_client.get(url)
            assert response.status_code == 200, url
            page = response.content.decode()
            ours = page[page.index('id="content"') :]
            assert not re.search(r"<script(?![^>]*(src=|type=\"application/json\"))", ours), url
            assert not re.search(r"\son\w+=|\sstyle=|<style", ours), url


@pytest.mark.parametrize("model", MODELS)
def test_nobody_adds_rows_by_hand(admin_client, model):
    assert admin_client.get(reverse(f"admin:kjo_django_{model}_add")).status_code == 403


def test_lists_need_their_permission(staff):
    client = staff("view_worker")
    assert client.get(list_url("job")).status_code == 403
    assert client.get(list_url("worker")).status_code == 200


def test_only_superusers_delete(staff, admin_client):
    job = JobFactory()
    url = reverse("admin:kjo_django_job_delete", args=(job.pk,))
    assert admin_client.get(url).status_code == 200
    assert staff("view_job", "delete_job").get(url).status_code == 403


# --- Fast on ten million rows -------------------------------------------------------------------


@pytest.mark.parametrize("model", ["job", "deadletter"])
def test_lists_run_few_bounded_queries_without_distinct_or_large_columns(admin_client, model):
    """DASHBOARD.md §3."""
    # Given
    for _ in range(30):
        DeadLetterFactory(of_job=True)
    # When
    with CaptureQueriesContext(
        connection,
    ) as captured:
        admin_client.get(list_url(model), {"state": "open" if model == "deadletter" else "failed"})
    # Then
    ours = [query["sql"] for query in captured if "kjo_" in query["sql"]]
    # Of jobs, the arguments and the failed attempts that the page shows are one query each
    assert len(ours) <= (4 if model == "job" else 3)
    assert not [sql for sql in ours if "DISTINCT" in sql]
    counts = [sql for sql in ours if "COUNT(" in sql]
    assert all("LIMIT 100000" in sql for sql in counts)
    large = [sql for sql in ours if '"payload"' in sql or '"value"' in sql or '"result"' in sql]
    assert all("LENGTH(" in sql and "<= 4000" in sql for sql in large), (
        "arguments of short payloads"
    )


def test_a_filter_without_an_index_looks_among_the_newest_rows_only(admin_client, monkeypatch):
    monkeypatch.setattr(filters, "WINDOW", 3)
    JobFactory(queue="emails", unique_id="old")
    JobFactory(queue="emails", unique_id="new")
    JobFactory.create_batch(2)
    page = admin_client.get(list_url("job"), {"queue": "emails"}).content.decode()
    assert "new" in page
    assert ">old<" not in page


def test_filters_offer_what_is_known_beforehand(admin_client):
    with CaptureQueriesContext(connection) as captured:
        page = admin_client.get(list_url("job")).content.decode()
    assert "?queue=emails" in page
    assert "?state=failing" in page
    assert len([query for query in captured if "kjo_job" in query["sql"]]) <= 2


def test_jobs_are_found_by_exact_id_and_by_unique_id_with_an_index(admin_client):
    # Given
    job = JobFactory(unique_id="order-7", queue="emails")
    JobFactory(unique_id="order-77", queue="emails")
    # When, then
    for term in (str(job.pk), "order-7", " order-7 "):
        with CaptureQueriesContext(connection) as captured:
            response = admin_client.get(list_url("job"), {"q": term})
        assert [row.pk for row in response.context["cl"].result_list] == [job.pk], term
        looked = [query["sql"] for query in captured if "unique_id" in query["sql"]]
        assert all('"queue" IN' in sql.replace("`", '"') for sql in looked)
    assert admin_client.get(list_url("job"), {"q": "order"}).context["cl"].result_count == 0


def test_dead_letters_and_events_are_found_exactly(admin_client):
    letter = DeadLetterFactory(message_id="m-1", fingerprint="f00")
    DeadLetterFactory(fingerprint="bar")
    for term in (str(letter.pk), "m-1", "f00"):
        found = admin_client.get(list_url("deadletter"), {"q": term}).context["cl"]
        assert list(found.result_list) == [letter], term
    event = ProcessedEventFactory(event_id="e-1")
    ProcessedEventFactory(event_id="e-11")
    found = admin_client.get(list_url("processedevent"), {"q": "e-1"}).context["cl"]
    assert list(found.result_list) == [event]


# --- What may be seen ---------------------------------------------------------------------------


def test_payloads_results_and_tracebacks_need_their_permission(staff):
    """DESIGN §8."""
    # Given
    job = JobFactory(
        failed=True, payload=b'{"card": "4711"}', result=b'{"v":"hush"}', headers={"t": "sesame"}
    )
    JobFailureFactory(job=job, traceback="in the secret place", log="in the secret place")
    letter = DeadLetterFactory(job=job, value=b"card 4711", traceback="in the secret place")
    event = ProcessedEventFactory(event_data={"card": "4711"})
    secrets = ("4711", "hush", "sesame", "secret place")
    # When, then
    client = staff("view_job", "view_deadletter", "view_processedevent")
    for row in (job, letter, event):
        page = client.get(page_url(row)).content.decode()
        assert not [word for word in secrets if word in page]
    # When permitted
    client = staff("view_job", "view_deadletter", "view_processedevent", "view_payload")
    page = client.get(page_url(job)).content.decode()
    assert [word for word in secrets if word in page] == list(secrets)
    assert "card 4711" in client.get(page_url(letter)).content.decode()
    assert "4711" in client.get(page_url(event)).content.decode()


def test_the_list_shows_each_job_as_the_call_that_it_is_and_how_long_it_took(staff):
    # Given
    began = timezone.now() - timedelta(hours=2)
    JobFactory(
        completed=True,
        handler="shop.send",
        payload=b'{"order_id": 17, "api_token": "xyzzy"}',
        created_at=began,
        started_at=began,
        finished_at=began + timedelta(seconds=3),
    )
    # When, then
    page = html.unescape(staff("view_job", "view_payload").get(list_url("job")).content.decode())
    assert 'shop.send(order_id=17, api_token="[redacted]")' in page
    assert "2 h</time>" in page
    assert ">3 s<" in page
    # And nobody sees the arguments without the permission
    blind = staff("view_job").get(list_url("job")).content.decode()
    assert "shop.send" in blind
    assert "order_id" not in blind


def test_what_may_quote_a_payload_needs_the_permission_for_payloads(staff):
    # Given
    quoted = ("ada@example.org", "ada-1", "no ada")
    job = JobFactory(failed=True, key=quoted[0], unique_id=quoted[1], error=quoted[2])
    JobFailureFactory(job=job, error=quoted[2], error_type="shop.NotFound")
    letter = DeadLetterFactory(error=quoted[2], error_type="shop.NotFound")
    worker = WorkerFactory(last_error=quoted[2])
    blind = staff("view_job", "view_deadletter", "view_worker", "retry_job")
    # When, then
    pages = [page_url(row) for row in (job, letter, worker)]
    pages += [list_url("job"), list_url("deadletter")]
    for url in pages:
        page = blind.get(url).content.decode()
        assert not [text for text in quoted if text in page], url
    for row in (job, letter):
        assert "shop.NotFound" in blind.get(page_url(row)).content.decode()
    assert not listed(blind, "job", q="ada-1")
    # Nor by the log of what was done to it
    act(blind, "job", "requeue", job)
    assert "ada-1" not in LogEntry.objects.get().object_repr
    # When permitted
    seeing = staff("view_job", "view_deadletter", "view_payload")
    page = seeing.get(page_url(job)).content.decode()
    assert [text for text in quoted if text in page] == list(quoted)
    assert quoted[2] in seeing.get(page_url(letter)).content.decode()
    assert listed(seeing, "job", q="ada-1") == [job]


def listed(client, model, **query):
    return list(client.get(list_url(model), query).context["cl"].result_list)


def test_secrets_are_shown_to_nobody(staff):
    """Neither in payloads nor in what is stored or sent along."""
    client = staff("view_job", "view_deadletter", "view_processedevent", "view_payload")
    told = {"token": "xyzzy", "n": 4711}
    sent = {"x-token": "xyzzy", "x-n": "4711"}
    rows = [
        JobFactory(failed=True, payload=json.dumps(told).encode(), headers=sent),
        DeadLetterFactory(
            value=json.dumps(told).encode(),
            content_type="application/json",
            headers=names.to_json({name: value.encode() for name, value in sent.items()}),
        ),
        ProcessedEventFactory(event_data=told),
    ]
    for row in rows:
        page = client.get(page_url(row)).content.decode()
        assert "4711" in page
        assert "xyzzy" not in page


def test_hostile_messages_are_shown_inert(admin_client):
    # Given
    job = JobFactory(
        failed=True,
        unique_id=EVIL,
        error=EVIL,
        payload=f'{{"a": "{EVIL}"}}'.encode(),
        result=f'{{"v": "{EVIL}"}}'.encode(),
    )
    JobFailureFactory(job=job, error=EVIL, error_type=EVIL, traceback=EVIL, log=EVIL, worker=EVIL)
    letter = DeadLetterFactory(
        job=job,
        message_id=EVIL,
        error=EVIL,
        error_type=EVIL,
        traceback=EVIL,
        key=EVIL.encode(),
        value=EVIL.encode(),
        headers=names.to_json({EVIL: EVIL.encode()}),
        note=EVIL,
    )
    event = ProcessedEventFactory(event_id=EVIL, event_data={EVIL: EVIL})
    worker = WorkerFactory(name=EVIL, last_error=EVIL, queues=[EVIL])
    # When, then
    for row in (job, letter, event, worker):
        for url in (page_url(row), list_url(row._meta.model_name)):
            page = admin_client.get(url).content.decode()
            assert EVIL not in page, url
            assert "&lt;script&gt;" in page, url


def test_no_column_turns_the_text_of_its_row_round(admin_client):
    """Plain columns too: a key or the name of a worker may be anybody's."""
    # Given
    turning = "a\u202eb\u2066c"
    rows = [
        job := JobFactory(
            failed=True, handler=turning, queue=turning, unique_id=turning, key=turning
        ),
        DeadLetterFactory(handler=turning, queue=turning, message_id=turning, topic=turning),
        DeadLetterFactory(handler="", topic=turning, message_id="", note=turning),
        ProcessedEventFactory(event_id=turning, event_type=turning, service_name=turning),
        WorkerFactory(name=turning, hostname=turning, queues=[turning]),
    ]
    JobFailureFactory(job=job, error_type=turning, worker=turning)
    # When, then
    for row in rows:
        for url in (page_url(row), list_url(row._meta.model_name)):
            page = admin_client.get(url).content.decode()
            assert not {"\u202e", "\u2066"} & set(page), url
            assert "a\\u202eb\\u2066c" in page, url
    # And it is shown so, not kept so
    assert Job.objects.get().handler == turning


TURNING = "a\u202eb\u2066c"
SPELT_OUT = "a\\u202eb\\u2066c"


def named_by_others():
    return [
        JobFactory(failed=True, handler=TURNING, unique_id=TURNING),
        DeadLetterFactory(handler=TURNING, message_id=TURNING),
        ProcessedEventFactory(event_id=TURNING),
        WorkerFactory(name=TURNING),
        QueueControlFactory(queue=TURNING),
    ]


def is_inert(page):
    # Not the values of hidden inputs, which nobody reads.
    page = re.sub(r"<input [^>]*>", lambda tag: re.sub(r'value="[^"]*"', "", tag[0]), page)
    return SPELT_OUT in page and not {"\u202e", "\u2066"} & set(page)


def test_djangos_own_pages_name_rows_without_obeying_their_names(admin_client, admin_user):
    """Breadcrumbs and titles of a row's page, its history, and what asks before it is deleted."""
    for row in named_by_others():
        # Given somebody else's log of it
        LogEntry.objects.log_actions(admin_user.pk, [row], CHANGE, f"Called {TURNING}")
        kind = row._meta.model_name
        urls = [
            *(page_url(row), list_url(kind)),
            reverse(f"admin:kjo_django_{kind}_history", args=(quote(row.pk),)),
        ]
        asked = reverse(f"admin:kjo_django_{kind}_delete", args=(quote(row.pk),))
        if admin_client.get(asked).status_code == 200:
            urls.append(asked)
        # When, then
        for url in urls:
            page = admin_client.get(url).content.decode()
            assert is_inert(page), url


def test_what_is_deleted_with_a_selection_is_named_inert(admin_client):
    # Given
    job = JobFactory(failed=True, handler=TURNING)
    JobFailureFactory(job=job, error_type=TURNING)
    data = {"action": "delete_selected", "_selected_action": [job.pk]}
    # When
    page = admin_client.post(list_url("job"), data).content.decode()
    # Then
    assert is_inert(page)
    assert page.count(SPELT_OUT) >= 2, "the job and its failure"
    assert f'href="{page_url(job)}"' in page, "a link stays one"


def test_the_log_and_the_messages_name_rows_inert(admin_client, memory):
    # Given
    jobs = [JobFactory(failed=True, handler=f"{TURNING}{number}") for number in range(3)]
    letter = DeadLetterFactory(handler=TURNING, message_id=TURNING)
    queue = QueueControlFactory(queue=TURNING)
    # When they are changed, deleted, and asked for in vain
    act(admin_client, "job", "requeue", jobs[0])
    act(admin_client, "deadletter", "discard", letter, note=f"because {TURNING}")
    asked = reverse("admin:kjo_django_job_delete", args=(jobs[1].pk,))
    deleted = told_by(admin_client.post(asked, {"post": "yes"}, follow=True))
    act(admin_client, "job", "delete_selected", jobs[2], post="yes")
    changed = told_by(admin_client.post(page_url(queue), {"concurrency": 3}, follow=True))
    missing = told_by(admin_client.get(f"{list_url('job')}{TURNING}/change/", follow=True))
    # Then
    for text in (deleted, changed, missing):
        assert is_inert(text), text
    entries = list(LogEntry.objects.all())
    assert len(entries) == 5
    for entry in entries:
        assert is_inert(entry.object_repr), entry.object_repr
    assert [is_inert(e.change_message) for e in entries if "because" in e.change_message] == [True]


def told_by(response):
    (message,) = response.context["messages"]
    return str(message)


def test_bytes_are_text_where_they_are_text_and_hex_elsewhere():
    assert "{&quot;a&quot;: 1}" in display.show_bytes(b'{"a": 1}')
    assert "ff 00 41" in display.show_bytes(b"\xff\x00A")
    assert "none" in display.show_bytes(None)
    # Cut, and saying so
    assert "90000 more" in display.show_bytes(b"x" * 100_000)
    assert "97952 more" in display.show_bytes(b"\xff" * 100_000)


def test_characters_that_turn_text_round_are_spelt_out():
    shown = display.show_text("a\u202eb\x1b[31m\x00\u200bc\n\tü漢")
    assert "a\\u202eb\\u001b[31m\\u0000\\u200bc\n\tü漢" in shown


@pytest.mark.parametrize("payload", [b"\xff\xfe", b"[" * 10_000, b"", b"null", b"[[[[1]]]]"])
def test_any_payload_can_be_shown(admin_client, payload):
    job = JobFactory(payload=payload, completed=True, result=payload or None)
    letter = DeadLetterFactory(value=payload, key=payload)
    assert admin_client.get(page_url(job)).status_code == 200
    assert admin_client.get(page_url(letter)).status_code == 200


# --- Actions on jobs ----------------------------------------------------------------------------


def test_requeue_needs_its_permission_and_leaves_an_audit_trail(staff):
    # Given
    failed, running = (
        JobFactory(failed=True),
        JobFactory(queued=True, lease_expires_at=timezone.now() + timedelta(hours=1)),
    )
    DeadLetterFactory(job=failed)
    # When the permission is missing
    act(staff("view_job"), "job", "requeue", failed)
    failed.refresh_from_db()
    assert failed.state == "failed"
    # When it is there
    told = act(staff("view_job", "retry_job"), "job", "requeue", failed, running)
    # Then
    failed.refresh_from_db()
    assert (failed.state, failed.generation) == ("pending", 2)
    assert DeadLetter.objects.get().state == "replayed"
    assert told[0] == "1 job was requeued."
    assert told[1].startswith("1 being processed")
    (entry,) = LogEntry.objects.all()
    assert (entry.object_id, entry.change_message) == (str(failed.pk), "Requeued.")
    assert entry.user.username == "staff-2"


def test_cancel_tells_of_what_could_not_be_cancelled(staff):
    rows = [JobFactory(), JobFactory(completed=True), JobFactory(failed=True)]
    told = act(staff("view_job", "cancel_job"), "job", "cancel", *rows)
    assert told == [
        "1 job was cancelled.",
        "1 completed already.",
        "1 failed already; the record stays.",
    ]
    assert LogEntry.objects.count() == 1


def test_a_whole_selection_across_pages_is_processed(admin_client):
    """Chunked by primary key."""
    JobFactory.create_batch(60, failed=True)
    JobFactory(completed=True)
    told = act(admin_client, "job", "requeue", Job.objects.first(), select_across="1", index="0")
    assert told == ["61 jobs were requeued."]
    assert LogEntry.objects.count() == 61


def test_an_action_that_is_refused_tells_why(admin_client, monkeypatch):
    def refuse(*args, **kwargs):
        raise PublishError("the table is full")

    monkeypatch.setattr("kjo_django.operations.jobs.requeue_chunk", refuse)
    told = act(admin_client, "job", "requeue", JobFactory(failed=True))
    assert told == ["the table is full"]


@pytest.mark.parametrize(
    ("name", "codename", "before", "after"),
    [
        ("requeue", "retry_job", "failed", "pending"),
        ("cancel", "cancel_job", "queued", "cancelled"),
    ],
)
def test_a_jobs_buttons_post_with_csrf_and_need_their_permission(
    staff, name, codename, before, after
):
    # Given
    job = JobFactory(state=before)
    url = button_url(job, name)
    # Without permission: no button, no effect
    client = staff("view_job")
    assert url not in client.get(page_url(job)).content.decode()
    assert client.post(url).status_code == 403
    # With permission: a button, POST only
    client = staff("view_job", codename)
    assert url in client.get(page_url(job)).content.decode()
    assert client.get(url).status_code == 405
    job.refresh_from_db()
    assert job.state == before
    response = client.post(url)
    assert response.status_code == 302
    assert response.url == page_url(job)
    job.refresh_from_db()
    assert job.state == after
    # And never without a CSRF token
    strict = Client(enforce_csrf_checks=True)
    strict.cookies = client.cookies
    assert strict.post(url).status_code == 403


def test_who_may_not_see_a_row_presses_no_button_of_it(staff):
    job = JobFactory(failed=True)
    assert staff("retry_job", "cancel_job").post(button_url(job, "requeue")).status_code == 403
    job.refresh_from_db()
    assert job.state == "failed"


def test_buttons_are_for_those_who_are_logged_in(client):
    job = JobFactory(failed=True)
    response = client.post(button_url(job, "requeue"))
    assert response.status_code == 302
    assert "login" in response.url


def test_the_button_of_a_row_that_is_gone_leads_back(admin_client):
    job = JobFactory()
    url = button_url(job, "requeue")
    job.delete()
    assert admin_client.post(url).status_code == 302


# --- Actions on dead letters --------------------------------------------------------------------


def test_replay_tells_counts_and_refusals_and_is_audited(staff, memory):
    # Given
    job_backed, foreign = (
        DeadLetterFactory(of_job=True),
        DeadLetterFactory(queue="events", topic="events"),
    )
    tired = DeadLetterFactory(replay_count=5)
    # When
    client = staff("view_deadletter", "replay_dlq")
    told = act(client, "deadletter", "replay", job_backed, foreign, tired)
    # Then
    assert told == ["2 dead letters were replayed.", "1 refused: replayed too often."]
    assert len(memory.records("events")) == 1
    assert DeadLetter.objects.filter(state="replayed").count() == 2
    assert set(LogEntry.objects.values_list("change_message", flat=True)) == {"Replayed."}
    assert LogEntry.objects.count() == 2


def test_replay_tells_what_the_transport_refused(admin_client, memory):
    DeadLetterFactory()
    memory.fail("the broker is away")
    told = act(admin_client, "deadletter", "replay", DeadLetter.objects.get())
    assert "the broker is away" in told[1]
    assert DeadLetter.objects.get().state == "open"


def test_discard_needs_its_permission_and_a_note(staff):
    letter = DeadLetterFactory()
    act(staff("view_deadletter"), "deadletter", "discard", letter, note="x")
    client = staff("view_deadletter", "discard_dlq")
    (told,) = act(client, "deadletter", "discard", letter)
    assert "A note is needed" in told
    letter.refresh_from_db()
    assert letter.state == "open"
    (told,) = act(client, "deadletter", "discard", letter, note="a test order")
    assert told == "1 dead letter was discarded."
    letter.refresh_from_db()
    assert (letter.state, letter.note) == ("discarded", "a test order (staff-2)")
    assert LogEntry.objects.get().change_message == "Discarded: a test order"


def test_a_dead_letters_buttons(admin_client, memory):
    letter = DeadLetterFactory(queue="events", topic="events")
    page = admin_client.get(page_url(letter)).content.decode()
    assert button_url(letter, "discard") in page
    assert 'name="note"' in page
    admin_client.post(button_url(letter, "discard"), {"note": "no"})
    letter.refresh_from_db()
    assert letter.state == "discarded"
    other = DeadLetterFactory(queue="events", topic="events")
    admin_client.post(button_url(other, "replay"))
    assert len(memory.records("events")) == 1


# --- Queues and workers -------------------------------------------------------------------------


def test_every_known_queue_is_listed_and_can_be_paused(staff):
    # Given nobody has touched a queue
    client = staff("view_queuecontrol", "pause_queue")
    found = client.get(list_url("queuecontrol")).context["cl"].result_list
    assert [control.queue for control in found] == registry.queue_names()
    # And looking has left it so
    emails = next(control for control in found if control.queue == "emails")
    assert client.get(page_url(emails)).status_code == 200
    assert not QueueControl.objects.exists()
    # When
    assert act(client, "queuecontrol", "pause", emails) == ["1 queue was paused."]
    # Then
    emails.refresh_from_db()
    assert (emails.is_paused, emails.changed_by) == (True, "staff-2")
    assert act(client, "queuecontrol", "resume", emails) == ["1 queue was resumed."]
    assert LogEntry.objects.count() == 2
    # And by button
    client.post(button_url(emails, "pause"))
    emails.refresh_from_db()
    assert emails.is_paused


def test_a_queue_nobody_has_touched_is_paused_and_limited_on_its_page(staff):
    client = staff("view_queuecontrol", "pause_queue", "change_queuecontrol")
    emails, other = QueueControl(queue="emails"), QueueControl(queue="default")
    client.post(button_url(emails, "pause"))
    client.post(page_url(other), {"concurrency": "3"})
    assert QueueControl.objects.get(queue="emails").is_paused
    assert QueueControl.objects.get(queue="default").concurrency == 3
    # And one that nobody knows is none
    assert client.get(page_url(QueueControl(queue="nobody's"))).status_code == 302


def test_limits_are_listed_changed_and_given_back(staff, forgotten_definitions):
    # Given a limit that the code declares
    job(name="tests.import_ca", queue="emails", rate="5/s", concurrency=3)(lambda: None)
    client = staff("view_limitcontrol", "change_limitcontrol")
    limit = LimitControl(name="job:tests.import_ca")
    page = client.get(list_url("limitcontrol")).content.decode()
    assert "5/s, 3 at once" in page
    assert client.get(page_url(limit)).status_code == 200
    assert not LimitControl.objects.exists()
    # When it is changed
    assert client.post(page_url(limit), {"rate": "2/m", "concurrency": "1"}).status_code == 302
    # Then
    row = LimitControl.objects.get()
    assert (row.rate, row.burst, row.concurrency, row.changed_by) == ("2/m", None, 1, "staff-2")
    page = client.get(page_url(limit)).content.decode()
    assert "2/m, 1 at once" in page
    assert LogEntry.objects.count() == 1
    # And the button leads back to its page
    answer = client.post(button_url(row, "clear"))
    assert client.get(answer.url).status_code == 200
    assert not LimitControl.objects.exists()


def test_a_limit_is_added_for_what_has_none(staff):
    client = staff("view_limitcontrol", "change_limitcontrol")
    add = reverse("admin:kjo_django_limitcontrol_add")
    client.post(add, {"name": "queue:emails", "rate": "1/s", "burst": "4"})
    row = LimitControl.objects.get()
    assert (row.name, row.rate, row.burst, row.concurrency) == ("queue:emails", "1/s", 4, None)
    assert [row.name for row in client.get(list_url("limitcontrol")).context["cl"].result_list] == [
        "queue:emails"
    ]


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("queue:emails", {"rate": "fast"}, "rate must be"),
        ("queue:emails", {"concurrency": "2"}, "concurrency must be of a job"),
        ("queue:emails", {"burst": "0"}, "burst must be"),
        ("queue:nosuch", {"rate": "1/s"}, "No queue is named"),
        ("x", {"rate": "1/s"}, "A limit is named queue:… or job:…"),
    ],
)
def test_a_limit_that_means_nothing_is_refused_beside_its_field(staff, name, given, says):
    client = staff("view_limitcontrol", "change_limitcontrol")
    add = reverse("admin:kjo_django_limitcontrol_add")
    assert says in html.unescape(client.post(add, {"name": name, **given}).content.decode())
    assert not LimitControl.objects.exists()
    if name == "queue:emails":
        page = client.post(page_url(LimitControl(name=name)), given).content.decode()
        assert says in html.unescape(page)


def test_limits_are_changed_by_those_with_the_permission(staff):
    client = staff("view_limitcontrol")
    limit = LimitControl(name="queue:emails")
    assert client.post(page_url(limit), {"rate": "1/s"}).status_code == 403
    assert client.get(reverse("admin:kjo_django_limitcontrol_add")).status_code == 403
    assert not LimitControl.objects.exists()


def test_pausing_needs_its_permission(staff):
    control = QueueControlFactory(queue="emails")
    act(staff("view_queuecontrol"), "queuecontrol", "pause", control)
    control.refresh_from_db()
    assert not control.is_paused


def test_the_concurrency_can_be_changed_without_undoing_a_pause(staff):
    control = QueueControlFactory(queue="emails", is_paused=True)
    client = staff("view_queuecontrol", "change_queuecontrol")
    assert client.post(page_url(control), {"concurrency": "3"}).status_code == 302
    control.refresh_from_db()
    assert (control.concurrency, control.is_paused) == (3, True)
    assert control.changed_by == "staff-2"


def test_a_changed_concurrency_is_told_as_everywhere_else(
    staff, hear, django_capture_on_commit_callbacks
):
    # Given somebody who listens
    heard = hear("queue_changed")
    control = QueueControlFactory(queue="emails")
    client = staff("view_queuecontrol", "change_queuecontrol")
    # When
    with django_capture_on_commit_callbacks(execute=True):
        client.post(page_url(control), {"concurrency": "3"})
        client.post(page_url(control), {"concurrency": ""})
    # Then
    assert [(each["sender"], each["actor"]) for each in heard] == [("emails", "staff-2")] * 2
    assert [each["changes"] for each in heard] == [{"concurrency": 3}, {"concurrency": None}]


@pytest.mark.parametrize("value", ["0", "1001", "-1", "many"])
def test_a_concurrency_out_of_its_range_is_refused_in_the_form(staff, value):
    control = QueueControlFactory(queue="emails", concurrency=2)
    client = staff("view_queuecontrol", "change_queuecontrol")
    answer = client.post(page_url(control), {"concurrency": value})
    assert answer.status_code == 200
    assert "errorlist" in answer.content.decode()
    control.refresh_from_db()
    assert control.concurrency == 2


def test_workers_are_shown_alive_or_gone(admin_client):
    WorkerFactory(name="here")
    WorkerFactory(name="away", stale=True)
    WorkerFactory(name="bye", state="stopped")
    page = admin_client.get(list_url("worker")).content.decode()
    assert page.count("kjo-alive") == page.count("kjo-gone") == page.count("kjo-stopped") == 1


def test_a_running_job_shows_how_far_it_says_it_is(admin_client):
    # Given
    job = JobFactory()
    page = reverse("admin:kjo_django_job_change", args=[job.pk])
    assert (
        "42" not in admin_client.get(page).content.decode().split("field-shown_progress")[1][:200]
    )
    # When its handler says so
    mark = {progress_name(str(job.pk)): dump_progress(42, EVIL)}
    get_coordination().set_marks(mark, timedelta(minutes=1))
    # Then people see it, inert
    shown = admin_client.get(page).content.decode().split("field-shown_progress")[1][:400]
    assert "42 %" in shown
    assert EVIL not in shown


def test_of_many_failed_attempts_the_newest_are_shown(admin_client, monkeypatch):
    """A job that is retried without end has thousands."""
    monkeypatch.setattr(jobs_admin, "FAILURES_SHOWN", 2, raising=False)
    job = JobFactory(failed=True)
    for attempt in range(1, 5):
        JobFailureFactory(job=job, attempt=attempt, error=f"failed {attempt}")
    JobFailureFactory(error="of another")
    page = admin_client.get(reverse("admin:kjo_django_job_change", args=[job.pk])).content.decode()
    assert re.findall(r"failed \d", page) == ["failed 3", "failed 4"]
    assert "of another" not in page


@pytest.mark.parametrize(
    ("model", "lookup"),
    [
        ("deadletter", "traceback__contains"),
        ("deadletter", "value"),
        ("deadletter", "headers__password"),
        ("job", "headers__has_key"),
        ("job", "payload"),
        ("job", "error__icontains"),
        ("processedevent", "event_data__card"),
        ("worker", "last_error__contains"),
    ],
)
def test_no_list_is_filtered_by_what_is_not_shown(staff, model, lookup):
    """Whoever may not see a column could guess what is in it, letter by letter."""
    client = staff(*(f"view_{each}" for each in MODELS))
    assert client.get(list_url(model), {lookup: "x"}).status_code == 400
    if model in ("job", "deadletter"):
        assert client.get(list_url(model), {"state": "open", "queue": "emails"}).status_code == 200
