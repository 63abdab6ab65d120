"""An item's way: claimed, processed, completed, and not run twice."""

from __future__ import annotations

import pytest

from kjo_django import AbstractConsumer
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.runtime import get_coordination
from tests.items.models import Item, Run
from tests.unit.deliveries import Bench
from tests.unit.template_consumer.made import consumer, send, settled, work

pytestmark = pytest.mark.usefixtures("forgotten_definitions")


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
