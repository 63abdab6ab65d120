"""Limits: list, and show one."""

from __future__ import annotations

from typing import Any

from django.http import Http404
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiParameter
from rest_framework import serializers
from rest_framework.response import Response

from kjo_django.api.endpoints import KjoView, endpoint
from kjo_django.api.fields import shape
from kjo_django.limits import control

TAG = "limits"
NAME = OpenApiParameter(
    "limit",
    OpenApiTypes.STR,
    OpenApiParameter.PATH,
    description="`queue:` and a queue's name, or `job:` and a job's.",
)
LimitValues = shape(
    "LimitValues",
    "How often jobs start, and how many run at once.",
    rate=serializers.CharField(allow_null=True, help_text="As in `5/s`."),
    burst=serializers.IntegerField(allow_null=True),
    concurrency=serializers.IntegerField(allow_null=True),
)
Limit = shape(
    "SharedLimit",
    "A limit over all workers: what holds, and how it is used.",
    LimitValues,
    name=serializers.CharField(),
    declared=LimitValues(help_text="By the code."),
    asked=LimitValues(help_text="By operators; null: as declared."),
    rate_key=serializers.CharField(allow_blank=True, help_text="Empty: one rate for all jobs."),
    concurrency_key=serializers.CharField(allow_blank=True, help_text="Empty: all are counted."),
    waiting_count=serializers.IntegerField(
        help_text="Jobs that are due and have not started: in line, or met by no worker."
    ),
    in_line_count=serializers.IntegerField(help_text="Those of them that a worker has met."),
    waiting_is_lower_bound=serializers.BooleanField(
        help_text="Whether more may wait: 100,000 in line are counted, and 20,000 rows of a state."
    ),
    taken_count=serializers.IntegerField(
        allow_null=True, help_text="Slots that are taken; null: not known, or one for each key."
    ),
    changed_by=serializers.CharField(allow_blank=True),
)
Limits = shape("SharedLimits", "Every limit over all workers.", results=Limit(many=True))


@endpoint("limits_list", TAG, ["view_limitcontrol"], {200: Limits})
def list_limits(view: KjoView) -> Response:
    """List the limits that jobs and queues declare, or operators have set."""
    return Response(Limits({"results": control.overview()}).data)


@endpoint("limits_read", TAG, ["view_limitcontrol"], {200: Limit}, path=[NAME], problems=[404])
def read_limit(view: KjoView, limit: str) -> Response:
    """Tell of one limit."""
    return Response(Limit(find(limit)).data)


def find(name: str) -> dict[str, Any]:
    """Return a limit; one that could be set has no values.

    :raises Http404: no job and no queue has this name.
    """
    for row in control.overview():
        if row["name"] == name:
            return row
    if not control.is_known(name):
        raise Http404
    nothing = {"rate": None, "burst": None, "concurrency": None}
    keys = {"rate_key": "", "concurrency_key": "", "changed_by": ""}
    counts = {"waiting_count": 0, "in_line_count": 0, "taken_count": None}
    return {
        "name": name,
        **nothing,
        "declared": nothing,
        "asked": nothing,
        **keys,
        **counts,
        "waiting_is_lower_bound": False,
    }
