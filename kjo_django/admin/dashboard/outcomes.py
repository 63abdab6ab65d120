"""Telling what an operation on jobs came to."""

from __future__ import annotations

from django.contrib import messages
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext

from kjo_django.admin.dashboard.desk import Desk
from kjo_django.operations.jobs import Outcomes

LEFT = {
    "processing": _("%d being processed, left alone."),
    "completed": _("%d completed already."),
    "failed": _("%d failed already; the record stays."),
    "cancelled": _("%d cancelled already."),
    "unchanged": _("%d were not waiting for a later time."),
    "not_found": _("%d no longer there."),
}


def tell_outcomes(desk: Desk, outcomes: Outcomes, wanted: str) -> None:
    """Show how many jobs changed, and why others did not.

    :param wanted: the outcome that was asked for.
    """
    count = outcomes.changed_count
    if count:
        desk.tell(ngettext("%d job changed.", "%d jobs changed.", count) % count)
    for result, number in outcomes.counts.items():
        # Those that were so already have the same outcome, and did not change.
        left = number - count if result == wanted else number
        if left > 0:
            text = LEFT.get(str(result), _("%d left as they are."))
            desk.tell(str(text) % left, messages.WARNING)
    if not outcomes.counts:
        desk.tell(str(_("No job was chosen.")), messages.WARNING)
