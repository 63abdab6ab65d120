"""What requests about jobs hold, and what is told of jobs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rest_framework import serializers

from kjo_django.api.fields import (
    Body,
    Flag,
    JSONObject,
    JSONValue,
    Moment,
    Query,
    QueryNumber,
    Seconds,
    Shape,
    Text,
    Whole,
    Word,
)
from kjo_django.api.openapi import page_of
from kjo_django.api.paging import page_limit
from kjo_django.models import DeadLetterState
from kjo_django.states import JobState, JobStatus

LARGEST = 2**31 - 1
"""Of a number that is stored in a column of four bytes."""

# --- Requests -------------------------------------------------------------------------------------


class EnqueueBody(Body):
    """A job to enqueue: the handler's name, its arguments, and what `using()` takes."""

    handler = Text(max_length=100, help_text="As registered, such as `shop.send_confirmation`.")
    payload = JSONObject(default=dict, help_text="The handler's arguments by name.")
    unique_id = Text(
        max_length=255,
        required=False,
        allow_null=True,
        help_text="One job per queue and id: a second request is answered with the first's job.",
    )
    key = Text(
        max_length=255,
        required=False,
        allow_null=True,
        allow_blank=True,
        help_text="Jobs of one key run one at a time and in order.",
    )
    queue = Text(max_length=100, required=False, allow_null=True)
    delay = Seconds(required=False, allow_null=True, help_text="Seconds; not with `run_at`.")
    run_at = Moment(required=False, allow_null=True)
    expires_at = Moment(
        required=False, allow_null=True, help_text="Not started by then, never started."
    )
    max_attempts = Whole(required=False, allow_null=True, min_value=1, max_value=LARGEST)
    result_ttl = Seconds(
        required=False,
        allow_null=True,
        min_value=0.001,
        help_text="Seconds its result or error is kept.",
    )


class CancelBody(Body):
    """How to cancel."""

    abort = Flag(
        default=False, help_text="Ask it to end if it is running; without, that is refused."
    )


class ChangeQueueBody(Body):
    """Where to."""

    queue = Text(max_length=100, help_text="Its workers must have the job's handler.")


class NoBody(Body):
    """Nothing: an empty body, or an object without members."""


MAX_SEARCH = 4000
SEARCHED = ("state", "queue", "handler", "key", "unique_id")


class JobQuery(Query):
    """Which jobs. A text that ends in `*` is a beginning. Ids, a time of creation and every state
    but completed are served by an index; for the rest the newest 100,000 of these are looked at,
    and `is_windowed` says so."""

    q = serializers.CharField(
        max_length=MAX_SEARCH,
        required=False,
        help_text="A search, such as `state:failed handler:shop.* args.order_id:7 since:2h`.",
    )
    state = Word("JobStatus", JobStatus.values, required=False)
    queue = serializers.CharField(max_length=100, required=False)
    handler = serializers.CharField(max_length=100, required=False)
    key = serializers.CharField(max_length=255, required=False)
    unique_id = serializers.CharField(max_length=255, required=False, trim_whitespace=False)
    cursor = serializers.CharField(
        max_length=100, required=False, help_text="`next_cursor` of the page before this one."
    )
    limit = page_limit()


class WaitQuery(Query):
    """How long to wait."""

    timeout = QueryNumber(
        required=False, default=20.0, min_value=0, max_value=30, help_text="Seconds."
    )


# --- Answers --------------------------------------------------------------------------------------


class Enqueued(Shape):
    """What became of a request to enqueue."""

    id = serializers.UUIDField()
    is_new = serializers.BooleanField(
        help_text="false: the id was taken; this is the job that has it."
    )
    queue = serializers.CharField()
    handler = serializers.CharField()
    unique_id = serializers.CharField(allow_null=True)
    state = Word("JobState", JobState.values)


class Job(Shape):
    """A job."""

    id = serializers.UUIDField()
    queue = serializers.CharField()
    handler = serializers.CharField()
    unique_id = serializers.CharField(allow_null=True)
    key = serializers.CharField(allow_blank=True)
    state = Word("JobState", JobState.values, help_text="As stored.")
    status = Word(
        "JobStatus", JobStatus.values, help_text="The state with `scheduled` and `processing`."
    )
    attempts = serializers.IntegerField()
    max_attempts = serializers.IntegerField()
    created_at = serializers.DateTimeField()
    available_at = serializers.DateTimeField()
    expires_at = serializers.DateTimeField(allow_null=True)
    started_at = serializers.DateTimeField(allow_null=True)
    finished_at = serializers.DateTimeField(allow_null=True)
    error = serializers.CharField(allow_null=True)


class JobPage(page_of(Job)):  # type: ignore[misc]
    """A page of jobs."""

    is_windowed = serializers.BooleanField(
        help_text="Whether older jobs were not looked at, which may fit as well."
    )


class Progress(Shape):
    """How far a running job says it is."""

    percent = serializers.FloatField(allow_null=True)
    text = serializers.CharField(allow_blank=True)


class Attempt(Shape):
    """A failed attempt."""

    generation = serializers.IntegerField()
    attempt = serializers.IntegerField()
    worker = serializers.CharField(allow_blank=True)
    error_type = serializers.CharField(allow_blank=True)
    error = serializers.CharField(allow_blank=True)
    started_at = serializers.DateTimeField(allow_null=True)
    failed_at = serializers.DateTimeField()
    retry_at = serializers.DateTimeField(allow_null=True)
    traceback = serializers.CharField(
        allow_blank=True, required=False, help_text="With the permission `view_payload`."
    )


class JobLetter(Shape):
    """A dead letter of a job."""

    id = serializers.UUIDField()
    state = Word("DeadLetterState", DeadLetterState.values)
    reason = serializers.CharField()
    failed_at = serializers.DateTimeField()
    closed_at = serializers.DateTimeField(allow_null=True)
    note = serializers.CharField(allow_blank=True)


class JobDetail(Job):
    """A job with its history."""

    generation = serializers.IntegerField(help_text="Grows with every requeue.")
    queued_at = serializers.DateTimeField(allow_null=True)
    result_expires_at = serializers.DateTimeField(allow_null=True)
    content_type = serializers.CharField()
    topic = serializers.CharField(allow_blank=True)
    partition = serializers.IntegerField(allow_null=True)
    offset = serializers.IntegerField(allow_null=True)
    progress = Progress(allow_null=True)
    failures = Attempt(many=True, help_text="The newest 100 failed attempts, oldest first.")
    dead_letters = JobLetter(
        many=True,
        required=False,
        help_text="The newest 100; with the permission `view_deadletter`.",
    )
    payload = JSONValue(required=False, help_text="Redacted; with the permission `view_payload`.")
    result = JSONValue(
        required=False, help_text="Of a completed job; with the permission `view_payload`."
    )
    headers = serializers.DictField(
        child=serializers.CharField(),
        required=False,
        help_text="Sent along; with the permission `view_payload`.",
    )


class JobOutcome(Shape):
    """What became of a request about a job, and the job after it."""

    outcome = serializers.CharField()
    job = Job()


def dicts(rows: Sequence[Any], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return the named attributes of each row."""
    return [{name: getattr(row, name) for name in names} for row in rows]
