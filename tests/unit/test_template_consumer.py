"""Template consumers through a worker in this process: six methods, three hooks, one flow.

What only real servers and killed processes can show is in tests/acceptance/test_kjo_consumer.py.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.db import transaction

from kjo_django import AbstractConsumer, ModelConsumer, ModelProducer, conf, registry, signals
from kjo_django.backends import get_coordination, get_transport
from kjo_django.conf import get_settings
from kjo_django.exceptions import PermanentError, RateLimitExceededError
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.states import ItemState, JobState
from kjo_django.transports.base import OutgoingRecord
from kjo_django.worker import Worker
from tests.items.models import Item, Run


@pytest.fixture(autouse=True)
def definitions():
    """Forget the consumers a test defines."""
    before = dict(registry._handlers), dict(registry._routes), dict(conf._declared)
    yield
    for known, was in zip(
        (registry._handlers, registry._routes, conf._declared), before, strict=True
    ):
        known.clear()
        known.update(was)
    conf._queue_cache.clear()


@pytest.fixture
def quick(settings, sqlite_file):
    settings.KJO = {
        "SERVICE_NAME": "tests",
        "BACKOFF_BASE": 0.05,
        "ERROR_RECOVERY_DELAYS": {"rate_limit": 0.4},
        "POLL_INTERVAL": 0.1,
        "HEARTBEAT_INTERVAL": 0.3,
        "MAX_ATTEMPTS": 3,
    }


def consumer(process=lambda self, message: None, **attributes):
    """Define a consumer of `Item`."""

    def run(self, message):
        self.calls.append(message["id"])
        Run.objects.create(item=message["id"])
        return process(self, message)

    told = []
    body = {
        "topic": "made",
        "consumer_group": "makers",
        "key_prefix": "MADE",
        "model": Item,
        "calls": [],
        "told": told,
        "process": run,
        "on_success": lambda self, item_id: told.append(("success", item_id)),
        "on_failed": lambda self, item_id, error: told.append(("failed", item_id, str(error))),
        **attributes,
    }
    return type("MadeConsumer", (ModelConsumer,), body)


class Producer(ModelProducer):
    model = Item
    queue = "made"
    hash_fields = ("email", "body")
    sent_ttl = 0.001


def send(*items, kind="new"):
    result = Producer().produce_messages({"pk__in": [item.pk for item in items]}, 1000, kind)
    assert result.sent == len(items), result
    time.sleep(0.002)


def work(until=None):
    worker = Worker(["made"])
    assert worker.run(until=until or worker.is_drained) == 0
    return worker


def settled():
    """Whether nothing is left, retries that are due later included."""
    queue = get_settings().queue("made")
    lag = sum(get_transport().lag([queue.topic], queue.consumer_group).values())
    return lag == 0 and not Job.objects.open().exists()


# --- Definition -----------------------------------------------------------------------------------

REQUIRED = {
    "get_message_id",
    "get_message_key",
    "process",
    "mark_item_as_completed",
    "mark_item_as_failed",
    "is_item_completed",
}


def test_six_methods_are_required():
    """KJO-35 … 41, KJO-95."""
    assert AbstractConsumer.__abstractmethods__ == REQUIRED
    with pytest.raises(TypeError, match="abstract"):
        AbstractConsumer()


def test_three_hooks_are_optional():
    """KJO-42 … 44, KJO-95."""
    hooks = {"handle_processing_result", "on_success", "on_failed"}
    assert all(hasattr(AbstractConsumer, hook) for hook in hooks)
    assert not hooks & AbstractConsumer.__abstractmethods__


@pytest.mark.parametrize("missing", ["topic", "consumer_group", "key_prefix"])
def test_what_is_required_is_asked_for_by_name(missing):
    """KJO-86."""
    with pytest.raises(ImproperlyConfigured, match=missing):
        consumer(**{missing: None})


@pytest.mark.parametrize("name", ["topic", "consumer_group", "key_prefix"])
@pytest.mark.parametrize("value", ["", "  ", 7])
def test_empty_values_are_refused(name, value):
    """KJO-86."""
    with pytest.raises(ImproperlyConfigured, match=name):
        consumer(**{name: value})


def test_a_base_without_configuration_is_not_registered():
    base = consumer(topic=None, consumer_group=None, key_prefix=None)
    assert "made" not in registry.queue_names()
    with pytest.raises(ImproperlyConfigured, match="topic, consumer_group, key_prefix"):
        base()


def test_the_seeds_configuration_declares_the_queue():
    """KJO-86 … 92: as seed 1 prints it."""
    consumer(
        topic=None,
        consumer_group=None,
        key_prefix=None,
        config={
            "topic": "email-queue",
            "consumerGroup": "email-processors",
            "redisOptions": {"keyPrefix": "EMAIL", "processingTtl": 300, "sentTtl": 20},
            "topicOptions": {
                "partitions": 4,
                "replicationFactor": 2,
                "autoCreate": True,
                "configEntries": {"retention.ms": "604800000", "compression.type": "gzip"},
                "retentionMs": "604800000",
                "segmentMs": "86400000",
                "compressionType": "gzip",
                "cleanupPolicy": "delete",
            },
        },
    )
    queue = get_settings().queue("email-queue")
    assert (queue.consumer_group, queue.key_prefix) == ("email-processors", "EMAIL")
    assert queue.processing_ttl == timedelta(seconds=300)
    assert queue.sent_ttl == timedelta(seconds=20)
    from kjo_django.operations import topics

    spec = topics.wanted(["email-queue"])[0].spec
    assert (spec.partitions, spec.replication_factor) == (4, 2)
    assert spec.config == {
        "retention.ms": "604800000",
        "segment.ms": "86400000",
        "compression.type": "gzip",
        "cleanup.policy": "delete",
    }


def test_the_settings_win_over_the_class(settings):
    """KJO-94."""
    consumer()
    settings.KJO = {"QUEUES": {"made": {"topic": "elsewhere"}}}
    assert get_settings().queue("made").topic == "elsewhere"
    assert get_settings().queue("made").key_prefix == "MADE"


@pytest.mark.parametrize(("given", "expected"), [(None, 3), ("7", 7)])
def test_concurrency_comes_from_the_environment(monkeypatch, given, expected):
    """KJO-55."""
    monkeypatch.delenv("MAX_CONCURRENT_MESSAGES", raising=False)
    if given:
        monkeypatch.setenv("MAX_CONCURRENT_MESSAGES", given)
    consumer()
    assert get_settings().queue("made").concurrency == expected


def test_a_concurrency_that_is_no_number_is_refused(monkeypatch):
    """KJO-55."""
    monkeypatch.setenv("MAX_CONCURRENT_MESSAGES", "many")
    with pytest.raises(ImproperlyConfigured, match="MAX_CONCURRENT_MESSAGES"):
        consumer()


def test_states_have_the_seeds_numbers():
    """KJO-68: processing is virtual, so it has none (KJO-67)."""
    assert {state.name: state.value for state in AbstractConsumer.STATES} == {
        "PENDING": 1,
        "COMPLETED": 2,
        "FAILED": 3,
    }
    assert AbstractConsumer.STATES is ItemState


# --- The flow -------------------------------------------------------------------------------------


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
    assert len(made.calls) == 1
    assert "clumsy" in caplog.text
    assert not Job.objects.exists()


# --- Failure --------------------------------------------------------------------------------------


def always(error):
    def process(self, message):
        raise error

    return process


@pytest.mark.parametrize("atomic", [True, False])
def test_an_item_fails_once_its_attempts_are_spent(quick, atomic):
    """KJO-40, KJO-44, KJO-46, KJO-F15: PENDING until then."""
    states = []

    def process(self, message):
        states.append(Item.objects.get().state)
        raise RuntimeError("no")

    made = consumer(process, failed_at_field="failed_at", atomic=atomic)
    item = Item.objects.create()
    send(item)
    work(until=settled)
    item.refresh_from_db()
    assert states == [1, 1, 1]
    assert (item.state, item.failed_at is not None) == (3, True)
    assert made.told == [("failed", str(item.pk), "no")]
    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.error) == (3, "no")
    assert Run.objects.count() == (0 if atomic else 3)


def test_a_permanent_error_fails_at_once(quick):
    """KJO-46: the item is failed before its hook is called."""
    seen = []
    made = consumer(
        always(PermanentError("never")),
        on_failed=lambda self, item_id, error: seen.append(Item.objects.get().state),
    )
    send(Item.objects.create())
    work()
    assert (made.calls.__len__(), seen) == (1, [3])


def test_failed_items_can_be_sent_again(quick):
    """KJO-70: --criteria state=FAILED --type retry, with the very same content."""
    answers = iter([PermanentError("no"), RuntimeError("not yet"), None])

    def process(self, message):
        if error := next(answers):
            raise error

    made = consumer(process)
    item = Item.objects.create()
    send(item)
    work(until=settled)
    assert Item.objects.get().state == 3
    assert Producer().produce_messages({"state": "FAILED"}, 10, "retry").sent == 1
    work(until=settled)
    assert Item.objects.get().state == 2
    assert len(made.calls) == 3
    # And once more, after its retries have completed.
    Item.objects.update(state=1)
    answers = iter([None])
    send(Item.objects.get())
    work(until=settled)
    assert Item.objects.get().state == 2
    assert len(made.calls) == 4


def test_exhausted_items_can_be_sent_again(quick):
    """KJO-70: the job of its retries is no obstacle."""
    fails = [True]

    def process(self, message):
        if fails:
            raise RuntimeError("no")

    made = consumer(process, max_attempts=2)
    item = Item.objects.create()
    send(item)
    work(until=settled)
    assert (Item.objects.get().state, len(made.calls)) == (3, 2)
    fails.clear()
    send(item, kind="retry")
    work(until=settled)
    assert (Item.objects.get().state, len(made.calls)) == (2, 3)
    assert list(Job.objects.values_list("state", flat=True)) == [JobState.FAILED]


def test_a_failure_that_cannot_be_marked_is_a_dead_letter_all_the_same(quick, caplog):
    """KJO-40."""

    def clumsy(self, item_id):
        raise RuntimeError("clumsy")

    consumer(always(PermanentError("never")), mark_item_as_failed=clumsy)
    send(Item.objects.create())
    work()
    assert DeadLetter.objects.count() == 1
    assert "could not be marked" in caplog.text


@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"[]", b'{"no": "id"}', b'{"id": ""}', b'{"id": "a\\u0000"}']
)
def test_poison_is_a_dead_letter(quick, value):
    """KJO-F14: and what comes after it is processed."""
    made = consumer()
    with transaction.atomic():
        get_transport().publish([OutgoingRecord("made", value, key=b"new-1")])
    item = Item.objects.create()
    send(item)
    work()
    assert made.calls == [str(item.pk)]
    assert DeadLetter.objects.get().value == value


def test_messages_of_producers_that_set_no_headers_are_understood(quick):
    """KJO-36: anything with an id."""
    made = consumer()
    item = Item.objects.create()
    with transaction.atomic():
        get_transport().publish([OutgoingRecord("made", b'{"id": %d}' % item.pk)] * 2)
    work()
    assert made.calls == [item.pk]


def test_signals_tell_the_same(quick):
    """KJO-43, KJO-44."""
    told = []

    def completed(sender, **kwargs):
        told.append(("completed", sender))

    def failed(sender, error, **kwargs):
        told.append(("failed", str(error)))

    signals.job_completed.connect(completed)
    signals.job_failed.connect(failed)
    try:
        consumer(name="made")
        send(Item.objects.create(), Item.objects.create(state=2))
        work()
        consumer(always(PermanentError("no")), name="made")
        send(Item.objects.create())
        work()
    finally:
        signals.job_completed.disconnect(completed)
        signals.job_failed.disconnect(failed)
    assert told == [("completed", "made"), ("failed", "no")]


# --- Leases and pauses ----------------------------------------------------------------------------


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
        time.sleep(0.02)
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
    items = Item.objects.bulk_create(Item() for _ in range(60))
    send(*items)
    work(until=settled)
    assert Item.objects.filter(state=2).count() == 60
    # One attempt was lost, of one item.
    assert len(made.calls) == 61
    assert Job.objects.count() == 1


# --- Running it here ------------------------------------------------------------------------------


def test_start_before_connect_is_refused(quick):
    """KJO-48."""
    made = consumer()
    with pytest.raises(RuntimeError, match="connect"):
        made().start_consuming()


def test_connect_consume_disconnect(quick):
    """KJO-48, KJO-56, KJO-57, KJO-78: bounded, the rest waits; and its status meanwhile."""
    go = threading.Event()
    made = consumer(lambda self, message: go.wait(10) and None, max_concurrency=2, atomic=False)
    items = [Item.objects.create() for _ in range(5)]
    send(*items)
    consuming = made()
    assert consuming.get_status() == {"is_connected": False}
    consuming.connect()
    thread = threading.Thread(target=consuming.start_consuming)
    thread.start()
    try:
        wait_for(lambda: consuming.get_status()["concurrency"]["active"] == 2)
        wait_for(lambda: consuming.get_status()["queue"]["length"] == 3)
        status = consuming.get_status()
        assert status["concurrency"] == {"max": 2, "active": 2, "queued": 3, "available": 0}
        assert status["queue"]["oldest_waiting_ms"] >= 0
        assert status["performance"]["max_concurrent_reached"] == 2
        # KJO-58: raising the limit starts what waits at once.
        consuming.set_max_concurrency(4)
        wait_for(lambda: consuming.get_status()["concurrency"]["active"] == 4)
        assert consuming.get_status()["concurrency"]["max"] == 4
        consuming.set_max_concurrency(1)
        assert consuming.get_status()["concurrency"]["max"] == 1
    finally:
        go.set()
        wait_for(lambda: Item.objects.filter(state=2).count() == 5)
        assert consuming.disconnect(timeout=20)
        thread.join(20)
    assert not thread.is_alive()
    assert consuming.get_status() == {"is_connected": False}


@pytest.mark.parametrize("count", [0, -1, 1.5, True, "3"])
def test_a_concurrency_below_one_is_refused(count):
    """KJO-58."""
    made = consumer()
    with pytest.raises(ValueError, match="above 0"):
        made().set_max_concurrency(count)


def wait_for(condition, timeout=15.0):
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never came to that"
        time.sleep(0.01)
