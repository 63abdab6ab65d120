"""Reading the records of template producers: JSON ``{id, data, type}`` and headers of its own."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from kjo_django.exceptions import MessageError
from kjo_django.messages import headers as names
from kjo_django.messages.envelope import MAX_ID_LENGTH, Message
from kjo_django.messages.serializers import JSON, storable_text
from kjo_django.patterns.items.producer import CONTENT_HASH
from kjo_django.registry import Handler, Route
from kjo_django.transports.base import Record

if TYPE_CHECKING:
    from kjo_django.patterns.items.item_handler import ItemHandler


class ItemRoute(Route):
    """Records about items. A retry of one carries our envelope around the same value."""

    def __init__(self, handler: ItemHandler) -> None:
        self.handler = handler

    def read(self, record: Record, *, max_bytes: int) -> tuple[Message, Handler | None]:
        """Read a record; its lease is the item's, whichever message speaks of it.

        :raises MessageError: it is no JSON object with an id, or is too large.
        """
        item_id = self._item_id(_object_of(record.value, max_bytes))
        if names.JOB_ID in record.headers:
            found = super().read(record, max_bytes=max_bytes)
            assert found is not None
            message, handler = found
            return replace(message, lease_id=item_id), handler
        assert record.value is not None
        content = names.text(record.headers, CONTENT_HASH) or _digest(record.value)
        message = Message(
            id=marker_of(item_id, content),
            type=self.handler.name,
            payload=record.value,
            content_type=JSON.content_type,
            replay_count=names.number(record.headers, names.REPLAY_COUNT, 0),
            timestamp=record.timestamp,
            lease_id=item_id,
        )
        return message, self.handler

    def _item_id(self, message: dict[str, Any]) -> str:
        try:
            item_id = self.handler.item_id_of(message)
        except Exception as error:
            # The thread that polls must outlive any message.
            raise MessageError("invalid", f"The message has no usable id: {error!r}") from error
        if not 0 < len(item_id) <= MAX_ID_LENGTH or storable_text(item_id) != item_id:
            raise MessageError(
                "invalid", f"The item's id must be text of 1 to {MAX_ID_LENGTH} characters"
            )
        return item_id


def marker_of(item_id: str, content: str) -> str:
    """Return the identity of an item's content: what two deliveries of it have in common."""
    marker = f"{item_id}#{content}"
    # The content's hash may be whatever others wrote into a header.
    fits = len(marker) <= MAX_ID_LENGTH and "\x00" not in marker
    return marker if fits else _digest(marker.encode())


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _object_of(value: bytes | None, max_bytes: int) -> dict[str, Any]:
    if not value:
        raise MessageError("invalid", "The message has no value")
    if len(value) > max_bytes:
        raise MessageError(
            "too_large", f"The message has {len(value)} bytes; the limit is {max_bytes}"
        )
    data = JSON.loads(value)
    if not isinstance(data, dict):
        raise MessageError("invalid", f"The message must be an object, not {type(data).__name__}")
    return data
