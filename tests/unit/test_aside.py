"""Calls that are made beside what their caller does."""

from __future__ import annotations

import threading

import pytest
from django.db import OperationalError, connections

from kjo_django.outbox.aside import Aside
from kjo_django.testing.conformance import eventually

WAIT = 20
NAME = "a-thread-aside"


@pytest.fixture
def aside():
    aside = Aside(NAME)
    yield aside
    aside.close()
    assert eventually(lambda: NAME not in [thread.name for thread in threading.enumerate()])


def test_given_several_calls_when_they_are_made_then_it_is_in_turn_and_in_one_other_thread(aside):
    made: list[tuple[int, int]] = []

    futures = [
        aside.call(lambda number=number: made.append((number, threading.get_ident())))
        for number in range(5)
    ]

    for future in futures:
        future.result(WAIT)
    assert [number for number, _ in made] == [0, 1, 2, 3, 4]
    assert len({thread for _, thread in made} - {threading.get_ident()}) == 1


@pytest.mark.parametrize("closing", ["works", "fails"])
def test_given_a_call_that_fails_when_others_follow_then_it_is_told_and_they_are_made(
    aside, monkeypatch, closing
):
    closed: list[str] = []

    def close_all() -> None:
        closed.append(threading.current_thread().name)
        if closing == "fails":
            raise OperationalError("the connection is broken")

    monkeypatch.setattr(connections, "close_all", close_all)

    def fail() -> None:
        raise OperationalError("the server is gone")

    failed = aside.call(fail)

    assert aside.call(lambda: "made").result(WAIT) == "made"
    assert closed == [NAME], "the next call has a connection of its own"
    with pytest.raises(OperationalError, match="the server is gone"):
        failed.result(WAIT)
