"""Limits over all workers: what holds, and a page on which operators change it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from django import forms
from django.contrib import admin
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from kjo_django.admin.base import KjoAdmin
from kjo_django.admin.dashboard.figures import at_least
from kjo_django.limits import control
from kjo_django.models import LimitControl
from kjo_django.operations.actions import Subject
from kjo_django.operations.safe_text import inert
from kjo_django.refusals import shown


class LimitForm(forms.ModelForm):  # type: ignore[type-arg]
    """Checks a limit as the operation does that changes it."""

    def clean(self) -> dict[str, Any]:
        """Refuse a name that nothing has, and values that mean nothing."""
        name = self.instance.name or self.cleaned_data.get("name", "")
        checks: dict[str, Callable[[Any], Any]] = {
            option: functools.partial(control.check_value, name, option)
            for option in control.OPTIONS
        }
        if "name" in self.fields:
            checks["name"] = control.check_name
        for field, check in checks.items():
            value = self.cleaned_data.get(field)
            if value not in (None, ""):
                try:
                    check(value)
                except ValueError as error:
                    self.add_error(field, shown(error))
        return self.cleaned_data


@admin.register(LimitControl)
class LimitAdmin(KjoAdmin):
    """Every limit that is declared or that operators have set."""

    screens = ("limits", "")
    subject = Subject.LIMITS
    form = LimitForm
    list_display = ("shown_name", "declared", "in_force", "waiting", "changed_by", "updated_at")
    ordering = ("name",)
    fields = ("name", *control.OPTIONS, *list_display[1:])
    changeable = control.OPTIONS

    # A limit of which nobody has asked anything has no row: it is shown without one.

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """List declared limits without a row, too, and add to each what holds."""
        changes = super().get_changelist_instance(request)
        if not changes.multi_page:
            stored = {row.name: row for row in changes.result_list}
            rows = [
                _with_facts(stored.get(facts["name"]) or LimitControl(name=facts["name"]), facts)
                for facts in control.overview()
            ]
            changes.result_list = rows
            changes.result_count = changes.full_result_count = len(rows)
        return changes

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return a limit without a row, too."""
        found = super().get_object(request, object_id, from_field)
        if found is None and control.is_known(object_id):
            found = LimitControl(name=object_id)
        if found is not None:
            facts = (each for each in control.overview() if each["name"] == found.name)
            _with_facts(found, next(facts, None))
        return found

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Let a limit that is added be named."""
        found = super().get_readonly_fields(request, obj)
        return [name for name in found if obj is not None or name != "name"]

    def get_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return what is asked of a limit that is added, and of any other what holds besides."""
        return self.fields if obj is not None else ["name", *control.OPTIONS]

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Any queue and any job may be given a limit."""
        return self.may(request, "change_limitcontrol")

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Limits may be changed by those with the permission."""
        return self.may(request, "change_limitcontrol")

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Limits are given back by an action."""
        return False

    def state_of(self, obj: LimitControl) -> str:
        """Return whether operators have asked anything of it."""
        return "declared" if obj._state.adding else "asked"

    def save_model(self, request: HttpRequest, obj: LimitControl, form: Any, change: bool) -> None:
        """Change the limit as any other surface does. What is empty is as declared."""
        asked = {option: form.cleaned_data[option] or None for option in control.OPTIONS}
        control.set_limit(obj.name, actor=request.user.get_username(), **asked)

    # --- Columns ----------------------------------------------------------------------------------

    @admin.display(description=_("limit"))
    def shown_name(self, limit: LimitControl) -> str:
        """Return its name."""
        return inert(limit.name)

    @admin.display(description=_("declared"))
    def declared(self, limit: LimitControl) -> str:
        """Return what the code says."""
        facts = getattr(limit, "facts", None)
        return _text(facts["declared"]) if facts is not None else "–"

    @admin.display(description=_("in force"))
    def in_force(self, limit: LimitControl) -> str:
        """Return what holds."""
        facts = getattr(limit, "facts", None)
        return _text(facts) if facts is not None else "–"

    @admin.display(description=_("waiting jobs"))
    def waiting(self, limit: LimitControl) -> str:
        """Return how many jobs wait for it."""
        facts = getattr(limit, "facts", None)
        if facts is None:
            return "0"
        return at_least(facts["waiting_count"], facts["waiting_is_lower_bound"])


def _with_facts(limit: LimitControl, facts: dict[str, Any] | None) -> LimitControl:
    limit.facts = facts  # type: ignore[attr-defined]
    return limit


def _text(facts: dict[str, Any]) -> str:
    """Return a rate and a number of slots in words."""
    parts = []
    if facts["rate"]:
        parts.append(facts["rate"])
        if facts["burst"] and facts["burst"] > 1:
            parts.append(str(_("burst %d") % facts["burst"]))
    if facts["concurrency"]:
        parts.append(str(_("%d at once") % facts["concurrency"]))
    return ", ".join(parts) or "–"
