"""``path("kjo/", include("kjo_django.api.urls"))``."""

from __future__ import annotations

from django.db import transaction
from django.urls import path

from kjo_django.operations.actions import Subject

try:
    from kjo_django.api import (
        actions,
        dead_letters,
        jobs,
        limits,
        queues,
        schedules,
        system,
        workers,
        workflows,
    )
    from kjo_django.api.endpoints import address
except ModuleNotFoundError as error:
    raise ImportError(f"{error}: for the REST API, pip install 'kjo-django[api]'") from error

app_name = "kjo_django_api"
urlpatterns = [
    path("jobs/", address(jobs.list_jobs, jobs.enqueue_job), name="jobs"),
    path("jobs/<str:id>/", address(jobs.read_job), name="job"),
    # A transaction of the request would hide the job's end, and be open all the while.
    path(
        "jobs/<str:id>/wait/",
        transaction.non_atomic_requests(address(jobs.wait_for_job)),
        name="job-wait",
    ),
    path("dead-letters/", address(dead_letters.list_letters), name="dead-letters"),
    path("dead-letters/groups/", address(dead_letters.list_groups), name="dead-letter-groups"),
    *actions.bulk_addresses(),
    path("dead-letters/<str:id>/", address(dead_letters.read_letter), name="dead-letter"),
    path("queues/", address(queues.list_queues), name="queues"),
    path(
        "queues/<str:queue>/",
        address(queues.read_queue, *actions.methods_at(Subject.QUEUES)),
        name="queue",
    ),
    path("workers/", address(workers.list_workers), name="workers"),
    path("workers/<str:id>/", address(workers.read_worker), name="worker"),
    path("workflows/", address(workflows.list_workflows), name="workflows"),
    path("workflows/<str:id>/", address(workflows.read_workflow), name="workflow"),
    path("limits/", address(limits.list_limits), name="limits"),
    path(
        "limits/<str:limit>/",
        address(limits.read_limit, *actions.methods_at(Subject.LIMITS)),
        name="limit",
    ),
    path(
        "schedules/",
        address(schedules.list_schedules, schedules.add_schedule),
        name="schedules",
    ),
    path(
        "schedules/<str:id>/",
        address(schedules.read_schedule, *actions.methods_at(Subject.SCHEDULES)),
        name="schedule",
    ),
    *actions.addresses(),
    path("processed-events/", address(system.find_events), name="processed-events"),
    path("metrics/", address(system.read_metrics), name="metrics"),
    path("metrics/queues/", address(system.metrics_by_queue), name="metrics-queues"),
    path("metrics/handlers/", address(system.metrics_by_handler), name="metrics-handlers"),
    path("personal-data/", address(system.erase_personal_data), name="erasures"),
    path("personal-data/<str:id>/", address(system.read_erasure), name="erasure"),
    path("health/", address(system.read_health), name="health"),
]
