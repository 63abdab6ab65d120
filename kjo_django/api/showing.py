"""What programs are shown of payloads, results, keys and headers: whole, and without secrets."""

from __future__ import annotations

import json
from typing import Any

from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import redaction

LONGEST = 2**30
"""Bytes: a program gets what it stored, however long."""


def shown_payload(job: Job) -> Any:
    """Return what the handler is given."""
    return redaction.shown_payload(job, longest=LONGEST)


def shown_result(job: Job) -> Any:
    """Return what the handler returned."""
    return redaction.shown_result(job, longest=LONGEST)


def shown_value(letter: DeadLetter) -> Any:
    """Return what a dead letter holds."""
    return redaction.shown_value(letter, longest=LONGEST)


def shown_event(data: Any, event_type: str) -> Any:
    """Return what was stored along with an event's effects."""
    shown = redaction.redacted(data, also=redaction.hidden_by(event_type))
    # A lone surrogate is what no encoding takes; some databases store it all the same.
    return json.loads(json.dumps(shown, ensure_ascii=False).encode("utf-8", "replace"))


def shown_headers(headers: Any) -> dict[str, str]:
    """Return the headers of a message, stored in base64, as text."""
    read = names.from_json(headers)
    read.pop(names.HEADER_LIST, None)
    found = {name: shown_text(value) for name, value in sorted(read.items())}
    return {shown_text(name): str(value) for name, value in redaction.redacted(found).items()}


def shown_text(value: Any) -> str:
    """Return text as every encoding takes it, and bytes as text or else in hexadecimal."""
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"0x{raw.hex()}"
    return str(value).encode("utf-8", "replace").decode()
