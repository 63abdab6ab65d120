"""One failed attempt of a job."""

from __future__ import annotations

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django.ids import uuid7
from kjo_django.messages.serializers import MAX_ERROR_LENGTH


class JobFailure(models.Model):
    """What went wrong in one attempt, and where."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    job = models.ForeignKey(
        "kjo_django.Job", on_delete=models.CASCADE, related_name="failures", verbose_name=_("job")
    )
    generation = models.PositiveIntegerField(_("generation"), default=1)
    attempt = models.PositiveIntegerField(_("attempt"))
    worker = models.CharField(_("worker"), max_length=255, blank=True, default="")
    error_type = models.CharField(_("error type"), max_length=255)
    error = models.CharField(_("error"), max_length=MAX_ERROR_LENGTH)
    code = models.CharField(
        _("error code"),
        max_length=100,
        blank=True,
        default="",
        db_default="",  # a worker of the release before does not name the column
        help_text=_("The error's own."),
    )
    details = models.JSONField(
        _("error details"),
        null=True,
        blank=True,
        help_text=_("What the error's to_dict() returned, or its details."),
    )
    traceback = models.TextField(_("traceback"), blank=True, default="")
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    failed_at = models.DateTimeField(_("failed at"), default=timezone.now)
    retry_at = models.DateTimeField(_("retry at"), null=True, blank=True)

    class Meta:
        db_table = "kjo_job_failure"
        verbose_name = _("failed attempt")
        verbose_name_plural = _("failed attempts")
        ordering = ("id",)
        default_permissions = ("view",)

    def __str__(self) -> str:
        return f"{self.error_type} ({self.attempt})"
