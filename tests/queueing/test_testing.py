"""``kjo_django.testing``: assertions and drains inside a TestCase, as a project's tests use it."""

from __future__ import annotations

import threading
import unittest
import uuid
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import pytest
from django.conf import settings
from django.db import connection, transaction
from django.test import TestCase, override_settings

from kjo_django import PermanentError, Queue, Retry, job, registry, signals
from kjo_django.exceptions import JobFailedError, MessageError, PayloadError
from kjo_django.messages.msgpack import MSGPACK
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.testing import (
    all_enqueued,
    assert_enqueued,
    drain,
    perform,
    refute_enqueued,
    run_job,
)
from tests.docs.test_docs import FENCE
from tests.ledger import jobs as ledger
from tests.ledger.models import Entry
from tests.unit.deliveries import kafka_at

UNREACHABLE_KAFKA = kafka_at("127.0.0.1:1")


class InATestCase(TestCase):
    """Django's own TestCase: a transaction that never commits, on one connection."""

    def test_assertions_see_what_was_enqueued(self) -> None:
        id = uuid.uuid4()
        ledger.write.enqueue(job="a", note="first")
        ledger.write.using(id="b", key="k").enqueue(job=str(id))
        # By job, name, queue, id, key and part of the payload, compared as it comes back
        assert assert_enqueued(ledger.write).unique_id == "b"
        assert assert_enqueued("ledger.write", {"note": "first"}).unique_id is None
        assert_enqueued(ledger.write, {"job": id})
        assert_enqueued(ledger.write, queue="ledger", id="b", key="k", count=1)
        assert len(all_enqueued()) == 2
        refute_enqueued(ledger.write, {"job": "c"})
        refute_enqueued(ledger.always_fails)
        with self.assertRaisesRegex(AssertionError, r"(?s)No job matches.*write_slowly.*Enqueued"):
            assert_enqueued(ledger.write_slowly)
        with self.assertRaisesRegex(AssertionError, "2 jobs match ledger.write, not 3"):
            assert_enqueued(ledger.write, count=3)
        with self.assertRaisesRegex(AssertionError, "1 jobs match ledger.write {'note': 'first'}"):
            refute_enqueued(ledger.write, {"note": "first"})

    def test_a_drain_runs_what_is_due_and_what_that_enqueues(self) -> None:
        ledger.spawn.enqueue(job="parent", children=2)
        thread: list[Any] = []
        signals.job_completed.connect(receiver := lambda **kw: thread.append(kw["handler"]))
        drained = drain()
        signals.job_completed.disconnect(receiver)
        assert (drained.completed, drained.failed, len(drained.runs)) == (3, 0, 3)
        assert set(Entry.objects.values_list("job", flat=True)) == {
            "parent",
            "parent/0",
            "parent/1",
        }
        assert set(Job.objects.values_list("state", flat=True)) == {"completed"}
        assert thread == ["ledger.spawn", "ledger.write", "ledger.write"]
        refute_enqueued()
        assert drain().runs == []

    @override_settings(KJO={**settings.KJO, "BACKOFF_BASE": 60})
    def test_an_error_is_raised_and_recorded(self) -> None:
        ledger.write_attempt.enqueue(job="a", fail_times=2)
        with self.assertRaisesRegex(RuntimeError, "attempt 1 fails"):
            drain()
        job = Job.objects.get()
        assert (job.state, job.attempts) == ("failing", 1)
        assert not Entry.objects.exists(), "the failed attempt's writes are undone"
        assert JobFailure.objects.get().worker == "drain"
        # The connection is as good as ever, and the retry is due later
        assert drain().runs == []
        drained = drain(with_retries=True)
        assert [run.outcome for run in drained.runs] == ["retried", "completed"]
        assert drained.results == [{"attempt": 3, "key": str(job.pk)}]

    def test_the_end_of_a_job_that_always_fails(self) -> None:
        ledger.always_fails.enqueue(job="a", message="no")
        drained = drain(with_retries=True, raise_errors=False)
        assert (drained.retried, drained.failed) == (1, 1)
        assert DeadLetter.objects.get().reason == "exhausted"
        ledger.refuse.enqueue(job="b")
        with self.assertRaises(PermanentError):
            drain(with_retries=True)

    def test_a_database_error_in_a_handler_leaves_the_test_usable(self) -> None:
        @job(name="tests.breaks_sql", max_attempts=1)
        def breaks_sql() -> None:
            with connection.cursor() as cursor:
                cursor.execute("SELECT nothing FROM nowhere")

        try:
            breaks_sql.enqueue()
            drained = drain(raise_errors=False)
        finally:
            registry.unregister("tests.breaks_sql")
        assert drained.failed == 1
        assert Job.objects.get().state == "failed"

    def test_delayed_jobs_wait_unless_told_otherwise(self) -> None:
        ledger.write.using(delay=timedelta(days=1)).enqueue(job="later")
        assert_enqueued(ledger.write)
        assert drain().runs == []
        assert drain(with_delayed=True).completed == 1

    def test_only_some_queues(self) -> None:
        ledger.write.enqueue(job="a")
        assert drain("default").runs == []
        assert drain("ledger").completed == 1

    def test_on_commit_callbacks_run_after_each_job(self) -> None:
        called: list[str] = []

        @job(name="tests.calls_back")
        def calls_back() -> None:
            transaction.on_commit(lambda: called.append("after"))
            transaction.on_commit(lambda: ledger.write.enqueue(job="from a callback"))

        try:
            calls_back.enqueue()
            assert drain().completed == 2
        finally:
            registry.unregister("tests.calls_back")
        assert called == ["after"]
        assert Entry.objects.get().job == "from a callback"

    def test_handlers_of_every_kind(self) -> None:
        ledger.write_outside.enqueue(job="outside")
        ledger.write_async.enqueue(job="async")
        ledger.sleep_async.enqueue(seconds=0)
        assert drain().completed == 3
        assert Entry.objects.count() == 2

    def test_a_job_that_enqueues_itself_for_ever_is_stopped(self) -> None:
        @job(name="tests.again")
        def again() -> None:
            again.enqueue()

        try:
            again.enqueue()
            with self.assertRaisesRegex(AssertionError, "ran 5 jobs and more are due"):
                drain(limit=5)
        finally:
            registry.unregister("tests.again")

    def test_one_job(self) -> None:
        ledger.write.enqueue(job="other")
        answer = ledger.give.using(delay=timedelta(hours=1)).enqueue(value=[1, 2])
        assert run_job(answer) == [1, 2]
        with self.assertRaisesRegex(JobFailedError, "completed"):
            run_job(answer.job_id)
        failing = ledger.always_fails.enqueue(job="a")
        with self.assertRaisesRegex(RuntimeError, "always fails"):
            run_job(Job.objects.get(pk=failing.job_id))
        assert not Entry.objects.exists()

    def test_no_broker_is_needed(self) -> None:
        with self.settings(KJO={**UNREACHABLE_KAFKA, "QUEUES": {"ledger": {}}}):
            ledger.write.enqueue(job="a")
            ledger.refuse.enqueue(job="b")
            drained = drain(raise_errors=False)
        assert (drained.completed, drained.failed) == (1, 1)

    def test_it_all_happens_in_this_thread(self) -> None:
        seen: list[int] = []

        @job(name="tests.thread")
        def where() -> None:
            seen.append(threading.get_ident())

        try:
            where.enqueue()
            drain()
        finally:
            registry.unregister("tests.thread")
        assert seen == [threading.get_ident()]


# --- Without a database ---------------------------------------------------------------------------


def test_a_handler_alone() -> None:
    """Payload and result go through the serializer: no test passes on what JSON would change."""
    assert perform(ledger.give, value=(1, 2)) == [1, 2]
    assert perform(ledger.give, value=date(2030, 1, 2)) == "2030-01-02"
    with pytest.raises(PayloadError):
        perform(ledger.give, value=object())
    with pytest.raises(TypeError, match="unexpected"):
        perform(ledger.give, nonsense=1)

    @job(name="tests.told", takes_context=True)
    def told(context: Any, a: int) -> list[Any]:
        return [context.attempt, context.max_attempts, a]

    @job(name="tests.asks")
    async def asks() -> None:
        raise Retry("later")

    try:
        assert perform(told, a=1, attempt=2) == [2, 5, 1]
        with pytest.raises(Retry):
            perform(asks)
    finally:
        registry.unregister("tests.told")
        registry.unregister("tests.asks")


@pytest.fixture
def images(forgotten_definitions: None) -> Queue:
    return Queue("tests-images", serializer=MSGPACK)


def test_a_queues_handler_alone(images: Queue) -> None:
    with pytest.raises(MessageError, match="No handler"):
        perform(images, b"x")
    images.execute(lambda job: [job.id, job.payload, job.attempts])
    assert perform(images, b"\x00\xff") == ["test", b"\x00\xff", 1]


@pytest.mark.django_db
def test_a_queue_is_drained(images: Queue) -> None:
    images.execute(lambda job: job.payload[::-1])
    images.enqueue("a", b"abc")
    assert assert_enqueued(images, b"abc").unique_id == "a"
    refute_enqueued(images, b"x")
    assert drain(images).results == [b"cba"]
    assert images.get_result("a") == b"cba"


# --- Jobs of the test's own -----------------------------------------------------------------------


def test_the_test_of_the_page_passes_and_leaves_no_job(db: None) -> None:
    # Given
    page = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "testing.md"
    (code,) = (code for _, _, code in FENCE.findall(page.read_text()) if "isolated" in code)
    names: dict[str, Any] = {"__name__": "shop.tests"}
    exec(compile(code, "tests.py", "exec", dont_inherit=True), names)
    # When
    suite = unittest.defaultTestLoader.loadTestsFromTestCase(names["RetryTests"])
    result = unittest.TestResult()
    suite.run(result)
    # Then
    assert result.errors + result.failures == []
    assert result.testsRun == 1
    assert registry.find("tests.fail") is None


# --- The plugin -----------------------------------------------------------------------------------

PLUGIN_TEST = """
import pytest
from kjo_django import Queue
from kjo_django.testing import assert_enqueued
from tests.ledger.jobs import write


def test_drain(drain_jobs, enqueued_jobs, memory_transport):
    write.enqueue(job="a")
    assert len(enqueued_jobs(write)) == 1
    assert drain_jobs().completed == 1
    assert type(memory_transport).__name__ == "MemoryTransport"


def test_worker(job_worker):
    from tests.queueing.jobs import ledger
    job_worker("ledger")
    assert ledger.enqueue_and_wait("a", {}) == {"id": "a", "attempts": 1}


@pytest.mark.parametrize("time", ["first", "second"])
def test_isolated(isolated_jobs, time):
    from kjo_django import job, registry

    assert registry.find("tests.only_here") is None
    job(name="tests.only_here")(lambda: None)
"""


@pytest.mark.large
def test_the_pytest_plugin(tmp_path: Any) -> None:
    """In a process of its own: the plugin is imported before the apps are ready."""
    import os
    import subprocess
    import sys

    root = Path(__file__).resolve().parents[2]
    file = tmp_path / "test_plugin.py"
    file.write_text(PLUGIN_TEST)
    options = ["-p", "kjo_django.testing.pytest_plugin", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(file), "-q", *options, "--rootdir", str(root)],
        cwd=root,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "KJO_TEST_SQLITE": str(tmp_path / "test.sqlite3"),
        },
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    assert "4 passed" in done.stdout
