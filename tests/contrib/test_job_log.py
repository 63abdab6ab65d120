"""The last lines that were logged while a job ran are kept with an attempt that fails."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextvars import copy_context
from typing import Any

import pytest
from asgiref.sync import sync_to_async

from kjo_django.engine.handler import job_log
from kjo_django.models import JobFailure
from kjo_django.worker import Worker
from tests.unit.deliveries import KJO, Bench, as_job, benched

app = logging.getLogger("shop.payments")


@pytest.fixture
def bench(settings, sqlite_file) -> Iterator[Bench]:
    level = app.level
    app.setLevel(logging.INFO)
    with benched(settings) as bench, job_log.kept(5):
        yield bench
    app.setLevel(level)
    assert logging.getLogRecordFactory() is logging.LogRecord


def kept_lines() -> list[list[str]]:
    """The lines of each failed attempt, without their times."""
    logs = JobFailure.objects.order_by("pk").values_list("log", flat=True)
    time = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3}[+-]\d\d:\d\d "
    return [[re.sub(f"^{time}", "", line) for line in log.splitlines()] for log in logs]


@pytest.mark.parametrize("atomic", [True, False], ids=["atomic", "outside"])
@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_a_failed_attempt_has_the_lines_that_were_logged_in_it(bench, atomic, is_async):
    # Given a handler that logs and fails once
    seen: list[str] = []

    def fails_once(order: int) -> None:
        app.debug("below the level of its logger")
        app.info("charging order %d", order)
        if not seen:
            seen.append("failed")
            app.warning("refused\nonce")
            raise ValueError("not yet")

    async def afails_once(order: int) -> None:
        await asyncio.sleep(0)
        await sync_to_async(fails_once)(order)

    handler = afails_once if is_async else fails_once
    as_job(handler, "bench.pay", atomic=atomic, max_attempts=2).enqueue(order=17)
    # When
    app.info("before any job")
    bench.run_until_done()
    # Then its failure has them, one line each, and what completed later has left none
    assert kept_lines() == [
        ["INFO shop.payments: charging order 17", r"WARNING shop.payments: refused\nonce"]
    ]


def failing(log: Callable[[], object], **options: Any) -> None:
    def handler() -> None:
        log()
        raise ValueError("no")

    as_job(handler, "bench.pay", max_attempts=1, **options).enqueue()


def test_of_many_lines_the_last_are_kept_and_of_a_long_one_its_beginning(bench):
    def log() -> None:
        for number in range(7):
            app.info("line %d %s", number, "x" * 2000)

    failing(log)
    bench.run()
    (lines,) = kept_lines()
    assert [line.split()[3] for line in lines] == ["2", "3", "4", "5", "6"]
    assert max(map(len, lines)) < job_log.LONGEST_LINE


def test_an_exception_that_is_logged_is_named(bench):
    def log() -> None:
        try:
            raise LookupError("no such card")
        except LookupError:
            app.exception("It failed")

    failing(log)
    bench.run()
    assert kept_lines() == [["ERROR shop.payments: It failed: LookupError: no such card"]]


def test_what_no_database_takes_is_spelled_out_or_replaced(bench):
    failing(lambda: app.info("nul \x00, half \ud800, red \x1b[31m"))
    bench.run()
    assert kept_lines() == [[r"INFO shop.payments: nul \x00, half \ud800, red \x1b[31m"]]


def test_a_record_that_cannot_be_written_is_left_out_and_fails_no_job(bench, capsys):
    class Bad:
        def __str__(self) -> str:
            raise RuntimeError("no text")

    def handler() -> None:
        app.info("with %s", Bad())
        app.info("after it")
        raise ValueError("its own")

    as_job(handler, "bench.pay", max_attempts=1).enqueue()
    before, logging.raiseExceptions = logging.raiseExceptions, False
    try:
        bench.run()
    finally:
        logging.raiseExceptions = before
    assert kept_lines() == [["INFO shop.payments: after it"]]
    assert JobFailure.objects.get().error == "its own"


def test_a_thread_that_has_taken_the_context_along_logs_for_the_job_and_another_does_not(bench):
    def log() -> None:
        context = copy_context()
        for target in (lambda: context.run(app.info, "mine"), lambda: app.info("nobody's")):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()

    failing(log)
    bench.run()
    assert kept_lines() == [["INFO shop.payments: mine"]]


def test_each_of_two_jobs_in_one_group_has_its_own_lines(bench):
    def handler(name: str) -> None:
        app.info("of %s", name)
        raise ValueError("no")

    definition = as_job(handler, "bench.pay", max_attempts=1)
    definition.enqueue_many([{"name": "a"}, {"name": "b"}])
    bench.run()
    assert sorted(kept_lines()) == [["INFO shop.payments: of a"], ["INFO shop.payments: of b"]]


def test_items_of_a_batch_have_no_lines_of_one_another(bench):
    """Nobody knows which of them a line is about; erasing one's data would leave the others'."""

    def handler(items: list[Any]) -> None:
        for item in items:
            app.info("of %s", item.payload["name"])
            item.fail(ValueError("no"))

    definition = as_job(handler, "bench.pay", max_attempts=1, batch=10)
    definition.enqueue_many([{"name": "a"}, {"name": "b"}])
    bench.run()
    definition.enqueue(name="c")
    bench.run()
    assert kept_lines() == [[], [], ["INFO shop.payments: of c"]]


def test_a_record_made_of_a_dictionary_is_no_line(bench):
    failing(lambda: logging.makeLogRecord({"msg": "of another process"}))
    bench.run()
    assert kept_lines() == [[]]


def test_an_argument_that_logs_while_it_is_written_does_not_take_the_place_of_its_record(bench):
    class Chatty:
        def __str__(self) -> str:
            app.info("asked for its text")
            return "chatty"

    failing(lambda: app.info("with %s", Chatty()))
    bench.run()
    (lines,) = kept_lines()
    assert lines[0] == "INFO shop.payments: with chatty"
    # Others that write the record ask as well
    assert {*lines[1:]} <= {"INFO shop.payments: asked for its text"}


def test_a_huge_message_is_cut_before_it_is_written_in_one_line(bench, monkeypatch):
    seen: list[int] = []
    monkeypatch.setattr(job_log, "one_line", lambda text: seen.append(len(text)) or text)
    failing(lambda: app.info("x" * 1_000_000))
    bench.run()
    assert seen == [job_log.LONGEST_LINE]


def test_workers_that_follow_one_another_in_a_process_leave_no_chain_of_factories():
    before = logging.getLogRecordFactory()
    first = job_log.kept(5)
    first.__enter__()
    for _ in range(3):
        second = job_log.kept(5)
        second.__enter__()
        first.__exit__(None, None, None)
        first = second
        assert logging.getLogRecordFactory().make is before
    first.__exit__(None, None, None)
    assert logging.getLogRecordFactory() is before


def test_nothing_is_kept_where_the_setting_says_so_and_no_factory_is_left_behind():
    before = logging.getLogRecordFactory()
    with job_log.kept(0):
        assert logging.getLogRecordFactory() is before
    with job_log.kept(5), job_log.kept(3):  # as of two workers in one process
        assert logging.getLogRecordFactory() is not before
    assert logging.getLogRecordFactory() is before


def test_somebody_elses_factory_stays_in_place():
    before = logging.getLogRecordFactory()

    def theirs(*arguments: Any, **named: Any) -> logging.LogRecord:
        return inner(*arguments, **named)

    try:
        with job_log.kept(5):
            inner = logging.getLogRecordFactory()
            logging.setLogRecordFactory(theirs)
        assert logging.getLogRecordFactory() is theirs
        app.warning("still written")
        with job_log.kept(5):
            app.warning("and again")
    finally:
        logging.setLogRecordFactory(before)


@pytest.mark.medium
def test_a_worker_keeps_as_many_lines_as_the_setting_says(settings, sqlite_file):
    settings.KJO = {**KJO, "JOB_LOG_LINES": 7}
    kept: list[object] = []

    def is_over() -> bool:
        kept.append(logging.getLogRecordFactory())
        return True

    Worker(["ledger"], relay=False, owns_process=False).run(is_over)
    assert kept[0].most == 7
