"""Handlers of events the tests publish; declared only where a test names a topic for them."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from kjo_django import BaseEvent, event_handler
from tests.ledger.jobs import _wait_for_file
from tests.ledger.models import Entry


def record(event: BaseEvent) -> None:
    """Add the event's one entry; fail, wait or kill the worker where its data say so."""
    data = event.data
    Entry.objects.create(job=event.id, note=str(data.get("note", "")))
    if data.get("fail"):
        raise RuntimeError("as asked")
    if path := data.get("path"):
        _wait_for_file(path)
    if (path := data.get("kill")) and not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)


if TOPIC := os.environ.get("KJO_TEST_EVENTS"):
    event_handler("RECORD", topic=TOPIC, max_attempts=3)(record)
