"""Telling what an operation came to: those who asked, and the log of the admin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from django.contrib import messages
from django.contrib.admin.models import CHANGE
from django.core.exceptions import ImproperlyConfigured
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from kjo_django.exceptions import KjoError
from kjo_django.operations.audit import audit_of
from kjo_django.operations.dead_letters.table import ReplayReport
from kjo_django.operations.jobs import Outcomes

Tell = Callable[[str, int], None]
"""Shows a text on the next page, with a level of ``django.contrib.messages``."""

LEFT = {
    "processing": _("%d being processed, left alone."),
    "completed": _("%d completed already."),
    "failed": _("%d failed already; the record stays."),
    "cancelled": _("%d cancelled already."),
    "unchanged": _("%d were not waiting for a later time."),
    "not_found": _("%d no longer there."),
    "forbidden": _("%d internal, which need the permission of what they do."),
}


def tell_outcomes(tell: Tell, outcomes: Outcomes, wanted: str, changed: str = "") -> None:
    """Show how many jobs changed, and why others did not.

    :param wanted: the outcome that was asked for.
    :param changed: what to say of those that changed, none too; if not given, just that.
    """
    count = outcomes.changed_count
    if changed:
        tell(changed, messages.SUCCESS if count else messages.WARNING)
    elif count:
        tell(ngettext("%d job changed.", "%d jobs changed.", count) % count, messages.SUCCESS)
    for result, number in outcomes.counts.items():
        # Those that were so already have the same outcome, and did not change.
        left = number - count if result == wanted else number
        if left > 0:
            text = LEFT.get(str(result), _("%d left as they are."))
            tell(str(text) % left, messages.WARNING)
    if not outcomes.counts:
        tell(str(_("No job was chosen.")), messages.WARNING)


def tell_replay(tell: Tell, report: ReplayReport) -> None:
    """Show how many dead letters were replayed, and why others were not."""
    count = report.replayed
    text = ngettext("%d dead letter was replayed.", "%d dead letters were replayed.", count)
    tell(text % count, messages.SUCCESS if count else messages.WARNING)
    for reason, refused in report.refused.items():
        what = str(_("%(count)d refused: %(reason)s."))
        tell(what % {"count": refused, "reason": reason}, messages.WARNING)
    if report.failed:
        detail = report.samples[-1]["detail"] if report.samples else ""
        what = str(_("%(count)d could not be published and stay open: %(detail)s"))
        tell(what % {"count": report.failed, "detail": detail}, messages.ERROR)


def attempted(tell: Tell, act: Callable[[], Any]) -> Any:
    """Run an operation and return what it does; what it refuses is told, not raised."""
    try:
        return act()
    except (KjoError, ImproperlyConfigured, ValueError) as error:
        tell(str(error), messages.ERROR)
        return None


def audited(request: HttpRequest, message: str) -> Callable[[Sequence[Any]], None]:
    """Return an observer that writes who did it into the log of each object."""
    return audit_of(request.user.pk, CHANGE, message)
