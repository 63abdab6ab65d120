"""Who listens for publishing, and for how long."""

from __future__ import annotations

import threading
import time

import pytest

from kjo_django.enqueue.storing import topic_channel, wake
from kjo_django.exceptions import CoordinationError
from kjo_django.runtime import current_runtime, get_coordination
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.memory import MemoryTransport
from kjo_django.worker import duties
from kjo_django.worker.duties import DutyThread, PublishListener
from tests.unit.deliveries import KJO


class Polling:
    """As much of a poller as listening needs."""

    def __init__(self, topic: str, needs_wakeup: bool = True) -> None:
        self.topics = [topic]
        self.needs_wakeup = needs_wakeup
        self.woken = threading.Event()
        self.wake = self.woken.set


def listening(poller: Polling) -> DutyThread:
    runtime = current_runtime()
    return DutyThread(runtime, "listening", [PublishListener(runtime, [poller])])


@pytest.fixture
def _embedded(settings, sqlite_file):
    settings.KJO = KJO


@pytest.mark.usefixtures("_embedded")
def test_a_call_wakes_the_pollers_and_stopping_waits_for_nothing():
    # Given
    poller = Polling("a")
    thread = listening(poller)
    thread.start()
    # When
    deadline = time.monotonic() + 10
    while not poller.woken.wait(0.02) and time.monotonic() < deadline:
        wake(topic_channel("a"))  # again: it may not have listened yet
    # Then
    assert poller.woken.is_set()
    thread.stop()
    thread.join(10)
    assert not thread.is_alive()


@pytest.mark.usefixtures("_embedded")
def test_coordination_that_is_away_at_the_start_is_listened_to_once_it_is_back(monkeypatch, caplog):
    """Or a worker started during an outage of Redis would poll for the rest of its life."""
    # Given
    poller, tries = Polling("a"), []
    listen = get_coordination().listen

    def refuse_twice(channels):
        tries.append(channels)
        if len(tries) < 3:
            raise CoordinationError("away")
        return listen(channels)

    monkeypatch.setattr(get_coordination(), "listen", refuse_twice)
    monkeypatch.setattr(duties, "LISTEN_AGAIN", 0.05)
    thread = listening(poller)
    # When
    thread.start()
    deadline = time.monotonic() + 10
    while not poller.woken.wait(0.02) and time.monotonic() < deadline:
        wake(topic_channel("a"))
    # Then
    assert poller.woken.is_set()
    thread.stop()
    thread.join(10)
    assert not thread.is_alive()
    assert caplog.text.count("Nobody can wake this worker") == 1


@pytest.mark.usefixtures("_embedded")
def test_nobody_listens_for_a_broker_that_answers_the_poll_itself():
    assert not PublishListener(current_runtime(), [Polling("a", needs_wakeup=False)]).is_needed


def test_those_who_publish_within_a_transaction_call():
    assert DatabaseTransport.capabilities.transactional
    assert not MemoryTransport.capabilities.transactional
