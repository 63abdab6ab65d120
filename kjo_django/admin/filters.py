"""Filters with fixed choices: Django's own run DISTINCT over the whole table to find them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from django.contrib import admin
from django.db.models import Model, QuerySet
from django.http import HttpRequest
from django.utils.translation import gettext_lazy as _

from kjo_django import registry

WINDOW = 50_000
"""Newest rows that a filter without an index searches."""


class ChoiceFilter(admin.SimpleListFilter):
    """A filter that compares a column with one of its choices."""

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        """Return the column's choices."""
        return list(model_admin.opts.get_field(self.parameter_name).choices)

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Restrict the list."""
        value = self.value()
        if value is None:
            return queryset
        if "\0" in value:
            return queryset.none()  # PostgreSQL refuses to be asked for it
        return queryset.filter(**{str(self.parameter_name): value})


class WindowedFilter(ChoiceFilter):
    """A filter on a column without an index.

    It searches the newest rows only, and its title says so: for a rare value the database would
    read the whole table.
    """

    def queryset(self, request: HttpRequest, queryset: QuerySet[Any]) -> QuerySet[Any]:
        """Restrict the list to matches among its newest rows."""
        if self.value() is None:
            return queryset
        return super().queryset(request, newest(queryset))


def newest(rows: QuerySet[Model]) -> QuerySet[Model]:
    """Return the newest ``WINDOW`` of the rows, as a range of the primary key."""
    keys = rows.order_by("-pk").values_list("pk", flat=True)
    floor = next(iter(keys[WINDOW : WINDOW + 1]), None)
    return rows if floor is None else rows.filter(pk__gt=floor)


class StateFilter(ChoiceFilter):
    """By stored state."""

    title = _("state")
    parameter_name = "state"


class ReasonFilter(WindowedFilter):
    """By reason of death."""

    title = _("reason (newest 50,000)")
    parameter_name = "reason"


class QueueFilter(WindowedFilter):
    """By the queues that settings and handlers name."""

    title = _("queue (newest 50,000)")
    parameter_name = "queue"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        """Return the known queues."""
        return [(name, name) for name in registry.queue_names()]


class HandlerFilter(WindowedFilter):
    """By the handlers that are registered in this process."""

    title = _("handler (newest 50,000)")
    parameter_name = "handler"

    def lookups(self, request: HttpRequest, model_admin: Any) -> Iterable[tuple[str, Any]]:
        """Return the registered handlers."""
        return [(handler.name, handler.name) for handler in registry.handlers()]
