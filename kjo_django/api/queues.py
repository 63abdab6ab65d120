"""Queues: list, and show one."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.response import Response

from kjo_django.api.endpoints import KjoView, endpoint
from kjo_django.api.fields import shape
from kjo_django.operations.monitoring import metrics, status

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
    topics=serializers.ListField(
        child=serializers.CharField(),
        help_text="Of each level of priority, the most urgent one first.",
    ),
    transport=serializers.CharField(),
    consumer_group=serializers.CharField(),
    dead_letter_topic=serializers.CharField(allow_null=True),
    concurrency=serializers.IntegerField(
        allow_null=True,
        help_text="Groups one worker runs at once; null: as many as it has lanes.",
    ),
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
    "Where the consumer group is in one partition of one of the queue's topics.",
    topic=serializers.CharField(),
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
    rows, is_capped = status.queue_rows(with_lags=False)
    return Response(Queues({"results": rows, "is_capped": is_capped}).data)


@endpoint(
    "queues_read", TAG, ["view_queuecontrol"], {200: QueueDetail}, path=[NAME], problems=[404]
)
def read_queue(view: KjoView, queue: str) -> Response:
    """Tell of one queue, and ask its transport how far its consumers are behind."""
    row = find(queue, with_lags=True)
    metrics.add_rates([row])
    return Response(QueueDetail(row).data)


def find(name: str, *, with_lags: bool = False) -> dict[str, Any]:
    """Return a known queue with its counts.

    :param with_lags: ask its transport how far its consumers are behind.
    :raises Http404: it is unknown; pausing it would make it known.
    """
    rows, _ = status.queue_rows([name], with_lags=with_lags)
    if not rows:
        raise Http404
    return rows[0]
