"""A consumer run by hand: connect, consume, disconnect."""

from __future__ import annotations

import threading

import pytest

from tests.items.models import Item
from tests.unit.template_consumer.made import consumer, send
from tests.unit.workers import wait_until

pytestmark = pytest.mark.usefixtures("forgotten_definitions")


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
        thread.join(20)
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
