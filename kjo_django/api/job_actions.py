"""What is done to one job: cancel it, run it again or now, move it to another queue."""

from __future__ import annotations

from typing import Any, ClassVar

from django.http import Http404
from rest_framework import status
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api import job_shapes as shapes
from kjo_django.api.base import KjoView
from kjo_django.api.jobs import TAG, find, summaries
from kjo_django.api.openapi import ID, documented
from kjo_django.api.problems import Conflict
from kjo_django.operations import jobs, rescheduling
from kjo_django.operations.jobs import CancelResult, Outcomes, RequeueResult
from kjo_django.operations.jobs.rescheduling import MoveResult, RunNowResult

REFUSALS: dict[str, str] = {
    RequeueResult.PROCESSING: "The job is being processed; try again later.",
    MoveResult.TAKEN: "Another job of that queue has its unique id.",
    MoveResult.OTHER_KIND: "It is no job of a handler; it stays in the queue of its kind.",
}


class CancelView(KjoView):
    """Cancelling one job."""

    permissions: ClassVar = {"POST": ("view_job", "cancel_job")}

    @documented(
        "jobs_cancel",
        TAG,
        {
            200: (shapes.JobOutcome, "It is cancelled."),
            202: (shapes.JobOutcome, "It is running, and was asked to end."),
        },
        body=shapes.CancelBody,
        path=[ID],
        problems=[404, 409, 503],
    )
    def post(self, request: Request, id: str) -> Response:
        """Cancel an open job, or with `abort` ask a running one to end."""
        abort = self.body(shapes.CancelBody)["abort"]
        job = find(id)
        outcomes = jobs.cancel(
            [job.pk], abort=abort, actor=self.actor, on_changed=self.audit("Cancelled.")
        )
        result = outcome_of(outcomes)
        if result == CancelResult.PROCESSING and abort:
            self.audit("Asked to end.")([job])
            return told(self, result, job.pk, status.HTTP_202_ACCEPTED)
        if result == CancelResult.PROCESSING:
            raise Conflict("The job is being processed; `abort` asks it to end.")
        if result != CancelResult.CANCELLED:
            raise Conflict(f"The job has {result} already; its record stays.")
        return told(self, result, job.pk)


class RequeueView(KjoView):
    """Giving one job a new run."""

    permissions: ClassVar = {"POST": ("view_job", "retry_job")}

    @documented(
        "jobs_requeue",
        TAG,
        {200: shapes.JobOutcome},
        body=shapes.NoBody,
        path=[ID],
        problems=[404, 409, 503],
    )
    def post(self, request: Request, id: str) -> Response:
        """Give a job a new run with all its attempts, due now; its dead letters are closed."""
        self.body(shapes.NoBody)
        job = find(id)
        outcomes = jobs.requeue([job.pk], actor=self.actor, on_changed=self.audit("Requeued."))
        return answer_of(self, outcomes, {RequeueResult.REQUEUED}, job.pk)


class RunNowView(KjoView):
    """Letting one job run now."""

    permissions: ClassVar = {"POST": ("view_job", "retry_job")}

    @documented(
        "jobs_run_now",
        TAG,
        {200: (shapes.JobOutcome, "`due`: it was due later; `unchanged`: it was due already.")},
        body=shapes.NoBody,
        path=[ID],
        problems=[404, 409, 503],
    )
    def post(self, request: Request, id: str) -> Response:
        """Let a scheduled job, or a failing one that waits for its next attempt, run now."""
        self.body(shapes.NoBody)
        job = find(id)
        outcomes = rescheduling.run_now(
            [job.pk], actor=self.actor, on_changed=self.audit("Run now.")
        )
        return answer_of(self, outcomes, {RunNowResult.DUE, RunNowResult.UNCHANGED}, job.pk)


class ChangeQueueView(KjoView):
    """Moving one job."""

    permissions: ClassVar = {"POST": ("view_job", "retry_job")}

    @documented(
        "jobs_change_queue",
        TAG,
        {200: (shapes.JobOutcome, "`moved`, or `unchanged`: it was in that queue.")},
        body=shapes.ChangeQueueBody,
        path=[ID],
        problems=[404, 409, 503],
    )
    def post(self, request: Request, id: str) -> Response:
        """Move an open job to another queue; its idempotency key is another one there."""
        queue = self.body(shapes.ChangeQueueBody)["queue"]
        job = find(id)
        audit = self.audit(f"Moved to {queue}.")
        try:
            outcomes = rescheduling.change_queue(
                [job.pk], queue, actor=self.actor, on_changed=audit
            )
        except ValueError as error:
            raise ValidationError({"queue": str(error)}, code="unknown") from None
        return answer_of(self, outcomes, {MoveResult.MOVED, MoveResult.UNCHANGED}, job.pk)


# --- Details --------------------------------------------------------------------------------------


def answer_of(view: KjoView, outcomes: Outcomes, good: set[Any], id: Any) -> Response:
    """Answer with what a request about one job ended with.

    :param good: the results that are no refusal.
    :raises PermissionDenied: it is an internal job, and the user may not do what it does.
    :raises Conflict: it ended with another one.
    """
    result = outcome_of(outcomes)
    if result in good:
        return told(view, result, id)
    if result == RequeueResult.FORBIDDEN:
        raise PermissionDenied("An internal job takes the permission of what it does as well.")
    raise Conflict(REFUSALS.get(result, f"The job has {result} already; its record stays."))


def outcome_of(outcomes: Outcomes) -> str:
    """Return what a request about one job ended with.

    :raises Http404: it was deleted meanwhile.
    """
    result = next(iter(outcomes.counts))
    if result == CancelResult.NOT_FOUND:
        raise Http404
    return result


def told(view: KjoView, outcome: str, id: Any, code: int = status.HTTP_200_OK) -> Response:
    """Answer with an outcome and the job after it."""
    answer = {"outcome": outcome, "job": summaries(view, [find(str(id))])[0]}
    return Response(shapes.JobOutcome(answer).data, status=code)
