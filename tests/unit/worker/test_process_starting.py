"""How a worker starts beside a broker that does not answer. On a SQLite file."""

from __future__ import annotations

import threading

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.exceptions import PublishError
from kjo_django.models import Job
from kjo_django.operations.maintenance import topics
from kjo_django.transports.memory import MemoryTransport
from kjo_django.worker import Worker
from tests.unit.deliveries import KJO, as_job
from tests.unit.workers import Running
from tests.waiting import PATIENCE, wait_until


@pytest.fixture(autouse=True)
def _configured(settings, sqlite_file, forgotten_definitions):
    settings.KJO = {
        **KJO,
        "TRANSPORTS": {
            "default": {"BACKEND": "kjo_django.transports.database.DatabaseTransport"},
            "broker": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"},
        },
        "QUEUES": {"ledger": {}, "remote": {"transport": "broker"}},
        "POLL_INTERVAL": 0.2,
        "HEARTBEAT_INTERVAL": 0.2,
    }


class Silence:
    """A broker that answers nobody until it is let."""

    def __init__(self, monkeypatch, method="ensure_topics"):
        self.ends = threading.Event()
        self.asked_count = 0
        answer = getattr(MemoryTransport, method)

        def wait(transport, specs):
            self.asked_count += 1
            if not self.ends.wait(2 * PATIENCE):
                raise PublishError("away")
            return answer(transport, specs)

        monkeypatch.setattr(MemoryTransport, method, wait)


def test_a_silent_broker_holds_up_no_queue_of_another_transport(monkeypatch):
    # Given
    monkeypatch.setattr(topics, "PATIENCE", 0.1)
    silence, ran = Silence(monkeypatch), threading.Event()
    as_job(ran.set, queue="ledger").enqueue()
    with Running(["ledger", "remote"]) as running:
        try:
            # Then
            assert ran.wait(PATIENCE)
            wait_until(lambda: "could not be checked yet" in running.worker.last_error)
        finally:
            # When it answers, its topics are there
            silence.ends.set()
        wait_until(lambda: running.worker._topics.are_there)
    assert silence.asked_count >= 2
    assert not Job.objects.open().exists()


def test_a_worker_of_that_broker_alone_waits_for_its_answer(monkeypatch):
    """It has nothing else to do, and a missing topic is refused while nothing runs."""
    monkeypatch.setattr(topics, "PATIENCE", 0.1)
    silence = Silence(monkeypatch)
    worker = Worker(["remote"], relay=False)
    threading.Timer(0.4, silence.ends.set).start()
    worker.ensure_topics()
    assert silence.ends.is_set()
    assert worker._topics.are_there


def test_a_missing_topic_is_refused_at_the_start_beside_other_transports(settings):
    """KJO-90."""
    remote = {"transport": "broker", "topic": "gone", "topic_options": {"auto_create": False}}
    settings.KJO = {**settings.KJO, "QUEUES": {"ledger": {}, "remote": remote}}
    with pytest.raises(ImproperlyConfigured, match="'gone' of queue 'remote' does not exist"):
        Worker(["ledger", "remote"]).run()
