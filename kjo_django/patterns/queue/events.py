"""``queue.on``: the signals of one queue, by the names and arguments of its events."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from django.dispatch import Signal

from kjo_django import signals
from kjo_django.exceptions import KjoError, MaxRetriesError, text_of
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import serializer_for
from kjo_django.models import DeadLetterReason, Job
from kjo_django.runtime import jobs_database

logger = get_logger("kjo_django")

Listener = Callable[..., None]

_SIGNALS: dict[str, tuple[Signal, Callable[[dict[str, Any]], tuple[Any, ...]]]] = {
    "enqueued": (signals.job_enqueued, lambda facts: ()),
    "completed": (signals.job_completed, lambda facts: (facts["result"],)),
    "failed": (signals.job_failed, lambda facts: (_failure(facts),)),
    "failing": (signals.job_retried, lambda facts: (facts["error"], facts["attempt"])),
    "stalled": (signals.job_stalled, lambda facts: ()),
    "cancelled": (signals.job_cancelled, lambda facts: ()),
    "requeued": (signals.job_requeued, lambda facts: ()),
}
OWN = ("started", "stopped", "error")
EVENTS = (*_SIGNALS, *OWN)
"""Every event; those of jobs have the job's id as first argument."""


class Events:
    """The listeners of one queue."""

    def __init__(self, queue: str, handler: str) -> None:
        self._queue = queue
        self._handler = handler
        self._own: dict[str, list[Listener]] = {name: [] for name in OWN}

    def on(self, event: str, listener: Listener) -> Callable[[], None]:
        """Call ``listener`` when ``event`` happens in this process; returns what undoes it.

        :raises ValueError: there is no such event.
        """
        if event in self._own:
            self._own[event].append(listener)
            return lambda: self._own[event].remove(listener)
        try:
            signal, arguments = _SIGNALS[event]
        except KeyError:
            raise ValueError(f"No event is named {event!r}. Known: {', '.join(EVENTS)}.") from None

        def receiver(sender: Any, **facts: Any) -> None:
            if facts["queue"] != self._queue or facts["handler"] != self._handler:
                return
            try:
                listener(facts["unique_id"] or facts["job_id"], *arguments(facts))
            except Exception as error:
                logger.exception("A listener of %r failed", event)
                self.emit("error", error)

        signal.connect(receiver, weak=False)

        def undo() -> None:
            signal.disconnect(receiver)

        return undo

    def emit(self, event: str, *arguments: Any) -> None:
        """Call the listeners of an event that no signal carries."""
        for listener in list(self._own[event]):
            try:
                listener(*arguments)
            except Exception:
                logger.exception("A listener of %r failed", event)


def _failure(facts: dict[str, Any]) -> BaseException:
    """Return the error of a failed job: ``MaxRetriesError`` when its attempts are spent, else the
    error that ended it.
    """
    error: BaseException = facts["error"] or KjoError("failed")
    if facts["reason"] not in (DeadLetterReason.EXHAUSTED, DeadLetterReason.STALLED):
        return error
    id = facts["unique_id"] or facts["job_id"]
    failure = MaxRetriesError(id, facts["attempt"], text_of(error), _payload(facts["job_id"]))
    failure.__cause__ = error
    return failure


def _payload(job_id: str) -> Any:
    try:
        job = Job.objects.using(jobs_database()).only("payload", "content_type").get(pk=job_id)
        return serializer_for(job.content_type).loads(bytes(job.payload))
    except Exception as error:
        text = "The payload of the failed job %s cannot be read: %s"
        logger.warning(text, job_id, error, extra={"job_id": job_id})
        return None
