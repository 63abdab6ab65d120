"""The job: one unit of work, committed together with the business data that asked for it."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from django.db import models
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django import states
from kjo_django.ids import uuid7
from kjo_django.messages.headers import message_id
from kjo_django.messages.serializers import MAX_ERROR_LENGTH, loads_for_display
from kjo_django.models.constraints import UniqueWhereGiven
from kjo_django.states import JobState, JobStatus

ORIGIN_ID = "kjo-origin-id"
"""Header of a job that was born of a message nobody enqueued here: that message's id."""


class JobQuerySet(models.QuerySet["Job"]):
    """Jobs by their state."""

    def open(self) -> JobQuerySet:
        """Jobs that will still run."""
        return self.filter(state__in=states.OPEN)

    def unfinished_due(self, now: datetime | None = None) -> JobQuerySet:
        """Jobs that are being carried out or could start now; later ones are left out."""
        return self.open().filter(
            Q(state=JobState.QUEUED, available_at__lte=now or timezone.now())
            | Q(state__in=states.AWAITING_PUBLISH, available_at__lte=now or timezone.now())
        )

    def finished(self) -> JobQuerySet:
        """Jobs that will not run again by themselves."""
        return self.filter(state__in=states.FINAL)

    def at(self, id: Any, generation: int) -> JobQuerySet:
        """The job, if it is still in this generation."""
        return self.filter(pk=id, generation=generation)


class Job(models.Model):
    """A unit of work and its state; see ``kjo_django.states`` for the state machine.

    ``attempts`` counts executions begun whose outcome is recorded; ``generation`` grows with every
    requeue, so a message of an earlier generation never runs.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    queue = models.CharField(_("queue"), max_length=100)
    handler = models.CharField(_("handler"), max_length=100)
    unique_id = models.CharField(
        _("unique id"),
        max_length=255,
        null=True,  # NULL keeps jobs without one out of the constraint
        blank=True,
        help_text=_("Given by the caller: one job per queue and unique id."),
    )
    key = models.CharField(
        _("key"),
        max_length=255,
        blank=True,
        default="",
        help_text=_("Jobs of one key run one at a time and in order."),
    )
    state = models.CharField(
        _("state"), max_length=10, choices=JobState.choices, default=JobState.PENDING
    )
    generation = models.PositiveIntegerField(_("generation"), default=1)
    attempts = models.PositiveIntegerField(_("attempts"), default=0)
    max_attempts = models.PositiveIntegerField(_("max attempts"))
    payload = models.BinaryField(_("payload"))
    content_type = models.CharField(_("content type"), max_length=50, default="application/json")
    headers = models.JSONField(
        _("headers"), null=True, blank=True, help_text=_("Text headers sent along (tracing ids).")
    )
    available_at = models.DateTimeField(_("available at"), default=timezone.now)
    expires_at = models.DateTimeField(
        _("expires at"), null=True, blank=True, help_text=_("Not started by then, never started.")
    )
    created_at = models.DateTimeField(_("created at"), default=timezone.now)
    queued_at = models.DateTimeField(_("queued at"), null=True, blank=True)
    started_at = models.DateTimeField(_("started at"), null=True, blank=True)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)
    lease_token = models.CharField(_("lease token"), max_length=64, blank=True, default="")
    lease_expires_at = models.DateTimeField(_("lease expires at"), null=True, blank=True)
    result = models.BinaryField(_("result"), null=True, blank=True)
    result_ttl = models.PositiveBigIntegerField(
        _("result lifetime"), help_text=_("Milliseconds a result or error is kept.")
    )
    result_expires_at = models.DateTimeField(_("result expires at"), null=True, blank=True)
    error = models.CharField(_("error"), max_length=MAX_ERROR_LENGTH, blank=True, default="")
    destination = models.CharField(
        _("destination"),
        max_length=249,
        blank=True,
        default="",
        help_text=_(
            "Of a record for others (an event, a redelivery): the topic its bytes are published "
            "to. Such a row is completed by that; nothing of ours consumes it."
        ),
    )
    topic = models.CharField(_("topic"), max_length=249, blank=True, default="")
    partition = models.IntegerField(_("partition"), null=True, blank=True)
    offset = models.BigIntegerField(_("offset"), null=True, blank=True)

    objects = JobQuerySet.as_manager()

    class Meta:
        db_table = "kjo_job"
        verbose_name = _("job")
        verbose_name_plural = _("jobs")
        ordering = ("-id",)
        default_permissions = ("view", "delete")
        permissions = (
            ("enqueue_job", _("Can enqueue jobs")),
            ("retry_job", _("Can requeue jobs")),
            ("cancel_job", _("Can cancel jobs")),
            ("view_payload", _("Can see payloads, results and tracebacks")),
        )
        constraints = (UniqueWhereGiven(fields=("queue", "unique_id"), name="kjo_job_unique_id"),)
        indexes = (
            # The relay's batch: due rows in order. Rows leave it as soon as they are queued.
            models.Index(
                fields=("available_at", "id"),
                name="kjo_job_due_idx",
                condition=Q(state__in=("pending", "failing")),
            ),
            # The same of one queue, behind however long a backlog of another.
            models.Index(
                fields=("queue", "available_at", "id"),
                name="kjo_job_queue_due_idx",
                condition=Q(state__in=("pending", "failing")),
            ),
            # Lists and counts by state: everything but the completed mass.
            models.Index(
                fields=("state", "id"), name="kjo_job_state_idx", condition=~Q(state="completed")
            ),
        )

    def __str__(self) -> str:
        return f"{self.handler} {self.id}"

    @property
    def message_id(self) -> str:
        """Identity of this generation's effects: the idempotency key a handler is given.

        A job born of a foreign message keeps that message's identity, so that a second copy of the
        message is recognised.
        """
        return message_id((self.headers or {}).get(ORIGIN_ID) or str(self.id), self.generation)

    @property
    def log_facts(self) -> dict[str, Any]:
        """What a log record about the job says in its ``extra``."""
        return log_facts(self)

    @property
    def arguments(self) -> Any:
        """The payload decoded for people; text saying why where it cannot be."""
        return loads_for_display(bytes(self.payload), self.content_type)

    def status_with(self, *, leased: bool, now: datetime | None = None) -> JobStatus:
        """Return the state people are shown, given whether a live lease exists."""
        now = now or timezone.now()
        if self.state in states.FINAL:
            return JobStatus(self.state)
        if leased or (self.lease_expires_at is not None and self.lease_expires_at > now):
            return JobStatus.PROCESSING
        if self.state == JobState.PENDING and self.available_at > now:
            return JobStatus.SCHEDULED
        if self.state == JobState.QUEUED and self.attempts == 0 and self.available_at > now:
            return JobStatus.SCHEDULED
        return JobStatus(self.state)

    @property
    def status(self) -> JobStatus:
        """The state people are shown, by this row alone: leased or not."""
        return self.status_with(leased=False)


class JobFailure(models.Model):
    """One failed attempt of a job: what went wrong, and where."""

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


def is_scheduled(now: datetime) -> Q:
    """Return the condition for rows that people are shown as scheduled: due later, and no retry."""
    states = Q(state=JobState.PENDING) | Q(state=JobState.QUEUED, attempts=0)
    return Q(available_at__gt=now) & states


def log_facts(job: Any) -> dict[str, Any]:
    """Return what a log record about a job says in its ``extra``."""
    return {"job_id": str(job.pk), "handler": job.handler, "queue": job.queue}


def transition(action: str, jobs: models.QuerySet[Job], **changes: Any) -> int:
    """Carry out ``action`` on the jobs whose state allows it, in one conditional UPDATE.

    Returns how many changed; the others were no longer in a state the action may start from.
    """
    changes.setdefault("state", states.RESULT_OF[action])
    if action == "requeue":
        changes.setdefault("generation", F("generation") + 1)
    return jobs.filter(state__in=states.TRANSITIONS[action]).update(**changes)
