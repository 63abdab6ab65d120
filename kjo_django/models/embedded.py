"""Tables of the database transport and the database coordination: the embedded default.

Kept apart from the jobs: with Kafka and Redis configured they stay empty.
"""

from __future__ import annotations

from django.db import models
from django.db.models import Q
from django.utils import timezone


class TransportSubscription(models.Model):
    """A consumer group known to read a topic: each record published gets a row for it.

    The row is also what its consumers lock while they claim, so that records of one key are never
    claimed by two of them at once.
    """

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(max_length=249)
    consumer_group = models.CharField(max_length=255)
    created_at = models.DateTimeField(default=timezone.now)

    class Meta:
        db_table = "kjo_transport_subscription"
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                fields=("topic", "consumer_group"), name="kjo_transport_subscription_key"
            ),
        )

    def __str__(self) -> str:
        return f"{self.consumer_group} on {self.topic}"


class TransportMessage(models.Model):
    """A record waiting for one consumer group; deleted when acknowledged."""

    id = models.BigAutoField(primary_key=True)
    topic = models.CharField(max_length=249)
    consumer_group = models.CharField(
        max_length=255,
        blank=True,
        default="",
        help_text="Empty: nobody has subscribed yet; the first group to come adopts it.",
    )
    key = models.BinaryField(null=True)
    key_hash = models.BigIntegerField(
        null=True, help_text="Of the key, for comparing; NULL: no order is asked for."
    )
    value = models.BinaryField(null=True)
    headers = models.JSONField(default=dict, help_text="Values in base64, since they are bytes.")
    published_at = models.DateTimeField(default=timezone.now)
    available_at = models.DateTimeField(default=timezone.now)
    lease_token = models.CharField(max_length=64, blank=True, default="")
    lease_expires_at = models.DateTimeField(null=True)

    class Meta:
        db_table = "kjo_transport_message"
        default_permissions = ()
        indexes = (
            # Claiming: the next rows of a group's topic, in order.
            models.Index(fields=("topic", "consumer_group", "id"), name="kjo_message_next_idx"),
            # Renewing, acknowledging and asking which keys are in flight.
            models.Index(
                fields=("lease_token", "key_hash"),
                name="kjo_message_lease_idx",
                condition=~Q(lease_token=""),
            ),
        )

    def __str__(self) -> str:
        return f"{self.topic} {self.id}"


class Lease(models.Model):
    """A lease and the number of its deliveries, which outlives it."""

    name = models.CharField(max_length=255, primary_key=True)
    token = models.CharField(max_length=64, blank=True, default="")
    expires_at = models.DateTimeField()
    deliveries = models.PositiveIntegerField(default=0)

    class Meta:
        db_table = "kjo_lease"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


class Mark(models.Model):
    """A small value that expires."""

    name = models.CharField(max_length=255, primary_key=True)
    value = models.CharField(max_length=255)
    expires_at = models.DateTimeField()

    class Meta:
        db_table = "kjo_mark"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
