"""Log records that know their job."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import logging.config
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async

from kjo_django import PermanentError, running_job
from kjo_django.contrib.logging import FIELDS, JobContextFilter
from kjo_django.engine.attempt import Abort
from kjo_django.models import Job
from kjo_django.worker import Worker
from tests.ledger import jobs as ledger
from tests.unit.deliveries import KJO, as_job, benched
from tests.unit.engine.bench import reconfigured
from tests.waiting import PATIENCE

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "logging.md"
SECRET = "ada@example.com"
TRACE = "0af7651916cd43dd8448eb211c80319c"
app = logging.getLogger("shop.payments")


class Lines(logging.Handler):
    """What was logged, seen through the filter."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.addFilter(JobContextFilter(**options))
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def of(self, text: str) -> list[dict]:
        return [
            {name: getattr(record, name) for name in FIELDS}
            for record in self.records
            if text in record.getMessage()
        ]

    def one(self, text: str) -> dict:
        (found,) = self.of(text)
        return found


@pytest.fixture
def lines():
    lines, root = Lines(), logging.getLogger()
    level = root.level
    root.addHandler(lines)
    root.setLevel(logging.DEBUG)
    yield lines
    root.removeHandler(lines)
    root.setLevel(level)


@pytest.fixture
def bench(settings, sqlite_file):
    with benched(settings) as bench:
        yield bench


def deep_below() -> None:
    app.info("charging")


@pytest.mark.parametrize("atomic", [True, False])
@pytest.mark.parametrize("is_async", [True, False])
def test_a_line_from_deep_below_a_handler_knows_its_job(bench, lines, is_async, atomic):
    def handler(who: str) -> None:
        deep_below()

    async def ahandler(who: str) -> None:
        await asyncio.sleep(0)
        deep_below()
        await sync_to_async(app.info)("in a thread")

    definition = as_job(ahandler if is_async else handler, "bench.pay", atomic=atomic)
    traced = definition.using(headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
    answer = traced.enqueue(who=SECRET)
    bench.run()
    told = lines.one("charging")
    assert isinstance(told.pop("offset"), int)
    assert told == {
        "job_id": str(answer.job_id),
        "handler": "bench.pay",
        "queue": "ledger",
        "attempt": 1,
        "message_id": str(answer.job_id),
        "topic": "ledger",
        "partition": 0,
        "worker": None,
        "trace_id": TRACE,
    }
    if is_async:
        assert lines.one("in a thread")["job_id"] == str(answer.job_id)
    assert running_job.running.get() is None


def test_jobs_at_once_on_one_event_loop_each_know_theirs(bench, lines):
    async def handler(job: str) -> None:
        await asyncio.sleep(0.01)
        app.info("of %s", job)

    definition = as_job(handler, atomic=False)
    ids = {name: str(definition.enqueue(job=name).job_id) for name in "abc"}
    bench.run()
    assert {name: lines.one(f"of {name}")["job_id"] for name in "abc"} == ids


def test_the_next_attempt_says_so(bench, lines):
    def handler(context) -> None:
        app.info("trying")
        if context.attempt == 1:
            raise RuntimeError("once")

    as_job(handler, takes_context=True).enqueue()
    bench.run_until_done()
    assert [line["attempt"] for line in lines.of("trying")] == [1, 2]


def test_a_batch_says_what_its_jobs_have_in_common(bench, lines):
    def index(batch) -> None:
        app.info("indexing")

    definition = as_job(index, batch=10)
    definition.enqueue_many([{"job": name} for name in "abc"])
    bench.run()
    told = lines.one("indexing")
    assert (told["handler"], told["queue"], told["attempt"]) == ("bench.index", "ledger", 1)
    assert (told["job_id"], told["offset"]) == (None, None)


def test_outside_a_job_the_fields_are_there_and_empty(lines):
    app.info("outside")
    assert lines.one("outside") == dict.fromkeys(FIELDS)


def test_what_does_not_apply_is_what_the_project_wants():
    lines = Lines(default="-")
    record = app.makeRecord("shop", logging.INFO, "x", 1, "outside", (), None)
    lines.handle(record)
    assert lines.one("outside") == dict.fromkeys(FIELDS, "-")


def test_what_a_record_says_itself_stays(bench, lines):
    def handler() -> None:
        app.info("of another", extra={"job_id": "another"})

    as_job(handler).enqueue()
    bench.run()
    told = lines.one("of another")
    assert (told["job_id"], told["handler"]) == ("another", "bench.handler")


def test_our_own_lines_about_a_job_say_which(bench, lines):
    """Written after its handler has ended, of a group of several."""

    def handler(job: str) -> None:
        raise PermanentError(f"{job} cannot be paid")

    definition = as_job(handler)
    ids = {name: str(definition.enqueue(job=name).job_id) for name in "ab"}
    bench.run()
    for name in "ab":
        told = lines.one(f"{name} cannot be paid")
        assert (told["job_id"], told["attempt"]) == (ids[name], 1)
        assert (told["handler"], told["topic"]) == ("bench.handler", "ledger")


def test_a_record_the_broker_refuses_says_whose_it_is(bench, lines, monkeypatch):
    def refuse(job, queue, **options):
        raise ValueError("no such header")

    monkeypatch.setattr("kjo_django.outbox.relay.storing.record_of", refuse)
    answer = ledger.write.enqueue(job="a")
    bench.poll()
    for text in ("cannot be made", "can never be published"):
        told = lines.one(text)
        assert (told["job_id"], told["handler"]) == (str(answer.job_id), "ledger.write")


def test_no_payload_is_logged(bench, lines):
    """At any level, of any of our loggers, whatever becomes of the job."""
    ledger.write.enqueue(job=SECRET, note=SECRET)
    ledger.write_attempt.enqueue(job=SECRET, fail_times=1)
    ledger.refuse.enqueue(job=SECRET)
    ledger.write.enqueue(job=SECRET)
    Job.objects.filter(handler="ledger.write").first()
    bench.publish(json.dumps({"who": SECRET}).encode(), kjo_id="m-1", kjo_type="ledger.write")
    bench.publish(f"no json: {SECRET}".encode(), kjo_id="m-2", kjo_type="ledger.write")
    bench.publish(b"{}", kjo_id="m-3", kjo_type="ledger.write", x_user=SECRET)
    bench.run_until_done()
    ours = [record for record in lines.records if record.name.startswith("kjo_django")]
    assert len([record for record in ours if "Dead-lettered" in record.getMessage()]) >= 3
    formatter = logging.Formatter("%(message)s")
    assert SECRET not in "".join(formatter.format(record) + repr(vars(record)) for record in ours)


def test_everything_a_workers_lanes_log_names_the_worker(settings, sqlite_file, lines):
    settings.KJO = KJO | {"POLL_INTERVAL": 0.1}
    ledger.refuse.enqueue(job="a")
    worker = Worker(["ledger"], max_messages=1)
    thread = threading.Thread(target=worker.run)
    thread.start()
    thread.join(PATIENCE)
    assert lines.one("Dead-lettered")["worker"] == worker.name


def test_a_trace_nobody_can_read_is_none(bench, lines):
    def handler() -> None:
        app.info("here")

    as_job(handler).using(headers={"traceparent": "forged\nline"}).enqueue()
    bench.run()
    assert lines.one("here")["trace_id"] is None


# --- A line for each start and end ----------------------------------------------------------------


def of_jobs(lines):
    return [record for record in lines.records if record.name == "kjo_django.jobs"]


@pytest.mark.parametrize("options", [{}, {"atomic": False}], ids=["atomic", "outside"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_each_start_and_end_and_failure_is_a_line(bench, lines, options, is_async):
    # Given
    def fails_once(name):
        if name == "a" and len(of_jobs(lines)) < 2:
            raise ValueError("not\nyet")

    async def afails_once(name):
        fails_once(name)

    handler = afails_once if is_async else fails_once
    definition = as_job(handler, "bench.pay", max_attempts=2, **options)
    job_id = str(definition.enqueue(name="a").job_id)
    # When
    bench.run_until_done()
    # Then
    found = of_jobs(lines)
    texts = [re.sub(r"\d+\.\d{3} s", "0.1 s", record.getMessage()) for record in found]
    which = f"bench.pay {job_id} (queue ledger, attempt"
    assert texts[0] == f"Started {which} 1)"
    failed = re.escape(f"Failed {which} 1) in 0.1 s, again at ")
    assert re.fullmatch(failed + r".* UTC: ValueError: not\\nyet", texts[1])
    assert texts[2:] == [f"Started {which} 2)", f"Completed {which} 2) in 0.1 s"]
    assert [record.levelname for record in found] == ["INFO", "WARNING", "INFO", "INFO"]
    assert all(record.job_id == job_id and record.queue == "ledger" for record in found)
    assert found[3].seconds >= 0 and not hasattr(found[2], "seconds")


def test_a_dead_letters_line_names_handler_queue_attempt_and_seconds(bench, lines):
    job_id = ledger.refuse.enqueue(job="a").job_id
    bench.run()
    (found,) = [r for r in lines.records if "Dead-lettered" in r.getMessage()]
    which = f"Dead-lettered ledger.refuse {job_id} (queue ledger, attempt 1) in "
    assert re.match(re.escape(which) + r"\d\.\d{3} s: ", found.getMessage())
    assert found.seconds >= 0


def test_a_failed_attempt_is_logged_without_any_setting(bench, lines):
    # Given a handler that fails once
    def fails_once():
        if len(of_jobs(lines)) == 1:
            raise ValueError("not\nyet")

    job_id = as_job(fails_once, "bench.pay", max_attempts=2).enqueue().job_id
    # When
    bench.run_until_done()
    # Then one line says what failed and when it runs again
    (found,) = [record for record in of_jobs(lines) if record.levelname == "WARNING"]
    failed = re.escape(f"Failed bench.pay {job_id} (queue ledger, attempt 1) in ")
    expected = failed + r"\d\.\d{3} s, again at [\d-]{10} [\d:]{8} UTC: ValueError: not\\nyet"
    assert re.fullmatch(expected, found.getMessage())
    assert found.job_id == str(job_id) and found.attempt == 1 and found.seconds >= 0


def test_a_logger_that_takes_no_information_logs_no_start_and_no_completion(bench, lines):
    logging.getLogger("kjo_django.jobs").setLevel(logging.WARNING)
    try:
        as_job(lambda: None).enqueue()
        bench.run()
        assert of_jobs(lines) == []
    finally:
        logging.getLogger("kjo_django.jobs").setLevel(logging.NOTSET)


def test_a_run_that_is_cancelled_has_a_line(bench, lines):
    # Given a job that is cancelled while it runs
    def cancelled(context):
        context.abort(Abort.CANCELLED)
        context.raise_if_aborted()

    job_id = as_job(cancelled, "bench.pay", takes_context=True).enqueue().job_id
    # When
    bench.run()
    # Then
    (found,) = [r for r in of_jobs(lines) if r.getMessage().startswith("Cancelled")]
    which = f"Cancelled bench.pay {job_id} (queue ledger, attempt 1) in "
    assert found.getMessage().startswith(which) and found.levelname == "INFO"


def test_a_middleware_of_earlier_releases_does_nothing(settings, bench, lines):
    made = reconfigured(settings, bench, MIDDLEWARE=["kjo_django.contrib.logging.log_jobs"])
    as_job(lambda: None, "bench.pay").enqueue()
    with pytest.warns(DeprecationWarning, match="take it out"):
        made.run()
    made.close()
    assert [r.getMessage().split()[0] for r in of_jobs(lines)] == ["Started", "Completed"]


# --- The page -------------------------------------------------------------------------------------


def test_the_pages_example_is_run(bench, monkeypatch):
    """The settings and the formatter, as they are printed."""
    setting, *_ = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict = {}
    exec(setting, names)
    config, out = names["LOGGING"], io.StringIO()
    config["handlers"]["console"]["stream"] = out
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        logging.config.dictConfig(config)

        def handler() -> None:
            deep_below()
            raise PermanentError("no")

        answer = as_job(handler).enqueue()
        app.info("outside")
        bench.run()
    finally:
        for handler_ in list(root.handlers):
            root.removeHandler(handler_)
        for handler_ in before:
            root.addHandler(handler_)
        root.setLevel(level)
    lines = [json.loads(line) for line in out.getvalue().splitlines()]
    by_text = {line["message"].partition(" ")[0]: line for line in lines}
    assert by_text["charging"]["job_id"] == str(answer.job_id)
    assert by_text["Dead-lettered"]["job_id"] == str(answer.job_id)
    assert set(by_text["outside"]) == {"time", "level", "logger", "message"}
    (example,) = re.findall(r"```json\n(.*?)\n```", PAGE.read_text(), re.DOTALL)
    printed = json.loads(example)
    assert set(printed) == {"time", "level", "logger", "message", *FIELDS}


def test_every_field_is_documented():
    table = "".join(re.findall(r"^\| `.*", PAGE.read_text(), re.MULTILINE))
    assert set(re.findall(r"`(\w+)`", table)) - {"traceparent"} - {"job_id"} == set(FIELDS) - {
        "job_id"
    }


def test_logging_is_configured_before_the_apps_are_there():
    """Django reads LOGGING before any model may be imported."""
    source = """
import django
from django.conf import settings
filters = {"job": {"()": "kjo_django.contrib.logging.JobContextFilter"}}
settings.configure(
    INSTALLED_APPS=["django.contrib.contenttypes", "django.contrib.auth", "kjo_django"],
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    LOGGING={
        "version": 1,
        "filters": filters,
        "formatters": {"f": {"format": "%(job_id)s %(message)s"}},
        "handlers": {"h": {"class": "logging.StreamHandler", "filters": ["job"], "formatter": "f"}},
        "root": {"handlers": ["h"]},
    },
)
django.setup()
import logging
logging.warning("ready")
"""
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "None ready\n")
