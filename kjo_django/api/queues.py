"""Queues: look at them, pause, resume and limit them."""

from __future__ import annotations

from datetime import datetime
from typing import Any, ClassVar

from django.db import transaction
from django.http import Http404
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api.base import KjoView
from kjo_django.api.fields import Body, Shape, Whole
from kjo_django.api.job_shapes import NoBody
from kjo_django.api.openapi import documented
from kjo_django.models import QueueControl
from kjo_django.operations import queues
from kjo_django.operations.monitoring import status
from kjo_django.store.counting import seconds_since
from kjo_django.store.transactions import jobs_database

TAG = "queues"
NAME = OpenApiParameter(
    "queue", OpenApiTypes.STR, OpenApiParameter.PATH, description="The queue's name."
)


def limit(name: str, meaning: str) -> Whole:
    """Return the field of a limit, with the range operations take."""
    _unit, most = queues.LIMITS[name]
    return Whole(required=False, allow_null=True, min_value=1, max_value=most, help_text=meaning)


class Limits(Shape):
    """Limits of a queue."""

    concurrency = serializers.IntegerField(allow_null=True)
    max_attempts = serializers.IntegerField(allow_null=True)
    backoff_base = serializers.IntegerField(allow_null=True, help_text="Seconds.")


class LimitsBody(Body):
    """Limits to change; one that is not given stays, null goes back to what is configured."""

    concurrency = limit("concurrency", "Groups of the queue one worker runs at once.")
    max_attempts = limit("max_attempts", "Executions before a job is dead-lettered.")
    backoff_base = limit("backoff_base", "Seconds before the second attempt; doubles each time.")


class Queue(Shape):
    """A queue: where it goes, what an operator asked of it, and what waits in it."""

    queue = serializers.CharField()
    topic = serializers.CharField()
    transport = serializers.CharField()
    consumer_group = serializers.CharField()
    dead_letter_topic = serializers.CharField(allow_null=True)
    concurrency = serializers.IntegerField(help_text="Groups one worker runs at once.")
    max_attempts = serializers.IntegerField()
    backoff_base_seconds = serializers.FloatField()
    asked = Limits(help_text="What operators set; null: as configured.")
    is_paused = serializers.BooleanField()
    changed_by = serializers.CharField(allow_blank=True)
    states = serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Jobs by state, each up to 100,000.",
    )
    oldest_waiting_seconds = serializers.FloatField(allow_null=True)
    open_dead_letters = serializers.IntegerField()
    oldest_dead_letter_seconds = serializers.FloatField(allow_null=True)


class Queues(Shape):
    """Every known queue."""

    results = Queue(many=True)
    is_capped = serializers.BooleanField(help_text="Whether a count is a lower bound.")


class PartitionOffsets(Shape):
    """Where the consumer group is in one partition of the queue's topic."""

    partition = serializers.IntegerField()
    committed = serializers.IntegerField(
        allow_null=True, help_text="null: nothing yet, or the transport has no offsets."
    )
    end = serializers.IntegerField(
        allow_null=True, help_text="Of the next message; null: the transport has no offsets."
    )
    lag = serializers.IntegerField()


class QueueDetail(Queue):
    """A queue with how far its consumers are behind."""

    lag = serializers.IntegerField(allow_null=True, help_text="Messages; null: not known.")
    lag_by_partition = serializers.DictField(child=serializers.IntegerField())
    lag_error = serializers.CharField(allow_null=True, help_text="Why it is not known.")
    partitions = PartitionOffsets(many=True, help_text="Empty where the lag is not known.")
    lag_per_minute = serializers.FloatField(
        allow_null=True,
        help_text="What the lag grew by, of the last five minutes; null: not known.",
    )
    lag_trend = serializers.CharField(
        allow_null=True, help_text="growing, steady or shrinking; null: not known."
    )
    per_minute = serializers.FloatField(
        help_text="Messages settled, of the last five whole minutes."
    )


class QueueOutcome(Shape):
    """Whether the request changed anything, and the queue after it."""

    is_changed = serializers.BooleanField()
    queue = Queue()


class QueuesView(KjoView):
    """All queues."""

    permissions: ClassVar = {"GET": ("view_queuecontrol",)}

    @documented("queues_list", TAG, {200: Queues})
    def get(self, request: Request) -> Response:
        """List every queue that settings, handlers or operators name."""
        rows, is_capped = counted(queues.overview())
        return Response(Queues({"results": rows, "is_capped": is_capped}).data)


class QueueView(KjoView):
    """One queue."""

    permissions: ClassVar = {
        "GET": ("view_queuecontrol",),
        "PATCH": ("view_queuecontrol", "change_queuecontrol"),
    }

    @documented("queues_read", TAG, {200: QueueDetail}, path=[NAME], problems=[404])
    def get(self, request: Request, queue: str) -> Response:
        """Tell of one queue, and ask its transport how far its consumers are behind."""
        find(queue)
        (row,) = status.status([queue])["queues"]
        return Response(QueueDetail(row).data)

    @documented(
        "queues_limit", TAG, {200: QueueOutcome}, body=LimitsBody, path=[NAME], problems=[404]
    )
    def patch(self, request: Request, queue: str) -> Response:
        """Change limits of a queue, for its present jobs too; workers obey within two seconds."""
        limits = self.body(LimitsBody)
        find(queue)
        said = ", ".join(f"{name}: {value}" for name, value in limits.items())
        audit = self.audit(f"Limits: {said}.")
        return told(queue, queues.set_policy(queue, **limits, actor=self.actor, on_changed=audit))


class PauseView(KjoView):
    """Pausing one queue."""

    permissions: ClassVar = {"POST": ("view_queuecontrol", "pause_queue")}

    @documented("queues_pause", TAG, {200: QueueOutcome}, body=NoBody, path=[NAME], problems=[404])
    def post(self, request: Request, queue: str) -> Response:
        """Stop handing out jobs of a queue; what runs now ends normally."""
        self.body(NoBody)
        return change(self, queue, is_paused=True)


class ResumeView(KjoView):
    """Resuming one queue."""

    permissions: ClassVar = {"POST": ("view_queuecontrol", "pause_queue")}

    @documented("queues_resume", TAG, {200: QueueOutcome}, body=NoBody, path=[NAME], problems=[404])
    def post(self, request: Request, queue: str) -> Response:
        """Hand out jobs of a queue again."""
        self.body(NoBody)
        return change(self, queue, is_paused=False)


# --- Details --------------------------------------------------------------------------------------


def find(name: str) -> dict[str, Any]:
    """Return a known queue.

    :raises Http404: nothing names it; pausing it would make it known.
    """
    for row in queues.overview():
        if row["queue"] == name:
            return row
    raise Http404


def counted(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Add to each queue what waits in it; also return whether a count is a lower bound."""
    now = timezone.now()
    counts, is_capped = status.count_by_state(now)
    letters, letters_capped = status.open_dead_letters()
    waiting = status.oldest_waiting(now)
    told = [
        row
        | {
            "states": {state: counts.get((row["queue"], state), 0) for state in status.COUNTED},
            "oldest_waiting_seconds": seconds_since(waiting.get(row["queue"]), now),
            **_letters(letters.get(row["queue"]), now),
        }
        for row in rows
    ]
    return told, is_capped or letters_capped


def _letters(found: status.OpenLetters | None, now: datetime) -> dict[str, Any]:
    return {
        "open_dead_letters": found.letters if found else 0,
        "oldest_dead_letter_seconds": seconds_since(found and found.oldest, now),
    }


def change(view: KjoView, name: str, *, is_paused: bool) -> Response:
    """Pause or resume a queue, with who did it."""
    find(name)
    using = jobs_database()
    with transaction.atomic(using=using):
        act = queues.pause if is_paused else queues.resume
        is_changed = act(name, actor=view.actor)
        if is_changed:
            row = QueueControl.objects.using(using).get(queue=name)
            view.audit("Paused." if is_paused else "Resumed.")([row])
    return told(name, is_changed)


def told(name: str, is_changed: bool) -> Response:
    """Answer with whether anything changed and the queue after it."""
    rows, _ = counted([find(name)])
    return Response(QueueOutcome({"is_changed": is_changed, "queue": rows[0]}).data)
