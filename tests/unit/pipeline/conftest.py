"""A worker without threads, on the databases and transports a test names."""

from __future__ import annotations

import pytest

from kjo_django import registry
from tests.unit.deliveries import KJO, MEMORY, Bench


@pytest.fixture
def _database(request):
    named = (name for name in ("real_database", "innodb") if name in request.fixturenames)
    request.getfixturevalue(next(named, "sqlite_file"))


@pytest.fixture(params=["memory", "database"])
def transport(request, settings, _database):
    """Tests that name it run on a log and on a transport that shares the jobs' transactions."""
    settings.KJO = KJO | (MEMORY if request.param == "memory" else {})
    return request.param


@pytest.fixture
def _on_the_database(settings, _database):
    """The test runs on the transport that shares the jobs' transactions only."""
    settings.KJO = KJO


@pytest.fixture
def _configured(request, settings, _database):
    if "_on_the_database" in request.fixturenames:
        request.getfixturevalue("_on_the_database")
    elif "transport" in request.fixturenames:
        request.getfixturevalue("transport")
    else:
        settings.KJO = KJO | MEMORY


@pytest.fixture
def bench(_configured, monkeypatch):
    """A worker, and handlers that are forgotten with it."""
    monkeypatch.setattr(registry, "_handlers", dict(registry._handlers))
    bench = Bench()
    yield bench
    bench.close()


@pytest.fixture
def another(bench):
    """A second worker on the same queue."""
    another = Bench(worker="another")
    yield another
    another.close()
