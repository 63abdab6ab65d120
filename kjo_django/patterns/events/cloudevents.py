"""CloudEvents 1.0 on a transport with headers, after the Kafka protocol binding: an event's fields
as the attributes of a CloudEvent, and back.

In structured mode the value is one JSON object of attributes and data. In binary mode the value is
the data, and each attribute a header ``ce_<name>``. docs/reference/protocol.md has the mapping.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from kjo_django.conf import EVENT_FORMATS
from kjo_django.exceptions import MessageError, PayloadError
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, load_value, serializer_for, storable_text

PLAIN, STRUCTURED, BINARY = EVENT_FORMATS
MEDIA_TYPE = "application/cloudevents"
"""How the content type begins of every CloudEvent in structured mode."""
CONTENT_TYPE = f"{MEDIA_TYPE}+json"
PREFIX = "ce_"
"""How the header of an attribute begins in binary mode."""
VERSION = "1.0"

REQUIRED = ("specversion", "id", "source", "type")
OPTIONAL = ("time", "subject", "dataschema", "datacontenttype")
SHARED = ("id", "source", "type", "subject", "dataschema")
"""The attributes that an event's own format has under the same name."""
OWN_EXTENSIONS = {
    "dataversion": "version",
    "correlationid": "correlationId",
    "causationid": "causationId",
    "userid": "userId",
}
"""The extension attributes that hold fields of an event; the last three those of its metadata."""
DATA = ("data", "data_base64")
TAKEN = frozenset({*REQUIRED, *OPTIONAL, *OWN_EXTENSIONS, *DATA})

_NAME = re.compile(r"[a-z0-9]+")
_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_URI_REFERENCE = re.compile(r"[\w\-.~:/?#\[\]@!$&'()*+,;=%]+", re.ASCII)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:.")
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d:\d\d)", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_INTEGERS = range(-(2**31), 2**31)


def format_of(headers: Mapping[str, str], payload: Any = None) -> str:
    """Return the format of an event's record, one of ``EVENT_FORMATS``.

    :param payload: the decoded value, where it is known. Some clients write structured mode with
        the content type of the data.
    :raises MessageError: it is a CloudEvent in a format that is not read here.
    """
    media_type = headers.get(names.CONTENT_TYPE, "").partition(";")[0].strip().lower()
    if media_type == CONTENT_TYPE:
        return STRUCTURED
    if media_type.startswith(MEDIA_TYPE):
        raise MessageError(
            "deserialization", f"A CloudEvent is read as {CONTENT_TYPE}, not as {media_type[:80]!r}"
        )
    is_binary = any(f"{PREFIX}{name}" in headers for name in REQUIRED)
    if is_binary:
        return BINARY
    is_plain = not isinstance(payload, Mapping) or "timestamp" in payload
    return PLAIN if is_plain or "specversion" not in payload else STRUCTURED


# --- Reading --------------------------------------------------------------------------------------


def read_data(value: bytes | None, headers: Mapping[str, str]) -> tuple[bytes, str]:
    """Return the data of a record in binary mode, ``{}`` for none, and its content type.

    :raises MessageError: no serializer here reads the content type.
    """
    if not value:
        return b"{}", JSON.content_type
    return value, serializer_for(headers.get(names.CONTENT_TYPE) or JSON.content_type).content_type


def fields_of(
    event_format: str,
    payload: Any,
    headers: Mapping[str, str],
    received_at: datetime | None,
    *,
    decodes_data: bool = True,
) -> dict[str, Any]:
    """Return the fields of a CloudEvent as those of an event's own format.

    :param payload: the decoded value of the record.
    :param received_at: the time of a CloudEvent without one.
    :param decodes_data: False: the data is left empty.
    :raises MessageError: it is no CloudEvent of version 1.0, or its data cannot be decoded.
    """
    given = _read_attributes(event_format, payload, headers)
    data = None
    if decodes_data:
        data = payload if event_format == BINARY else _data_of(given)
    found: dict[str, Any] = {name: given[name] for name in SHARED if name in given}
    found |= _own_fields(given)
    if "time" in given:
        found["timestamp"] = _milliseconds(given["time"])
    else:
        found["timestamp"] = _since_epoch(received_at or datetime.now(UTC))
    return {**found, "data": {} if data is None else data}


def _own_fields(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what an event's own format has in its version and its metadata."""
    found: dict[str, Any] = {}
    own = {field: given[name] for name, field in OWN_EXTENSIONS.items() if name in given}
    if "version" in own:
        found["version"] = own.pop("version")
    extra = {name: given[name] for name in given if name not in TAKEN and _NAME.fullmatch(name)}
    if own or extra:
        found["metadata"] = {**extra, **own}
    return found


def _read_attributes(
    event_format: str, payload: Any, headers: Mapping[str, str]
) -> Mapping[str, Any]:
    """Return the attributes of a CloudEvent, in structured mode with its data.

    :raises MessageError: it is no CloudEvent of version 1.0.
    """
    given: Mapping[str, Any]
    if event_format == BINARY:
        prefix = len(PREFIX)
        given = {name[prefix:]: text for name, text in headers.items() if name.startswith(PREFIX)}
    elif isinstance(payload, Mapping):
        given = {name: value for name, value in payload.items() if value is not None}
    else:
        raise _invalid("it is not an object")
    if missing := [name for name in REQUIRED if name not in given]:
        raise _invalid(f"it has no {', '.join(missing)}")
    if given["specversion"] != VERSION:
        raise _invalid(f"specversion must be {VERSION!r}, not {given['specversion']!r:.80}")
    return given


def _data_of(envelope: Mapping[str, Any]) -> Any:
    """Return the decoded data of a CloudEvent in structured mode, None for none."""
    content_type = envelope.get("datacontenttype", JSON.content_type)
    if not isinstance(content_type, str):
        raise _invalid(f"datacontenttype must be text, not {content_type!r:.80}")
    if "data_base64" not in envelope:
        data = envelope.get("data")
        if data is None or serializer_for(content_type) is JSON:
            return data
        if not isinstance(data, str):
            raise _invalid(f"data that is {content_type[:80]!r} must be text or data_base64")
        return load_value(data.encode(), content_type)
    if "data" in envelope:
        raise _invalid("it has both data and data_base64")
    try:
        decoded = base64.b64decode(envelope["data_base64"], validate=True)
    except (ValueError, TypeError):
        raise _invalid("data_base64 is no base64") from None
    return load_value(decoded, content_type)


def _milliseconds(time: Any) -> int:
    """Return a time as RFC 3339 writes it in milliseconds of Unix time."""
    text = time.upper() if isinstance(time, str) else ""
    try:
        found = datetime.fromisoformat(text) if _TIME.fullmatch(text) else None
    except ValueError:
        found = None
    if found is None or found <= _EPOCH:
        raise _invalid(f"time must be a time after 1970 as RFC 3339 writes it, not {time!r:.80}")
    return _since_epoch(found)


def _since_epoch(moment: datetime) -> int:
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def _invalid(why: str) -> MessageError:
    return MessageError("invalid", f"Not a valid CloudEvent: {why}")


# --- Writing --------------------------------------------------------------------------------------


def is_uri_reference(text: str) -> bool:
    """Return whether a text has only characters of a URI reference, as ``source`` must."""
    return _URI_REFERENCE.fullmatch(text) is not None


def written(event_format: str, fields: Mapping[str, Any]) -> tuple[bytes, dict[str, str]]:
    """Return an event as the value and the headers of a CloudEvent.

    :param fields: those of the event's own format.
    :raises PayloadError: one of them cannot be an attribute.
    """
    attributes = _attributes_of(fields)
    if event_format == BINARY:
        headers = {f"{PREFIX}{name}": _as_text(value) for name, value in attributes.items()}
        return JSON.dumps(fields["data"]), {names.CONTENT_TYPE: JSON.content_type, **headers}
    attributes["datacontenttype"] = JSON.content_type
    return JSON.dumps({**attributes, "data": fields["data"]}), {names.CONTENT_TYPE: CONTENT_TYPE}


def _attributes_of(fields: Mapping[str, Any]) -> dict[str, Any]:
    time = _EPOCH + timedelta(milliseconds=fields["timestamp"])
    found: dict[str, Any] = {
        "specversion": VERSION,
        "id": fields["id"],
        "source": fields["source"],
        "type": fields["type"],
        "time": time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "subject": fields.get("subject"),
        "dataschema": fields.get("dataschema"),
        "dataversion": fields["version"],
    }
    extra = dict(fields.get("metadata", {}))
    for name in ("correlationid", "causationid", "userid"):
        value = extra.pop(OWN_EXTENSIONS[name], None)
        # Handlers inherit the first two from what others wrote, which must not fail them.
        found[name] = value and _CONTROLS.sub("\N{REPLACEMENT CHARACTER}", value)
    if not is_uri_reference(found["source"]):
        raise PayloadError(f"source must be a URI reference, not {found['source']!r:.80}")
    schema = found["dataschema"]
    if schema is not None and not (is_uri_reference(schema) and _SCHEME.match(schema)):
        raise PayloadError(f"dataschema must be a URI, not {schema!r:.80}")
    for name, value in extra.items():
        _check_extension(name, value)
    found |= extra
    for name, value in found.items():
        if isinstance(value, str) and (storable_text(value) != value or _CONTROLS.search(value)):
            raise PayloadError(f"{name} has characters that no attribute may have: {value!r:.80}")
    return {name: value for name, value in found.items() if value is not None}


def _check_extension(name: str, value: Any) -> None:
    if not _NAME.fullmatch(name) or name in TAKEN:
        why = "is the name of another attribute" if name in TAKEN else "must be of a-z and 0-9"
        raise PayloadError(f"metadata.{name:.80} cannot be an attribute of a CloudEvent: it {why}")
    is_value = value is None or isinstance(value, str | bool)
    if not is_value and not (isinstance(value, int) and value in _INTEGERS):
        raise PayloadError(
            f"metadata.{name:.80} must be text, True, False or an integer of 32 bits to be an "
            f"attribute of a CloudEvent, not {value!r:.80}"
        )


def _as_text(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
