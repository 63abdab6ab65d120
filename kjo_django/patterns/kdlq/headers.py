"""KDLQ's headers, encoded as the Java library encodes them: 4-byte and 8-byte big-endian numbers.

Our headers are replaced, never appended, so a message that is redelivered a thousand times has each
once. Headers of the origin are set once and stay.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from datetime import datetime

from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.exceptions import import_path
from kjo_django.failure_facts import error_text
from kjo_django.messages.serializers import MAX_ERROR_LENGTH
from kjo_django.patterns.kdlq.config import DlqConfig
from kjo_django.transports.base import Record

REDELIVERED = "KDLQ_Redelivered"
KILLS = "KDLQ_Kills"
MARKER = "KDLQ_PrcMarker"
ORIGINAL_OFFSET = "KDLQ_OrigOffset"
ORIGINAL_PARTITION = "KDLQ_OrigPartition"
ORIGINAL_TIMESTAMP = "KDLQ_OrigTs"
ORIGINAL_TOPIC = "KDLQ_OrigTopic"
ERROR_CLASS = "KDLQ_ErrorClass"
ERROR_MESSAGE = "KDLQ_ErrorMessage"
FAILED_AT = "KDLQ_FailedAt"

_MAX_INT = 2**31 - 1


def integer(value: int) -> bytes:
    """Encode a Java int. A counter that would overflow stays at the largest value."""
    return struct.pack(">i", min(value, _MAX_INT))


def long(value: int) -> bytes:
    """Encode a Java long."""
    return struct.pack(">q", value)


def counter(headers: Mapping[str, bytes], name: str) -> int:
    """Decode a counter. A missing, empty or unreadable one is 0."""
    value = headers.get(name)
    if value is None or len(value) != 4:
        return 0
    return max(0, int(struct.unpack(">i", value)[0]))


def redelivered(record: Record, config: DlqConfig, marker: str) -> dict[str, bytes]:
    """Return the headers of the next redelivery."""
    count = counter(record.headers, REDELIVERED) + 1
    return {**_kept(record, config, marker), REDELIVERED: integer(count)}


def killed(
    record: Record, config: DlqConfig, marker: str, error: BaseException | None
) -> dict[str, bytes]:
    """Return the headers of a message for the dead-letter topic."""
    headers = _kept(record, config, marker)
    headers[KILLS] = integer(counter(record.headers, KILLS) + 1)
    headers[FAILED_AT] = long(_milliseconds(CLOCK.now()))
    headers.pop(ERROR_CLASS, None)
    headers.pop(ERROR_MESSAGE, None)
    if error is not None:
        headers[ERROR_CLASS] = import_path(type(error)).encode()
        if get_settings().dead_letter_exception_headers:
            headers[ERROR_MESSAGE] = error_text(error, MAX_ERROR_LENGTH).encode()
    return headers


def _kept(record: Record, config: DlqConfig, marker: str) -> dict[str, bytes]:
    headers = {ORIGINAL_TOPIC: record.topic.encode()}
    if config.informational_headers:
        headers[ORIGINAL_OFFSET] = long(record.offset)
        headers[ORIGINAL_PARTITION] = integer(record.partition)
        if record.timestamp is not None:
            headers[ORIGINAL_TIMESTAMP] = long(_milliseconds(record.timestamp))
    # The first origin wins over where this hop was read.
    return {**headers, **record.headers, MARKER: marker.encode()}


def _milliseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1000)
