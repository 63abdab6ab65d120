"""Dead letters: list, group, look at one, replay, discard, repair and replay."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

from django.db.models import QuerySet
from django.http import Http404
from drf_spectacular.utils import OpenApiExample
from rest_framework.exceptions import ValidationError
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api import letter_shapes as shapes
from kjo_django.api.base import KjoView, id_of
from kjo_django.api.openapi import ID, documented
from kjo_django.api.paging import page
from kjo_django.api.problems import Conflict, Unavailable
from kjo_django.api.showing import shown_headers, shown_text, shown_value
from kjo_django.messages.serializers import JSON, serializer_for
from kjo_django.models import DeadLetter, DeadLetterState
from kjo_django.operations import dead_letters
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.dead_letters.table import ReplayReport
from kjo_django.operations.fingerprints import error_groups
from kjo_django.operations.redaction import hide_texts
from kjo_django.store.transactions import jobs_database

TAG = "dead letters"

_PLAIN = (
    *("id", "state", "reason", "message_id", "queue", "handler", "error_type", "error"),
    *("fingerprint", "release", "attempts", "replay_count", "failed_at", "closed_at", "note"),
)
_DETAILS = ("topic", "partition", "offset", "consumer_group", "content_type")
_LARGE = ("key", "value", "headers", "traceback")


class DeadLettersView(KjoView):
    """All dead letters."""

    permissions: ClassVar = {"GET": ("view_deadletter",)}

    @documented("dead_letters_list", TAG, {200: shapes.DeadLetterPage}, query=shapes.LetterQuery)
    def get(self, request: Request) -> Response:
        """List dead letters, newest first, without what they held. The open ones, unless `state`
        says otherwise."""
        query = self.query(shapes.LetterQuery)
        self.refuse_texts(query)
        found = page(*_selected(query), cursor=query.get("cursor"), limit=query["limit"])
        answer = {
            "results": [summary(self, row) for row in found.rows],
            "next_cursor": found.next_cursor,
        }
        return Response(shapes.DeadLetterPage(answer).data)


class GroupsView(KjoView):
    """The open dead letters by kind of error."""

    permissions: ClassVar = {"GET": ("view_deadletter",)}

    @documented("dead_letters_groups", TAG, {200: shapes.ErrorGroups}, query=shapes.GroupQuery)
    def get(self, request: Request) -> Response:
        """Group open dead letters by fingerprint: the same error in the same place."""
        query = self.query(shapes.GroupQuery)
        self.refuse_texts(query)
        groups = error_groups(shapes.selected(query), limit=query["limit"])
        if not self.sees_payloads:
            groups = [replace(group, error="") for group in groups]
        return Response(shapes.ErrorGroups({"results": groups}).data)


class DeadLetterView(KjoView):
    """One dead letter."""

    permissions: ClassVar = {"GET": ("view_deadletter",)}

    @documented("dead_letters_read", TAG, {200: shapes.DeadLetterDetail}, path=[ID], problems=[404])
    def get(self, request: Request, id: str) -> Response:
        """Tell why a message died and what became of it, and to those who may see it what it
        held."""
        rows = DeadLetter.objects.using(jobs_database())
        letter = rows.defer(*(() if self.sees_payloads else _LARGE)).filter(pk=id_of(id)).first()
        if letter is None:
            raise Http404
        answer = summary(self, letter) | {name: getattr(letter, name) for name in _DETAILS}
        if self.sees_payloads:
            answer |= {
                **({} if letter.key is None else {"key": shown_text(letter.key)}),
                "payload": shown_value(letter),
                "headers": shown_headers(letter.headers),
                "traceback": letter.traceback,
            }
        return Response(shapes.DeadLetterDetail(answer).data)


class ReplayView(KjoView):
    """Replaying one dead letter."""

    permissions: ClassVar = {"POST": ("view_deadletter", "replay_dlq")}

    @documented(
        "dead_letters_replay",
        TAG,
        {200: shapes.LetterOutcome},
        body=shapes.ReplayBody,
        path=[ID],
        problems=[404, 409, 503],
    )
    def post(self, request: Request, id: str) -> Response:
        """Run again what died: its job is requeued, or its message published as it was."""
        force = self.body(shapes.ReplayBody)["force"]
        letter = find(id)
        report = dead_letters.replay(
            DeadLetterFilter(ids=[letter.pk]),
            force=force,
            actor=self.actor,
            on_changed=self.audit("Replayed."),
        )
        return replayed(self, letter, report)


class EditView(KjoView):
    """Repairing one dead letter."""

    permissions: ClassVar = {"POST": ("view_deadletter", "replay_dlq", "edit_payload")}

    @documented(
        "dead_letters_edit_and_replay",
        TAG,
        {200: shapes.LetterOutcome},
        body=shapes.EditBody,
        path=[ID],
        problems=[404, 409, 503],
        examples=[
            OpenApiExample(
                "The field that was missing",
                value={"payload": {"order_id": 7, "customer_id": 3}},
                request_only=True,
            )
        ],
    )
    def post(self, request: Request, id: str) -> Response:
        """Replay a dead letter with another payload; it keeps the one it died with. Where it says
        `[redacted]`, what the dead letter has there is kept."""
        payload = self.body(shapes.EditBody)["payload"]
        letter = find(id)
        serializer = serializer_for(letter.content_type or JSON.content_type)
        try:
            report = dead_letters.edit_and_replay(
                letter.pk,
                serializer.dumps(payload),
                actor=self.actor,
                on_changed=self.audit("Replayed with another payload."),
            )
        except ValueError as error:
            raise ValidationError({"payload": str(error)}) from None
        return replayed(self, letter, report)


class DiscardView(KjoView):
    """Discarding one dead letter."""

    permissions: ClassVar = {"POST": ("view_deadletter", "discard_dlq")}

    @documented(
        "dead_letters_discard",
        TAG,
        {200: shapes.LetterOutcome},
        body=shapes.DiscardBody,
        path=[ID],
        problems=[404, 409],
    )
    def post(self, request: Request, id: str) -> Response:
        """Close a dead letter without running it again."""
        note = self.body(shapes.DiscardBody)["note"]
        letter = find(id)
        count = dead_letters.discard(
            DeadLetterFilter(ids=[letter.pk]),
            note=note,
            actor=self.actor,
            on_changed=self.audit(f"Discarded: {note}"),
        )
        if not count:
            raise Conflict(f"The dead letter is {find(id).state} already.")
        return told(self, "discarded", letter)


# --- Details --------------------------------------------------------------------------------------


def _rows() -> QuerySet[DeadLetter]:
    return DeadLetter.objects.using(jobs_database()).defer(*_LARGE)


def find(id: str) -> DeadLetter:
    """Return a dead letter without its large columns.

    :raises Http404: there is none.
    """
    letter = _rows().filter(pk=id_of(id)).first()
    if letter is None:
        raise Http404
    return letter


def summary(view: KjoView, letter: DeadLetter) -> dict[str, Any]:
    """Return what is told this user of a dead letter in a list."""
    if not view.sees_payloads:
        hide_texts([letter])
    return {name: getattr(letter, name) for name in _PLAIN} | {"job": letter.job_id}


def told(view: KjoView, outcome: str, letter: DeadLetter) -> Response:
    """Answer with an outcome and the letter after it."""
    answer = {"outcome": outcome, "dead_letter": summary(view, find(str(letter.pk)))}
    return Response(shapes.LetterOutcome(answer).data)


def replayed(view: KjoView, letter: DeadLetter, report: ReplayReport) -> Response:
    """Answer with what came of replaying one dead letter.

    :raises Conflict: it was refused, or is not open.
    :raises Unavailable: the transport did not take it.
    """
    if report.replayed:
        return told(view, "replayed", letter)
    detail = report.samples[0]["detail"] if report.samples else ""
    if report.failed:
        raise Unavailable(f"The message was not accepted, the dead letter stays open: {detail}")
    if report.refused:
        raise Conflict(f"Refused: {detail}")
    raise Conflict(f"The dead letter is {find(str(letter.pk)).state} already.")


def _selected(query: dict[str, Any]) -> tuple[QuerySet[DeadLetter], QuerySet[DeadLetter]]:
    """Return the rows an index serves, and those of them that are wanted."""
    restriction, state = shapes.selected(query), query["state"]
    if state == DeadLetterState.OPEN:
        rows = _rows().filter(state=state)
        wanted = dead_letters.select(restriction).defer(*_LARGE)
        if restriction.fingerprint is not None:
            rows = rows.filter(fingerprint=restriction.fingerprint)
        if restriction in (
            DeadLetterFilter(),
            DeadLetterFilter(fingerprint=query.get("fingerprint")),
        ):
            return rows, rows
        return rows, wanted
    wanted = dead_letters.restricted(_rows().filter(state=state), restriction)
    return _rows(), wanted
