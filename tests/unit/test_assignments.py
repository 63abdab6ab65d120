"""What a worker's row tells of its partitions, whoever wrote it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest

from kjo_django.operations.workers import (
    MOST,
    Assignment,
    RunningJob,
    assignments,
    rebalanced_at,
)

NOW = datetime(2026, 5, 4, 10, 37, 20, tzinfo=UTC)


def test_what_is_stored_is_read_again():
    # Given
    held = [
        Assignment("mails", 0, "g", NOW, NOW + timedelta(seconds=5), (RunningJob("1", "x", NOW),)),
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
