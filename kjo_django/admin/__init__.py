"""The admin: lists that stay fast on ten million rows, actions with permissions and an audit trail.

What actions do is in ``operations``; here is only what asks and shows.
"""

from kjo_django.admin.dashboard import DashboardAdmin
from kjo_django.admin.dead_letters import DeadLetterAdmin
from kjo_django.admin.jobs import JobAdmin
from kjo_django.admin.system import ProcessedEventAdmin, QueueControlAdmin, WorkerAdmin

__all__ = [
    "DashboardAdmin",
    "DeadLetterAdmin",
    "JobAdmin",
    "ProcessedEventAdmin",
    "QueueControlAdmin",
    "WorkerAdmin",
]
