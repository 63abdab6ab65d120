"""How the threads of lanes are scheduled. On a thread of each test's own: a policy stays."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from kjo_django.worker.scheduling import prefer_throughput

WAIT = 20

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="a matter of Linux")


@pytest.fixture
def thread():
    with ThreadPoolExecutor(1) as pool:
        yield lambda function, *arguments: pool.submit(function, *arguments).result(WAIT)


def policy() -> int:
    return os.sched_getscheduler(0)


def test_given_a_lanes_thread_when_it_prefers_throughput_then_it_no_longer_cuts_in(thread):
    assert thread(prefer_throughput) is True

    assert thread(policy) == os.SCHED_BATCH
    assert policy() == os.SCHED_OTHER, "the rest of the process is as it was"


def test_given_a_policy_somebody_chose_when_throughput_is_preferred_then_theirs_stays(thread):
    thread(os.sched_setscheduler, 0, os.SCHED_IDLE, os.sched_param(0))

    assert thread(prefer_throughput) is False

    assert thread(policy) == os.SCHED_IDLE


def test_given_a_system_that_forbids_it_when_throughput_is_preferred_then_work_goes_on(
    thread, monkeypatch
):
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)

    assert thread(prefer_throughput) is False
    assert thread(policy) == os.SCHED_OTHER


def test_given_a_system_without_such_policies_when_throughput_is_preferred_then_work_goes_on(
    thread, monkeypatch
):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getscheduler")

    assert thread(prefer_throughput) is False
