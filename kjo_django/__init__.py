"""Background jobs for Django: a model is saved, its job runs once, failures end where a person can
see and replay them.

The public names, importable before the apps are ready: each is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kjo_django.engine.handler.context import BatchItem, JobContext
    from kjo_django.enqueue.definition import JobDefinition, enqueue_on_save, job
    from kjo_django.enqueue.storing import EnqueueResult
    from kjo_django.exceptions import MustBeKilled, MustBeRedelivered, PermanentError, Retry
    from kjo_django.patterns.events.event import BaseEvent, publish_event
    from kjo_django.patterns.events.handlers import event_handler
    from kjo_django.patterns.events.idempotency import EventIdempotencyService
    from kjo_django.patterns.items.consumer import AbstractConsumer
    from kjo_django.patterns.items.model_items import ModelConsumer, ModelProducer
    from kjo_django.patterns.items.producer import AbstractProducer
    from kjo_django.patterns.kdlq.config import DlqConfig, ProcessingStatus
    from kjo_django.patterns.kdlq.consumer import KDLQMessageConsumer
    from kjo_django.patterns.kdlq.handlers import kdlq_handler
    from kjo_django.patterns.queue import Queue
    from kjo_django.patterns.streams import AbstractStreamConsumer, AbstractStreamProducer

__version__ = "0.1.0"

_PUBLIC = {
    "AbstractConsumer": "kjo_django.patterns.items.consumer",
    "AbstractProducer": "kjo_django.patterns.items.producer",
    "AbstractStreamConsumer": "kjo_django.patterns.streams",
    "AbstractStreamProducer": "kjo_django.patterns.streams",
    "BaseEvent": "kjo_django.patterns.events.event",
    "BatchItem": "kjo_django.engine.handler.context",
    "DlqConfig": "kjo_django.patterns.kdlq.config",
    "EnqueueResult": "kjo_django.enqueue.storing",
    "EventIdempotencyService": "kjo_django.patterns.events.idempotency",
    "JobContext": "kjo_django.engine.handler.context",
    "JobDefinition": "kjo_django.enqueue.definition",
    "KDLQMessageConsumer": "kjo_django.patterns.kdlq.consumer",
    "ModelConsumer": "kjo_django.patterns.items.model_items",
    "ModelProducer": "kjo_django.patterns.items.model_items",
    "MustBeKilled": "kjo_django.exceptions",
    "MustBeRedelivered": "kjo_django.exceptions",
    "PermanentError": "kjo_django.exceptions",
    "ProcessingStatus": "kjo_django.patterns.kdlq.config",
    "Queue": "kjo_django.patterns.queue",
    "Retry": "kjo_django.exceptions",
    "enqueue_on_save": "kjo_django.enqueue.definition",
    "event_handler": "kjo_django.patterns.events.handlers",
    "job": "kjo_django.enqueue.definition",
    "kdlq_handler": "kjo_django.patterns.kdlq.handlers",
    "publish_event": "kjo_django.patterns.events.event",
}

__all__ = [
    "AbstractConsumer",
    "AbstractProducer",
    "AbstractStreamConsumer",
    "AbstractStreamProducer",
    "BaseEvent",
    "BatchItem",
    "DlqConfig",
    "EnqueueResult",
    "EventIdempotencyService",
    "JobContext",
    "JobDefinition",
    "KDLQMessageConsumer",
    "ModelConsumer",
    "ModelProducer",
    "MustBeKilled",
    "MustBeRedelivered",
    "PermanentError",
    "ProcessingStatus",
    "Queue",
    "Retry",
    "enqueue_on_save",
    "event_handler",
    "job",
    "kdlq_handler",
    "publish_event",
]


def __getattr__(name: str) -> Any:
    try:
        return getattr(import_module(_PUBLIC[name]), name)
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None


def __dir__() -> list[str]:
    return sorted([*globals(), *_PUBLIC])
