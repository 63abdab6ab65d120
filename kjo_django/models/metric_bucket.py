"""Aggregates by minute, quarter and hour, so that no screen ever counts jobs."""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _

from kjo_django.ids import uuid7

BOUNDS = 24
"""Upper bounds of 1 ms · 2^n, n below this; the last stands for everything above."""
UPPER_MILLISECONDS = [2**n for n in range(BOUNDS - 1)]
"""The bounds themselves: what is bisected into them has the histogram's index."""


class Figures(models.Model):
    """What one worker did with one handler in some time; screens add them up.

    One row per worker keeps writers from waiting for each other.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    minute = models.DateTimeField(_("minute"), help_text=_("When the time begins."))
    queue = models.CharField(_("queue"), max_length=100)
    handler = models.CharField(_("handler"), max_length=100)
    worker_id = models.UUIDField(_("worker"))
    completed_count = models.PositiveBigIntegerField(_("completed"), default=0)
    retried_count = models.PositiveBigIntegerField(_("retried"), default=0)
    failed_count = models.PositiveBigIntegerField(_("failed"), default=0)
    duplicate_count = models.PositiveBigIntegerField(_("duplicates"), default=0)
    skipped_count = models.PositiveBigIntegerField(_("skipped"), default=0)
    lag = models.PositiveBigIntegerField(
        _("lag"),
        null=True,
        help_text=_("Records not acknowledged yet, last seen in this minute; no handler."),
    )
    run_histogram = models.JSONField(
        _("run times"),
        default=list,
        help_text=_("Counts of run times by upper bound 1 ms · 2^n, the last one open."),
    )
    wait_histogram = models.JSONField(
        _("waiting times"),
        default=list,
        help_text=_("Counts of times from due to started by upper bound 1 ms · 2^n."),
    )
    run_seconds_sum = models.FloatField(_("seconds run"), default=0.0)
    wait_seconds_sum = models.FloatField(_("seconds waited"), default=0.0)

    class Meta:
        abstract = True

    def __str__(self) -> str:
        return f"{self.queue} {self.minute:%H:%M}"


class MetricBucket(Figures):
    """The figures of one minute."""

    class Meta:
        db_table = "kjo_metric_bucket"
        verbose_name = _("metric bucket")
        verbose_name_plural = _("metric buckets")
        ordering = ("minute",)
        default_permissions = ()
        constraints = (
            # Serves the range queries of charts too.
            models.UniqueConstraint(
                fields=("minute", "queue", "handler", "worker_id"), name="kjo_metric_bucket_key"
            ),
        )


class MetricRollup(Figures):
    """The figures of a longer time, for charts of days: these would read a million minutes."""

    QUARTER, HOUR = 15, 60
    LENGTHS = (QUARTER, HOUR)

    minutes = models.PositiveSmallIntegerField(_("minutes"))

    class Meta:
        db_table = "kjo_metric_rollup"
        verbose_name = _("metric roll-up")
        verbose_name_plural = _("metric roll-ups")
        ordering = ("minute",)
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(
                fields=("minutes", "minute", "queue", "handler", "worker_id"),
                name="kjo_metric_rollup_key",
            ),
        )
