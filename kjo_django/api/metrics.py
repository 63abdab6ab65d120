"""Figures over time, from the aggregates workers write."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, ClassVar

from rest_framework import serializers
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api.base import KjoView
from kjo_django.api.fields import Query, Shape
from kjo_django.api.openapi import documented
from kjo_django.operations.monitoring import metrics
from kjo_django.operations.monitoring.metrics import Summary

TAG = "metrics"
HOUR, DAY = 3600, 86_400


def seconds() -> serializers.FloatField:
    """Return a field of seconds, null where nothing was measured."""
    return serializers.FloatField(allow_null=True)


class Figures(Shape):
    """What was done in some time."""

    completed = serializers.IntegerField()
    retried = serializers.IntegerField(help_text="Attempts that failed and are repeated.")
    failed = serializers.IntegerField()
    duplicate = serializers.IntegerField(help_text="Dropped: they had taken effect before.")
    skipped = serializers.IntegerField(help_text="Meant for others, or not to be run any more.")


class Times(Figures):
    """What was done in some time, and how long it took, in seconds."""

    run_p50, run_p95, run_p99 = seconds(), seconds(), seconds()
    wait_p50, wait_p95, wait_p99 = seconds(), seconds(), seconds()


class Point(Times):
    """The figures of one time of a series."""

    time = serializers.DateTimeField(help_text="When it begins.")
    minutes = serializers.FloatField(help_text="How long it is; the present one is shorter.")
    lag = serializers.IntegerField(allow_null=True)


class Totals(Figures):
    """The sums of the whole time, and the present rate and lag."""

    per_minute = serializers.FloatField(help_text="Jobs completed, of the last whole minutes.")
    lag = serializers.IntegerField()


class Deploy(Shape):
    """The first start of a release."""

    time = serializers.DateTimeField()
    release = serializers.CharField()


class Metrics(Shape):
    """Figures over time."""

    width_seconds = serializers.FloatField(help_text="Of each point.")
    points = Point(many=True, help_text="Evenly spaced, the oldest first, none left out.")
    totals = Totals(help_text="Of all queues and handlers.")
    deploys = Deploy(many=True)


class MetricSummary(Times):
    """The figures of a queue or a handler."""

    name = serializers.CharField()
    sparkline = serializers.ListField(
        child=serializers.IntegerField(), help_text="Completed in each minute, the oldest first."
    )


class MetricSummaries(Shape):
    """The figures of each, by name."""

    results = MetricSummary(many=True)


class MetricQuery(Query):
    """Which time, and what of it."""

    length = serializers.IntegerField(
        required=False,
        default=HOUR,
        min_value=60,
        max_value=31 * DAY,
        help_text="Seconds up to now: told by the minute up to two hours, by the quarter up to a "
        "day, else by the hour.",
    )
    queue = serializers.CharField(max_length=100, required=False, help_text="Points of it only.")
    handler = serializers.CharField(max_length=100, required=False, help_text="Points of it only.")


class SummaryQuery(Query):
    """Which time."""

    length = serializers.IntegerField(
        required=False, default=HOUR, min_value=60, max_value=2 * HOUR, help_text="Seconds."
    )


class MetricsView(KjoView):
    """Figures over time."""

    permissions: ClassVar = {"GET": ("view_job",)}

    @documented("metrics_read", TAG, {200: Metrics}, query=MetricQuery)
    def get(self, request: Request) -> Response:
        """Tell what was done in the time up to now, and how long it took."""
        query = self.query(MetricQuery)
        length = timedelta(seconds=query.pop("length"))
        series = metrics.series(length, **query)
        answer = {
            "width_seconds": series.width.total_seconds(),
            "points": series.points,
            "totals": metrics.totals(length),
            "deploys": metrics.deploys(length),
        }
        return Response(Metrics(answer).data)


class QueuesView(KjoView):
    """Figures by queue."""

    permissions: ClassVar = {"GET": ("view_job",)}

    @documented("metrics_queues", TAG, {200: MetricSummaries}, query=SummaryQuery)
    def get(self, request: Request) -> Response:
        """Tell what was done in each queue."""
        return summaries(metrics.by_queue(length_of(self)))


class HandlersView(KjoView):
    """Figures by handler."""

    permissions: ClassVar = {"GET": ("view_job",)}

    @documented("metrics_handlers", TAG, {200: MetricSummaries}, query=SummaryQuery)
    def get(self, request: Request) -> Response:
        """Tell what each handler did."""
        return summaries(metrics.by_handler(length_of(self)))


# --- Details --------------------------------------------------------------------------------------


def length_of(view: KjoView) -> timedelta:
    """Return the time that is asked for."""
    return timedelta(seconds=view.query(SummaryQuery)["length"])


def summaries(found: Mapping[str, Summary]) -> Response:
    """Answer with the figures of each."""
    names = [name for name in MetricSummary().fields if name != "name"]
    results: list[dict[str, Any]] = [
        {"name": name} | {each: getattr(figures, each) for each in names}
        for name, figures in sorted(found.items())
    ]
    return Response(MetricSummaries({"results": results}).data)
