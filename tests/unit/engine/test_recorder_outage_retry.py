"""When a worker tries again to record what it has in hand."""

import threading

import pytest
from django.db import OperationalError, connection

from kjo_django.engine import recorder
from kjo_django.engine.handler.connections import drop_broken_connections
from kjo_django.engine.recorder import Next, OutageRetry
from kjo_django.store.servers import mend_connection

GONE = OperationalError("the connection is lost")


@pytest.fixture
def stopping(monkeypatch):
    """A worker that stops while its database is away."""
    monkeypatch.setattr(recorder, "answers", lambda alias: False)
    monkeypatch.setattr(recorder, "drop_broken_connections", lambda: None)
    event = threading.Event()
    event.set()
    return event


def test_a_worker_that_stops_tries_once_more_to_record_what_has_run(stopping):
    """Its COMMIT may have taken effect without an answer: nobody else would announce that."""
    retry = OutageRetry(stopping, has_run=True)
    assert [retry.after(GONE, "default", "Not recorded", 1) for _ in range(2)] == [
        Next.AGAIN,
        Next.STOPPED,
    ]


def test_a_worker_that_stops_does_not_try_again_what_has_not_run(stopping):
    assert OutageRetry(stopping).after(GONE, "default", "Not claimed", 1) is Next.STOPPED


def test_a_connection_that_is_closed_stays_so(any_database):
    """Django asks a closed one of MariaDB whether it is usable by a method of None."""
    connection.close()
    drop_broken_connections()
    mend_connection("default")
    assert connection.connection is None
