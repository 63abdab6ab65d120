"""Sending a dead message on its way again: what its headers become, and where it goes."""

from __future__ import annotations

import uuid
from collections.abc import Mapping

from kjo_django import registry
from kjo_django.backends import get_transport
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue.outgoing import only_in_rows, row_key
from kjo_django.exceptions import PublishError
from kjo_django.ids import uuid7
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.models.job import ORIGIN_ID
from kjo_django.patterns.kdlq import headers as kdlq
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import OutgoingRecord

REPLAY_OF = "kjo-replay-of"
"""The id a message had before a forced replay gave it a new one."""

_BUDGET = frozenset({kdlq.REDELIVERED, names.REDELIVERY})
"""Redeliveries start anew, their counter and what the last one was known by; the counter of deaths
stays (KDLQ-F6)."""
_ORIGIN = names.FIRST_WINS - {names.DLQ_FIRST_FAILED_AT}
_OF_A_JOB = frozenset({names.JOB_ID, names.GENERATION, names.ATTEMPT})


class NotPublishedError(PublishError):
    """The transport refused the record; its dead letter stays as it was."""


def replay_headers(
    headers: Mapping[str, bytes], replay_count: int, *, new_id: bool = False
) -> dict[str, bytes]:
    """Return the headers of a replayed message: all of its own, of what the dead-letter queue added
    only where it was read first, and the number of replays."""
    # What KDLQ killed is known by that: its copies in the table and in the topic have no id.
    stays = _ORIGIN | {names.DLQ_MESSAGE_ID} if kdlq.MARKER in headers else _ORIGIN
    kept = {
        name: value
        for name, value in headers.items()
        if (not name.startswith(names.DLQ_PREFIX) or name in stays) and name not in _BUDGET
    }
    if names.JOB_ID in kept and is_ours(kept):
        job = find_job(kept)
        if job is None or job.generation != generation_of(kept):
            # The row was deleted, or given to another payload; a consumer drops a message that
            # claims to have one.
            kept = {name: value for name, value in kept.items() if name not in _OF_A_JOB}
            new_id = new_id or job is not None
    if new_id and names.ID in kept:
        kept[REPLAY_OF] = kept[names.ID]
        kept[names.ID] = str(uuid7()).encode()
    kept[names.REPLAY_COUNT] = b"%d" % replay_count
    return kept


def generation_of(headers: Mapping[str, bytes]) -> int:
    """Return the generation of the job that a message is of."""
    return names.number(headers, names.GENERATION, 1)


def job_of(letter: DeadLetter, job: Job, value: bytes | None) -> Job:
    """Return the unsaved row of a job of its own that runs what a letter holds.

    :param job: the letter's, which has begun another generation since.
    :param value: the payload, if not the letter's.
    """
    told = names.from_json(letter.headers)
    replayed = replay_headers(told, letter.replay_count + 1, new_id=True)
    kept = {name: data for name, data in replayed.items() if name not in names.OF_A_MESSAGE}
    kept.pop(ORIGIN_ID, None)
    key = None if letter.key is None else bytes(letter.key)
    extra = only_in_rows(key, b"" if value is not None or letter.value is not None else None)
    if key == str(job.pk).encode():
        key = None  # a job without a key travels under its id
    return Job(
        id=uuid7(),
        queue=job.queue,
        handler=letter.handler,
        key=row_key(key),
        max_attempts=job.max_attempts,
        payload=bytes(letter.value or b"") if value is None else value,
        content_type=letter.content_type,
        headers=names.for_row({**names.in_order(kept), **extra}),
        result_ttl=job.result_ttl,
    )


def is_ours(headers: Mapping[str, bytes]) -> bool:
    """Whether this service's database holds, or held, the message's job."""
    return names.text(headers, names.SERVICE) == get_settings().service_name


def find_job(headers: Mapping[str, bytes]) -> Job | None:
    """Return the job a message belongs to, if this service's database has it."""
    if not is_ours(headers):
        return None
    try:
        id = uuid.UUID(names.text(headers, names.JOB_ID))
    except ValueError:
        return None
    rows = Job.objects.using(jobs_database()).only("id", "state", "generation", "queue", "handler")
    return rows.filter(pk=id).first()


def processed(message_ids: Mapping[str, str]) -> set[str]:
    """Return those of the messages (id → type) whose effects are committed here."""
    wanted = [id for id in message_ids if id]
    rows = ProcessedEvent.objects.using(jobs_database()).filter(
        event_id__in=wanted, service_name=get_settings().service_name
    )
    return {
        id for id, kind in rows.values_list("event_id", "event_type") if message_ids[id] == kind
    }


def publish_one(record: OutgoingRecord, transport: str) -> None:
    """Publish and wait for the delivery report.

    :raises PublishError: when it was not accepted.
    """
    outcome = get_transport(transport).publish([record])[0]
    if outcome.error is not None:
        raise NotPublishedError(outcome.error)


def replay_topic_of(queue: QueueConf) -> str:
    """Return where a message of a queue is published again: in the queue's topic, but never where
    other services, for whom it was no failure, would read it once more."""
    return get_settings().queue(queue.retries).topic


def queue_of(queue: str, topic: str) -> QueueConf | None:
    """Return the queue a dead letter came from: by name, else the one that reads its topic."""
    conf = get_settings()
    if queue:
        return conf.queue(queue)
    declared = [conf.queue(name) for name in registry.queue_names()]
    return next((found for found in declared if found.topic == topic), None)
