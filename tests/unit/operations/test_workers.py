"""Asking workers to be quiet, to go on, to stop: what becomes of the rows. That processes obey is
shown in tests/acceptance/test_requests_to_workers.py."""

from __future__ import annotations

import json
import uuid
from datetime import UTC, datetime, timedelta

import pytest
from django.utils import timezone

from kjo_django.models import Worker
from kjo_django.operations import workers
from kjo_django.operations.workers import (
    MOST,
    Assignment,
    RunningJob,
    assignments,
    rebalanced_at,
)
from tests.factories import WorkerFactory

pytestmark = pytest.mark.django_db


def wishes() -> dict[str, str]:
    return dict(Worker.objects.values_list("name", "asked_to"))


def test_living_workers_are_asked_and_the_rest_is_counted_by_why_not():
    # Given
    living = WorkerFactory(name="living")
    silent = WorkerFactory(name="silent", stale=True)
    ended = WorkerFactory(name="ended", state=Worker.State.STOPPED)
    asked = WorkerFactory(name="asked", asked_to="quiet")
    stopping = WorkerFactory(name="stopping", asked_to="stop")
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
    quiet, stopping = (
        WorkerFactory(name="q", asked_to="quiet"),
        WorkerFactory(name="s", asked_to="stop"),
    )
    # When / Then
    assert workers.unquiet([quiet, stopping]).counts == {"asked": 1, "stopping": 1}
    assert workers.unquiet([quiet]).counts == {"unchanged": 1}
    assert wishes() == {"q": "", "s": "stop"}


def test_a_quiet_worker_may_be_stopped():
    worker = WorkerFactory(asked_to="quiet")
    assert workers.stop([worker]).counts == {"asked": 1}
    assert workers.stop([worker]).counts == {"unchanged": 1}


def test_a_request_is_told_once_it_is_committed(hear, django_capture_on_commit_callbacks):
    # Given
    worker, heard, seen = WorkerFactory(name="host-1"), hear("worker_asked"), []
    # When
    with django_capture_on_commit_callbacks(execute=True):
        workers.stop([worker], actor="ann", on_changed=seen.extend)
        assert heard == []
        workers.stop([worker], actor="bob", on_changed=seen.extend)
    # Then
    (told,) = heard
    assert (told["sender"], told["worker_id"]) == ("host-1", str(worker.pk))
    assert (told["asked_to"], told["actor"]) == ("stop", "ann")
    assert [(row.pk, row.asked_to) for row in seen] == [(worker.pk, "stop")]


def test_the_heartbeat_that_is_just_old_enough_counts():
    old = timezone.now() - workers.alive_within() + timedelta(seconds=2)
    assert workers.quiet([WorkerFactory(heartbeat_at=old)]).counts == {"asked": 1}


# --- What a worker's row tells of its partitions, whoever wrote it --------------------------------


NOW = datetime(2026, 5, 4, 10, 37, 20, tzinfo=UTC)


def test_what_is_stored_is_read_again():
    # Given
    held = [
        Assignment(
            "mails", 0, "g", NOW, NOW + timedelta(seconds=5), (RunningJob("1", "x", NOW),), NOW
        ),
        Assignment("mails", 1, "g"),
    ]
    # When
    stored = json.loads(json.dumps([each.stored() for each in held]))
    # Then
    assert assignments(stored) == held
    assert stored[1] == {"group": "g", "topic": "mails", "partition": 1}
    # And so is what programs are told
    assert assignments([each.as_dict() for each in held]) == held


@pytest.mark.parametrize(
    "told",
    [
        None,
        5,
        "mails",
        {"mails": 0},
        [None],
        ["mails"],
        [[]],
        [["mails"]],
        [["mails", 0]],
        [{}],
        [{"topic": "mails"}],
        [{"topic": "mails", "partition": 0, "rebalanced_at": "yesterday"}],
        [{"topic": "mails", "partition": 0, "resting_until": 5}],
        [{"topic": "mails", "partition": 0, "waiting_since": "long"}],
        [{"topic": "mails", "partition": 0, "running": [{"id": "1"}]}],
        [{"topic": "mails", "partition": 0, "running": 5}],
    ],
    ids=str,
)
def test_what_makes_no_sense_is_left_out(told):
    assert assignments(told) == []


def test_what_a_later_release_adds_is_passed_over():
    stored = [{"topic": "mails", "partition": 0, "colour": "blue"}, {"colour": "red"}]
    assert assignments(stored) == [Assignment("mails", 0)]


def test_a_row_without_an_end_is_read_to_a_limit():
    stored = [{"topic": "mails", "partition": number} for number in range(MOST + 1)]
    assert len(assignments(stored)) == MOST


def test_the_latest_change_of_all_groups_is_the_workers():
    held = [Assignment("a", 0, "g", NOW), Assignment("b", 0, "h", NOW + timedelta(minutes=1))]
    assert rebalanced_at([*held, Assignment("c", 0)]) == NOW + timedelta(minutes=1)
