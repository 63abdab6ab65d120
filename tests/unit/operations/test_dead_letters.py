"""Replaying and discarding dead letters of the dead_letters."""

from __future__ import annotations

import itertools
from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django import job
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, DeadLetterState, Job, TransportMessage
from kjo_django.operations import dead_letters, fingerprints, jobs, rows
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.fingerprints import error_groups
from kjo_django.operations.topic_replay import TopicReplay
from kjo_django.states import JobState
from tests.factories import DeadLetterFactory, JobFactory, ProcessedEventFactory
from tests.unit.deliveries import KJO, MEMORY, Bench, on_memory, row_locked

pytestmark = pytest.mark.django_db

EVERYTHING = DeadLetterFilter()


@pytest.fixture
def memory(settings):
    with on_memory(settings, MAX_REPLAYS=2) as transport:
        yield transport


def test_a_jobs_dead_letter_requeues_the_job(memory):
    # Given
    letter = DeadLetterFactory(of_job=True)
    # When
    report = dead_letters.replay(EVERYTHING, actor="ann")
    # Then
    assert (report.replayed, report.is_ok) == (1, True)
    job = Job.objects.get()
    assert (job.state, job.generation, job.attempts) == (JobState.PENDING, 2, 0)
    letter.refresh_from_db()
    assert (letter.state, letter.replay_count) == (DeadLetterState.REPLAYED, 1)
    assert letter.closed_at is not None
    # And the count travels with the job, to its next dead letter
    assert job.headers == {names.REPLAY_COUNT: "1"}
    # And nothing was published past the relay
    assert memory.records("default") == []


def test_a_foreign_message_is_published_as_it_was(memory):
    """KDLQ-18, X-5: raw key, value and all headers; of our own additions where it was read first is
    kept, the count has grown."""
    # Given bytes that are no text
    headers = {
        names.ID: b"m-1",
        names.TYPE: b"tests.add",
        names.TRACEPARENT: b"00-abc-def-01",
        "x-binary": b"\xff\x00\xfe",
        names.DLQ_REASON: b"fatal",
        names.DLQ_ORIGINAL_TOPIC: b"events",
        names.REPLAY_COUNT: b"1",
    }
    DeadLetterFactory(
        queue="events",
        topic="events",
        key=b"\xff\x01",
        value=b"\x80\x00raw",
        headers=names.to_json(headers),
    )
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert report.replayed == 1
    (record,) = memory.records("events")
    assert (record.key, record.value) == (b"\xff\x01", b"\x80\x00raw")
    assert record.headers == {
        names.ID: b"m-1",
        names.TYPE: b"tests.add",
        names.TRACEPARENT: b"00-abc-def-01",
        "x-binary": b"\xff\x00\xfe",
        names.DLQ_ORIGINAL_TOPIC: b"events",
        names.REPLAY_COUNT: b"2",
    }
    letter = DeadLetter.objects.get()
    assert (letter.state, letter.replay_count) == (DeadLetterState.REPLAYED, 1)


def test_a_tombstone_without_key_is_published_as_one(memory):
    DeadLetterFactory(queue="events", topic="events", key=None, value=None)
    dead_letters.replay(EVERYTHING)
    (record,) = memory.records("events")
    assert (record.key, record.value) == (None, None)


def test_counters_of_redeliveries_start_anew_and_those_of_deaths_stay(memory):
    """KDLQ-F6."""
    # Given
    headers = {"KDLQ_Redelivered": b"\0\0\0\5", "KDLQ_Kills": b"\0\0\0\1"}
    DeadLetterFactory(queue="events", topic="events", headers=names.to_json(headers))
    # When
    dead_letters.replay(EVERYTHING)
    # Then
    (record,) = memory.records("events")
    assert "KDLQ_Redelivered" not in record.headers
    assert record.headers["KDLQ_Kills"] == b"\0\0\0\1"


def test_a_message_whose_job_was_deleted_no_longer_claims_to_have_one(memory):
    """Its consumer would drop it: nothing is silent."""
    # Given
    headers = {
        names.ID: b"m-1",
        names.JOB_ID: b"01980000-0000-7000-8000-000000000000",
        names.SERVICE: b"django",
        names.GENERATION: b"1",
        names.ATTEMPT: b"3",
    }
    DeadLetterFactory(queue="events", topic="events", headers=names.to_json(headers))
    # When
    dead_letters.replay(EVERYTHING)
    # Then
    (record,) = memory.records("events")
    origin = names.FIRST_WINS - {names.DLQ_FIRST_FAILED_AT, names.DLQ_ORIGINAL_TIMESTAMP}
    assert set(record.headers) == {names.ID, names.SERVICE, names.REPLAY_COUNT} | origin


def test_on_a_transactional_transport_publish_and_mark_are_one_transaction():
    """A letter is replayed if and only if its message is in the dead_letters."""
    # Given
    DeadLetterFactory()

    def refuse(letters):
        raise RuntimeError("the audit failed")

    # When
    with pytest.raises(RuntimeError):
        dead_letters.replay(EVERYTHING, on_changed=refuse)
    # Then
    assert not TransportMessage.objects.exists()
    assert DeadLetter.objects.get().state == DeadLetterState.OPEN
    # When nothing fails
    dead_letters.replay(EVERYTHING)
    # Then
    assert TransportMessage.objects.count() == 1


def test_what_the_transport_refuses_stays_open_and_the_next_run_goes_on(memory):
    # Given
    DeadLetterFactory.create_batch(2)
    memory.fail("the broker is away")
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert (report.replayed, report.failed, report.is_ok) == (0, 2, False)
    assert report.samples[0]["detail"] == "the broker is away"
    assert set(DeadLetter.objects.values_list("state", "replay_count")) == {("open", 0)}
    # When it is back
    memory.fail(None)
    assert dead_letters.replay(EVERYTHING).replayed == 2


def test_a_run_stops_when_the_transport_is_down(memory):
    # Given
    DeadLetterFactory.create_batch(10)
    memory.fail("the broker is away")
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert report.failed == dead_letters.FAILURES_IN_A_ROW
    assert "run it again later" in report.stopped


def test_letters_replayed_too_often_are_refused_counted_and_shown(memory):
    """The loop guard."""
    # Given
    DeadLetterFactory(of_job=True, replay_count=2)
    DeadLetterFactory(replay_count=1)
    # When
    report = dead_letters.replay(EVERYTHING)
    # Then
    assert report.replayed == 1
    assert dict(report.refused) == {dead_letters.REFUSED_LOOP: 1}
    assert "2 times" in report.samples[0]["detail"]
    # When forced
    assert dead_letters.replay(EVERYTHING, force=True).replayed == 1


def test_a_job_that_has_moved_on_is_left_alone_unless_forced(memory):
    # Given a failed job that was enqueued again and has completed
    letter = DeadLetterFactory(job=JobFactory(completed=True))
    # When, then
    report = dead_letters.replay(EVERYTHING)
    assert dict(report.refused) == {"the job is completed": 1}
    letter.refresh_from_db()
    assert letter.state == DeadLetterState.OPEN
    # When forced
    assert dead_letters.replay(EVERYTHING, force=True).replayed == 1


@pytest.mark.promise("generation")
def test_a_message_that_took_effect_is_refused_and_forced_under_a_new_id(memory):
    # Given
    DeadLetterFactory(message_id="m-1", queue="events", topic="events")
    ProcessedEventFactory(event_id="m-1")
    # When, then
    report = dead_letters.replay(EVERYTHING)
    assert (report.replayed, report.already_processed) == (0, 1)
    # When forced
    assert dead_letters.replay(EVERYTHING, force=True).replayed == 1
    (record,) = memory.records("events")
    assert record.headers[names.ID] != b"m-1"
    assert record.headers["kjo-replay-of"] == b"m-1"


def test_a_letter_without_any_source_is_refused(memory):
    DeadLetterFactory(queue="", topic="")
    assert dict(dead_letters.replay(EVERYTHING).refused) == {dead_letters.REFUSED_NO_SOURCE: 1}


def test_a_dry_run_changes_nothing_and_shows_what_is_there(memory):
    # Given
    DeadLetterFactory.create_batch(2, error_type="A")
    DeadLetterFactory(error_type="B", replay_count=9)
    DeadLetterFactory(error_type="B", message_id="done")
    ProcessedEventFactory(event_id="done")
    # When
    report = dead_letters.replay(EVERYTHING, dry_run=True)
    # Then
    assert report.matched == 4
    assert report.replayed == 0
    assert report.already_processed == 1
    assert dict(report.histogram) == {
        ("exhausted", "tests.add", "A"): 2,
        ("exhausted", "tests.add", "B"): 2,
    }
    assert dict(report.refused) == {dead_letters.REFUSED_LOOP: 1, dead_letters.REFUSED_PROCESSED: 1}
    assert DeadLetter.objects.filter(state="open").count() == 4
    assert memory.records("default") == []
    assert report.as_dict()["dry_run"] is True


def test_the_limit_counts_what_is_replayed_oldest_first(memory):
    # Given
    letters = DeadLetterFactory.create_batch(5)
    # When
    report = dead_letters.replay(EVERYTHING, limit=2)
    # Then
    assert report.replayed == 2
    closed = DeadLetter.objects.filter(state="replayed").order_by("id")
    assert list(closed) == letters[:2]
    # And a second run continues
    assert dead_letters.replay(EVERYTHING, limit=2).replayed == 2


def test_letters_that_die_again_meanwhile_wait_for_the_next_run(memory):
    """The run ends even if every replay fails at once."""
    # Given
    DeadLetterFactory.create_batch(3)

    def die_again(letters):
        DeadLetterFactory.create_batch(len(letters))

    # When
    report = dead_letters.replay(EVERYTHING, on_changed=die_again)
    # Then
    assert report.replayed == 3
    assert DeadLetter.objects.filter(state="open").count() == 3


def test_the_rate_spreads_replays_evenly(memory, monkeypatch):
    # Given
    clock = itertools.count(0, 0)
    slept = []
    monkeypatch.setattr(rows.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(rows.time, "sleep", slept.append)
    DeadLetterFactory.create_batch(3)
    # When
    dead_letters.replay(EVERYTHING, rate=2)
    # Then
    assert slept == [0.5, 1.0]


def test_the_slowest_rate_waits_as_long_as_it_says(memory, monkeypatch):
    slept = []
    monkeypatch.setattr(rows.time, "sleep", slept.append)
    DeadLetterFactory.create_batch(2)
    dead_letters.replay(EVERYTHING, rate=rows.RATE_MIN)
    assert slept == [pytest.approx(100, rel=0.01)]


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize(
    "rate", [0, -1, 5e-324, 1e-300, 0.0099, 100_001, float("inf"), float("nan"), True]
)
def test_an_absurd_rate_is_refused_and_the_bounds_are_told(rate, dry_run):
    told = r"The rate must be a number from 0\.01 to 100,000 a second, not "
    with pytest.raises(ValueError, match=told):
        dead_letters.replay(EVERYTHING, rate=rate, dry_run=dry_run)
    with pytest.raises(ValueError, match=told):
        TopicReplay("shop-dlq", rate=rate, dry_run=dry_run)


@pytest.mark.parametrize(
    "selection",
    [
        {"queue": "emails"},
        {"handler": "tests.mail"},
        {"reason": "fatal"},
        {"error": "REFUSED"},
        {"error": "connectionerror"},
        {"fingerprint": "f00"},
        {"since": timezone.now() - timedelta(hours=2)},
    ],
)
def test_filters_select_by_what_letters_say(selection):
    # Given
    wanted = DeadLetterFactory(
        queue="emails",
        handler="tests.mail",
        reason="fatal",
        error="connection refused",
        error_type="ConnectionError",
        fingerprint="f00",
    )
    DeadLetterFactory(failed_at=timezone.now() - timedelta(days=1))
    DeadLetterFactory(discarded=True, queue="emails", handler="tests.mail", reason="fatal")
    # When, then
    assert list(dead_letters.select(DeadLetterFilter(**selection))) == [wanted]


def test_filters_select_by_id_and_until():
    old = DeadLetterFactory(failed_at=timezone.now() - timedelta(days=1))
    new = DeadLetterFactory()
    until = timezone.now() - timedelta(hours=1)
    assert list(dead_letters.select(DeadLetterFilter(until=until))) == [old]
    assert list(dead_letters.select(DeadLetterFilter(ids=[str(new.pk)]))) == [new]


@pytest.mark.promise("replay")
def test_discarding_closes_with_a_note_and_tells_once_committed(
    hear, django_capture_on_commit_callbacks
):
    # Given
    heard = hear("message_discarded")
    letter = DeadLetterFactory()
    DeadLetterFactory(discarded=True)
    # When
    with django_capture_on_commit_callbacks(execute=True):
        count = dead_letters.discard(DeadLetter.objects.all(), note="a test order", actor="ann")
    # Then
    assert count == 1
    (told,) = heard
    assert (told["dead_letter_id"], told["note"]) == (str(letter.pk), "a test order")
    letter.refresh_from_db()
    assert letter.state == DeadLetterState.DISCARDED
    assert letter.note == "a test order (ann)"
    # And a discarded letter is not replayed
    assert dead_letters.replay(EVERYTHING).matched == 0


def test_discarding_needs_a_note():
    with pytest.raises(ValueError, match="note"):
        dead_letters.discard(EVERYTHING, note=" ")


def test_a_job_that_moves_on_before_it_is_locked_is_left_alone(memory, monkeypatch):
    """Or what has completed would run again."""
    letter = DeadLetterFactory(of_job=True)
    take = jobs.lock_jobs

    def late(keys):
        Job.objects.update(state="completed")
        return take(keys)

    monkeypatch.setattr(jobs, "lock_jobs", late)
    report = dead_letters.edit_and_replay(letter.pk, b'{"a": 2}')
    assert dict(report.refused) == {"the job is completed": 1}
    job = Job.objects.get()
    assert (job.state, job.generation, bytes(job.payload)) == ("completed", 1, b'{"a": 1}')


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite locks the whole database
def test_an_edited_replay_waits_for_nobody_who_holds_the_job():
    """Who requeues the job holds its row and waits for the letter: a deadlock otherwise."""
    letter = DeadLetterFactory(of_job=True)
    with row_locked(letter.job_id, "FOR NO KEY UPDATE"):
        report = dead_letters.edit_and_replay(letter.pk, b'{"a": 2}')
        assert dict(report.refused) == {"the job is processing": 1}


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite's integers have 64 bits
def test_a_count_of_replays_made_up_by_others_leaves_room_to_count_on(settings):
    """Or its dead letter is published at every try, and never closed."""
    settings.KJO = KJO | MEMORY
    bench = Bench()
    bench.publish(b"{broken", kjo_id="1", kjo_type="t", kjo_replay_count=b"2147483647")
    bench.run()
    assert DeadLetter.objects.count() == 1
    assert dead_letters.replay(EVERYTHING, force=True).replayed == 1
    bench.close()


# --- By kind of error, counted and foreseen within bounds -----------------------------------------


NOW = timezone.now()


def letters(fingerprint: str, count: int, **columns) -> list[DeadLetter]:
    return [DeadLetterFactory(fingerprint=fingerprint, **columns) for _ in range(count)]


def test_a_group_tells_since_when_in_which_releases_and_how_often_it_came_back():
    # Given
    for number, release in enumerate(["1", "", "2", "2", "3"]):
        DeadLetterFactory(
            fingerprint="often",
            release=release,
            error=f"error {number}",
            replay_count=number % 2,
            failed_at=NOW - timedelta(minutes=9 - number),
        )
    letters("once", 1)
    # When
    often, once = error_groups()
    # Then
    assert (often.fingerprint, often.count, often.error) == ("often", 5, "error 4")
    assert (often.first_failed_at, often.last_failed_at) == (
        NOW - timedelta(minutes=9),
        NOW - timedelta(minutes=5),
    )
    assert often.releases == ("3", "2", "1")
    assert often.replayed_count == 2
    assert (once.count, once.releases, once.replayed_count) == (1, (), 0)


def test_five_releases_of_a_group_are_told_at_most():
    for number in range(7):
        letters("often", 1, release=f"r{number}")
    assert error_groups()[0].releases == ("r6", "r5", "r4", "r3", "r2")


def test_groups_are_those_of_the_newest_letters_and_of_the_selection(monkeypatch):
    # Given
    letters("old", 3, queue="emails")
    letters("new", 2)
    # Then
    found = [group.fingerprint for group in error_groups(DeadLetterFilter(queue="emails"))]
    assert found == ["old"]
    monkeypatch.setattr(fingerprints, "COUNT_LIMIT", 3)
    assert [(g.fingerprint, g.count) for g in error_groups()] == [("new", 2), ("old", 1)]


@pytest.mark.parametrize("keys", [MEMORY, {}], ids=["memory", "database"])
def test_different_errors_of_one_place_are_two_groups_and_replayed_apart(
    keys, settings, forgotten_definitions
):
    # Given a handler with one place that raises for every answer of its bank
    settings.KJO = KJO | keys

    @job(name="tests.charge", queue="ledger", max_attempts=1)
    def charge(answer: str) -> None:
        raise ValueError(answer)

    bench = Bench()
    for answer in ("card declined: no. 1", "502 Bad Gateway", "card declined: no. 2"):
        charge.enqueue(answer=answer)
    # When
    bench.run_until_done()
    bench.close()
    declined, broken = error_groups()
    # Then
    assert (declined.count, declined.error) == (2, "card declined: no. 2")
    assert (broken.count, broken.error) == (1, "502 Bad Gateway")
    assert dead_letters.replay(DeadLetterFilter(fingerprint=broken.fingerprint)).replayed == 1
    assert error_groups() == [declined]


def test_a_group_is_resolved_by_discarding_it_with_a_note():
    # Given
    letters("known", 3)
    letters("other", 1)
    # When
    assert dead_letters.discard(DeadLetterFilter(fingerprint="known"), note="fixed in 2") == 3
    # Then
    assert [group.fingerprint for group in error_groups()] == ["other"]
    closed = DeadLetter.objects.filter(fingerprint="known")
    assert set(closed.values_list("state", "note")) == {("discarded", "fixed in 2")}


def test_a_preview_is_bounded_and_tells_what_has_taken_effect():
    # Given
    done = DeadLetterFactory(message_id="done")
    ProcessedEventFactory(event_id="done", event_type=done.handler, service_name="tests")
    letters("a", 2)
    # When
    report = dead_letters.preview(DeadLetterFilter(), limit=2)
    # Then
    assert (report.matched, report.already_processed, report.is_capped) == (2, 1, True)
    assert report.refused == {"already processed": 1}
    whole = dead_letters.preview(DeadLetterFilter())
    assert (whole.matched, whole.is_capped) == (3, False)
    assert dead_letters.replay(DeadLetterFilter(), dry_run=True, limit=None).matched == 3
    assert DeadLetter.objects.filter(state="open").count() == 3
