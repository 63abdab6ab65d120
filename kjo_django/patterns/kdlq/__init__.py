"""KDLQ: redelivery and dead letters decided by counters in a message's headers.

The headers are the Java library's, byte for byte, so consumers of both can share topics.
"""

from kjo_django.exceptions import (
    KDLQConfigurationException,
    KDLQException,
    KDLQLifecycleException,
    KDLQMessageMustBeRedeliveredException,
    MustBeKilled,
    MustBeRedelivered,
)
from kjo_django.patterns.kdlq.config import (
    DlqConfig,
    KDLQMessageLifecycleListener,
    Ordering,
    ProcessingStatus,
    Status,
)
from kjo_django.patterns.kdlq.consumer import KDLQMessageConsumer
from kjo_django.patterns.kdlq.handlers import kdlq_handler

__all__ = [
    "DlqConfig",
    "KDLQConfigurationException",
    "KDLQException",
    "KDLQLifecycleException",
    "KDLQMessageConsumer",
    "KDLQMessageLifecycleListener",
    "KDLQMessageMustBeRedeliveredException",
    "MustBeKilled",
    "MustBeRedelivered",
    "Ordering",
    "ProcessingStatus",
    "Status",
    "kdlq_handler",
]
