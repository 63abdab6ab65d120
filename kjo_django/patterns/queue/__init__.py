"""The message-level API: jobs known by ids of their callers', with results to wait for.

images = Queue("images")

@images.handler
def shrink(job):
    return {"url": make_thumbnail(job.payload["url"])}

images.enqueue_and_wait("img-1", {"url": "…"}, timeout=30)
"""

from kjo_django.enqueue.waiting import NO_RESULT
from kjo_django.operations.jobs import CancelResult, RequeueResult
from kjo_django.patterns.queue.client import EnqueueResult, Queue
from kjo_django.patterns.queue.handlers import AfterExecution, QueueJob
from kjo_django.patterns.queue.message_status import MessageStatus, UpdateTtlResult

__all__ = [
    "NO_RESULT",
    "AfterExecution",
    "CancelResult",
    "EnqueueResult",
    "MessageStatus",
    "Queue",
    "QueueJob",
    "RequeueResult",
    "UpdateTtlResult",
]
