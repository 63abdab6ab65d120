"""Items with a state of their own, as template producers poll them."""

from django.db import models

from kjo_django.states import ItemState


class Item(models.Model):
    """What is to be processed; `body` may tell the consumer to misbehave."""

    email = models.CharField(max_length=100, default="someone@example.com")
    body = models.CharField(max_length=200, default="", blank=True)
    priority = models.CharField(max_length=10, default="normal")
    state = models.IntegerField(choices=ItemState.choices, default=ItemState.PENDING)
    result = models.CharField(max_length=100, default="", blank=True)
    looked_at = models.IntegerField(default=0)
    completed_at = models.DateTimeField(null=True, blank=True)
    failed_at = models.DateTimeField(null=True, blank=True)

    def __str__(self) -> str:
        return f"{self.pk} {self.email}"


class Run(models.Model):
    """One call of ``process`` whose effects were committed."""

    item = models.CharField(max_length=100, db_index=True)
    partition = models.IntegerField(default=0)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.item
