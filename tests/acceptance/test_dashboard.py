"""The dashboard in a real browser, against a live worker, under the strictest content policy."""

from __future__ import annotations

import json
import os
import re
import socket
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import User
from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from kjo_django import Workflow, group
from kjo_django.limits.control import set_limit
from kjo_django.operations import schedules
from kjo_django.personal_data.erasure import start_erasure
from kjo_django.personal_data.person import Person
from tests.acceptance.conftest import REAL
from tests.acceptance.engine import ALIAS, Engine
from tests.acceptance.program import Program
from tests.browser import axe, chromium
from tests.ledger import jobs
from tests.ledger.workflows import imported
from tests.services.fixtures import require
from tests.services.ports import free_port

pytestmark = pytest.mark.timeout(180)

COLOURS = ("color-contrast", "link-in-text-block")
LAYOUT = ("scrollable-region-focusable", "empty-table-header", "label", "link-name")
LOOKS = (("light", 1280, ()), ("light", 390, COLOURS + LAYOUT), ("dark", 1280, COLOURS))
"""How each screen is looked at, and the rules that can find something new then; none: all."""

EVERY = pytest.mark.parametrize("name", ["embedded", REAL])


@pytest.fixture
def engine(name: str, request: pytest.FixtureRequest) -> Engine:
    return request.getfixturevalue(name)


@pytest.fixture(scope="module")
def chrome() -> Iterator[Chrome]:
    require(browser=True)
    with chromium.running() as browser:
        yield browser


class Site:
    """The admin of an engine, open in a browser, for somebody who may do everything."""

    def __init__(self, engine: Engine, chrome: Chrome, server: Program, address: str) -> None:
        self.engine = engine
        self.chrome = chrome
        self.server = server
        self.address = address
        self.log_in()

    @classmethod
    def start(cls, engine: Engine, chrome: Chrome) -> Site:
        """Start the site, with an operator."""
        port = free_port()
        server = engine.manage("runserver", "--noreload", "--insecure", f"127.0.0.1:{port}")
        User.objects.db_manager(ALIAS).create_superuser("root", password="root")
        engine.wait_until(lambda: is_open(port), "The site never came up")
        return cls(engine, chrome, server, f"http://127.0.0.1:{port}")

    @classmethod
    def beside(cls, site: Site, chrome: Chrome) -> Site:
        """The same site in another browser."""
        return cls(site.engine, chrome, site.server, site.address)

    def log_in(self) -> None:
        self.chrome.delete_all_cookies()
        self.chrome.get(f"{self.address}/admin/login/")
        self.find("[name=username]").send_keys("root")
        self.find("[name=password]").send_keys("root")
        self.click("[type=submit]")
        self.wait_for("Site administration")

    def open(self, path: str = "") -> None:
        self.chrome.get(f"{self.address}/admin/kjo_django/dashboard/{path}")

    def refresh_every(self, seconds: int) -> None:
        Select(self.find("#kjo-refresh")).select_by_value(str(seconds))

    def find(self, selector: str):
        return self.chrome.find_element(By.CSS_SELECTOR, selector)

    def find_all(self, selector: str):
        return self.chrome.find_elements(By.CSS_SELECTOR, selector)

    def click(self, selector: str) -> None:
        self.find(selector).click()

    def fill(self, name: str, value: str) -> None:
        """Type a value into a field of the form, in place of what is there."""
        field = self.find(f"form[data-kjo-preview] [name={name}]")
        field.clear()
        field.send_keys(value)

    def press(self, text: str) -> None:
        """Press a button or a link by its words, which a refresh may just be replacing."""
        words = f"//*[self::button or self::a][normalize-space()='{text}']"

        def pressed() -> bool:
            try:
                self.chrome.find_element(By.XPATH, words).click()
            except (NoSuchElementException, StaleElementReferenceException):
                return False
            return True

        self.engine.wait_until(pressed, f"No button says {text!r}")

    def text(self, selector: str = "body") -> str:
        try:
            return self.find(selector).text
        except (NoSuchElementException, StaleElementReferenceException):
            return ""

    def texts(self, selector: str) -> list[str]:
        """The texts of all elements; none while a refresh replaces them."""
        try:
            return [element.text for element in self.find_all(selector)]
        except StaleElementReferenceException:
            return []

    def tile(self, label: str) -> str:
        for tile in self.find_all(".kjo-tile"):
            try:
                name, value = tile.text.split("\n")[:2]
            except (StaleElementReferenceException, ValueError):
                continue
            if name == label:
                return value
        return ""

    def wait_for(self, text: str, selector: str = "body") -> None:
        self.engine.wait_until(
            lambda: text in self.text(selector), f"{text!r} was never shown: {self.text(selector)}"
        )


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def site(engine: Engine, chrome: Chrome) -> Iterator[Site]:
    site = Site.start(engine, chrome)
    chromium.complaints(chrome)
    yield site
    assert chromium.complaints(chrome) == []


@pytest.fixture
def worker(engine: Engine) -> Program:
    return engine.ready_worker()


@pytest.mark.medium("real")
@EVERY
def test_a_job_is_watched_as_it_goes_through_and_the_chart_moves(
    engine: Engine, site: Site, worker: Program, tmp_path: Path
) -> None:
    # Given the first screen, refreshed every two seconds
    site.open()
    site.refresh_every(2)
    assert site.tile("Workers") == "1"
    bars = len(site.find_all(".kjo-plot path.kjo-c-completed[d^=M]"))
    assert bars == 0
    # When a job is enqueued that waits for us
    path = tmp_path / "go"
    jobs.wait_outside.using(id="watched").enqueue(job="watched", path=str(path))
    # Then it is seen in flight, without anybody reloading the page
    engine.wait_until(lambda: site.tile("At workers") == "1", "It was never seen in flight")
    site.open("jobs/")
    site.wait_for("watched")
    site.press("ledger.wait_outside")
    site.wait_for("Processing")
    site.refresh_every(2)
    # And when it ends, the page says so
    Path(f"{path}.go").touch()
    site.wait_for("Completed")
    # And the chart has moved
    site.open()
    engine.wait_until(
        lambda: site.find_all("#kjo-chart-throughput path.kjo-c-completed[d^=M]"),
        "The chart stood still",
    )
    # And the time under the pointer is pointed out in every chart, with its values
    site.refresh_every(0)
    spots = site.find_all("#kjo-chart-throughput .kjo-spot")
    ActionChains(site.chrome).move_to_element(spots[-3]).perform()
    cursors = {line.get_attribute("x1") for line in site.find_all(".kjo-has-cursor .kjo-cursor")}
    assert len(cursors) == 1
    assert len(site.find_all(".kjo-has-cursor")) == len(site.find_all(".kjo-chart")) == 4
    shown = site.find_all(".kjo-cursor-time")
    minute = site.find("#kjo-chart-throughput tbody tr:nth-child(3) th")
    assert {each.text for each in shown} == {minute.get_attribute("textContent")}
    ActionChains(site.chrome).move_to_element(site.find("h1")).perform()
    assert not site.find_all(".kjo-has-cursor")


@EVERY
def test_a_queue_is_paused_in_the_browser_and_the_worker_obeys(
    engine: Engine, site: Site, worker: Program
) -> None:
    # When the queue is paused
    site.open("queues/")
    site.press("Pause")
    site.wait_for("Paused: ledger")
    engine.wait_for_moment(2.0)  # the promise: obeyed within two seconds
    # Then nothing enqueued is run
    ids = [jobs.write.enqueue(job=f"job-{n}").job_id for n in range(3)]
    engine.wait_for_moment(1.5)
    assert not engine.entries.exists()
    # And once it is resumed, everything is
    site.open("queues/")
    site.press("Resume")
    engine.wait_until(lambda: engine.entries.count() == 3, "Nothing ran after the resume")
    assert engine.jobs.filter(pk__in=ids, state="completed").count() == 3


@EVERY
def test_consumers_tell_who_has_what_and_what_runs(
    engine: Engine, site: Site, worker: Program, tmp_path: Path
) -> None:
    """DASHBOARD.md §1, 6."""
    # Given a worker with a job that waits for us
    path = tmp_path / "go"
    jobs.wait_outside.using(id="watched").enqueue(job="watched", path=str(path))
    # When an operator looks, and goes on looking
    site.open("consumers/")
    site.refresh_every(2)

    def column(name: str) -> list[str]:
        """Return the texts of a column of the group's table; cells over several rows are gone."""
        found = site.find_all(".kjo-panel:last-of-type thead th")
        heads = [head.get_attribute("textContent") for head in found]  # CSS shows capitals
        place = len(heads) - heads.index(name)
        rows = site.find_all(".kjo-panel:last-of-type tbody tr")
        cells = [row.find_elements(By.CSS_SELECTOR, "td") for row in rows]
        return [each[-place].text for each in cells]

    # Then the worker is seen at it, with what it was given and when
    site.wait_for("ledger.wait_outside", "tr[id^=kjo-worker]")
    site.refresh_every(0)
    has_log = bool(engine.servers.kafka)
    if has_log:
        assert "–" not in column("Last rebalance")
    assert "nobody" not in column("Worker" if has_log else "Workers")
    # And once it is done, the screen says so, and that nothing is left
    site.refresh_every(2)
    Path(f"{path}.go").touch()
    engine.wait_until(
        lambda: "ledger.wait_outside" not in site.text("tr[id^=kjo-worker]"), "It runs for ever"
    )
    site.refresh_every(0)
    engine.wait_for_moment(5.5)  # what the transport answered is shared that long
    site.open("consumers/")
    assert set(column("Lag")) == {"0"}
    if has_log:
        ends = [end for end in column("End") if end not in ("0", "–")]
        assert ends
        assert set(ends) <= set(column("Committed"))


@pytest.mark.promise("replay")
@pytest.mark.medium("embedded")
@EVERY
def test_a_dead_letter_is_edited_and_replayed_and_completes(
    engine: Engine, site: Site, worker: Program
) -> None:
    # Given a job that died of its payload
    jobs.fail_unless.using(id="sick").enqueue(job="sick", mended=False)
    engine.wait_until(engine.dead_letters.exists, "It never died")
    # When an operator finds it, repairs the payload and replays it
    site.open("dead-letters/")
    site.wait_for("ledger.fail_unless")
    site.find("tbody th a").click()
    site.find("tbody th a").click()
    site.press("Edit and replay…")
    area = site.find("#kjo-value")
    payload = json.loads(area.get_attribute("value"))
    area.clear()
    area.send_keys(json.dumps({**payload, "mended": True}))
    site.press("Replay with this payload")
    # Then its page shows how it completes
    site.wait_for("Replayed with the payload you gave", ".messagelist")
    site.wait_for("Completed", "#kjo-live")
    assert engine.jobs.get(unique_id="sick").state == "completed"
    assert engine.dead_letters.get().state == "replayed"


@EVERY
def test_a_held_step_is_replayed_and_its_workflow_carries_on_to_its_end(
    engine: Engine, site: Site, worker: Program
) -> None:
    # Given a workflow that is held by a step that died
    workflow = imported(fails=True, on_failure="hold")
    site.open("workflows/")
    site.refresh_every(2)
    site.wait_for("Held", "tbody")
    site.find("tbody th a").click()
    site.wait_for("1 Failed")
    assert "1 Waiting" in site.text("#kjo-live")
    # When an operator puts right what it died of, and replays its dead letter
    engine.entries.create(job="mended")
    site.click(".kjo-strip a")
    site.press("Replay…")
    site.press("Replay")
    site.wait_for("was replayed")
    # Then the workflow's page shows how it carries on to its end
    site.open(f"workflows/{workflow.pk}/")
    site.wait_for("7 of 7")
    site.wait_for("Completed", "h2")
    assert not site.find_all(".kjo-edge-waiting")
    written = sorted(engine.entries.values_list("job", flat=True))
    parts = [f"part-{part}" for part in range(5)]
    assert written == ["fetched", "mended", *parts, "reported"]
    # And a box leads to the jobs of its steps
    site.click("a.kjo-box[href*=stage]")
    site.wait_for("ledger.load_part", "tbody")
    assert len(site.find_all("input[name=job]")) == 5


@pytest.mark.parametrize("name", ["embedded"])
def test_a_refresh_keeps_what_the_operator_chose_and_where_they_are(
    engine: Engine, site: Site
) -> None:
    for n in range(3):
        jobs.write.using(id=f"job-{n}").enqueue(job=f"job-{n}")
    site.open("jobs/")
    site.refresh_every(2)
    box = site.find_all("input[name=job]")[1]
    box.click()
    jobs.write.using(id="later").enqueue(job="later")
    site.wait_for("later")
    assert [each.is_selected() for each in site.find_all("input[name=job]")].count(True) == 1
    assert box.is_selected()
    # And ticking all ticks all
    site.click("[data-kjo-all=job]")
    assert all(each.is_selected() for each in site.find_all("input[name=job]"))
    # And the keyboard leads to the search
    site.find("body").send_keys("/")
    assert site.chrome.switch_to.active_element.get_attribute("id") == "kjo-search"
    # Whose suggestions go on from what is typed
    site.chrome.switch_to.active_element.send_keys("job-1 ")
    words = [each.get_attribute("value") for each in site.find_all("#kjo-words option")]
    assert "job-1 handler:ledger.write" in words
    site.chrome.switch_to.active_element.send_keys(Keys.ENTER)
    engine.wait_until(lambda: len(site.find_all("input[name=job]")) == 1, "The search found others")
    # And to a row, which it selects and opens, to a list of the keys, and to another screen
    site.find("body").send_keys("jx")
    assert site.find("input[name=job]").is_selected()
    site.chrome.switch_to.active_element.send_keys("?")
    assert site.find("#kjo-keys").is_displayed()
    site.chrome.switch_to.active_element.send_keys(Keys.ESCAPE)
    site.find("tbody th a").send_keys(Keys.ENTER)
    site.wait_for("Queued", "#kjo-live h2")
    site.find("body").send_keys("Q")
    site.wait_for("Last hour".upper(), "thead")


@pytest.mark.parametrize("name", ["embedded"])
def test_a_hidden_page_asks_for_nothing_and_off_is_off(engine: Engine, site: Site) -> None:
    def asked() -> int:
        return len(re.findall(r'"GET /admin/kjo_django/dashboard/ ', site.server.log))

    site.open()
    site.refresh_every(2)
    before = asked()
    engine.wait_until(lambda: asked() > before, "It never asked")
    site.refresh_every(0)
    engine.wait_for_moment(0.5)
    before = asked()
    engine.wait_for_moment(3)
    assert asked() == before
    # And a page that is hidden waits until it is seen
    site.refresh_every(2)
    site.chrome.execute_script(
        "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
        "document.dispatchEvent(new Event('visibilitychange'));"
    )
    engine.wait_for_moment(0.5)
    before = asked()
    engine.wait_for_moment(3)
    assert asked() == before


@pytest.mark.parametrize("name", ["embedded"])
def test_the_choice_of_the_refresh_is_remembered(engine: Engine, site: Site) -> None:
    site.open()
    site.refresh_every(15)
    site.open("queues/")
    assert Select(site.find("#kjo-refresh")).first_selected_option.get_attribute("value") == "15"


@pytest.mark.parametrize("name", ["embedded"])
def test_who_is_signed_out_is_told(engine: Engine, site: Site) -> None:
    site.open()
    site.refresh_every(2)
    site.chrome.delete_all_cookies()
    site.wait_for("You are signed out", "#kjo-refresh-state")


@pytest.mark.medium("on-a-desk")
@pytest.mark.parametrize("name", ["embedded"])
@pytest.mark.parametrize(
    "looks",
    [pytest.param(LOOKS[:1], id="on-a-desk"), pytest.param(LOOKS[1:], id="narrow-and-dark")],
)
def test_axe_finds_nothing_on_any_screen(
    engine: Engine, site: Site, worker: Program, tmp_path: Path, looks: tuple[Any, ...]
) -> None:
    # Given something to see on every screen
    workflow = imported(fails=True, on_failure="hold")
    jobs.always_fails.using(id="failed").enqueue(job="failed")
    jobs.wait_outside.using(id="runs").enqueue(job="runs", path=str(tmp_path / "go"))
    jobs.write.using(delay=3600).enqueue(job="later")
    set_limit("job:ledger.write", rate="1/h", actor="root")
    schedule = schedules.add("nightly", job="ledger.no_op", cron="0 3 * * *")
    engine.wait_until(lambda: engine.dead_letters.count() == 2, "They never died")
    letter = engine.dead_letters.first()
    job = engine.jobs.get(unique_id="failed")
    # Other tests' handlers may have declared the queue that is the default
    engine.configure(OPERATIONS_QUEUE="ledger")
    counted = start_erasure(Person.of(fields=[("job", "failed")]), actor="root", dry_run=True)
    engine.wait_until(lambda: engine.jobs.get(pk=counted.pk).result, "It was never counted")
    screens = ("", "queues/", "queues/ledger/", "jobs/", f"jobs/{job.pk}/", "jobs/all/cancel/")
    screens += ("workflows/", f"workflows/{workflow.pk}/", "limits/", "limits/job:ledger.write/")
    screens += ("schedules/", "schedules/add/", f"schedules/{schedule.pk}/", "dead-letters/")
    screens += (f"schedules/{schedule.pk}/edit/", "dead-letters/all/", f"dead-letters/{letter.pk}/")
    screens += (f"dead-letters/{letter.pk}/edit/", "dead-letters/replay/?all=1", "consumers/")
    screens += ("events/", "status/", "personal-data/", f"personal-data/{counted.pk}/")
    # When each is looked at
    found = []
    for path in screens:
        site.open(path)
        assert site.find_all("#content-main"), path
        for scheme, width, rules in looks:
            chromium.look(site.chrome, width=width, height=900, scheme=scheme)
            broken = axe.violations(site.chrome, *rules)
            found += [f"{path} {scheme} {width}: {each}" for each in broken]
    chromium.look(site.chrome, width=1280, height=900, scheme="light")
    # Then nothing is found
    assert not found, "\n".join(found)
    # But for what is wrong
    site.chrome.execute_script("document.body.append(document.createElement('button'))")
    assert any("button-name" in each for each in axe.violations(site.chrome))


@pytest.mark.medium
@pytest.mark.parametrize("name", ["embedded"])
def test_every_page_works_without_javascript(engine: Engine, worker: Program) -> None:
    jobs.refuse.using(id="dead").enqueue(job="dead")
    engine.wait_until(engine.dead_letters.exists, "It never died")
    engine.variables["KJO_TEST_HEALTH_SECONDS"] = "0"
    with chromium.running(javascript=False) as chrome:
        site = Site.start(engine, chrome)
        site.open()
        assert site.tile("Dead letters") == "1"
        assert not site.find("#kjo-refresh-box").is_displayed()
        # What is known comes first: there was no time for the checks
        assert "1 dead letter needs a decision" in site.text(".kjo-verdict.kjo-is-warning")
        assert "Unknown, for want of an answer in time: settings" in site.text(".kjo-unknown")
        site.press("See all checks")
        site.wait_for("Status", "h1")
        site.press("Queues")
        site.press("Pause")
        site.wait_for("Paused: ledger")
        site.press("Dead letters")
        site.press("Replay…")
        site.press("Replay")
        site.wait_for("1 dead letter was replayed.")


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", [REAL])
def test_two_browsers_watch_four_workers_for_ten_minutes(engine: Engine, site: Site) -> None:
    """No refresh costs more at the end than at the beginning, and the console stays silent."""
    workers = [engine.worker() for _ in range(4)]
    screens = ("", "queues/", "jobs/", "dead-letters/", "consumers/", "status/")
    costs: dict[str, list[int]] = {}
    ends_at = time.monotonic() + float(os.environ.get("KJO_TEST_SOAK_SECONDS", "600"))
    with chromium.running(scheme="dark") as second:
        other = Site.beside(site, second)
        count = 0
        while time.monotonic() < ends_at:  # timed loop: for as long as is asked for
            site.open(screens[count % len(screens)])
            other.open(screens[(count + 3) % len(screens)])
            site.refresh_every(2)
            other.refresh_every(2)
            jobs.write.enqueue_many([{"job": f"{count}-{n}"} for n in range(200)])
            jobs.refuse.enqueue(job=f"refused-{count}")
            engine.wait_for_moment(8)
            count += 1
        assert chromium.complaints(second) == []
    for cost, path in re.findall(
        r"(\d+) queries for (/admin/kjo_django/dashboard/\S*)", site.server.log
    ):
        costs.setdefault(path, []).append(int(cost))
    assert len(costs) == len(screens)
    for path, counts in costs.items():
        third = len(counts) // 3
        assert third, path
        assert max(counts) <= 12, (path, max(counts))
        assert max(counts[-third:]) <= max(counts[:third]) + 1, (path, counts)
    engine.settle()
    assert engine.entries.count() == 200 * count
    assert all(worker.stop() == 0 for worker in workers)


def a_graph_of(steps: int) -> Any:
    """Enqueue a workflow in which every step waits for one or two before it."""
    with Workflow("graph") as workflow:
        before = [workflow.add(jobs.write.step(job="0"))]
        for number in range(1, steps):
            after = {number * 7919 % 193 % number, max(0, number - 1 - number % 13)}
            step = jobs.write.step(job=str(number))
            before.append(workflow.add(step, after=[before[n] for n in after]))
    return workflow.handle.workflow_id


def siblings(count: int) -> Any:
    """Enqueue a workflow of so many alike."""
    members = group(jobs.write.step(job=str(number)) for number in range(count))
    return members.then(jobs.write_count.step(job="callback")).enqueue().workflow_id


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["embedded", REAL])
@pytest.mark.parametrize(
    ("make", "count"), [(a_graph_of, 3), (a_graph_of, 200), (siblings, 100_000)]
)
def test_a_graph_is_there_within_three_tenths_of_a_second(
    engine: Engine, site: Site, make: Any, count: int
) -> None:
    """From the click to the end of the load, as the browser measures it; for a quiet machine."""
    path, took = f"workflows/{make(count)}/", []
    duration = "return performance.getEntriesByType('navigation')[0].duration"
    for _ in range(8):
        site.open(path)
        site.engine.wait_until(lambda: site.chrome.execute_script(duration), "It never loaded")
        took.append(site.chrome.execute_script(duration))
    print(f"{count:,} steps: {', '.join(f'{each:.0f}' for each in took)} ms")
    assert statistics.median(took[1:]) < 300


@EVERY
def test_a_schedule_is_added_runs_now_and_is_paused(
    engine: Engine, site: Site, worker: Program
) -> None:
    # Given the form of a new schedule
    site.open("schedules/")
    site.press("Add a schedule")
    values = {"name": "nightly", "job": "ledger.write", "cron": "61 3 * * *"}
    for name, value in values.items():
        site.fill(name, value)
    # When its expression is wrong, the form names the place of the fault, without being sent
    site.wait_for("minute", "#kjo-preview")
    # When it is mended, the next five runs are shown by the clocks of the zone
    site.fill("cron", "30 3 * * *")
    site.fill("timezone", "Asia/Kolkata")
    engine.wait_until(
        lambda: ["03:30:00 IST" in run for run in site.texts("#kjo-preview li")] == [True] * 5,
        "The next five runs were never shown",
    )
    site.fill("payload", '{"job": "scheduled"}')
    site.press("Add")
    site.wait_for("Added: nightly")
    # Then it runs now
    site.press("Run now")
    site.wait_for("1 job was enqueued.")
    engine.wait_until(lambda: engine.ledger()["scheduled"] == 1, "It never ran")
    site.wait_for("Completed")
    assert len(site.find_all(".kjo-next li")) == 5
    # And is paused
    site.press("Pause")
    site.wait_for("1 schedule was paused.")
    site.wait_for("Paused")
    site.press("Resume")
    site.wait_for("1 schedule was resumed.")
