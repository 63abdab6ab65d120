"""Worker processes, and what operators ask of them and of queues."""

from __future__ import annotations

from datetime import timedelta

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django.ids import uuid7


class Worker(models.Model):
    """A process of ``kjo_consume`` or ``kjo_produce``; gone once its heartbeat is old."""

    class State(models.TextChoices):
        """What the process does now."""

        RUNNING = "running", _("Running")
        QUIET = "quiet", _("Quiet")
        STOPPING = "stopping", _("Stopping")
        STOPPED = "stopped", _("Stopped")

    class Wish(models.TextChoices):
        """What an operator asked of the process, which does so within two seconds."""

        NONE = "", _("None")
        QUIET = "quiet", _("Start nothing more")
        STOP = "stop", _("Stop")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    name = models.CharField(_("name"), max_length=255)
    hostname = models.CharField(_("host name"), max_length=255)
    pid = models.PositiveIntegerField(_("process id"))
    queues = models.JSONField(_("queues"), default=list)
    state = models.CharField(
        _("state"), max_length=10, choices=State.choices, default=State.RUNNING
    )
    wish = models.CharField(
        _("asked to"), max_length=10, choices=Wish.choices, blank=True, default=Wish.NONE
    )
    release = models.CharField(
        _("release"), max_length=100, blank=True, default="", help_text=_("KJO['RELEASE'] there.")
    )
    concurrency = models.PositiveIntegerField(_("concurrency"), default=1)
    is_relaying = models.BooleanField(_("relaying"), default=False)
    processed_count = models.PositiveBigIntegerField(_("processed"), default=0)
    failed_count = models.PositiveBigIntegerField(_("failed"), default=0)
    in_flight_count = models.PositiveIntegerField(_("in flight"), default=0)
    partitions = models.JSONField(_("partitions"), default=list)
    rss_bytes = models.PositiveBigIntegerField(_("memory"), null=True, blank=True)
    last_error = models.CharField(_("last error"), max_length=500, blank=True, default="")
    started_at = models.DateTimeField(_("started at"), default=timezone.now)
    heartbeat_at = models.DateTimeField(_("heartbeat at"), default=timezone.now)

    class Meta:
        db_table = "kjo_worker"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        ordering = ("-id",)
        default_permissions = ("view",)
        permissions = (("control_worker", _("Can stop workers")),)

    def __str__(self) -> str:
        return self.name

    def is_alive(self, within: timedelta) -> bool:
        """Return whether its last heartbeat is no older than this, and it has not stopped."""
        return self.state != self.State.STOPPED and self.heartbeat_at >= timezone.now() - within


class QueueControl(models.Model):
    """What an operator asked of a queue; running workers do so within two seconds.

    A queue without a row runs as configured.
    """

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


class Dashboard(models.Model):
    """The operations screen: an address in the admin and a permission, but no table."""

    class Meta:
        managed = False
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions = (("view_dashboard", _("Can see the dashboard")),)

    def __str__(self) -> str:
        return str(_("Dashboard"))
