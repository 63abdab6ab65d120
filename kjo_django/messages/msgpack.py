"""MessagePack: smaller than JSON, and bytes stay bytes. Needs the extra ``msgpack``.

@job(serializer=MSGPACK)
queue = Queue("images", serializer=MSGPACK)
"""

from __future__ import annotations

from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

from django.utils.duration import duration_iso_string
from django.utils.functional import Promise

from kjo_django.exceptions import MessageError, PayloadError
from kjo_django.messages.serializers import register_serializer

try:
    import msgpack
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: for MessagePack, pip install 'kjo-django[msgpack]'") from error


class MsgpackSerializer:
    """MessagePack. Dates, Decimals and UUIDs become text, as in JSON; tuples become lists."""

    content_type = "application/msgpack"

    def dumps(self, value: Any) -> bytes:
        """Serialize; unknown types, lone surrogates and integers beyond 64 bits are refused."""
        try:
            return bytes(msgpack.packb(value, default=_as_text, use_bin_type=True))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise PayloadError(f"The payload cannot be written as MessagePack: {error}") from error

    def loads(self, data: bytes) -> Any:
        """Deserialize; trailing data, broken UTF-8 and absurd nesting are refused."""
        try:
            return msgpack.unpackb(data, raw=False, strict_map_key=False)
        except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
            raise MessageError("deserialization", f"Not valid MessagePack: {error}") from error


def _as_text(value: Any) -> Any:
    if isinstance(value, datetime | date | time):
        return value.isoformat()
    if isinstance(value, timedelta):
        return duration_iso_string(value)
    if isinstance(value, Decimal | UUID | Promise):
        return str(value)
    raise TypeError(f"{type(value).__name__} is not serializable")


MSGPACK = MsgpackSerializer()
register_serializer(MSGPACK)
