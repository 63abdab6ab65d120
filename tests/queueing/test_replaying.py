"""A dead letter replays what it holds, also when its job's id was enqueued again since."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.utils import timezone

from kjo_django import Queue
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job
from kjo_django.operations import dead_letters, jobs, topic_replay
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.maintenance.prune import Retention, prune
from kjo_django.operations.topic_replay import TopicReplay
from kjo_django.runtime import get_transport
from tests.queueing.conftest import Recorder
from tests.unit.deliveries import KJO, MEMORY, Bench
from tests.waiting import wait_until

pytestmark = pytest.mark.django_db


class Moody:
    """A handler that fails until it is told not to; remembers ids and payloads."""

    def __init__(self) -> None:
        self.fails = True
        self.seen: list[tuple[str, Any]] = []

    def __call__(self, job: Any) -> None:
        self.seen.append((job.id, job.payload))
        if self.fails:
            raise ValueError(f"refused {job.payload}")


@pytest.fixture
def handler() -> Moody:
    return Moody()


@pytest.fixture
def queue(settings: Any, handler: Moody, forgotten_definitions: None) -> Iterator[Queue]:
    settings.KJO = KJO | MEMORY
    get_transport().clear()
    queue = Queue("replaying", max_attempts=1)
    queue.execute(handler)
    yield queue
    get_transport().clear()


@pytest.fixture
def bench(queue: Queue) -> Iterator[Bench]:
    """A worker of the queue."""
    bench = Bench(queue.name)
    yield bench
    bench.close()


@pytest.fixture
def letters(queue: Queue, handler: Moody, bench: Bench) -> list[DeadLetter]:
    """Two open letters of one unique id: of "old", whose error has expired, and of "new"."""
    queue.enqueue("j1", "old", key="k")
    bench.run_until_done()
    Job.objects.update(result_expires_at=timezone.now() - timedelta(seconds=1))
    assert queue.enqueue("j1", "new").status == "queued"
    bench.run_until_done()
    handler.fails = False
    handler.seen.clear()
    return list(DeadLetter.objects.order_by("pk"))


def only(letter: DeadLetter) -> DeadLetterFilter:
    return DeadLetterFilter(ids=[letter.pk])


def states() -> list[str]:
    return list(DeadLetter.objects.order_by("pk").values_list("state", flat=True))


@pytest.mark.parametrize("force", [False, True])
def test_an_old_letter_runs_what_it_holds_and_closes_itself_alone(
    letters: list[DeadLetter], handler: Moody, force: bool, bench: Bench
) -> None:
    # When
    report = dead_letters.replay(only(letters[0]), force=force)
    bench.run_until_done()
    # Then its handler is told the id that it was enqueued under, and the other letter stays
    assert (report.replayed, report.is_ok) == (1, True)
    assert handler.seen == [("j1", "old")]
    assert states() == [DeadLetterState.REPLAYED, DeadLetterState.OPEN]
    # And the other one runs what that one holds
    assert dead_letters.replay(only(letters[1]), force=force).replayed == 1
    bench.run_until_done()
    assert handler.seen == [("j1", "old"), ("j1", "new")]
    assert states() == [DeadLetterState.REPLAYED, DeadLetterState.REPLAYED]


def test_an_old_letter_keeps_its_key_and_counts_its_replays(
    letters: list[DeadLetter], handler: Moody, bench: Bench
) -> None:
    # When it fails again
    handler.fails = True
    dead_letters.replay(only(letters[0]))
    bench.run_until_done()
    # Then
    again = DeadLetter.objects.order_by("pk").last()
    assert (bytes(again.key or b""), again.arguments) == (b"k", "old")
    assert again.replay_count == 1
    # And that one is replayed like any other, with the same id for its handler
    handler.fails = False
    handler.seen.clear()
    dead_letters.replay(only(again))
    bench.run_until_done()
    assert handler.seen == [("j1", "old")]


@pytest.mark.parametrize("force", [False, True])
def test_an_old_letter_leaves_the_completed_job_alone(
    queue: Queue, letters: list[DeadLetter], handler: Moody, force: bool, bench: Bench
) -> None:
    # Given
    queue.retry("j1")
    bench.run_until_done()
    job = Job.objects.get(unique_id="j1")
    assert states() == [DeadLetterState.OPEN, DeadLetterState.REPLAYED]
    # When
    dead_letters.replay(only(letters[0]), force=force)
    bench.run_until_done()
    # Then
    assert handler.seen == [("j1", "new"), ("j1", "old")]
    assert Job.objects.get(unique_id="j1").generation == job.generation
    assert states() == [DeadLetterState.REPLAYED, DeadLetterState.REPLAYED]


def test_an_edited_old_letter_leaves_the_new_jobs_payload_alone(
    queue: Queue, letters: list[DeadLetter], handler: Moody, bench: Bench
) -> None:
    # When
    report = dead_letters.edit_and_replay(letters[0].pk, json.dumps("old, repaired").encode())
    bench.run_until_done()
    # Then
    assert report.replayed == 1
    assert handler.seen == [("j1", "old, repaired")]
    assert Job.objects.get(unique_id="j1").arguments == "new"
    assert states() == [DeadLetterState.REPLAYED, DeadLetterState.OPEN]


def test_all_letters_are_replayed_at_once(
    letters: list[DeadLetter], handler: Moody, bench: Bench
) -> None:
    assert dead_letters.preview(DeadLetterFilter()).refused.total() == 0
    assert dead_letters.replay(DeadLetterFilter()).replayed == 2
    bench.run_until_done()
    assert sorted(handler.seen) == [("j1", "new"), ("j1", "old")]


def test_a_requeue_closes_the_letter_of_the_present_failure_alone(
    queue: Queue, letters: list[DeadLetter]
) -> None:
    jobs.requeue(Job.objects.filter(unique_id="j1"))
    assert states() == [DeadLetterState.OPEN, DeadLetterState.REPLAYED]


def test_to_enqueue_a_failed_id_anew_closes_the_letter_of_that_failure_alone(
    queue: Queue, letters: list[DeadLetter]
) -> None:
    queue.enqueue("j1", "newest", retry_failed=True)
    assert states() == [DeadLetterState.OPEN, DeadLetterState.REPLAYED]


def test_a_preview_foresees_an_old_letter_of_a_completed_job(
    queue: Queue, letters: list[DeadLetter], bench: Bench
) -> None:
    queue.retry("j1")
    bench.run_until_done()
    assert dict(dead_letters.preview(only(letters[0])).refused) == {}


def test_a_letter_outlives_the_completed_job_that_took_its_id(
    queue: Queue, letters: list[DeadLetter], handler: Moody, bench: Bench
) -> None:
    """What it holds is all that a replay needs, so ``kjo_prune`` need not keep that job."""
    # Given
    queue.retry("j1")
    bench.run_until_done()
    now = timezone.now()
    Job.objects.filter(unique_id="j1").update(finished_at=now, result_expires_at=now)
    # When
    assert prune(Retention.of_settings(completed=timedelta(0)))["jobs"] == 1
    dead_letters.replay(only(letters[0]))
    # Then it is a message nobody enqueued, with all that the letter holds
    record = get_transport().records("replaying")[-1]
    assert record.value == b'"old"'
    assert names.JOB_ID not in record.headers
    assert record.headers[names.UNIQUE_ID] == b"j1"
    handler.seen.clear()
    bench.run_until_done()
    assert handler.seen == [("j1", "old")]


# --- From the topic -------------------------------------------------------------------------------


def test_from_the_topic_an_old_death_runs_what_its_record_holds(
    letters: list[DeadLetter], handler: Moody, monkeypatch: Any, bench: Bench
) -> None:
    # When the first record, that of "old", is replayed
    monkeypatch.setattr(topic_replay, "IDLE_PATIENCE", 0.1)
    report = topic_replay.replay_topic(TopicReplay("replaying-dlq", limit=1))
    bench.run_until_done()
    # Then
    assert report.replayed == 1
    assert handler.seen == [("j1", "old")]
    assert states() == [DeadLetterState.REPLAYED, DeadLetterState.OPEN]
    # And so is that of "new"
    assert topic_replay.replay_topic(TopicReplay("replaying-dlq")).replayed == 1
    bench.run_until_done()
    assert handler.seen == [("j1", "old"), ("j1", "new")]
    assert states() == [DeadLetterState.REPLAYED, DeadLetterState.REPLAYED]


def test_from_the_topic_an_old_death_that_was_replayed_is_refused_and_forced_with_what_it_holds(
    queue: Queue, letters: list[DeadLetter], handler: Moody, monkeypatch: Any, bench: Bench
) -> None:
    # Given
    monkeypatch.setattr(topic_replay, "IDLE_PATIENCE", 0.1)
    dead_letters.replay(DeadLetterFilter())
    bench.run_until_done()
    handler.seen.clear()
    sent_before = len(get_transport().records("replaying"))
    # When, then
    report = topic_replay.replay_topic(TopicReplay("replaying-dlq", dry_run=True))
    assert dict(report.refused) == {"its job has moved on": 2}
    # When forced
    report = topic_replay.replay_topic(TopicReplay("replaying-dlq", force=True, limit=1))
    # Then it goes out as it is, under an id of its own
    assert report.replayed == 1
    (record,) = get_transport().records("replaying")[sent_before:]
    assert (record.value, record.headers[names.UNIQUE_ID]) == (b'"old"', b"j1")
    assert names.JOB_ID not in record.headers
    assert Job.objects.get(unique_id="j1").state == "completed"


# --- On every engine ------------------------------------------------------------------------------


@pytest.mark.django_db(databases=[])
def test_a_worker_runs_what_an_old_letter_holds(
    make_queue: Callable[..., Queue], engine: str
) -> None:
    # Given a handler that fails twice, then no more
    def answer(job: Any) -> Any:
        if len(recorder.seen) <= 2:
            raise ValueError(f"refused {job.payload}")
        return job.payload

    recorder = Recorder(answer)
    queue = make_queue(max_attempts=1)
    queue.execute(recorder)
    queue.start()
    open_letters = DeadLetter.objects.filter(queue=queue.name, state=DeadLetterState.OPEN)
    queue.enqueue("j1", "old", result_ttl=1)
    wait_until(lambda: open_letters.count() == 1)
    wait_until(lambda: queue.enqueue("j1", "new").status == "queued")
    wait_until(lambda: open_letters.count() == 2)
    old, new = open_letters.order_by("pk")
    # When
    assert dead_letters.replay(only(old)).replayed == 1
    # Then
    wait_until(lambda: len(recorder.seen) == 3)
    assert recorder.seen[2][:2] == ("j1", "old")
    assert list(open_letters) == [new]
