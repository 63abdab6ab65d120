"""Large work as a job of our own: what is asked, what is done, what an interruption leaves."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django import registry
from kjo_django.engine.handler.context import Abort, JobContext
from kjo_django.enqueue import storing
from kjo_django.exceptions import JobCancelledError, PublishError, Retry
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import bulk, jobs, rows
from kjo_django.operations.bulk import start_bulk
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.search import JobFilter, parse
from tests.factories import DeadLetterFactory, JobFactory
from tests.unit.deliveries import KJO, Bench

pytestmark = pytest.mark.usefixtures("real_database")


@pytest.fixture(autouse=True)
def _configured(settings, real_database, forgotten_definitions):
    settings.KJO = {**KJO, "OPERATIONS_QUEUE": "ledger"}


def context(**facts) -> JobContext:
    return JobContext("00000000-0000-0000-0000-000000000000", 1, 3, "key", "ledger", **facts)


def run(job: Job) -> Job:
    """Run the job as a worker does."""
    bench = Bench()
    bench.run([one for one in bench.poll() if one.message and one.message.id == job.message_id])
    job.refresh_from_db()
    return job


def result_of(job: Job) -> dict:
    return json.loads(bytes(job.result))["v"]


def failed_jobs(count: int) -> list[Job]:
    found = [JobFactory(queue="ledger", handler="ledger.no_op", failed=True) for _ in range(count)]
    for job in found:
        DeadLetterFactory(job=job, queue="ledger", handler=job.handler, message_id=job.message_id)
    return found


# --- Asking ---------------------------------------------------------------------------------------


def test_what_is_asked_is_in_the_job():
    # When
    job = start_bulk(
        "discard_letters",
        DeadLetterFilter(queue="emails", ids=["a"], since=timezone.now()),
        actor="ann",
        note="no longer needed",
    )
    # Then
    assert (job.queue, job.handler) == ("ledger", "kjo_django.discard_dead_letters")
    request = job.arguments
    assert (request["action"], request["actor"], request["inputs"]["note"]) == (
        "discard_letters",
        "ann",
        "no longer needed",
    )
    stored = bulk.load_letter_filter(request["filter"])
    assert (stored.queue, stored.ids) == ("emails", ["a"])
    assert stored.until is not None


@pytest.mark.parametrize(
    ("action", "selection", "options", "told"),
    [
        ("replay_letters", JobFilter(), {}, "needs a DeadLetterFilter"),
        ("requeue", DeadLetterFilter(), {}, "needs a JobFilter"),
        ("discard_letters", DeadLetterFilter(), {"note": " "}, "A note is needed"),
        ("discard", JobFilter(), {}, "A note is needed"),
        ("change_queue", JobFilter(), {"queue": "legder"}, "Did you mean 'ledger'"),
        *(
            ("replay_letters", DeadLetterFilter(), {"rate": rate}, "rate must be a number from")
            for rate in (0, -1, 1e-300, 1e6, float("nan"), float("inf"))
        ),
        ("burn", JobFilter(), {}, "burn"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_stored(action, selection, options, told):
    with pytest.raises(ValueError, match=told):
        start_bulk(action, selection, actor="ann", **options)
    assert not Job.objects.exists()


def test_without_its_queue_the_first_that_is_consumed_carries_it(settings):
    settings.KJO = {**KJO, "OPERATIONS_QUEUE": "nobody"}
    queue = start_bulk("cancel", JobFilter(), actor="ann").queue
    assert queue == registry.consumed_queue_names()[0]


def test_our_handlers_are_found_and_are_not_among_the_projects():
    for name in (bulk.REPLAY, bulk.DISCARD, bulk.CHANGE):
        assert registry.find(name) is not None
        assert name not in [handler.name for handler in registry.handlers()]


@pytest.mark.parametrize("count", [2, 3])
def test_few_are_done_at_once_and_many_by_a_job(count, monkeypatch):
    # Given
    monkeypatch.setattr(bulk, "SYNCHRONOUS_LIMIT", 2)
    failed_jobs(count)
    seen = []
    # When
    answers = [
        bulk.change_or_start("discard", parse("state:failed"), actor="ann", note="x"),
        bulk.replay_or_start(DeadLetterFilter(), actor="ann", on_changed=seen.extend),
        bulk.discard_or_start(DeadLetterFilter(), actor="ann", note="x"),
    ]
    # Then
    if count == 3:
        assert [job.handler for job in answers] == [bulk.CHANGE, bulk.REPLAY, bulk.DISCARD]
        assert DeadLetter.objects.filter(state="open").count() == 3
    else:
        outcomes, report, discarded = answers
        assert outcomes.counts == {"discarded": 2}
        assert (report.replayed, discarded, seen) == (0, 0, [])


def test_a_slow_pace_makes_it_a_job_too():
    failed_jobs(2)
    assert isinstance(bulk.replay_or_start(DeadLetterFilter(), actor="ann", rate=0.1), Job)


# --- Doing ----------------------------------------------------------------------------------------


def test_letters_are_replayed_in_the_name_of_who_asked():
    # Given
    failed_jobs(3)
    job = start_bulk("replay_letters", DeadLetterFilter(queue="ledger"), actor="ann")
    later = failed_jobs(1)[0]
    # When
    job = run(job)
    # Then what there was is on its way, what died since is not
    assert job.state == "completed"
    assert result_of(job)["replayed"] == 3
    assert set(DeadLetter.objects.exclude(job=later).values_list("state", "note")) == {
        ("replayed", "replayed by ann")
    }
    assert DeadLetter.objects.get(job=later).state == "open"


def test_letters_are_discarded_with_the_note():
    failed_jobs(2)
    job = run(start_bulk("discard_letters", DeadLetterFilter(), actor="ann", note="spam"))
    assert result_of(job) == {"counts": {"discarded": 2}, "changed": 2}
    assert set(DeadLetter.objects.values_list("state", "note")) == {("discarded", "spam (ann)")}


@pytest.mark.parametrize(
    ("action", "state", "counts"),
    [
        ("requeue", "failed", {"requeued": 3}),
        ("cancel", "queued", {"cancelled": 3}),
        ("run_now", "scheduled", {"due": 3}),
        ("discard", "failed", {"discarded": 3}),
        ("change_expiry", "queued", {"changed": 3}),
    ],
)
def test_jobs_are_changed(action, state, counts):
    # Given
    if state == "failed":
        failed_jobs(3)
    for _ in range(0 if state == "failed" else 3):
        later = timedelta(hours=1 if state == "scheduled" else -1)
        JobFactory(queue="other", queued=True, available_at=timezone.now() + later)
    # When
    found = replace(parse("attempts:0"), state=state)
    inputs = {"discard": {"note": "why"}, "change_expiry": {"expires_in": 60}}.get(action, {})
    job = run(start_bulk(action, found, actor="ann", **inputs))
    # Then
    assert result_of(job)["counts"] == counts


def test_the_job_does_not_change_itself():
    # Given
    waiting, running = (JobFactory(queued=True, queue="other") for _ in range(2))
    job = start_bulk("cancel", parse("state:queued queue:other"), actor="ann")
    # When
    found = bulk.carry_out(replace(context(), job_id=str(running.pk)), **job.arguments)
    # Then
    assert found == {"counts": {"cancelled": 1}, "changed": 1}
    waiting.refresh_from_db()
    assert waiting.state == "cancelled"


# --- Interruptions --------------------------------------------------------------------------------


def test_it_tells_how_far_it_is_and_ends_between_chunks_when_it_is_asked_to(monkeypatch):
    """Cancelled half-way, what is done stays done and the rest stays as it was."""
    # Given
    monkeypatch.setattr(rows.chunks, "__defaults__", (2,))
    failed_jobs(5)
    job = start_bulk("requeue", parse("state:failed"), actor="ann")
    run_context, told = context(), []

    def aborting(done, total=None):
        told.append(run_context.noted_progress)
        if len(told) == 2:
            run_context.abort(Abort.CANCELLED)

    plain = run_context.progress
    monkeypatch.setattr(
        JobContext, "progress", lambda self, *given: (plain.__func__(self, *given), aborting(0))
    )
    # When
    with pytest.raises(JobCancelledError):
        bulk.carry_out(run_context, **job.arguments)
    # Then
    assert told == [(40.0, "2 of 5"), (80.0, "4 of 5")]
    assert Job.objects.filter(state="failed").count() == 1


def test_a_second_run_goes_on_with_what_is_left(monkeypatch):
    # Given a run that was killed half-way, and one of its jobs that has failed anew since
    failed = failed_jobs(4)
    job = start_bulk("requeue", parse("state:failed"), actor="ann")
    jobs.requeue(failed[:2], actor="ann")
    Job.objects.filter(pk=failed[0].pk).update(state="failed", finished_at=timezone.now())
    # When
    job = run(job)
    # Then
    assert result_of(job)["counts"] == {"requeued": 2}
    failed[0].refresh_from_db()
    assert (failed[0].state, failed[0].generation) == ("failed", 2)


def test_a_transport_that_is_down_is_waited_for(monkeypatch):
    def down(*args):
        raise PublishError("no broker")

    DeadLetterFactory.create_batch(3, queue="ledger")
    job = start_bulk("replay_letters", DeadLetterFilter(), actor="ann")
    monkeypatch.setattr(storing, "publish", down)
    with pytest.raises(Retry, match="3 in a row"):
        bulk.carry_out(context(), **job.arguments)


@pytest.mark.parametrize("rate", [1e-300, float("nan"), float("inf")])
def test_an_absurd_rate_in_a_payload_is_refused_before_anything_is_done(rate):
    """Whoever may enqueue may write what they like into a payload."""
    # Given
    letter = DeadLetterFactory()
    job = start_bulk("discard_letters", DeadLetterFilter(), actor="ann", note="x")
    # When, then
    with pytest.raises(ValueError, match="The rate must be a number from"):
        bulk.carry_out(context(), **{**job.arguments, "rate": rate})
    letter.refresh_from_db()
    assert letter.state == "open"


def test_a_pace_is_kept_and_an_abort_ends_its_wait_at_once(monkeypatch):
    # Given
    failed_jobs(2)
    job = start_bulk("discard_letters", DeadLetterFilter(), actor="ann", note="x", rate=0.01)
    aborted = context()
    waits = []

    class Event:
        def wait(self, seconds):
            waits.append(seconds)
            aborted.abort(Abort.SHUTDOWN)

    monkeypatch.setattr(JobContext, "cancel_event", Event())
    # When
    with pytest.raises(JobCancelledError):
        bulk.carry_out(aborted, **job.arguments)
    # Then
    assert waits[0] == pytest.approx(200, abs=60)
