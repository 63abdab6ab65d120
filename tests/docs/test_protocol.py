"""What docs/reference/protocol.md fixes is what is written and read here: each vector of the page,
by our own encoders and decoders."""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Iterator
from datetime import datetime
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest

import kjo_django
from kjo_django import DlqConfig
from kjo_django.conf import get_settings
from kjo_django.engine.attempt import Attempt, Ending, RefusedRecord
from kjo_django.engine.failures import record_for_topic
from kjo_django.enqueue.storing import record_of
from kjo_django.exceptions import MessageError, PermanentError
from kjo_django.messages import headers
from kjo_django.messages.headers import folded, listed, read_message
from kjo_django.messages.serializers import load_value
from kjo_django.models import DeadLetterReason, Job
from kjo_django.operations.dead_letters import replay_headers
from kjo_django.patterns.events import event as events
from kjo_django.patterns.events.handlers import EventRoute
from kjo_django.patterns.kdlq import headers as kdlq
from kjo_django.patterns.kdlq.config import ProcessingStatus
from kjo_django.patterns.kdlq.routing import Verdict, decide
from kjo_django.runtime import current_runtime
from kjo_django.transports.base import NoSubscription, OutgoingRecord, Published, Record
from tests.clocks import set_now

pytestmark = pytest.mark.medium  # compares the pages with the code

PAGE = Path(__file__).resolve().parents[2] / "docs" / "reference" / "protocol.md"
FILES = sorted((PAGE.parent / "protocol").glob("*.vectors.json"))
MAX_BYTES = 900_000
HEADER = re.compile(
    r"kjo-[\w-]+|KDLQ_\w+|(event|item|message|content|stable|deduplication)-[\w-]+|[a-z]+-id"
)
NO_HEADERS = {
    *("kjo-dlq-", "kjo-django", "kjo-django-asks", "kjo-idempotency-check", "kjo-released"),
}
"""The prefix of headers, and names of the package, of topics, groups and consumers."""


# --- Records as the vectors write them ------------------------------------------------------------


def from_text(given: Any) -> bytes | None:
    """Return bytes that are written as text, or as ``{"base64": …}`` where they are none."""
    if isinstance(given, dict):
        return base64.b64decode(given["base64"])
    return None if given is None else given.encode()


def to_text(value: bytes | None) -> Any:
    try:
        return None if value is None else value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value or b"").decode()}


def numbers_as_bytes(name: str, value: bytes | None) -> Any:
    """KDLQ's numbers are bytes even where these happen to be UTF-8."""
    is_number = name.startswith("KDLQ_") and value is not None and b"\x00" in value
    return {"base64": base64.b64encode(value or b"").decode()} if is_number else to_text(value)


def written(record: OutgoingRecord) -> dict[str, Any]:
    """Return a record as a vector has it."""
    return {
        "topic": record.topic,
        "key": to_text(record.key),
        "headers": [[n, numbers_as_bytes(n, value)] for n, value in listed(record.headers)],
        "value": to_text(record.value),
    }


def read_from(given: dict[str, Any]) -> Record:
    """Return a vector's record as a transport hands it out."""
    return Record(
        topic=given["topic"],
        partition=given.get("partition", 0),
        offset=given.get("offset", 0),
        key=from_text(given["key"]),
        value=from_text(given["value"]),
        headers=folded([(name, from_text(value)) for name, value in given["headers"]]),
        timestamp=datetime.fromisoformat(given["timestamp"]) if "timestamp" in given else None,
    )


# --- Our encoders ---------------------------------------------------------------------------------


def write_job(given: dict[str, Any], _: pytest.MonkeyPatch) -> dict[str, Any]:
    content_type = given.get("content_type", "application/json")
    payload = from_text(given["payload"]) or b""
    job = Job(**{**given, "queue": "emails", "payload": payload, "content_type": content_type})
    return written(record_of(job, get_settings().queue("emails"), service="shop"))


def write_event(given: dict[str, Any], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    sent: list[OutgoingRecord] = []

    def publish(_: Any, records: list[OutgoingRecord]) -> list[Published]:
        sent.extend(records)
        return [Published(partition=0, offset=0)]

    patch.setattr(events, "publish", publish)
    # Nothing is written, so there is no transaction after whose commit consumers are woken.
    patch.setattr(events, "wake_consumers", lambda transport, records: None)
    options = {name: given.get(name) for name in ("headers", "event_format")}
    events.publish_event(given["topic"], given["event"], direct=True, **options)
    return written(sent[0])


def write_kdlq(given: dict[str, Any], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    set_now(patch, lambda: datetime.fromisoformat(given["now"]))
    error = PermanentError(given["error"]) if "error" in given else None
    verdict = Verdict(ProcessingStatus(given["answer"]), error)
    config = DlqConfig(**given["config"])
    decision = decide(read_from(given["record"]), verdict, config, given["consumer"])
    record = None if decision.outgoing is None else written(decision.outgoing)
    return {"status": decision.status.value, "record": record}


def write_dead_letter(given: dict[str, Any], patch: pytest.MonkeyPatch) -> dict[str, Any]:
    set_now(patch, lambda: datetime.fromisoformat(given["now"]))
    record, runtime = read_from(given["record"]), current_runtime()
    problem: Exception = PermanentError(given["error"])
    message, unread = None, MessageError("invalid", "no")
    try:
        message = read_message(record.value, record.headers, max_bytes=MAX_BYTES)
    except MessageError as error:
        problem = unread = error.with_traceback(None)
    queue = get_settings().queue("emails")
    delivery = RefusedRecord(record, NoSubscription(), queue, "shop", unread, message)
    reason = DeadLetterReason(given["reason"])
    attempt = Attempt(delivery, Ending.DEAD, reason, number=given["attempts"], error=problem)
    return written(record_for_topic(runtime, attempt))


def write_replay(given: dict[str, Any], _: pytest.MonkeyPatch) -> dict[str, Any]:
    record = read_from(given["record"])
    headers = replay_headers(record.headers, given["replays"])
    return written(OutgoingRecord(given["topic"], record.value, record.key, headers))


WRITERS = {
    "job": write_job,
    "event": write_event,
    "cloudevent": write_event,
    "kdlq": write_kdlq,
    "dead-letter": write_dead_letter,
    "replay": write_replay,
}


# --- Our decoders ---------------------------------------------------------------------------------


def read_job(record: Record) -> dict[str, Any]:
    message = read_message(record.value, record.headers, max_bytes=MAX_BYTES)
    return {
        "id": message.id,
        "type": message.type,
        "job_id": message.job_id,
        "service": message.service,
        "generation": message.generation,
        "attempt": message.attempt,
        "replay_count": message.replay_count,
        "content_type": message.content_type,
        "arguments": load_value(message.payload, message.content_type),
    }


def read_event(record: Record) -> dict[str, Any]:
    route = EventRoute(record.topic, "readers", record.topic)
    route.handlers["USER_RENAMED"] = SimpleNamespace(versions=frozenset({"1"}))  # type: ignore[assignment]
    found = route.read(record, max_bytes=MAX_BYTES)
    if found is None:
        return {"passed_over": True}
    payload = load_value(found[0].payload, found[0].content_type)
    event = events.event_of(payload, headers.texts(record.headers), found[0].timestamp)
    return {**event.to_wire(), "key": event.key}


def read_kdlq(record: Record) -> dict[str, Any]:
    counted = (kdlq.REDELIVERED, kdlq.KILLS)
    return {name: kdlq.counter(record.headers, name) for name in counted}


READERS = {
    "job": read_job,
    "event": read_event,
    "cloudevent": read_event,
    "kdlq": read_kdlq,
    "dead-letter": read_job,
    "replay": read_job,
}


def read_or_error(kind: str, record: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"message": READERS[kind](read_from(record))}
    except MessageError as error:
        if error.reason == "deserialization":  # whose text is the decoder's
            return {"error": {"reason": error.reason}}
        return {"error": {"reason": error.reason, "text": str(error)}}


def instance_of(record: dict[str, Any]) -> dict[str, Any]:
    """Return what the schema of its kind says a record is."""

    def refuse(name: str) -> None:
        raise ValueError(name)

    try:
        value = json.loads(record["value"], parse_constant=refuse)
    except (TypeError, ValueError):
        value = record["value"]
    return {"key": record["key"], "headers": dict(record["headers"]), "value": value}


# --- The tests ------------------------------------------------------------------------------------


def kind_of(path: Path) -> str:
    return path.name.removesuffix(".vectors.json")


VECTORS = [
    pytest.param(kind_of(path), vector, id=f"{kind_of(path)}: {vector['name']}")
    for path in FILES
    for vector in json.loads(path.read_text())["vectors"]
]


@pytest.fixture(autouse=True)
def service(settings: Any) -> None:
    settings.KJO = {"SERVICE_NAME": "shop", "QUEUES": {"emails": {"priorities": 4}}}


@pytest.mark.parametrize(
    ("kind", "vector"), [each for each in VECTORS if "given" in each.values[1]]
)
def test_what_is_given_is_written_as_the_vector_has_it(
    kind: str, vector: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = {name: vector[name] for name in ("status", "record") if name in vector}
    found = WRITERS[kind](vector["given"], monkeypatch)
    assert (found if kind == "kdlq" else {"record": found}) == expected


@pytest.mark.parametrize(("kind", "vector"), [each for each in VECTORS if each.values[1]["record"]])
def test_what_the_vector_has_is_read_as_it_says(kind: str, vector: dict[str, Any]) -> None:
    told = {name: vector[name] for name in ("message", "error") if name in vector}
    assert len(told) == 1, "a record is a message or an error"
    if "msgpack" in json.dumps(vector).lower():
        pytest.importorskip("msgpack")
    assert read_or_error(kind, vector["record"]) == told


@pytest.mark.parametrize(("kind", "vector"), [each for each in VECTORS if each.values[1]["record"]])
def test_the_schema_accepts_what_may_be_written(kind: str, vector: dict[str, Any]) -> None:
    """A reader takes more than a writer may write: the vector says which of the two it is."""
    assert validator_of(kind).is_valid(instance_of(vector["record"])) is vector["conforms"]


@cache
def validator_of(kind: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((PAGE.parent / "protocol" / f"{kind}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


@pytest.mark.parametrize("kind", WRITERS)
def test_each_kind_has_what_is_written_and_what_is_refused(kind: str) -> None:
    vectors = [each.values[1] for each in VECTORS if each.values[0] == kind]
    assert any("given" in vector for vector in vectors)
    assert {vector["conforms"] for vector in vectors if vector["record"]} == {True, False}
    if kind != "kdlq":  # whose counters are read whatever they are
        assert any("error" in vector for vector in vectors)
    names = [vector["name"] for vector in vectors]
    assert len(set(names)) == len(names)


def constants(tree: ast.Module) -> Iterator[str]:
    """Yield the texts that are assigned to names in capitals."""
    for node in tree.body:
        if isinstance(node, ast.Assign):
            names = [name.id for name in ast.walk(node.targets[0]) if isinstance(name, ast.Name)]
            if all(map(str.isupper, names)):
                values = [each for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
                yield from (each.value for each in values if isinstance(each.value, str))


def test_every_header_of_the_code_is_on_the_page() -> None:
    """Given every constant of the package that looks like a header, the page has a row for it."""
    declared = {
        value
        for path in Path(kjo_django.__file__).parent.rglob("*.py")
        for value in constants(ast.parse(path.read_text()))
        if HEADER.fullmatch(value) and "/" not in value
    }
    for module in (headers, kdlq):
        declared |= {v for n, v in vars(module).items() if n.isupper() and isinstance(v, str)}
    assert {"kjo-id", "KDLQ_Kills", "event-id", "item-id", "kjo-task", "traceparent"} <= declared
    rows = set(re.findall(r"^\| `([\w-]+)`", PAGE.read_text(), re.MULTILINE))
    assert declared - NO_HEADERS - rows == set()


def test_every_file_of_the_protocol_is_linked_from_its_page() -> None:
    linked = set(re.findall(r"\]\(protocol/([\w.-]+)\)", PAGE.read_text()))
    assert linked == {path.name for path in (PAGE.parent / "protocol").iterdir()}
