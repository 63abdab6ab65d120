"""Many dead letters at once."""

from __future__ import annotations

from typing import ClassVar

from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api import letter_shapes as shapes
from kjo_django.api.base import KjoView
from kjo_django.api.openapi import documented
from kjo_django.api.problems import Conflict
from kjo_django.operations import dead_letters
from kjo_django.operations.counting import bounded_count

TAG = "dead letters"
MOST = 500
"""Dead letters done within one request."""


class ReplayView(KjoView):
    """Replaying a selection."""

    permissions: ClassVar = {"POST": ("view_deadletter", "replay_dlq")}

    @documented(
        "dead_letters_bulk_replay",
        TAG,
        {200: shapes.ReplayReport},
        body=shapes.BulkReplayBody,
        problems=[409, 503],
    )
    def post(self, request: Request) -> Response:
        """Replay the open dead letters a selection takes, oldest first."""
        body = self.body(shapes.BulkReplayBody)
        selection = shapes.selected(body)
        if not body["dry_run"]:
            refuse_many(selection, body.get("limit"))
        report = dead_letters.replay(
            selection,
            limit=body.get("limit"),
            rate=body.get("rate"),
            dry_run=body["dry_run"],
            force=body["force"],
            actor=self.actor,
            on_changed=self.audit("Replayed."),
        )
        return Response(shapes.ReplayReport(report.as_dict()).data)


class DiscardView(KjoView):
    """Discarding a selection."""

    permissions: ClassVar = {"POST": ("view_deadletter", "discard_dlq")}

    @documented(
        "dead_letters_bulk_discard",
        TAG,
        {200: shapes.DiscardReport},
        body=shapes.BulkDiscardBody,
        problems=[409],
    )
    def post(self, request: Request) -> Response:
        """Close the open dead letters a selection takes, without running them again."""
        body = self.body(shapes.BulkDiscardBody)
        selection = shapes.selected(body)
        if body["dry_run"]:
            count = bounded_count(dead_letters.select(selection))
        else:
            refuse_many(selection, None)
            note = body["note"]
            audit = self.audit(f"Discarded: {note}")
            count = dead_letters.discard(selection, note=note, actor=self.actor, on_changed=audit)
        answer = {"dry_run": body["dry_run"], "discarded": count}
        return Response(shapes.DiscardReport(answer).data)


def refuse_many(selection: dead_letters.DeadLetterFilter, limit: int | None) -> None:
    """Refuse what would keep a request too long."""
    if limit is not None and limit <= MOST:
        return
    if bounded_count(dead_letters.select(selection), MOST + 1) > MOST:
        raise Conflict(f"The selection takes more than {MOST}; restrict it, or give a limit.")
