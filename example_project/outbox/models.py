"""The emails, and what became of each."""

from django.db import models

from kjo_django.states import ItemState


class Email(models.Model):
    """One email. That it is being sent is nowhere stored: a lease tells, and ends by itself."""

    recipient = models.EmailField()
    subject = models.CharField(max_length=200)
    body = models.TextField()
    state = models.IntegerField(choices=ItemState.choices, default=ItemState.PENDING, db_index=True)
    message_id = models.CharField(max_length=100, default="", blank=True)
    created_at = models.DateTimeField(auto_now_add=True)
    sent_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.subject} to {self.recipient}"
