"""Decoded payloads, results and events as JSON can carry them, without what is secret."""

from __future__ import annotations

import math
from typing import Any

from kjo_django import registry
from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names
from kjo_django.models import Job
from kjo_django.operations.redaction import redacted
from kjo_django.producer.enqueue import result_of


def shown(value: Any, handler: str) -> Any:
    """Return a decoded value, redacted, as plain JSON: bytes in hexadecimal, and as text what JSON
    has no word for.

    :param handler: by name, whose own secrets are not shown either.
    """
    found = registry.find(handler)
    return _plain(redacted(value, also=found.options.redact if found is not None else ()))


def shown_result(job: Job) -> Any:
    """Return what the handler returned; text that says why where it cannot be read."""
    try:
        return shown(result_of(job), job.handler)
    except (MessageError, KeyError, TypeError) as error:
        return f"<{len(job.result or b'')} bytes: {error}>"


def shown_headers(headers: Any) -> dict[str, str]:
    """Return the headers of a message, stored in base64, as text."""
    found = {name: shown_text(value) for name, value in sorted(names.from_json(headers).items())}
    return {shown_text(name): str(value) for name, value in redacted(found).items()}


def shown_text(value: Any) -> str:
    """Return text as every encoding takes it, and bytes as text or else in hexadecimal."""
    if isinstance(value, bytes | bytearray | memoryview):
        raw = bytes(value)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return f"0x{raw.hex()}"
    # A lone surrogate is what no encoding takes; all else is data, whatever it looks like.
    return str(value).encode("utf-8", "replace").decode()


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, dict):
        return {shown_text(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_plain(each) for each in value]
    return shown_text(value)
