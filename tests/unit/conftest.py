"""What is sent to a database, and definitions that are forgotten."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from kjo_django import conf, registry
from tests.declarations import forgetting
from tests.faults.clock import Clock


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts psycopg is asked to send, one for each round trip."""
    import psycopg  # an extra, which may be missing

    texts: list[str] = []
    execute = psycopg.Cursor.execute

    def recording(self: Any, query: Any, *arguments: Any, **options: Any) -> Any:
        texts.append(str(query))
        return execute(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Cursor, "execute", recording)
    return texts


@pytest.fixture
def forgotten_definitions() -> Iterator[None]:
    """Handlers, routes and queues that a test defines are forgotten after it."""
    with forgetting(registry._handlers, registry.limited, registry._routes, conf._declared):
        yield


@pytest.fixture
def standing_clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Time passes when the test says so. What is asked of a database once in a while is asked, or
    not, by decision: who counts statements names this fixture before the worker's."""
    clock = Clock(stands=True)
    clock.install(monkeypatch)
    return clock
