"""Payloads with a schema of a Confluent Schema Registry: Avro, JSON Schema and Protobuf, by the
client of confluent-kafka. Needs the extra ``registry`` and ``KJO["SCHEMA_REGISTRY"]``.

ORDERS = AvroSerializer("orders-value", schema)

@job(serializer=ORDERS)
"""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from abc import ABC, abstractmethod
from base64 import b64encode
from collections.abc import Callable, Mapping
from typing import Any

from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.serializers.json import DjangoJSONEncoder

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.exceptions import (
    KjoError,
    MessageError,
    PayloadError,
    ServiceUnavailableError,
    text_of,
)
from kjo_django.messages.serializers import JSON, MAX_CONTENT_TYPE

try:
    from confluent_kafka.schema_registry import SchemaRegistryClient, SchemaRegistryError, avro
    from confluent_kafka.schema_registry import json_schema as json_schemas
    from confluent_kafka.schema_registry import protobuf as protobufs
    from confluent_kafka.schema_registry.error import OAuthTokenError
    from confluent_kafka.serialization import MessageField, SerializationContext
    from fastavro import parse_schema
    from fastavro.validation import ValidationError, validate
    from google.protobuf import json_format
except ImportError as error:
    raise ImportError(
        f"{error}: for a schema registry, pip install 'kjo-django[registry]'"
    ) from error

DEFAULTS = {"timeout": 5, "max.retries": 1, "retries.wait.ms": 200}
"""Of the client. By its own it would wait without an end, and a lane or a web request with it; a
worker pauses in an outage."""
DENIED = (401, 403, 429)
"""Answers that say nothing of the message: who asks may not, or not now."""
UNKNOWN = range(40400, 40500)
"""Codes of a registry without such a subject, version or schema; other servers' 404 have none."""

_URL = re.compile(r"\s*(https?|mock)://.")
_lock = threading.Lock()
_clients: dict[tuple[int, str], Any] = {}


def client() -> Any:
    """Return the client of ``KJO["SCHEMA_REGISTRY"]``, one in each process.

    :raises ImproperlyConfigured: the setting is missing or cannot be used.
    """
    options = get_settings().schema_registry
    if not all(map(_URL.match, str(options.get("url", "")).split(","))):
        raise ImproperlyConfigured(
            "KJO['SCHEMA_REGISTRY'] needs a 'url' that begins with http:// or https:// (or, for "
            "tests within one process, mock://)."
        )
    with _lock:
        key = (os.getpid(), repr(sorted(options.items())))
        if key not in _clients:
            try:
                _clients[key] = SchemaRegistryClient.new_client({**DEFAULTS, **options})
            except (ValueError, TypeError, OSError) as error:
                raise ImproperlyConfigured(f"KJO['SCHEMA_REGISTRY']: {error}") from error
        return _clients[key]


class RegistrySerializer(ABC):
    """Writes payloads that fit a schema, and reads what was written with any schema of the registry
    that is compatible with it.

    :param subject: the schema is registered under it; of topics, the registry's other clients name
        it ``<topic>-value``.
    :param options: of the client's serializer, such as ``{"auto.register.schemas": False}``.
    :param content_type: ``application/vnd.<subject>.<format>`` if not given.
    :raises ValueError: the content type has more than 50 characters.
    """

    result_serializer = JSON
    """A result has another shape than its payload, and no schema."""
    _format: str

    def __init__(
        self,
        subject: str,
        *,
        options: Mapping[str, Any] | None = None,
        content_type: str | None = None,
    ) -> None:
        self.subject = subject
        self.content_type = content_type or f"application/vnd.{subject}.{self._format}".lower()
        if len(self.content_type) > MAX_CONTENT_TYPE:
            raise ValueError(
                f"The content type {self.content_type!r} has more than {MAX_CONTENT_TYPE} "
                "characters; give another one as content_type=…"
            )
        self._options = {**(options or {}), "subject.name.strategy": lambda *given: subject}
        self._context = SerializationContext(subject, MessageField.VALUE)
        self._made: tuple[Any, Callable[..., Any], Callable[..., Any]] | None = None

    def dumps(self, value: Any) -> bytes:
        """Serialize; a payload that does not fit the schema is refused.

        :raises ServiceUnavailableError: the registry cannot be asked.
        """
        try:
            return bytes(self._write(self._codecs()[0], value))
        except (KjoError, ImproperlyConfigured):
            raise
        except Exception as error:
            if is_outage(error):
                raise _unavailable(error) from error
            why = f"The payload does not fit the schema of {self.subject}: {self._why(error)}"
            if isinstance(error, SchemaRegistryError):
                why = f"The schema registry refuses the schema of {self.subject}: {error}"
            raise PayloadError(why) from error

    def loads(self, data: bytes) -> Any:
        """Deserialize; an unknown schema, and bytes that are not framed as the registry's clients
        frame them, are refused.

        :raises ServiceUnavailableError: the registry cannot be asked.
        """
        try:
            return self._read(self._codecs()[1], data)
        except ImproperlyConfigured as error:
            # It is the settings that are wrong, and the message can wait for them.
            raise ServiceUnavailableError(str(error)) from error
        except Exception as error:
            if is_outage(error):
                raise _unavailable(error) from error
            why = f"Not valid {self.content_type}: {self._why(error)}"
            if isinstance(error, SchemaRegistryError):
                schema = int.from_bytes(data[1:5], "big")
                why = f"The schema registry does not give the schema {schema}: {error}"
            raise MessageError("deserialization", why) from error

    def _codecs(self) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the client's serializer and deserializer, made for the client in force.

        :raises ImproperlyConfigured: they cannot be made.
        """
        now = client()
        made = self._made
        if made is None or made[0] is not now:
            try:
                self._made = made = (now, *self._make(now))
            except Exception as error:
                if is_outage(error):
                    raise
                where = f"{type(self).__name__}({self.subject!r})"
                raise ImproperlyConfigured(
                    f"{where}: its schema or its options cannot be used: {text_of(error)}"
                ) from error
        return made[1], made[2]

    def check(self) -> None:
        """Make the client's serializer, which connects to nothing.

        :raises ImproperlyConfigured: the schema, an option, or the setting cannot be used.
        """
        self._codecs()

    def _write(self, write: Callable[..., Any], value: Any) -> Any:
        return write(value, self._context)

    def _read(self, read: Callable[..., Any], data: bytes) -> Any:
        return read(data, self._context)

    def _why(self, error: Exception) -> str:
        return text_of(error)

    @abstractmethod
    def _make(self, client: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return the client's serializer and deserializer."""


class AvroSerializer(RegistrySerializer):
    """Avro. Payloads are read by the rules of Avro: fields that the schema does not have are left
    out, those that the writer's did not have get their defaults.

    :param schema: the text of the schema, a record with the arguments of the job as its fields.
    :raises ValueError: it is not the text of a schema.
    """

    _format = "avro"

    def __init__(self, subject: str, schema: str, **given: Any) -> None:
        super().__init__(subject, **given)
        self.schema = schema
        try:
            self._parsed = parse_schema(json.loads(schema))
        except Exception as error:
            text = f"AvroSerializer({subject!r}): this is not the text of an Avro schema: {error!r}"
            raise ValueError(text) from error

    def _make(self, client: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        # Otherwise fields that the schema does not have would be left out without a word.
        options = {"validate.strict.allow.default": True, **self._options}
        strategy = {"subject.name.strategy": self._options["subject.name.strategy"]}
        return (
            avro.AvroSerializer(client, self.schema, conf=options),
            avro.AvroDeserializer(client, self.schema, conf=strategy),
        )

    def _write(self, write: Callable[..., Any], value: Any) -> Any:
        data = super()._write(write, value)
        # The writer makes 1 of 1.7 and of True, and integers longer than their type.
        validate(value, self._parsed)
        return data

    def _why(self, error: Exception) -> str:
        return str(error.errors[0]) if isinstance(error, ValidationError) else text_of(error)


class JsonSchemaSerializer(RegistrySerializer):
    """JSON, written and read only where it fits its JSON Schema. Dates, Decimals and UUIDs become
    text, as in JSON without a schema.

    :param schema: the text of the schema, an object with the arguments of the job as properties.
    """

    _format = "json"

    def __init__(self, subject: str, schema: str, **given: Any) -> None:
        super().__init__(subject, **given)
        self.schema = schema

    def _make(self, client: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        strategy = {"subject.name.strategy": self._options["subject.name.strategy"]}
        return (
            json_schemas.JSONSerializer(
                self.schema, client, conf=self._options, json_encode=lambda value: JSON.dumps(value)
            ),
            json_schemas.JSONDeserializer(
                self.schema, schema_registry_client=client, conf=strategy, json_decode=JSON.loads
            ),
        )

    def _write(self, write: Callable[..., Any], value: Any) -> Any:
        return super()._write(write, JSON.loads(JSON.dumps(value)))

    def _why(self, error: Exception) -> str:
        path = getattr(error.__context__, "json_path", "$")
        return text_of(error) if path == "$" else f"{path}: {text_of(error)}"


class ProtobufSerializer(RegistrySerializer):
    """Protobuf. Fields that are not set and have no default of their own are left out, as are those
    that a newer schema has.

    :param message: the class of a message with the arguments of the job as its fields.
    :raises ValueError: it is no such class.
    """

    _format = "protobuf"

    def __init__(self, subject: str, message: type[Any], **given: Any) -> None:
        super().__init__(subject, **given)
        if not hasattr(message, "DESCRIPTOR"):
            text = f"the class of a message, as protoc makes it, not {message!r:.80}"
            raise ValueError(f"ProtobufSerializer({subject!r}) takes {text}")
        self.message = message

    def _make(self, client: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
        strategy = {"subject.name.strategy": self._options["subject.name.strategy"]}
        return (
            protobufs.ProtobufSerializer(self.message, client, conf=self._options),
            protobufs.ProtobufDeserializer(self.message, strategy, client),
        )

    def _write(self, write: Callable[..., Any], value: Any) -> Any:
        plain = json.loads(json.dumps(value, cls=_Base64Encoder))
        return super()._write(write, json_format.ParseDict(plain, self.message()))

    def _read(self, read: Callable[..., Any], data: bytes) -> Any:
        return _fields_of(super()._read(read, data))


def _fields_of(message: Any) -> dict[str, Any]:
    """Return a message as a dict. The JSON of Protobuf would make text of integers and bytes."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.has_presence and not message.HasField(field.name):
            continue
        value = getattr(message, field.name)
        kind = field.message_type
        if kind is not None and kind.GetOptions().map_entry:
            of_value = kind.fields_by_name["value"]
            found[field.name] = {key: _plain(of_value, value[key]) for key in value}
        elif _is_repeated(field):
            found[field.name] = [_plain(field, each) for each in value]
        else:
            found[field.name] = _plain(field, value)
    return found


def _is_repeated(field: Any) -> bool:
    known = getattr(field, "is_repeated", None)  # since protobuf 6.31, which warns of the label
    return bool(field.label == field.LABEL_REPEATED if known is None else known)


def _plain(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        is_known = field.message_type.full_name.startswith("google.protobuf.")
        return json_format.MessageToDict(value) if is_known else _fields_of(value)
    if field.enum_type is not None:
        name = field.enum_type.values_by_number.get(value)
        return value if name is None else name.name
    return value


class _Base64Encoder(DjangoJSONEncoder):
    """What the JSON of Protobuf is made of: bytes become text."""

    def default(self, o: Any) -> Any:
        return b64encode(o).decode() if isinstance(o, bytes) else super().default(o)


@checks.register("kjo")
def check_schema_registry(**kwargs: Any) -> list[checks.CheckMessage]:
    """Make the client and its serializers, which connects to nothing, where jobs have them."""
    found: dict[str, checks.CheckMessage] = {}
    for each in registry.handlers():
        serializer = each.options.serializer
        if not isinstance(serializer, RegistrySerializer):
            continue
        try:
            serializer.check()
        except ImproperlyConfigured as error:
            where = f"The job {each.name!r} has a serializer with a schema."
            found.setdefault(str(error), checks.Error(str(error), hint=where, id="kjo.E021"))
    return list(found.values())


def is_outage(error: BaseException) -> bool:
    """Return whether an error of the client says nothing of the payload: the registry cannot be
    reached, cannot answer, or does not let this process ask."""
    if isinstance(error, SchemaRegistryError):
        status, code = error.http_status_code, error.error_code
        is_other_server = status == 404 and code not in UNKNOWN
        return status >= 500 or status in DENIED or is_other_server
    return isinstance(error, (OAuthTokenError, *_transport_errors()))


def _transport_errors() -> list[type[Exception]]:
    """Return what the client's HTTP library raises where no answer comes. The library is httpx2,
    before confluent-kafka 2.16 httpx; the client has imported it."""
    libraries = [sys.modules[name] for name in ("httpx2", "httpx") if name in sys.modules]
    return [library.TransportError for library in libraries]


def _unavailable(error: Exception) -> ServiceUnavailableError:
    # Not which: its address may hold a password.
    why = f"The schema registry cannot be asked, see KJO['SCHEMA_REGISTRY']: {text_of(error)}"
    return ServiceUnavailableError(why)
