"""Many dead letters at once: few within the request, many as a job in the background."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar

from rest_framework import status
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api import letter_shapes as shapes
from kjo_django.api.base import KjoView
from kjo_django.api.dead_letters import TAG
from kjo_django.api.jobs import job_url
from kjo_django.api.openapi import documented
from kjo_django.api.problems import Conflict
from kjo_django.models import Job
from kjo_django.operations import bulk, dead_letters
from kjo_django.operations.dead_letters import PREVIEW_LIMIT
from kjo_django.store.counting import bounded_count

BACKGROUND = (shapes.Background, "They are many: a job does it. `Location` is its address.")


class ReplayView(KjoView):
    """Replaying a selection."""

    permissions: ClassVar = {"POST": ("view_deadletter", "replay_dlq")}

    @documented(
        "dead_letters_bulk_replay",
        TAG,
        {200: shapes.ReplayReport, 202: BACKGROUND},
        body=shapes.BulkReplayBody,
        problems=[409, 503],
    )
    def post(self, request: Request) -> Response:
        """Replay the open dead letters a selection takes, oldest first."""
        body = self.body(shapes.BulkReplayBody)
        self.refuse_texts(body)
        selection, audit = shapes.selected(body), self.audit("Replayed.")
        if body["dry_run"]:
            limit = body.get("limit") or PREVIEW_LIMIT
            report = dead_letters.preview(selection, limit=limit, force=body["force"])
        else:
            with refusing():
                done = bulk.replay_or_start(
                    selection,
                    limit=body.get("limit"),
                    rate=body.get("rate"),
                    force=body["force"],
                    actor=self.actor,
                    on_changed=audit,
                )
            if isinstance(done, Job):
                return in_background(self, done, "Replays dead letters.")
            report = done
        return Response(shapes.ReplayReport(report.as_dict()).data)


class DiscardView(KjoView):
    """Discarding a selection."""

    permissions: ClassVar = {"POST": ("view_deadletter", "discard_dlq")}

    @documented(
        "dead_letters_bulk_discard",
        TAG,
        {200: shapes.DiscardReport, 202: BACKGROUND},
        body=shapes.BulkDiscardBody,
        problems=[409],
    )
    def post(self, request: Request) -> Response:
        """Close the open dead letters a selection takes, without running them again."""
        body = self.body(shapes.BulkDiscardBody)
        self.refuse_texts(body)
        selection, note = shapes.selected(body), body["note"]
        if body["dry_run"]:
            count = bounded_count(dead_letters.select(selection))
        else:
            audit = self.audit(f"Discarded: {note}")
            with refusing():
                done = bulk.discard_or_start(
                    selection, note=note, actor=self.actor, on_changed=audit
                )
            if isinstance(done, Job):
                return in_background(self, done, f"Discards dead letters: {note}")
            count = done
        answer = {"dry_run": body["dry_run"], "discarded": count}
        return Response(shapes.DiscardReport(answer).data)


@contextmanager
def refusing() -> Iterator[None]:
    """Tell why it cannot be done in the background: no worker would do it."""
    try:
        yield
    except ValueError as error:
        raise Conflict(str(error)) from None


def in_background(view: KjoView, job: Job, message: str) -> Response:
    """Answer with the job that does it; what each letter's log would say, the job's does."""
    view.audit(message, is_new=True)([job])
    url = job_url(view.request, job.pk)
    return Response(
        shapes.Background({"job": job.pk, "url": url}).data,
        status=status.HTTP_202_ACCEPTED,
        headers={"Location": url},
    )
