"""Schedules on the dashboard: list, history, the form with the next five runs, actions."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.messages import headers as names
from kjo_django.models import Job, Schedule
from kjo_django.operations import schedules
from tests.dashboard.conftest import texts, url
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db(transaction=True)

EVERYTHING = (
    *("view_dashboard", "view_schedule", "add_schedule", "change_schedule", "delete_schedule"),
    *("pause_schedule", "run_schedule", "view_payload", "view_job"),
)
FORM = {"name": "nightly", "job": "ledger.write", "cron": "30 3 * * *", "jitter": "0"}
FORM |= {"payload": '{"job": "scheduled"}', "timezone": "Asia/Kolkata"}
FORM |= {"catch_up": "one", "overlap": "allow"}


def nightly(**options):
    given = {"job": "ledger.write", "payload": {"job": "a"}, "cron": "0 3 * * *", **options}
    return schedules.add(given.pop("name", "nightly"), **given)


def written():
    return list(LogEntry.objects.order_by("pk").values_list("change_message", flat=True))


# --- What is shown --------------------------------------------------------------------------------


def test_the_list_tells_next_run_last_run_and_state(operator):
    row, paused = nightly(), nightly(name="weekly", cron="@weekly")
    schedules.pause([paused])
    begun = timezone.now() - timedelta(hours=1)
    job = JobFactory(completed=True, started_at=begun, finished_at=begun + timedelta(seconds=90))
    late = timezone.now() - timedelta(minutes=5)
    Schedule.objects.filter(pk=row.pk).update(last_job_id=job.pk, last_at=begun, next_at=late)
    Schedule.objects.create(name="gone", job="no.such", every=60, next_at=timezone.now())
    # When
    page = operator("view_dashboard", "view_schedule").get(url("schedules")).content.decode()
    # Then
    rows = {text.split('">')[0]: text for text in page.split('<tr id="kjo-schedule-')[1:]}
    first = rows[str(row.pk)]
    assert "0 3 * * *" in first
    assert "Active" in first
    assert "Completed" in first
    assert "1.5 min" in first  # it took
    assert "5 min" in first  # late
    assert "Paused" in rows[str(paused.pk)]
    assert any("Broken" in text and "no job is named" in text for text in rows.values())


def test_the_list_is_searched_filtered_and_paged(operator, monkeypatch):
    monkeypatch.setattr("kjo_django.admin.dashboard.schedules.SIZE", 2)
    for name in ("a", "b", "c"):
        nightly(name=name)
    schedules.pause([Schedule.objects.get(name="b")])
    client = operator("view_dashboard", "view_schedule")

    def shown(query):
        page = client.get(url("schedules") + query).content.decode()
        return [name for name in "abc" if f'">{name}</a>' in page]

    assert shown("") == ["a", "b"]
    assert shown("?after=b") == ["c"]
    assert shown("?q=C") == ["c"]
    assert shown("?state=paused") == ["b"]
    assert shown("?state=active&q=a") == ["a"]
    assert shown("?state=broken") == []
    assert shown("?state=nosuch&q=%00b") == ["b"]


def test_the_list_and_the_page_show_the_next_run_alike_in_the_zone_of_all_times(operator):
    row = nightly(timezone="Europe/Berlin")
    client = operator("view_dashboard", "view_schedule")
    by_zone = {}
    for zone in ("America/New_York", "Europe/Berlin"):
        with timezone.override(zone):
            pages = [client.get(url("schedules")), client.get(url("schedule", row.pk))]
        found = [
            re.search(r"<time[^>]*>([^<]+)</time>(?: <span[^>]*>([^<]+)</span>)?", part)
            for page in pages
            for part in [page.content.decode().split("Next run", 1)[1]]
        ]
        assert found[0].groups() == found[1].groups()
        assert all(f"Times in {zone}" in page.content.decode() for page in pages)
        by_zone[zone] = found[0].groups()
    # By the clocks of the project, and where these differ also by those of the schedule
    ours, own = by_zone["America/New_York"]
    assert re.fullmatch(r"\w{3} \d+ \w{3} \d{4} 2[12]:00:00 E[SD]T", ours)
    assert re.fullmatch(r"\w{3} \d+ \w{3} \d{4} 03:00:00 CES?T", own)
    assert by_zone["Europe/Berlin"] == (own, None)


def test_one_shows_its_next_runs_and_its_last(operator):
    row = nightly(timezone="Europe/Berlin")
    tick = datetime(2026, 1, 5, 2, tzinfo=UTC)
    job = JobFactory(
        completed=True,
        queue="ledger",
        unique_id="schedule:nightly:2026-01-05T02:00:00Z",
        headers={names.SCHEDULED_FOR: tick.isoformat()},
        started_at=tick + timedelta(seconds=2),
        finished_at=tick + timedelta(seconds=5),
    )
    hostile = {names.SCHEDULED_FOR: "<script>"}
    JobFactory(queue="ledger", unique_id="schedule:nightly:now:1", headers=hostile)
    JobFactory(queue="ledger", unique_id="schedule:nightly2:x")
    client = operator("view_dashboard", "view_schedule", "view_job", "view_payload")
    response = client.get(url("schedule", row.pk))
    page = response.content.decode()

    assert [run["late"] for run in response.context["runs"] if run["tick"]] == [2.0]
    assert [run["seconds"] for run in response.context["runs"] if run["tick"]] == [3.0]
    assert len(response.context["runs"]) == 2
    assert len(response.context["next_runs"]) == 5
    assert all("03:00:00 CE" in tick["own"] for tick in response.context["next_runs"])
    assert url("job", job.pk) in page
    assert "<script>" not in page
    assert "&quot;job&quot;: &quot;a&quot;" in page


def test_payloads_are_for_those_who_may_see_them(operator):
    row = nightly(payload={"job": "a", "note": "secret of Ada"})
    viewer = operator("view_dashboard", "view_schedule", "change_schedule")
    for address in (url("schedule", row.pk), url("schedule_edit", row.pk), url("schedules")):
        assert "secret of Ada" not in viewer.get(address).content.decode()
    # And who may not see it may change the rest
    given = {**FORM, "cron": "0 4 * * *", "timezone": ""}
    del given["name"], given["payload"]
    viewer.post(url("schedule_edit", row.pk), given)
    row.refresh_from_db()
    assert (row.cron, row.payload) == ("0 4 * * *", {"job": "a", "note": "secret of Ada"})


def test_hidden_fields_of_a_payload_survive_an_edit(operator):
    row = nightly(payload={"job": "a", "note": {"password": "p"}})
    client = operator(*EVERYTHING)
    page = client.get(url("schedule_edit", row.pk)).content.decode()
    assert "[redacted]" in page
    payload = json.dumps({"job": "b", "note": {"password": "[redacted]"}})
    client.post(url("schedule_edit", row.pk), {**FORM, "payload": payload})
    row.refresh_from_db()
    assert row.payload == {"job": "b", "note": {"password": "p"}}
    wrong = json.dumps({"job": "b", "other": "[redacted]"})
    answer = client.post(url("schedule_edit", row.pk), {**FORM, "payload": wrong})
    assert "payload" in answer.context["form"].errors


def test_a_page_costs_few_queries_however_many_schedules_there_are(everybody):
    for number in range(30):
        row = nightly(name=f"n{number}")
        Schedule.objects.filter(pk=row.pk).update(last_job_id=JobFactory().pk)
    for address in (url("schedules"), url("schedule", row.pk), url("schedule_edit", row.pk)):
        cache.clear()
        with CaptureQueriesContext(connection) as queries:
            assert everybody.get(address).status_code == 200
        assert len(queries) <= 12, address


# --- Adding and editing ---------------------------------------------------------------------------


def test_a_schedule_is_added(operator):
    client = operator(*EVERYTHING)
    assert client.get(url("schedule_add")).status_code == 200
    response = client.post(url("schedule_add"), FORM, follow=True)
    row = Schedule.objects.get()
    assert texts(response) == ["Added: nightly"]
    assert (row.name, row.job, row.cron) == ("nightly", "ledger.write", "30 3 * * *")
    assert (row.payload, row.timezone) == ({"job": "scheduled"}, "Asia/Kolkata")
    assert (row.source, row.changed_by) == ("admin", "op-0")
    assert row.next_at.astimezone(UTC).time().isoformat() == "22:00:00"
    assert written() == ["Added."]
    # And a second one of this name is refused beside the name
    again = client.post(url("schedule_add"), FORM)
    assert "name" in again.context["form"].errors
    assert Schedule.objects.count() == 1


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("cron", "61 * * * *", "minute"),
        ("cron", "0 25 * * *", "hour"),
        ("cron", "0 0 * *", "five fields"),
        ("cron", "@dayly", "@daily"),
        ("timezone", "Europe/Berlim", "Europe/Berlin"),
        ("job", "ledger.wriet", "ledger.write"),
        ("payload", "[1]", "dict"),
        ("payload", "{", "JSON"),
        ("payload", '{"job": "\\ud800"}', "dict"),
        ("payload", '{"job": "a", "nosuch": 1}', "nosuch"),
        ("queue", "nosuch", "No queue"),
        ("jitter", "-1", "0"),
        ("jitter", "99999999", "86"),
        ("name", "a:b", "control characters"),
        ("name", "", "required"),
        ("ends_at", "2000-01-01T00:00", "future"),
        ("at", "yesterday", "date"),
        ("every", "60", "cron and every"),
        ("name", "x" * 101, "100"),
    ],
)
def test_what_means_nothing_is_refused_with_the_place_of_the_fault(operator, field, value, told):
    client = operator(*EVERYTHING)
    answer = client.post(url("schedule_add"), {**FORM, field: value})
    assert answer.status_code == 200
    errors = answer.context["form"].errors
    assert field in errors or (field in ("every", "ends_at") and errors)
    assert told in str(errors), errors
    assert not Schedule.objects.exists()
    assert written() == []


def test_what_means_nothing_is_refused_in_the_readers_language(operator, settings):
    settings.LANGUAGE_CODE = "de"
    client = operator(*EVERYTHING)
    answer = client.post(url("schedule_add"), {**FORM, "cron": "0 <b> * * *"})
    page = answer.content.decode()
    assert "Erwartet wird ein Cron-Ausdruck, dessen Feld hour 0-23 ist" in page
    assert "must be" not in page
    assert "<b>" not in page
    preview = client.get(url("schedule_preview"), {"cron": "0 25 * * *"}).content.decode()
    assert "Erwartet wird ein Cron-Ausdruck" in preview


def test_a_broken_schedule_says_why_in_the_readers_language(operator, settings):
    row = nightly()
    Schedule.objects.filter(pk=row.pk).update(job="ledger.wriet")
    settings.LANGUAGE_CODE = "es"
    client = operator(*EVERYTHING)
    for address in (url("schedules"), url("schedule", row.pk)):
        page = client.get(address).content.decode()
        assert "ningún trabajo se llama" in page
        assert "no job is named" not in page


def test_the_form_shows_the_next_five_runs_by_the_clocks_of_the_zone(operator):
    client = operator(*EVERYTHING)
    fragment = {"X-Kjo-Fragment": "1"}

    def preview(**given):
        answer = client.get(url("schedule_preview"), given, headers=fragment)
        assert answer.status_code == 200
        return answer.content.decode()

    found = preview(cron="30 3 * * *", timezone="Asia/Kolkata")
    assert found.count("<li>") == 5
    assert found.count("03:30:00 IST") == 5
    assert preview(every="60").count("<li>") == 5
    assert "hour" in preview(cron="0 25 * * *")
    assert "Say when" in preview()
    assert "<script>" not in preview(cron="<script>", timezone="<script>")
    assert preview(at="2999-01-01T00:00").count("<li>") == 1
    assert "errorlist" in preview(at="yesterday")
    # Without JavaScript a button shows them, and adds nothing
    page = client.post(url("schedule_add"), {**FORM, "preview": "1"}).content.decode()
    assert page.count("03:30:00 IST") == 5
    assert not Schedule.objects.exists()


def test_a_schedule_is_edited_and_what_stays_stays(operator):
    row = nightly(queue="ledger", jitter=30)
    client = operator(*EVERYTHING)
    page = client.get(url("schedule_edit", row.pk)).content.decode()
    assert 'value="0 3 * * *"' in page
    given = {**FORM, "cron": "", "every": "300", "timezone": "", "queue": "ledger", "jitter": "30"}
    response = client.post(url("schedule_edit", row.pk), given, follow=True)
    assert texts(response) == ["Changed: nightly"]
    row.refresh_from_db()
    assert (row.cron, row.every, row.queue, row.jitter) == ("", 300, "ledger", 30)
    again = client.post(url("schedule_edit", row.pk), given, follow=True)
    assert texts(again) == ["Nothing was changed."]
    assert len(written()) == 1


# --- Actions --------------------------------------------------------------------------------------


def test_each_button_needs_its_permission(operator):
    row = nightly()
    viewer = operator("view_dashboard", "view_schedule")
    page = viewer.get(url("schedule", row.pk)).content.decode()
    assert "formaction" not in page
    assert url("schedule_edit", row.pk) not in page
    for name, permission in (
        ("run_now", "run_schedule"),
        ("pause", "pause_schedule"),
        ("delete", "delete_schedule"),
    ):
        address = url(f"schedule_{name}", row.pk)
        client = operator("view_dashboard", "view_schedule", permission)
        assert address in client.get(url("schedule", row.pk)).content.decode()
        assert viewer.post(address).status_code == 403
        assert client.get(address).status_code == (200 if name == "delete" else 405)
    assert viewer.get(url("schedule_edit", row.pk)).status_code == 403
    assert viewer.get(url("schedule_add")).status_code == 403
    assert not Job.objects.exists()


def test_it_runs_now_pauses_resumes_and_is_deleted(operator):
    row = nightly()
    client = operator(*EVERYTHING)

    def press(name):
        address = url(f"schedule_{name}", row.pk)
        return texts(client.post(address, {"confirmed": "1"}, follow=True))

    assert press("run_now") == ["1 job was enqueued."]
    assert Job.objects.get().arguments == {"job": "a"}
    assert press("pause") == ["1 schedule was paused."]
    assert press("pause") == ["1 needed no change."]
    assert Schedule.objects.get().is_paused
    assert press("resume") == ["1 schedule was resumed."]
    assert press("delete") == ["1 schedule was deleted."]
    assert not Schedule.objects.exists()
    assert written() == ["Run now.", "Paused.", "Resumed.", "Deleted."]
    assert client.post(url("schedule_pause", row.pk)).status_code == 404


def test_deleting_asks_once_more(operator):
    row = nightly()
    client = operator(*EVERYTHING)
    page = client.get(url("schedule", row.pk)).content.decode()
    assert f'<a class="kjo-button" href="{url("schedule_delete", row.pk)}"' in page
    for ask in (client.get, client.post):
        question = ask(url("schedule_delete", row.pk)).content.decode()
        assert "Delete this schedule?" in question
        assert row.name in question
    assert Schedule.objects.exists()
    assert not written()


def test_a_schedule_of_the_code_is_not_deleted(operator):
    row = nightly()
    Schedule.objects.update(source="code")
    client = operator(*EVERYTHING)
    confirmed = {"confirmed": "1"}
    said = texts(client.post(url("schedule_delete", row.pk), confirmed, follow=True))
    assert any("declared by the code" in text for text in said)
    assert Schedule.objects.exists()
    assert (
        url("schedule_delete", row.pk) not in client.get(url("schedule", row.pk)).content.decode()
    )


def test_a_broken_one_is_not_run_and_says_why(operator):
    row = Schedule.objects.create(name="gone", job="no.such", every=60, next_at=timezone.now())
    client = operator(*EVERYTHING)
    page = client.get(url("schedule", row.pk)).content.decode()
    assert "no job is named" in page
    assert url("schedule_run_now", row.pk) not in page
    said = texts(client.post(url("schedule_run_now", row.pk), follow=True))
    assert said == ["1 cannot be enqueued."]
