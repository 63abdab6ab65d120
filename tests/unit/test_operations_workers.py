"""Asking workers to be quiet, to go on, to stop: what becomes of the rows. That processes obey is
shown in tests/acceptance/test_wishes.py."""

from __future__ import annotations

import uuid
from datetime import timedelta

import pytest
from django.utils import timezone

from kjo_django import signals
from kjo_django.models import Worker
from kjo_django.operations import workers
from tests.factories import WorkerFactory

pytestmark = pytest.mark.django_db


def wishes() -> dict[str, str]:
    return dict(Worker.objects.values_list("name", "wish"))


def test_living_workers_are_asked_and_the_rest_is_counted_by_why_not():
    # Given
    living = WorkerFactory(name="living")
    silent = WorkerFactory(name="silent", stale=True)
    ended = WorkerFactory(name="ended", state=Worker.State.STOPPED)
    asked = WorkerFactory(name="asked", wish="quiet")
    stopping = WorkerFactory(name="stopping", wish="stop")
    # When
    outcomes = workers.quiet(
        [living, silent.pk, str(ended.pk), asked, stopping, uuid.uuid4(), "nonsense"], actor="ann"
    )
    # Then
    assert outcomes.counts == {
        "asked": 1,
        "gone": 2,
        "unchanged": 1,
        "stopping": 1,
        "not_found": 2,
    }
    assert outcomes.changed_count == 1
    assert wishes() == {
        "living": "quiet",
        "silent": "",
        "ended": "",
        "asked": "quiet",
        "stopping": "stop",
    }


def test_unquiet_takes_back_quiet_and_nothing_takes_back_stop():
    # Given
    quiet, stopping = WorkerFactory(name="q", wish="quiet"), WorkerFactory(name="s", wish="stop")
    # When / Then
    assert workers.unquiet([quiet, stopping]).counts == {"asked": 1, "stopping": 1}
    assert workers.unquiet([quiet]).counts == {"unchanged": 1}
    assert wishes() == {"q": "", "s": "stop"}


def test_a_quiet_worker_may_be_stopped():
    worker = WorkerFactory(wish="quiet")
    assert workers.stop([worker]).counts == {"asked": 1}
    assert workers.stop([worker]).counts == {"unchanged": 1}


def test_a_wish_is_told_once_it_is_committed(django_capture_on_commit_callbacks):
    # Given
    worker, heard, seen = WorkerFactory(name="host-1"), [], []

    def receiver(signal, sender, worker_id, wish, actor, **kwargs):
        heard.append((sender, worker_id, wish, actor))

    signals.worker_asked.connect(receiver)
    # When
    with django_capture_on_commit_callbacks(execute=True):
        workers.stop([worker], actor="ann", on_changed=seen.extend)
        assert heard == []
        workers.stop([worker], actor="bob", on_changed=seen.extend)
    signals.worker_asked.disconnect(receiver)
    # Then
    assert heard == [("host-1", str(worker.pk), "stop", "ann")]
    assert [(row.pk, row.wish) for row in seen] == [(worker.pk, "stop")]


def test_the_heartbeat_that_is_just_old_enough_counts():
    old = timezone.now() - workers.alive_within() + timedelta(seconds=2)
    assert workers.quiet([WorkerFactory(heartbeat_at=old)]).counts == {"asked": 1}
