"""The table of actions in the admin and the dashboard: forms for inputs, messages about results,
and log entries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from django import forms
from django.contrib import messages
from django.contrib.admin.helpers import ActionForm
from django.contrib.admin.models import CHANGE
from django.core.exceptions import ImproperlyConfigured
from django.forms.fields import InvalidJSONInput
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from kjo_django import registry
from kjo_django.exceptions import KjoError
from kjo_django.operations.actions import Action, Input, Kind, Report
from kjo_django.operations.audit import audit_of
from kjo_django.operations.dead_letters import ReplayReport
from kjo_django.operations.translations import ngettext_lazy, translated
from kjo_django.refusals import shown

Show = Callable[[str, int], None]
"""Shows a text on the next page, with a level of ``django.contrib.messages``."""

NOT_CHANGED = {
    "processing": _("%d being processed, left alone."),
    "completed": _("%d completed already."),
    "failed": _("%d failed already; the record stays."),
    "cancelled": _("%d cancelled already."),
    "unchanged": _("%d needed no change."),
    "not_found": _("%d no longer there."),
    "forbidden": _("%d internal, which need the permission of what they do."),
    "taken": ngettext_lazy(
        "%d has a unique id that another job of that queue has.",
        "%d have a unique id that another job of that queue has.",
    ),
    "other_kind": ngettext_lazy(
        "%d is no job of a handler; it stays in the queue of its kind.",
        "%d are no jobs of a handler; they stay in the queue of their kind.",
    ),
    "waiting": ngettext_lazy(
        "%d waits for other steps of its workflow.", "%d wait for other steps of their workflow."
    ),
    "limited": ngettext_lazy(
        "%d waits for a limit, which alone releases it; change the limit.",
        "%d wait for a limit, which alone releases them; change the limit.",
    ),
    "gone": _("%d ended already."),
    "declared": ngettext_lazy(
        "%d declared by the code, which would bring it back.",
        "%d declared by the code, which would bring them back.",
    ),
    "broken": _("%d cannot be enqueued."),
    "stopping": _("%d asked to stop already, which nothing undoes."),
}
"""By outcome: the reason why rows were not changed."""
UNCHANGED = ngettext_lazy("%d left as it is.", "%d left as they are.")


# --- Messages -------------------------------------------------------------------------------------


def show_report(show: Show, action: Action, report: Report) -> None:
    """Show how many rows an action changed, and why others did not change."""
    if isinstance(report, ReplayReport):
        return _show_replay(show, action, report)
    count = report.changed_count
    if count or not report.counts:
        show(action.done(count), messages.SUCCESS if count else messages.WARNING)
    for result, number in report.counts.items():
        # Rows that were so already have the same outcome, and did not change.
        left = number - count if result == action.result else number
        if left > 0:
            text = NOT_CHANGED.get(str(result), UNCHANGED)
            show(text(left) if callable(text) else str(text) % left, messages.WARNING)


def _show_replay(show: Show, action: Action, report: ReplayReport) -> None:
    count = report.replayed
    show(action.done(count), messages.SUCCESS if count else messages.WARNING)
    for reason, refused in report.refused.items():
        text = str(_("%(count)d refused: %(reason)s."))
        show(text % {"count": refused, "reason": translated(reason)}, messages.WARNING)
    if report.failed:
        detail = report.samples[-1]["detail"] if report.samples else ""
        text = str(_("%(count)d could not be published and stay open: %(detail)s"))
        show(text % {"count": report.failed, "detail": detail}, messages.ERROR)


def attempted(show: Show, act: Callable[[], Any]) -> Any:
    """Return the result of an operation. An error that refuses it is shown as a message, and None
    is returned.
    """
    try:
        return act()
    except (KjoError, ImproperlyConfigured, ValueError) as error:
        show(shown(error), messages.ERROR)
        return None


def audited(request: HttpRequest, message: str) -> Callable[[Sequence[Any]], None]:
    """Return an observer that writes a log entry with the user for each object."""
    return audit_of(request.user.pk, CHANGE, message)


# --- Forms ----------------------------------------------------------------------------------------


def form_of(action: Action, *, many: bool) -> type[forms.Form]:
    """Return the form that asks for an action's inputs.

    :param many: whether it is asked for a selection or a filter, not for one row.
    """
    fields = {
        each.name: _field_of(each, is_required=True)
        for each in action.inputs
        if many or not each.is_for_many
    }
    return type("InputForm", (forms.Form,), fields)


def list_form_of(actions: Sequence[Action]) -> type[ActionForm]:
    """Return the form of a list of the admin: the choice of the action, and the inputs that some of
    the actions take."""
    inputs = {each.name: each for action in actions for each in _in_lists(action)}
    fields = {name: _field_of(each, is_required=False) for name, each in inputs.items()}
    return type("ListForm", (ActionForm,), fields)


def list_inputs(action: Action, posted: Mapping[str, str]) -> dict[str, Any]:
    """Return the inputs in a posted form of a list or a button.

    :raises ValueError: one of them cannot be read.
    """
    fields = {each.name: _field_of(each, is_required=False) for each in _in_lists(action)}
    values = {}
    for name, field in fields.items():
        try:
            values[name] = field.clean(posted.get(name, "").strip())
        except forms.ValidationError as error:
            raise ValueError(f"{field.label}: {' '.join(error.messages)}") from None
    return values


def fields_of_button(action: Action) -> list[dict[str, Any]]:
    """Return label and widget of each input that a button of the admin asks for."""
    form = forms.Form(auto_id=f"kjo-{action.name}-%s")
    form.fields = {each.name: _field_of(each, is_required=True) for each in _in_lists(action)}
    return [{"label": bound.label_tag(), "widget": str(bound)} for bound in form]


def _in_lists(action: Action) -> list[Input]:
    return [each for each in action.inputs if each.is_in_lists]


def _field_of(given: Input, *, is_required: bool) -> forms.Field:
    common: dict[str, Any] = {
        "label": given.label,
        "help_text": given.hint or given.help,
        "required": is_required and given.is_required and not given.is_nullable,
    }
    numbers: dict[str, Any] = {"min_value": given.minimum, "max_value": given.maximum}
    match given.kind:
        case Kind.FLAG:
            return forms.BooleanField(**(common | {"required": False}))
        case Kind.WHOLE:
            return forms.IntegerField(**common, **numbers)
        case Kind.NUMBER:
            return forms.FloatField(**common, **numbers)
        case Kind.QUEUE:
            return forms.ChoiceField(**common, choices=_queues)
        case Kind.CHOICE:
            return forms.ChoiceField(**common, choices=given.choices)
        case Kind.MOMENT:
            widget = forms.DateTimeInput({"type": "datetime-local"}, format="%Y-%m-%dT%H:%M:%S")
            return forms.DateTimeField(**common, widget=widget)
        case Kind.JSON:
            return json_field(**common)
        case _:
            return forms.CharField(**common, max_length=given.max_length)


def json_field(**options: Any) -> forms.JSONField:
    """Return a field that shows what was posted as it was typed. Django's own writes what it has
    read anew, and there are texts that JSON can write and no page can hold."""
    field = forms.JSONField(**options)
    field.bound_data = _as_typed  # type: ignore[method-assign]
    return field


def _as_typed(data: Any, initial: Any) -> Any:
    return data if data is None else InvalidJSONInput(data)


def _queues() -> list[tuple[str, Any]]:
    return [("", "---------"), *((name, name) for name in registry.queue_names())]
