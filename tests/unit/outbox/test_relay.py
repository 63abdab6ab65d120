"""The relay: committed jobs reach their topic, in order, however often something dies."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise

import pytest
from django.core.management import call_command
from django.db import OperationalError, connection, connections, transaction
from django.utils import timezone

from kjo_django.clock import Clock
from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import RELAY_CHANNEL, record_of, store_record, wake
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.messages import headers as names
from kjo_django.models import ORIGIN_ID, DeadLetter, Job, JobFailure, transition
from kjo_django.operations.dead_letters import replay
from kjo_django.operations.jobs import requeue
from kjo_django.outbox import relay as relays
from kjo_django.outbox import unpublishable
from kjo_django.outbox.relay import LEASE_TTL, Publications, Relay, lease_of
from kjo_django.runtime import current_runtime, get_coordination, get_transport
from kjo_django.store import store_for
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord, Published
from tests.clocks import set_now
from tests.factories import JobFactory
from tests.ledger.jobs import always_fails, write, write_keyed
from tests.ledger.models import Entry
from tests.unit.deliveries import KJO, MEMORY, Bench, make_everything_due, row_locked
from tests.waiting import PATIENCE

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time

KINDS = {**KJO, **MEMORY, "QUEUES": {"ledger": {}, "other": {}}, "POLL_INTERVAL": 3600}


@pytest.fixture
def _memory(settings, real_database):
    settings.KJO = KINDS


@pytest.fixture
def relay(_memory):
    return Relay()


@pytest.fixture
def alone(settings, sqlite_file):
    """The relay on a SQLite file only."""
    settings.KJO = KINDS
    return Relay()


def published(topic: str = "ledger") -> list[bytes]:
    return [record.value for record in get_transport().records(topic)]


def around_publishing(monkeypatch, *, before=lambda: None, after=lambda: None) -> None:
    """Have the transport do something before it takes records, and after."""
    transport = get_transport()
    publish = transport.publish

    def surrounded(records):
        before()
        answers = publish(records)
        after()
        return answers

    monkeypatch.setattr(transport, "publish", surrounded)


def jobs(**state) -> list[Job]:
    return list(Job.objects.filter(**state).order_by("id"))


# --- One batch ------------------------------------------------------------------------------------


def test_due_jobs_are_published_and_where_each_went_is_recorded(relay):
    # Given
    write.enqueue_many([{"job": str(n)} for n in range(3)])
    # When
    count = relay.publish_due()
    # Then
    assert count == relay.published_count == 3
    assert published() == [b'{"job":"0"}', b'{"job":"1"}', b'{"job":"2"}']
    for number, job in enumerate(jobs()):
        assert (job.state, job.topic, job.partition, job.offset) == ("queued", "ledger", 0, number)
        assert job.queued_at is not None
    assert relay.publish_due() == 0


def test_a_job_that_is_not_due_waits(alone):
    write.using(delay=timedelta(minutes=5)).enqueue(job="later")
    assert alone.publish_due() == 0
    make_everything_due()
    assert alone.publish_due() == 1


def test_jobs_go_out_in_the_order_they_fall_due(alone):
    # Given: enqueued in another order
    now = timezone.now()
    for number in (3, 1, 2):
        due = now - timedelta(minutes=10 - number)
        write_keyed.using(run_at=due).enqueue(job=str(number), key="k")
    # When
    alone.publish_due()
    # Then
    assert [value[8:9] for value in published()] == [b"1", b"2", b"3"]


def test_a_batch_is_no_larger_than_the_setting(alone, settings):
    settings.KJO = {**KINDS, "RELAY_BATCH_SIZE": 2}
    write.enqueue_many([{"job": str(n)} for n in range(3)])
    relay = Relay(["ledger", "other"])
    assert [relay.publish_due(), relay.publish_due(), relay.publish_due()] == [2, 1, 0]


@pytest.mark.usefixtures("alone")
def test_a_batch_has_no_more_bytes_than_the_setting_but_one_row_of_any_size(settings):
    # Given jobs of 422 bytes, and one that is larger than a batch
    settings.KJO = {**KINDS, "RELAY_BATCH_BYTES": 1000}
    for number in range(3):
        write.enqueue(job=str(number), note="x" * 400)
    write.enqueue(job="3", note="y" * 5000)
    write.enqueue(job="4")
    relay = Relay(["ledger", "other"])
    # When, then: no row follows the one that reaches the limit
    assert [relay.publish_due() for _ in range(4)] == [3, 1, 1, 0]
    # And what was loaded by itself is whole
    found = [json.loads(value) for value in published()]
    assert [each["job"] for each in found] == ["0", "1", "2", "3", "4"]
    assert found[3]["note"] == "y" * 5000


@pytest.mark.usefixtures("alone")
def test_a_batch_that_is_full_of_bytes_is_followed_by_the_next_at_once(settings):
    settings.KJO = {**KINDS, "RELAY_BATCH_BYTES": 1000}
    write.enqueue_many([{"job": str(n), "note": "x" * 400} for n in range(5)])
    relay = Relay(["ledger", "other"])
    relay.call()
    assert relay.step() == 0
    assert relay.step() > 0
    assert relay.published_count == 5


@pytest.mark.usefixtures("alone")
def test_a_backlog_of_large_payloads_does_not_hold_up_what_comes_for_another_queue(settings):
    settings.KJO = {**KINDS, "RELAY_BATCH_BYTES": 1000}
    write.enqueue_many([{"job": str(n), "note": "x" * 400} for n in range(9)])
    write.using(queue="other").enqueue(job="other")
    # When
    assert Relay(["ledger", "other"]).publish_due() == 4
    # Then
    assert [json.loads(value)["job"] for value in published("other")] == ["other"]
    assert len(published()) == 3


def numbered(queue: str, count: int, age: timedelta = timedelta(0)) -> None:
    """Enqueue jobs of a queue, due for so long."""
    due = timezone.now() - age
    for number in range(count):
        run_at = due + timedelta(microseconds=number)
        write.using(queue=queue, run_at=run_at).enqueue(job=f"{queue} {number}")


@pytest.fixture
def small_batches(relay, settings):
    settings.KJO = {**KINDS, "RELAY_BATCH_SIZE": 10}


@pytest.mark.usefixtures("small_batches")
def test_a_queues_backlog_does_not_hold_up_what_comes_for_another():
    # Given a backlog of one queue, and after it jobs of another
    numbered("ledger", 40, timedelta(minutes=5))
    numbered("other", 3)
    # When
    Relay(["ledger", "other"]).publish_due()
    # Then the first batch has both, in their order
    names_of = [json.loads(value)["job"] for value in published("other")]
    assert names_of == ["other 0", "other 1", "other 2"]
    assert [json.loads(value)["job"] for value in published()] == [f"ledger {n}" for n in range(10)]


@pytest.mark.usefixtures("small_batches")
def test_a_queue_gets_its_share_though_its_own_oldest_rows_are_in_the_backlog():
    # Given few rows of a queue among many of another, and some behind them
    numbered("ledger", 20, timedelta(minutes=10))
    numbered("other", 1, timedelta(minutes=11))
    numbered("ledger", 20, timedelta(minutes=5))
    numbered("other", 9)
    # When
    relay = Relay(["ledger", "other"])
    relay.publish_due()
    # Then: a third, beside the queue of records for others
    assert len(published("other")) == 3
    # And nothing goes out twice, nor is anything left
    while relay.publish_due():
        pass
    assert len(published("other")) == 10
    assert len(published()) == 40


@pytest.mark.usefixtures("small_batches")
def test_a_backlog_alone_is_seldom_looked_behind(monkeypatch):
    """Each look is a statement for each queue."""
    # Given
    monkeypatch.setattr(relays, "ASK_OVERTAKEN", 60)
    looks = []
    store = type(store_for("default"))
    look = store.due_jobs_of
    monkeypatch.setattr(store, "due_jobs_of", lambda *args: looks.append(args[1]) or look(*args))
    numbered("ledger", 60)
    # When
    relay = Relay(["ledger", "other"])
    while relay.publish_due():
        pass
    # Then
    assert len(published()) == 60
    assert sorted(looks) == ["other", "outgoing"]


@pytest.mark.large
def test_what_is_due_of_one_queue_is_read_by_its_index(postgres):
    """Also where PostgreSQL does not know yet how much of it there is."""
    # Given statistics from before the backlog
    seen = []

    def explain(execute, sql, params, many, context):
        with connection.connection.cursor() as cursor:
            cursor.execute(f"EXPLAIN (FORMAT JSON) DECLARE look CURSOR FOR {sql}", params)
            seen.append(str(cursor.fetchone()[0]))
        return execute(sql, params, many, context)

    Job.objects.bulk_create(JobFactory.build(queue="a backlog") for _ in range(500))
    for known in (300, 2000):
        Job.objects.bulk_create(JobFactory.build(queue="ledger") for _ in range(known))
        with connection.cursor() as cursor:
            cursor.execute("ANALYZE kjo_job")
        # When
        with connection.execute_wrapper(explain):
            assert len(store_for("default").due_jobs_of("ledger", 100)) == 100
    # Then
    assert all("kjo_job_queue_due_idx" in plan and "'Sort'" not in plan for plan in seen), seen
    assert len(seen) == 2


def test_it_looks_after_its_own_queues_only(alone):
    write.enqueue(job="a")
    write.using(queue="other").enqueue(job="b")
    assert Relay(["other"]).publish_due() == 1
    assert published("ledger") == []
    assert len(published("other")) == 1


def test_a_transactional_transport_needs_no_relay(settings, sqlite_file):
    settings.KJO = KJO
    assert Relay().queues == []


def test_results_and_errors_are_not_read_for_it(alone):
    JobFactory(queue="ledger", state="failing", attempts=1, error="x" * 500, result=b"y")
    alone.publish_due()
    record = get_transport().records("ledger")[0]
    assert record.headers[names.ATTEMPT] == b"2"


@pytest.mark.usefixtures("relay")
def test_what_was_published_and_not_noted_yet_is_left_out():
    # Given
    write.using(headers={"a": "b"}).enqueue(job="first")
    write.enqueue(job="second")
    first, second = jobs()
    # When, then
    store = store_for("default")
    assert [each.id for each in store.due_jobs(["ledger"], 10, [first.pk])] == [second.pk]
    assert store.next_due(["ledger"], [first.pk]) == second.available_at
    assert store.next_due(["other"]) is None
    (found,) = store.due_jobs(["ledger"], 1)
    assert (found.id, found.headers, found.payload) == (first.pk, {"a": "b"}, first.payload)


@pytest.mark.large
@pytest.mark.parametrize(
    "ask", [lambda store: store.due_jobs(["ledger"], 10), lambda store: store.next_due(["ledger"])]
)
def test_given_a_backlog_when_a_batch_is_asked_for_then_no_more_of_it_is_read(postgres, ask):
    """Sorted as a whole for each batch, a backlog of a million took its square to publish."""
    # Given
    Job.objects.bulk_create(JobFactory.build(queue="ledger") for _ in range(2000))
    plans = []

    def explain(execute, sql, params, many, context):
        execute(f"EXPLAIN (ANALYZE, FORMAT JSON) {sql}", params, many, context)
        plans.append(context["cursor"].fetchone()[0][0]["Plan"])
        return execute(sql, params, many, context)

    with connection.cursor() as cursor:
        cursor.execute("ANALYZE kjo_job")
    # When
    with connection.execute_wrapper(explain):
        assert ask(store_for("default"))
    # Then
    (plan,) = plans
    (scan,) = plan["Plans"]
    assert scan["Node Type"] == "Index Scan", plan
    assert scan["Actual Rows"] <= 10


def test_a_note_leaves_the_durability_of_others_alone(postgres, settings):
    """A note does not wait for the disk. What else its connection writes does."""

    def durability():
        with connection.cursor() as cursor:
            cursor.execute("SHOW synchronous_commit")
            return cursor.fetchone()[0]

    # Given
    settings.KJO = KINDS
    relay = Relay()
    # When, then: in a transaction of its own, and inside somebody's
    write.enqueue(job="alone")
    assert relay.publish_due() == 1
    assert durability() == "on"
    with transaction.atomic():
        write.enqueue(job="inside")
        assert relay.publish_due() == 1
        assert durability() == "on"
    assert [job.state for job in jobs()] == ["queued", "queued"]


def test_a_message_is_made_of_the_row_as_of_its_instance(relay, monkeypatch):
    # Given rows of every kind
    foreign = {ORIGIN_ID: "their-1", "traceparent": "00-é\t\\", "raw": {"base64": "AP8="}}
    JobFactory(queue="ledger", key="a\tk\\ey\n", payload=bytes(range(256)))
    JobFactory(queue="ledger", generation=3, state="failing", attempts=2, headers=foreign)
    JobFactory(queue="ledger", generation=2, headers={})
    JobFactory(queue="other", destination="elsewhere", headers={names.RAW_KEY: {"base64": "AP8="}})
    JobFactory(queue="other", destination="elsewhere", key="k")
    conf = get_settings()
    expected = {job.pk: record_of(job, conf.queue(job.queue)) for job in jobs()}
    sent: list[OutgoingRecord] = []
    publish = get_transport().publish
    monkeypatch.setattr(
        get_transport(), "publish", lambda records: sent.extend(records) or publish(records)
    )
    # When
    assert relay.publish_due() == 5
    # Then
    assert sent == [expected[job.pk] for job in jobs()]
    assert [job.state for job in jobs()] == ["queued"] * 3 + ["completed"] * 2


def test_a_transport_may_tell_no_places(relay, monkeypatch):
    # Given
    write.enqueue_many([{"job": "a"}, {"job": "b"}])
    JobFactory(queue="ledger", destination="elsewhere")
    monkeypatch.setattr(get_transport(), "publish", lambda records: [Published() for _ in records])
    # When
    relay.publish_due()
    # Then
    assert [job.state for job in jobs()] == ["queued", "queued", "completed"]
    assert {(job.partition, job.offset) for job in jobs()} == {(None, None)}
    assert [job.topic for job in jobs()] == ["ledger", "ledger", "elsewhere"]


@pytest.mark.parametrize(
    ("meanwhile", "state"), [(None, "queued"), ("cancel", "cancelled"), ("delete", None)]
)
def test_a_row_that_is_locked_is_noted_when_it_is_free(postgres, settings, meanwhile, state):
    """A consumer that was quicker than the note has the row locked while its job runs."""
    # Given
    settings.KJO = {**KINDS, "POLL_INTERVAL": 0.2}
    relay = Relay()
    write.enqueue(job="a")
    locked, may_end = threading.Event(), threading.Event()

    def run_the_job():
        with transaction.atomic():
            row = Job.objects.filter(pk=jobs()[0].pk)
            row.select_for_update().get()
            locked.set()
            may_end.wait(PATIENCE)
            if meanwhile == "cancel":
                transition("cancel", row)
            elif meanwhile == "delete":
                row.delete()
        connection.close()

    consumer = threading.Thread(target=run_the_job)
    consumer.start()
    assert locked.wait(PATIENCE)
    # When it is published, then it is neither waited for nor published again
    assert relay.publish_due() == 1
    assert jobs()[0].state == "pending"
    assert relay.publish_due() == 0
    # And when it is free
    may_end.set()
    consumer.join(PATIENCE)
    running = threading.Thread(target=relay.run)
    running.start()
    assert eventually(lambda: not relay._publications.unrecorded)
    relay.stop()
    running.join(PATIENCE)
    # Then
    assert [job.state for job in jobs()] == ([state] if state else [])
    assert len(published()) == 1


def test_a_job_whose_row_was_locked_is_published_again_though_calls_never_cease(postgres, settings):
    """Its next attempt, or here its next generation, does not wait for a quiet moment."""
    # Given a job that ran when it was to be noted where it went
    settings.KJO = KINDS
    relay = Relay()
    write.enqueue(job="first")
    with row_locked(jobs()[0].pk):
        assert relay.publish_due() == 1
    # When it is to run again, and others are enqueued all the time
    assert requeue(Job.objects.all()).changed_count == 1
    for number in range(100):
        write.enqueue(job=str(number))
        relay.call()
        relay.step()
        if published().count(b'{"job":"first"}') == 2:
            break
        time.sleep(0.01)  # sleep: until the next of a hundred turns
    # Then
    assert published().count(b'{"job":"first"}') == 2


def test_what_cannot_be_noted_is_noted_later_and_not_published_again(alone, failing):
    """A database that is locked, or away, while the relay has its messages out."""
    # Given
    failing(type(store_for("default")), "record_published", OperationalError("database is locked"))
    write.enqueue(job="a")
    # When
    with pytest.raises(OperationalError):
        alone.publish_due()
    # Then
    assert alone.publish_due() == 0
    alone._publications.record_missing()
    assert [job.state for job in jobs()] == ["queued"]
    assert len(published()) == 1


def test_records_for_others_go_out_once_though_the_database_refuses_their_note(alone, failing):
    """Who reads them may have no marker that tells a second copy."""
    # Given
    locked = OperationalError("database is locked")
    failing(type(store_for("default")), "complete_forwarded", locked, locked)
    JobFactory(queue="ledger", destination="elsewhere")
    # When
    with pytest.raises(OperationalError):
        alone.publish_due()
    assert alone.publish_due() == 0
    assert alone.step() > 0
    assert store_for("default").next_due(["ledger"], alone._publications.unrecorded) is None
    alone._publications.record_missing()
    # Then
    assert [job.state for job in jobs()] == ["completed"]
    assert len(published("elsewhere")) == 1
    assert not alone._publications.unrecorded


@pytest.mark.usefixtures("_memory")
@pytest.mark.parametrize(("handler", "state"), [(write, "completed"), (always_fails, "failing")])
def test_a_job_that_ends_before_it_is_recorded_says_itself_where_it_was(
    handler, state, monkeypatch
):
    # Given a relay that died when its message was out
    handler.enqueue(job="a")
    with monkeypatch.context() as patch:
        patch.setattr(Publications, "record", die)
        with pytest.raises(Died):
            Relay().publish_due()
    # When
    bench = Bench()
    bench.run([bench.read(record) for record in bench.subscription.poll(1, 5.0)])
    bench.close()
    # Then
    (job,) = jobs(state=state)
    assert (job.topic, job.partition, job.offset) == ("ledger", 0, 0)
    assert job.created_at <= job.queued_at <= timezone.now()


def test_a_relay_that_is_stopped_within_a_backlog_has_recorded_all_it_sent(
    relay, small_batches, monkeypatch
):
    # Given
    numbered("ledger", 30)
    relay = Relay(["ledger"])
    around_publishing(monkeypatch, before=relay.stop)
    # When
    running = threading.Thread(target=relay.run)
    running.start()
    running.join(PATIENCE)
    # Then
    assert not running.is_alive()
    assert [job.state for job in jobs()] == ["queued"] * 10 + ["pending"] * 20


# --- Step by step ---------------------------------------------------------------------------------


class VirtualClock(Clock):
    """A clock that stands still until it is set on."""

    passed = 0.0

    def __init__(self) -> None:
        self.began = timezone.now()

    def now(self):
        return self.began + timedelta(seconds=self.passed)

    def monotonic(self) -> float:
        return 1000 + self.passed


@pytest.fixture
def clock(_memory, monkeypatch):
    clock = VirtualClock()
    set_now(monkeypatch, clock.now)
    monkeypatch.setattr(get_coordination(), "clock", clock)
    return clock


def at(clock: Clock) -> Relay:
    return Relay(["ledger"], runtime=replace(current_runtime(), clock=clock))


def test_any_number_of_relays_are_driven_step_by_step_in_virtual_time(clock):
    # Given two relays, and jobs that fall due one after the other, the last in three hours
    one, two = at(clock), at(clock)
    for number in range(4):
        write.using(delay=timedelta(hours=number)).enqueue(job=str(number))
    # When each does its rounds until it wants none before the next job is due
    asked_for = 0.0
    while Job.objects.filter(state="pending").exists():
        asked_for = min(one.step(), two.step())
        clock.passed += asked_for or 0.001
    # Then each job went out once, by the one that has the lease
    assert published() == [b'{"job":"%d"}' % number for number in range(4)]
    assert {one.published_count, two.published_count} == {0, 4}
    assert 3 * 3600 <= clock.passed < 3 * 3600 + 10


def test_what_a_relay_has_published_is_recorded_before_it_does_anything_else(clock):
    """A worker that gets the message locks the row until its handler ends: recorded later, the job
    would be pending all that time, and what looks for a relay that lags would find it."""
    # Given
    relay = at(clock)
    write.enqueue(job="a")
    # When
    relay.call()
    relay.step()
    # Then
    assert published() == [b'{"job":"a"}']
    assert Job.objects.get().state == "queued"
    assert not relay._publications.unrecorded


def test_after_an_outage_a_relay_waits_longer_each_time_though_it_is_called(clock, monkeypatch):
    # Given
    relay, tries = at(clock), []

    def fail(self, queues):
        tries.append(clock.passed)
        raise OperationalError("database away")

    with monkeypatch.context() as patch:
        patch.setattr(Relay, "publish_due", fail)
        # When
        while len(tries) < 7:
            relay.call()
            clock.passed += relay.step()
    # Then
    assert [after - before for before, after in pairwise(tries)] == [0.25, 0.5, 1, 2, 4, 5]
    # And once it is back
    write.enqueue(job="a")
    clock.passed += 5
    relay.step()
    assert len(published()) == 1


@pytest.mark.parametrize("way", ["raised", "answered"])
def test_what_a_transport_refuses_is_tried_again_when_its_wait_is_over(clock, monkeypatch, way):
    """Nobody calls the relay then, and its next look may be an hour away."""
    # Given
    relay, tries = at(clock), []
    relay._settings = replace(relay._settings, poll_interval=timedelta(hours=1))

    def refuse(records):
        tries.append(clock.passed)
        if way == "raised":
            raise PublishError("the broker is away")
        return [Published(error="the broker is away") for _ in records]

    write.enqueue(job="a")
    monkeypatch.setattr(get_transport(), "publish", refuse)
    # When
    relay.call()
    while len(tries) < 7:
        clock.passed += relay.step()
    # Then
    waits = [round(after - before, 2) for before, after in pairwise(tries)]
    assert waits == pytest.approx([1, 2, 4, 8, 16, 30], abs=0.1)


def test_a_relay_whose_lease_lapsed_since_it_read_its_batch_leaves_it_to_the_next(
    clock, monkeypatch
):
    """Nobody drops a second copy of a record for others."""
    # Given a relay that is held up for longer than its lease lives, after it has read what is due
    one, two, held_up = at(clock), at(clock), []
    store = type(store_for("default"))
    due_jobs = store.due_jobs

    def read_and_hold_up(*args):
        found = due_jobs(*args)
        if not held_up:
            held_up.append(True)
            clock.passed += LEASE_TTL.total_seconds() + 1
            two.call()
            two.step()
        return found

    monkeypatch.setattr(store, "due_jobs", read_and_hold_up)
    write.enqueue(job="a")
    # When
    one.call()
    one.step()
    # Then
    assert len(published()) == 1
    assert (one.published_count, two.published_count) == (0, 1)


def test_a_relay_that_has_yet_to_record_what_it_published_keeps_its_lease_for_two_minutes(
    clock, monkeypatch
):
    # Given a relay that the database refuses to record what it has published
    one, two = at(clock), at(clock)

    def refuse(*args):
        raise OperationalError("away")

    monkeypatch.setattr(type(store_for("default")), "record_published", refuse)
    write.enqueue(job="a")
    one.call()
    one.step()
    # When another relay stands by, which does not know of it
    while clock.passed < 110:
        clock.passed += 3
        one.step()
        one._leases.renew()  # as its thread does
        two.call()
        two.step()
    # Then it publishes nothing twice
    assert len(published()) == 1
    # And one that never gets at the database does not keep others from their work for ever
    for _ in range(10):
        clock.passed += 3
        one._leases.renew()
    two.call()
    two.step()
    assert len(published()) == 2


# --- Refused, crashed, overtaken ------------------------------------------------------------------


def test_a_refusal_says_nothing_of_a_job_that_has_moved_on(relay, monkeypatch):
    """Another copy of its message has run meanwhile, and its retry is due at a time of its own."""
    # Given
    write.enqueue(job="a")
    due = timezone.now() + timedelta(hours=1)

    def run_and_refuse(records):
        Job.objects.update(state="failing", attempts=1, available_at=due, error="its own")
        return [Published(error="too large", is_final=True) for _ in records]

    monkeypatch.setattr(get_transport(), "publish", run_and_refuse)
    # When
    relay.publish_due()
    # Then
    (job,) = jobs()
    assert (job.state, job.available_at, job.error) == ("failing", due, "its own")


@pytest.fixture
def refuse_bad(monkeypatch, _memory):
    """The transport takes nothing with "bad" in it, for its size; until it is undone."""
    transport = get_transport()
    accept = transport.publish

    def refuse(records):
        return [
            Published(error="too large", is_final=True, is_too_large=True)
            if b"bad" in record.value
            else accept([record])[0]
            for record in records
        ]

    with monkeypatch.context() as patch:
        patch.setattr(transport, "publish", refuse)
        yield patch


def test_a_record_refused_for_good_is_a_dead_letter_and_replayed_when_it_may_be_taken(
    relay, refuse_bad, hear
):
    # Given
    write.enqueue_many([{"job": "good"}, {"job": "bad"}])
    told = []
    relay = Relay(on_error=told.append)
    failed, dead = hear("job_failed"), hear("message_dead_lettered")
    # When
    relay.publish_due()
    # Then it has failed, and everything that counts failures sees it
    good, bad = jobs()
    assert (good.state, bad.state) == ("queued", "failed")
    assert (bad.error, bad.attempts) == ("Not published: too large", 0)
    assert bad.finished_at is not None
    assert bad.result_expires_at > bad.finished_at
    (failure,) = JobFailure.objects.filter(job=bad)
    assert (failure.attempt, failure.error) == (1, bad.error)
    letter = DeadLetter.objects.get()
    assert (letter.state, letter.reason, letter.job_id) == ("open", "too_large", bad.pk)
    assert (letter.queue, letter.topic, letter.handler) == ("ledger", "ledger", write.name)
    assert bytes(letter.value) == bad.payload
    assert letter.message_id == bad.message_id
    assert told == ["too large"]
    assert [(each["job_id"], each["reason"]) for each in failed] == [(str(bad.pk), "too_large")]
    assert [each["dead_letter_id"] for each in dead] == [str(letter.pk)]
    # And it is not tried again by itself
    assert relay.publish_due() == 0
    # When the limit has been raised and it is replayed
    refuse_bad.undo()
    assert replay(DeadLetter.objects.all()).replayed == 1
    relay.publish_due()
    # Then
    assert [job.state for job in jobs()] == ["queued", "queued"]
    assert published()[-1] == bad.payload
    assert DeadLetter.objects.get().state == "replayed"


def test_the_end_of_an_outage_is_told_of_also_where_nothing_is_due(relay, monkeypatch):
    # Given a relay whose database was away for a moment
    told = []
    relay = Relay(on_error=told.append)

    def fail(*arguments):
        raise OperationalError("away")

    with monkeypatch.context() as patch:
        patch.setattr(relay.runtime.store, "next_due", fail)
        relay.step()
    assert told == ["away"]
    # When it is asked again, and nothing has to be published
    relay._failed_until = 0.0
    relay.step()
    relay.step()
    # Then
    assert told == ["away", None]


def test_an_outage_of_one_queue_does_not_end_because_another_one_is_served(relay, monkeypatch):
    # Given a transport that takes no records of one of two queues
    transport, told = get_transport(), []
    publish = transport.publish

    def refuse_other(records):
        is_refused = any(record.topic == "other" for record in records)
        return [Published(error="away")] * len(records) if is_refused else publish(records)

    relay = Relay(["ledger", "other"], on_error=told.append)
    with monkeypatch.context() as patch:
        patch.setattr(transport, "publish", refuse_other)
        write.using(queue="other").enqueue(job="refused")
        relay.publish_due()
        write.enqueue(job="taken")
        assert relay.publish_due() == 1
        assert told == ["away"]
    # When it takes them again
    relay._queue_backoff["other"] = (0.0, 1.0)
    assert relay.publish_due() == 1
    assert told == ["away", None]


def test_records_refused_for_other_reasons_are_other_kinds_of_dead_letters(relay, monkeypatch):
    texts = iter(
        ["Broker: topic 7 is unknown", "Broker: topic 8 is unknown", "Broker: not allowed"]
    )

    def refuse(records):
        return [Published(error=next(texts), is_final=True) for _ in records]

    monkeypatch.setattr(get_transport(), "publish", refuse)
    write.enqueue_many({"job": str(number)} for number in range(3))
    relay.publish_due()
    first, second, third = DeadLetter.objects.order_by("error").values_list(
        "fingerprint", flat=True
    )
    assert second == third != first


def test_a_record_for_others_that_is_refused_for_good_is_a_dead_letter_too(relay, refuse_bad):
    # Given
    row = store_record("elsewhere", value=b"bad", key=b"k", headers={"a": b"1"}, kind="an.event")
    # When
    relay.publish_due()
    # Then
    (job,) = jobs()
    assert (job.state, job.error) == ("failed", "Not published: too large")
    letter = DeadLetter.objects.get()
    assert (letter.job_id, letter.topic, letter.handler) == (row.pk, "elsewhere", "an.event")
    assert (bytes(letter.key), bytes(letter.value)) == (b"k", b"bad")
    assert names.from_json(letter.headers) == {"a": b"1"}
    # And it goes out when it is replayed once more is taken
    refuse_bad.undo()
    assert replay(DeadLetter.objects.all()).replayed == 1
    relay.publish_due()
    assert jobs()[0].state == "completed"
    assert published("elsewhere") == [b"bad"]


def test_who_waits_for_a_job_that_is_refused_is_told(relay, refuse_bad, monkeypatch):
    called = []
    monkeypatch.setattr(unpublishable, "notify_waiters", called.extend)
    write.using(headers={names.REPLY_TO: "kjo:reply:1"}).enqueue(job="bad")
    relay.publish_due()
    assert called == ["kjo:reply:1"]


@pytest.mark.parametrize("takes_effect", [True, False])
def test_a_refusal_whose_commit_had_no_answer_is_announced_if_it_took_effect(
    relay, refuse_bad, monkeypatch, hear, takes_effect
):
    # Given
    failed = hear("job_failed")
    write.enqueue(job="bad")
    commit = connection.commit
    breaks = [OperationalError("server closed the connection unexpectedly")]

    def without_an_answer():
        if not breaks or not DeadLetter.objects.exists():
            return commit()
        if takes_effect:
            commit()
        raise breaks.pop()

    monkeypatch.setattr(connections["default"], "commit", without_an_answer)
    # When
    with contextlib.nullcontext() if takes_effect else pytest.raises(OperationalError):
        relay.publish_due()
    # Then
    (bad,) = jobs()
    assert bad.state == ("failed" if takes_effect else "pending")
    assert [each["job_id"] for each in failed] == [str(bad.pk)] * takes_effect


def test_a_refused_job_that_runs_just_now_is_left_to_its_run(postgres, settings, monkeypatch):
    # Given a job whose row is locked, as by another copy of its message
    settings.KJO = KINDS
    answer = Published(error="too large", is_final=True, is_too_large=True)
    monkeypatch.setattr(get_transport(), "publish", lambda records: [answer])
    write.enqueue(job="bad")
    # When, then: the relay waits for nobody
    with row_locked(jobs()[0].pk):
        assert Relay().publish_due() == 1
        assert jobs()[0].state == "pending"
    assert DeadLetter.objects.count() == 0


def test_a_crash_between_publish_and_record_publishes_again_and_the_job_runs_once(relay):
    """Show 4; promise 1."""
    # Given
    write.enqueue(job="a")
    broken = Relay()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broken._publications, "record", die)
        with pytest.raises(Died):
            broken.publish_due()
    assert jobs()[0].state == "pending"
    # When
    relay.publish_due()
    # Then
    assert len(published()) == 2
    bench = Bench()
    bench.run()
    assert [job.state for job in jobs()] == ["completed"]
    assert Entry.objects.count() == 1
    bench.close()


class Died(BaseException):
    """The process was killed."""


def die(*args: object) -> None:
    raise Died


def test_a_job_that_has_moved_on_is_not_set_back(relay, monkeypatch):
    """It was consumed, failed and is due again before the relay wrote down its first message."""
    # Given
    always_fails.enqueue(job="a")
    now = timezone.now()
    around_publishing(
        monkeypatch,
        after=lambda: transition("retry", Job.objects.all(), attempts=1, available_at=now),
    )
    # When
    relay.publish_due()
    # Then
    (job,) = jobs()
    assert (job.state, job.attempts) == ("failing", 1), "or its second attempt would never go out"
    monkeypatch.undo()
    relay.publish_due()
    assert jobs()[0].state == "queued"
    sent = get_transport().records("ledger")
    assert [record.headers[names.ATTEMPT] for record in sent] == [b"1", b"2"]


@pytest.mark.parametrize(
    ("action", "state", "generation"),
    [
        ("complete", "completed", 1),
        ("cancel", "cancelled", 1),
        ("fail", "failed", 1),
        ("requeue", "pending", 2),
    ],
)
def test_a_job_that_has_ended_or_begun_anew_meanwhile_stays_so(
    relay, monkeypatch, action, state, generation
):
    write.enqueue(job="a")
    around_publishing(monkeypatch, after=lambda: transition(action, Job.objects.all()))
    relay.publish_due()
    assert (jobs()[0].state, jobs()[0].generation) == (state, generation)


# --- The loop -------------------------------------------------------------------------------------


class Running:
    """A relay in its thread."""

    def __init__(self, **options) -> None:
        self.errors: list[str | None] = []
        self.told = threading.Event()
        self.relay = Relay(on_error=self._hear, **options)
        self.thread = threading.Thread(target=self.relay.run, daemon=True)

    def _hear(self, error: str | None) -> None:
        self.errors.append(error)
        if error:
            self.told.set()

    def __enter__(self) -> Running:
        self.thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.relay.stop()
        self.thread.join(PATIENCE)
        assert not self.thread.is_alive()


@pytest.fixture
def arrived(alone, monkeypatch):
    """Set by the transport as soon as a record has reached it."""
    transport, event = get_transport(), threading.Event()
    publish = transport.publish

    def tell(records):
        answers = publish(records)
        if any(answer.error is None for answer in answers):
            event.set()
        return answers

    monkeypatch.setattr(transport, "publish", tell)
    return event


def test_it_publishes_what_is_there_and_what_comes(arrived):
    write.enqueue(job="before")
    with Running():
        assert arrived.wait(PATIENCE)
        arrived.clear()
        write.enqueue(job="after")  # the slow poll is an hour away: a call wakes it
        assert arrived.wait(PATIENCE)


def test_called_it_publishes_without_asking_anything_before(arrived, monkeypatch):
    """Each query and each lease asked for before the record goes out is time the job waits."""
    # Given a relay that has just published
    seen = []

    def note(owner, name, event):
        method = getattr(owner, name)

        def noting(*args):
            answer = method(*args)
            if event != "called" or answer:
                seen.append(event)
            return answer

        monkeypatch.setattr(owner, name, noting)

    note(type(store_for("default")), "next_due", "asked what is next")
    note(get_coordination(), "claim", "asked for leases")
    note(get_transport(), "publish", "published")
    note(type(get_coordination().listen([])), "wait", "called")
    monkeypatch.setattr(relays, "LEASE_TTL", timedelta(minutes=5))
    write.enqueue(job="first")
    with Running():
        assert arrived.wait(PATIENCE)
        seen.clear()
        # When
        for number in range(3):
            arrived.clear()
            write.enqueue(job=f"later {number}")
            assert arrived.wait(PATIENCE)
    # Then
    calls = [place for place, event in enumerate(seen) if event == "called"]
    assert len(calls) >= 3
    assert "asked for leases" not in seen
    assert {seen[place + 1] for place in calls} <= {"published", "called"}


def test_a_call_that_was_lost_costs_no_more_than_the_slow_poll(alone, settings, monkeypatch):
    settings.KJO = {**KINDS, "POLL_INTERVAL": 0.2}
    monkeypatch.setattr(get_coordination(), "notify", lambda channel: None)
    with Running():
        write.enqueue(job="uncalled")
        assert eventually(published)


def test_called_for_a_job_that_is_due_later_it_wakes_for_it(arrived):
    with Running():
        write.enqueue(job="now")
        assert arrived.wait(PATIENCE)
        arrived.clear()
        write.using(delay=timedelta(milliseconds=300)).enqueue(job="soon")
        assert arrived.wait(PATIENCE)


def test_it_stops_at_once_though_it_was_about_to_listen(alone, monkeypatch):
    # Given a relay that is connecting, to wait for the slow poll afterwards
    listen, begun, stopped = get_coordination().listen, threading.Event(), threading.Event()

    def slow(channels):
        begun.set()
        stopped.wait(PATIENCE)
        return listen(channels)

    monkeypatch.setattr(get_coordination(), "listen", slow)
    with Running() as running:
        assert begun.wait(PATIENCE)
        # When
        running.relay.stop()
        stopped.set()
        # Then
        running.thread.join(PATIENCE)
        assert not running.thread.is_alive()


def test_it_stops_at_once_though_it_waits(alone):
    with Running() as running:
        wake(current_runtime(), RELAY_CHANNEL)
    assert not running.thread.is_alive()
    assert get_coordination().holders([lease_of("ledger")]) == {}


def test_on_standby_it_does_nothing_until_the_lease_is_free(arrived):
    # Given: another relay that is alive
    get_coordination().claim([lease_of("ledger")], "the other", timedelta(minutes=5))
    write.enqueue(job="a")
    with Running():
        # When, then
        assert not arrived.wait(0.6)
        assert jobs()[0].state == "pending"
        # And once the other has died
        get_coordination().release([lease_of("ledger")], "the other")
        assert arrived.wait(PATIENCE)


def test_while_it_publishes_no_other_relay_takes_over(alone, monkeypatch):
    """A slow broker was sent everything by each worker in turn."""
    # Given a broker that takes its time
    lifetime = timedelta(seconds=1)
    monkeypatch.setattr(relays, "LEASE_TTL", lifetime)
    begun, may_end = threading.Event(), threading.Event()
    around_publishing(monkeypatch, before=lambda: begun.set() or may_end.wait(PATIENCE))
    write.enqueue(job="a")
    with Running():
        assert begun.wait(PATIENCE)
        (token,) = get_coordination().holders([lease_of("ledger")]).values()
        # When a lease has ended three times over
        ended = time.monotonic() + 3 * lifetime.total_seconds()
        # Then it has been the same relay's all the time
        while time.monotonic() < ended:  # timed loop: nothing else tells that a lease would be over
            assert get_coordination().holders([lease_of("ledger")]) == {lease_of("ledger"): token}
            time.sleep(0.05)  # sleep: until the next look
        may_end.set()
        assert eventually(lambda: jobs()[0].state == "queued")


def test_a_relay_that_hangs_loses_its_leases(alone, monkeypatch):
    monkeypatch.setattr(relays, "LEASE_TTL", timedelta(seconds=0.5))
    monkeypatch.setattr(relays, "LONGEST_BATCH", timedelta(seconds=0.1))
    may_end = threading.Event()
    monkeypatch.setattr(get_transport(), "publish", lambda records: may_end.wait(PATIENCE) and [])
    write.enqueue(job="a")
    with Running():
        assert eventually(lambda: get_coordination().holders([lease_of("ledger")]))
        assert eventually(lambda: not get_coordination().holders([lease_of("ledger")]))
        may_end.set()


def produce_once() -> str:
    try:
        out = io.StringIO()
        call_command("kjo_produce", "--once", stdout=out, stderr=out)
        return out.getvalue()
    finally:
        connection.close()


def test_two_that_publish_once_at_the_same_time_publish_each_record_once(relay, monkeypatch):
    """Who reads records for others may not know a second copy for one."""
    # Given records for others, and a broker that lets the first one wait until the second has come
    for number in range(20):
        store_record("elsewhere", value=b"%d" % number, key=b"k", headers={}, kind="an.event")
    begun, may_end = threading.Event(), threading.Event()
    around_publishing(monkeypatch, before=lambda: begun.set() or may_end.wait(PATIENCE))
    with ThreadPoolExecutor(2) as pool:
        # When
        first = pool.submit(produce_once)
        assert begun.wait(PATIENCE)
        second = pool.submit(produce_once)
        time.sleep(0.5)  # sleep: a chance to publish for the one that must not
        may_end.set()
        told = [first.result(PATIENCE), second.result(PATIENCE)]
    # Then
    assert published("elsewhere") == [b"%d" % number for number in range(20)]
    assert told == ["Published 20.\n", "Published 0.\n"]


@pytest.mark.usefixtures("alone")
def test_what_another_relay_has_is_passed_over_and_named(monkeypatch):
    # Given another relay that is alive and publishes nothing
    monkeypatch.setattr(relays, "LEASE_TTL", timedelta(seconds=0.2))
    get_coordination().claim([lease_of("ledger")], "the other", timedelta(minutes=5))
    write.enqueue(job="a")
    write.using(queue="other").enqueue(job="b")
    # When, then
    told = produce_once()
    assert told == "Published 1.\nAnother relay publishes, and was left: ledger.\n"
    assert {job.queue: job.state for job in jobs()} == {"ledger": "pending", "other": "queued"}
    # And what it holds itself, it gives back
    assert list(get_coordination().holders([lease_of("ledger"), lease_of("other")]).values()) == [
        "the other"
    ]


def test_without_coordination_every_relay_works(arrived, coordination_away):
    coordination_away("claim", "renew", "release", "listen", "notify")
    write.enqueue(job="a")
    with Running():
        assert arrived.wait(PATIENCE)


def test_a_relay_that_can_get_no_listener_works_all_the_same(arrived, monkeypatch):
    """Also where that is no outage of coordination: it has a socket of its own."""

    def refuse(channels):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(get_coordination(), "listen", refuse)
    write.enqueue(job="a")
    with Running():
        assert arrived.wait(PATIENCE)


def test_a_relay_begun_while_coordination_was_away_is_called_once_it_is_back(arrived, monkeypatch):
    """Or a deployment during an outage of Redis would cost every later job the slow poll."""
    # Given
    tries, is_back = [], threading.Event()
    listen = get_coordination().listen

    def refuse_twice(channels):
        tries.append(channels)
        if len(tries) < 3:
            raise CoordinationError("away")
        try:
            return listen(channels)
        finally:
            is_back.set()

    monkeypatch.setattr(get_coordination(), "listen", refuse_twice)
    monkeypatch.setattr(relays, "LISTEN_AGAIN", 0.05)
    with Running():
        # When
        assert is_back.wait(PATIENCE)
        write.enqueue(job="a")
        # Then
        assert arrived.wait(PATIENCE)


@pytest.mark.parametrize(
    "error",
    [PublishError("broker away"), OperationalError("database away"), ValueError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_whatever_goes_wrong_is_told_waited_out_and_survived(arrived, failing, error):
    """Promise 3: a relay that died of an error would leave every later job unpublished."""
    # Given
    failing(Relay, "publish_due", error)
    write.enqueue(job="a")
    # When
    with Running() as running:
        # Then
        assert running.told.wait(PATIENCE)
        assert running.errors[0] == str(error)
        assert arrived.wait(PATIENCE)


def test_a_queue_whose_transport_fails_holds_up_no_other(alone, monkeypatch):
    """Its rows come first each time, being the oldest."""
    # Given
    transport = get_transport()
    publish = transport.publish

    def fail_for_one(records):
        if records[0].topic == "other":
            raise ValueError("no such cache")
        return publish(records)

    monkeypatch.setattr(transport, "publish", fail_for_one)
    write.using(queue="other").enqueue(job="stuck")
    write.enqueue(job="a")
    # When
    with pytest.raises(ValueError, match="no such cache"):
        alone.publish_due()
    # Then, and it rests: others are published at once meanwhile
    assert len(published()) == 1
    write.enqueue(job="b")
    assert alone.publish_due() == 1
    assert len(published()) == 2
    assert [job.state for job in jobs()] == ["pending", "queued", "queued"]


def test_one_job_nobody_can_send_does_not_hold_up_the_others(alone, monkeypatch):
    # Given: a header no version of this package would store today
    JobFactory(queue="ledger", handler="ledger.write", headers={"trace": 1})
    write.enqueue(job="good")
    # When
    alone.publish_due()
    # Then
    bad, good = jobs()
    assert (bad.state, good.state) == ("failed", "queued")
    assert bad.error.startswith("Not published: ")
    letter = DeadLetter.objects.get()
    assert (letter.reason, letter.job_id) == ("fatal", bad.pk)
    assert bytes(letter.value) == bad.payload
    assert "Traceback" in letter.traceback


def test_relays_of_different_queues_do_not_wait_for_one_another(arrived):
    # Given: the relay of another queue, alive and well
    get_coordination().claim([lease_of("another")], "the other", timedelta(minutes=5))
    write.enqueue(job="a")
    # When, then
    with Running():
        assert arrived.wait(PATIENCE)


def test_a_queue_whose_records_are_not_taken_rests_and_keeps_its_order(relay, monkeypatch):
    """Rows delayed one by one would be overtaken by later ones of their keys."""
    # Given
    write_keyed.enqueue_many([{"job": name, "key": "k"} for name in ("first", "second")])
    with monkeypatch.context() as patch:
        patch.setattr(
            get_transport(),
            "publish",
            lambda records: [Published(error="timed out")] * len(records),
        )
        # When the broker does not take them in time
        due = [job.available_at for job in jobs()]
        assert relay.publish_due() == 2
        # Then they stay as they are, and their queue is left alone for a while
        assert [job.available_at for job in jobs()] == due
        assert [job.state for job in jobs()] == ["pending", "pending"]
        assert relay.publish_due() == 0
    # And afterwards they go out before what came later
    write_keyed.enqueue(job="third", key="k")
    relay._queue_backoff.pop("ledger")
    assert relay.publish_due() == 3
    assert [job.state for job in jobs()] == ["queued"] * 3
    found = [json.loads(value)["job"] for value in published()]
    assert found == ["first", "second", "third"]
