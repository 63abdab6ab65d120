"""Payloads, results, keys and headers in answers: complete, and without secrets."""

from __future__ import annotations

import json
from typing import Any

from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import redaction

LONGEST = 2**30
"""Longest value in bytes: a program gets all that it stored."""


def shown_payload(job: Job) -> Any:
    """Return the payload."""
    return redaction.shown_payload(job, longest=LONGEST)


def shown_result(job: Job) -> Any:
    """Return the result."""
    return redaction.shown_result(job, longest=LONGEST)


def shown_value(letter: DeadLetter) -> Any:
    """Return a dead letter's payload."""
    return redaction.shown_value(letter, longest=LONGEST)


def shown_event(data: Any, event_type: str) -> Any:
    """Return the data stored with an event."""
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
    """Return text that every encoding can hold, and bytes as text or else in hexadecimal."""
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"0x{raw.hex()}"
    return str(value).encode("utf-8", "replace").decode()
