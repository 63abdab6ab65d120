"""Payloads with a schema of a registry: Avro, JSON Schema and Protobuf."""

from __future__ import annotations

import json
import os
import re
import threading
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

from kjo_django import BaseEvent, event_handler
from kjo_django import registry as handlers
from kjo_django.admin.dashboard.dead_letters import _editable
from kjo_django.admin.display import show_message
from kjo_django.api import problems
from kjo_django.checks import check_settings
from kjo_django.contrib import schema_registry
from kjo_django.contrib.schema_registry import (
    AvroSerializer,
    JsonSchemaSerializer,
    ProtobufSerializer,
    RegistrySerializer,
    check_schema_registry,
)
from kjo_django.exceptions import MessageError, PayloadError, ServiceUnavailableError
from kjo_django.messages import serializers
from kjo_django.models import DeadLetter, Job, JobFailure
from kjo_django.operations.redaction import shown_payload
from kjo_django.runtime import get_transport
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord
from kjo_django.worker import Worker
from tests.contrib.registry_server import RegistryServer
from tests.mock_kafka import MockKafka
from tests.unit.deliveries import KJO, MEMORY, Bench, as_job, kafka_at
from tests.waiting import PATIENCE

SUBJECT = "orders-value"
ORDER = {"number": 7, "note": "süß", "lines": [{"sku": "a"}, {"sku": "b"}]}


# --- Schemas of an order, and what a later version adds -------------------------------------------


def avro_order(*fields: dict[str, Any]) -> AvroSerializer:
    line = {"type": "record", "name": "Line", "fields": [{"name": "sku", "type": "string"}]}
    schema = {
        "type": "record",
        "name": "Order",
        "fields": [
            {"name": "number", "type": "int"},
            {"name": "note", "type": "string", "default": ""},
            {"name": "lines", "type": {"type": "array", "items": line}, "default": []},
            *fields,
        ],
    }
    return AvroSerializer(SUBJECT, json.dumps(schema))


def json_order(**properties: Any) -> JsonSchemaSerializer:
    schema = {
        "title": "Order",
        "type": "object",
        "properties": {
            "number": {"type": "integer"},
            "note": {"type": "string"},
            "lines": {"type": "array", "items": {"required": ["sku"]}},
            **properties,
        },
        "required": ["number"],
        "additionalProperties": False,
    }
    return JsonSchemaSerializer(SUBJECT, json.dumps(schema))


FIELD = descriptor_pb2.FieldDescriptorProto


def protobuf_class(*fields: tuple[str, int, str]) -> Any:
    """Return the class of a message, as protoc makes one; each with a pool of its own."""
    file = descriptor_pb2.FileDescriptorProto(name="order.proto", package="shop", syntax="proto3")
    line = file.message_type.add(name="Line")
    line.field.add(name="sku", number=1, type=FIELD.TYPE_STRING, label=FIELD.LABEL_OPTIONAL)
    level = file.enum_type.add(name="Level")
    for number, name in enumerate(("LOW", "HIGH")):
        level.value.add(name=name, number=number)
    order = file.message_type.add(name="Order")
    entry = order.nested_type.add(name="TagsEntry")
    entry.options.map_entry = True
    for number, name in enumerate(("key", "value"), start=1):
        kind = FIELD.TYPE_STRING
        entry.field.add(name=name, number=number, type=kind, label=FIELD.LABEL_OPTIONAL)
    for number, (name, kind, of_type) in enumerate(
        (
            ("number", FIELD.TYPE_INT64, ""),
            ("note", FIELD.TYPE_STRING, ""),
            ("lines", FIELD.TYPE_MESSAGE, "repeated .shop.Line"),
            ("blob", FIELD.TYPE_BYTES, "optional"),
            ("level", FIELD.TYPE_ENUM, "optional .shop.Level"),
            ("tags", FIELD.TYPE_MESSAGE, "repeated .shop.Order.TagsEntry"),
            *fields,
        ),
        start=1,
    ):
        is_repeated = of_type.startswith("repeated")
        label = FIELD.LABEL_REPEATED if is_repeated else FIELD.LABEL_OPTIONAL
        field = order.field.add(name=name, number=number, type=kind, label=label)
        if " " in of_type:
            field.type_name = of_type.partition(" ")[2]
        if of_type.startswith("optional"):
            field.proto3_optional = True
            field.oneof_index = len(order.oneof_decl)
            order.oneof_decl.add(name=f"_{name}")
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("shop.Order"))


def protobuf_order(*fields: tuple[str, int, str]) -> ProtobufSerializer:
    return ProtobufSerializer(SUBJECT, protobuf_class(*fields))


ORDERS: dict[str, Callable[[], RegistrySerializer]] = {
    "avro": avro_order,
    "json": json_order,
    "protobuf": protobuf_order,
}
each_format = pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)


# --- The registry ---------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(serializers, "_serializers", dict(serializers._serializers))
    monkeypatch.setattr(schema_registry, "_clients", {})
    with handlers.isolated():
        yield


@pytest.fixture
def server(settings) -> Iterator[RegistryServer]:
    made = RegistryServer()
    made.start()
    # One try for each question: the tests of an outage ask often.
    options = {"url": made.url, "max.retries": 0}
    settings.KJO = {**KJO, **MEMORY, "SCHEMA_REGISTRY": options}
    yield made
    made.stop()


@pytest.fixture
def mock(settings) -> None:
    """The registry in memory that confluent-kafka has for tests."""
    settings.KJO = {**KJO, **MEMORY, "SCHEMA_REGISTRY": {"url": f"mock://{uuid.uuid4()}"}}


@pytest.fixture(params=["server", "mock"])
def registry(request: pytest.FixtureRequest) -> None:
    request.getfixturevalue(request.param)


def forget_schemas() -> None:
    """Go on as a process that has not asked the registry yet."""
    schema_registry._clients.clear()


# --- Writing and reading --------------------------------------------------------------------------


@each_format
def test_what_is_written_is_read(registry, order) -> None:
    serializer = order()
    data = serializer.dumps(ORDER)
    assert data[:5] == b"\x00\x00\x00\x00\x01"
    forget = serializer.loads(data)
    assert {name: forget[name] for name in ORDER} == ORDER


@each_format
def test_the_registry_is_asked_once_for_each_schema(server, order) -> None:
    serializer = order()
    for _ in range(3):
        serializer.loads(serializer.dumps(ORDER))
    assert len(server.requests) == len(set(server.requests))
    assert server.schemas[0][0] == SUBJECT


def test_values_of_python_keep_their_types_in_avro(mock) -> None:
    fields = [
        {"name": "at", "type": {"type": "long", "logicalType": "timestamp-millis"}},
        {"name": "sum", "type": {"type": "bytes", "logicalType": "decimal", "precision": 9}},
        {"name": "data", "type": ["null", "bytes"]},
    ]
    serializer = avro_order(*fields)
    given = {**ORDER, "at": datetime(2026, 1, 2, tzinfo=UTC), "sum": Decimal(12), "data": b"\xff"}
    assert serializer.loads(serializer.dumps(given)) == given


def test_values_of_python_become_text_in_json(mock) -> None:
    serializer = json_order(day={"type": "string"})
    assert serializer.loads(serializer.dumps({"number": 1, "day": date(2026, 1, 2)})) == {
        "number": 1,
        "day": "2026-01-02",
    }


def test_values_of_protobuf_keep_their_types(mock) -> None:
    """The JSON of Protobuf would make text of large integers and of bytes."""
    serializer = protobuf_order()
    given = {**ORDER, "number": 2**53 + 1, "blob": b"\xff", "level": "HIGH", "tags": {"a": "b"}}
    assert serializer.loads(serializer.dumps(given)) == given


def test_fields_of_protobuf_that_are_not_set_are_left_out(mock) -> None:
    serializer = protobuf_order()
    assert serializer.loads(serializer.dumps({})) == {
        "number": 0,
        "note": "",
        "lines": [],
        "tags": {},
    }


MISFITS = [
    ("avro", {"note": "x"}, "number"),
    ("avro", {"number": "x"}, "number"),
    ("avro", {"number": 1.7}, "number"),
    ("avro", {"number": True}, "number"),
    ("avro", {"number": 2**40}, "number"),
    ("avro", {"number": 1, "lines": [{"sku": 1}]}, "sku"),
    ("avro", {"number": 1, "more": 1}, "more"),
    ("json", {"note": "x"}, "'number' is a required property"),
    ("json", {"number": "x"}, r"\$\.number: 'x' is not of type 'integer'"),
    ("json", {"number": 1, "lines": [{}]}, r"\$\.lines\[0\]: 'sku'"),
    ("json", {"number": 1, "more": 1}, "'more' was unexpected"),
    ("json", {"number": object()}, "cannot be written as JSON"),
    ("protobuf", {"number": "x"}, "number"),
    ("protobuf", {"number": 1.7}, "number"),
    ("protobuf", {"more": 1}, "more"),
    ("protobuf", {"level": "MIDDLE"}, "level"),
    ("protobuf", {"number": object()}, "not JSON serializable"),
]


@pytest.mark.django_db
@pytest.mark.parametrize(("format", "payload", "field"), MISFITS)
def test_a_payload_that_does_not_fit_is_refused_at_enqueue(mock, format, payload, field) -> None:
    """Nothing is stored, nothing is rounded or left out, and the field is named."""

    def take(**payload: Any) -> None: ...

    job = as_job(take, serializer=ORDERS[format]())
    with pytest.raises(PayloadError, match=field):
        job.enqueue(**payload)
    assert not Job.objects.exists()


# --- Evolution ------------------------------------------------------------------------------------


NEWER: dict[str, Callable[[], RegistrySerializer]] = {
    "avro": lambda: avro_order({"name": "gift", "type": "boolean", "default": False}),
    "json": lambda: json_order(gift={"type": "boolean"}),
    "protobuf": lambda: protobuf_order(("gift", FIELD.TYPE_BOOL, "optional")),
}


@pytest.mark.parametrize("format", ["avro", "protobuf"])
def test_a_reader_with_an_older_schema_leaves_out_what_it_does_not_know(server, format) -> None:
    data = NEWER[format]().dumps({**ORDER, "gift": True})
    forget_schemas()
    found = ORDERS[format]().loads(data)
    assert "gift" not in found
    assert found["number"] == 7


def test_a_reader_with_an_older_schema_in_json_refuses_what_that_does_not_allow(server) -> None:
    """It has no defaults, and additional properties are allowed or not."""
    data = NEWER["json"]().dumps({**ORDER, "gift": True})
    with pytest.raises(MessageError, match="'gift' was unexpected"):
        json_order().loads(data)


@pytest.mark.parametrize(
    ("format", "read"), [("avro", {"gift": False}), ("json", {}), ("protobuf", {})]
)
def test_a_reader_with_a_newer_schema_reads_what_was_written_before_it(
    server, format, read
) -> None:
    data = ORDERS[format]().dumps(ORDER)
    forget_schemas()
    found = NEWER[format]().loads(data)
    assert {name: found[name] for name in (*ORDER, "gift") if name in found} == {**ORDER, **read}


# --- What the registry answers --------------------------------------------------------------------


@each_format
def test_a_schema_nobody_registered_is_no_message(registry, order) -> None:
    with pytest.raises(MessageError, match="does not give the schema 4711") as refusal:
        order().loads(b"\x00" + (4711).to_bytes(4, "big") + b"\x00{}")
    assert refusal.value.reason == "deserialization"


@each_format
@pytest.mark.parametrize("data", [b"", b"\x00", b'{"number": 1}', b"\x00\x00\x00\x00"])
def test_bytes_without_the_frame_are_no_message(mock, order, data) -> None:
    with pytest.raises(MessageError) as refusal:
        order().loads(data)
    assert refusal.value.reason == "deserialization"


@each_format
def test_bytes_that_are_cut_off_are_no_message(mock, order) -> None:
    serializer = order()
    data = serializer.dumps(ORDER)
    with pytest.raises(MessageError) as refusal:
        serializer.loads(data[:-3])
    assert refusal.value.reason == "deserialization"


def test_a_schema_that_the_registry_refuses_is_a_payload_error(server) -> None:
    answer = {"error_code": 409, "message": "Schema being registered is incompatible"}
    server.answers = 409, answer
    with pytest.raises(PayloadError, match="refuses the schema of orders-value: Schema being"):
        avro_order().dumps(ORDER)


@pytest.mark.parametrize(
    "answers",
    [
        (500, {"error_code": 50001, "message": "Error in the backend"}),
        (503, "nothing"),
        (401, {"error_code": 40101, "message": "Unauthorized"}),
        (429, {"error_code": 42901, "message": "Too many"}),
        (404, "a page of another server"),
    ],
    ids=lambda given: str(given[0]),
)
def test_an_answer_that_says_nothing_of_the_message_is_an_outage(server, answers) -> None:
    # Given
    serializer = avro_order()
    data = serializer.dumps(ORDER)
    forget_schemas()
    # When
    server.answers = answers
    # Then
    with pytest.raises(ServiceUnavailableError, match="schema registry cannot be asked"):
        serializer.loads(data)
    with pytest.raises(ServiceUnavailableError):
        serializer.dumps(ORDER)
    server.answers = None
    assert serializer.loads(data)["number"] == 7


# --- Jobs -----------------------------------------------------------------------------------------


@pytest.mark.django_db
def test_an_enqueue_without_the_registry_is_refused_and_stores_nothing(server) -> None:
    def take(**payload: Any) -> None: ...

    job = as_job(take, serializer=avro_order())
    server.stop()
    with pytest.raises(ServiceUnavailableError, match="refused"):
        job.enqueue(number=1)
    assert not Job.objects.exists()


@each_format
@pytest.mark.django_db(transaction=True)
def test_a_worker_waits_for_the_registry(server, order) -> None:
    """An outage spends no attempt and is no dead letter."""
    # Given a job that may be tried once
    taken: list[int] = []

    def take(number: int, **more: Any) -> None:
        taken.append(number)

    as_job(take, serializer=order(), max_attempts=1).enqueue(number=7)
    bench = Bench()
    deliveries = bench.poll()
    # When the registry is away, and the process has not asked it yet
    forget_schemas()
    server.stop()
    for _ in range(3):
        assert bench.run(deliveries) == deliveries
    # Then
    assert len(bench.pauses) == 3
    assert Job.objects.get().attempts == 0
    assert not DeadLetter.objects.exists()
    assert not JobFailure.objects.exists()
    # And once it is back
    server.start()
    assert bench.run(deliveries) == []
    bench.close()
    assert taken == [7]
    assert (Job.objects.get().state, Job.objects.get().attempts) == ("completed", 1)


@pytest.mark.django_db(transaction=True)
def test_a_message_with_an_unknown_schema_is_a_dead_letter(server) -> None:
    # Given a job whose message another service has sent
    def take(**payload: Any) -> None: ...

    job = as_job(take, serializer=avro_order())
    content_type = job.handler.options.serializer.content_type.encode()
    headers = {"kjo-id": b"m-1", "kjo-type": b"bench.take", "content-type": content_type}
    bench = Bench()
    record = OutgoingRecord("ledger", b"\x00\x00\x00\x12\x67\x02", b"k", headers)
    get_transport().publish([record])
    # When
    bench.run()
    bench.close()
    # Then
    letter = DeadLetter.objects.get()
    assert letter.reason == "deserialization"
    assert "does not give the schema 4711: Schema not found" in letter.error


@each_format
@pytest.mark.django_db(transaction=True)
def test_a_result_is_json(mock, order) -> None:
    """It has another shape than the payload, and no schema."""

    def take(number: int, **more: Any) -> dict[str, str]:
        return {"taken": str(number)}

    handle = as_job(take, serializer=order()).enqueue(number=7)
    bench = Bench()
    bench.run()
    bench.close()
    assert handle.result == {"taken": "7"}


@pytest.mark.django_db
def test_operators_are_told_that_the_registry_is_away(server) -> None:
    # Given
    def take(**payload: Any) -> None: ...

    serializer = avro_order()
    as_job(take, serializer=serializer).enqueue(number=7)
    job = Job.objects.get()
    letter = DeadLetter(value=job.payload, content_type=serializer.content_type, handler="take")
    assert shown_payload(job)["number"] == 7
    # When
    forget_schemas()
    server.stop()
    # Then
    why = "The schema registry cannot be asked"
    assert why in shown_payload(job)
    assert why in job.arguments
    assert why in _editable(letter)[1]
    assert "<pre" in show_message(letter)
    # And programs are to ask again later
    answer = problems.handle(ServiceUnavailableError(why), {})
    assert answer is not None
    assert answer.status_code == 503


def as_order_job(taken: list[Any], serializer: RegistrySerializer) -> Any:
    """Return a job that notes the order it takes, enqueued."""

    def take(number: int, note: str, lines: list[dict[str, str]], **more: Any) -> None:
        taken.append({"number": number, "note": note, "lines": lines})

    return as_job(take, serializer=serializer).enqueue(**ORDER)


@each_format
def test_a_worker_on_the_database_runs_a_job(settings, server, sqlite_file, order) -> None:
    # Given
    settings.KJO = {**KJO, "SCHEMA_REGISTRY": {"url": server.url}, "POLL_INTERVAL": 0.1}
    taken: list[Any] = []
    handle = as_order_job(taken, order())
    forget_schemas()
    # When
    worker = Worker(["ledger"])
    completed = Job.objects.filter(state="completed")
    thread = threading.Thread(target=worker.run, args=[lambda: completed.exists()])
    thread.start()
    thread.join(PATIENCE)
    worker.stop()
    thread.join(PATIENCE)
    # Then
    assert taken == [ORDER]
    assert handle.status == "completed"
    assert "GET /schemas/ids/1" in server.requests


@pytest.mark.django_db(transaction=True)
def test_a_job_goes_through_kafka(settings, server) -> None:
    # Given
    kafka = MockKafka()
    kafka.create_topic("ledger", 1)
    transport = kafka_at(kafka.bootstrap_servers)
    settings.KJO = {**KJO, **transport, "SCHEMA_REGISTRY": {"url": server.url}}
    taken: list[Any] = []
    handle = as_order_job(taken, avro_order())
    # When
    bench = Bench()
    eventually(lambda: bench.run() or taken, PATIENCE, "the job's run")
    bench.close()
    # Then
    assert taken == [ORDER]
    assert handle.status == "completed"
    get_transport().close()
    kafka.close()


@pytest.mark.django_db(transaction=True)
def test_the_data_of_a_cloudevent_may_have_a_schema(server) -> None:
    """Its content type says so, and the registry's outage is one for events too."""
    # Given a handler, and an event that another service has sent
    taken: list[Any] = []

    @event_handler("ORDERED", topic="orders", max_attempts=1)
    def follow(event: BaseEvent) -> None:
        taken.append(dict(event.data))

    orders = avro_order()
    serializers.register_serializer(orders)
    attributes = {"specversion": "1.0", "id": "e-1", "source": "shop", "type": "ORDERED"}
    headers = {f"ce_{name}": value.encode() for name, value in attributes.items()}
    headers["content-type"] = orders.content_type.encode()
    bench = Bench("orders")
    get_transport().publish([OutgoingRecord("orders", orders.dumps(ORDER), b"k", headers)])
    deliveries = bench.poll()
    # When the registry is away
    forget_schemas()
    server.stop()
    assert bench.run(deliveries) == deliveries
    # Then it waits
    assert not DeadLetter.objects.exists()
    server.start()
    assert bench.run(deliveries) == []
    bench.close()
    assert taken == [ORDER]


# --- Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "KJO['SCHEMA_REGISTRY'] needs a 'url' that begins with http:// or https://"),
        ({"timeout": 1}, "KJO['SCHEMA_REGISTRY'] needs a 'url'"),
        ({"url": "user:secret@localhost:8081"}, "needs a 'url' that begins with http://"),
        ({"url": "http://a,b:8081"}, "needs a 'url' that begins with http://"),
        ({"url": "mock://m", "timeuot": 1}, "Unrecognized properties: timeuot"),
        ({"url": "mock://m", "ssl.ca.location": "/nowhere"}, "No such file"),
    ],
)
def test_the_checks_find_a_registry_that_cannot_be_used(settings, options, why) -> None:
    # Given a job that needs it
    def take(**payload: Any) -> None: ...

    as_job(take, serializer=avro_order())
    settings.KJO = {**KJO, **MEMORY, "SCHEMA_REGISTRY": options}
    # Then
    (message,) = check_schema_registry()
    assert (message.id, message.hint) == (
        "kjo.E021",
        "The job 'bench.take' has a serializer with a schema.",
    )
    assert why in message.msg
    assert "secret" not in message.msg
    with pytest.raises(ImproperlyConfigured, match="SCHEMA_REGISTRY"):
        avro_order().dumps(ORDER)
    # A message that is there can wait for the settings
    with pytest.raises(ServiceUnavailableError, match="SCHEMA_REGISTRY"):
        avro_order().loads(b"\x00\x00\x00\x00\x01\x02")


def test_the_checks_find_options_and_schemas_that_cannot_be_used(mock) -> None:
    """Each payload would be refused for it, as if the payload were wrong."""

    # Given
    def take(**payload: Any) -> None: ...

    wrong = [
        (
            AvroSerializer("a", avro_order().schema, options={"auto.register.schema": False}),
            "register.schema",
        ),
        (JsonSchemaSerializer("j", "{oops"), "JsonSchemaSerializer('j')"),
    ]
    for number, (serializer, why) in enumerate(wrong):
        as_job(take, f"bench.take{number}", serializer=serializer)
        with pytest.raises(ImproperlyConfigured, match=re.escape(why)):
            serializer.dumps(ORDER)
    # Then
    messages = check_schema_registry()
    assert [message.id for message in messages] == ["kjo.E021"] * 2
    assert all(why in message.msg for message, (_, why) in zip(messages, wrong, strict=True))


@pytest.mark.parametrize("schema", ["", "orders.avsc", '{"type": "itn"}'])
def test_what_is_no_avro_schema_is_refused_where_it_is_declared(schema) -> None:
    with pytest.raises(ValueError, match=r"AvroSerializer\('s'\): this is not the text of an Avro"):
        AvroSerializer("s", schema)


def test_what_is_no_message_is_refused_where_it_is_declared() -> None:
    with pytest.raises(ValueError, match=r"takes the class of a message, as protoc makes it"):
        ProtobufSerializer("p", "Order")  # type: ignore[arg-type]


def test_settings_that_are_no_dict_are_not_shown(settings) -> None:
    """A url may hold a password."""
    settings.KJO = {"SCHEMA_REGISTRY": "http://user:secret@registry"}
    (message,) = check_settings()
    assert message.msg == "KJO['SCHEMA_REGISTRY'] must be a dict whose keys are text, not str."


def test_nobody_needs_a_registry_who_has_no_job_for_it(settings) -> None:
    settings.KJO = {**KJO, **MEMORY}
    assert check_schema_registry() == []


def test_a_content_type_fits_its_column() -> None:
    with pytest.raises(ValueError, match=r"more than 50 characters; give another one as content_t"):
        JsonSchemaSerializer("com.example.shop.orders.OrderCreated-value", "{}")
    made = JsonSchemaSerializer("com.example.shop.orders.X", "{}", content_type="application/x")
    assert made.content_type == "application/x"


def test_each_process_has_a_client_of_its_own(mock, monkeypatch) -> None:
    """A connection does not survive a fork."""
    before = schema_registry.client()
    assert schema_registry.client() is before
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert schema_registry.client() is not before
