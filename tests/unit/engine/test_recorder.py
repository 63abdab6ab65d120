"""Writing outcomes down: only onto the state, generation and attempt that were read."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connection, transaction
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.engine import failures, recorder
from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.call import recording
from kjo_django.enqueue import storing
from kjo_django.exceptions import MessageError, PermanentError, RateLimitExceededError, Retry
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.registry import Handler, HandlerOptions
from kjo_django.runtime import current_runtime
from kjo_django.store import store_for
from kjo_django.store.rows import row_of
from kjo_django.transports.base import Record
from tests.factories import JobFactory
from tests.unit.deliveries import KJO, MEMORY, Bench

pytestmark = pytest.mark.usefixtures("real_database")


@pytest.fixture(autouse=True)
def _configured(settings, real_database):
    settings.KJO = KJO | MEMORY


def outcome_of(job: Job, ending: Ending = Ending.COMPLETED, **facts) -> Attempt:
    """What a run of this job ended with, its row as it was read before."""
    sent = storing.record_of(job, get_settings().queue(job.queue))
    record = Record(sent.topic, 0, 5, sent.key, sent.value, dict(sent.headers))
    delivery = Bench().read(record)
    defaults = {"number": job.attempts + 1, "started_at": timezone.now()}
    return Attempt(delivery, ending, row=row_of(job), **{**defaults, **facts})


def a_job(**columns) -> Job:
    return JobFactory(queue="ledger", handler="ledger.no_op", **{"state": "queued", **columns})


def complete(*outcomes: Attempt, token: str | None = None) -> set:
    with recording(store_for("default")):
        return recorder.complete(current_runtime(), outcomes, token)


def fail(*outcomes: Attempt) -> None:
    with recording(store_for("default")):
        failures.record_failures(current_runtime(), outcomes, "worker")


# --- Success --------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["pending", "queued", "failing"])
def test_an_open_job_is_completed(state):
    """A relay slower than the consumer never makes a finished job look open."""
    job = a_job(state=state, attempts=1, error="before", result_ttl=5000)
    assert complete(outcome_of(job, result=b'{"v":1}')) == {job.pk}
    job.refresh_from_db()
    assert (job.state, job.attempts, job.error) == ("completed", 2, "")
    assert bytes(job.result) == b'{"v":1}'
    assert job.result_expires_at - job.finished_at == timedelta(seconds=5)


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_a_finished_job_is_not_completed_again(state):
    job = a_job()
    outcome = outcome_of(job, result=b"late")
    Job.objects.update(state=state)
    assert complete(outcome) == set()
    job.refresh_from_db()
    assert (job.state, job.result) == (state, None)


def test_a_requeued_job_is_not_completed_by_the_generation_before():
    job = a_job()
    outcome = outcome_of(job)
    Job.objects.update(generation=2)
    assert complete(outcome) == set()


def test_many_are_completed_and_each_gets_its_own_result_and_lifetime():
    jobs = [a_job(result_ttl=1000 * (n + 1)) for n in range(5)]
    done = [outcome_of(job, result=b"%d" % n) for n, job in enumerate(jobs)]
    assert complete(*done) == {job.pk for job in jobs}
    for n, job in enumerate(Job.objects.order_by("id")):
        assert bytes(job.result) == b"%d" % n
        assert (job.result_expires_at - job.finished_at).total_seconds() == n + 1


def test_what_has_no_row_needs_no_update():
    outcome = outcome_of(a_job())
    outcome.row = None
    assert complete(outcome) == set()


def rows_expected(plan: dict) -> list[int]:
    """Of each scan of the jobs below an update."""
    if plan.get("Relation Name") == "kjo_job" and plan["Node Type"] != "ModifyTable":
        return [plan["Plan Rows"]]
    return [rows for part in plan.get("Plans", ()) for rows in rows_expected(part)]


def complete_with_lease(jobs, token="mine"):
    first = outcome_of(a_job(lease_token="mine"))
    done = [first, *(Attempt(first.delivery, Ending.COMPLETED, 1, row_of(job)) for job in jobs)]
    for outcome in done:
        outcome.started_at = timezone.now()
    complete(*done, token=token)


def complete_without_lease(jobs):
    complete_with_lease(jobs, token=None)


def take_leases(jobs):
    now = timezone.now()
    rows = [row_of(job) for job in jobs]
    store_for("default").take_row_leases(rows, "mine", now, now + timedelta(seconds=1))


def release_leases(jobs):
    store_for("default").release_row_leases([job.pk for job in jobs], "mine")


@pytest.mark.large
@pytest.mark.parametrize(
    "act", [complete_with_lease, complete_without_lease, take_leases, release_leases]
)
def test_the_planner_expects_the_groups_rows_whatever_statistics_say(real_database, act):
    """Misled, it compares each open row with each of the group's: seconds for a thousand."""
    if real_database != "postgresql":
        pytest.skip("the statement is PostgreSQL's")
    # Given statistics from a time when no job was open and nobody held a lease
    jobs = [JobFactory.build(queue="ledger", state="completed") for _ in range(2000)]
    Job.objects.bulk_create(jobs)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE kjo_job")
    Job.objects.update(state="queued", lease_token="mine")
    # When
    plans = []

    def explain(execute, sql, params, many, context):
        answer = execute(sql, params, many, context)
        if "UPDATE kjo_job SET" in sql:
            with context["connection"].connection.cursor() as own:
                found = own.execute(f"EXPLAIN (FORMAT JSON) {sql}", params).fetchone()
            plans.append(found[0][0]["Plan"])
        return answer

    with connection.execute_wrapper(explain):
        act(jobs[:200])
    # Then
    (plan,) = plans
    assert min(rows_expected(plan)) >= 100, plan


# --- Failure --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [{"state": "cancelled"}, {"state": "completed"}, {"generation": 2}, {"attempts": 1}],
    ids=str,
)
@pytest.mark.parametrize("result", [Ending.RETRIED, Ending.DEAD])
def test_a_job_that_has_moved_on_gets_no_failure_of_before(change, result):
    # Given
    job = a_job()
    outcome = outcome_of(
        job, result, error=ValueError("no"), reason="exhausted", retry_at=timezone.now()
    )
    Job.objects.update(**change)
    # When
    fail(outcome)
    # Then
    assert outcome.ending is Ending.SKIPPED
    assert not JobFailure.objects.exists()
    assert not DeadLetter.objects.exists()
    job.refresh_from_db()
    assert {name: getattr(job, name) for name in change} == change


def test_failures_and_letters_are_one_transaction():
    job = a_job()
    outcome = outcome_of(job, Ending.DEAD, error=ValueError("no"), reason="exhausted")
    with pytest.raises(RuntimeError), transaction.atomic():
        failures.record_failures(current_runtime(), [outcome], "worker")
        raise RuntimeError
    job.refresh_from_db()
    assert job.state == "queued"
    assert not JobFailure.objects.exists()


# --- Judging --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "attempt", "result", "reason"),
    [
        (ValueError("x"), 1, Ending.RETRIED, ""),
        (ValueError("x"), 5, Ending.DEAD, "exhausted"),
        (Retry("x"), 5, Ending.DEAD, "exhausted"),
        (PermanentError("x"), 1, Ending.DEAD, "fatal"),
        (MessageError("deserialization", "x"), 1, Ending.DEAD, "deserialization"),
        (MessageError("a reason of the handler's own making", "x"), 1, Ending.DEAD, "fatal"),
        (RateLimitExceededError("x"), 1, Ending.RETRIED, ""),
    ],
)
def test_a_failed_attempt_is_judged_by_the_policy(error, attempt, result, reason):
    outcome = outcome_of(a_job(), number=attempt, limit=5)
    failures.judge_error(current_runtime(), outcome, error)
    assert (outcome.ending, outcome.reason) == (result, reason)
    assert (outcome.retry_at is not None) == (result is Ending.RETRIED)


def test_the_policy_is_that_of_the_settings(settings):
    settings.KJO = {
        **settings.KJO,
        "BACKOFF_BASE": 7,
        "BACKOFF_MAX": 9,
        "BACKOFF_JITTER": 0,
        "ERROR_RECOVERY_DELAYS": {"network": 11},
        "PAUSABLE_ERRORS": ["builtins.KeyError", "KeyError"],
    }
    plain = Handler(lambda: None, HandlerOptions("tests.plain"))
    policy = failures.policy(current_runtime(), plain, "ledger")
    assert policy.decide(ValueError(), 1, 5).delay == timedelta(seconds=7)
    assert policy.decide(ValueError(), 4, 5).delay == timedelta(seconds=9)
    assert policy.decide(ConnectionError(), 1, 5).delay == timedelta(seconds=11)
    assert policy.decide(KeyError(), 1, 5).pause is not None
