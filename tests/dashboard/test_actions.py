"""What operators do from the screens: permissions, POST with CSRF, what changes, who is noted."""

from __future__ import annotations

import html
import json
import re

import pytest
from django.contrib.admin.models import LogEntry

from kjo_django.admin.dashboard import screens
from kjo_django.messages.serializers import serializer_for
from kjo_django.models import DeadLetter, Job, QueueControl, Schedule, Worker, Workflow
from kjo_django.operations import bulk
from tests.dashboard.conftest import texts, url
from tests.factories import DeadLetterFactory, JobFactory, WorkerFactory

pytestmark = pytest.mark.django_db(transaction=True)

EVERYTHING = [
    *("view_dashboard", "view_job", "view_deadletter", "view_payload", "retry_job", "cancel_job"),
    *("pause_queue", "change_queuecontrol", "replay_dlq", "discard_dlq", "edit_payload"),
    *("control_worker", "view_workflow", "cancel_workflow", "retry_workflow"),
    *("view_schedule", "run_schedule", "pause_schedule", "change_schedule", "delete_schedule"),
    *("view_limitcontrol", "change_limitcontrol", "erase_personal_data"),
]


@pytest.fixture
def told(hear):
    """What signals said, while the test runs."""
    names = ("queue_paused", "queue_changed", "worker_asked", "job_requeued", "job_cancelled")
    return hear(*names, "message_replayed", "message_discarded")


def names(told):
    return [each["signal"] for each in told]


def written():
    return [(entry.user.get_username(), entry.change_message) for entry in LogEntry.objects.all()]


def actions():
    return [screen for screen in screens() if screen.is_action]


# --- How ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("screen", actions(), ids=lambda screen: screen.name)
def test_an_action_takes_a_post_with_a_token_only(operator, screen):
    job, worker = JobFactory(), WorkerFactory()
    workflow = Workflow.objects.create(name="import")
    keys = {"queue": "emails", "action": "requeue", "job": job.pk, "worker": worker.pk}
    schedule = Schedule.objects.create(name="nightly", job="tests.add", every=60)
    keys |= {"workflow": workflow.pk, "schedule": schedule.pk, "limit": "queue:emails"}
    names = [part[1:-1].split(":")[1] for part in screen.path.split("/") if part.startswith("<")]
    address = url(screen.name, *(keys[name] for name in names))
    client = operator(*EVERYTHING, enforce_csrf_checks=True)
    assert client.get(address).status_code == 405
    assert client.post(address).status_code == 403
    job.refresh_from_db()
    worker.refresh_from_db()
    workflow.refresh_from_db()
    assert (job.generation, job.state, worker.asked_to) == (1, "pending", "")
    assert (workflow.state, workflow.deadline) == ("running", None)
    assert not QueueControl.objects.exists()


@pytest.mark.parametrize("name", ["replay", "discard"])
def test_what_was_previewed_is_done_by_a_post_with_a_token_only(operator, name):
    letter = DeadLetterFactory(of_job=True)
    client = operator(*EVERYTHING, enforce_csrf_checks=True)
    given = {"letter": letter.pk, "confirmed": 1, "note": "x"}
    assert client.get(url(name), given).status_code == 200
    assert client.post(url(name), given).status_code == 403
    letter.refresh_from_db()
    assert letter.state == "open"


def test_nobody_is_sent_to_another_site(everybody):
    for wanted in ("https://evil.example/", "//evil.example/", "javascript:alert(1)"):
        response = everybody.post(url("queue_pause", "emails"), {"next": wanted})
        assert response["Location"] == url("queues")
    response = everybody.post(url("queue_resume", "emails"), {"next": url("jobs") + "?q=x"})
    assert response["Location"] == url("jobs") + "?q=x"


# --- Queues and workers ---------------------------------------------------------------------------


def test_a_queue_is_paused_and_resumed(operator, told):
    client = operator("view_dashboard", "pause_queue")
    assert texts(client.post(url("queue_pause", "emails"), follow=True)) == ["Paused: emails"]
    control = QueueControl.objects.get()
    assert (control.queue, control.is_paused, control.changed_by) == ("emails", True, "op-0")
    again = texts(client.post(url("queue_pause", "emails"), follow=True))
    assert again == ["It was paused already: emails"]
    client.post(url("queue_resume", "emails"))
    assert not QueueControl.objects.get().is_paused
    assert written()[::-1] == [("op-0", "Paused."), ("op-0", "Resumed.")]
    assert names(told) == ["queue_paused"]
    assert client.post(url("queue_pause", "nosuch")).status_code == 404


def test_a_policy_is_changed_and_taken_back(operator, told):
    client = operator("view_dashboard", "change_queuecontrol")
    given = {"concurrency": "3", "max_attempts": "7", "backoff_base": "10"}
    client.post(url("queue", "emails"), given)
    control = QueueControl.objects.get()
    assert (control.concurrency, control.max_attempts, control.backoff_base) == (3, 7, 10)
    client.post(url("queue", "emails"), {"concurrency": "3"})
    control.refresh_from_db()
    assert (control.concurrency, control.max_attempts, control.backoff_base) == (3, None, None)
    assert len(written()) == 2
    assert names(told) == ["queue_changed"] * 2


@pytest.mark.parametrize("value", ["0", "-1", "x", "1.5", "1001", "99999999999"])
def test_a_wrong_policy_is_told_and_changes_nothing(everybody, value):
    response = everybody.post(url("queue", "emails"), {"max_attempts": value})
    assert response.status_code == 200
    assert b"errorlist" in response.content
    assert not QueueControl.objects.exclude(max_attempts=None).exists()


def test_changing_a_policy_needs_the_permission(operator):
    client = operator("view_dashboard", "pause_queue")
    assert client.post(url("queue", "emails"), {"max_attempts": 1}).status_code == 403


def test_a_worker_is_quieted_and_stopped(operator, told):
    worker = WorkerFactory()
    client = operator("view_dashboard", "control_worker")
    for name, asked_to in (("quiet", "quiet"), ("unquiet", ""), ("stop", "stop")):
        client.post(url(f"worker_{name}", worker.pk), follow=True)
        assert Worker.objects.get().asked_to == asked_to
    said = texts(client.post(url("worker_stop", worker.pk), follow=True))
    assert said == ["1 needed no change."]
    assert len(written()) == 3
    assert names(told) == ["worker_asked"] * 3


# --- Jobs -----------------------------------------------------------------------------------------


def test_a_job_is_requeued_run_now_and_cancelled_from_its_page(operator, told):
    job = JobFactory(failed=True)
    client = operator("view_dashboard", "view_job", "retry_job", "cancel_job")
    client.post(url("job_requeue", job.pk), follow=True)
    job.refresh_from_db()
    assert (job.state, job.generation) == ("pending", 2)
    client.post(url("job_run_now", job.pk), follow=True)
    client.post(url("job_cancel", job.pk), follow=True)
    job.refresh_from_db()
    assert job.state == "cancelled"
    assert names(told) == ["job_requeued", "job_cancelled"]
    assert [message for _, message in written()] == ["Cancelled.", "Requeued."]
    said = texts(client.post(url("job_cancel", job.pk), follow=True))
    assert said == ["1 cancelled already."]


def test_the_jobs_ticked_are_changed_and_no_other(operator):
    jobs = JobFactory.create_batch(4, failed=True)
    client = operator("view_dashboard", "view_job", "retry_job")
    given = {"job": [jobs[0].pk, jobs[2].pk]}
    said = texts(client.post(url("jobs_chosen", "requeue"), given, follow=True))
    assert said == ["2 jobs were requeued."]
    assert set(Job.objects.filter(generation=2)) == {jobs[0], jobs[2]}
    assert texts(client.post(url("jobs_chosen", "requeue"), follow=True)) == ["Select jobs first."]
    assert client.post(url("jobs_chosen", "cancel"), given).status_code == 403
    assert client.post(url("jobs_chosen", "explode"), given).status_code == 404


@pytest.mark.parametrize("given", ["x", "\0", "1" * 500, "019a0000-0000-7000-8000-000000000000"])
def test_ids_that_are_none_are_told(everybody, given):
    said = texts(everybody.post(url("jobs_chosen", "requeue"), {"job": given}, follow=True))
    assert said == ["1 no longer there."]


def test_all_that_a_search_finds_is_shown_first_and_then_changed(operator):
    wanted = JobFactory.create_batch(3, failed=True, handler="shop.send")
    JobFactory.create_batch(2, failed=True, handler="shop.bill")
    client = operator("view_dashboard", "view_job", "retry_job")
    address = url("jobs_all", "requeue") + "?q=handler:shop.send"
    page = client.get(address).content.decode()
    assert "<b>3</b>" in page
    assert not Job.objects.filter(generation=2).exists()
    client.post(address, {"q": "handler:shop.send"})
    assert set(Job.objects.filter(generation=2)) == set(wanted)


def test_many_are_changed_by_a_job_of_its_own(operator, monkeypatch):
    monkeypatch.setattr(bulk, "SYNCHRONOUS_LIMIT", 2)
    JobFactory.create_batch(3, failed=True)
    client = operator("view_dashboard", "view_job", "retry_job")
    response = client.post(url("jobs_all", "requeue"), {"q": "state:failed"}, follow=True)
    job = Job.objects.get(handler="kjo_django.change_jobs")
    assert str(job.pk) in response.redirect_chain[-1][0]
    assert written() == [("op-0", "Started to change jobs: requeue state:failed")]
    assert not Job.objects.filter(generation=2).exists()


# --- Dead letters ---------------------------------------------------------------------------------


def test_one_is_replayed(operator, told):
    letter = DeadLetterFactory(of_job=True)
    client = operator("view_dashboard", "view_deadletter", "replay_dlq")
    preview = client.get(url("replay"), {"letter": letter.pk}).content.decode()
    assert "<b>1</b>" in preview
    said = texts(client.post(url("replay"), {"letter": letter.pk, "confirmed": 1}, follow=True))
    assert said == ["1 dead letter was replayed."]
    letter.refresh_from_db()
    assert letter.state == "replayed"
    letter.job.refresh_from_db()
    assert (letter.job.state, letter.job.generation) == ("pending", 2)
    assert "message_replayed" in names(told)
    assert ("op-0", "Replayed.") in written()


def test_a_group_of_errors_is_replayed_and_the_others_stay(operator):
    mine = [DeadLetterFactory(of_job=True, fingerprint="a" * 16) for _ in range(3)]
    other = DeadLetterFactory(of_job=True, fingerprint="b" * 16)
    client = operator("view_dashboard", "view_deadletter", "replay_dlq")
    given = {"fingerprint": "a" * 16, "confirmed": 1, "limit": 2}
    client.post(url("replay"), given)
    states = [DeadLetter.objects.get(pk=letter.pk).state for letter in [*mine, other]]
    assert states == ["replayed", "replayed", "open", "open"]


def test_a_confirmation_counts_each_error_as_the_list_names_it(everybody):
    DeadLetterFactory.create_batch(2, reason="fatal", handler="shop.a", error_type="OSError")
    DeadLetterFactory(reason="of a later release", handler="", error_type="KeyError")
    page = everybody.get(url("replay") + "?all=1").content.decode()
    rows = re.findall(r"<tr><th.*?</tr>", page[page.index("<tbody>") :])
    cells = [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in rows]
    assert cells[0] == ["shop.a", "Permanent error", "OSError", "2"]
    assert cells[1] == ["–", "of a later release", "KeyError", "1"]


def test_nothing_chosen_replays_nothing(everybody):
    DeadLetterFactory(of_job=True)
    said = texts(everybody.post(url("replay"), {"confirmed": 1}, follow=True))
    assert said == ["Select dead letters first."]
    assert DeadLetter.objects.get().state == "open"
    everybody.post(url("replay"), {"confirmed": 1, "all": 1})
    assert DeadLetter.objects.get().state == "replayed"


def test_a_discard_needs_a_note(operator, told):
    letter = DeadLetterFactory(of_job=True)
    client = operator("view_dashboard", "view_deadletter", "discard_dlq")
    refused = client.post(url("discard"), {"letter": letter.pk, "confirmed": 1})
    assert b"errorlist" in refused.content
    letter.refresh_from_db()
    assert letter.state == "open"
    given = {"letter": letter.pk, "confirmed": 1, "note": "known <b>bug</b>"}
    client.post(url("discard"), given)
    letter.refresh_from_db()
    assert (letter.state, letter.note) == ("discarded", "known <b>bug</b> (op-0)")
    assert names(told) == ["message_discarded"]


def test_a_payload_is_edited_and_replayed(operator):
    letter = DeadLetterFactory(of_job=True, value=b'{"a": "wrong", "token": "xyzzy"}')
    client = operator(*EVERYTHING)
    page = client.get(url("letter_edit", letter.pk)).content.decode()
    assert "wrong" in page
    assert "xyzzy" not in page
    client.post(url("letter_edit", letter.pk), {"value": '{"a": 5, "token": "[redacted]"}'})
    letter.refresh_from_db()
    assert letter.state == "replayed"
    assert json.loads(bytes(letter.value)) == {"a": "wrong", "token": "xyzzy"}
    job = Job.objects.get(pk=letter.job_id)
    assert json.loads(bytes(job.payload)) == {"a": 5, "token": "xyzzy"}
    assert job.state == "pending"
    assert ("op-0", "Replayed with another payload.") in written()


@pytest.mark.parametrize("value", ["{", "", "\0", "x" * 1_000_000, '{"a": NaN'])
def test_a_payload_that_is_none_is_told_and_kept_for_mending(operator, value):
    letter = DeadLetterFactory(of_job=True)
    response = operator(*EVERYTHING).post(url("letter_edit", letter.pk), {"value": value})
    assert response.status_code == 200
    assert b'role="alert"' in response.content
    letter.refresh_from_db()
    assert letter.state == "open"


@pytest.mark.parametrize("depth", [600, 5000])
def test_a_payload_of_many_levels_is_shown_and_told(operator, depth):
    """Others may have sent it; it is shown, to be mended."""
    value = "[" * depth + "]" * depth
    letter = DeadLetterFactory(of_job=True, value=value.encode())
    client = operator(*EVERYTHING)
    assert client.get(url("letter", letter.pk)).status_code == 200
    assert client.get(url("letter_edit", letter.pk)).status_code == 200
    response = client.post(url("letter_edit", letter.pk), {"value": value})
    assert b"nested too deeply" in response.content


def edited(client, letter):
    """Return what the form for editing a dead letter holds."""
    page = client.get(url("letter_edit", letter.pk)).content.decode()
    return html.unescape(re.search(r"<textarea[^>]*>(.*?)</textarea>", page, re.DOTALL)[1])


@pytest.mark.parametrize(
    "value",
    [b'{"a": NaN}', '{"a": "b"}'.encode("utf-16"), b'{"a": 1e400}'],
    ids=["NaN", "UTF-16", "infinity"],
)
def test_what_only_looks_like_json_is_not_replaced_by_words_about_it(operator, value):
    """Whoever pressed the button replayed a sentence."""
    letter = DeadLetterFactory(of_job=True, value=value)
    shown = edited(operator(*EVERYTHING), letter)
    assert "bytes" not in shown
    assert "Infinity" not in shown


def test_a_payload_too_long_for_the_form_is_not_replaced_by_words_about_it(operator):
    letter = DeadLetterFactory(of_job=True, value=json.dumps({"a": "x" * 200_000}).encode())
    client = operator(*EVERYTHING)
    assert edited(client, letter) == ""
    assert "too long to be edited" in client.get(url("letter_edit", letter.pk)).content.decode()
    client.post(url("letter_edit", letter.pk), {"value": ""})
    letter.refresh_from_db()
    assert letter.state == "open"


def test_an_edited_letter_leaves_the_job_that_has_its_id_now_alone(operator):
    letter = DeadLetterFactory(of_job=True, value=b'{"a": "wrong"}')
    type(letter.job).objects.update(generation=2, payload=b'{"a": "new"}')
    client = operator(*EVERYTHING)
    client.post(url("letter_edit", letter.pk), {"value": '{"a": "right"}'})
    letter.refresh_from_db()
    assert letter.state == "replayed"
    letter.job.refresh_from_db()
    assert (letter.job.generation, letter.job.state) == (2, "failed")
    assert letter.job.arguments == {"a": "new"}
    again = type(letter.job).objects.exclude(pk=letter.job_id).get()
    assert again.arguments == {"a": "right"}


def test_a_payload_in_another_format_is_edited_as_json_without_its_secrets(operator):
    """Its bytes were shown as they are, secrets too."""
    pytest.importorskip("msgpack")
    serializer = serializer_for("application/msgpack")
    data = serializer.dumps({"a": "wrong", "token": "xyzzy"})
    job = JobFactory(failed=True, payload=data, content_type=serializer.content_type)
    letter = DeadLetterFactory(job=job, value=data, content_type=serializer.content_type)
    client = operator(*EVERYTHING)
    shown = edited(client, letter)
    assert json.loads(shown) == {"a": "wrong", "token": "[redacted]"}
    client.post(url("letter_edit", letter.pk), {"value": shown.replace("wrong", "right")})
    job.refresh_from_db()
    assert serializer.loads(bytes(job.payload)) == {"a": "right", "token": "xyzzy"}
    # And what JSON has no word for is not edited here
    data = serializer.dumps({"b": b"\x00"})
    letter = DeadLetterFactory(value=data, content_type=serializer.content_type)
    assert edited(client, letter) == ""


@pytest.mark.parametrize("screen", ["replay", "discard"])
def test_dead_letters_are_for_those_who_may_see_them(operator, screen):
    """A preview tells of handlers and errors."""
    letter = DeadLetterFactory(of_job=True)
    client = operator("view_dashboard", "replay_dlq", "discard_dlq")
    given = {"letter": letter.pk, "confirmed": 1, "note": "x"}
    assert client.get(url(screen), given).status_code == 403
    assert client.post(url(screen), given).status_code == 403
    letter.refresh_from_db()
    assert letter.state == "open"


def test_a_job_is_changed_by_those_who_may_see_it(operator):
    job = JobFactory(failed=True)
    client = operator("view_dashboard", "retry_job")
    assert client.post(url("job_requeue", job.pk)).status_code == 403
    job.refresh_from_db()
    assert job.state == "failed"


@pytest.mark.parametrize(
    "missing", ["edit_payload", "view_payload", "replay_dlq", "view_deadletter"]
)
def test_editing_needs_all_of_its_permissions(operator, missing):
    letter = DeadLetterFactory(of_job=True)
    client = operator(*(name for name in EVERYTHING if name != missing))
    given = {"value": '{"a": 5}'}
    assert client.get(url("letter_edit", letter.pk)).status_code == 403
    assert client.post(url("letter_edit", letter.pk), given).status_code == 403


def test_a_closed_letter_is_not_edited(everybody):
    letter = DeadLetterFactory(discarded=True)
    said = texts(everybody.get(url("letter_edit", letter.pk), follow=True))
    assert said == ["It is closed already: Discarded"]


@pytest.mark.parametrize("rate", ["1e-300", "0", "nan", "inf", "1e6"])
def test_an_absurd_rate_is_refused_beside_its_field(operator, rate):
    letter = DeadLetterFactory(of_job=True)
    client = operator("view_dashboard", "view_deadletter", "view_job", "replay_dlq")
    answer = client.post(url("replay"), {"all": 1, "confirmed": 1, "rate": rate})
    assert "rate" in answer.context["form"].errors
    letter.refresh_from_db()
    assert letter.state == "open"


def test_many_are_replayed_by_a_job_of_its_own(operator, monkeypatch):
    monkeypatch.setattr(bulk, "SYNCHRONOUS_LIMIT", 2)
    for _ in range(3):
        DeadLetterFactory(of_job=True)
    client = operator("view_dashboard", "view_deadletter", "view_job", "replay_dlq")
    client.post(url("replay"), {"all": 1, "confirmed": 1, "rate": "5"})
    job = Job.objects.get(handler="kjo_django.replay_dead_letters")
    assert job.state == "pending"
    assert DeadLetter.objects.filter(state="open").count() == 3
