"""What requests about dead letters hold, and what is told of them."""

from __future__ import annotations

from typing import Any

from rest_framework import serializers

from kjo_django.api.fields import (
    Body,
    Flag,
    Identifier,
    JSONValue,
    Moment,
    Number,
    Query,
    Shape,
    Text,
    Whole,
    Word,
)
from kjo_django.api.openapi import page_of
from kjo_django.api.paging import MAX_LIMIT, PageQuery
from kjo_django.models import DeadLetterReason, DeadLetterState
from kjo_django.operations.actions import SYNCHRONOUS_LIMIT
from kjo_django.operations.bulk import PATIENT_SECONDS
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.rows import RATE_MAX, RATE_MIN

FILTERS = ("queue", "handler", "reason", "error", "fingerprint", "since", "until")
MAX_IDS = 500


class LetterFilter(Query):
    """Which dead letters."""

    queue = serializers.CharField(max_length=100, required=False)
    handler = serializers.CharField(max_length=100, required=False)
    reason = Word("DeadLetterReason", DeadLetterReason.values, required=False)
    error = serializers.CharField(
        max_length=200, required=False, help_text="Part of the error's text or type, in any case."
    )
    fingerprint = serializers.CharField(max_length=32, required=False)
    since = Moment(required=False, help_text="Failed at this moment or later.")
    until = Moment(required=False, help_text="Failed before this moment.")


class LetterQuery(LetterFilter, PageQuery):
    """Which dead letters, and which page of them. The open ones and those of a fingerprint among
    them are served by an index; other filters look through 50,000 rows for each page."""

    state = Word(
        "DeadLetterState", DeadLetterState.values, required=False, default=DeadLetterState.OPEN
    )


class GroupQuery(LetterFilter):
    """Which dead letters to group, and how many groups."""

    limit = serializers.IntegerField(
        required=False, default=50, min_value=1, max_value=MAX_LIMIT, help_text="Most groups."
    )


class ReplayBody(Body):
    """How to replay."""

    force = Flag(
        default=False,
        help_text="Also what was replayed too often, has taken effect, or whose job has moved on.",
    )


class DiscardBody(Body):
    """Why."""

    note = Text(max_length=300, trim_whitespace=True, help_text="For whoever finds it later.")


class EditBody(Body):
    """The repaired payload."""

    payload = JSONValue(help_text="What the handler is given instead.")


class Selection(Body):
    """Open dead letters: by ids, by filters, or all."""

    ids = serializers.ListField(
        child=Identifier(), required=False, min_length=1, max_length=MAX_IDS
    )
    queue = Text(max_length=100, required=False)
    handler = Text(max_length=100, required=False)
    reason = Word("DeadLetterReason", DeadLetterReason.values, required=False)
    error = Text(max_length=200, required=False)
    fingerprint = Text(max_length=32, required=False)
    since = Moment(required=False)
    until = Moment(required=False)
    all = Flag(default=False, help_text="Needed to take all open ones: where nothing restricts.")
    dry_run = Flag(default=False, help_text="Change nothing; tell what would be done.")

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse an empty selection, which is all of them, unless that was said."""
        if selected(attrs).is_empty != attrs["all"]:
            raise serializers.ValidationError("Restrict the selection, or say `all`; not both.")
        return attrs


class BulkReplayBody(Selection):
    """Which dead letters to replay, and how."""

    force = Flag(default=False)
    rate = Number(
        required=False,
        allow_null=True,
        min_value=RATE_MIN,
        max_value=RATE_MAX,
        help_text="A second.",
    )
    limit = Whole(
        required=False,
        allow_null=True,
        min_value=1,
        max_value=SYNCHRONOUS_LIMIT,
        help_text="The oldest so many only, within this request.",
    )

    def validate(self, attrs: dict[str, Any]) -> dict[str, Any]:
        """Refuse what would take longer than a request should."""
        limit, rate = attrs.get("limit"), attrs.get("rate")
        if limit and rate and limit / rate > PATIENT_SECONDS:
            said = (
                f"So many at this rate take longer than {PATIENT_SECONDS} s; leave one of them out."
            )
            raise serializers.ValidationError({"limit": said})
        return super().validate(attrs)


class BulkDiscardBody(Selection):
    """Which dead letters to discard, and why."""

    note = Text(max_length=300, trim_whitespace=True)


def selected(values: dict[str, Any]) -> DeadLetterFilter:
    """Return the filter that validated values describe."""
    given = {name: values[name] for name in ("ids", *FILTERS) if values.get(name) is not None}
    return DeadLetterFilter(**given)


# --- Answers --------------------------------------------------------------------------------------


class DeadLetter(Shape):
    """A dead letter."""

    id = serializers.UUIDField()
    state = Word("DeadLetterState", DeadLetterState.values)
    reason = Word("DeadLetterReason", DeadLetterReason.values)
    job = serializers.UUIDField(allow_null=True, help_text="Of the job it was, if it was one.")
    message_id = serializers.CharField(allow_blank=True)
    queue = serializers.CharField(allow_blank=True)
    handler = serializers.CharField(allow_blank=True)
    error_type = serializers.CharField(allow_blank=True)
    error = serializers.CharField(allow_blank=True)
    fingerprint = serializers.CharField(allow_blank=True)
    release = serializers.CharField(allow_blank=True)
    attempts = serializers.IntegerField()
    replay_count = serializers.IntegerField()
    failed_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)
    note = serializers.CharField(allow_blank=True)


DeadLetterPage = page_of(DeadLetter)


class DeadLetterDetail(DeadLetter):
    """A dead letter with where it was, and to those who may see it what it held."""

    topic = serializers.CharField(allow_blank=True)
    partition = serializers.IntegerField(allow_null=True)
    offset = serializers.IntegerField(allow_null=True)
    consumer_group = serializers.CharField(allow_blank=True)
    content_type = serializers.CharField(allow_blank=True)
    key = serializers.CharField(
        required=False,
        allow_blank=True,
        help_text="If it has one; with the permission `view_payload`.",
    )
    payload = JSONValue(required=False, help_text="Redacted; with the permission `view_payload`.")
    headers = serializers.DictField(
        child=serializers.CharField(allow_blank=True),
        required=False,
        help_text="Redacted; with the permission `view_payload`.",
    )
    traceback = serializers.CharField(
        required=False, allow_blank=True, help_text="With the permission `view_payload`."
    )


class ErrorGroup(Shape):
    """Open dead letters of one error in one place of one handler."""

    fingerprint = serializers.CharField(allow_blank=True)
    count = serializers.IntegerField()
    first_failed_at = serializers.DateTimeField()
    last_failed_at = serializers.DateTimeField()
    handler = serializers.CharField(allow_blank=True)
    queue = serializers.CharField(allow_blank=True)
    reason = serializers.CharField()
    error_type = serializers.CharField(allow_blank=True)
    error = serializers.CharField(allow_blank=True, help_text="Of the newest of them.")
    newest_id = serializers.UUIDField()


class ErrorGroups(Shape):
    """The largest groups among the newest 100,000."""

    results = ErrorGroup(many=True)


class LetterOutcome(Shape):
    """What became of a request about a dead letter, and the letter after it."""

    outcome = serializers.CharField()
    dead_letter = DeadLetter()


class Sample(Shape):
    """One that was refused or failed, and why."""

    id = serializers.CharField()
    outcome = serializers.CharField()
    detail = serializers.CharField()


class Count(Shape):
    """How many of a kind."""

    reason = serializers.CharField()
    handler = serializers.CharField(allow_blank=True)
    error_type = serializers.CharField(allow_blank=True)
    count = serializers.IntegerField()


class ReplayReport(Shape):
    """What a replay did, or would do."""

    dry_run = serializers.BooleanField()
    is_capped = serializers.BooleanField(
        help_text="Of a dry run: whether there are more than it looked at: `limit`, or 1,000."
    )
    matched = serializers.IntegerField()
    replayed = serializers.IntegerField()
    refused = serializers.DictField(child=serializers.IntegerField(), help_text="By reason.")
    failed = serializers.IntegerField(help_text="Not accepted by the transport; still open.")
    skipped = serializers.IntegerField(help_text="Changed by somebody else meanwhile.")
    already_processed = serializers.IntegerField()
    histogram = Count(many=True)
    samples = Sample(many=True, help_text="The first 20 refused or failed.")
    stopped = serializers.CharField(allow_null=True, help_text="Why it ended early, if it did.")
    ok = serializers.BooleanField()


class DiscardReport(Shape):
    """What discarding did, or would do."""

    dry_run = serializers.BooleanField()
    discarded = serializers.IntegerField(help_text="A dry run counts up to 100,000.")


class Background(Shape):
    """The background job that does what is too much for one request."""

    job = serializers.UUIDField()
    url = serializers.CharField(help_text="Its address: state, progress and report.")
