"""How the threads of lanes are scheduled. On a thread of each test's own: a policy stays."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kjo_django.worker.scheduling import MANY, LaneScheduling

WAIT = 20

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these policies")


@pytest.fixture
def lane():
    """Calls functions in one thread, as a lane does."""
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(WAIT)


def policy() -> int:
    return os.sched_getscheduler(0)


@on_linux
def test_given_much_to_do_when_a_lane_begins_then_it_no_longer_cuts_in_until_there_is_little(lane):
    scheduling = lane(LaneScheduling)

    lane(scheduling.suit, MANY)
    assert lane(policy) == os.SCHED_BATCH
    assert policy() == os.SCHED_OTHER, "the rest of the process is as it was"

    lane(scheduling.suit, MANY - 1)
    assert lane(policy) == os.SCHED_OTHER


@on_linux
def test_given_the_same_load_when_a_lane_goes_on_then_the_system_is_not_asked_again(
    lane, monkeypatch
):
    asked: list[int] = []
    change = os.sched_setscheduler
    monkeypatch.setattr(os, "sched_setscheduler", lambda *all: [asked.append(all[1]), change(*all)])
    scheduling = lane(LaneScheduling)

    for waiting in (1, MANY, 500, 500, 1, 1):
        lane(scheduling.suit, waiting)

    assert asked == [os.SCHED_BATCH, os.SCHED_OTHER]


@on_linux
def test_given_a_policy_somebody_chose_when_there_is_much_to_do_then_theirs_stays(lane):
    lane(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0))

    lane(lane(LaneScheduling).suit, MANY)

    assert lane(policy) == os.SCHED_IDLE


@on_linux
def test_given_a_system_that_forbids_it_when_there_is_much_to_do_then_work_goes_on(
    lane, monkeypatch
):
    refused: list[object] = []

    def refuse(*arguments: object) -> None:
        refused.append(arguments)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    scheduling = lane(LaneScheduling)

    lane(scheduling.suit, MANY)
    lane(scheduling.suit, MANY)

    assert lane(policy) == os.SCHED_OTHER
    assert len(refused) == 1, "it is asked but once"


@pytest.mark.parametrize("system", ["darwin", "musl"])
def test_given_a_system_without_such_policies_when_there_is_much_to_do_then_work_goes_on(
    lane, monkeypatch, system
):
    def unknown(*arguments: object) -> None:
        raise OSError(38, "Function not implemented")

    if system == "darwin":
        monkeypatch.setattr(sys, "platform", "darwin")
        monkeypatch.delattr(os, "sched_getscheduler", raising=False)
        monkeypatch.delattr(os, "sched_setscheduler", raising=False)
    else:
        monkeypatch.setattr(os, "sched_getscheduler", unknown, raising=False)
        monkeypatch.setattr(os, "sched_setscheduler", unknown, raising=False)

    lane(lane(LaneScheduling).suit, MANY)
