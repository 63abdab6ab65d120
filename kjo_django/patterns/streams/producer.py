"""Template producers of tasks on a stream (seed 4): what a task is, and what its failure means.

    class AnalyzeProducer(AbstractStreamProducer[Resume]):
        task_display_name = "resume analysis"
        stream_key = "resume:analyze:stream"

        def build_message(self, resume): return {"resumeId": str(resume.pk)}
        def payload_identifier(self, resume): return str(resume.pk)
        def on_send_failed(self, resume, error): resume.fail(error)

The entry is stored in the caller's transaction and sent once that commits, so a worker never finds
the task before its row, and a crash in between loses nothing.
"""

from __future__ import annotations

import abc
import logging
import uuid
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

from django.db import transaction
from django.utils.translation import gettext as _

from kjo_django.enqueue.storing import store_record
from kjo_django.messages import headers as names
from kjo_django.messages.serializers import JSON, MAX_ERROR_LENGTH, storable_text
from kjo_django.store.transactions import jobs_database

logger = logging.getLogger("kjo_django.producer")

T = TypeVar("T")
RETRY_COUNT = "retryCount"


def truncate_error(text: str | None) -> str | None:
    """Return at most 500 characters of an error, the prefix included; None stays None."""
    return None if text is None else storable_text(text, MAX_ERROR_LENGTH)


class AbstractStreamProducer(abc.ABC, Generic[T]):
    """Sends tasks to one stream."""

    task_display_name: ClassVar[str]
    """What people call the task; it appears in logs and errors."""
    stream_key: ClassVar[str]
    """The topic; by convention ``{domain}:{action}:stream``."""

    def __init__(self) -> None:
        for name in ("task_display_name", "stream_key"):
            if not getattr(self, name, ""):
                raise TypeError(f"{type(self).__name__} needs {name}")

    @abc.abstractmethod
    def build_message(self, payload: T) -> Mapping[str, Any]:
        """Return the entry's fields. Pass ids, not contents: what is sent is kept and seen."""

    @abc.abstractmethod
    def payload_identifier(self, payload: T) -> str:
        """Return what the task is about; its tasks keep their order."""

    @abc.abstractmethod
    def on_send_failed(self, payload: T, error: str) -> None:
        """Called when the task could not be stored, so that it will never run; ``error`` has at
        most 500 characters."""

    def send_task(self, payload: T) -> uuid.UUID | None:
        """Store the task, to be sent with the caller's transaction; return the id of its row.

        The row is ``completed`` once the task has been sent. Where its consumer is of this service
        and an attempt fails, the same row is the task's job from then on, with its attempts, its
        retries and its end.

        None: it could not be stored, ``on_send_failed`` was called, and the caller's transaction
        can go on.
        """
        identifier = "?"
        try:
            identifier = self.payload_identifier(payload)
            fields = {**self.build_message(payload), RETRY_COUNT: "0"}
            with transaction.atomic(using=jobs_database()):
                row = store_record(
                    self.stream_key,
                    value=JSON.dumps({name: str(value) for name, value in fields.items()}),
                    key=identifier.encode(),
                    headers={names.CONTENT_TYPE: JSON.content_type.encode()},
                    kind=self.task_display_name,
                    row_header=names.ID,
                )
        except Exception as error:
            logger.exception("%s of %s was not queued", self.task_display_name, identifier)
            told = _("The task could not be queued: %(error)s") % {"error": error}
            self.on_send_failed(payload, truncate_error(told) or "")
            return None
        logger.info("%s queued for %s: %s", self.task_display_name, self.stream_key, identifier)
        return row.pk
