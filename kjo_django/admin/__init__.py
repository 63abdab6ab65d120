"""The admin: lists that stay fast on ten million rows, and actions with permissions and an audit
trail.

The operations are in ``operations``; this package only shows rows and asks for input.
"""

from kjo_django.admin.dashboard import DashboardAdmin
from kjo_django.admin.dead_letters import DeadLetterAdmin
from kjo_django.admin.jobs import JobAdmin
from kjo_django.admin.limits import LimitAdmin
from kjo_django.admin.schedules import ScheduleAdmin
from kjo_django.admin.system import ProcessedEventAdmin, QueueControlAdmin, WorkerAdmin

__all__ = [
    "DashboardAdmin",
    "DeadLetterAdmin",
    "JobAdmin",
    "LimitAdmin",
    "ProcessedEventAdmin",
    "QueueControlAdmin",
    "ScheduleAdmin",
    "WorkerAdmin",
]
