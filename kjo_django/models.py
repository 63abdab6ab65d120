"""The tables: jobs and their failures, workflows, dead letters, markers of effects, workers,
queues, schedules, figures, and those of the database transport and the database coordination."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple, TypeVar

from django.core.checks import CheckMessage
from django.db import models, router
from django.db.models import F, Q
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.exceptions import MessageError
from kjo_django.ids import uuid7
from kjo_django.messages.headers import message_id
from kjo_django.messages.serializers import MAX_ERROR_LENGTH, loads_for_display
from kjo_django.states import JobState, JobStatus, OnFailure, WorkflowState
from kjo_django.timetables import Timetable

AnyModel = TypeVar("AnyModel", bound=models.Model)


class StoredModel(models.Model):
    """A model whose rows, and columns left out at first, are read again from the database they came
    from: a router may send other reads to a replica that does not have them yet."""

    class Meta:
        abstract = True

    def refresh_from_db(
        self,
        using: str | None = None,
        fields: Iterable[str] | None = None,
        from_queryset: models.QuerySet[Any] | None = None,
    ) -> None:
        """Read the row again; Django does so for each column that was left out."""
        using = using or self._state.db or router.db_for_write(type(self), instance=self)
        super().refresh_from_db(using, fields, from_queryset)


# --- Jobs -----------------------------------------------------------------------------------------


class UniqueWhereGiven(models.UniqueConstraint):
    """Unique among the rows that have a value; in SQL, no two NULLs are the same anyway.

    Where the database has partial indexes, rows without a value are not in this one: to write them
    does not cost an entry. Elsewhere it is the usual constraint, with the same meaning.

    :param fields: names; those that may be NULL decide.
    """

    def __eq__(self, other: object) -> bool:
        # Or migrations would not tell it from the usual constraint.
        return isinstance(other, UniqueWhereGiven) and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment] # as its base class

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        """For ``CREATE TABLE``."""
        return self._in(model, schema_editor).constraint_sql(model, schema_editor)

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """For a table that is there."""
        return self._in(model, schema_editor).create_sql(model, schema_editor)

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Of what ``create_sql`` made."""
        return self._in(model, schema_editor).remove_sql(model, schema_editor)

    def _in(self, model: Any, schema_editor: Any) -> models.UniqueConstraint:
        condition = None
        if schema_editor.connection.features.supports_partial_indexes:
            optional = [name for name in self.fields if model._meta.get_field(name).null]
            condition = models.Q(**{f"{name}__isnull": False for name in optional})
        return models.UniqueConstraint(fields=self.fields, name=self.name, condition=condition)


class PartialIndex(models.Index):
    """An index of the rows that meet a condition.

    Where the database has no partial indexes (MariaDB, MySQL), all rows are in it, behind the
    columns of the condition, so that those meant are found without the others.

    :param led_by: these columns.
    """

    def __init__(self, *, led_by: Sequence[str] = (), **options: Any) -> None:
        super().__init__(**options)
        self.led_by = tuple(led_by)

    def deconstruct(self) -> tuple[str, Any, dict[str, Any]]:
        """For migrations."""
        path, arguments, options = super().deconstruct()
        return path, arguments, {**options, "led_by": self.led_by} if self.led_by else options

    def create_sql(self, model: Any, schema_editor: Any, using: str = "", **more: Any) -> Any:
        """For ``CREATE INDEX``."""
        if schema_editor.connection.features.supports_partial_indexes:
            return super().create_sql(model, schema_editor, using, **more)
        fields = [*self.led_by, *self.fields]
        whole = models.Index(fields=fields, name=self.name)
        return whole.create_sql(model, schema_editor, using, **more)


def partially_indexed(model: type[AnyModel]) -> type[AnyModel]:
    """Return a model with ``PartialIndex``es, whose check leaves out Django's warning that MariaDB
    and MySQL have no such indexes: there they have another form."""
    every = model.check

    def check(_: type[AnyModel], /, **options: Any) -> list[CheckMessage]:
        return [one for one in every(**options) if one.id != "models.W037"]

    model.check = classmethod(check)  # type: ignore[method-assign,assignment]
    return model


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
            Q(state=JobState.QUEUED, available_at__lte=now or CLOCK.now())
            | Q(state__in=states.AWAITING_PUBLISH, available_at__lte=now or CLOCK.now())
        )

    def unfinished(self) -> JobQuerySet:
        """Jobs that have not ended, with those that wait for other steps of their workflow."""
        return self.filter(state__in=states.UNFINISHED)

    def finished(self) -> JobQuerySet:
        """Jobs that will not run again by themselves."""
        return self.filter(state__in=states.FINAL)

    def at(self, id: Any, generation: int) -> JobQuerySet:
        """The job, if it is still in this generation."""
        return self.filter(pk=id, generation=generation)


SHOWN_STATES = {
    "processing": "jobs with a live lease, which coordination knows. handle.status tells of one "
    "job, manage.py kjo_status of all; Job.objects.unfinished_due() has those that run or could",
    "scheduled": "pending jobs that are due later: filter(state='pending', available_at__gt=now)",
}
"""What to ask for instead of a state that is not stored."""


def _refuse_shown_states(conditions: Iterable[Any]) -> None:
    """Refuse a query for a state that no row has.

    :param conditions: names with values, and Qs.
    """
    for each in conditions:
        if isinstance(each, Q):
            _refuse_shown_states(each.children)
        elif isinstance(each, tuple) and each[0] in ("state", "state__exact", "state__in"):
            wanted = each[1] if isinstance(each[1], list | tuple | set) else each[1:]
            for name in SHOWN_STATES.keys() & set(wanted):
                instead = SHOWN_STATES[name]
                raise ValueError(f"No job has the state {name!r}: it is shown of {instead}.")


_JobManager = models.Manager.from_queryset(JobQuerySet)


class JobManager(_JobManager["Job"]):
    """Refuses to look for states that people are shown and no row has; without that, nothing is
    found and nothing says why."""

    def filter(self, *args: Any, **kwargs: Any) -> JobQuerySet:
        """As always."""
        _refuse_shown_states([*args, *kwargs.items()])
        return self.get_queryset().filter(*args, **kwargs)  # type: ignore[return-value]

    def exclude(self, *args: Any, **kwargs: Any) -> JobQuerySet:
        """As always."""
        _refuse_shown_states([*args, *kwargs.items()])
        return self.get_queryset().exclude(*args, **kwargs)  # type: ignore[return-value]


@partially_indexed
class Job(StoredModel):
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
    priority = models.SmallIntegerField(
        _("priority"),
        null=True,
        blank=True,
        help_text=_("From -100 to 100, the highest first; empty: 0."),
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
    worker = models.CharField(
        _("worker"),
        max_length=255,
        blank=True,
        default="",
        db_default="",  # the stores do not name the column, nor does the release before
        help_text=_(
            "The worker that completed it, kept where the job asks for it, as Django Tasks do."
        ),
    )
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
    stage = models.ForeignKey(
        "kjo_django.WorkflowStage",
        on_delete=models.DO_NOTHING,
        null=True,
        blank=True,
        related_name="jobs",
        db_index=False,  # the index below leaves out jobs of no workflow
        db_constraint=False,  # which would cost every job a check
        editable=False,
        verbose_name=_("stage"),
        help_text=_("Of a workflow's step."),
    )

    objects = JobManager()

    unique_rule: Any = None
    """An ``enqueue.unique.UniqueRule`` for the enqueue of an unsaved job; no column."""

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
            ("erase_personal_data", _("Can erase what is kept of a person")),
        )
        constraints = (UniqueWhereGiven(fields=("queue", "unique_id"), name="kjo_job_unique_id"),)
        indexes = (
            # The relay's batch: due rows in order. Rows leave it as soon as they are queued.
            PartialIndex(
                fields=("available_at", "id"),
                name="kjo_job_due_idx",
                led_by=("state",),
                condition=Q(state__in=("pending", "failing")),
            ),
            # The same of one queue, behind however long a backlog of another.
            PartialIndex(
                fields=("queue", "available_at", "id"),
                name="kjo_job_queue_due_idx",
                led_by=("state",),
                condition=Q(state__in=("pending", "failing")),
            ),
            # Due rows of queues with levels of priority: those of a higher one, behind however long
            # a backlog. Jobs of other queues that have no priority are not in it.
            PartialIndex(
                fields=("queue", "-priority", "available_at", "id"),
                name="kjo_job_priority_due_idx",
                led_by=("state",),
                condition=Q(state__in=("pending", "failing"), priority__isnull=False),
            ),
            # Lists and counts by state: everything but the completed mass.
            PartialIndex(
                fields=("state", "id"), name="kjo_job_state_idx", condition=~Q(state="completed")
            ),
            # The steps of a workflow; jobs of none are not in it.
            PartialIndex(
                fields=("stage", "id"), name="kjo_job_stage_idx", condition=Q(stage__isnull=False)
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
        return {"job_id": str(self.pk), "handler": self.handler, "queue": self.queue}

    @property
    def arguments(self) -> Any:
        """The payload decoded for people; text saying why where it cannot be."""
        return loads_for_display(bytes(self.payload), self.content_type)

    def status_with(self, *, leased: bool, now: datetime | None = None) -> JobStatus:
        """Return the state people are shown, given whether a live lease exists."""
        now = now or CLOCK.now()
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


class JobFailure(StoredModel):
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
    log = models.TextField(
        _("log"),
        blank=True,
        default="",
        db_default="",  # a worker of the release before does not name the column
        help_text=_("The last lines that were logged while it ran."),
    )
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

    @property
    def is_wait(self) -> bool:
        """Whether it is none of an attempt: the job waits for a worker that knows its handler."""
        is_of_it = all(getattr(self, name) == value for name, value in UNKNOWN_HANDLER.items())
        return is_of_it and self.retry_at is not None


UNKNOWN_HANDLER = {
    "code": "unknown_type",
    "error_type": f"{MessageError.__module__}.{MessageError.__qualname__}",
}
"""By what a failure is known that is none of an attempt: the job waits for a worker that knows its
handler."""


def is_scheduled(now: datetime) -> Q:
    """Return the condition for rows that people are shown as scheduled: due later, and no retry."""
    states = Q(state=JobState.PENDING) | Q(state=JobState.QUEUED, attempts=0)
    return Q(available_at__gt=now) & states


def transition(action: str, jobs: models.QuerySet[Job], **changes: Any) -> int:
    """Carry out ``action`` on the jobs whose state allows it, in one conditional UPDATE.

    Returns how many changed; the others were no longer in a state the action may start from.
    """
    changes.setdefault("state", states.RESULT_OF[action])
    if action == "requeue":
        changes.setdefault("generation", F("generation") + 1)
    return jobs.filter(state__in=states.TRANSITIONS[action]).update(**changes)


# --- Workflows ------------------------------------------------------------------------------------


@partially_indexed
class Workflow(StoredModel):
    """Jobs that wait for one another. Whoever changes what waits for what holds this row locked."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    name = models.CharField(_("name"), max_length=100)
    unique_id = models.CharField(
        _("unique id"),
        max_length=255,
        null=True,
        blank=True,
        help_text=_("Given by the caller: one workflow per name and unique id."),
    )
    state = models.CharField(
        _("state"), max_length=10, choices=WorkflowState.choices, default=WorkflowState.RUNNING
    )
    reason = models.CharField(
        _("reason"),
        max_length=500,
        blank=True,
        default="",
        help_text=_("Why it failed, was cancelled or is held."),
    )
    on_failure = models.CharField(
        _("on failure"), max_length=6, choices=OnFailure.choices, default=OnFailure.CANCEL
    )
    step_count = models.PositiveIntegerField(_("steps"), default=0)
    open_stage_count = models.PositiveIntegerField(
        _("open stages"), default=0, help_text=_("Stages with a step that has not ended.")
    )
    deadline = models.DateTimeField(
        _("deadline"), null=True, blank=True, help_text=_("Not ended by then, it fails.")
    )
    created_at = models.DateTimeField(_("created at"), default=timezone.now)
    finished_at = models.DateTimeField(_("finished at"), null=True, blank=True)

    class Meta:
        db_table = "kjo_workflow"
        verbose_name = _("workflow")
        verbose_name_plural = _("workflows")
        ordering = ("-id",)
        default_permissions = ("view",)
        permissions = (
            ("cancel_workflow", _("Can cancel workflows")),
            ("retry_workflow", _("Can retry workflows from their failed steps")),
        )
        constraints = (
            UniqueWhereGiven(fields=("name", "unique_id"), name="kjo_workflow_unique_id"),
        )
        indexes = (
            models.Index(fields=("state", "id"), name="kjo_workflow_state_idx"),
            PartialIndex(
                fields=("deadline",),
                name="kjo_workflow_deadline_idx",
                led_by=("state",),
                condition=Q(state__in=("running", "held"), deadline__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return f"{self.name} {self.unique_id or self.id}"


class WorkflowStage(StoredModel):
    """A node of a workflow's graph: steps of one handler that wait for the same steps, and that the
    same steps wait for. A step that has no such siblings is a stage of its own."""

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    workflow = models.ForeignKey(Workflow, on_delete=models.CASCADE, related_name="stages")
    handler = models.CharField(_("handler"), max_length=100)
    queue = models.CharField(_("queue"), max_length=100)
    on_failure = models.CharField(_("on failure"), max_length=6, choices=OnFailure.choices)
    step_count = models.PositiveIntegerField(_("steps"))
    argument = models.CharField(
        _("argument"),
        max_length=100,
        blank=True,
        default="",
        help_text=_("Is given the result of the one step of the source."),
    )
    source = models.ForeignKey(
        "self", on_delete=models.SET_NULL, null=True, blank=True, related_name="+", db_index=False
    )
    finished_at = models.DateTimeField(
        _("finished at"), null=True, blank=True, help_text=_("When its last step ended.")
    )

    class Meta:
        db_table = "kjo_workflow_stage"
        ordering = ("id",)
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.handler} ({self.step_count})"


class WorkflowEdge(StoredModel):
    """A stage waits for another. It is released once, when all its edges are met."""

    id = models.BigAutoField(primary_key=True)
    required = models.ForeignKey(
        WorkflowStage, on_delete=models.CASCADE, related_name="followers", db_index=False
    )
    stage = models.ForeignKey(
        WorkflowStage, on_delete=models.CASCADE, related_name="requirements", db_index=False
    )
    is_met = models.BooleanField(default=False)

    class Meta:
        db_table = "kjo_workflow_edge"
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("required", "stage"), name="kjo_workflow_edge_key"),
        )
        indexes = (models.Index(fields=("stage", "is_met"), name="kjo_workflow_edge_idx"),)

    def __str__(self) -> str:
        return f"{self.required_id} -> {self.stage_id}"


class WorkflowCount(StoredModel):
    """How the steps of a stage have ended. A large stage has several of these rows, so that the
    transactions that complete its steps seldom wait for each other."""

    id = models.BigAutoField(primary_key=True)
    stage = models.ForeignKey(WorkflowStage, on_delete=models.CASCADE, related_name="counts")
    open_count = models.IntegerField(default=0)
    failed_count = models.IntegerField(default=0)
    cancelled_count = models.IntegerField(default=0)

    class Meta:
        db_table = "kjo_workflow_count"
        default_permissions = ()

    def __str__(self) -> str:
        return f"{self.open_count} open"


# --- Dead letters ---------------------------------------------------------------------------------


class DeadLetterState(models.TextChoices):
    """What became of a dead letter: open until it is replayed or discarded."""

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
    payload. The generation tells the letter of the present failure from those of earlier ones.
    """
    return hashlib.sha256(f"job\0{job_id}\0{generation}".encode()).hexdigest()


@partially_indexed
class DeadLetter(StoredModel):
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
            PartialIndex(
                fields=("id",), name="kjo_dl_open_idx", led_by=("state",), condition=Q(state="open")
            ),
            # Groups of equal errors among the open ones.
            PartialIndex(
                fields=("fingerprint", "id"),
                name="kjo_dl_print_idx",
                led_by=("state",),
                condition=Q(state="open"),
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


# --- Markers of effects ---------------------------------------------------------------------------


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


class ProcessedEvent(StoredModel):
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


# --- Workers and queues ---------------------------------------------------------------------------


class Worker(StoredModel):
    """A process of ``kjo_consume`` or ``kjo_produce``; gone once its heartbeat is old."""

    class State(models.TextChoices):
        """What the process does now."""

        RUNNING = "running", _("Running")
        QUIET = "quiet", _("Quiet")
        STOPPING = "stopping", _("Stopping")
        STOPPED = "stopped", _("Stopped")

    class Request(models.TextChoices):
        """What an operator asked of the process, which does so within two seconds."""

        NONE = "", _("None")
        QUIET = "quiet", _("Start nothing more")
        STOP = "stop", _("Stop")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    name = models.CharField(_("name"), max_length=255)
    hostname = models.CharField(_("host name"), max_length=255)
    pid = models.PositiveIntegerField(_("process id"))
    queues = models.JSONField(_("queues"), default=list)
    state = models.CharField(
        _("state"), max_length=10, choices=State.choices, default=State.RUNNING
    )
    asked_to = models.CharField(
        _("asked to"),
        max_length=10,
        choices=Request.choices,
        blank=True,
        default=Request.NONE,
        db_column="wish",
    )
    release = models.CharField(
        _("release"), max_length=100, blank=True, default="", help_text=_("KJO['RELEASE'] there.")
    )
    concurrency = models.PositiveIntegerField(_("concurrency"), default=1)
    is_relaying = models.BooleanField(_("relaying"), default=False)
    processed_count = models.PositiveBigIntegerField(_("processed"), default=0)
    failed_count = models.PositiveBigIntegerField(_("failed"), default=0)
    in_flight_count = models.PositiveIntegerField(_("in flight"), default=0)
    partitions = models.JSONField(_("partitions"), default=list)
    rss_bytes = models.PositiveBigIntegerField(_("memory"), null=True, blank=True)
    last_error = models.CharField(_("last error"), max_length=500, blank=True, default="")
    started_at = models.DateTimeField(_("started at"), default=timezone.now)
    heartbeat_at = models.DateTimeField(_("heartbeat at"), default=timezone.now)
    clock_ahead = models.FloatField(
        _("clock ahead"),
        default=0.0,
        db_default=0.0,
        help_text=_("Seconds by which its host's clock is ahead of the database's."),
    )

    class Meta:
        db_table = "kjo_worker"
        verbose_name = _("worker")
        verbose_name_plural = _("workers")
        ordering = ("-id",)
        default_permissions = ("view",)
        permissions = (("control_worker", _("Can stop workers")),)

    def __str__(self) -> str:
        return self.name

    def is_alive(self, within: timedelta) -> bool:
        """Return whether its last heartbeat is no older than this, and it has not stopped."""
        return self.state != self.State.STOPPED and self.heartbeat_at >= CLOCK.now() - within


class QueueControl(StoredModel):
    """What an operator asked of a queue; running workers do so within two seconds.

    A queue without a row runs as configured.
    """

    queue = models.CharField(_("queue"), max_length=100, primary_key=True)
    is_paused = models.BooleanField(_("paused"), default=False)
    concurrency = models.PositiveIntegerField(
        _("concurrency"),
        null=True,
        blank=True,
        help_text=_("Groups of this queue one worker runs at once; empty: as configured."),
    )
    max_attempts = models.PositiveIntegerField(
        _("max attempts"),
        null=True,
        blank=True,
        help_text=_("Executions before a job is dead-lettered; empty: as each job was enqueued."),
    )
    backoff_base = models.PositiveIntegerField(
        _("back-off"),
        null=True,
        blank=True,
        help_text=_("Seconds before the second attempt; doubles each time. Empty: as configured."),
    )
    changed_by = models.CharField(_("changed by"), max_length=150, blank=True, default="")
    updated_at = models.DateTimeField(_("updated at"), auto_now=True)

    class Meta:
        db_table = "kjo_queue_control"
        verbose_name = _("queue control")
        verbose_name_plural = _("queue controls")
        ordering = ("queue",)
        default_permissions = ("view", "add", "change")
        permissions = (("pause_queue", _("Can pause and resume queues")),)

    def __str__(self) -> str:
        return self.queue


# --- Schedules ------------------------------------------------------------------------------------


@partially_indexed
class Schedule(StoredModel):
    """A job that is enqueued again and again: at the ticks of a cron expression or an interval, or
    once at a moment.

    A tick is one job. The transaction that stores the job moves ``next_at`` on, so a tick is
    neither lost nor stored twice. A schedule has ticks while it is enabled (by the code that
    declares it) and not paused (by an operator).
    """

    class CatchUp(models.TextChoices):
        """What becomes of ticks that nobody was there for."""

        NONE = "none", _("None of them")
        ONE = "one", _("The latest")
        ALL = "all", _("All of them")

    class Overlap(models.TextChoices):
        """What becomes of a tick while the job of the last one is open."""

        ALLOW = "allow", _("Jobs may overlap")
        SKIP = "skip", _("The tick is skipped")

    class Source(models.TextChoices):
        """Who declares the schedule."""

        CODE = "code", _("Code")
        ADMIN = "admin", _("Operators")

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    created_at = models.DateTimeField(_("created at"), default=timezone.now)
    updated_at = models.DateTimeField(_("updated at"), default=timezone.now)
    name = models.CharField(_("name"), max_length=100, unique=True)
    job = models.CharField(_("job"), max_length=100, help_text=_("The name of the handler."))
    payload = models.JSONField(_("payload"), default=dict, blank=True)
    cron = models.CharField(
        _("cron expression"),
        max_length=100,
        blank=True,
        default="",
        help_text=_("Minute, hour, day of month, month, day of week; or a name such as @daily."),
    )
    every = models.PositiveIntegerField(
        _("interval"), null=True, blank=True, help_text=_("Seconds between two ticks.")
    )
    at = models.DateTimeField(
        _("moment"), null=True, blank=True, help_text=_("When a single tick is due.")
    )
    timezone = models.CharField(
        _("time zone"),
        max_length=64,
        blank=True,
        default="",
        help_text=_("Time zone of the cron expression. Empty: the project's."),
    )
    queue = models.CharField(
        _("queue"), max_length=100, blank=True, default="", help_text=_("Empty: the job's own.")
    )
    catch_up = models.CharField(
        _("missed ticks"), max_length=4, choices=CatchUp.choices, default=CatchUp.ONE
    )
    overlap = models.CharField(
        _("overlap"), max_length=5, choices=Overlap.choices, default=Overlap.ALLOW
    )
    jitter = models.PositiveIntegerField(
        _("jitter"), default=0, help_text=_("A job starts up to this many seconds after its tick.")
    )
    expires_after = models.PositiveIntegerField(
        _("expires after"),
        null=True,
        blank=True,
        help_text=_("A job that has not started this many seconds after its tick is not run."),
    )
    starts_at = models.DateTimeField(_("starts at"), null=True, blank=True)
    ends_at = models.DateTimeField(_("ends at"), null=True, blank=True)
    source = models.CharField(
        _("source"), max_length=5, choices=Source.choices, default=Source.ADMIN
    )
    is_enabled = models.BooleanField(
        _("enabled"), default=True, help_text=_("No: the code does not declare it any more.")
    )
    is_paused = models.BooleanField(_("paused"), default=False)
    declaration = models.JSONField(
        _("declaration"), null=True, blank=True, help_text=_("The columns as the code has them.")
    )
    overridden = models.JSONField(
        _("overridden"),
        default=list,
        blank=True,
        help_text=_("Columns that an operator has changed; the code does not change them back."),
    )
    next_at = models.DateTimeField(
        _("next tick"), null=True, blank=True, help_text=_("Empty: there is none.")
    )
    last_at = models.DateTimeField(_("last tick"), null=True, blank=True)
    last_job_id = models.UUIDField(
        _("last job"), null=True, blank=True, help_text=_("The job of the last tick that has one.")
    )
    skipped_count = models.PositiveBigIntegerField(
        _("skipped"), default=0, help_text=_("Ticks without a job: caught up with, or overlapping.")
    )
    stored_count = models.PositiveBigIntegerField(_("ticks with a job"), default=0, db_default=0)
    late_count = models.PositiveBigIntegerField(_("late ticks"), default=0, db_default=0)
    """Ticks whose job was stored more than a second after them."""
    problem = models.CharField(
        _("problem"),
        max_length=500,
        blank=True,
        default="",
        help_text=_("Why the last due tick could not be stored. It waits."),
    )
    changed_by = models.CharField(_("changed by"), max_length=150, blank=True, default="")

    class Meta:
        db_table = "kjo_schedule"
        verbose_name = _("schedule")
        verbose_name_plural = _("schedules")
        ordering = ("name",)
        permissions = (
            ("pause_schedule", _("Can pause and resume schedules")),
            ("run_schedule", _("Can run schedules now")),
        )
        indexes = (
            # Each look at what is due, and at when something will be.
            PartialIndex(
                fields=("next_at",),
                name="kjo_schedule_due_idx",
                condition=Q(is_enabled=True, is_paused=False, next_at__isnull=False),
            ),
        )

    def __str__(self) -> str:
        return self.name

    @property
    def timetable(self) -> Timetable:
        """The ticks of the schedule."""
        return Timetable(
            cron=self.cron,
            every=None if self.every is None else timedelta(seconds=self.every),
            at=self.at,
            zone=self.timezone,
            starts_at=self.starts_at,
            ends_at=self.ends_at,
        )


# --- Limits ---------------------------------------------------------------------------------------


class LimitControl(StoredModel):
    """What an operator asked of a limit; running workers do so within two seconds.

    ``name`` is ``queue:<queue>`` or ``job:<registered name>``. What is empty is as declared.
    """

    name = models.CharField(_("name"), max_length=255, primary_key=True)
    rate = models.CharField(
        _("rate"),
        max_length=40,
        blank=True,
        default="",
        help_text=_("How many jobs may start per unit of time, for example 5/s or 100/m."),
    )
    burst = models.PositiveIntegerField(
        _("burst"),
        null=True,
        blank=True,
        help_text=_("How many jobs may start at once after a time without any. Empty: 1."),
    )
    concurrency = models.PositiveIntegerField(
        _("concurrency"),
        null=True,
        blank=True,
        help_text=_("How many jobs may run at once, in all workers together."),
    )
    changed_by = models.CharField(_("changed by"), max_length=150, blank=True, default="")
    updated_at = models.DateTimeField(_("updated at"), auto_now=True)

    class Meta:
        db_table = "kjo_limit_control"
        verbose_name = _("limit")
        verbose_name_plural = _("limits")
        ordering = ("name",)
        default_permissions = ("view", "add", "change", "delete")

    def __str__(self) -> str:
        return self.name


NEVER = datetime(8000, 1, 1, tzinfo=UTC)
"""When a job is due that is queued for a limit."""


class HeldJob(StoredModel):
    """A job that waits for a limit: the most urgent first, then in the order of arrival.

    Its message is settled; its row is not due until it is let go. A job that has started and was
    paused has a place, too, as the next of its key.

    There may be a row of a job that has ended, or was requeued, since: whoever meets it deletes it.
    """

    id = models.BigAutoField(primary_key=True)
    job_id = models.UUIDField(_("job"), unique=True)
    generation = models.PositiveIntegerField(_("generation"), default=1)
    limit = models.CharField(_("limit"), max_length=255)
    queue = models.CharField(_("queue"), max_length=100)
    key = models.CharField(_("key"), max_length=255, null=True, blank=True)
    rank = models.SmallIntegerField(_("rank"), default=0, help_text=_("The negative priority."))
    is_released = models.BooleanField(_("released"), default=False)
    waiting_since = models.DateTimeField(_("waiting since"), default=timezone.now)

    class Meta:
        db_table = "kjo_held_job"
        verbose_name = _("held job")
        verbose_name_plural = _("held jobs")
        ordering = ("rank", "id")
        default_permissions = ("view",)
        indexes = (
            # The first in line of a limit.
            models.Index(fields=("limit", "is_released", "rank", "id"), name="kjo_held_idx"),
            # The first in line of a key.
            models.Index(fields=("queue", "key", "rank", "id"), name="kjo_held_key_idx"),
        )

    def __str__(self) -> str:
        return f"{self.job_id} {self.limit}"


class _NoRows(models.Manager[Any]):
    """Finds none, without a table to look into: `dumpdata` asks each model for its rows."""

    def get_queryset(self) -> models.QuerySet[Any]:
        return super().get_queryset().none()


class Dashboard(models.Model):
    """The operations screen: an address in the admin and a permission, but no table."""

    objects = _NoRows()

    class Meta:
        managed = False
        base_manager_name = "objects"
        verbose_name = _("dashboard")
        verbose_name_plural = _("dashboard")
        default_permissions = ()
        permissions = (("view_dashboard", _("Can see the dashboard")),)

    def __str__(self) -> str:
        return str(_("Dashboard"))


# --- Figures --------------------------------------------------------------------------------------


BOUNDS = 24
"""Upper bounds of 1 ms · 2^n, n below this; the last stands for everything above."""
UPPER_MILLISECONDS = [2**n for n in range(BOUNDS - 1)]
"""The bounds themselves: what is bisected into them has the histogram's index."""


class Figures(StoredModel):
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
    unused_permit_count = models.PositiveBigIntegerField(
        _("permits not used"),
        default=0,
        db_default=0,
        help_text=_("Permits of a rate whose job did not start in time."),
    )
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


# --- The database transport and the database coordination -----------------------------------------
#
# With Kafka and Redis configured these tables stay empty.


class TransportSubscription(StoredModel):
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


@partially_indexed
class TransportMessage(StoredModel):
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
    rank = models.SmallIntegerField(
        default=0,
        db_default=0,  # a worker of the release before does not name the column
        help_text="The negative priority: records of a lower rank are claimed first.",
    )
    published_at = models.DateTimeField(default=timezone.now)
    available_at = models.DateTimeField(default=timezone.now)
    lease_token = models.CharField(max_length=64, blank=True, default="")
    lease_expires_at = models.DateTimeField(null=True)
    deliveries = models.PositiveIntegerField(
        default=0,
        db_default=0,
        help_text="Times it was begun without an outcome, but for the run that goes on.",
    )

    class Meta:
        db_table = "kjo_transport_message"
        default_permissions = ()
        indexes = (
            # Claiming: the next rows of a group's topic, in order.
            models.Index(
                fields=("topic", "consumer_group", "rank", "id"), name="kjo_message_rank_idx"
            ),
            # Renewing, acknowledging and asking which keys are in flight.
            PartialIndex(
                fields=("lease_token", "key_hash"),
                name="kjo_message_lease_idx",
                condition=~Q(lease_token=""),
            ),
        )

    def __str__(self) -> str:
        return f"{self.topic} {self.id}"


class TransportRun(StoredModel):
    """The messages that a consumer has begun together. One row for all of them costs less than a
    write to each. What has ended since is no longer leased to the consumer, or is overwritten."""

    consumer = models.CharField(max_length=64, help_text="The token of its leases.")
    number = models.PositiveIntegerField(help_text="Of those that go on at the same time.")
    worker = models.CharField(max_length=64, help_text="The token of its worker.")
    messages = models.TextField(help_text="As JSON: the id of each message by that of its row.")
    begun_at = models.DateTimeField()

    class Meta:
        db_table = "kjo_transport_run"
        default_permissions = ()
        constraints = (
            models.UniqueConstraint(fields=("consumer", "number"), name="kjo_transport_run_key"),
        )

    def __str__(self) -> str:
        return f"{self.consumer} {self.number}"


class Lease(StoredModel):
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


class RateWindow(StoredModel):
    """The starts that a rate has counted lately."""

    name = models.CharField(max_length=255, primary_key=True)
    starts = models.TextField(blank=True, default="")
    """As ``coordination.starts.Starts`` writes them. Whoever changes them names what was there."""
    expires_at = models.DateTimeField()

    class Meta:
        db_table = "kjo_rate_window"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name


class Mark(StoredModel):
    """A small value that expires."""

    name = models.CharField(max_length=255, primary_key=True)
    value = models.CharField(max_length=255)
    expires_at = models.DateTimeField()

    class Meta:
        db_table = "kjo_mark"
        default_permissions = ()

    def __str__(self) -> str:
        return self.name
