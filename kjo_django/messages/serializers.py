"""Bytes ↔ values. The payload is serialized once, when it is enqueued, and travels byte for byte.

A serializer is named by its content type, which is stored with the bytes and sent along, so nothing
ever parses a payload with a codec of its own guess. Never pickle.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Protocol, cast, runtime_checkable

from django.core.serializers.json import DjangoJSONEncoder

from kjo_django.exceptions import KjoError, MessageError, PausableError, PayloadError, text_of
from kjo_django.values import is_kept

MAX_ERROR_LENGTH = 500
"""Characters of an error text kept; the traceback is kept elsewhere."""
MAX_CONTENT_TYPE = 50
"""What the columns of content types hold."""


@runtime_checkable
class Serializer(Protocol):
    """Turns values into bytes and back. Stateless and thread-safe."""

    content_type: str

    def dumps(self, value: Any) -> bytes:
        """Serialize; raises ``PayloadError`` for what cannot be."""

    def loads(self, data: bytes) -> Any:
        """Deserialize; raises ``MessageError`` (reason ``deserialization``) for what cannot be."""


class JsonSerializer:
    """JSON in UTF-8. Dates, Decimals and UUIDs become text, as Django's own encoder writes them."""

    content_type = "application/json"

    def dumps(self, value: Any) -> bytes:
        """Serialize; NaN, infinities, unknown types and lone surrogates are refused."""
        if (
            _quick_dumps is not None
            and type(value) is dict
            and _PLAIN.issuperset(map(type, value.values()))
        ):
            try:
                return _quick_dumps(value)
            except TypeError:
                pass  # The encoder below knows why, or takes what that one does not
        try:
            return _ENCODER.encode(value).encode()
        except (TypeError, ValueError, RecursionError) as error:
            raise PayloadError(f"The payload cannot be written as JSON: {error}") from error

    def loads(self, data: bytes) -> Any:
        """Deserialize; broken UTF-8, trailing data, NaN and absurd nesting are refused."""
        if _quick_loads is not None and _MANY_DIGITS not in data.translate(_ANY_DIGIT):
            try:
                return _quick_loads(data)
            except ValueError:
                pass  # The decoder below knows why, or takes what that one does not
        try:
            return _DECODER.decode(data.decode())
        except UnicodeDecodeError as error:
            raise MessageError("deserialization", f"Not valid UTF-8: {error}") from error
        except RecursionError as error:
            raise MessageError("deserialization", "JSON nested too deeply") from error
        except ValueError as error:
            raise MessageError("deserialization", f"Not valid JSON: {error}") from error


_ENCODER = DjangoJSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
_CANONICAL = DjangoJSONEncoder(
    ensure_ascii=False, allow_nan=False, separators=(",", ":"), sort_keys=True
)


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


try:
    from orjson import dumps as _quick_dumps
    from orjson import loads as _quick_loads
except ImportError:
    _quick_dumps = _quick_loads = None  # type: ignore[assignment]

# All it writes for us: NaN it would write as null, and enumerations it would take, which we refuse.
# Of these both encoders make the same bytes.
_PLAIN = frozenset({str, int, bool, type(None)})


# It would read a larger integer as a float, without a word.
_MANY_DIGITS = b"0" * 19
_ANY_DIGIT = bytes.maketrans(b"123456789", b"0" * 9)

_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
JSON = JsonSerializer()
_serializers: dict[str, Serializer] = {JSON.content_type: JSON}
_OPTIONAL = {"application/msgpack": "kjo_django.messages.msgpack"}
"""Those that need a package of their own; imported when the first message asks for one."""


def register_serializer(serializer: Serializer) -> None:
    """Make a serializer known under its content type, replacing an earlier one."""
    _serializers[serializer.content_type] = serializer


def serializer_for(content_type: str) -> Serializer:
    """Return the serializer of a content type; parameters such as a charset are ignored. A content
    type that ends in ``+json`` is JSON, unless one is registered for it.

    Raises ``MessageError`` (reason ``deserialization``) when none is registered.
    """
    known = _serializers.get(content_type)
    if known is not None:
        return known
    name = content_type.partition(";")[0].strip().lower()
    if name in _OPTIONAL and name not in _serializers:
        try:
            import_module(_OPTIONAL[name])  # it registers itself
        except ImportError as error:
            raise MessageError("deserialization", f"{name} cannot be read: {error}") from error
    if name.endswith("+json") and name not in _serializers:
        return JSON
    try:
        return _serializers[name]
    except KeyError:
        raise MessageError(
            "deserialization", f"No serializer is registered for {content_type[:80]!r}"
        ) from None


def load_value(data: bytes, content_type: str) -> Any:
    """Deserialize a payload with the serializer of its content type.

    :raises MessageError: (reason ``deserialization``) it cannot be, whatever the serializer raised.
    :raises PausableError: it cannot be for now: what the serializer needs is away.
    """
    serializer = _serializers.get(content_type) or serializer_for(content_type)
    try:
        return serializer.loads(data)
    except (MessageError, PausableError):
        raise
    except Exception as error:
        why = f"Not valid {content_type[:80]}: {type(error).__name__}: {text_of(error)}"
        raise MessageError("deserialization", why) from error


# --- Results are wrapped, so that None is a result and no result is not None ----------------------


_FOREIGN = b"\0"
"""Begins a result that is not wrapped, as its serializer wrote it: the content type and a line feed
follow. Neither JSON nor MessagePack can begin a wrapped result with it."""
_WRAPPING = frozenset({JSON.content_type, *_OPTIONAL})
"""Content types that take the mapping a result is wrapped in; one of somebody's own may take
nothing but text."""


def dump_result(value: Any, serializer: Serializer = JSON, own: Serializer | None = None) -> bytes:
    """Serialize what a handler returned.

    :param serializer: of its payload, which is what the stored row names.
    :param own: of the results, where it is another one. If not given, the payload's, or the one
        that this names as its ``result_serializer``.
    :raises PayloadError: the serializer cannot write it, whatever it raised.
    """
    if own is None:
        own = cast(Serializer, getattr(serializer, "result_serializer", serializer))
    try:
        if own.content_type == serializer.content_type and own.content_type in _WRAPPING:
            return serializer.dumps({"v": value})
        return b"".join([_FOREIGN, own.content_type.encode(), b"\n", own.dumps(value)])
    except PayloadError:
        raise
    except Exception as error:
        raise PayloadError(
            f"{own.content_type}: {type(error).__name__}: {text_of(error)}"
        ) from error


def load_result(data: bytes, serializer: Serializer = JSON) -> Any:
    """Undo ``dump_result``, given the payload's serializer."""
    if data.startswith(_FOREIGN):
        content_type, _, body = data[1:].partition(b"\n")
        return load_value(body, content_type.decode("ascii", "replace"))
    return serializer.loads(data)["v"]


# --- Text that must fit and must be storable ------------------------------------------------------


def one_line(text: str) -> str:
    """Return text with its line breaks, control characters and what no encoding knows spelled out:
    what others wrote must not look like several records of the log, nor keep one from it."""
    return text if text.isprintable() else repr(text)[1:-1]


def storable_text(text: str, limit: int | None = None) -> str:
    """Return ``text`` as every database takes it: no NUL, no lone surrogates, at most ``limit``
    code points."""
    text = text.replace("\x00", "\N{REPLACEMENT CHARACTER}")
    text = text.encode("utf-8", "replace").decode()
    return text if limit is None else text[:limit]


DEEPEST_STORED = 30
"""Levels of JSON that are kept in a column of it; MariaDB takes no more than 32."""


def storable_json(value: Any, levels: int = DEEPEST_STORED) -> Any:
    """Return a decoded value as every database keeps it in JSON: its texts as ``storable_text``
    makes them, text for numbers that one of them would round or refuse and for what lies deeper
    than so many levels."""
    if isinstance(value, str):
        return storable_text(value)
    if isinstance(value, int | float) and not is_kept(value):
        return str(value)
    if not isinstance(value, Mapping | list | tuple):
        return value
    if not levels:
        return "<too deep>"
    if isinstance(value, Mapping):
        return {
            storable_text(name) if isinstance(name, str) else name: storable_json(each, levels - 1)
            for name, each in value.items()
        }
    return [storable_json(each, levels - 1) for each in value]


def kept_json(value: Any, most: int) -> Any:
    """Return a value as JSON gives it back; None where a column cannot keep it as it is, or it
    takes more than so many bytes."""
    data = JSON.dumps(value)
    found = JSON.loads(data) if len(data) <= most else None
    return found if storable_json(found) == found else None


def loads_for_display(data: bytes, content_type: str) -> Any:
    """Decode for people; bytes that cannot be decoded are shown as text that says so."""
    try:
        return load_value(data, content_type)
    except KjoError as error:
        return f"<{len(data)} bytes: {error}>"


# --- Identity of content --------------------------------------------------------------------------


def canonical_json(value: Any) -> bytes:
    """Serialize so that equal values give equal bytes: sorted keys, no white space."""
    try:
        return _CANONICAL.encode(value).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise PayloadError(f"The value cannot be written as JSON: {error}") from error


def content_id(value: Any, length: int = 16) -> str:
    """Return the first ``length`` hex digits of the SHA-256 of the canonical JSON."""
    return hashlib.sha256(canonical_json(value)).hexdigest()[:length]
