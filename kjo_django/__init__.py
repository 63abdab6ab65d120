"""Background jobs for Django: a model is saved, its job runs once, failures end where a person can
see and replay them.

The public names, importable before the apps are ready: each is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kjo_django.engine.handler.context import BatchItem as BatchItem
    from kjo_django.engine.handler.context import JobContext as JobContext
    from kjo_django.enqueue.definition import JobDefinition as JobDefinition
    from kjo_django.enqueue.definition import enqueue_on_save as enqueue_on_save
    from kjo_django.enqueue.definition import job as job
    from kjo_django.enqueue.handle import JobHandle as JobHandle
    from kjo_django.exceptions import MustBeKilled as MustBeKilled
    from kjo_django.exceptions import MustBeRedelivered as MustBeRedelivered
    from kjo_django.exceptions import PermanentError as PermanentError
    from kjo_django.exceptions import Retry as Retry
    from kjo_django.patterns.events.event import BaseEvent as BaseEvent
    from kjo_django.patterns.events.event import publish_event as publish_event
    from kjo_django.patterns.events.handlers import event_handler as event_handler
    from kjo_django.patterns.events.idempotency import (
        EventIdempotencyService as EventIdempotencyService,
    )
    from kjo_django.patterns.items.consumer import AbstractConsumer as AbstractConsumer
    from kjo_django.patterns.items.model_items import ModelConsumer as ModelConsumer
    from kjo_django.patterns.items.model_items import ModelProducer as ModelProducer
    from kjo_django.patterns.items.producer import AbstractProducer as AbstractProducer
    from kjo_django.patterns.kdlq.config import DlqConfig as DlqConfig
    from kjo_django.patterns.kdlq.config import ProcessingStatus as ProcessingStatus
    from kjo_django.patterns.kdlq.consumer import KDLQMessageConsumer as KDLQMessageConsumer
    from kjo_django.patterns.kdlq.handlers import kdlq_handler as kdlq_handler
    from kjo_django.patterns.queue import EnqueueResult as EnqueueResult
    from kjo_django.patterns.queue import Queue as Queue
    from kjo_django.patterns.streams import AbstractStreamConsumer as AbstractStreamConsumer
    from kjo_django.patterns.streams import AbstractStreamProducer as AbstractStreamProducer
    from kjo_django.retries import exponential as exponential
    from kjo_django.workflows.definition import Workflow as Workflow
    from kjo_django.workflows.definition import chain as chain
    from kjo_django.workflows.definition import group as group

__version__ = "0.1.0"

_NAMES = {
    "engine.handler.context": "BatchItem JobContext",
    "enqueue.definition": "JobDefinition enqueue_on_save job",
    "enqueue.handle": "JobHandle",
    "exceptions": "MustBeKilled MustBeRedelivered PermanentError Retry",
    "patterns.events.event": "BaseEvent publish_event",
    "patterns.events.handlers": "event_handler",
    "patterns.events.idempotency": "EventIdempotencyService",
    "patterns.items.consumer": "AbstractConsumer",
    "patterns.items.model_items": "ModelConsumer ModelProducer",
    "patterns.items.producer": "AbstractProducer",
    "patterns.kdlq.config": "DlqConfig ProcessingStatus",
    "patterns.kdlq.consumer": "KDLQMessageConsumer",
    "patterns.kdlq.handlers": "kdlq_handler",
    "patterns.queue": "EnqueueResult Queue",
    "patterns.streams": "AbstractStreamConsumer AbstractStreamProducer",
    "retries": "exponential",
    "workflows.definition": "Workflow chain group",
}
_PUBLIC = {name: f"{__name__}.{path}" for path, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_PUBLIC)


def __getattr__(name: str) -> Any:
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
