"""Records for others through the outbox: bytes and headers as they are, not our envelope.

A record for a topic that other services read (an event, a redelivery in another system's format) is
stored as a row with a ``destination``, in the caller's transaction, and published by whatever hands
jobs over. Publishing it completes the row: nothing here waits for it to be consumed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from datetime import datetime, timedelta

from django.utils import timezone

from kjo_django import registry, tracing
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.storing import check_payload_size
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import storable_text
from kjo_django.models import Job
from kjo_django.states import JobState
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database

MAX_KEY = 255


def carrier_of(topic: str, transport: str | None = None) -> QueueConf:
    """Return the queue whose relay publishes to a topic: the one declared for it, else the common
    one of the default transport.

    :raises ValueError: another transport is asked for and no queue there has the topic.
    """
    conf = get_settings()
    for name in registry.queue_names():
        queue = conf.queue(name)
        if queue.topic == topic and transport in (None, queue.transport):
            return queue
    common = conf.queue(dispatch.OUTGOING)
    if transport not in (None, common.transport):
        raise ValueError(
            f"No queue of the transport {transport!r} has the topic {topic!r}; declare one in "
            "KJO['QUEUES'], with 'consume': False if this service only publishes to it."
        )
    return common


def store_record(
    topic: str,
    *,
    value: bytes | None,
    key: bytes | None,
    headers: Mapping[str, bytes],
    kind: str,
    carrier: QueueConf | None = None,
    available_at: datetime | None = None,
    row_header: str | None = None,
) -> Job:
    """Store a record in the caller's transaction, to be published once that commits.

    :param kind: what people see it as; an event's type.
    :param carrier: the queue whose relay publishes it; ``carrier_of(topic)`` if not given.
    :param available_at: not published before.
    :param row_header: a header that names the row.
    :raises PayloadError: it is too large. Nothing is written.
    """
    queue = carrier or carrier_of(topic)
    id, now = uuid7(), timezone.now()
    # What only rows say is not for others to have written; nor that somebody waits for them.
    ours = {*names.OF_A_ROW, names.PARKED_ROW, names.REDELIVERY}
    headers = {name: value for name, value in headers.items() if name not in ours}
    if row_header is not None:
        headers[row_header] = str(id).encode()
    stored = names.for_row({**names.in_order(headers), **only_in_rows(key, value)})
    stored.pop(names.NO_KEY, None)  # as the empty column says
    job = Job(
        id=id,
        queue=queue.name,
        handler=storable_text(kind, 100),
        key=row_key(key),
        state=dispatch.initial_state(queue),
        max_attempts=1,
        payload=check_payload_size(value or b""),
        headers=stored or None,
        available_at=available_at or now,
        created_at=now,
        result_ttl=queue.result_ttl // timedelta(milliseconds=1),
        destination=topic,
    )
    job.queued_at = now if job.state == JobState.QUEUED else None
    if tracing.tracer is None:
        _store(job, queue)
    else:
        with tracing.tracer.enqueuing([job]):
            _store(job, queue)
    return job


def _store(job: Job, queue: QueueConf) -> None:
    using = jobs_database()
    with store_for(using).transaction(savepoint=False):
        job.save(using=using, force_insert=True)
        dispatch.hand_over([job], queue)


def only_in_rows(key: bytes | None, value: bytes | None) -> dict[str, bytes]:
    """Return the headers that say of a key and a value what a row's columns cannot."""
    found: dict[str, bytes] = {}
    if key is None:
        found[names.NO_KEY] = b"1"
    elif not _is_plain(key):
        found[names.RAW_KEY] = key
    if value is None:
        found[names.NO_VALUE] = b"1"
    return found


def row_key(key: bytes | None) -> str:
    """Return the key as the row's column holds it: its text, or a digest where only its bytes will
    do, so that rows of one key are known as such. "" for none."""
    if not key:
        return ""
    return key.decode() if _is_plain(key) else f"sha256:{hashlib.sha256(key).hexdigest()}"


def _is_plain(key: bytes) -> bool:
    try:
        text = key.decode()
    except UnicodeDecodeError:
        return False
    return 0 < len(text) <= MAX_KEY and storable_text(text) == text
