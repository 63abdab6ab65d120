"""An item's way: claimed, processed, completed, and not run twice."""

from __future__ import annotations

import sqlite3
import threading
import time
from contextlib import closing
from datetime import timedelta

import pytest
from django.db import connection

from kjo_django import AbstractConsumer
from kjo_django.exceptions import RateLimitExceededError
from kjo_django.models import DeadLetter, Job, JobFailure, ProcessedEvent
from kjo_django.runtime import get_coordination
from tests.items.models import Item, Run
from tests.unit.deliveries import Bench
from tests.unit.patterns.items.made import Producer, consumer, send, settled, work
from tests.waiting import PATIENCE, wait_until

pytestmark = [
    pytest.mark.medium,
    pytest.mark.usefixtures("forgotten_definitions"),
]  # threads and waits of a worker, in real time


def test_an_item_is_processed_and_completed(quick):
    """KJO-36 … 39, KJO-43, KJO-47, KJO-64."""
    made = consumer(completed_at_field="completed_at")
    item = Item.objects.create()
    send(item)
    worker = work()
    item.refresh_from_db()
    assert (item.state, made.told) == (2, [("success", str(item.pk))])
    assert item.completed_at is not None
    assert worker.statistics.processed == 1
    assert list(get_coordination().names("CONS:")) == []  # KJO-66


def test_a_plain_consumer_with_async_methods(quick):
    """KJO-38: any of the methods may be a coroutine function."""
    log = []

    class Plain(AbstractConsumer):
        config = {"topic": "made", "consumer_group": "g", "redis_options": {"key_prefix": "MADE"}}

        def get_message_id(self, message):
            return message["id"]

        async def get_message_key(self, message):
            return message["id"]

        async def process(self, message):
            log.append(("process", message["data"]["email"]))
            return 0

        async def mark_item_as_completed(self, item_id):
            log.append(("completed", item_id))

        def mark_item_as_failed(self, item_id):
            log.append(("failed", item_id))

        async def is_item_completed(self, item_id):
            return False

        async def handle_processing_result(self, item_id, result):
            log.append(("result", result))

        async def on_success(self, item_id):
            log.append(("success", item_id))

    item = Item.objects.create(email="a@b")
    send(item)
    work()
    # KJO-45: the order on success.
    id = str(item.pk)
    assert log == [("process", "a@b"), ("completed", id), ("result", 0), ("success", id)]


@pytest.mark.parametrize("result", [0, "", False, [], {"a": 1}])
def test_falsy_results_are_results(quick, result):
    """KJO-42, KJO-F13."""
    kept = []
    consumer(
        lambda self, message: result,
        handle_processing_result=lambda self, item_id, value: kept.append(value),
    )
    send(Item.objects.create())
    work()
    assert kept == [result]


def test_none_is_no_result(quick):
    """KJO-42."""
    kept = []
    consumer(handle_processing_result=lambda self, item_id, value: kept.append(value))
    send(Item.objects.create())
    work()
    assert kept == []


def test_a_completed_item_is_skipped(quick):
    """KJO-41, KJO-63."""
    made = consumer()
    item = Item.objects.create(state=2)
    send(item)
    worker = work()
    assert (made.calls, made.told, worker.statistics.processed) == ([], [], 0)
    assert not Run.objects.exists()


def test_the_same_content_sent_twice_runs_once(quick):
    """KJO-F1, KJO-F19: by the item's state; that it was sent recently means nothing here."""
    made = consumer()
    item = Item.objects.create()
    send(item)
    send(item, kind="again")
    work()
    assert made.calls == [str(item.pk)]
    assert made.told == [("success", str(item.pk))]


def test_an_item_that_was_set_back_runs_again(quick):
    """Its state decides, not that its content was processed before: nothing is stuck."""
    made = consumer()
    item = Item.objects.create()
    send(item)
    work()
    Item.objects.update(state=1)
    send(item)
    work()
    assert made.calls == [str(item.pk)] * 2
    assert Item.objects.get().state == 2
    assert ProcessedEvent.objects.count() == 1


def test_changed_content_runs_again(quick):
    """KJO-16."""
    made = consumer()
    item = Item.objects.create()
    send(item)
    work()
    Item.objects.update(state=1, body="changed")
    send(Item.objects.get())
    work()
    assert len(made.calls) == 2
    assert ProcessedEvent.objects.count() == 2


def test_an_item_that_is_gone_is_nothing_to_do(quick):
    made = consumer()
    item = Item.objects.create()
    send(item)
    Item.objects.all().delete()
    work()
    assert made.calls == []
    assert not DeadLetter.objects.exists()


@pytest.mark.parametrize("atomic", [True, False])
def test_a_result_that_cannot_be_kept_rolls_the_state_back(quick, atomic):
    """KJO-45, KJO-F12: and the job is retried."""
    seen = []

    def keep(self, item_id, result):
        seen.append(Item.objects.get().state)
        if len(seen) == 1:
            raise RuntimeError("disk full")

    made = consumer(lambda self, m: 1, handle_processing_result=keep, atomic=atomic)
    item = Item.objects.create()
    send(item)
    states = []
    work(until=lambda: states.append(Item.objects.get().state) or settled())
    assert seen == [2, 2]  # both inside the transaction
    assert set(states) == {1, 2}  # what others saw in between
    assert Job.objects.get().attempts == 2
    assert made.told == [("success", str(item.pk))]
    assert Run.objects.count() == (1 if atomic else 2)


@pytest.mark.parametrize("atomic", [True, False])
def test_a_success_hook_that_raises_leaves_the_item_completed(quick, atomic, caplog):
    """KJO-43, KJO-F12."""

    def clumsy(self, item_id):
        raise RuntimeError("clumsy")

    made = consumer(on_success=clumsy, atomic=atomic)
    send(Item.objects.create())
    work()
    assert Item.objects.get().state == 2
    assert list(JobFailure.objects.values_list("error", flat=True)) == []
    assert len(made.calls) == 1
    assert "clumsy" in caplog.text
    assert not Job.objects.exists()


def test_the_transaction_that_completes_an_item_waits_for_other_writers_before_it_reads(
    quick, sqlite_file
):
    """SQLite refuses a transaction its first write at once if another has begun to write since it
    read. The item was processed again."""
    if connection.vendor != "sqlite":
        pytest.skip("only SQLite refuses a write for what was read before")
    others = []

    def is_item_completed(self, item_id):
        if made.calls:  # asked again, in the transaction that completes the item
            with closing(sqlite3.connect(sqlite_file, timeout=0)) as other:
                try:
                    other.execute("BEGIN IMMEDIATE")
                except sqlite3.OperationalError as error:
                    others.append(str(error))
        return False

    # Given
    made = consumer(is_item_completed=is_item_completed, atomic=False)
    send(Item.objects.create())
    # When
    work()
    # Then
    assert others == ["database is locked"]
    assert Item.objects.get().state == 2


@pytest.mark.parametrize("id", [rb'"\ud800"', rb'"a\u0000b"', b'"' + b"x" * 201 + b'"', b'""'])
def test_an_id_that_no_database_keeps_is_a_dead_letter(quick, id):
    """A lone surrogate in it was an error of every lane it came to, for ever."""
    # Given
    made = consumer()
    bench = Bench("made")
    item = Item.objects.create()
    bench.publish(b'{"id": ' + id + b', "data": {}, "type": "new"}')
    send(item)
    # When
    bench.run()
    bench.close()
    # Then
    assert DeadLetter.objects.get().reason == "invalid"
    assert made.calls == [str(item.pk)]
    assert settled()


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")  # SQLite takes any text
def test_a_content_hash_that_no_database_keeps_holds_nothing_up(settings):
    """It is whatever the producer wrote into a header."""
    settings.KJO = {"SERVICE_NAME": "tests"}
    made = consumer(is_item_completed=lambda self, item_id: False)
    bench = Bench("made")
    bench.publish(b'{"id": "1", "data": {}, "type": "new"}', content_hash=b"a\0b")
    bench.run()
    bench.close()
    assert [result.value for result in bench.results] == ["completed"]
    assert made.calls == ["1"]


# --- One item at a time, whoever speaks of it, and partitions that rest ---------------------------


def test_an_item_somebody_else_processes_waits(quick):
    """KJO-60, KJO-62, KJO-F14: it is neither run nor counted as done."""
    made = consumer()
    item = Item.objects.create()
    name = f"CONS:MADE:{item.pk}"
    alive = "WORKER:other"
    get_coordination().claim([name], "other", timedelta(seconds=30))
    get_coordination().claim([alive], "other", timedelta(seconds=30))
    send_all = Producer().produce_messages({}, 10)
    assert send_all.sent == 0  # KJO-08: nor is it sent meanwhile
    get_coordination().release([name], "other")
    send(item)
    get_coordination().claim([name], "other", timedelta(seconds=30))
    deadline = time.monotonic() + 1.0
    work(until=lambda: time.monotonic() > deadline)
    assert made.calls == []
    get_coordination().release([name], "other")
    work()
    assert made.calls == [str(item.pk)]


def test_the_lease_lasts_as_long_as_the_class_says(quick):
    """KJO-61, KJO-65, KJO-87."""
    seen = []

    def process(self, message):
        from kjo_django.models import Lease

        lease = Lease.objects.get(name=f"CONS:MADE:{message['id']}")
        seen.append((lease.expires_at, lease.token))

    consumer(process, processing_ttl=77, atomic=False)
    send(Item.objects.create())
    worker = work()
    from django.utils import timezone

    left = (seen[0][0] - timezone.now()).total_seconds()
    assert 60 < left <= 77
    assert seen[0][1] == worker.id.hex


def test_messages_of_one_item_run_one_at_a_time_under_every_type(quick):
    """KJO-54, KJO-101, KJO-F7: though their keys differ; items, not partitions, are sequential."""
    running, most = set(), []

    def process(self, message):
        assert message["id"] not in running
        running.add(message["id"])
        most.append(len(running))
        time.sleep(0.02)  # sleep: so that others would run beside it
        running.discard(message["id"])
        Item.objects.filter(pk=message["id"]).update(looked_at=1)

    made = consumer(
        process, atomic=False, is_item_completed=lambda self, i: False, max_concurrency=4
    )
    items = [Item.objects.create() for _ in range(3)]
    for kind in ("new", "retry", "other"):
        send(*items, kind=kind)
    work()
    assert len(made.calls) == 9


def test_a_pausable_error_spares_the_rest_of_its_group(quick):
    """KJO-72, KJO-76: whatever waits in the partition does not run into the same wall."""
    fails = []

    def process(self, message):
        if len(self.calls) > 30 and not fails:
            fails.append(message["id"])
            raise RateLimitExceededError("slow down")

    made = consumer(process, max_concurrency=1)
    Item.objects.bulk_create(Item() for _ in range(60))
    send(*Item.objects.all())
    work(until=settled)
    assert Item.objects.filter(state=2).count() == 60
    # No attempt was lost: it was its turn again when the pause was over.
    assert len(made.calls) == 61
    assert Job.objects.count() == 0


# --- A consumer run by hand: connect, consume, disconnect -----------------------------------------


def test_start_before_connect_is_refused(quick):
    """KJO-48."""
    made = consumer()
    with pytest.raises(RuntimeError, match="connect"):
        made().start_consuming()


def test_connect_consume_disconnect(quick):
    """KJO-48, KJO-56, KJO-57, KJO-78: bounded, the rest waits; and its status meanwhile."""
    go = threading.Event()
    made = consumer(
        lambda self, message: go.wait(PATIENCE) and None, max_concurrency=2, atomic=False
    )
    items = [Item.objects.create() for _ in range(5)]
    send(*items)
    consuming = made()
    assert consuming.get_status() == {"is_connected": False}
    consuming.connect()
    thread = threading.Thread(target=consuming.start_consuming)
    thread.start()
    try:
        wait_until(lambda: consuming.get_status()["concurrency"]["active"] == 2)
        wait_until(lambda: consuming.get_status()["queue"]["length"] == 3)
        status = consuming.get_status()
        assert status["concurrency"] == {"max": 2, "active": 2, "queued": 3, "available": 0}
        assert status["queue"]["oldest_waiting_ms"] >= 0
        assert status["performance"]["max_concurrent_reached"] == 2
        # KJO-58: raising the limit starts what waits at once.
        consuming.set_max_concurrency(4)
        wait_until(lambda: consuming.get_status()["concurrency"]["active"] == 4)
        assert consuming.get_status()["concurrency"]["max"] == 4
        consuming.set_max_concurrency(1)
        assert consuming.get_status()["concurrency"]["max"] == 1
    finally:
        go.set()
        wait_until(lambda: Item.objects.filter(state=2).count() == 5)
        assert consuming.disconnect(timeout=20)
        thread.join(PATIENCE)
    assert not thread.is_alive()
    assert consuming.get_status() == {"is_connected": False}


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3"])
def test_a_concurrency_below_one_is_refused(count):
    """KJO-58."""
    made = consumer()
    with pytest.raises(ValueError, match="above 0"):
        made().set_max_concurrency(count)


def test_disconnect_of_what_never_consumed_returns_at_once(quick):
    """An error between the two, or a probe that only connects."""
    consuming = consumer()()
    consuming.connect()
    assert consuming.disconnect(timeout=5)
    assert consuming.get_status() == {"is_connected": False}
    with pytest.raises(RuntimeError, match="connect"):
        consuming.start_consuming()
