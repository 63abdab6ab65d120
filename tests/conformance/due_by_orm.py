"""The rows that a consumer may claim, as a query of Django's: the meaning that the texts of all
databases must have."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from django.db.models import Q, QuerySet

from kjo_django.models import TransportMessage
from kjo_django.transports.database.claims import Asked


def due_by_orm(
    alias: str, group: str, token: str, asked: Asked, skipped: Collection[int], now: datetime
) -> QuerySet[TransportMessage]:
    """Return the due rows of a topic, in order: those that nobody holds, and whose keys are neither
    in flight at another consumer nor to be skipped."""
    rows = TransportMessage.objects.using(alias).filter(consumer_group=group, topic=asked.topic)
    in_flight = rows.filter(lease_expires_at__gt=now, key_hash__isnull=False)
    busy = in_flight.exclude(lease_token__in=("", token)).values("key_hash")
    return (
        rows.filter(Q(lease_expires_at__isnull=True) | Q(lease_expires_at__lte=now))
        .filter(available_at__lte=now, rank__gt=asked.above, rank__lt=asked.below)
        .exclude(lease_token=token)
        .exclude(key_hash__in=busy)
        .exclude(key_hash__in=list(skipped))
        .order_by("rank", "id")
    )
