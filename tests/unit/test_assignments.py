"""What a worker's row tells of its partitions, whoever wrote it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

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


def test_a_row_of_an_older_release_tells_topic_and_partition():
    assert assignments([["mails", 3]]) == [Assignment("mails", 3)]


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
        [["mails", 0, 1]],
        [["mails", "0"]],
        [["mails", True]],
        [["mails", -1]],
        [["mails", 10**30]],
        [["mails", 1.5]],
        [[["mails"], 0]],
        [{}],
        [{"topic": "", "partition": 0}],
        [{"topic": None, "partition": 0}],
        [{"topic": "mails"}],
    ],
    ids=str,
)
def test_what_makes_no_sense_is_left_out(told):
    assert assignments(told) == []


@pytest.mark.parametrize(
    "moment",
    [
        5,
        None,
        "",
        "yesterday",
        "2026-13-45T00:00:00Z",
        "2026-05-04T10:37:20",
        "0001-01-01T00:00Z",
        "9999-12-31T23:59:59Z",
        ["2026-05-04T10:37:20Z"],
        "9" * 5000,
    ],
    ids=lambda moment: str(moment)[:30],
)
def test_a_moment_that_is_none_is_not_known(moment):
    job = {"id": "1", "handler": "x", "started_at": moment}
    (held,) = assignments(
        [
            {
                "topic": "mails",
                "partition": 0,
                "group": 7,
                "rebalanced_at": moment,
                "resting_until": moment,
                "running": [job, 5, {}, None],
            }
        ]
    )
    assert held == Assignment("mails", 0)
    assert rebalanced_at([held]) is None


def test_what_no_encoding_can_write_can_be_shown():
    (held,) = assignments(json.loads('[["\\ud800", 0]]'))
    assert held.topic.encode() == b"?"


def test_a_row_without_an_end_is_read_to_a_limit():
    assert len(assignments([["mails", number] for number in range(MOST + 1)])) == MOST


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=10),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["topic", "partition", "running", "id", "group", "rebalanced_at"]),
            inner,
            max_size=5,
        )
    ),
    max_leaves=20,
)


@given(JSON)
def test_no_row_breaks_it(told):
    for held in assignments(told):
        assert assignments([held.stored()]) == [held]


def test_the_latest_change_of_all_groups_is_the_workers():
    held = [Assignment("a", 0, "g", NOW), Assignment("b", 0, "h", NOW + timedelta(minutes=1))]
    assert rebalanced_at([*held, Assignment("c", 0)]) == NOW + timedelta(minutes=1)
