"""A message of the client as a record of ours, whatever its producer has put into it."""

from __future__ import annotations

from operator import methodcaller
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE

from kjo_django.messages.headers import HEADER_LIST, folded
from kjo_django.transports.base import Record, timestamp_of
from kjo_django.transports.kafka.clients import describe
from kjo_django.transports.watermark import Assignment

UNREADABLE_HEADERS = "kjo-unreadable-headers"
"""The only header of a record whose headers cannot be read; its value says why."""

read_headers = methodcaller("headers")
"""The client fails by returning a list of null pointers beside an error. Calls that the interpreter
has specialized do not look for such an error, and to iterate that list kills the process; a call by
way of C always looks."""


def record_of(message: Any, offset: int, assignment: Assignment) -> Record:
    """Return a message as ours, handed out under ``assignment``."""
    kind, milliseconds = message.timestamp()
    topic, partition = assignment.partition
    return Record(
        topic,
        partition,
        offset,
        message.key(),
        message.value(),
        headers_of(message),
        None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_of(milliseconds),
        assignment.epoch,
        assignment,
    )


def headers_of(message: Any) -> dict[str, bytes]:
    """Return the headers; of a name given twice the last counts, and none is forgotten, see
    ``messages.headers.folded``.

    A name that is not UTF-8 makes the client raise, at every try. The record is handed out all the
    same, with `UNREADABLE_HEADERS` alone: it must not hold up its partition for ever.
    """
    try:
        headers = read_headers(message)
    except Exception as error:
        return {UNREADABLE_HEADERS: describe(error.__cause__ or error).encode()}
    if not headers:
        return {}
    found: dict[str, bytes] = dict(headers)
    is_all = len(found) == len(headers) and None not in found.values()
    return found if is_all and HEADER_LIST not in found else folded(headers)
