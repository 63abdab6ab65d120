"""Both kinds of transport, and who is woken and told."""

from __future__ import annotations

import pytest

from kjo_django.runtime import get_coordination

KJO = {"SERVICE_NAME": "tests", "QUEUES": {"ledger": {}, "other": {}}}
MEMORY = {"TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}}


@pytest.fixture(params=["database", "memory"])
def transport(request, settings):
    """Tests that name it run on the database's transport and on one that needs the relay."""
    settings.KJO = KJO | (MEMORY if request.param == "memory" else {})
    return request.param


@pytest.fixture
def calls(monkeypatch):
    """The channels woken, call by call."""
    woken: list[str] = []
    monkeypatch.setattr(get_coordination(), "notify", lambda *channels: woken.extend(channels))
    return woken


@pytest.fixture
def told(hear):
    """The facts of each job_enqueued signal."""
    return hear("job_enqueued")
