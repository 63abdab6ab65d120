"""What an operator asked of a queue; running workers obey it within two seconds."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class QueueControl(models.Model):
    """One row per queue somebody has touched; no row means: as configured."""

    queue = models.CharField(_("queue"), max_length=100, primary_key=True)
    is_paused = models.BooleanField(_("paused"), default=False)
    concurrency = models.PositiveIntegerField(
        _("concurrency"),
        null=True,
        blank=True,
        help_text=_("Groups of this queue one worker runs at once; empty: as configured."),
    )
    max_attempts = models.PositiveIntegerField(
        _("max attempts"),
        null=True,
        blank=True,
        help_text=_("Executions before a job is dead-lettered; empty: as each job was enqueued."),
    )
    backoff_base = models.PositiveIntegerField(
        _("back-off"),
        null=True,
        blank=True,
        help_text=_("Seconds before the second attempt; doubles each time. Empty: as configured."),
    )
    changed_by = models.CharField(_("changed by"), max_length=150, blank=True, default="")
    updated_at = models.DateTimeField(_("updated at"), auto_now=True)

    class Meta:
        db_table = "kjo_queue_control"
        verbose_name = _("queue control")
        verbose_name_plural = _("queue controls")
        ordering = ("queue",)
        default_permissions = ("view", "add", "change")
        permissions = (("pause_queue", _("Can pause and resume queues")),)

    def __str__(self) -> str:
        return self.queue
