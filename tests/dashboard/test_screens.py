"""Every screen: who may see it, what it shows, what it costs, and that hostile data stays data."""

from __future__ import annotations

import json
import re
from datetime import timedelta

import pytest
from django.core.cache import cache
from django.db import connection
from django.test.utils import CaptureQueriesContext
from django.urls import reverse
from django.utils import timezone

import kjo_django
from kjo_django import registry
from kjo_django.admin.dashboard import overview, screens
from kjo_django.enqueue.job_status import progress_name
from kjo_django.exceptions import PublishError
from kjo_django.ids import uuid7
from kjo_django.models import Job, MetricRollup, Schedule
from kjo_django.operations.monitoring.health import ASK_AGAIN, SILENCE, Check
from kjo_django.runtime import get_coordination
from kjo_django.transports.memory import MemoryTransport
from tests.dashboard.conftest import texts, url
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    JobFailureFactory,
    MetricBucketFactory,
    ProcessedEventFactory,
    QueueControlFactory,
    WorkerFactory,
)

pytestmark = pytest.mark.django_db

EVIL = "<script>alert(1)</script>"
PAGES = ["overview", "queues", "jobs", "dead_letters", "letters", "consumers", "events", "status"]
PAGES += [
    "handlers",
    "schedules",
    "schedule_add",
    "schedule_preview",
    "job_add",
    "limits",
    "personal_data",
]
MOST_QUERIES = 12


@pytest.fixture
def rows():
    """Something to see on every screen."""
    job = JobFailureFactory(job__queue="emails").job
    letter = DeadLetterFactory(job=job)
    worker = WorkerFactory(queues=["emails"], partitions=[{"topic": "emails", "partition": 0}])
    ProcessedEventFactory()
    MetricBucketFactory(queue="emails", worker_id=worker.pk)
    QueueControlFactory(queue="emails")
    schedule = Schedule.objects.create(name="nightly", job="ledger.write", every=60)
    return {"job": job, "letter": letter, "worker": worker, "schedule": schedule}


def pages(rows):
    """Return the address of every page there is to look at."""
    return [
        *(url(name) for name in PAGES),
        url("queue", "emails"),
        url("queue", "emails") + "?range=7d",
        url("handler", "ledger.write"),
        url("job", rows["job"].pk),
        url("letter", rows["letter"].pk),
        url("letter_edit", rows["letter"].pk),
        url("schedule", rows["schedule"].pk),
        url("schedule_edit", rows["schedule"].pk),
        url("jobs_all", "requeue") + "?q=state:failed",
        url("replay") + "?all=1",
        url("discard") + "?all=1",
    ]


# --- Who ------------------------------------------------------------------------------------------


def test_nobody_sees_anything_without_logging_in(client, rows):
    for address in pages(rows):
        response = client.get(address)
        assert response.status_code == 302, address
        assert "/login/" in response["Location"]


def test_staff_without_the_permission_sees_nothing_and_no_link(operator, rows):
    client = operator("view_job", "view_deadletter")
    for address in pages(rows):
        assert client.get(address).status_code == 403, address
    assert url("overview") not in client.get(reverse("admin:index")).content.decode()


def test_the_index_leads_to_the_dashboard_alone_or_to_the_lists(operator):
    index, jobs = reverse("admin:index"), reverse("admin:kjo_django_job_changelist")
    page = operator("view_dashboard", "view_job").get(index).content.decode()
    assert url("overview") in page
    assert jobs not in page
    page = operator("view_job").get(index).content.decode()
    assert url("overview") not in page
    assert jobs in page


@pytest.mark.parametrize(
    ("screen", "row", "model"),
    [
        ("jobs", "", "job"),
        ("job", "job", "job"),
        ("dead_letters", "", "deadletter"),
        ("letter", "letter", "deadletter"),
        ("schedules", "", "schedule"),
        ("schedule", "schedule", "schedule"),
        ("queues", "", "queuecontrol"),
        ("limits", "", "limitcontrol"),
        ("consumers", "", "worker"),
        ("events", "", "processedevent"),
    ],
)
def test_a_screen_leads_to_the_plain_list_and_back(operator, rows, screen, row, model):
    arguments = [rows[row].pk] if row else []
    place = f"admin:kjo_django_{model}_{'change' if row else 'changelist'}"
    here, plain = url(screen, *arguments), reverse(place, args=arguments)
    seer = {"view_dashboard", *(each.permission for each in screens() if each.name == screen)}
    client = operator(*seer | {f"view_{model}"})
    assert f'<a href="{plain}">' in client.get(here).content.decode()
    page = client.get(plain).content.decode()
    assert f'<a href="{here}">Dashboard</a>' in page
    assert page.count('class="object-tools"') == 1  # two would lie upon one another
    assert not row or ">History</a>" in page
    # But nobody is led where they may not go
    if f"view_{model}" not in seer:
        assert plain not in operator(*seer).get(here).content.decode()
    client = operator(f"view_{model}")
    assert "Dashboard</a>" not in client.get(plain).content.decode()


@pytest.mark.parametrize("screen", screens(), ids=lambda screen: screen.name)
def test_each_screen_asks_for_its_own_permission(operator, rows, screen):
    if screen.permission == "view_dashboard":
        pytest.skip("asks for no other")
    client = operator("view_dashboard")
    keys = {
        "queue": "emails",
        "handler": "ledger.write",
        "action": "requeue",
        "job": rows["job"].pk,
    }
    keys |= {name: rows[name].pk for name in ("letter", "worker", "schedule")}
    keys |= {"workflow": uuid7(), "limit": "queue:emails"}
    arguments = [keys[name] for name in re.findall(r"<\w+:(\w+)>", screen.path)]
    ask = client.post if screen.is_action else client.get
    assert ask(url(screen.name, *arguments)).status_code == 403


def test_the_navigation_has_only_what_may_be_seen(operator):
    def titles(client):
        page = client.get(url("overview")).content.decode()
        bar = page[page.index('class="kjo-nav"') : page.index("</nav>", page.index("kjo-nav"))]
        return re.findall(r"<a [^>]*>([^<]+)</a>", bar)

    few = ["Overview", "Queues", "Handlers", "Consumers", "Status"]
    assert titles(operator("view_dashboard")) == few
    assert "Jobs" in titles(operator("view_dashboard", "view_job"))


def test_buttons_are_for_those_who_may_press_them(operator, rows):
    seer = operator("view_dashboard", "view_job", "view_deadletter")
    addresses = [url("queues"), url("consumers"), url("jobs"), url("letters")]
    addresses += [url("job", rows["job"].pk), url("letter", rows["letter"].pk)]
    addresses += [url("queue", "emails"), url("dead_letters")]
    for address in addresses:
        page = seer.get(address).content.decode()
        live = page[page.index('id="kjo-live"') :]
        assert "formaction" not in live, address
        assert "kjo-button" not in live, address
    assert "Limits and retry policy" not in seer.get(url("queue", "emails")).content.decode()


@pytest.mark.parametrize(
    ("permission", "page", "button"),
    [
        ("pause_queue", "queues", "queue_pause"),
        ("control_worker", "consumers", "worker_stop"),
        ("retry_job", "job", "job_requeue"),
        ("replay_dlq", "letter", "replay"),
        ("discard_dlq", "letter", "discard"),
    ],
)
def test_a_permission_brings_its_button(operator, rows, permission, page, button):
    keys = {"job": [rows["job"].pk], "letter": [rows["letter"].pk]}
    target = {
        "queue_pause": ["emails"],
        "worker_stop": [rows["worker"].pk],
        "job_requeue": keys["job"],
        "replay": [],
        "discard": [],
    }[button]
    client = operator("view_dashboard", "view_job", "view_deadletter", permission)
    shown = client.get(url(page, *keys.get(page, []))).content.decode()
    assert url(button, *target) in shown


# --- What -----------------------------------------------------------------------------------------


def test_every_page_renders_without_inline_scripts_or_styles(everybody, rows):
    """DASHBOARD.md §4."""
    for address in pages(rows):
        response = everybody.get(address)
        assert response.status_code == 200, address
        page = response.content.decode()
        assert not re.search(r"<script(?![^>]*\ssrc=)", page), address
        assert not re.search(r"\son\w+=|\sstyle=|<style|javascript:", page), address


def test_no_page_costs_more_than_twelve_queries(everybody, rows):
    """Issue's budget: DASHBOARD.md §1."""
    for _ in range(20):
        job = JobFailureFactory(job__queue="emails").job
        DeadLetterFactory(job=job, fingerprint=f"f{job.pk.hex[:20]}")
        WorkerFactory()
    for address in pages(rows):
        cache.clear()
        with CaptureQueriesContext(
            connection,
        ) as queries:
            assert everybody.get(address).status_code == 200
        asked = [query["sql"] for query in queries if "SAVEPOINT" not in query["sql"]]
        assert len(asked) <= MOST_QUERIES, (address, asked)


def test_many_who_look_cost_one_look(everybody, rows):
    everybody.get(url("overview"))
    with CaptureQueriesContext(connection) as queries:
        everybody.get(url("overview"))
    assert len(queries) <= 2  # the session and the user


def test_a_cache_that_is_away_costs_the_sharing_only(everybody, rows, monkeypatch):
    def broken(*arguments, **options):
        raise ConnectionError("no cache")

    for name in ("get", "set", "delete"):
        monkeypatch.setattr(type(cache._connections["default"]), name, broken)
    for address in pages(rows):
        assert everybody.get(address).status_code == 200, address


def test_the_overview_tells_what_goes_on(everybody):
    JobFactory.create_batch(3)
    JobFactory(queued=True)
    JobFactory(available_at=timezone.now() + timedelta(hours=1))
    DeadLetterFactory.create_batch(2)
    worker = WorkerFactory(in_flight_count=7, concurrency=3)
    WorkerFactory(stale=True, in_flight_count=100)
    MetricBucketFactory(completed_count=40, failed_count=4, worker_id=worker.pk)
    page = everybody.get(url("overview")).content.decode()
    tiles = tiles_of(page)
    assert (tiles["Pending"], tiles["Scheduled"]) == ("3", "1")
    assert tiles["Queued"] == "1"
    assert "In flight" not in tiles
    assert tiles["At workers"] == "7"
    assert "run or are next, 3 lanes" in page
    assert tiles["Dead letters"] == "2"
    assert tiles["Failed, last hour"] == "4"
    assert tiles["Workers"] == "1"
    assert "completed <b>40</b>" in page
    # In groups, those that need somebody first
    groups = re.findall(r'kjo-group"><h2>([^<]+)</h2>(.*?)</section>', page, re.DOTALL)
    assert [title for title, _group in groups] == ["Problems", "Work", "Waiting", "Delivery"]
    assert {len(tiles_of(group)) for _title, group in groups} == {3}
    assert next(iter(tiles_of(groups[0][1]))) == "Dead letters"


def verdict(client) -> str:
    """Return the sentence at the top of the first screen, with what is beside it."""
    page = client.get(url("overview")).content.decode()
    section = page[page.index("kjo-verdict") : page.index("</section>", page.index("kjo-verdict"))]
    return " ".join(re.sub(r"<[^>]+>", " ", section[section.index(">") + 1 :]).split())


def test_the_first_screen_says_that_a_check_fails_and_what_to_do(everybody):
    said = verdict(everybody)
    assert re.match(r"\d checks? fails?\. See all checks", said)
    assert "Start manage.py kjo_consume." in said


@pytest.fixture
def healthy(monkeypatch):
    checks = [Check("workers", True, "one is alive")]
    monkeypatch.setattr(overview.health, "health", lambda *given: checks)
    WorkerFactory()
    return checks


def test_the_first_screen_says_that_all_is_well(everybody, healthy):
    assert verdict(everybody) == "All is well: 1 worker, 0 jobs a minute; no job waits."
    cache.clear()
    JobFactory(available_at=timezone.now() - timedelta(minutes=20, seconds=5))
    assert verdict(everybody).endswith("the oldest job has waited for 20 min.")


UNANSWERED = [
    Check("lag", None, "not checked: the time was up"),
    Check("lag", False, "timed out: no answer within 0.2 s", ASK_AGAIN),
    Check("lag", False, "default: no answer within 0.2 s", SILENCE),
]


@pytest.mark.parametrize("check", UNANSWERED, ids=["not made", "timed out", "server silent"])
def test_a_check_without_an_answer_is_grey_and_below_what_is_known(everybody, healthy, check):
    healthy.append(check)
    assert verdict(everybody) == ("What is known is well: 1 worker, 0 jobs a minute; no job waits.")
    page = everybody.get(url("overview")).content.decode()
    assert "kjo-verdict kjo-is-unknown" in page
    assert "kjo-verdict kjo-is-bad" not in page
    line = '<p class="kjo-quiet kjo-unknown">Unknown, for want of an answer in time: lag. <a href='
    assert page.index("</dl>") < page.index(line)


@pytest.mark.parametrize("check", UNANSWERED, ids=["not made", "timed out", "server silent"])
def test_what_fails_warns_or_waits_is_said_before_what_is_unknown(everybody, healthy, check):
    """The dead letters went unsaid, for want of the lag."""
    DeadLetterFactory.create_batch(2)
    healthy.append(check)
    assert verdict(everybody).startswith("Work goes on, and 2 dead letters need a decision")
    cache.clear()
    healthy.append(Check("relay", False, "200 due jobs wait", "Start kjo_produce."))
    said = verdict(everybody)
    assert said.startswith("1 check fails. See all checks relay : 200 due jobs wait")
    assert "lag" not in said


def test_the_status_does_not_say_that_every_check_passes_when_one_is_unknown(everybody, healthy):
    healthy += UNANSWERED
    page = everybody.get(url("status")).content.decode()
    assert "<h2>No check fails, 3 are unknown</h2>" in page
    assert page.count(">unknown</span>") == 3
    assert "fails</span>" not in page
    cache.clear()
    healthy.append(Check("relay", False, "200 due jobs wait", "Start kjo_produce."))
    assert "<h2>1 check fails</h2>" in everybody.get(url("status")).content.decode()


def lags_told(client, query: str = "") -> tuple[str, str]:
    """Return the lag of the tile and that beside the chart."""
    cache.clear()
    page = client.get(url("overview") + query).content.decode()
    tile = re.search(r"Consumer lag</a></dt><dd>([^<]*)</dd>", page)[1]
    chart = page[page.index('id="kjo-chart-lag"') :]
    return tile, re.search(r"messages <b>([^<]*)</b>", chart)[1]


@pytest.mark.parametrize("query", ["?range=5m", "?range=1h", "?range=24h", "?range=7d"])
def test_the_tile_and_the_chart_tell_the_same_lag(everybody, monkeypatch, query):
    monkeypatch.setattr(registry, "consumed_queue_names", lambda: ["emails", "stock"])
    now = timezone.now().replace(second=0, microsecond=0)

    def measured(queue: str, lag: int, ago: int) -> None:
        MetricBucketFactory(
            minute=now - timedelta(minutes=ago), queue=queue, handler="", completed_count=0, lag=lag
        )

    # Given a lag that was measured twenty minutes ago
    measured("emails", 4152, ago=20)
    assert lags_told(everybody, query) == ("unknown", "unknown")
    # When the lag of one of two queues is known
    measured("stock", 1, ago=1)
    assert lags_told(everybody, query) == ("unknown", "unknown")
    # When that of both is
    measured("emails", 4153, ago=0)
    assert lags_told(everybody, query) == ("4,154", "4,154")


def test_a_lag_that_is_unknown_is_grey(everybody):
    page = everybody.get(url("overview")).content.decode()
    assert re.search(r'kjo-is-unknown"><dt><a[^>]*>Consumer lag</a></dt><dd>unknown</dd>', page)
    page = everybody.get(url("queues")).content.decode()
    assert "unknown" not in page


def test_the_lag_of_a_queue_whose_broker_is_away_is_unknown(everybody, monkeypatch):
    def offsets(self, topics, group):
        raise PublishError("the broker is away")

    monkeypatch.setattr(MemoryTransport, "offsets", offsets)
    page = everybody.get(url("queues")).content.decode()
    cell = '" data-label="Lag"><span class="kjo-quiet">unknown</span>'
    assert f'title="the broker is away{cell}' in page


def test_the_first_screen_says_that_dead_letters_wait_or_that_a_check_warns(everybody, healthy):
    healthy.append(Check("scaling", True, "idle", "Start fewer."))
    assert verdict(everybody).startswith("Work goes on, with 1 warning. See all checks scaling")
    cache.clear()
    DeadLetterFactory.create_batch(2)
    said = verdict(everybody)
    assert said.startswith("Work goes on, and 2 dead letters need a decision")
    assert "See them by error" in said


@pytest.mark.parametrize(
    ("name", "query", "said", "step"),
    [
        ("jobs", "", "No job has been enqueued yet", "kjo_consume"),
        ("jobs", "?q=state:failed", "No job fits this search", "Show all jobs"),
        ("dead_letters", "", "No open dead letters", "replay or discard"),
        ("dead_letters", "?queue=x", "No open dead letter fits", "Show all dead letters"),
        ("letters", "", "No dead letter is open", "replay or discard"),
        ("letters", "?queue=x", "No open dead letter fits", "Show all dead letters"),
        ("workflows", "", "No workflow has been started", "chain() or group()"),
        ("workflows", "?q=x", "No workflow fits", "Show all workflows"),
        ("schedules", "", "There is no schedule yet", "or add one here"),
        ("schedules", "?q=x", "No schedule fits", "Show all schedules"),
        ("consumers", "", "No worker runs", "kjo_consume"),
        ("events", "", "No event has taken effect yet", "takes effect once"),
        ("events", "?id=x", "No event of this id", "Show the newest"),
    ],
)
def test_an_empty_screen_says_the_next_step_and_offers_no_action(
    everybody, name, query, said, step
):
    page = everybody.get(url(name) + query).content.decode()
    live = page[page.index('id="kjo-live"') :]
    assert said in live
    assert step in live
    assert "formaction" not in live
    assert "kjo-button" not in live


def test_the_queue_page_tells_its_policy_and_handlers(everybody, rows):
    QueueControlFactory(queue="default", max_attempts=9)
    page = everybody.get(url("queue", "default")).content.decode()
    assert 'name="max_attempts" value="9"' in page
    # How it is doing comes first, then what can be changed
    assert page.index('id="kjo-live"') < page.index('name="max_attempts"')
    assert everybody.get(url("queue", "nosuch")).status_code == 404


def test_the_list_of_handlers_tells_their_last_hour_and_the_busiest_is_the_first(everybody):
    minute = timezone.now().replace(second=0, microsecond=0)
    for handler, run_seconds in (("ledger.write", 1800.0), ("gone.long_ago", 7200.0)):
        MetricBucketFactory(
            queue="emails",
            handler=handler,
            minute=minute,
            completed_count=1234,
            failed_count=7,
            run_seconds_sum=run_seconds,
        )
    page = everybody.get(url("handlers")).content.decode()
    rows = re.findall(r'<tr id="kjo-handler-.*?</tr>', page, re.DOTALL)
    assert ["gone.long_ago" in rows[0], "ledger.write" in rows[1]] == [True, True]
    assert "1,234" in rows[1] and ">7<" in rows[1] and ">0.50<" in rows[1]
    # And those of the code that have not run are there, too
    assert url("handler", "ledger.no_op") in page


def test_the_page_of_a_handler_tells_its_options_its_charts_and_its_errors(everybody, rows):
    DeadLetterFactory(handler="ledger.write", error_type="shop.Refused", error="<b>no</b>")
    page = everybody.get(url("handler", "ledger.write")).content.decode()
    assert "Add the job&#x27;s one entry." in page  # the docstring of its function
    assert "shop.Refused" in page and "&lt;b&gt;no&lt;/b&gt;" in page
    assert "q=handler%3Aledger.write+state%3Afailed" in page
    assert "Jobs per minute" in page and "Run time" in page and ">Lag<" not in page
    assert everybody.get(url("handler", "no.such")).status_code == 404


def test_the_searches_of_a_handler_find_its_jobs_whatever_its_name(everybody):
    minute = timezone.now().replace(second=0, microsecond=0)
    name = 'a "b" c'
    MetricBucketFactory(queue="emails", handler=name, minute=minute, completed_count=1)
    job = JobFactory(handler=name, failed=True)
    page = everybody.get(url("handler", name)).content.decode()
    (address,) = re.findall(r'href="([^"]*state%3Afailed)"', page)
    assert str(job.pk) in everybody.get(address).content.decode()


def test_the_page_of_a_handler_shows_what_its_reader_may_see(operator, rows):
    DeadLetterFactory(handler="ledger.write", error_type="shop.Refused", error="card 4711")
    page = operator("view_dashboard").get(url("handler", "ledger.write")).content.decode()
    assert "shop.Refused" not in page and "state%3Afailed" not in page
    seer = operator("view_dashboard", "view_deadletter")
    page = seer.get(url("handler", "ledger.write")).content.decode()
    assert "shop.Refused" in page and "4711" not in page


def tiles_of(page: str) -> dict[str, str]:
    """Return the values of the tiles by their labels."""
    return dict(re.findall(r"<dt>(?:<a[^>]*>)?([^<]+)(?:</a>)?</dt>\s*<dd>([^<]*)</dd>", page))


def test_the_queue_page_begins_with_its_counts(everybody, operator):
    # Given jobs of two queues
    JobFactory.create_batch(3, queue="emails", queued=True)
    JobFactory(queue="emails", available_at=timezone.now() + timedelta(hours=1))
    JobFactory(queue="default", queued=True)
    DeadLetterFactory.create_batch(2, queue="emails")
    worker = WorkerFactory(queues=["emails"])
    MetricBucketFactory(queue="emails", completed_count=40, worker_id=worker.pk)
    # When
    page = everybody.get(url("queue", "emails")).content.decode()
    # Then those of this one are counted, and lead to them
    tiles = tiles_of(page)
    assert (tiles["Queued"], tiles["Scheduled"], tiles["Pending"]) == ("3", "1", "0")
    assert (tiles["Dead letters"], tiles["Workers"], tiles["Completed"]) == ("2", "1", "40")
    assert f'{url("jobs")}?q=state%3Aqueued+queue%3Aemails"' in page
    assert f'{url("dead_letters")}?queue=emails"' in page
    # And come before charts, settings and the form
    places = [page.index(text) for text in (">Queued<", "kjo-chart", ">Topic<", "max_attempts")]
    assert places == sorted(places)
    # And lead nobody where they may not go
    live = operator("view_dashboard").get(url("queue", "emails")).content.decode()
    live = live[live.index('id="kjo-live"') :]
    assert url("jobs") not in live
    assert url("dead_letters") not in live


def test_the_queue_page_shows_a_change_at_once(everybody):
    everybody.get(url("queue", "emails"))
    everybody.post(url("queue", "emails"), {"max_attempts": "9"})
    assert "last changed by root" in everybody.get(url("queue", "emails")).content.decode()


OF_LOGS = re.compile(r"kafka|partition|offset|rebalanc|consumer|committed|topic", re.IGNORECASE)


def words_of_logs(client, addresses: list[str]) -> set[tuple[str, str]]:
    """Return the words of logs such as Kafka that pages show, each with its page."""
    found = set()
    for address in addresses:
        page = client.get(address).content.decode()
        text = re.sub(r"<[^>]+>", " ", page[page.index('id="content-main"') :])
        found |= {(address, word.lower()) for word in OF_LOGS.findall(text)}
    return found


def test_no_screen_has_words_of_kafka_where_no_queue_is_on_a_log(everybody, rows, settings):
    # Given a job and a dead letter with the place of their records
    Job.objects.filter(pk=rows["job"].pk).update(
        topic="emails", partition=0, offset=7, queued_at=timezone.now()
    )
    # The checks are shown as ``kjo_health`` has them
    addresses = [address for address in pages(rows) if address != url("status")]
    known = {word for _address, word in words_of_logs(everybody, addresses)}
    assert {"topic", "partition", "offset", "consumer"} <= known
    # When the database is the transport
    cache.clear()
    settings.KJO = {"QUEUES": {"default": {}, "emails": {}}}
    # Then
    assert words_of_logs(everybody, addresses) == set()
    page = everybody.get(url("overview")).content.decode()
    assert ">Workers</a></li>" in page
    assert "Outbox" not in tiles_of(page)


def test_a_job_tells_its_way(everybody):
    failure = JobFailureFactory(error="it broke here", worker="host-9")
    page = everybody.get(url("job", failure.job.pk)).content.decode()
    timeline = page[page.index("kjo-timeline") :]
    order = ["Enqueued", "Attempt 1 failed: ValueError", "it broke here", "Failed"]
    places = [timeline.index(text) for text in order]
    assert places == sorted(places)
    assert "Traceback (most recent call last)" in page
    assert everybody.get(url("job", "019a0000-0000-7000-8000-000000000000")).status_code == 404


def test_the_list_shows_each_job_as_the_call_that_it_is(everybody, operator):
    payload = {"order_id": 17, "api_token": "xyzzy", "text": "long " * 40}
    for long, value in ((False, payload), (True, {"order_id": 18, "text": "x" * 5000})):
        JobFactory(handler="shop.send", key="k1", payload=json.dumps(value).encode(), queued=long)
    page = everybody.get(url("jobs")).content.decode()
    # Shortened and redacted
    assert "(order_id=17, api_token=&quot;[redacted]&quot;, text=&quot;long long" in page
    assert "xyzzy" not in page
    assert "long " * 20 not in page
    # A payload that is too long for a list is not read
    assert "(…)" in page
    # And nobody sees any of it without the permission
    blind = operator("view_dashboard", "view_job").get(url("jobs")).content.decode()
    assert "shop.send" in blind
    assert "order_id" not in blind


def test_the_list_shows_how_old_each_job_is_and_how_long_its_latest_attempt_took(everybody):
    now = timezone.now()
    done = {"started_at": now - timedelta(seconds=62), "finished_at": now - timedelta(seconds=50)}
    JobFactory(state="completed", created_at=now - timedelta(hours=3), attempts=1, **done)
    failure = JobFailureFactory(
        job__failed=True,
        job__attempts=1,
        job__created_at=now - timedelta(days=2, hours=13),
        started_at=now - timedelta(seconds=300),
        failed_at=now - timedelta(seconds=60),
    )
    JobFactory(created_at=now - timedelta(minutes=20))
    page = everybody.get(url("jobs")).content.decode()

    def cells(column):
        found = re.findall(rf'data-label="{column}">(?:<time[^>]*>)?([^<]*)<', page)
        return sorted(found)

    assert cells("Age") == ["2.5 d", "20 min", "3 h"]
    assert cells("Took") == ["12 s", "4 min", "–"]
    # The page of a job says the same, and when each attempt began
    one = everybody.get(url("job", failure.job.pk)).content.decode()
    began = timezone.localtime(failure.started_at).strftime("%H:%M:%S")
    assert "the last attempt took 4 min" in one
    assert f"started {began} · took 4 min" in one


@pytest.mark.parametrize(
    ("worker", "said"), [("", "took 12 s<"), ("berlin", "took 12 s · berlin<")]
)
def test_a_jobs_page_names_the_worker_that_completed_it_where_that_is_kept(everybody, worker, said):
    now = timezone.now()
    job = JobFactory(
        completed=True, started_at=now - timedelta(seconds=12), finished_at=now, worker=worker
    )
    page = everybody.get(url("job", job.pk)).content.decode()
    assert said in page[page.index("kjo-timeline") :]


@pytest.fixture
def send():
    @kjo_django.job(name="shop.send")
    def send(*, order_id: int, password: str) -> None:
        """Send the customer
        the confirmation.

        More of it.
        """

    yield send
    registry.unregister("shop.send")


def test_a_jobs_page_is_headed_by_what_it_does(everybody, operator, send):
    job = JobFactory(handler="shop.send", payload=b'{"order_id": 17, "password": "xyzzy"}')
    page = everybody.get(url("job", job.pk)).content.decode()
    heading = re.search(r"<h1>([^<]+)</h1>", page)[1]
    assert heading == "shop.send(order_id=17, password=&quot;[redacted]&quot;)"
    assert "Send the customer the confirmation." in page
    assert "More of it" not in page
    blind = operator("view_dashboard", "view_job").get(url("job", job.pk)).content.decode()
    assert "<h1>shop.send</h1>" in blind


def test_progress_at_which_a_job_stopped_is_not_shown_as_moving(everybody):
    job = JobFactory(failed=True)
    report = {progress_name(str(job.pk)): '[99, "row 396 of 400"]'}
    get_coordination().set_marks(report, timedelta(minutes=1))
    page = everybody.get(url("job", job.pk)).content.decode()
    assert "<progress" not in page
    text = " ".join(page.split())
    assert "Its last report of progress, before it stopped running: 99 % row 396 of 400" in text


def test_the_log_of_a_failed_attempt_is_for_those_who_may_see_payloads(operator):
    failure = JobFailureFactory(log="INFO shop: <b>charging</b>")
    address = url("job", failure.job.pk)
    page = operator("view_dashboard", "view_job", "view_payload").get(address).content.decode()
    assert "INFO shop: &lt;b&gt;charging&lt;/b&gt;" in page
    assert "charging" not in operator("view_dashboard", "view_job").get(address).content.decode()


def test_a_dead_letter_shows_the_log_of_the_attempt_with_which_its_job_died(operator):
    job, now = JobFactory(failed=True), timezone.now()
    letter = DeadLetterFactory(job=job, attempts=2, failed_at=now)
    JobFailureFactory(job=job, attempt=1, failed_at=now - timedelta(minutes=1), log="the first")
    JobFailureFactory(job=job, attempt=2, failed_at=now, log="INFO shop: <b>the last</b>")
    address = url("letter", letter.pk)
    page = operator("view_dashboard", "view_deadletter", "view_payload").get(address)
    assert "&lt;b&gt;the last&lt;/b&gt;" in page.content.decode()
    assert "the first" not in page.content.decode()
    page = operator("view_dashboard", "view_deadletter").get(address)
    assert "the last" not in page.content.decode()


def test_payloads_are_for_those_with_the_permission(operator, rows):
    Job.objects.filter(pk=rows["job"].pk).update(payload=b'{"word": "xyzzy"}')
    addresses = [url("job", rows["job"].pk), url("letter", rows["letter"].pk)]
    seer = operator("view_dashboard", "view_job", "view_deadletter")
    for address in addresses:
        page = seer.get(address).content.decode()
        assert "xyzzy" not in page
        assert "Traceback (most" not in page
        assert "&quot;a&quot;: 1" not in page
    full = operator("view_dashboard", "view_job", "view_deadletter", "view_payload")
    assert "xyzzy" in full.get(addresses[0]).content.decode()
    assert "&quot;a&quot;: 1" in full.get(addresses[1]).content.decode()


def test_what_may_quote_a_payload_is_for_those_with_the_permission(operator):
    # Given
    quoted = ("ada@example.org", "ada-1", "no ada")
    job = JobFactory(failed=True, key=quoted[0], unique_id=quoted[1], error=quoted[2])
    JobFailureFactory(job=job, error=quoted[2], error_type="shop.NotFound")
    letter = DeadLetterFactory(job=job, error=quoted[2], error_type="shop.NotFound")
    WorkerFactory(last_error=quoted[2])
    seen = ("view_dashboard", "view_job", "view_deadletter")
    blind, seeing = operator(*seen), operator(*seen, "view_payload")
    # When, then
    addresses = [url(name) for name in ("jobs", "dead_letters", "letters", "consumers")]
    for address in (*addresses, url("job", job.pk), url("letter", letter.pk)):
        page = blind.get(address).content.decode()
        assert not [text for text in quoted if text in page], address
        assert "no ada" in seeing.get(address).content.decode(), address
        # And errors are told apart all the same
        assert "shop.NotFound" in page or address == url("consumers")
    # Nor is it found by guessing
    for search in ("error:ada", "unique:ada-1", "key:ada*"):
        page = blind.get(url("jobs"), {"q": search}).content.decode()
        assert "takes the permission to see payloads" in page
    assert str(job.pk) not in blind.get(url("jobs"), {"q": "ada-1"}).content.decode()
    assert str(job.pk) in seeing.get(url("jobs"), {"q": "ada-1"}).content.decode()
    for name in ("dead_letters", "letters"):
        assert blind.get(url(name), {"error": "ada"}).status_code == 403
        assert 'name="error"' not in blind.get(url(name)).content.decode()


def test_secrets_are_shown_to_nobody(everybody):
    job = JobFactory(
        payload=b'{"card": {"api_token": "xyzzy"}, "plain": "shown"}', headers={"x-token": "xyzzy"}
    )
    letter = DeadLetterFactory(value=b'{"password": "xyzzy", "plain": "shown"}')
    for address in (url("job", job.pk), url("letter", letter.pk), url("letter_edit", letter.pk)):
        page = everybody.get(address).content.decode()
        assert "xyzzy" not in page
        assert "[redacted]" in page
        assert "shown" in page


def test_events_are_looked_up_by_their_id(everybody):
    ProcessedEventFactory(event_id="event-17", event_type="user.created")
    ProcessedEventFactory(event_id="event-18", event_type="user.gone")
    MetricRollup.objects.create(
        minutes=MetricRollup.QUARTER,
        minute=timezone.now() - timedelta(hours=1),
        queue="emails",
        worker_id=uuid7(),
        duplicate_count=3,
        skipped_count=2,
    )
    assert list(tiles_of(everybody.get(url("events")).content.decode()).values()) == ["3", "2"]
    page = everybody.get(url("events") + "?id=event-17").content.decode()
    assert "user.created" in page
    assert "user.gone" not in page
    assert "No event of this id" in everybody.get(url("events") + "?id=nope").content.decode()


def test_each_event_says_what_it_is_and_leads_to_its_job(everybody, operator):
    # Given the marker of a job's second generation, and that of an event of another service
    payload = b'{"order_id": 17, "password": "xyzzy"}'
    job = JobFactory(handler="shop.send", payload=payload, completed=True, generation=2)
    ProcessedEventFactory(event_id=job.message_id, event_type="shop.send")
    data = {"name": "Ada", "password": "xyzzy"}
    ProcessedEventFactory(event_id="e-17", event_type="user.created", event_data=data)
    ProcessedEventFactory(event_id=str(uuid7()), event_type="user.gone")
    # When
    page = everybody.get(url("events")).content.decode()
    # Then
    link = f'<a href="{url("job", job.pk)}">shop.send</a><code class="kjo-call">'
    assert f"{link}(order_id=17, password=&quot;[redacted]&quot;)</code>" in page
    assert "user.created<code" in page
    assert "name=&quot;Ada&quot;" in page
    assert "xyzzy" not in page
    assert re.findall(r'data-label="Kind">(\w+)<', page) == ["event", "event", "job"]
    # And nobody sees or reaches what they may not
    blind = operator("view_dashboard", "view_processedevent").get(url("events")).content.decode()
    assert "shop.send" in blind
    assert not [text for text in ("order_id", "Ada", url("job", job.pk)) if text in blind]


def test_a_search_that_cannot_be_understood_says_why(everybody):
    page = everybody.get(url("jobs") + "?q=stat:failed").content.decode()
    assert "stat" in page
    assert 'role="alert"' in page


def test_a_search_that_cannot_be_understood_says_why_in_german(everybody, settings):
    settings.LANGUAGE_CODE = "de"
    page = everybody.get(url("jobs") + "?q=state:faild").content.decode()
    assert "ist kein Zustand; meinten Sie failed?" in page


def test_the_search_suggests_what_there_is_to_those_who_may_ask_for_it(operator):
    def suggested(*codenames):
        page = operator("view_dashboard", "view_job", *codenames).get(url("jobs")).content.decode()
        page = page[page.index("<datalist") : page.index("</datalist>")]
        return set(re.findall(r'<option value="([^"]*)">', page))

    for_all = {"state:failed", "queue:emails", "handler:ledger.write", "since:1h"}
    for_some = {"key:", "args.note:"}
    assert for_all <= suggested()
    assert not for_some & suggested()
    assert for_all | for_some <= suggested("view_payload")
    assert "args.context:" not in suggested("view_payload")


def test_a_suggestion_is_a_search(everybody):
    page = everybody.get(url("jobs")).content.decode()
    for word in re.findall(r'<option value="(state:[^"]*|queue:[^"]*|since:[^"]*)">', page):
        assert 'role="alert"' not in everybody.get(url("jobs"), {"q": word}).content.decode(), word


def test_jobs_are_found_by_what_is_known_of_them(everybody):
    wanted = JobFactory(handler="shop.send", key="42", failed=True)
    other = JobFactory(handler="shop.bill")
    page = everybody.get(url("jobs") + "?q=handler:shop.send+key:42+state:failed").content.decode()
    assert str(wanted.pk) in page
    assert str(other.pk) not in page


@pytest.mark.parametrize(
    ("state", "offered", "not_offered"),
    [
        ("failed", {"requeue"}, {"run_now", "cancel", "change_queue"}),
        ("completed", {"requeue"}, {"run_now", "cancel", "change_queue"}),
        ("scheduled", {"run_now", "cancel", "change_queue", "requeue"}, set()),
    ],
)
def test_a_list_offers_what_can_be_done_to_jobs_of_its_state(
    everybody, state, offered, not_offered
):
    rows = {
        "failed": {"failed": True},
        "completed": {"completed": True},
        "scheduled": {"available_at": timezone.now() + timedelta(hours=1)},
    }
    for options in rows.values():
        JobFactory(**options)

    def actions(query: str) -> tuple[set[str], set[str]]:
        page = everybody.get(url("jobs"), {"q": query}).content.decode()
        selected = set(re.findall(r'formaction="[^"]*/jobs/chosen/(\w+)/"', page))
        return selected, set(re.findall(r'href="[^"]*/jobs/all/(\w+)/', page))

    # When one state is looked at, each button can do something
    for found in actions(f"state:{state}"):
        assert offered <= found
        assert not found & not_offered
    # When all are, each that can do something to any
    assert all(offered | not_offered <= found for found in actions(""))


def test_pages_of_jobs_follow_each_other(everybody):
    made = [str(job.pk) for job in JobFactory.create_batch(120)]
    seen, address = [], url("jobs")
    while address:
        page = everybody.get(address).content.decode()
        seen += re.findall(r'name="job" value="([^"]+)"', page)
        older = re.search(r'<a href="([^"]+)" rel="next"', page)
        address = older and url("jobs") + older[1].replace("&amp;", "&")
    assert seen == sorted(made, reverse=True)


def test_a_page_that_does_not_exist_is_no_error(everybody):
    for query in ("?after=x", "?before=%00", "?after=" + "9" * 500, "?q=" + "x" * 9000):
        assert everybody.get(url("jobs") + query).status_code == 200
    assert everybody.get(url("letters") + "?after=x").status_code == 302


def test_dead_letters_are_grouped_by_error(everybody):
    DeadLetterFactory.create_batch(3, fingerprint="a" * 16, error_type="ValueError")
    DeadLetterFactory(fingerprint="b" * 16, error_type="KeyError")
    DeadLetterFactory(fingerprint="c" * 16, discarded=True)
    page = everybody.get(url("dead_letters")).content.decode()
    found = re.findall(r'fingerprint=(\w)\w+">([^<]+)</a><br>', page)
    assert found == [("a", "ValueError"), ("b", "KeyError")]


def test_of_each_error_it_is_said_whether_it_goes_on(everybody):
    # Given
    for name, minutes in (("old", 11), ("goes", 9)):
        failed_at = timezone.now() - timedelta(minutes=minutes)
        DeadLetterFactory(fingerprint=name, handler="ledger.write", failed_at=failed_at)
    for address in (url("dead_letters"), url("handler", "ledger.write")):
        # When
        page = everybody.get(address).content.decode()
        # Then
        rows = [row for row in page.split("<tr") if "fingerprint=" in row]
        told = {re.search(r"fingerprint=(\w+)", row)[1]: ">goes on<" in row for row in rows}
        assert told == {"old": False, "goes": True}


# --- Hostile data ---------------------------------------------------------------------------------

HOSTILE = (EVIL, '"><img src=x onerror=alert(1)>', "\u202egnp.exe", "a\u0000b", "x" * 1_000_000)


@pytest.mark.parametrize("text", HOSTILE, ids=["script", "attribute", "bidi", "nul", "megabyte"])
def test_hostile_data_is_inert(everybody, text):
    short = text[:100]
    row = short.replace("\0", "")  # no database keeps it in text
    payload = json.dumps({"text": text}).encode()
    job = JobFactory(
        queue="emails", handler=row, unique_id=row, key=row, error=row, payload=payload, failed=True
    )
    JobFailureFactory(job=job, error=row, error_type=row, traceback=row, worker=row)
    letter = DeadLetterFactory(
        job=job,
        value=payload,
        error=row,
        error_type=row,
        handler=row,
        queue=row,
        topic=row,
        message_id=row,
        note=row,
        release=row,
    )
    worker = WorkerFactory(name=row, hostname=row, last_error=row, queues=[row], release=row)
    MetricBucketFactory(queue=row, handler=row, worker_id=worker.pk)
    ProcessedEventFactory(event_id=row, event_type=row, service_name=row)
    QueueControlFactory(queue=row, changed_by=row, is_paused=True)
    schedule = Schedule.objects.create(
        name=row[:50],
        job=row,
        payload={"text": text.replace("\0", "")},
        every=60,
        timezone="No/Zone",
        changed_by=row,
        problem=row,
        overridden=[row],
        next_at=timezone.now(),
    )
    rows = {"job": job, "letter": letter, "worker": worker, "schedule": schedule}
    queue_page = [url("queue", row)] if "/" not in row else []
    for address in [*pages(rows), *queue_page, url("jobs") + "?q=x", url("letters") + "?error=e"]:
        response = everybody.get(address)
        assert response.status_code == 200, address
        page = response.content.decode()
        assert "<script>alert" not in page
        assert "<img" not in page
        assert "\u202e" not in page
        assert "\0" not in page
        assert len(page) < 400_000, address


@pytest.mark.parametrize("name", ["dead_letters", "letters", "replay", "discard"])
@pytest.mark.parametrize("letter", ["x", "", "1" * 5000, "%00"])
def test_a_dead_letter_that_cannot_be_is_not_found(everybody, rows, name, letter):
    assert everybody.get(url(name), {"letter": letter}).status_code == 404


def test_payloads_are_searched_by_those_who_may_see_them(operator):
    """What is found, and how many, would tell what is in there."""
    JobFactory(handler="tests.found", payload=b'{"pin": 7}')
    blind = operator("view_dashboard", "view_job", "retry_job")
    for address in (url("jobs"), url("jobs_all", "requeue")):
        page = blind.get(address, {"q": "args.pin:7"}, follow=True).content.decode()
        assert "takes the permission to see payloads" in page
    assert "tests.found" not in blind.get(url("jobs"), {"q": "args.pin:7"}).content.decode()
    blind.post(url("jobs_all", "requeue"), {"q": "args.pin:7"})
    assert Job.objects.get().generation == 1
    sees = operator("view_dashboard", "view_job", "view_payload")
    assert "tests.found" in sees.get(url("jobs"), {"q": "args.pin:7"}).content.decode()


def test_hostile_questions_are_answered(everybody, rows):
    for query in (EVIL, "%00", "\u202e", "q" * 5000, "' OR 1=1 --", "args.a.b:%ff", "*"):
        for name in ("jobs", "dead_letters", "letters", "events", "overview"):
            given = {"q": query, "error": query, "queue": query, "id": query, "range": query}
            response = everybody.get(url(name), given)
            assert response.status_code == 200, (name, query)
            assert "<script>alert" not in response.content.decode()


# --- Live -----------------------------------------------------------------------------------------


def fragment(client, address, **headers):
    return client.get(address, headers={"X-Kjo-Fragment": "1", **headers})


def test_the_live_part_is_answered_alone(everybody, rows):
    for name in ("overview", "queues", "jobs", "dead_letters", "consumers", "events", "status"):
        page = everybody.get(url(name)).content.decode()
        part = fragment(everybody, url(name))
        assert part.status_code == 200
        assert "<html" not in part.content.decode()
        assert "csrfmiddlewaretoken" not in part.content.decode()
        assert "no-store" in part["Cache-Control"]
        assert '<div id="kjo-live">' in page


def test_nothing_new_costs_no_content(everybody, rows):
    address = url("letters")
    first = fragment(everybody, address)
    again = fragment(everybody, address, if_none_match=first["ETag"])
    assert (again.status_code, again.content) == (304, b"")
    DeadLetterFactory()
    changed = fragment(everybody, address, if_none_match=first["ETag"])
    assert changed.status_code == 200
    assert changed["ETag"] != first["ETag"]


def test_a_fragment_needs_the_permission_too(operator, client, rows):
    assert fragment(client, url("overview")).status_code == 302
    assert fragment(operator(), url("overview")).status_code == 403


def test_registered_handlers_do_not_leak_between_tests():
    assert "tests.add" not in {handler.name for handler in registry.handlers()}


def test_messages_are_shown_once(everybody, rows):
    response = everybody.post(url("queue_pause", "emails"), follow=True)
    assert texts(response) == ["Paused: emails"]
    assert texts(everybody.get(url("queues"))) == []
