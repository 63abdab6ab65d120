"""The idempotency table: one row per message whose database effects are committed."""

from __future__ import annotations

from typing import NamedTuple

from django.db import models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django.ids import uuid7


class EventKey(NamedTuple):
    """What makes an effect unique, in the order of the constraint."""

    event_id: str
    service_name: str
    event_type: str


class LongNameIndex(models.Index):
    """An index with the name that other systems sharing the table know.

    Django limits names to 30 characters for Oracle's sake; PostgreSQL, SQLite and MySQL take 63.
    """

    max_name_length = 63


class ProcessedEvent(models.Model):
    """Event ``event_id`` of type ``event_type`` took effect for ``service_name``.

    Kept for longer than a redelivery or replay can take; ``kjo_prune`` removes older ones.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    event_id = models.CharField(_("event id"), max_length=255)
    event_type = models.CharField(_("event type"), max_length=100)
    service_name = models.CharField(_("service name"), max_length=100)
    processed_at = models.DateTimeField(_("processed at"), default=timezone.now)
    event_data = models.JSONField(_("event data"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), default=timezone.now)
    updated_at = models.DateTimeField(_("updated at"), default=timezone.now)

    class Meta:
        db_table = "processed_events"
        verbose_name = _("processed event")
        verbose_name_plural = _("processed events")
        ordering = ("-id",)
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(
                fields=("event_id", "service_name", "event_type"),
                name="uk_processed_events_event_service",
            ),
        )
        indexes = (
            # Pruning by age. Of seed 5's other three, event_id is the constraint's prefix and
            # nothing asks by service or type alone.
            LongNameIndex(fields=("processed_at",), name="idx_processed_events_processed_at"),
        )

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id}"

    @property
    def event_key(self) -> EventKey:
        """The unique triple."""
        return EventKey(self.event_id, self.service_name, self.event_type)
