"""Candidates: what the interview service knows of users, and their interviews."""

from django.db import models


class Candidate(models.Model):
    """A user, as far as the events told."""

    user_id = models.CharField(max_length=50, unique=True)
    name = models.CharField(max_length=100)
    told_at = models.BigIntegerField(default=0, help_text="Timestamp of the event it is from.")

    def __str__(self) -> str:
        return self.name


class Interview(models.Model):
    """One that was scheduled."""

    candidate = models.ForeignKey(Candidate, on_delete=models.CASCADE)
    kind = models.CharField(max_length=20, default="technical")

    def __str__(self) -> str:
        return f"{self.kind} interview of {self.candidate}"
