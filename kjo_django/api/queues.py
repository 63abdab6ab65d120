"""Queues: list, and show one."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.http import Http404
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.response import Response

from kjo_django.api.endpoints import KjoView, endpoint
from kjo_django.api.fields import shape
from kjo_django.operations import queues
from kjo_django.operations.monitoring import status
from kjo_django.store.counting import seconds_since

TAG = "queues"
NAME = OpenApiParameter(
    "queue", OpenApiTypes.STR, OpenApiParameter.PATH, description="The queue's name."
)
Limits = shape(
    "Limits",
    "Limits of a queue.",
    concurrency=serializers.IntegerField(allow_null=True),
    max_attempts=serializers.IntegerField(allow_null=True),
    backoff_base=serializers.IntegerField(allow_null=True, help_text="Seconds."),
)
Queue = shape(
    "Queue",
    "A queue: where it goes, what an operator asked of it, and what waits in it.",
    queue=serializers.CharField(),
    topic=serializers.CharField(),
    transport=serializers.CharField(),
    consumer_group=serializers.CharField(),
    dead_letter_topic=serializers.CharField(allow_null=True),
    concurrency=serializers.IntegerField(help_text="Groups one worker runs at once."),
    max_attempts=serializers.IntegerField(),
    backoff_base_seconds=serializers.FloatField(),
    asked=Limits(help_text="What operators set; null: as configured."),
    is_paused=serializers.BooleanField(),
    changed_by=serializers.CharField(allow_blank=True),
    states=serializers.DictField(
        child=serializers.IntegerField(),
        help_text="Jobs by state, each up to 100,000.",
    ),
    oldest_waiting_seconds=serializers.FloatField(allow_null=True),
    open_dead_letters=serializers.IntegerField(),
    oldest_dead_letter_seconds=serializers.FloatField(allow_null=True),
)
Queues = shape(
    "Queues",
    "Every known queue.",
    results=Queue(many=True),
    is_capped=serializers.BooleanField(help_text="Whether a count is a lower bound."),
)
PartitionOffsets = shape(
    "PartitionOffsets",
    "Where the consumer group is in one partition of the queue's topic.",
    partition=serializers.IntegerField(),
    committed=serializers.IntegerField(
        allow_null=True, help_text="null: nothing yet, or the transport has no offsets."
    ),
    end=serializers.IntegerField(
        allow_null=True, help_text="Of the next message; null: the transport has no offsets."
    ),
    lag=serializers.IntegerField(),
)
QueueDetail = shape(
    "QueueDetail",
    "A queue with how far its consumers are behind.",
    Queue,
    lag=serializers.IntegerField(allow_null=True, help_text="Messages; null: not known."),
    lag_by_partition=serializers.DictField(child=serializers.IntegerField()),
    lag_error=serializers.CharField(allow_null=True, help_text="Why it is not known."),
    partitions=PartitionOffsets(many=True, help_text="Empty where the lag is not known."),
    lag_per_minute=serializers.FloatField(
        allow_null=True,
        help_text="What the lag grew by, of the last five minutes; null: not known.",
    ),
    lag_trend=serializers.CharField(
        allow_null=True, help_text="growing, steady or shrinking; null: not known."
    ),
    per_minute=serializers.FloatField(
        help_text="Messages settled, of the last five whole minutes."
    ),
)


@endpoint("queues_list", TAG, ["view_queuecontrol"], {200: Queues})
def list_queues(view: KjoView) -> Response:
    """List every queue that settings, handlers or operators name."""
    rows, is_capped = counted(queues.overview())
    return Response(Queues({"results": rows, "is_capped": is_capped}).data)


@endpoint(
    "queues_read", TAG, ["view_queuecontrol"], {200: QueueDetail}, path=[NAME], problems=[404]
)
def read_queue(view: KjoView, queue: str) -> Response:
    """Tell of one queue, and ask its transport how far its consumers are behind."""
    find(queue)
    (row,) = status.status([queue])["queues"]
    return Response(QueueDetail(row).data)


# --- Details --------------------------------------------------------------------------------------


def find(name: str) -> dict[str, Any]:
    """Return a known queue.

    :raises Http404: it is unknown; pausing it would make it known.
    """
    for row in queues.overview():
        if row["queue"] == name:
            return row
    raise Http404


def counted(rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], bool]:
    """Add the waiting jobs to each queue; also return whether a count is a lower bound."""
    now = timezone.now()
    counts, is_capped = status.count_by_state(now)
    letters, letters_capped = status.open_dead_letters()
    waiting = status.oldest_waiting(now)
    found = [
        row
        | {
            "states": {state: counts.get((row["queue"], state), 0) for state in status.COUNTED},
            "oldest_waiting_seconds": seconds_since(waiting.get(row["queue"]), now),
            **_letters(letters.get(row["queue"]), now),
        }
        for row in rows
    ]
    return found, is_capped or letters_capped


def _letters(found: status.OpenLetters | None, now: datetime) -> dict[str, Any]:
    return {
        "open_dead_letters": found.letters if found else 0,
        "oldest_dead_letter_seconds": seconds_since(found and found.oldest, now),
    }
