"""Wake-up calls: after the commit, once per channel, never if rolled back."""

from __future__ import annotations

import time

import pytest
from django.db import transaction

from kjo_django.enqueue.storing import (
    REPLY_CHANNELS,
    after_commit,
    notify_waiters,
    topic_channel,
    wake,
)
from kjo_django.exceptions import CoordinationError
from kjo_django.runtime import current_runtime, get_coordination

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def calls(monkeypatch):
    woken: list[str] = []
    monkeypatch.setattr(get_coordination(), "notify", lambda *channels: woken.extend(channels))
    return woken


def test_a_callback_of_somebody_else_in_between_keeps_its_place(calls):
    order: list[str] = []
    with transaction.atomic():
        after_commit(current_runtime(), "a")
        transaction.on_commit(lambda: order.append(f"after {calls}"))
        after_commit(current_runtime(), "b")
    assert order == ["after ['a']"]
    assert calls == ["a", "b"]


def test_coordination_out_of_reach_is_logged_and_the_rest_goes_on(coordination_away, caplog, hear):
    # Given
    told = hear("job_enqueued")
    coordination_away("notify")
    # When
    after_commit(current_runtime(), "a", [{"job_id": "1", "queue": "q", "handler": "h"}])
    wake(current_runtime(), "b")
    # Then
    assert [each["job_id"] for each in told] == ["1"]
    assert "Could not wake a" in caplog.text
    assert "Could not wake b" in caplog.text


def test_a_call_that_breaks_the_process_leaves_the_commit_alone(monkeypatch):
    # Given: a bug of a coordination backend
    def crash(channel):
        raise ZeroDivisionError

    monkeypatch.setattr(get_coordination(), "notify", crash)
    # When, then: robust, so the caller's commit is not turned into an error
    with transaction.atomic():
        after_commit(current_runtime(), "a")


def test_a_topic_has_its_channel():
    assert topic_channel("emails") == "kjo:topic:emails"


@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")
@pytest.mark.parametrize("name", ["x" * 9000, "a\0b"], ids=["long", "NUL"])
def test_a_waiter_made_up_by_others_is_not_called(name):
    """The header came with a message; PostgreSQL refused, and the settled group was run again."""
    notify_waiters([f"{REPLY_CHANNELS}{name}", f"{REPLY_CHANNELS}1"])


@pytest.mark.parametrize("name", ["x" * 9000, "a\0b", "1"], ids=["long", "NUL", "good"])
def test_waiters_are_called_by_names_that_could_be_theirs(monkeypatch, name):
    called: list[str] = []
    monkeypatch.setattr(get_coordination(), "notify", lambda *channels: called.extend(channels))
    notify_waiters([f"{REPLY_CHANNELS}{name}", "kjo:relay"])
    assert called == ([f"{REPLY_CHANNELS}1"] if name == "1" else [])


def test_a_server_that_lets_callers_wait_is_left_alone_for_a_while(standing_clock, monkeypatch):
    """A Redis that answers nothing would cost every request that enqueues its whole timeout."""
    # Given a server that takes its time to fail
    asked: list[str] = []

    def fail_slowly(channel: str) -> None:
        asked.append(channel)
        standing_clock.advance(0.15)
        raise CoordinationError("Timeout reading from socket")

    monkeypatch.setattr(get_coordination(), "notify", fail_slowly)
    # When
    for _ in range(20):
        wake(current_runtime(), "a")
    # Then only the first one waited
    assert asked == ["a"]
    # And when it has rested it is called again
    standing_clock.advance(0.5)
    monkeypatch.setattr(get_coordination(), "notify", asked.append)
    wake(current_runtime(), "b")
    wake(current_runtime(), "c")
    assert asked == ["a", "b", "c"]


def test_a_server_that_refuses_at_once_is_called_each_time(monkeypatch):
    asked: list[str] = []

    def refuse(channel: str) -> None:
        asked.append(channel)
        raise CoordinationError("Connection refused")

    monkeypatch.setattr(get_coordination(), "notify", refuse)
    for channel in "abc":
        wake(current_runtime(), channel)
        time.sleep(0.05)  # sleep: longer than a refused connection takes
    assert asked == ["a", "b", "c"]
