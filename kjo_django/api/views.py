"""Reading jobs. The permissions are the admin's own; payloads and results need theirs."""

from __future__ import annotations

import uuid
from typing import Any

from django.shortcuts import get_object_or_404
from rest_framework.decorators import api_view, permission_classes
from rest_framework.permissions import BasePermission
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.conf import get_settings
from kjo_django.consumer.leases import lease_name
from kjo_django.models import Job
from kjo_django.operations.jobs import live_leases
from kjo_django.operations.progress import progress_of
from kjo_django.producer.dispatch import jobs_database
from kjo_django.producer.enqueue import result_of
from kjo_django.states import JobState


class MayViewJobs(BasePermission):  # type: ignore[misc]
    """Whoever may see jobs in the admin may see them here."""

    def has_permission(self, request: Request, view: Any) -> bool:
        """Ask for ``kjo_django.view_job``."""
        return bool(request.user and request.user.has_perm("kjo_django.view_job"))


@api_view(["GET"])  # type: ignore[untyped-decorator]
@permission_classes([MayViewJobs])  # type: ignore[untyped-decorator]
def job_detail(request: Request, id: uuid.UUID) -> Response:
    """Return a job's status, how far it says it is, and its result to those who may see it."""
    rows = Job.objects.using(jobs_database()).defer("payload")
    job = get_object_or_404(rows, pk=id)
    lease = lease_name(get_settings().queue(job.queue), job.message_id)
    progress = progress_of([job.pk]).get(str(job.pk))
    answer: dict[str, Any] = {
        "id": str(job.pk),
        "queue": job.queue,
        "handler": job.handler,
        "unique_id": job.unique_id,
        "status": str(job.status_with(leased=bool(live_leases([lease])))),
        "attempts": job.attempts,
        "max_attempts": job.max_attempts,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "error": job.error or None,
        "progress": progress and {"percent": progress.percent, "text": progress.text},
    }
    if job.state == JobState.COMPLETED and request.user.has_perm("kjo_django.view_payload"):
        answer["result"] = result_of(job)
    return Response(answer)
