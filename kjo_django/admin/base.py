"""What all admins of the app share: bounded lists, read-only pages, audited actions and buttons."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.contrib import admin, messages
from django.contrib.admin.helpers import ACTION_CHECKBOX_NAME
from django.contrib.admin.models import CHANGE, DELETION
from django.contrib.admin.options import IS_POPUP_VAR
from django.contrib.admin.utils import flatten_fieldsets, quote
from django.core.exceptions import BadRequest, PermissionDenied, ValidationError
from django.core.paginator import Paginator
from django.db.models import QuerySet
from django.http import (
    HttpRequest,
    HttpResponse,
    HttpResponseNotAllowed,
    HttpResponseRedirect,
)
from django.urls import URLPattern, path, reverse
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from kjo_django.admin.actions import (
    attempted,
    audited,
    fields_of_button,
    list_form_of,
    list_inputs,
    show_report,
)
from kjo_django.admin.display import inert_row
from kjo_django.operations.actions import Action, Subject, Surface, actions_of
from kjo_django.operations.audit import log_entries
from kjo_django.operations.internal import UserActor
from kjo_django.operations.redaction import hide_texts
from kjo_django.operations.safe_text import InertName, inert
from kjo_django.runtime import jobs_database
from kjo_django.store.counting import bounded_count

if TYPE_CHECKING:
    BaseModelAdmin = admin.ModelAdmin[Any]
    BaseInline = admin.TabularInline[Any, Any]
else:  # the classes are generic for type checkers only
    BaseModelAdmin = admin.ModelAdmin
    BaseInline = admin.TabularInline


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts up to 100,000 rows."""

    @cached_property
    def count(self) -> int:
        """The number of rows, or the limit."""
        return bounded_count(self.object_list)  # type: ignore[arg-type]


class KjoAdmin(BaseModelAdmin):
    """Lists without a full count, facets or sorting by columns no index knows."""

    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by = ()
    list_per_page = 50
    list_max_show_all = 200
    ordering = ("-pk",)
    change_list_template = "admin/kjo_django/change_list.html"
    change_form_template = "admin/kjo_django/change_form.html"
    screens: tuple[str, str] = ("", "")
    """Screens of the dashboard that show the rows, and one of them; empty: none does."""
    subject: Subject | None = None
    """The subject whose actions are offered, in the list and as buttons of an object's page."""
    changeable: Sequence[str] = ()
    """Fields that users with the model's permission can edit."""
    never_listed: Sequence[str] = ()
    """Large columns, loaded only where a page shows them."""

    class Media:
        css = {"all": ("kjo_django/admin.css",)}

    def __init__(self, model: Any, admin_site: admin.AdminSite) -> None:
        super().__init__(model, admin_site)
        subject = self.subject
        self.table = [] if subject is None else actions_of(subject, Surface.ADMIN)
        self.action_form = list_form_of(self.table)  # type: ignore[misc]

    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Read from where the rows are written, and defer the large columns."""
        rows: QuerySet[Any] = super().get_queryset(request).using(jobs_database())
        return rows.defer(*self.never_listed)

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return a row; None for a key that the database would refuse."""
        if "\0" in object_id:
            return None
        return super().get_object(request, object_id, from_field)

    def response_action(
        self, request: HttpRequest, queryset: QuerySet[Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Refuse keys that are not in the list: Django would pass them to the database, which
        answers 500.
        """
        for key in request.POST.getlist(ACTION_CHECKBOX_NAME):
            try:
                is_key = "\0" not in key and bool(self.opts.pk.clean(key, None))
            except ValidationError:
                is_key = False
            if not is_key:
                raise BadRequest("What was selected is no row of this list")
        return super().response_action(request, queryset, *args, **kwargs)

    def get_changelist_instance(self, request: HttpRequest) -> Any:
        """Escape control and formatting characters in the rows' texts."""
        changes = super().get_changelist_instance(request)
        if not self.may(request, "view_payload"):
            hide_texts(changes.result_list)
        for row in changes.result_list:
            inert_row(row)
        return changes

    def get_readonly_fields(self, request: HttpRequest, obj: Any = None) -> Any:
        """Return all fields that this user sees, without those that can be edited."""
        shown = flatten_fieldsets(self.get_fieldsets(request, obj))
        return [name for name in shown if name not in self.changeable]

    # --- Beside the dashboard ---------------------------------------------------------------------

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show the list in the index to users who may not see the dashboard, which leads to it."""
        may_see = super().has_module_permission(request)
        return may_see and not self.may(request, "view_dashboard")

    def changelist_view(
        self, request: HttpRequest, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the list, with a link to the dashboard."""
        context = {"kjo_dashboard_url": self._dashboard_url(request), **(extra_context or {})}
        return super().changelist_view(request, context)

    def _dashboard_url(self, request: HttpRequest, obj: Any = None) -> str:
        rows, row = self.screens
        if not rows or not self.may(request, "view_dashboard"):
            return ""
        name, arguments = (row, (obj.pk,)) if row and obj is not None else (rows, ())
        place = f"admin:kjo_django_dashboard_{name}"
        return reverse(place, args=arguments, current_app=self.admin_site.name)

    # --- Permissions ------------------------------------------------------------------------------

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Rows are made by the system."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows are changed by actions."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Deleting is for superusers: it leaves no trace. Pruning is what deletes."""
        return bool(
            request.user.is_superuser
            and "delete" in self.opts.default_permissions
            and super().has_delete_permission(request, obj)
        )

    def may(self, request: HttpRequest, permission: str) -> bool:
        """Return whether the user has a permission of the app, such as ``view_payload``."""
        return bool(request.user.has_perm(f"kjo_django.{permission}"))

    def lookup_allowed(self, lookup: str, value: Any, request: HttpRequest) -> bool:
        """Allow the declared filters only. Others could reveal columns the user may not see, and
        would read the whole table.
        """
        return lookup in {getattr(each, "parameter_name", None) for each in self.list_filter}

    # --- Actions ----------------------------------------------------------------------------------

    def get_actions(self, request: HttpRequest) -> Any:
        """Return the actions of the table that the user may do, and what Django offers."""
        found = super().get_actions(request)
        if IS_POPUP_VAR in request.GET:
            return found
        rows = self.opts.verbose_name_plural
        offered = {
            action.name: (
                functools.partial(_run_in_list, action=action),
                action.name,
                _("%(action)s: selected %(rows)s") % {"action": action.label, "rows": rows},
            )
            for action in self.table
            if action.is_allowed(request.user)
        }
        return offered | found

    def run_action(self, request: HttpRequest, action: Action, rows: QuerySet[Any]) -> None:
        """Run an action on rows and show its result. An error that refuses it is shown as a
        message.
        """
        show = functools.partial(self.message_user, request)

        def act() -> None:
            inputs = list_inputs(action, request.POST)
            report = action.perform(
                rows,
                actor=UserActor(request.user),
                on_changed=audited(request, action.log_entry(inputs)),
                **inputs,
            )
            show_report(show, action, report)

        attempted(show, act)

    def message_user(
        self,
        request: HttpRequest,
        message: Any,
        level: int | str = messages.INFO,
        extra_tags: str = "",
        fail_silently: bool = False,
    ) -> None:
        """Show a message on the next page. The names in it are escaped, since users may choose
        them.
        """
        text = message if isinstance(message, str) else str(message)
        super().message_user(request, inert(text), level, extra_tags, fail_silently)

    # --- Names that others gave, on Django's own pages and in its log -----------------------------

    def log_change(self, request: HttpRequest, obj: Any, message: Any) -> Any:
        """Write into the log, inert."""
        return log_entries(request.user.pk, [obj], CHANGE, message, single_object=True)

    def log_deletions(self, request: HttpRequest, queryset: Any) -> Any:
        """Write into the log, inert."""
        return log_entries(request.user.pk, queryset, DELETION, "")

    def action_checkbox(self, obj: Any) -> Any:
        """Return a row's choice for an action, with an escaped name."""
        return super().action_checkbox(InertName(obj))

    def get_deleted_objects(self, objs: Any, request: HttpRequest) -> Any:
        """Return the objects that a deletion would include, with escaped names."""
        deleted, counts, perms_needed, protected = super().get_deleted_objects(objs, request)
        return _inert_names(deleted), counts, perms_needed, _inert_names(protected)

    def render_delete_form(self, request: HttpRequest, context: dict[str, Any]) -> HttpResponse:
        """Show the confirmation of a deletion with an escaped name."""
        name = InertName(context["object"])
        # The second key is Django 6.1's.
        return super().render_delete_form(
            request, context | {"object": name, "escaped_object": str(name)}
        )

    def history_view(
        self, request: HttpRequest, object_id: str, extra_context: dict[str, Any] | None = None
    ) -> HttpResponse:
        """Show the log of a row, escaped, since other programs may have written to it."""
        response = super().history_view(request, object_id, extra_context)
        context = getattr(response, "context_data", None)
        if context is not None:  # else it leads back: there is no such row
            context["object"] = InertName(context["object"])
            context["title"] = inert(str(context["title"]))
            for entry in context["action_list"]:
                entry.change_message = inert(entry.change_message)
        return response

    # --- Buttons ----------------------------------------------------------------------------------

    def get_urls(self) -> list[URLPattern]:
        """Add a POST address for each button."""
        own = [
            path(
                f"<path:object_id>/{action.name}/",
                self.admin_site.admin_view(functools.partial(self.press, action=action)),
                name=self._url_name(action),
            )
            for action in self.table
        ]
        return own + super().get_urls()

    def _url_name(self, action: Action) -> str:
        return f"{self.opts.app_label}_{self.opts.model_name}_{action.name}"

    def press(self, request: HttpRequest, object_id: str, action: Action) -> HttpResponse:
        """Run a button's action on one object."""
        if request.method != "POST":
            return HttpResponseNotAllowed(["POST"])
        if not (self.has_view_permission(request) and action.is_allowed(request.user)):
            raise PermissionDenied
        obj = self.get_object(request, object_id)
        if obj is None:
            return self._get_obj_does_not_exist_redirect(request, self.opts, object_id)  # type: ignore[attr-defined, no-any-return]
        self.run_action(request, action, self.get_queryset(request).filter(pk=obj.pk))
        place = f"admin:{self.opts.app_label}_{self.opts.model_name}_change"
        return HttpResponseRedirect(
            reverse(place, args=(quote(obj.pk),), current_app=self.admin_site.name)
        )

    def state_of(self, obj: Any) -> str:
        """Return the state that decides which buttons there are."""
        return str(obj.state)

    def _buttons(self, request: HttpRequest, obj: Any) -> list[dict[str, Any]]:
        if obj is None or not self.table or not self.has_view_permission(request):
            return []
        state = self.state_of(obj)
        return [
            {
                "label": action.label,
                "url": reverse(
                    f"admin:{self._url_name(action)}",
                    args=(obj.pk,),
                    current_app=self.admin_site.name,
                ),
                "fields": fields_of_button(action),
            }
            for action in self.table
            if action.is_allowed(request.user) and action.applies(state)
        ]

    def render_change_form(
        self, request: HttpRequest, context: dict[str, Any], *args: Any, **kwargs: Any
    ) -> HttpResponse:
        """Pass the buttons that this user may press to the template."""
        obj = kwargs.get("obj")
        context["kjo_buttons"] = self._buttons(request, obj)
        context["kjo_dashboard_url"] = self._dashboard_url(request, obj)
        # From here on they are only shown; plain columns are what others wrote, too.
        if not self.may(request, "view_payload"):
            inlines = context["inline_admin_formsets"]
            shown = [form.instance for each in inlines for form in each.formset.forms]
            hide_texts([*([] if obj is None else [obj]), *shown])
        if obj is not None:
            inert_row(obj)
            context["original"] = InertName(obj)
            context["subtitle"] = inert(str(obj))
        for inline in context["inline_admin_formsets"]:
            for form in inline.formset.forms:
                inert_row(form.instance)
        return super().render_change_form(request, context, *args, **kwargs)


def _run_in_list(
    model_admin: KjoAdmin, request: HttpRequest, rows: QuerySet[Any], *, action: Action
) -> None:
    model_admin.run_action(request, action, rows)


def _inert_names(names: Any) -> Any:
    """Do so to a list of names, which holds lists of what hangs on them."""
    if isinstance(names, list):
        return [_inert_names(name) for name in names]
    return inert(names)
