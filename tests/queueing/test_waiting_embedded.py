"""Waiting on the embedded default: what does not depend on the engine."""

from __future__ import annotations

from typing import Any

import pytest
from django.db import OperationalError

from kjo_django import Queue
from kjo_django.enqueue import waiting


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), "30", None, True])
def test_a_timeout_that_means_nothing_is_refused_before_anything_is_written(
    file_queue: Queue, timeout: Any
) -> None:
    with pytest.raises((ValueError, TypeError), match="timeout must be"):
        file_queue.enqueue_and_wait("a", 1, timeout=timeout)
    assert file_queue.get_status("a") is None


def test_without_coordination_it_polls(file_queue: Queue, coordination_away: Any) -> None:
    coordination_away("listen", "notify", "claim", "renew", "holders", "get_marks")
    file_queue.execute(lambda job: job.payload)
    file_queue.start()
    assert file_queue.enqueue_and_wait("a", 1) == 1


def test_an_outage_of_the_database_is_waited_out(
    file_queue: Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    file_queue.execute(lambda job: job.payload)
    file_queue.start()
    look, outages = waiting.Awaited.look, iter(range(3))

    def fail_at_first(awaited: Any) -> Any:
        if next(outages, None) is not None:
            raise OperationalError("gone")
        return look(awaited)

    monkeypatch.setattr(waiting.Awaited, "look", fail_at_first)
    assert file_queue.enqueue_and_wait("a", 1) == 1
    # And one that lasts is told
    monkeypatch.setattr(
        waiting.Awaited, "look", lambda awaited: (_ for _ in ()).throw(OperationalError)
    )
    with pytest.raises(OperationalError):
        file_queue.enqueue_and_wait("b", 1, timeout=0.2)
