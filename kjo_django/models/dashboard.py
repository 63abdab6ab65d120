"""What the operations screen hangs on: an address in the admin and a permission. No table."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class Dashboard(models.Model):
    """The operations screen, at ``/admin/kjo_django/dashboard/``."""

    class Meta:
        managed = False
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions = (("view_dashboard", _("Can see the dashboard")),)

    def __str__(self) -> str:
        return str(_("Dashboard"))
