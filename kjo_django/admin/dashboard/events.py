"""Processed events: what has taken effect, and what was suppressed as a duplicate."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.dashboard.desk import Desk, Screen, shared
from kjo_django.models import ProcessedEvent
from kjo_django.operations.monitoring import metrics
from kjo_django.store.transactions import jobs_database

SHOWN = 50
LONGEST_ID = 255


def show(desk: Desk) -> HttpResponse:
    """Return the newest events, or those of one id."""
    wanted = desk.request.GET.get("id", "").strip()[:LONGEST_ID].replace("\0", "")
    day = shared("totals of a day", lambda: metrics.totals(timedelta(days=1)), 5)
    return desk.show(
        "events.html",
        {"rows": _rows(wanted), "wanted": wanted, "totals": day, "shown": SHOWN},
        controls="events_form.html",
        title=_("Events"),
    )


def _rows(wanted: str) -> list[dict[str, Any]]:
    rows = ProcessedEvent.objects.using(jobs_database()).order_by("-pk")
    if wanted:
        rows = rows.filter(event_id=wanted)
    columns = ("pk", "event_id", "service_name", "event_type", "processed_at")
    return list(rows.values(*columns)[:SHOWN])


SCREENS = (Screen("events", "events/", show, "view_processedevent", title=gettext_lazy("Events")),)
