"""Events as CloudEvents 1.0: written by a setting or an argument, read whichever way they come."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from kjo_django import (
    BaseEvent,
    EventIdempotencyService,
    PermanentError,
    event_handler,
    publish_event,
)
from kjo_django.checks import check_settings
from kjo_django.exceptions import MessageError, PayloadError
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.operations import dead_letters
from kjo_django.outbox.relay import Relay
from kjo_django.patterns.events import cloudevents
from kjo_django.patterns.events.event import event_of
from kjo_django.runtime import get_transport
from kjo_django.testing.conformance import eventually
from kjo_django.transports.base import OutgoingRecord, Record
from tests.events.bench import EVENTS, MEMORY, TOPIC, Service, read_all, send
from tests.ledger.models import Entry
from tests.mock_kafka import MockKafka
from tests.unit.deliveries import kafka_at, make_everything_due

pytestmark = pytest.mark.django_db(transaction=True)

STRUCTURED, BINARY = "cloudevents-structured", "cloudevents-binary"
CLOUDEVENTS = pytest.mark.parametrize("event_format", [STRUCTURED, BINARY])
EVENT: dict[str, Any] = {
    "id": "e-1",
    "type": "USER_RENAMED",
    "source": "accounts",
    "timestamp": 1763920800123,
    "data": {"userId": "u1", "name": "Ada"},
}
ATTRIBUTES = {
    "specversion": "1.0",
    "id": "e-1",
    "source": "accounts",
    "type": "USER_RENAMED",
    "time": "2025-11-23T18:00:00.123Z",
    "dataversion": "1",
}
HEADERS = {f"ce_{name}": value.encode() for name, value in ATTRIBUTES.items()}


def publish_record(value: bytes | None, headers: dict[str, bytes]) -> None:
    """Publish a record as another service would."""
    (answer,) = get_transport().publish([OutgoingRecord(TOPIC, value, b"u1", headers)])
    assert answer.error is None


def send_event(event_format: str, **fields: Any) -> None:
    """Publish a CloudEvent as another service would; fields are those of its data."""
    data = json.dumps({**EVENT["data"], **fields}).encode()
    if event_format == BINARY:
        publish_record(data, {"content-type": b"application/json", **HEADERS})
        return
    envelope = {**ATTRIBUTES, "data": json.loads(data)}
    content_type = b"application/cloudevents+json; charset=UTF-8"
    publish_record(json.dumps(envelope).encode(), {"content-type": content_type})


def published(topic: str = TOPIC) -> Record:
    """Return the one record of a topic, once the relay has published what is due."""
    make_everything_due()
    Relay().publish_due()
    (record,) = read_all(topic)
    return record


@pytest.fixture(params=["memory", "database"])
def transport(request, settings) -> str:
    settings.KJO = {**EVENTS, **(MEMORY if request.param == "memory" else {})}
    return request.param


@pytest.fixture
def memory(settings) -> None:
    settings.KJO = {**EVENTS, **MEMORY}


@pytest.fixture
def handled() -> list[BaseEvent]:
    return []


@pytest.fixture
def service(transport: str, handled: list[BaseEvent]) -> Iterator[Service]:
    """Handles USER_RENAMED, failing as often as the data says."""

    @event_handler("USER_RENAMED", topic=TOPIC, max_attempts=3)
    def follow(event: BaseEvent) -> None:
        handled.append(event)
        if len(handled) <= event.data.get("failures", 0):
            raise RuntimeError("not now")
        Entry.objects.create(job=event.id, note=event.data.get("name", ""))

    made = Service()
    yield made
    made.close()


# --- Writing --------------------------------------------------------------------------------------


def test_the_setting_of_the_topic_says_how_events_are_written(settings) -> None:
    # Given
    queues = {"a": {"event_format": STRUCTURED}, "b": {"event_format": BINARY}, "c": {}}
    settings.KJO = {**EVENTS, **MEMORY, "QUEUES": queues}
    subscriptions = [get_transport().subscribe([topic], "group") for topic in "abc"]
    # When
    for topic in "abc":
        publish_event(topic, EVENT)
    make_everything_due()
    Relay().publish_due()
    a, b, c = [subscription.poll(10, 0.1)[0] for subscription in subscriptions]
    # Then
    content_type = {"datacontenttype": "application/json"}
    assert json.loads(a.value) == {**ATTRIBUTES, **content_type, "data": EVENT["data"]}
    assert a.headers == {"content-type": b"application/cloudevents+json"}
    assert json.loads(b.value) == EVENT["data"]
    assert b.headers == {"content-type": b"application/json", **HEADERS}
    assert json.loads(c.value) == {**EVENT, "version": "1"}
    assert [record.key for record in (a, b, c)] == [b"u1"] * 3


def test_the_argument_wins_over_the_topic_and_the_topic_over_the_project(settings) -> None:
    settings.KJO = {
        **EVENTS,
        **MEMORY,
        "EVENT_FORMAT": BINARY,
        "QUEUES": {"a": {"event_format": STRUCTURED}},
    }
    publish_event("a", EVENT, direct=True)
    publish_event("b", EVENT, direct=True)
    publish_event("c", EVENT, direct=True, event_format="plain")
    a, b, c = (published(topic) for topic in "abc")
    assert a.headers["content-type"] == b"application/cloudevents+json"
    assert b.headers["ce_id"] == b"e-1"
    assert c.headers["event-id"] == b"e-1"


def test_a_format_that_does_not_exist_is_refused(memory) -> None:
    with pytest.raises(ValueError, match=r"event_format must be one of .*Did you mean") as refusal:
        publish_event(TOPIC, EVENT, event_format="cloudevent-binary")
    assert "Did you mean 'cloudevents-binary'?" in str(refusal.value)
    assert not Job.objects.exists()


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"source": "My Shop"}, "source must be a URI reference, not 'My Shop'"),
        ({"dataschema": "user.json"}, "dataschema must be a URI, not 'user.json'"),
        ({"subject": "a\nb"}, "subject has characters that no attribute may have"),
        ({"metadata": {"tenantId": "t"}}, "metadata.tenantId cannot be an attribute"),
        ({"metadata": {"time": "t"}}, "metadata.time cannot be an attribute .* name of another"),
        ({"metadata": {"userid": "t"}}, "metadata.userid cannot be an attribute"),
        ({"metadata": {"tenant": {"id": 1}}}, "metadata.tenant must be text, True, False or an"),
        ({"metadata": {"size": 2**31}}, "metadata.size must be text, True, False or an integer"),
        ({"metadata": {"size": 1.5}}, "metadata.size must be text, True, False or an integer"),
        ({"metadata": {"tenant": "\x7f"}}, "tenant has characters that no attribute may have"),
    ],
)
@CLOUDEVENTS
def test_what_no_attribute_can_be_is_refused(memory, event_format, fields, why) -> None:
    with pytest.raises(PayloadError, match=why):
        publish_event(TOPIC, {**EVENT, **fields}, event_format=event_format)
    assert not Job.objects.exists()


@pytest.mark.parametrize("event_format", ["plain", STRUCTURED, BINARY])
def test_a_header_of_a_cloudevent_is_no_header_of_the_callers(memory, event_format) -> None:
    """In a plain record it would make readers take the record for another format."""
    with pytest.raises(ValueError, match="'ce_id', which is an attribute of a CloudEvent"):
        publish_event(TOPIC, EVENT, headers={"ce_id": "another"}, event_format=event_format)
    assert not Job.objects.exists()


def test_only_a_cloudevent_has_a_long_source(memory) -> None:
    event = BaseEvent(type="T", source="/subscriptions/" + "s" * 200)
    publish_event(TOPIC, event, event_format=STRUCTURED)
    with pytest.raises(PayloadError, match="source has 215 characters, 100 are allowed"):
        publish_event(TOPIC, event)


def test_what_others_wrote_into_a_correlation_does_not_fail_a_handler(settings) -> None:
    """A publication inherits it, and an attribute may have fewer characters than a header."""
    # Given
    settings.KJO = {**EVENTS, **MEMORY, "QUEUES": {"next": {"event_format": STRUCTURED}}}

    @event_handler("USER_RENAMED", topic=TOPIC)
    def follow(event: BaseEvent) -> None:
        publish_event("next", BaseEvent(type="NEXT"))

    service = Service()
    send(BaseEvent(**EVENT).to_bytes(), correlation_id=b"request\n9")
    # When
    service.run()
    service.close()
    # Then
    envelope = json.loads(published("next").value or b"")
    assert envelope["correlationid"] == "request\N{REPLACEMENT CHARACTER}9"
    assert envelope["causationid"] == "e-1"


# --- Settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kjo", "where"),
    [
        ({"EVENT_FORMAT": "cloudevents_binary"}, "KJO['EVENT_FORMAT']"),
        (
            {"QUEUES": {"a": {"event_format": "cloudevents_binary"}}},
            "KJO['QUEUES']['a']['event_format']",
        ),
    ],
)
def test_the_checks_say_which_format_was_meant(settings, kjo, where) -> None:
    settings.KJO = kjo
    (message,) = check_settings()
    assert message.id == "kjo.E001"
    assert message.msg.startswith(f"{where} must be one of 'plain', 'cloudevents-structured'")
    assert message.hint == "Did you mean 'cloudevents-binary'?"


@pytest.mark.parametrize(
    ("kjo", "where"),
    [
        ({"EVENT_FORMAT": BINARY}, "KJO['EVENT_FORMAT'] is 'cloudevents-binary'"),
        (
            {"QUEUES": {"a": {"event_format": STRUCTURED}}},
            "KJO['QUEUES']['a']['event_format'] is 'cloudevents-structured'",
        ),
    ],
)
def test_a_service_name_that_is_no_source_is_an_error(settings, kjo, where) -> None:
    settings.KJO = {"SERVICE_NAME": "My Shop", **kjo}
    (message,) = [each for each in check_settings() if each.id == "kjo.E020"]
    assert "'My Shop', not a URI reference" in message.msg
    assert where in message.msg


def test_plain_events_may_have_any_service_name(settings) -> None:
    settings.KJO = {"SERVICE_NAME": "My Shop", "QUEUES": {"a": {}}}
    assert not [each for each in check_settings() if each.id == "kjo.E020"]


# --- Reading --------------------------------------------------------------------------------------


def test_one_event_in_three_formats_takes_effect_once(service, handled) -> None:
    """No setting says how they come, and all have one marker."""
    # Given
    send(BaseEvent(**EVENT).to_bytes())
    send_event(STRUCTURED)
    send_event(BINARY)
    publish_record(json.dumps({**ATTRIBUTES, "data": EVENT["data"]}).encode(), {})
    # When
    service.run()
    # Then
    assert handled == [BaseEvent(**EVENT)]
    assert Entry.objects.count() == 1
    assert ProcessedEvent.objects.get().event_key == ("e-1", "interview-service", "USER_RENAMED")
    assert EventIdempotencyService().is_event_processed("e-1", "USER_RENAMED")


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
@pytest.mark.parametrize("event_format", ["plain", STRUCTURED, BINARY])
def test_all_fields_arrive_as_they_were_given(service, handled, event_format) -> None:
    metadata = {"userId": "u9", "correlationId": "request-9", "causationId": "e-0", "tenant": "t"}
    event = BaseEvent(
        **EVENT,
        version="1.2",
        subject="Zoë",
        dataschema="https://schemas.example.com/user/1",
        metadata=metadata,  # type: ignore[arg-type]
    )
    publish_event(TOPIC, event, event_format=event_format)
    service.run()
    assert handled == [event]


@CLOUDEVENTS
def test_a_failed_cloudevent_is_retried_as_it_was_sent(service, handled, event_format) -> None:
    # Given
    send_event(event_format, failures=1)
    (sent,) = read_all(TOPIC) if get_transport().capabilities.replay else (None,)
    # When
    service.run()
    # Then
    assert [event.data["failures"] for event in handled] == [1, 1]
    assert handled[0] == handled[1]
    job = Job.objects.get()
    if event_format == BINARY:
        assert job.headers["ce_id"] == "e-1"
        assert json.loads(bytes(job.payload)) == handled[0].data
    else:
        assert job.content_type == "application/cloudevents+json"
        assert json.loads(bytes(job.payload))["id"] == "e-1"
    if sent is not None:
        assert bytes(job.payload) == sent.value
    assert Entry.objects.count() == 1


@CLOUDEVENTS
def test_a_dead_cloudevent_is_kept_as_it_was_and_replayed(service, handled, event_format) -> None:
    # Given a CloudEvent that has died
    send_event(event_format, failures=3)
    service.run()
    letter = DeadLetter.objects.get()
    headers = names.from_json(letter.headers)
    assert (letter.reason, letter.attempts) == ("exhausted", 3)
    if event_format == BINARY:
        assert {name: headers[name] for name in HEADERS} == HEADERS
    else:
        assert json.loads(bytes(letter.value or b""))["specversion"] == "1.0"
    # When
    assert dead_letters.replay(dead_letters.DeadLetterFilter()).replayed == 1
    service.run()
    send_event(event_format)
    service.run()
    # Then it has taken effect, and a late copy has none
    assert len(handled) == 4
    assert Entry.objects.count() == 1


@CLOUDEVENTS
def test_a_dead_cloudevent_is_edited_and_replayed(transport, event_format) -> None:
    """Its content type, with its parameters, says how its value is read."""

    # Given
    @event_handler("USER_RENAMED", topic=TOPIC)
    def follow(event: BaseEvent) -> None:
        if event.data["name"] == "Ada":
            raise PermanentError("no")
        Entry.objects.create(job=event.id, note=event.data["name"])

    service = Service()
    send_event(event_format)
    service.run()
    letter = DeadLetter.objects.get()
    # When
    repaired = bytes(letter.value or b"").replace(b"Ada", b"Zo")
    assert dead_letters.edit_and_replay(letter.pk, repaired).replayed == 1
    service.run()
    service.close()
    # Then
    assert Entry.objects.get().note == "Zo"


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
def test_a_tombstone_in_binary_mode_is_an_event_without_data(service, handled) -> None:
    publish_record(None, {name: value for name, value in HEADERS.items() if name != "ce_time"})
    service.run()
    (event,) = handled
    assert event.data == {}
    age = datetime.now(UTC) - datetime.fromtimestamp(event.timestamp / 1000, UTC)
    assert abs(age.total_seconds()) < 60


def test_a_tombstone_is_retried_as_one_with_the_time_it_came(memory) -> None:
    # Given
    times = []

    @event_handler("USER_RENAMED", topic=TOPIC, max_attempts=3)
    def follow(event: BaseEvent) -> None:
        times.append((event.timestamp, dict(event.data)))
        if len(times) < 3:
            raise RuntimeError("not now")

    service = Service()
    publish_record(None, {name: value for name, value in HEADERS.items() if name != "ce_time"})
    # When
    service.run()
    service.close()
    # Then
    assert len(times) == 3
    assert len({data == {} and time for time, data in times}) == 1


@pytest.mark.parametrize("transport", ["memory"], indirect=True)
def test_types_of_others_are_passed_over_undecoded(service, handled) -> None:
    """Their data may be in a content type nobody here knows."""
    publish_record(b"<user/>", {**HEADERS, "ce_type": b"ANOTHER", "content-type": b"text/xml"})
    publish_record(
        b'{"type": "ANOTHER", "specversion": "0.3"}',
        {"content-type": b"application/cloudevents+json"},
    )
    service.run()
    assert handled == []
    assert not DeadLetter.objects.exists()


ENVELOPE = b'{"specversion": "1.0", "id": "e-1", "source": "s", "type": "USER_RENAMED"'
JSON = {"content-type": b"application/cloudevents+json"}


@pytest.mark.parametrize(
    ("value", "headers", "reason", "error"),
    [
        (ENVELOPE.replace(b"1.0", b"0.3") + b"}", JSON, "invalid", "specversion must be '1.0'"),
        (b'{"specversion": "1.0", "type": "USER_RENAMED"}', JSON, "invalid", "no id, source"),
        (ENVELOPE + b', "data_base64": "e"}', JSON, "invalid", "data_base64 is no base64"),
        (ENVELOPE + b', "data_base64": 7}', JSON, "invalid", "data_base64 is no base64"),
        (ENVELOPE + b', "datacontenttype": 7}', JSON, "invalid", "datacontenttype must be text"),
        (
            ENVELOPE + b', "datacontenttype": "text/xml", "data": "<user/>"}',
            JSON,
            "deserialization",
            "No serializer is registered for 'text/xml'",
        ),
        (b"<user/>", JSON, "deserialization", "Not valid JSON"),
        (
            b"{}",
            {"content-type": b"application/cloudevents+protobuf"},
            "deserialization",
            "A CloudEvent is read as application/cloudevents+json, not as",
        ),
        (b"{}", {"ce_type": b"USER_RENAMED"}, "invalid", "it has no specversion, id, source"),
        (b"{}", {**HEADERS, "ce_id": b"i" * 256}, "invalid", "id has 256 characters"),
        (b"{}", {**HEADERS, "ce_time": b"noon"}, "invalid", "time must be a time after 1970"),
        (
            b"<user/>",
            {**HEADERS, "content-type": b"text/xml"},
            "deserialization",
            "No serializer is registered for 'text/xml'",
        ),
        (b"<user/>", HEADERS, "deserialization", "Not valid JSON"),
        (b"x" * 900_001, HEADERS, "too_large", "900001 bytes"),
    ],
)
def test_what_is_no_cloudevent_is_a_dead_letter(memory, value, headers, reason, error) -> None:
    # Given
    @event_handler("USER_RENAMED", topic=TOPIC)
    def follow(event: BaseEvent) -> None: ...

    service = Service()
    # When
    publish_record(value, headers)
    service.run()
    service.close()
    # Then
    letter = DeadLetter.objects.get()
    assert letter.reason == reason
    assert error in letter.error
    assert bytes(letter.value or b"") == value


@pytest.mark.parametrize("value", [[1], None, "x"])
def test_a_structured_one_that_is_no_object_is_refused(value) -> None:
    with pytest.raises(MessageError, match="it is not an object"):
        event_of(value, {"content-type": "application/cloudevents+json"}, None)


@CLOUDEVENTS
def test_what_is_written_is_read_again(event_format) -> None:
    """Every field survives the way through attributes, at the limits of time too."""
    for timestamp in (1, 999, 1763920800123, 253_402_300_799_999):
        fields = {**EVENT, "version": "1", "timestamp": timestamp}
        value, headers = cloudevents.written(event_format, fields)
        found = cloudevents.fields_of(event_format, json.loads(value), headers, None)
        assert {"version": "1", **found} == fields


# --- On Kafka -------------------------------------------------------------------------------------


@pytest.fixture
def kafka(settings) -> Iterator[MockKafka]:
    mock = MockKafka()
    settings.KJO = {**EVENTS, **kafka_at(mock.bootstrap_servers)}
    yield mock
    get_transport().close()
    mock.close()


@CLOUDEVENTS
def test_another_program_reads_and_writes_them_on_kafka(kafka, handled, event_format) -> None:
    """Its client knows headers and values only."""
    # Given a topic, and what publish_event writes to it
    topic = f"it-events-{uuid.uuid4().hex[:8]}"
    for name in (topic, f"{topic}-copies"):
        kafka.create_topic(name, 1)
    publish_event(topic, EVENT, direct=True, event_format=event_format)
    servers = {"bootstrap.servers": kafka.bootstrap_servers}
    reader = Consumer({**servers, "group.id": "other", "auto.offset.reset": "earliest"})
    reader.subscribe([topic])
    found: list[Any] = []
    eventually(lambda: found.append(reader.poll(0.1)) or found[-1], 20, "the record")
    reader.close()
    # When the other program sends it on
    told = found[-1]
    assert dict(told.headers())["content-type" if event_format == STRUCTURED else "ce_id"] in (
        b"application/cloudevents+json",
        b"e-1",
    )
    writer = Producer(servers)
    writer.produce(f"{topic}-copies", told.value(), told.key(), headers=told.headers())
    assert writer.flush(10) == 0
    # Then a handler gets the event
    subscription = get_transport().subscribe([f"{topic}-copies"], "readers")

    @event_handler("USER_RENAMED", topic=f"{topic}-copies")
    def follow(event: BaseEvent) -> None: ...

    from kjo_django.patterns.events.handlers import event_route

    records: list[Record] = []
    eventually(lambda: records.extend(subscription.poll(10, 0.1)) or records, 20, "the copy")
    read = event_route(f"{topic}-copies").read(records[0], max_bytes=900_000)
    subscription.close()
    assert read is not None
    assert (read[0].id, read[0].type) == ("e-1", "USER_RENAMED")
