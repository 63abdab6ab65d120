"""Ordered checks: what is not well, and what to do."""

from __future__ import annotations

from django.http import HttpResponse
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from kjo_django.admin.dashboard.desk import Desk, Screen, shared
from kjo_django.operations.monitoring import health

TIMEOUT = 4.0


def show(desk: Desk) -> HttpResponse:
    """Return every check."""
    checks: list[health.Check] = shared("status", lambda: health.health(TIMEOUT), TIMEOUT)
    broken = [check for check in checks if check.ok is False]
    summary = _("%d checks are not well") % len(broken) if broken else _("Everything is well")
    return desk.show("status.html", {"checks": checks, "summary": summary}, title=_("Status"))


SCREENS = (Screen("status", "status/", show, title=gettext_lazy("Status")),)
