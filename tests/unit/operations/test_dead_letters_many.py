"""Many dead letters replayed in one run: together, without a row locked for a broker, none twice.

On PostgreSQL and on a SQLite file.
"""

from __future__ import annotations

import threading
from collections import Counter

import pytest
from django.db import connection, transaction

from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import dead_letters
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.runtime import get_coordination, get_transport
from tests.factories import DeadLetterFactory, JobFactory, ProcessedEventFactory
from tests.unit.deliveries import on_memory, statements
from tests.waiting import PATIENCE

pytestmark = pytest.mark.usefixtures("real_database")
EVERYTHING = DeadLetterFilter()


@pytest.fixture
def memory(settings, real_database):
    with on_memory(settings, MAX_REPLAYS=2) as transport:
        yield transport


def foreign(count: int) -> list[DeadLetter]:
    """Dead letters of messages that other services have published."""
    return [
        DeadLetterFactory(
            queue="events",
            topic="events",
            message_id=f"m-{number}",
            headers=names.to_json({names.ID: b"m-%d" % number, names.TYPE: b"tests.add"}),
        )
        for number in range(count)
    ]


def sent(memory) -> Counter[bytes]:
    return Counter(record.headers[names.ID] for record in memory.records("events"))


def states() -> Counter[str]:
    return Counter(DeadLetter.objects.values_list("state", flat=True))


def of_jobs(count: int) -> list[DeadLetter]:
    return DeadLetterFactory.create_batch(count, of_job=True)


@pytest.mark.parametrize("make", [foreign, of_jobs])
def test_the_number_of_queries_does_not_grow_with_the_letters(memory, make):
    def queries_of(count: int) -> int:
        make(count)
        with statements() as executed:
            assert dead_letters.replay(EVERYTHING).replayed == count
        DeadLetter.objects.all().delete()
        return len(executed)

    queries_of(5)
    assert queries_of(60) == queries_of(20)


def test_jobs_that_have_headers_keep_them(memory):
    # Given jobs of which one was replayed before, and one has headers of its own
    jobs = [
        JobFactory(state="failed", headers=headers)
        for headers in (None, {names.REPLAY_COUNT: "1"}, {"tenant": "acme"})
    ]
    for job, count in zip(jobs, (0, 1, 0), strict=True):
        DeadLetterFactory(job=job, replay_count=count)
    # When
    assert dead_letters.replay(EVERYTHING).replayed == 3
    # Then
    assert [Job.objects.get(pk=job.pk).headers for job in jobs] == [
        {names.REPLAY_COUNT: "1"},
        {names.REPLAY_COUNT: "2"},
        {"tenant": "acme", names.REPLAY_COUNT: "1"},
    ]


def test_what_is_refused_is_told_and_keeps_nobody_else(memory):
    # Given among letters that can be replayed some that cannot
    foreign(2)
    of_jobs(2)
    DeadLetterFactory(job=JobFactory(completed=True))
    DeadLetterFactory(of_job=True, replay_count=2)
    DeadLetterFactory(message_id="done", queue="events", topic="events")
    ProcessedEventFactory(event_id="done")
    DeadLetterFactory(queue="", topic="")
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert (report.matched, report.replayed, report.already_processed) == (8, 4, 1)
    assert dict(report.refused) == {
        "the job is completed": 1,
        dead_letters.REFUSED_LOOP: 1,
        dead_letters.REFUSED_PROCESSED: 1,
        dead_letters.REFUSED_NO_SOURCE: 1,
    }
    assert states() == {"replayed": 4, "open": 4}


def test_a_job_that_was_enqueued_again_keeps_its_payload_and_the_letters_runs_by_itself(memory):
    # Given a job of a second generation that has failed, too, and the letters of both
    job = JobFactory(state="failed", payload=b'{"a": 2}', generation=2)
    DeadLetterFactory(job=job, value=b'{"a": 1}', source_id=f"{job.pk}:1")
    DeadLetterFactory(job=job, value=b'{"a": 2}')
    # When
    assert dead_letters.replay(EVERYTHING).replayed == 2
    # Then
    payloads = {bytes(each.payload) for each in Job.objects.filter(state="pending")}
    assert payloads == {b'{"a": 1}', b'{"a": 2}'}


def test_no_row_is_locked_while_the_broker_is_waited_for(memory, monkeypatch):
    # Given a broker that takes its time, in which somebody else changes each of the letters
    foreign(6)
    publish, changed = get_transport("default").publish, []

    def change_all():
        with transaction.atomic():
            changed.append(DeadLetter.objects.update(note="looked at"))
        connection.close()

    def publish_slowly(records):
        other = threading.Thread(target=change_all)
        other.start()
        other.join(PATIENCE)
        assert not other.is_alive()
        return publish(records)

    monkeypatch.setattr(get_transport("default"), "publish", publish_slowly)
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert changed == [6, 6]
    assert report.replayed == 6


def test_two_runs_at_once_publish_each_letter_once(memory, monkeypatch):
    # Given a run that is held up while it publishes
    foreign(10)
    publish, reports = get_transport("default").publish, []
    is_publishing, may_go_on = threading.Event(), threading.Event()

    def publish_held_up(records):
        if threading.current_thread() is first:
            is_publishing.set()
            assert may_go_on.wait(PATIENCE)
        else:
            may_go_on.set()
        return publish(records)

    def run():
        reports.append(dead_letters.replay(EVERYTHING))
        connection.close()

    monkeypatch.setattr(get_transport("default"), "publish", publish_held_up)
    first, second = threading.Thread(target=run), threading.Thread(target=run)
    first.start()
    assert is_publishing.wait(PATIENCE)
    # When a second one begins meanwhile
    second.start()
    # Then
    for thread in (first, second):
        thread.join(PATIENCE)
        assert not thread.is_alive()
    assert set(sent(memory).values()) == {1}
    assert len(sent(memory)) == 10 == sum(report.replayed for report in reports)
    assert states() == {"replayed": 10}


def test_a_run_that_died_is_waited_for_and_the_next_goes_on(memory, monkeypatch):
    # Given a run that died after it had leased a letter
    monkeypatch.setattr(dead_letters, "LOOK_AGAIN", 0.01)
    letters = foreign(3)
    name = f"REPLAY:{letters[1].pk}"
    get_coordination().claim([name], "of-the-dead", dead_letters.LEASE)
    looks = []

    def end_its_lease(keys, token):
        looks.append(keys)
        if len(looks) == 4:
            get_coordination().release([name], "of-the-dead")
        return claim(keys, token)

    claim = dead_letters._claim
    monkeypatch.setattr(dead_letters, "_claim", end_its_lease)
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert report.replayed == 3
    assert sent(memory) == {b"m-0": 1, b"m-1": 1, b"m-2": 1}


def test_a_run_that_is_interrupted_leaves_open_what_was_not_published(memory, monkeypatch):
    # Given a run that is killed with its second part
    foreign(20)
    publish, calls = get_transport("default").publish, []

    def publish_until_killed(records):
        calls.append(len(records))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return publish(records)

    monkeypatch.setattr(get_transport("default"), "publish", publish_until_killed)
    with pytest.raises(KeyboardInterrupt):
        dead_letters.replay(EVERYTHING)
    assert states() == {"replayed": 3, "open": 17}
    # When
    assert dead_letters.replay(EVERYTHING).replayed == 17
    # Then
    assert set(sent(memory).values()) == {1}
    assert len(sent(memory)) == 20


def test_parts_of_messages_fit_into_memory(memory, settings, monkeypatch):
    # Given
    settings.KJO = {**settings.KJO, "RELAY_BATCH_BYTES": 100_000}
    publish, sizes = get_transport("default").publish, []

    def publish_noting(records):
        sizes.append(sum(len(record.value) for record in records))
        return publish(records)

    monkeypatch.setattr(get_transport("default"), "publish", publish_noting)
    for _ in range(12):
        DeadLetterFactory(queue="events", topic="events", value=b"x" * 40_000)
    # When
    assert dead_letters.replay(EVERYTHING).replayed == 12
    # Then
    assert max(sizes) <= 140_000
