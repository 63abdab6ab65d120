"""Dead letters: list, group, and show one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from django.db.models import QuerySet
from django.http import Http404
from rest_framework import serializers
from rest_framework.response import Response

from kjo_django.api.endpoints import ID, KjoView, endpoint, id_of, page_of
from kjo_django.api.fields import (
    Flag,
    Identifier,
    JSONValue,
    Moment,
    NamedChoice,
    RequestShape,
    Text,
    columns,
    shape,
)
from kjo_django.api.paging import MAX_LIMIT, PageQuery, page
from kjo_django.api.showing import shown_headers, shown_text, shown_value
from kjo_django.models import DeadLetter, DeadLetterReason, DeadLetterState
from kjo_django.operations import dead_letters
from kjo_django.operations.bulk import PATIENT_SECONDS
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.fingerprints import error_groups
from kjo_django.operations.redaction import hide_texts
from kjo_django.runtime import jobs_database

TAG = "dead letters"
FILTERS = ("queue", "handler", "reason", "error", "fingerprint", "since", "until")
MAX_IDS = 500


# --- Requests -------------------------------------------------------------------------------------


LetterFilter = shape(
    "LetterFilter",
    "Which dead letters.",
    RequestShape,
    queue=serializers.CharField(max_length=100, required=False),
    handler=serializers.CharField(max_length=100, required=False),
    reason=NamedChoice("DeadLetterReason", DeadLetterReason.values, required=False),
    error=serializers.CharField(
        max_length=200, required=False, help_text="Part of the error's text or type, in any case."
    ),
    fingerprint=serializers.CharField(max_length=32, required=False),
    since=Moment(required=False, help_text="Failed at this moment or later."),
    until=Moment(required=False, help_text="Failed before this moment."),
)


LetterQuery = shape(
    "LetterQuery",
    "Which dead letters, and which page of them. The open ones and those of a fingerprint among "
    "them are served by an index; other filters look through 50,000 rows for each page.",
    LetterFilter,
    PageQuery,
    state=NamedChoice(
        "DeadLetterState", DeadLetterState.values, required=False, default=DeadLetterState.OPEN
    ),
)
GroupQuery = shape(
    "GroupQuery",
    "Which dead letters to group, and how many groups.",
    LetterFilter,
    limit=serializers.IntegerField(
        required=False, default=50, min_value=1, max_value=MAX_LIMIT, help_text="Most groups."
    ),
)


class Selection(RequestShape):
    """Open dead letters: by ids, by filters, or all."""

    ids = serializers.ListField(
        child=Identifier(), required=False, min_length=1, max_length=MAX_IDS
    )
    queue = Text(max_length=100, required=False)
    handler = Text(max_length=100, required=False)
    reason = NamedChoice("DeadLetterReason", DeadLetterReason.values, required=False)
    error = Text(max_length=200, required=False)
    fingerprint = Text(max_length=32, required=False)
    since = Moment(required=False)
    until = Moment(required=False)
    all = Flag(default=False, help_text="Needed to take all open ones: where nothing restricts.")
    dry_run = Flag(default=False, help_text="Change nothing; tell what would be done.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse an empty selection unless the body has `all`, and a request that would take too
        long.
        """
        if selected(attrs).is_empty != attrs["all"]:
            raise serializers.ValidationError("Restrict the selection, or say `all`; not both.")
        limit, rate = attrs.get("limit"), attrs.get("rate")
        if limit and rate and limit / rate > PATIENT_SECONDS:
            text = (
                f"So many at this rate take longer than {PATIENT_SECONDS} s; leave one of them out."
            )
            raise serializers.ValidationError({"limit": text})
        return attrs


def selected(values: dict[str, Any]) -> DeadLetterFilter:
    """Return the filter that validated values describe."""
    given = {name: values[name] for name in ("ids", *FILTERS) if values.get(name) is not None}
    return DeadLetterFilter(**given)


# --- Answers --------------------------------------------------------------------------------------

COLUMNS = (
    *("id", "message_id", "queue", "handler", "error_type", "error", "fingerprint", "release"),
    *("attempts", "replay_count", "failed_at", "closed_at", "note"),
)
DETAILS = ("topic", "partition", "offset", "consumer_group", "content_type")
LARGE = ("key", "value", "headers", "traceback")
WITH_PAYLOADS = "Redacted; with the permission `view_payload`."

Letter = shape(
    "DeadLetter",
    "A dead letter.",
    **columns(DeadLetter, COLUMNS),
    state=NamedChoice("DeadLetterState", DeadLetterState.values),
    reason=NamedChoice("DeadLetterReason", DeadLetterReason.values),
    job=serializers.UUIDField(allow_null=True, help_text="Of the job it was, if it was one."),
)
LetterPage = page_of(Letter)
LetterDetail = shape(
    "DeadLetterDetail",
    "A dead letter with where it was, and to those who may see it what it contained.",
    Letter,
    **columns(DeadLetter, DETAILS),
    key=serializers.CharField(
        required=False,
        allow_blank=True,
        help_text="If it has one; with the permission `view_payload`.",
    ),
    payload=JSONValue(required=False, help_text=WITH_PAYLOADS),
    headers=serializers.DictField(
        child=serializers.CharField(allow_blank=True), required=False, help_text=WITH_PAYLOADS
    ),
    traceback=serializers.CharField(
        required=False, allow_blank=True, help_text="With the permission `view_payload`."
    ),
)
ErrorGroup = shape(
    "ErrorGroup",
    "Open dead letters of one error, in one wording, in one place of one handler.",
    **columns(DeadLetter, ("fingerprint", "handler", "queue", "error_type")),
    count=serializers.IntegerField(),
    first_failed_at=serializers.DateTimeField(),
    last_failed_at=serializers.DateTimeField(),
    reason=serializers.CharField(),
    error=serializers.CharField(allow_blank=True, help_text="Of the newest of them."),
    newest_id=serializers.UUIDField(),
)
ErrorGroups = shape(
    "ErrorGroups", "The largest groups among the newest 100,000.", results=ErrorGroup(many=True)
)


# --- Endpoints ------------------------------------------------------------------------------------


@endpoint("dead_letters_list", TAG, ["view_deadletter"], {200: LetterPage}, query=LetterQuery)
def list_letters(view: KjoView) -> Response:
    """List dead letters, newest first, without what they contained. The open ones, unless
    `state` says otherwise."""
    query = view.query(LetterQuery)
    view.refuse_texts(query)
    rows, cursor = page(*_selected(query), cursor=query.get("cursor"), limit=query["limit"])
    answer = {"results": [summary(view, row) for row in rows], "next_cursor": cursor}
    return Response(LetterPage(answer).data)


@endpoint("dead_letters_groups", TAG, ["view_deadletter"], {200: ErrorGroups}, query=GroupQuery)
def list_groups(view: KjoView) -> Response:
    """Group open dead letters by fingerprint: the same error, in the same wording, in the same
    place."""
    query = view.query(GroupQuery)
    view.refuse_texts(query)
    groups = error_groups(selected(query), limit=query["limit"])
    if not view.sees_payloads:
        groups = [replace(group, error="") for group in groups]
    return Response(ErrorGroups({"results": groups}).data)


@endpoint(
    "dead_letters_read",
    TAG,
    ["view_deadletter"],
    {200: LetterDetail},
    path=[ID],
    problems=[404],
)
def read_letter(view: KjoView, id: str) -> Response:
    """Tell why a message died and what became of it, and to those who may see it what
    it contained."""
    rows = DeadLetter.objects.using(jobs_database())
    letter = rows.defer(*(() if view.sees_payloads else LARGE)).filter(pk=id_of(id)).first()
    if letter is None:
        raise Http404
    answer = summary(view, letter) | {name: getattr(letter, name) for name in DETAILS}
    if view.sees_payloads:
        answer |= {
            **({} if letter.key is None else {"key": shown_text(letter.key)}),
            "payload": shown_value(letter),
            "headers": shown_headers(letter.headers),
            "traceback": letter.traceback,
        }
    return Response(LetterDetail(answer).data)


# --- Details --------------------------------------------------------------------------------------


def _rows() -> QuerySet[DeadLetter]:
    return DeadLetter.objects.using(jobs_database()).defer(*LARGE)


def find(id: str) -> DeadLetter:
    """Return a dead letter without its large columns.

    :raises Http404: there is none.
    """
    letter = _rows().filter(pk=id_of(id)).first()
    if letter is None:
        raise Http404
    return letter


def summary(view: KjoView, letter: DeadLetter) -> dict[str, Any]:
    """Return a dead letter's members in a list, for this user."""
    if not view.sees_payloads:
        hide_texts([letter])
    return {name: getattr(letter, name) for name in (*COLUMNS, "state", "reason")} | {
        "job": letter.job_id
    }


def _selected(query: dict[str, Any]) -> tuple[QuerySet[DeadLetter], QuerySet[DeadLetter]]:
    """Return the rows that an index finds, and those of them that match."""
    restriction, state = selected(query), query["state"]
    if state == DeadLetterState.OPEN:
        rows = _rows().filter(state=state)
        wanted = dead_letters.select(restriction).defer(*LARGE)
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
