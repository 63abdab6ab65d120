"""Tasks are jobs: stored with the caller's data, run by the one pipeline, their results rows."""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip(
    "kjo_django.contrib.tasks.compat",
    reason="neither Django's tasks nor the backport django-tasks is installed",
    exc_type=ImportError,
)

from django.db import transaction
from django.db.transaction import TransactionManagementError
from django.utils import timezone

from kjo_django import registry
from kjo_django.conf import default_worker_name, get_settings
from kjo_django.contrib.tasks.backend import TASK, TIMEOUT, KJOBackend, TaskHandler
from kjo_django.contrib.tasks.compat import (
    InvalidTask,
    TaskResultDoesNotExist,
    task_backends,
    task_enqueued,
    task_finished,
    task_started,
)
from kjo_django.engine.attempt import Attempt, Delivery, Ending, Mode
from kjo_django.engine.handler.context import facts_of
from kjo_django.exceptions import JobExistsError, PayloadError
from kjo_django.ids import uuid7
from kjo_django.logs import FOREIGN
from kjo_django.models import DeadLetter, Job, JobFailure, MetricBucket, TransportMessage
from kjo_django.operations import jobs as operations
from kjo_django.runtime import current_runtime
from kjo_django.testing import drain
from kjo_django.transports.base import Record
from kjo_django.worker.statistics import Statistics
from tests.contrib.conftest import NAME
from tests.ledger.models import Entry
from tests.unit.deliveries import MEMORY, NAMELESS, Bench, Silent

pytestmark = pytest.mark.django_db
Work = Callable[..., Bench]


# --- Enqueue --------------------------------------------------------------------------------------


def test_a_task_is_stored_as_a_job(tasks: Any) -> None:
    # When
    result = tasks.add.using(queue_name="mails").enqueue(2, b=3)
    # Then
    job = Job.objects.get()
    assert (str(job.pk), job.handler, job.queue) == (result.id, NAME, "mails")
    assert job.arguments["task"] == "tests.contrib.declared.add"
    assert (job.arguments["args"], job.arguments["kwargs"]) == ([2], {"b": 3})
    assert (result.status, result.job_status, result.attempts) == ("READY", "queued", 0)
    assert result.is_new and not result.is_finished
    assert tasks.add.using(queue_name="mails").get_result(result.id) == result


def test_it_is_rolled_back_with_the_callers_transaction(tasks: Any) -> None:
    with pytest.raises(ZeroDivisionError), transaction.atomic():
        tasks.add.enqueue(1)
        raise ZeroDivisionError
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("arguments", "error"),
    [((), TypeError), ((1, 2, 3), TypeError), ((object(),), TypeError)],
    ids=["missing", "too many", "no JSON"],
)
def test_wrong_arguments_are_refused_before_anything_is_written(
    tasks: Any, arguments: Any, error: Any
) -> None:
    with pytest.raises(error):
        tasks.add.enqueue(*arguments)
    assert not Job.objects.exists()


def test_arguments_that_are_too_large_are_refused(tasks: Any, settings: Any) -> None:
    settings.KJO = {**settings.KJO, "MAX_PAYLOAD_BYTES": 500}
    with pytest.raises(PayloadError):
        tasks.write.enqueue("x" * 600)
    assert not Job.objects.exists()


def test_enqueuing_asynchronously(tasks: Any) -> None:
    from asgiref.sync import async_to_sync

    async def enqueue() -> Any:
        result = await tasks.add.aenqueue(1)
        return result, await tasks.add.aget_result(result.id)

    result, again = async_to_sync(enqueue)()
    assert result == again


@pytest.mark.parametrize("method", ["aenqueue", "aget_result", "arefresh"])
def test_no_coroutine_asks_beside_the_transaction_of_its_thread(tasks: Any, method: str) -> None:
    """FINDINGS 2.10 g: what asyncio.run runs has another connection, and so no part of it."""
    result = tasks.add.enqueue(1)
    calls: dict[str, Callable[[], Any]] = {
        "aenqueue": lambda: tasks.add.aenqueue(1),
        "aget_result": lambda: tasks.add.aget_result(result.id),
        "arefresh": lambda: result.arefresh(),
    }

    async def ask() -> None:
        await calls[method]()

    with pytest.raises(TransactionManagementError, match="async_to_sync"):
        asyncio.run(ask())
    assert Job.objects.count() == 1


def test_run_after_delays(tasks: Any) -> None:
    later = timezone.now() + timedelta(hours=1)
    result = tasks.add.using(run_after=later).enqueue(1)
    assert Job.objects.get().available_at == later
    found = tasks.add.get_result(result.id)
    assert (found.status, found.job_status, found.task.run_after) == ("READY", "scheduled", later)


def test_a_task_expires_after_a_number_of_seconds(tasks: Any) -> None:
    # When
    result = tasks.mail.using(expires=60).enqueue(7)
    # Then
    job = Job.objects.get()
    assert job.expires_at is not None
    assert timedelta(seconds=59) <= job.expires_at - job.created_at <= timedelta(seconds=60)
    assert tasks.mail.get_result(result.id).task.expires == 60


def test_options_of_a_task_become_the_jobs(tasks: Any) -> None:
    # When
    result = tasks.mail.using(unique_id="m-7", max_attempts=9, timeout=2).enqueue(7)
    # Then
    job = Job.objects.get()
    assert (job.unique_id, job.key, job.max_attempts) == ("m-7", "c-7", 9)
    assert job.expires_at is not None
    assert job.expires_at - job.created_at <= timedelta(hours=1)
    assert (job.headers or {})[TIMEOUT] == "2.0"
    found = tasks.mail.get_result(result.id).task
    assert (found.unique_id, found.max_attempts, found.timeout) == ("m-7", 9, 2)
    assert found == result.task


def test_a_unique_id_is_enqueued_once(tasks: Any) -> None:
    sent: list[Any] = []

    def listen(**facts: Any) -> None:
        sent.append(facts["task_result"].id)

    task_enqueued.connect(listen)
    try:
        first = tasks.add.using(unique_id="a").enqueue(1)
        second = tasks.add.using(unique_id="a").enqueue(2)
    finally:
        task_enqueued.disconnect(listen)
    assert second.id == first.id
    assert (first.is_new, second.is_new, second.args) == (True, False, [1])
    assert sent == [first.id]
    with pytest.raises(InvalidTask, match="another job"):
        tasks.write.using(unique_id="a").enqueue("x")


def test_a_task_is_enqueued_once_in_a_window_for_the_same_arguments(tasks: Any) -> None:
    hourly = tasks.add.using(unique_for=timedelta(hours=1))
    first = hourly.enqueue(1)
    # The same arguments, however they are given; b has its default
    again = [hourly.enqueue(a=1), hourly.enqueue(1, 1), hourly.enqueue(1, b=1)]
    assert {result.id for result in again} == {first.id}
    assert [result.is_new for result in (first, *again)] == [True, False, False, False]
    other = hourly.enqueue(2)
    same = tasks.add.using(unique_for=timedelta(hours=1), unique_by=["b"])
    assert other.is_new
    assert [same.enqueue(1).is_new, same.enqueue(2).is_new, same.enqueue(1, 5).is_new] == [
        *(True, False, True)
    ]
    # And the result knows the options, and another task is another window
    assert hourly.get_result(first.id).task == hourly
    written = tasks.write.using(unique_for=timedelta(hours=1), unique_by=[])
    assert [written.enqueue("x").is_new, written.enqueue("y").is_new] == [True, False]


def test_of_debounced_tasks_the_last_one_runs(tasks: Any) -> None:
    quiet = tasks.look.using(debounce=timedelta(seconds=30), unique_by=[])
    first, last = quiet.enqueue(fail_until=2), quiet.enqueue(fail_until=0)
    assert (last.id, last.is_new, last.kwargs) == (first.id, False, {"fail_until": 0})
    job = Job.objects.get()
    assert job.available_at > job.created_at + timedelta(seconds=25)
    assert job.key


def test_a_task_that_has_not_begun_is_replaced_or_told(tasks: Any) -> None:
    named = tasks.add.using(unique_id="a", on_conflict="replace")
    first, second = named.enqueue(1), named.enqueue(2)
    assert (second.id, second.args) == (first.id, [2])
    assert tasks.add.get_result(first.id).args == [2]
    with pytest.raises(JobExistsError):
        tasks.add.using(unique_id="a", on_conflict="raise").enqueue(3)


def test_a_priority_is_stored_with_the_job_and_the_result_knows_it(tasks: Any) -> None:
    result = tasks.add.using(priority=-7).enqueue(1)
    assert Job.objects.get(pk=result.id).priority == -7
    assert tasks.add.get_result(result.id).task.priority == -7
    # And one without has none
    plain = tasks.add.enqueue(1)
    assert Job.objects.get(pk=plain.id).priority is None
    assert tasks.add.get_result(plain.id).task.priority == 0


@pytest.mark.parametrize("wrong", [101, -101, 1.5])
def test_a_priority_out_of_range_is_refused(tasks: Any, wrong: float) -> None:
    with pytest.raises(InvalidTask, match="priority"):
        tasks.add.using(priority=wrong)


def test_the_page_names_each_capability_that_a_backend_can_have() -> None:
    page = Path(__file__).parents[2].joinpath("docs/how-to/django-tasks.md").read_text()
    names = [name for name in vars(KJOBackend.__mro__[1]) if name.startswith("supports_")]
    assert len(names) == 4
    for name in names:
        assert getattr(KJOBackend, name) is True
        assert f"`{name}`" in page


def test_queues_are_those_of_the_backend(tasks: Any) -> None:
    with pytest.raises(InvalidTask, match="nowhere"):
        tasks.add.using(queue_name="nowhere")
    with pytest.raises(InvalidTask, match="Did you mean 'mails'"):
        tasks.add.using(queue_name="mail", backend="other").enqueue(1)
    assert tasks.add.using(queue_name="mails", backend="other").enqueue(1).status == "READY"


# --- Run ------------------------------------------------------------------------------------------


def test_a_worker_runs_it(tasks: Any, work: Work) -> None:
    # Given
    result = tasks.add.enqueue(2, b=3)
    # When
    work()
    # Then
    result.refresh()
    assert (result.status, result.job_status, result.return_value) == ("SUCCESSFUL", "completed", 5)
    assert result.is_finished and result.attempts == 1
    assert result.enqueued_at <= result.started_at <= result.finished_at
    assert result.last_attempted_at == result.started_at


def test_the_relay_publishes_it_where_the_transport_is_a_log(
    tasks: Any, work: Work, settings: Any
) -> None:
    settings.KJO = {**settings.KJO, **MEMORY}
    result = tasks.add.enqueue(2)
    assert (result.status, result.job_status) == ("READY", "pending")
    bench = work()
    result.refresh()
    assert result.return_value == 3
    assert bench.measured == ["tests.contrib.declared.add"]


def test_a_task_whose_worker_died_too_often_has_failed(tasks: Any, work: Work) -> None:
    result = tasks.add.using(max_attempts=2).enqueue(1)
    # As often as it may be begun, its worker vanished with it.
    TransportMessage.objects.update(deliveries=2)
    work()
    result.refresh()
    assert (result.status, result.job_status) == ("FAILED", "failed")
    # Then each attempt has its error
    assert [error.exception_class.__name__ for error in result.errors] == ["StalledError"] * 2


def test_none_is_a_return_value(tasks: Any, work: Work) -> None:
    result = tasks.write.enqueue("a")
    with pytest.raises(ValueError, match="not finished"):
        _ = result.return_value
    work()
    result.refresh()
    assert result.return_value is None
    assert Entry.objects.get().job == "a"


def test_its_writes_are_undone_with_it_and_its_errors_are_kept(tasks: Any, work: Work) -> None:
    # Given
    result = tasks.write_and_fail.enqueue("a")
    # When
    bench = work()
    # Then
    result.refresh()
    assert not Entry.objects.exists()
    assert (result.status, result.job_status, result.attempts) == ("FAILED", "failed", 3)
    assert [error.exception_class for error in result.errors] == [ValueError] * 3
    assert all(e.traceback.endswith("ValueError: no a\n") for e in result.errors)
    assert result.worker_ids == ["bench"] * 3
    assert result.started_at <= result.last_attempted_at <= result.finished_at
    with pytest.raises(ValueError, match="Task failed"):
        _ = result.return_value
    assert DeadLetter.objects.get().reason == "exhausted"
    assert bench.measured == ["tests.contrib.declared.write_and_fail"] * 3


def test_between_two_attempts_it_is_ready(tasks: Any, work: Work) -> None:
    result = tasks.look.enqueue(fail_until=3)
    bench = Bench("default")
    bench.run()
    result.refresh()
    assert (result.status, result.job_status, len(result.errors)) == ("READY", "failing", 1)
    bench.run_until_done()
    bench.close()
    result.refresh()
    assert result.return_value == [3, result.id, result.id]
    assert (result.attempts, len(result.errors)) == (3, 2)
    assert result.worker_ids == ["bench", "bench", default_worker_name()]


def test_an_asynchronous_task_writes_within_the_transaction(tasks: Any, work: Work) -> None:
    result = tasks.write_async.enqueue("a")
    work()
    result.refresh()
    assert (result.return_value, Entry.objects.count()) == ("a", 1)


def test_a_task_has_its_own_time_limit(tasks: Any, work: Work) -> None:
    result = tasks.hang.enqueue()
    work()
    result.refresh()
    assert result.status == "FAILED"
    assert "exceeded its timeout of 0.05 s" in result.errors[0].traceback


def test_headers_decide_how_it_is_run(tasks: Any) -> None:
    tasks.note.enqueue(1)
    tasks.hang.enqueue()
    tasks.note.using(backend="default", atomic=False).enqueue(2)
    bench = Bench("default")
    modes = [(d.mode, d.kind.rpartition(".")[2]) for d in bench.poll()]
    bench.close()
    assert modes == [(Mode.PLAIN, "note"), (Mode.ATOMIC, "hang"), (Mode.PLAIN, "note")]


def test_a_task_is_counted_by_a_name_that_can_be_stored(tasks: Any, postgres: None) -> None:
    """A worker whose figures hold one that cannot writes none any more, and no farewell."""
    # Given
    handler = registry.find(NAME)
    assert isinstance(handler, TaskHandler)
    statistics = Statistics(current_runtime(), uuid7())
    record = Record("default", 0, 0, None, b"{}", {})
    # When
    message = replace(NAMELESS, id="1", type=NAME)
    for path in (b"a\0.b", b"a.\xff\xff", b"a\n.b", b"x" * 101, b"app.tasks.add"):
        fitted = handler.fitted({TASK: path})
        queue = get_settings().queue("default")
        delivery = Delivery(record, Silent(), queue, "tests", message, fitted)
        statistics.add([Attempt(delivery, Ending.DEAD)])
    statistics.flush()
    # Then, and log records say it as well
    assert facts_of(delivery)["handler"] == "app.tasks.add"
    names = MetricBucket.objects.values_list("handler", flat=True)
    assert {"django.tasks", "app.tasks.add"} <= set(names)
    assert all(name.isprintable() for name in names)


def test_options_of_the_backend_are_its_tasks_defaults(tasks: Any, work: Work) -> None:
    tasks.seen.clear()
    result = tasks.note.enqueue(1)
    assert Job.objects.get().max_attempts == 2
    work()
    result.refresh()
    assert result.status == "SUCCESSFUL", JobFailure.objects.values_list("traceback")
    assert [value for value, _ in tasks.seen] == [1]


def test_what_is_not_started_in_time_fails(tasks: Any, work: Work) -> None:
    result = tasks.mail.using(expires=timezone.now() - timedelta(seconds=1)).enqueue(1)
    work("mails")
    result.refresh()
    assert (result.status, result.attempts) == ("FAILED", 0)
    assert [error.exception_class.__name__ for error in result.errors] == ["ExpiredError"]
    assert DeadLetter.objects.get().reason == "expired"


def test_a_cancelled_task_has_failed_and_says_so(tasks: Any) -> None:
    result = tasks.add.enqueue(1)
    operations.cancel([result.id])
    result.refresh()
    assert (result.status, result.job_status, result.errors) == ("FAILED", "cancelled", [])


def test_a_return_value_that_is_no_json_fails(tasks: Any, work: Work) -> None:
    result = tasks.returns_what_is_no_json.enqueue()
    work()
    result.refresh()
    assert [error.exception_class for error in result.errors] == [TypeError]


def test_a_task_of_another_backend_may_be_sent_here(tasks: Any, work: Work, settings: Any) -> None:
    """Its class has none of our options then."""
    from kjo_django.contrib.tasks import compat

    plain = compat.Task(
        func=tasks.elsewhere.func,
        priority=0,
        backend="default",
        queue_name="default",
        run_after=None,
    )
    result = plain.enqueue(2)
    work()
    assert plain.get_result(result.id).return_value == 4


def test_within_a_test_case_drain_runs_tasks(tasks: Any) -> None:
    results = [tasks.add.enqueue(1), tasks.note.enqueue(7), tasks.write_async.enqueue("a")]
    drained = drain()
    for result in results:
        result.refresh()
    assert [result.return_value for result in results] == [2, None, "a"]
    assert drained.completed == 3


# --- What a message may name ----------------------------------------------------------------------


def _redirect(path: str) -> None:
    job = Job.objects.get()
    call = {**job.arguments, "task": path}
    bench = Bench("default")
    bench.poll()
    bench.close()
    Job.objects.all().delete()
    from kjo_django.enqueue.storing import store
    from kjo_django.messages.serializers import JSON

    job.pk, job.payload = uuid.uuid4(), JSON.dumps(call)
    job._state.adding = True
    store([job])


@pytest.mark.parametrize(
    "path", ["tests.contrib.declared.no_task", "os.system", "tests.contrib.declared.was_a_task"]
)
def test_what_is_no_task_is_never_called(tasks: Any, work: Work, path: str) -> None:
    # Given
    tasks.add.enqueue(1)
    _redirect(path)
    # When
    work()
    # Then
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.attempts) == ("fatal", 1)
    assert letter.error_type.endswith("NotATask")


def test_what_cannot_be_imported_is_retried(tasks: Any, work: Work) -> None:
    """A worker with newer code may have it."""
    tasks.add.using(max_attempts=2).enqueue(1)
    _redirect("tests.contrib.declared.comes_later")
    work()
    assert JobFailure.objects.count() == 2
    assert DeadLetter.objects.get().error_type == "ImportError"


@pytest.mark.parametrize("payload", [b"[]", b"{}", b'{"task": 7}', b'{"task": "a.b", "args": 1}'])
def test_a_payload_that_is_no_call_is_a_dead_letter(tasks: Any, work: Work, payload: bytes) -> None:
    bench = Bench("default")
    bench.publish(payload, kjo_id="x", kjo_type=NAME)
    bench.close()
    work()
    assert DeadLetter.objects.get().reason == "invalid"


# --- Results --------------------------------------------------------------------------------------


def test_results_that_are_not_there(tasks: Any, work: Work) -> None:
    backend = task_backends["default"]
    result = tasks.add.enqueue(1)
    for id in ("123", "", str(uuid.uuid4()), None):
        with pytest.raises(TaskResultDoesNotExist):
            backend.get_result(id)  # type: ignore[arg-type]
    with pytest.raises(TaskResultDoesNotExist):
        task_backends["other"].get_result(result.id)
    Job.objects.update(handler="shop.send")
    with pytest.raises(TaskResultDoesNotExist):
        backend.get_result(result.id)


def test_a_result_whose_lifetime_is_over_is_not_there(tasks: Any, work: Work) -> None:
    result = tasks.add.enqueue(1)
    work()
    Job.objects.update(result_expires_at=timezone.now())
    with pytest.raises(TaskResultDoesNotExist):
        tasks.add.get_result(result.id)


def test_a_result_outlives_the_queue_it_was_valid_for(tasks: Any, settings: Any) -> None:
    result = tasks.add.using(queue_name="mails").enqueue(1)
    settings.TASKS = {"default": {**settings.TASKS["default"], "QUEUES": ["default"]}}
    assert tasks.add.get_result(result.id).task.queue_name == "mails"


def test_a_completed_result_costs_one_query(
    tasks: Any, work: Work, django_assert_num_queries: Any
) -> None:
    result = tasks.add.enqueue(1)
    work()
    with django_assert_num_queries(1):
        result.refresh()


# --- Signals --------------------------------------------------------------------------------------


def test_signals_tell_of_what_is_stored(tasks: Any, work: Work) -> None:
    # Given
    told: list[Any] = []

    def start(sender: Any, task_result: Any, **facts: Any) -> None:
        told.append(("started", sender.__name__, task_result.status, task_result.attempts))

    def finish(sender: Any, task_result: Any, **facts: Any) -> None:
        stored = task_backends["default"].get_result(task_result.id)
        told.append(("finished", task_result.status, stored.status, len(task_result.errors)))
        raise RuntimeError("of a receiver")

    task_started.connect(start)
    task_finished.connect(finish)
    # When
    try:
        tasks.look.enqueue(fail_until=2)
        work()
        tasks.write_and_fail.using(max_attempts=1).enqueue("a")
        work()
    finally:
        task_started.disconnect(start)
        task_finished.disconnect(finish)
    # Then
    assert told == [
        ("started", "KJOBackend", "RUNNING", 1),
        ("started", "KJOBackend", "RUNNING", 2),
        ("finished", "SUCCESSFUL", "SUCCESSFUL", 1),
        ("started", "KJOBackend", "RUNNING", 1),
        ("finished", "FAILED", "FAILED", 1),
    ]


class Broken(logging.Handler):
    """As projects have them: it reads ``request``, which records of a worker do not have."""

    def handle(self, record: logging.LogRecord) -> bool:
        return bool(record.request)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["write", "write_async"])
def test_logging_that_raises_fails_no_task(
    tasks: Any, work: Work, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework logs with each of its signals, and Django what their receivers raise: also in a
    process that has not run jobs, and enqueues one."""
    # Given
    for other in FOREIGN:
        if "handle" in vars(logger := logging.getLogger(other)):
            monkeypatch.delattr(logger, "handle")
    broken = Broken()
    logging.root.addHandler(broken)

    heard: list[Any] = []

    def receive(signal: Any, **facts: Any) -> None:
        heard.append(signal)
        raise RuntimeError("of a receiver")

    told = (task_enqueued, task_started, task_finished)
    for signal in told:
        signal.connect(receive)
    # When
    try:
        result = getattr(tasks, name).enqueue("a")
        work()
    finally:
        logging.root.removeHandler(broken)
        for signal in told:
            signal.disconnect(receive)
    # Then
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 1)
    # The framework's own receivers log, and come first.
    assert heard == [*told]


def test_receivers_may_ask_the_database_when_an_asynchronous_task_starts(
    tasks: Any, work: Work
) -> None:
    counts: list[int] = []

    def start(**facts: Any) -> None:
        counts.append(Job.objects.count())

    task_started.connect(start)
    try:
        tasks.write_async.enqueue("a")
        work()
    finally:
        task_started.disconnect(start)
    assert counts == [1]


def test_a_failure_is_logged_with_its_traceback(
    tasks: Any, work: Work, caplog: pytest.LogCaptureFixture
) -> None:
    tasks.write_and_fail.using(max_attempts=1).enqueue("a")
    work()
    framework = [r for r in caplog.records if r.name in ("django.tasks", "django_tasks")]
    assert [str(r.exc_info[1]) for r in framework if r.exc_info] == ["no a"]
