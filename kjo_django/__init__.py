"""Background jobs for Django: a model is saved, its job runs once, failures end where a person can
see and replay them.

The public names, importable before the apps are ready: each is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kjo_django.consumer.context import BatchItem, JobContext
    from kjo_django.consumer.model_consumer import ModelConsumer
    from kjo_django.consumer.stream_template import AbstractStreamConsumer
    from kjo_django.consumer.template import AbstractConsumer
    from kjo_django.events.event import BaseEvent
    from kjo_django.events.handlers import event_handler
    from kjo_django.events.idempotency import EventIdempotencyService
    from kjo_django.events.publishing import publish_event
    from kjo_django.exceptions import MustBeKilled, MustBeRedelivered, PermanentError, Retry
    from kjo_django.kdlq.config import DlqConfig, ProcessingStatus
    from kjo_django.kdlq.consumer import KDLQMessageConsumer
    from kjo_django.kdlq.handlers import kdlq_handler
    from kjo_django.producer.definition import JobDefinition, job
    from kjo_django.producer.enqueue import EnqueueResult
    from kjo_django.producer.hooks import enqueue_on_save
    from kjo_django.producer.model_producer import ModelProducer
    from kjo_django.producer.stream_template import AbstractStreamProducer
    from kjo_django.producer.template import AbstractProducer
    from kjo_django.queue import Queue

__version__ = "0.1.0"

_PUBLIC = {
    "AbstractConsumer": "kjo_django.consumer.template",
    "AbstractProducer": "kjo_django.producer.template",
    "AbstractStreamConsumer": "kjo_django.consumer.stream_template",
    "AbstractStreamProducer": "kjo_django.producer.stream_template",
    "BaseEvent": "kjo_django.events.event",
    "BatchItem": "kjo_django.consumer.context",
    "DlqConfig": "kjo_django.kdlq.config",
    "EnqueueResult": "kjo_django.producer.enqueue",
    "EventIdempotencyService": "kjo_django.events.idempotency",
    "JobContext": "kjo_django.consumer.context",
    "JobDefinition": "kjo_django.producer.definition",
    "KDLQMessageConsumer": "kjo_django.kdlq.consumer",
    "ModelConsumer": "kjo_django.consumer.model_consumer",
    "ModelProducer": "kjo_django.producer.model_producer",
    "MustBeKilled": "kjo_django.exceptions",
    "MustBeRedelivered": "kjo_django.exceptions",
    "PermanentError": "kjo_django.exceptions",
    "ProcessingStatus": "kjo_django.kdlq.config",
    "Queue": "kjo_django.queue",
    "Retry": "kjo_django.exceptions",
    "enqueue_on_save": "kjo_django.producer.hooks",
    "event_handler": "kjo_django.events.handlers",
    "job": "kjo_django.producer.definition",
    "kdlq_handler": "kjo_django.kdlq.handlers",
    "publish_event": "kjo_django.events.publishing",
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
