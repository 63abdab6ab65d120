"""Fixtures for pytest: ``pytest_plugins = ["kjo_django.testing.pytest_plugin"]`` in a conftest.

They need pytest-django, whose ``db`` and ``settings`` they use.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def drain_jobs(db: None) -> Callable[..., Any]:
    """``kjo_django.testing.drain``, with the database."""
    from kjo_django.testing import drain

    return drain


@pytest.fixture
def immediate_jobs(db: None) -> Iterator[None]:
    """``kjo_django.testing.immediate`` for the whole test, with the database."""
    from kjo_django.testing import immediate

    with immediate():
        yield


@pytest.fixture
def isolated_jobs() -> Iterator[None]:
    """``kjo_django.testing.isolated`` for the whole test."""
    from kjo_django.testing import isolated

    with isolated():
        yield


@pytest.fixture
def enqueued_jobs(db: None) -> Callable[..., Any]:
    """``kjo_django.testing.all_enqueued``, with the database."""
    from kjo_django.testing import all_enqueued

    return all_enqueued


@pytest.fixture
def memory_transport(settings: Any) -> Iterator[Any]:
    """An empty memory transport in place of every configured one."""
    from kjo_django.runtime import get_transport

    given = getattr(settings, "KJO", {})
    backend = {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}
    aliases = {"default", *given.get("TRANSPORTS", {})}
    settings.KJO = {**given, "TRANSPORTS": dict.fromkeys(sorted(aliases), backend)}
    yield get_transport()


@pytest.fixture
def job_worker(transactional_db: None) -> Iterator[Callable[..., Any]]:
    """Start a real worker in a thread of this process: ``job_worker("emails")``. For what
    ``drain`` cannot show, such as ``enqueue_and_wait``. On SQLite the test database must be a file
    (``"TEST": {"NAME": …}``), since threads cannot share one in memory."""
    from kjo_django.worker import Worker

    started: list[tuple[Worker, threading.Thread]] = []

    def start(*queues: str) -> Worker:
        worker = Worker(list(queues) or None, owns_process=False)
        thread = threading.Thread(target=worker.run, name="kjo-test-worker", daemon=True)
        thread.start()
        started.append((worker, thread))
        return worker

    yield start
    for worker, _ in started:
        worker.stop()
    for _, thread in started:
        thread.join(60.0)
