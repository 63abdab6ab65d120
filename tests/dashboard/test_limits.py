"""Limits on the dashboard and over REST: their use, and changing them while workers run."""

from __future__ import annotations

import html
import io
import re
from datetime import timedelta
from unittest.mock import patch

import pytest
from django.contrib.admin.models import LogEntry
from django.core.cache import cache
from django.core.management import call_command
from django.db import connection
from django.test.utils import CaptureQueriesContext, override_settings
from django.utils import timezone

from kjo_django import job, registry
from kjo_django.coordination.base import slot_name
from kjo_django.limits import control
from kjo_django.limits.control import set_limit
from kjo_django.models import NEVER, HeldJob, Job, LimitControl
from kjo_django.runtime import get_coordination
from kjo_django.states import JobState
from tests.dashboard.conftest import texts, url
from tests.factories import JobFactory, MetricBucketFactory
from tests.running_jobs import let_run

pytestmark = pytest.mark.django_db(transaction=True)
EVERYTHING = ("view_dashboard", "view_limitcontrol", "change_limitcontrol")


@pytest.fixture(autouse=True)
def limited():
    """A job with a rate and three slots."""

    @job(name="tests.limited", queue="emails", rate="5/s", concurrency=3)
    def limited() -> None:
        pass

    yield limited
    registry.unregister("tests.limited")


def test_the_list_tells_how_limits_are_used(operator):
    # Given two slots that are taken, and a job that waits
    names = [slot_name("SLOT:job:tests.limited", number) for number in (1, 3)]
    get_coordination().claim(names, "worker", timedelta(minutes=1))
    HeldJob.objects.create(
        job_id=JobFactory().pk, limit="RATE:job:tests.limited", queue="emails", is_released=False
    )
    # When, then
    client = operator("view_dashboard", "view_limitcontrol")
    response = client.get(url("limits"))
    (row,) = [row for row in response.context["rows"] if row["name"] == "job:tests.limited"]
    assert (row["rate"], row["concurrency"]) == ("5/s", 3)
    assert (row["taken_count"], row["in_line_count"]) == (2, 1)
    assert row["buttons"] == []
    assert client.get(url("limit", row["name"])).status_code == 403
    assert client.post(url("limit_clear", row["name"])).status_code == 403
    assert operator("view_dashboard").get(url("limits")).status_code == 403


def row_of(client, name: str):
    cache.clear()
    response = client.get(url("limits"))
    (row,) = [row for row in response.context["rows"] if row["name"] == name]
    return row, response.content.decode()


def test_jobs_that_no_worker_has_met_wait_too(everybody):
    # Given 3,000 due jobs on their topic, of which a worker has put two in line and runs one
    now = timezone.now()
    limited = {"handler": "tests.limited", "queue": "emails", "state": JobState.QUEUED}
    made = Job.objects.bulk_create(
        JobFactory.build(**limited, available_at=now - timedelta(minutes=1)) for _ in range(3000)
    )
    for row in made[1:3]:
        Job.objects.filter(pk=row.pk).update(available_at=NEVER)
        HeldJob.objects.create(job_id=row.pk, limit="RATE:job:tests.limited", queue="emails")
    let_run(made[0])
    # And others that do not wait for it
    JobFactory(**limited | {"state": JobState.COMPLETED})
    JobFactory(**limited, available_at=now + timedelta(hours=1))
    JobFactory(queue="emails", queued=True)
    # When, then
    row, page = row_of(everybody, "job:tests.limited")
    assert row["waiting_count"] == 2999
    assert ">2,999<br>" in page
    assert "2 in line" in page
    # And the other surfaces show the same number
    assert number_on_the_list(everybody) == "2,999"
    assert row_over_rest(everybody)["waiting_count"] == 2999
    assert re.search(r"tests\.limited +5/s .* 2,999 ", printed())
    # And of more than are looked at it is a lower bound, everywhere
    with patch("kjo_django.limits.control.LOOKED_AT", 1000):
        row, page = row_of(everybody, "job:tests.limited")
        assert number_on_the_list(everybody).endswith("+")
        assert row_over_rest(everybody)["waiting_is_lower_bound"]
        assert re.search(r"tests\.limited +5/s .* [\d,]+\+ ", printed())
    assert re.search(r">[\d,]+\+<br>", page)


def number_on_the_list(client) -> str:
    """Return the number of waiting jobs in the admin's list of limits."""
    page = client.get("/admin/kjo_django/limitcontrol/").content.decode()
    return re.search(r'class="field-waiting">([\d,+]+)<', page)[1]


def row_over_rest(client):
    with override_settings(ROOT_URLCONF="tests.api.urls"):
        return client.get("/kjo/limits/job:tests.limited/").json()


def printed() -> str:
    """Return what ``kjo_limits list`` prints."""
    out = io.StringIO()
    call_command("kjo_limits", "list", stdout=out)
    return out.getvalue()


def test_how_many_wait_takes_as_many_queries_for_many_limits(django_assert_num_queries):
    with CaptureQueriesContext(connection) as of_one:
        control.overview()
    LimitControl.objects.bulk_create(
        LimitControl(name=f"job:gone{number}", rate="1/s") for number in range(20)
    )
    with django_assert_num_queries(len(of_one)):
        assert len(control.overview()) > 20


def test_a_limit_tells_the_rate_that_is_reached(everybody):
    set_limit("queue:emails", rate="100/m")
    set_limit("job:tests.limited", rate="60/h")
    whole = timezone.now().replace(second=0, microsecond=0)
    figures = {"completed_count": 70, "retried_count": 20, "failed_count": 10}
    for ago in (1, 2, 3, 50):
        minute = whole - timedelta(minutes=ago)
        MetricBucketFactory(minute=minute, queue="emails", handler="tests.limited", **figures)
        MetricBucketFactory(minute=minute, queue="emails", handler="other", **figures)
    # Of the queue over five minutes, of the job over the hour of its rate
    assert row_of(everybody, "queue:emails")[0]["reached"] == "120/m"
    row, page = row_of(everybody, "job:tests.limited")
    assert row["reached"] == "400/h"
    assert "reached 400/h" in page


def test_slots_are_not_counted_while_coordination_is_away(everybody, coordination_away):
    coordination_away("holders")
    response = everybody.get(url("limits"))
    assert [row["taken_count"] for row in response.context["rows"]] == [None]


def test_a_limit_is_changed_and_given_back(operator):
    client = operator(*EVERYTHING)
    address = url("limit", "job:tests.limited")
    assert 'name="rate"' in client.get(address).content.decode()
    said = texts(client.post(address, {"rate": "2/m", "concurrency": "1"}, follow=True))
    assert said == ["1 limit was changed."]
    row = LimitControl.objects.get()
    assert (row.rate, row.burst, row.concurrency, row.changed_by) == ("2/m", None, 1, "op-0")
    page = client.get(url("limits")).content.decode()
    assert "2/m" in page
    assert url("limit_clear", "job:tests.limited") in page
    client.post(url("limit_clear", "job:tests.limited"))
    assert not LimitControl.objects.exists()
    assert LogEntry.objects.count() == 2


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("job:tests.limited", {"rate": "fast"}),
        ("job:tests.limited", {"rate": "0/s"}),
        ("job:tests.limited", {"concurrency": "0"}),
        ("job:tests.limited", {"burst": "-1"}),
        ("job:tests.limited", {"concurrency": "99999999"}),
    ],
)
def test_what_means_nothing_is_refused(operator, name, given):
    response = operator(*EVERYTHING).post(url("limit", name), given)
    assert response.status_code == 200
    assert not LimitControl.objects.exists()
    assert not LogEntry.objects.exists()


def test_the_grammar_of_rates_is_explained_in_the_readers_language(operator, settings):
    settings.LANGUAGE_CODE = "de"
    page = operator(*EVERYTHING).post(url("limit", "job:tests.limited"), {"rate": "<b>5"})
    text = html.unescape(page.content.decode())
    assert "Erwartet wird eine Rate wie '5/s', '100/m' oder '10/30s'; '/' fehlt" in text
    assert "gegeben ist '&lt;b&gt;5'" in page.content.decode().replace("&#x27;", "'")


@pytest.mark.parametrize("name", ["job:nosuch", "queue:nosuch", "nosuch", "x:y"])
def test_a_limit_of_nothing_is_not_there(operator, name):
    assert operator(*EVERYTHING).get(url("limit", name)).status_code == 404


def test_a_queue_has_a_rate_and_no_slots_of_its_own(operator):
    client = operator(*EVERYTHING)
    page = client.get(url("limit", "queue:emails")).content.decode()
    assert 'name="concurrency"' not in page
    client.post(url("limit", "queue:emails"), {"rate": "1/s", "burst": "4"})
    (row,) = [row for row in control.overview() if row["name"] == "queue:emails"]
    assert (row["rate"], row["burst"]) == ("1/s", 4)


def test_a_job_that_waits_says_for_which_limit_and_is_not_run_past_it(everybody):
    row = JobFactory(handler="tests.limited", queue="emails", available_at=NEVER)
    HeldJob.objects.create(job_id=row.pk, limit="RATE:job:tests.limited:secret", queue="emails")
    for address in (url("jobs"), url("job", row.pk), f"/admin/kjo_django/job/{row.pk}/change/"):
        page = everybody.get(address).content.decode()
        assert "waits for rate 5/s of job:tests.limited" in page
        assert "8000" not in page
        assert "secret" not in page
    said = texts(everybody.post(url("job_run_now", row.pk), follow=True))
    assert "1 waits for a limit, which alone releases it; change the limit." in said
