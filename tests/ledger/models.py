"""The ledger: each job adds exactly one entry, whatever is killed meanwhile."""

from django.db import models


class Entry(models.Model):
    """No unique constraint on purpose: a job that ran twice must show."""

    job = models.CharField(max_length=100, db_index=True)
    note = models.CharField(max_length=200, default="", blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.job
