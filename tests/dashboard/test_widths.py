"""Every screen in a browser, with names as long as they may be: nothing is wider than its place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.conf import settings as django_settings
from django.utils import timezone
from selenium.webdriver import Chrome

from kjo_django import Workflow, job, registry
from kjo_django.admin.dashboard import screens
from kjo_django.models import Job, Schedule
from kjo_django.operations import schedules
from kjo_django.personal_data.erasure import start_erasure
from kjo_django.personal_data.person import Person
from tests.browser import chromium
from tests.dashboard.conftest import url
from tests.factories import (
    DeadLetterFactory,
    JobFactory,
    JobFailureFactory,
    MetricBucketFactory,
    ProcessedEventFactory,
    WorkerFactory,
)
from tests.services.fixtures import require

pytestmark = pytest.mark.django_db(transaction=True)

HANDLER = "shop.fulfilment.reconcile_the_stock_of_the_second_warehouse_after_a_cancelled_order"
QUEUE = "orders-of-the-second-warehouse-that-are-reconciled-after-their-cancellation"
WORD = "0123456789abcdef" * 15
"""Without a place where a line may end, as tokens and hashes are."""
ERROR = f"The warehouse refused the reservation: {WORD}"
LOOKS = [(width, scheme) for width in (1280, 390) for scheme in ("light", "dark")]

TOO_WIDE = """
const found = [];
const root = document.documentElement;
if (root.scrollWidth > window.innerWidth) {
    found.push(`page: ${root.scrollWidth} in ${window.innerWidth} px`);
}
for (const each of document.querySelectorAll(".kjo-scroll")) {
    if (each.scrollWidth > each.clientWidth) {
        const name = each.getAttribute("aria-label");
        found.push(`table ${name.slice(0, 40)}: ${each.scrollWidth} in ${each.clientWidth} px`);
    }
}
return found;
"""


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    require(browser=True)
    with chromium.running() as browser:
        yield browser


@pytest.fixture
def long_names(settings: Any) -> Iterator[dict[str, tuple[Any, ...]]]:
    """Rows with long names; the arguments of the address of each screen that takes some."""
    settings.KJO = {**settings.KJO, "QUEUES": {**settings.KJO["QUEUES"], QUEUE: {}}}

    @job(name=HANDLER, queue=QUEUE, rate="5/s", concurrency=3)
    def reconcile(order: str) -> None:
        """Reconcile the stock of one order with what the second warehouse says that it has."""

    with Workflow(HANDLER) as workflow:
        first = workflow.add(reconcile.step(order=WORD))
        for _ in range(4):
            workflow.add(reconcile.step(order=WORD), after=[first])
    options = {"queue": QUEUE, "handler": HANDLER, "error": ERROR, "key": WORD[:200]}
    failed = JobFactory(
        **options, unique_id=WORD, failed=True, payload=f'{{"a":"{WORD}"}}'.encode()
    )
    failure = {"error": ERROR, "error_type": f"{HANDLER}.Refused", "worker": WORD}
    JobFailureFactory(job=failed, **failure, traceback=f"Traceback\n  {WORD * 3}")
    letter = DeadLetterFactory(
        job=failed,
        **{**options, "key": WORD.encode(), "error_type": f"{HANDLER}.Refused"},
        topic=QUEUE,
        release=WORD[:100],
        note=WORD,
        consumer_group=QUEUE,
        value=f'{{"a":"{WORD}"}}'.encode(),
    )
    running = [{"id": str(failed.pk), "handler": HANDLER, "started_at": timezone.now().isoformat()}]
    worker = WorkerFactory(
        name=f"{QUEUE}-{WORD[:100]}",
        hostname=QUEUE,
        queues=[QUEUE, *(f"{QUEUE}-{number}" for number in range(16))],
        partitions=[
            {
                "topic": QUEUE,
                "partition": 0,
                "group": "tests",
                "running": running,
                "rebalanced_at": timezone.now().isoformat(),
            }
        ],
        release=WORD[:100],
        last_error=ERROR,
        started_at=timezone.now(),
    )
    MetricBucketFactory(queue=QUEUE, handler=HANDLER, worker_id=worker.pk)
    ProcessedEventFactory(event_id=WORD, event_type=HANDLER, service_name=QUEUE)
    night = {"cron": "0 3 * * *", "timezone": "America/Argentina/ComodRivadavia"}
    schedules.add(HANDLER, job=HANDLER, queue=QUEUE, payload={"order": WORD}, **night)
    schedule = Schedule.objects.get()
    erasure = start_erasure(
        Person.of(fields=[("order", WORD)]), actor=WORD[:100], dry_run=True, reference=WORD[:100]
    )
    assert isinstance(erasure, Job)
    of_schedule, of_letter, of_job = (schedule.pk,), (letter.pk,), (failed.pk,)
    yield {
        "queue": (QUEUE,),
        "handler": (HANDLER,),
        "job": of_job,
        "job_change_queue": of_job,
        "job_change_expiry": of_job,
        "jobs_all": ("cancel",),
        "workflow": (workflow.handle.workflow_id,),
        "workflow_change_deadline": (workflow.handle.workflow_id,),
        "schedule": of_schedule,
        "schedule_edit": of_schedule,
        "schedule_delete": of_schedule,
        "limit": (f"job:{HANDLER}",),
        "letter": of_letter,
        "letter_edit": of_letter,
        "erasure": (erasure.pk,),
    }
    registry.unregister(HANDLER)


@pytest.fixture
def signed_in(chrome: Chrome, live_server: Any, everybody: Any) -> Chrome:
    """The browser of somebody who may do everything."""
    chrome.get(f"{live_server.url}/admin/login/")
    name = django_settings.SESSION_COOKIE_NAME
    chrome.add_cookie({"name": name, "value": everybody.cookies[name].value})
    return chrome


QUERIES = {
    "replay": "?fingerprint=0123456789abcdef",
    "discard": "?all=1",
    "schedule_preview": "?cron=0+3+*+*+*",
    "jobs_all": f"?q=queue:{QUEUE}",
}


def address_of(screen: str, arguments: dict[str, tuple[Any, ...]]) -> str:
    """Return the address of a screen with its query.

    :param arguments: those of the addresses that take some, by screen.
    """
    return url(screen, *arguments.get(screen, ())) + QUERIES.get(screen, "")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("language", ["en-us", "de", "es"])
def test_no_screen_is_wider_than_the_window_and_no_table_is_cut_off(
    signed_in: Chrome,
    live_server: Any,
    long_names: dict[str, tuple[Any, ...]],
    settings: Any,
    language: str,
) -> None:
    settings.LANGUAGE_CODE = language
    found = []
    for screen in screens():
        if screen.is_action:
            continue
        path = address_of(screen.name, long_names)
        signed_in.get(f"{live_server.url}{path}")
        assert signed_in.find_elements("id", "content-main"), path
        for width, scheme in LOOKS:
            chromium.look(signed_in, width=width, height=900, scheme=scheme)
            wide = signed_in.execute_script(TOO_WIDE)
            found += [f"{screen.name} {width} {scheme}: {each}" for each in wide]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("name", ["jobs", "dead_letters", "letters"])
def test_a_long_handler_leaves_the_error_a_third_of_the_table(
    signed_in: Chrome, live_server: Any, long_names: dict[str, tuple[Any, ...]], name: str
) -> None:
    chromium.look(signed_in, width=1280, height=900, scheme="light")
    signed_in.get(f"{live_server.url}{url(name)}?queue={QUEUE}")
    share = """
        const width = (selector) => document.querySelector(selector).getBoundingClientRect().width;
        return width(".kjo-table tbody .kjo-error") / width(".kjo-table");
    """
    assert signed_in.execute_script(share) > 0.25


def test_the_queues_of_a_worker_fill_few_lines(
    signed_in: Chrome, live_server: Any, long_names: dict[str, tuple[Any, ...]]
) -> None:
    WorkerFactory(name="many", queues=[f"queue-{number}" for number in range(30)])
    signed_in.get(f"{live_server.url}{url('consumers')}")
    row = signed_in.find_element("xpath", "//tr[th[starts-with(normalize-space(), 'many')]]")
    cell = row.find_element("css selector", ".kjo-queues")
    folded = cell.size["height"]
    assert folded < 120
    # And the others are a click away
    cell.find_element("css selector", "summary").click()
    assert "queue-29" in cell.text
    assert cell.size["height"] > folded
