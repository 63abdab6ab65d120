"""Where a message goes after its processor has returned. Decides and builds records; publishes
none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from kjo_django.exceptions import JobCancelledError, MustBeKilled, MustBeRedelivered
from kjo_django.patterns.kdlq import headers
from kjo_django.patterns.kdlq.config import DlqConfig, ProcessingStatus, Status
from kjo_django.transports.base import OutgoingRecord, Record

Processor = Callable[[Record], ProcessingStatus | None]
"""Processes a message. None means OK; the kind of an exception, and the config, decide about it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The processor's status, returned or raised."""

    status: ProcessingStatus
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Decision:
    """The routing of a message."""

    status: Status
    outgoing: OutgoingRecord | None = None
    """The record to send."""
    delay: timedelta = timedelta(0)
    """The delay of that record."""


def judge(
    call: Callable[[], Any],
    config: DlqConfig,
    may_succeed_again: Callable[[Exception], bool] = lambda error: False,
) -> Verdict:
    """Call the processor and return its status.

    :param may_succeed_again: whether an error says nothing of the message, and is raised.
    """
    try:
        answer = call()
    except JobCancelledError:
        raise  # the worker stops: nothing has been decided
    except MustBeRedelivered as error:
        return Verdict(ProcessingStatus.MUST_BE_REDELIVERED, error)
    except MustBeKilled as error:
        return Verdict(ProcessingStatus.ERROR, error)
    except Exception as error:
        if may_succeed_again(error):
            raise
        again = config.default_on_exception == "redeliver"
        status = ProcessingStatus.MUST_BE_REDELIVERED if again else ProcessingStatus.ERROR
        return Verdict(status, error)
    if answer is None:
        return Verdict(ProcessingStatus.OK)
    if not isinstance(answer, ProcessingStatus):
        problem = TypeError(f"A processor answers with a ProcessingStatus, not {answer!r:.80}")
        return Verdict(ProcessingStatus.ERROR, problem)
    return Verdict(answer)


def decide(record: Record, verdict: Verdict, config: DlqConfig, marker: str) -> Decision:
    """Return the routing of a message.

    :param marker: the consumer's id.
    """
    if verdict.status is ProcessingStatus.OK:
        return Decision(Status.OK)
    if verdict.status is ProcessingStatus.MUST_BE_REDELIVERED:
        count = headers.counter(record.headers, headers.REDELIVERED)
        if config.max_redeliveries < 0 or count < config.max_redeliveries:
            return Decision(
                Status.REDELIVERED,
                OutgoingRecord(
                    topic=config.redelivery_topic or record.topic,
                    key=record.key,
                    value=record.value,
                    headers=headers.redelivered(record, config, marker),
                ),
                config.delay_of(count),
            )
    return _kill(record, verdict, config, marker)


def _kill(record: Record, verdict: Verdict, config: DlqConfig, marker: str) -> Decision:
    count = headers.counter(record.headers, headers.KILLS)
    if 0 <= config.max_kills <= count:
        # Whoever asked for a redelivery is told of the skip all the same.
        return Decision(Status.SKIPPED_DLQ_MAX_ATTEMPTS_REACHED)
    return Decision(
        Status.ROUTED_TO_DLQ,
        OutgoingRecord(
            topic=config.dlq_topic,
            key=record.key,
            value=record.value,
            headers=headers.killed(record, config, marker, verdict.error),
        ),
    )
