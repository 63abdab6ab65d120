"""What operators do to jobs: requeue, cancel, run now, move; finding jobs, and waiting for them."""

from kjo_django.operations.jobs.changes import (
    CancelResult,
    Outcomes,
    RequeueResult,
    Selection,
    cancel,
    cancel_one,
    close_as_replayed,
    live_leases,
    requeue,
)

__all__ = [
    "CancelResult",
    "Outcomes",
    "RequeueResult",
    "Selection",
    "cancel",
    "cancel_one",
    "close_as_replayed",
    "live_leases",
    "requeue",
]
