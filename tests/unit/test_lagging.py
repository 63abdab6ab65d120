"""The lag of queues, as one worker for all writes it down."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from kjo_django.conf import get_settings
from kjo_django.exceptions import PublishError
from kjo_django.models import MetricBucket, MetricRollup
from kjo_django.operations.monitoring import metrics
from kjo_django.runtime import current_runtime, get_coordination, get_transport
from kjo_django.worker.duties import LagRecorder, record_lag
from tests.ledger.jobs import write
from tests.unit.deliveries import KJO, Bench

pytestmark = pytest.mark.django_db
HOUR = timedelta(hours=1)


@pytest.fixture(autouse=True)
def _configured(settings):
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "other": {}}}


def watch(token: str = "me") -> LagRecorder:
    conf = get_settings()
    return LagRecorder(current_runtime(), token, [conf.queue("ledger"), conf.queue("other")])


def lags() -> dict[str, int]:
    return dict(MetricBucket.objects.values_list("queue", "lag"))


def test_what_waits_is_written_down_and_shown():
    # Given
    Bench().poll()
    write.enqueue_many({"job": str(number)} for number in range(3))
    # When
    watch().work_on(["LAG:ledger", "LAG:other"])
    # Then
    assert lags() == {"ledger": 3, "other": 0}
    assert metrics.totals(HOUR).lag == 3
    assert metrics.series(timedelta(days=7)).points[-1].lag == 3


def test_whoever_writes_writes_the_same_rows():
    """Or screens, which add rows up, would show the lag of every worker there ever was."""
    record_lag(current_runtime(), "ledger", 5)
    record_lag(current_runtime(), "ledger", 4)
    assert lags() == {"ledger": 4}
    assert MetricRollup.objects.count() == 2


def test_one_worker_asks_for_each_queue():
    # Given another worker that has one of them
    get_coordination().claim(["LAG:ledger"], "another", HOUR)
    # Then
    assert watch()._take_leases() == ["LAG:other"]


def test_a_broker_that_was_away_is_asked_again_as_soon_as_ever(monkeypatch):
    """It lets an answer wait for half a minute: the charts would stay empty for ten more."""

    def away(topics, group):
        time.sleep(1)
        raise PublishError("no broker")

    monkeypatch.setattr(get_transport(), "lag", away)
    asking = watch()
    asking.work_on(["LAG:ledger", "LAG:other"])
    assert asking.pause == 15


def test_a_transport_that_is_away_is_asked_once_and_nothing_breaks(monkeypatch):
    # Given
    asked = []

    def away(topics, group):
        asked.append(topics)
        raise PublishError("no broker")

    monkeypatch.setattr(get_transport(), "lag", away)
    # When
    watch().work_on(["LAG:ledger", "LAG:other"])
    # Then
    assert len(asked) == 1
    assert lags() == {}


def test_a_slow_answer_is_asked_for_less_often(monkeypatch, settings):
    settings.KJO = {**KJO, "HEARTBEAT_INTERVAL": 5}
    slow = watch()
    assert slow.pause == 15
    monkeypatch.setattr(LagRecorder, "ASKING_SHARE", 1000)

    def answer_slowly(topics, group):
        time.sleep(0.06)
        return {}

    monkeypatch.setattr(get_transport(), "lag", answer_slowly)
    slow.work_on(["LAG:ledger"])
    assert slow.pause >= 60
