"""Whether all is well, and what has taken effect."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, ClassVar

from django.utils import timezone
from rest_framework import serializers, status
from rest_framework.request import Request
from rest_framework.response import Response

from kjo_django.api.base import KjoView
from kjo_django.api.fields import JSONValue, Query, QueryNumber, Shape
from kjo_django.api.openapi import documented
from kjo_django.api.showing import shown_event
from kjo_django.models import ProcessedEvent as ProcessedEventRow
from kjo_django.operations.monitoring.health import Thresholds, health, is_healthy
from kjo_django.store.transactions import jobs_database

TAG = "system"
TIMEOUT = 5.0
"""Seconds the checks may take in all."""
MOST_EVENTS = 100


class Check(Shape):
    """One check, in the order of their dependencies."""

    name = serializers.CharField()
    ok = serializers.BooleanField(allow_null=True, help_text="null: not checked.")
    detail = serializers.CharField(allow_blank=True)
    fix = serializers.CharField(allow_blank=True, help_text="What to do about it.")


class Health(Shape):
    """Whether all is well."""

    healthy = serializers.BooleanField()
    timestamp = serializers.DateTimeField()
    checks = Check(many=True)


class HealthQuery(Query):
    """What is still well."""

    max_lag = serializers.IntegerField(
        required=False, min_value=0, max_value=2**31, help_text="Messages a queue may be behind."
    )
    max_failure_rate = QueryNumber(required=False, min_value=0, max_value=1)
    max_idle = QueryNumber(
        required=False, min_value=1, max_value=86_400, help_text="Seconds due work may wait."
    )


class ProcessedEvent(Shape):
    """An event or message whose effects are committed."""

    id = serializers.UUIDField()
    event_id = serializers.CharField()
    event_type = serializers.CharField()
    service_name = serializers.CharField()
    processed_at = serializers.DateTimeField()
    event_data = JSONValue(
        required=False, help_text="Redacted; with the permission `view_payload`."
    )


class ProcessedEvents(Shape):
    """The effects of one event: at most 100."""

    results = ProcessedEvent(many=True)


class EventQuery(Query):
    """Which event, and which consumer's effects."""

    event_id = serializers.CharField(
        max_length=255, trim_whitespace=False, help_text="Exactly as the event or message has it."
    )
    service_name = serializers.CharField(max_length=100, required=False)
    event_type = serializers.CharField(max_length=100, required=False)


class HealthView(KjoView):
    """The checks of `kjo_health`."""

    permissions: ClassVar = {"GET": ("view_job",)}

    @documented(
        "health",
        TAG,
        {200: (Health, "All is well."), 503: (Health, "Something is not; `fix` says what to do.")},
        query=HealthQuery,
    )
    def get(self, request: Request) -> Response:
        """Check settings, database, coordination, transports, topics, relay, workers and lag."""
        query = self.query(HealthQuery)
        limits: dict[str, Any] = {}
        if "max_lag" in query:
            limits["lag"] = query["max_lag"]
        if "max_failure_rate" in query:
            limits["failure_rate"] = query["max_failure_rate"]
        if "max_idle" in query:
            limits["idle"] = timedelta(seconds=query["max_idle"])
        checks = health(TIMEOUT, Thresholds(**limits))
        is_well = is_healthy(checks)
        answer = {"healthy": is_well, "timestamp": timezone.now(), "checks": checks}
        code = status.HTTP_200_OK if is_well else status.HTTP_503_SERVICE_UNAVAILABLE
        return Response(Health(answer).data, status=code)


class ProcessedEventsView(KjoView):
    """What has taken effect."""

    permissions: ClassVar = {"GET": ("view_processedevent",)}

    @documented("processed_events_lookup", TAG, {200: ProcessedEvents}, query=EventQuery)
    def get(self, request: Request) -> Response:
        """Look up an event by its exact id: which consumers' effects of it are committed."""
        query = self.query(EventQuery)
        names = ["id", "event_id", "event_type", "service_name", "processed_at"]
        names += ["event_data"] if self.sees_payloads else []
        rows = ProcessedEventRow.objects.using(jobs_database()).filter(**query).order_by("pk")
        results = [
            {name: getattr(row, name) for name in names} for row in rows.only(*names)[:MOST_EVENTS]
        ]
        for told in results:
            if "event_data" in told:
                told["event_data"] = shown_event(told["event_data"], told["event_type"])
        return Response(ProcessedEvents({"results": results}).data)
