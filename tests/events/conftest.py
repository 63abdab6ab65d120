"""Event topics of their own for each test, and what was declared for them forgotten after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kjo_django import conf, registry
from kjo_django.events import handlers


@pytest.fixture(autouse=True)
def _forget_declarations() -> Iterator[None]:
    queues, routes = dict(conf._declared), dict(registry._routes)
    events = dict(handlers._routes)
    yield
    for store, before in (
        (conf._declared, queues),
        (registry._routes, routes),
        (handlers._routes, events),
    ):
        store.clear()
        store.update(before)
    conf._queue_cache.clear()


# Databases with real transactions, for threads.
from tests.unit.conftest import (  # noqa: E402, F401
    _migrated_file,
    _migrated_postgres,
    postgres,
    real_database,
    sqlite_file,
)
