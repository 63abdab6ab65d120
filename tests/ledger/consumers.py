"""Handlers of events and tasks the tests send, declared where a test names their topic."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from kjo_django import BaseEvent, event_handler
from kjo_django.patterns.streams import AbstractStreamConsumer
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


def write_tasks_of(stream: str) -> None:
    """Declare a consumer of a stream that adds an entry for each task."""

    class Tasks(AbstractStreamConsumer[str]):
        task_display_name = "ledger entry"
        stream_key = stream
        group_name = f"{stream}-group"

        def parse_payload(self, fields: dict[str, Any]) -> str | None:
            return fields.get("job")

        def payload_identifier(self, payload: str) -> str:
            return payload

        def mark_processing(self, payload: str) -> None:
            pass

        def process_business(self, payload: str) -> None:
            Entry.objects.create(job=payload)

        def mark_completed(self, payload: str) -> None:
            pass

        def mark_failed(self, payload: str, error: str) -> None:
            pass


if STREAM := os.environ.get("KJO_TEST_STREAM"):
    write_tasks_of(STREAM)
