"""The operations screens: figures, lists and controls.

Django imports the admin of an app in every process, also in a worker, which shows no page. The
screens are imported with the addresses of the project: at its first request.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

from django.contrib import admin
from django.http import HttpRequest
from django.urls import URLPattern, path

from kjo_django.admin.base import BaseModelAdmin
from kjo_django.models import Dashboard

if TYPE_CHECKING:
    from kjo_django.admin.dashboard.page import Screen

__all__ = ["DashboardAdmin", "screens"]


@cache
def screens() -> tuple[Screen, ...]:
    """Import the screens; return them in the order of the navigation."""
    from kjo_django.admin.dashboard import (
        actions,
        dead_letters,
        enqueueing,
        handlers,
        jobs,
        limits,
        overview,
        personal_data,
        queues,
        schedules,
        system,
        workflows,
    )

    return (
        *overview.SCREENS,
        *actions.SCREENS,
        *queues.SCREENS,
        *handlers.SCREENS,
        *jobs.SCREENS,
        *enqueueing.SCREENS,
        *workflows.SCREENS,
        *schedules.SCREENS,
        *limits.SCREENS,
        *dead_letters.SCREENS,
        *system.SCREENS,
        *personal_data.SCREENS,
    )


@admin.register(Dashboard)
class DashboardAdmin(BaseModelAdmin):
    """An admin without rows; its list is the dashboard."""

    def get_urls(self) -> list[URLPattern]:
        """Return the screens; there is nothing to add, change or delete."""
        from kjo_django.admin.dashboard.page import address_name, opened

        return [
            path(
                screen.path,
                self.admin_site.admin_view(opened(screen, self.admin_site, screens())),
                name=address_name(screen.name),
            )
            for screen in screens()
        ]

    def has_module_permission(self, request: HttpRequest) -> bool:
        """Show it in the index to users who may see it."""
        return self.has_view_permission(request)

    def has_view_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Ask for a permission of its own."""
        return bool(request.user.has_perm("kjo_django.view_dashboard"))

    def has_add_permission(self, request: HttpRequest) -> bool:
        """There are no rows."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """There are no rows."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """There are no rows."""
        return False
