"""One job: its way so far, what it was given and gave, and what can be done about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any
from uuid import UUID

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpResponse
from django.utils import timezone
from django.utils.translation import gettext as _

from kjo_django import registry, states
from kjo_django.admin.dashboard.desk import Desk, Screen
from kjo_django.admin.outcome_messages import tell_outcomes
from kjo_django.conf import get_settings
from kjo_django.engine.leases import lease_name
from kjo_django.models import Job, JobFailure
from kjo_django.operations import jobs, redaction, rescheduling
from kjo_django.operations.jobs import Outcomes, live_leases
from kjo_django.operations.progress import progress_of
from kjo_django.states import JobState, JobStatus
from kjo_django.store.transactions import jobs_database

SHOWN_FAILURES = 50
SHOWN_LETTERS = 10


@dataclass(frozen=True, slots=True)
class Step:
    """Something that happened to a job, or will."""

    moment: datetime | None
    kind: str
    """``done``, ``failed``, ``next`` or ``""``."""
    text: str
    detail: str = ""
    failure: JobFailure | None = None


def show(desk: Desk, job: UUID) -> HttpResponse:
    """Return one job."""
    found = _find(job)
    status = _status(found)
    failures = list(_failures(desk, found))
    letters = found.dead_letters.order_by("-pk").defer("value", "headers", "traceback")
    if not desk.may("view_payload"):
        redaction.hide_texts([found, *failures])
    progress = progress_of([found.pk]).get(str(found.pk))
    is_open = found.state in states.OPEN
    return desk.show(
        "job.html",
        {
            "job": found,
            "status": status,
            "django_status": states.to_django_tasks(status),
            "steps": _steps(found, status, failures),
            "failures": failures,
            "letters": list(letters[:SHOWN_LETTERS]) if desk.may("view_deadletter") else [],
            "progress": progress,
            "payload": redaction.shown_payload(found) if desk.may("view_payload") else None,
            "result": _result(desk, found),
            "headers": redaction.shown_headers(found) if desk.may("view_payload") else None,
            "may_run_now": is_open and status != JobStatus.PROCESSING,
            "is_open": is_open,
            "knows_queue": found.queue in registry.queue_names(),
            "summary": f"{found.handler}: {status.label}",
        },
        title=_("Job %s") % found.pk,
    )


def _find(job: UUID) -> Job:
    found: Job | None = Job.objects.using(jobs_database()).filter(pk=job).first()
    if found is None:
        raise Http404(_("There is no such job; it may have been pruned."))
    return found


def _status(job: Job) -> JobStatus:
    lease = lease_name(get_settings().queue(job.queue), job.message_id)
    return job.status_with(leased=job.state in states.OPEN and bool(live_leases([lease])))


def _failures(desk: Desk, job: Job) -> Any:
    rows = job.failures.order_by("-pk")
    return (rows if desk.may("view_payload") else rows.defer("traceback"))[:SHOWN_FAILURES]


def _result(desk: Desk, job: Job) -> Any:
    if job.state != JobState.COMPLETED or not desk.may("view_payload"):
        return None
    return {"value": redaction.shown_result(job)}


def _steps(job: Job, status: JobStatus, failures: list[JobFailure]) -> list[Step]:
    steps = [Step(job.created_at, "done", _("Enqueued"), job.queue)]
    if job.queued_at is not None:
        place = f"{job.topic} {job.partition}/{job.offset}" if job.offset is not None else job.topic
        steps.append(Step(job.queued_at, "done", _("Published"), place))
    for failure in reversed(failures):
        text = _("Attempt %(attempt)d failed: %(error)s") % {
            "attempt": failure.attempt,
            "error": failure.error_type,
        }
        steps.append(Step(failure.failed_at, "failed", text, failure.worker, failure))
    if job.started_at is not None and status in (JobStatus.PROCESSING, JobStatus.COMPLETED):
        steps.append(Step(job.started_at, "done", _("Started")))
    steps.sort(key=lambda step: step.moment or timezone.now())
    if job.state in states.FINAL:
        kind = "done" if job.state == JobState.COMPLETED else "failed"
        steps.append(Step(job.finished_at, kind, str(status.label)))
    else:
        steps.append(Step(_due(job, status), "next", str(status.label)))
    return steps


def _due(job: Job, status: JobStatus) -> datetime | None:
    return job.available_at if status in (JobStatus.SCHEDULED, JobStatus.FAILING) else None


# --- Actions --------------------------------------------------------------------------------------


def _act(
    act: Callable[..., Outcomes], word: str, wanted: str, desk: Desk, job: UUID
) -> HttpResponse:
    if not desk.may("view_job"):
        raise PermissionDenied
    _find(job)
    outcomes = desk.attempt(lambda: act([job], actor=desk.actor, on_changed=desk.audit(word)))
    if outcomes is not None:
        tell_outcomes(desk.tell, outcomes, wanted)
    return desk.back("job", job)


def _action(
    name: str, permission: str, act: Callable[..., Outcomes], word: str, wanted: str
) -> Screen:
    path = f"jobs/<uuid:job>/{name}/"
    return Screen(f"job_{name}", path, partial(_act, act, word, wanted), permission, is_action=True)


def _abort(selection: Any, **options: Any) -> Outcomes:
    return jobs.cancel(selection, abort=True, **options)


SCREENS = (
    Screen("job", "jobs/<uuid:job>/", show, "view_job"),
    _action("requeue", "retry_job", jobs.requeue, "Requeued.", "requeued"),
    _action("run_now", "retry_job", rescheduling.run_now, "Made due now.", "due"),
    _action("cancel", "cancel_job", jobs.cancel, "Cancelled.", "cancelled"),
    _action("abort", "cancel_job", _abort, "Cancelled, or asked to abort.", "cancelled"),
)
