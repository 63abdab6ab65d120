"""Messages and jobs that ended without success, kept byte for byte."""

from __future__ import annotations

import hashlib
from typing import Any

from django.db import models
from django.db.models import Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django.ids import uuid7
from kjo_django.messages.serializers import MAX_ERROR_LENGTH, loads_for_display


class DeadLetterState(models.TextChoices):
    """Open until somebody, or a program, decides."""

    OPEN = "open", _("Open")
    REPLAYED = "replayed", _("Replayed")
    DISCARDED = "discarded", _("Discarded")


class DeadLetterReason(models.TextChoices):
    """Why a message ended here (the ``kjo-dlq-reason`` header)."""

    EXHAUSTED = "exhausted", _("Attempts exhausted")
    FATAL = "fatal", _("Permanent error")
    STALLED = "stalled", _("Its workers died")
    DESERIALIZATION = "deserialization", _("Unreadable")
    INVALID = "invalid", _("Not a message of ours")
    UNKNOWN_TYPE = "unknown_type", _("No handler")
    TOO_LARGE = "too_large", _("Over the size limit")
    EXPIRED = "expired", _("Expired")
    MANUAL = "manual", _("By hand")


def source_of_job(job_id: Any, generation: int) -> str:
    """Return the ``source_id`` of the dead letter of one generation of a job.

    A job whose unique id is enqueued again keeps its row and begins a new generation with another
    payload. By this the letter of the row's present failure is told from those of earlier ones.
    """
    return hashlib.sha256(f"job\0{job_id}\0{generation}".encode()).hexdigest()


def fingerprint_of(handler: str, error_type: str, place: str) -> str:
    """Return what dead letters of one kind have in common: the same error in the same place of the
    same handler.

    :param error_type: import path of the exception.
    """
    return hashlib.sha256(f"{handler}\0{error_type}\0{place}".encode()).hexdigest()[:16]


class DeadLetter(models.Model):
    """A message as it was, why it failed, and what became of it."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    state = models.CharField(
        _("state"), max_length=10, choices=DeadLetterState.choices, default=DeadLetterState.OPEN
    )
    reason = models.CharField(_("reason"), max_length=20, choices=DeadLetterReason.choices)
    source_id = models.CharField(
        _("source id"),
        max_length=64,
        unique=True,
        help_text=_("Digest of what died; a crash half-way records it once."),
    )
    job = models.ForeignKey(
        "kjo_django.Job",
        on_delete=models.SET_NULL,
        null=True,
        blank=True,
        related_name="dead_letters",
        verbose_name=_("job"),
    )
    message_id = models.CharField(_("message id"), max_length=255, blank=True, default="")
    queue = models.CharField(_("queue"), max_length=100, blank=True, default="")
    handler = models.CharField(_("handler"), max_length=100, blank=True, default="")
    key = models.BinaryField(_("key"), null=True, blank=True)
    value = models.BinaryField(_("value"), null=True, blank=True)
    headers = models.JSONField(
        _("headers"),
        default=dict,
        blank=True,
        help_text=_("Every header of the message; values in base64, since they are bytes."),
    )
    content_type = models.CharField(_("content type"), max_length=50, blank=True, default="")
    consumer_group = models.CharField(_("consumer group"), max_length=255, blank=True, default="")
    topic = models.CharField(_("topic"), max_length=249, blank=True, default="")
    partition = models.IntegerField(_("partition"), null=True, blank=True)
    offset = models.BigIntegerField(_("offset"), null=True, blank=True)
    error_type = models.CharField(_("error type"), max_length=255, blank=True, default="")
    error = models.CharField(_("error"), max_length=MAX_ERROR_LENGTH, blank=True, default="")
    traceback = models.TextField(_("traceback"), blank=True, default="")
    fingerprint = models.CharField(
        _("fingerprint"),
        max_length=32,
        blank=True,
        default="",
        help_text=_("Equal for failures of the same error in the same place of the same handler."),
    )
    release = models.CharField(
        _("release"),
        max_length=100,
        blank=True,
        default="",
        help_text=_("KJO['RELEASE'] of the worker it failed in."),
    )
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    replay_count = models.PositiveIntegerField(_("replays"), default=0)
    failed_at = models.DateTimeField(_("failed at"), default=timezone.now)
    closed_at = models.DateTimeField(_("closed at"), null=True, blank=True)
    note = models.CharField(_("note"), max_length=500, blank=True, default="")

    class Meta:
        db_table = "kjo_dead_letter"
        verbose_name = _("dead letter")
        verbose_name_plural = _("dead letters")
        ordering = ("-id",)
        default_permissions = ("view", "delete")
        permissions = (
            ("replay_dlq", _("Can replay dead letters")),
            ("discard_dlq", _("Can discard dead letters")),
            ("edit_payload", _("Can change a dead letter's payload and replay it")),
        )
        indexes = (
            # The open ones, newest first, and the replayer's walk through them.
            models.Index(fields=("id",), name="kjo_dl_open_idx", condition=Q(state="open")),
            # Groups of equal errors among the open ones.
            models.Index(
                fields=("fingerprint", "id"), name="kjo_dl_print_idx", condition=Q(state="open")
            ),
        )

    def __str__(self) -> str:
        return f"{self.handler or self.topic} {self.message_id or self.id}"

    @property
    def arguments(self) -> object:
        """The value decoded for people; text saying why where it cannot be."""
        if self.value is None:
            return None
        return loads_for_display(bytes(self.value), self.content_type or "application/json")
