"""``/health``: well or not, within its timeout, and no more than the viewer may know (RST-31)."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.auth.models import AnonymousUser, Permission
from django.test import RequestFactory

from kjo_django import registry
from kjo_django.contrib.health import HealthView
from kjo_django.exceptions import PublishError
from kjo_django.operations.maintenance import topics
from kjo_django.operations.monitoring.health import Thresholds
from kjo_django.runtime import get_transport
from kjo_django.transports.base import TopicPartition
from kjo_django.transports.memory import MemoryTransport
from tests.factories import WorkerFactory
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)
KJO = {
    "TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}},
    "QUEUES": {"emails": {}, "told": {"consume": False}},
}


@pytest.fixture(autouse=True)
def _well(settings):
    settings.KJO = KJO
    topics.create()
    WorkerFactory(queues=registry.consumed_queue_names())


def user(*permissions: str):
    made = get_user_model().objects.create_user("u")
    made.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    return get_user_model().objects.get(pk=made.pk)


def get(query: str = "", by=None, timeout: float = 20, **options):
    """By default with time enough for a machine that is busy elsewhere."""
    request = RequestFactory().get(f"/kjo/health/{query}")
    request.user = by or AnonymousUser()
    return HealthView.as_view(timeout=timeout, **{"cache_seconds": 0, **options})(request)


def test_the_thresholds_are_the_seeds() -> None:
    """RST-31: lag 100, failure rate 10 %, idle 5 minutes."""
    usual = Thresholds()
    assert (usual.lag, usual.failure_rate, usual.idle) == (100, 0.10, timedelta(minutes=5))


def test_all_is_well() -> None:
    """KII-35."""
    response = get()
    assert response.status_code == 200, get(by=user("view_job")).content
    answer = json.loads(response.content)
    assert answer["healthy"] is True
    assert all(set(check) == {"name", "ok"} for check in answer["checks"])
    assert "lag" not in answer
    assert response["Cache-Control"] == "no-store"


def test_details_and_the_lag_of_each_partition_are_for_those_who_may_see_them(monkeypatch) -> None:
    lag = {TopicPartition("emails", 0): 3, TopicPartition("emails", 1): 0}
    monkeypatch.setattr(MemoryTransport, "lag", lambda self, topics, group: lag)
    answer = json.loads(get(by=user("view_job")).content)
    assert answer["lag"]["emails"] == {"0": 3, "1": 0}
    assert "told" not in answer["lag"]
    assert "detail" in answer["checks"][0]


def test_a_lag_over_the_threshold_is_not_well(monkeypatch) -> None:
    """RST-31, RST-F3; only who may see details chooses thresholds."""
    lag = {TopicPartition("emails", 0): 101}
    monkeypatch.setattr(MemoryTransport, "lag", lambda self, topics, group: lag)
    assert get().status_code == 503
    assert get("?max_lag=1000").status_code == 503
    somebody = user("view_job")
    assert get("?max_lag=1000", by=somebody).status_code == 200
    assert get("?max_lag=many", by=somebody).status_code == 400


def test_a_transport_that_is_away_is_told_of(monkeypatch) -> None:
    def refuse(self, timeout):
        raise PublishError("the broker at 10.0.0.1 is away")

    monkeypatch.setattr(MemoryTransport, "probe", refuse)
    response = get()
    assert response.status_code == 503
    assert b"10.0.0.1" not in response.content


def test_it_answers_within_its_timeout(monkeypatch) -> None:
    """Whatever hangs."""
    answers = threading.Event()
    monkeypatch.setattr(MemoryTransport, "probe", lambda self, timeout: answers.wait())
    monkeypatch.setattr(MemoryTransport, "lag", lambda *args: answers.wait())
    get_transport()
    try:
        response = get(by=user("view_job"), timeout=0.6)
    finally:
        answers.set()
    assert response.status_code == 503


def test_those_who_ask_at_once_and_again_share_one_run(monkeypatch) -> None:
    """Everybody may ask: twenty at once made eleven probes each."""
    # Given a check that takes its time
    runs, is_asked, goes_on = [], threading.Event(), threading.Event()

    def probe(self, timeout):
        runs.append(1)
        is_asked.set()
        assert goes_on.wait(PATIENCE)
        return "well"

    monkeypatch.setattr(MemoryTransport, "probe", probe)
    answers: list[Any] = []
    timeout = 19.5  # of no other test, so nobody has asked with it before

    def ask() -> None:
        answers.append(get(timeout=timeout, cache_seconds=60).status_code)

    askers = [threading.Thread(target=ask) for _ in range(5)]
    # When
    for asker in askers:
        asker.start()
    assert is_asked.wait(PATIENCE)
    goes_on.set()
    for asker in askers:
        asker.join()
    answers.append(get(timeout=timeout, cache_seconds=60).status_code)
    # Then
    assert answers == [200] * 6
    assert len(runs) == 1
    # And who may see details sees what is so now
    get(by=user("view_job"), timeout=timeout, cache_seconds=60)
    assert len(runs) == 2


def test_an_answer_is_given_again_for_seconds_only(monkeypatch) -> None:
    # Given
    timeout = 19.75
    assert get(timeout=timeout, cache_seconds=60).status_code == 200
    # When the transport goes away
    monkeypatch.setattr(MemoryTransport, "probe", _away)
    # Then
    assert get(timeout=timeout, cache_seconds=60).status_code == 200
    assert get(timeout=timeout, cache_seconds=0).status_code == 503


def _away(self, timeout):
    raise PublishError("away")
