"""The table of actions: what operators can do to jobs, dead letters, queues, workers and
schedules.

Admin, dashboard, REST API and the internal jobs of ``operations.bulk`` are built from its entries.
Each of them checks the permission of the entry. To add an action, write an operation and an entry.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from django.core.exceptions import PermissionDenied
from django.db.models import QuerySet
from django.utils.translation import gettext_lazy as _
from django.utils.translation import gettext_noop

from kjo_django import states
from kjo_django.enqueue.definition import known_queue
from kjo_django.limits import control
from kjo_django.models import DeadLetter, Schedule
from kjo_django.operations import (
    dead_letters,
    jobs,
    queues,
    rescheduling,
    schedules,
    workers,
    workflows,
)
from kjo_django.operations.dead_letters import DeadLetterFilter, ReplayReport
from kjo_django.operations.internal import UserActor
from kjo_django.operations.jobs import Outcomes
from kjo_django.operations.rows import RATE_MAX, RATE_MIN, Observer, Progress, checked_rate
from kjo_django.operations.translations import ngettext_lazy
from kjo_django.refusals import RefusedError
from kjo_django.retries import LONGEST_DELAY
from kjo_django.states import JobStatus, WorkflowState

SYNCHRONOUS_LIMIT = 1000
"""Most rows that a request changes itself."""
MAX_NOTE = 300
MAX_NAME = 100
"""Characters of a queue's name."""

Report = Outcomes | ReplayReport


class Subject(enum.StrEnum):
    """The kind of rows that an action changes."""

    JOBS = "jobs"
    LETTERS = "letters"
    QUEUES = "queues"
    WORKERS = "workers"
    WORKFLOWS = "workflows"
    SCHEDULES = "schedules"
    LIMITS = "limits"


VIEW_PERMISSIONS: Mapping[Subject, str] = {
    Subject.JOBS: "view_job",
    Subject.LETTERS: "view_deadletter",
    Subject.QUEUES: "view_queuecontrol",
    Subject.WORKERS: "view_worker",
    Subject.WORKFLOWS: "view_workflow",
    Subject.SCHEDULES: "view_schedule",
    Subject.LIMITS: "view_limitcontrol",
}
"""The permissions to see the rows."""


class Surface(enum.Flag):
    """Where an action is offered."""

    ADMIN = enum.auto()
    DASHBOARD = enum.auto()
    REST = enum.auto()
    BULK = enum.auto()
    """An internal job, for all rows that a filter finds."""


SCREENS = Surface.ADMIN | Surface.DASHBOARD


class Kind(enum.Enum):
    """The type of an input."""

    TEXT = enum.auto()
    QUEUE = enum.auto()
    """The name of a queue."""
    FLAG = enum.auto()
    WHOLE = enum.auto()
    NUMBER = enum.auto()
    JSON = enum.auto()
    CHOICE = enum.auto()
    """One of ``choices``."""
    MOMENT = enum.auto()
    """A date and time with its offset."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A value that an action takes, beside its rows."""

    name: str
    kind: Kind
    label: Any
    help: Any = ""
    """The explanation in the OpenAPI schema, and on screens if there is no hint."""
    hint: Any = ""
    is_required: bool = False
    is_nullable: bool = False
    """Whether None is a value. An empty field of a form is None."""
    minimum: float | None = None
    maximum: float | None = None
    max_length: int | None = None
    choices: tuple[tuple[str, Any], ...] = ()
    """Values and labels."""
    is_for_many: bool = False
    """Whether it is for selections and filters only, not for one row."""
    is_in_lists: bool = False
    """Whether the admin's lists have a field for it."""
    check: Callable[[Any], Any] | None = None
    """Returns the value to use; raises ValueError for a wrong value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestSchema:
    """The description of an action in the REST API, beside its inputs."""

    body: str = ""
    """Name of the body's component; if empty, it is made of the action's name."""
    about: str = ""
    """Description of the body's component."""
    about_many: str = ""
    """Description of the body's component for a selection."""
    about_bulk: str = ""
    """Description of the endpoint for a selection."""
    method: str = "POST"
    path: str | None = None
    """The last part of the address; if None, it is made of the action's name."""
    answers: Mapping[int, str] = field(default_factory=dict)
    """The meanings of the statuses of success."""
    problems: tuple[int, ...] = (404, 409, 503)
    example: tuple[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One thing that operators can do."""

    name: str
    subject: Subject
    label: Any
    """The text of the button."""
    about: str
    """The description in the OpenAPI schema."""
    permission: str
    """Codename of the permission that it takes, beside the one to see the rows."""
    operation: Callable[..., Report]
    """Called with the rows, and by keyword with ``actor``, ``on_changed``, the inputs and, in an
    internal job, ``progress``."""
    log: str
    """The entry in the log of each changed row. Names of inputs in braces are replaced."""
    done: Callable[[int], str]
    """Makes the message with the number of changed rows."""
    result: str = ""
    """The outcome of a changed row."""
    harmless: frozenset[str] = frozenset()
    """Outcomes of rows that needed no change."""
    inputs: tuple[Input, ...] = ()
    further_permissions: tuple[str, ...] = ()
    surfaces: Surface = Surface.ADMIN | Surface.DASHBOARD | Surface.REST
    question: Any = ""
    """The dashboard's question before a change of many rows, or of one that asks first."""
    applies: Callable[[str], bool] = lambda state: True
    """Whether a row in this state has its button."""
    is_dangerous: bool = False
    """Whether its button is coloured as a warning."""
    is_confirmed: bool = False
    """Whether the dashboard asks its question before it changes one row."""
    rest: RestSchema = field(default_factory=RestSchema)

    @property
    def key(self) -> str:
        """The name that is unique among all actions; payloads of internal jobs contain it."""
        return self.name if self.subject == Subject.JOBS else f"{self.name}_{self.subject}"

    @property
    def permissions(self) -> tuple[str, ...]:
        """The codenames of all permissions that it takes."""
        return (VIEW_PERMISSIONS[self.subject], self.permission, *self.further_permissions)

    @property
    def is_bulk(self) -> bool:
        """Whether an internal job may carry it out."""
        return Surface.BULK in self.surfaces

    @property
    def has_required_inputs(self) -> bool:
        """Whether it cannot be done by a button alone."""
        return any(each.is_required for each in self.inputs)

    @property
    def asks_first(self) -> bool:
        """Whether the dashboard shows a page of its own before it changes one row."""
        return self.is_confirmed or self.has_required_inputs

    def is_allowed(self, user: Any) -> bool:
        """Whether a user has its permissions, beside the one to see the rows.

        The page or endpoint that shows the rows checks that one.
        """
        needed = (self.permission, *self.further_permissions)
        return all(user.has_perm(f"kjo_django.{codename}") for codename in needed)

    def checked(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the inputs with checked values.

        :raises ValueError: an input is missing, unknown or wrong.
        """
        known = {each.name: each for each in self.inputs}
        unknown = sorted(inputs.keys() - known.keys())
        if unknown:
            raise ValueError(f"{self.key} takes no {', '.join(unknown)}")
        values = dict(inputs)
        for name, each in known.items():
            if each.check is not None and (each.is_required or name in values):
                values[name] = each.check(values.get(name))
            if each.is_required and name not in values:
                raise ValueError(f"{self.key} needs {name}")
        return values

    def log_entry(self, inputs: Mapping[str, Any]) -> str:
        """Return the text of the log entry of each changed row."""
        if "{inputs}" in self.log:
            said = ", ".join(f"{name}: {value}" for name, value in inputs.items())
            return self.log.replace("{inputs}", said)
        return self.log.format_map({each.name: inputs.get(each.name) for each in self.inputs})

    def perform(
        self,
        selection: Any,
        *,
        actor: str,
        on_changed: Observer | None = None,
        progress: Progress | None = None,
        **inputs: Any,
    ) -> Report:
        """Carry the action out on the rows of a selection, and return its report.

        :param selection: rows or their primary keys, a queryset, or a ``DeadLetterFilter``.
        :param actor: who asks; a ``UserActor`` needs the permissions.
        :param on_changed: called with the rows of each chunk inside its transaction.
        :raises PermissionDenied: the user lacks a permission.
        :raises ValueError: an input is wrong.
        """
        if isinstance(actor, UserActor) and not self.is_allowed(actor.user):
            raise PermissionDenied
        values = self.checked(inputs)
        if self.subject == Subject.LETTERS and not isinstance(
            selection, QuerySet | DeadLetterFilter
        ):
            selection = DeadLetterFilter(ids=[getattr(row, "pk", row) for row in selection])
        options = {} if progress is None else {"progress": progress}
        return self.operation(selection, actor=actor, on_changed=on_changed, **values, **options)


# --- Operations with other arguments or results than the table needs ------------------------------


def _discard_of_jobs(selection: Any, *, note: str, **options: Any) -> Outcomes:
    if isinstance(selection, QuerySet):
        selection = selection.order_by().values("pk")
    return _discard(DeadLetter.objects.filter(job__in=selection), note=note, **options)


def _discard(selection: Any, *, note: str, **options: Any) -> Outcomes:
    count = dead_letters.discard(selection, note=note, **options)
    return Outcomes({"discarded": count} if count else {}, count)


def _edit_schedules(selection: Iterable[Any], **options: Any) -> Outcomes:
    outcomes = Outcomes()
    for row in selection:
        known = row if isinstance(row, Schedule) else Schedule(pk=row)
        changed = schedules.edit(known, **options)
        outcomes.add("changed" if changed else "unchanged")
        outcomes.changed_count += bool(changed)
    return outcomes


def _edit_and_replay(selection: Any, *, payload: bytes, **options: Any) -> ReplayReport:
    (id,) = selection.ids
    return dead_letters.edit_and_replay(id, payload, **options)


def _each_queue(change: Callable[..., bool]) -> Callable[..., Outcomes]:
    def change_each(selection: Iterable[Any], **options: Any) -> Outcomes:
        outcomes = Outcomes()
        for row in selection:
            is_changed = change(str(getattr(row, "pk", row)), **options)
            outcomes.add("changed" if is_changed else "unchanged")
            outcomes.changed_count += is_changed
        return outcomes

    return change_each


# --- Inputs ---------------------------------------------------------------------------------------


def _note(value: Any) -> str:
    text = str(value or "").strip()
    if not text:
        raise RefusedError(gettext_noop("A note is needed that says why they are discarded"))
    return text[:MAX_NOTE]


NOTE = Input(
    name="note",
    kind=Kind.TEXT,
    label=_("Note"),
    help=_("For whoever finds it later."),
    hint=_("Why these will not be replayed."),
    is_required=True,
    max_length=MAX_NOTE,
    is_in_lists=True,
    check=_note,
)
FORCE = Input(
    name="force",
    kind=Kind.FLAG,
    label=_("Also replay what was replayed too often or has taken effect"),
    help=_("Also what was replayed too often, has taken effect, or whose job has moved on."),
    hint=_("These get a new id, so they take effect again."),
)
RATE = Input(
    name="rate",
    kind=Kind.NUMBER,
    label=_("Most per second"),
    help=_("Most per second."),
    hint=_("Empty: as fast as possible."),
    is_nullable=True,
    minimum=RATE_MIN,
    maximum=RATE_MAX,
    is_for_many=True,
    check=checked_rate,
)
LIMIT = Input(
    name="limit",
    kind=Kind.WHOLE,
    label=_("Limit"),
    help=_("Only this many, the oldest first, within this request."),
    hint=_("The oldest first. Empty: all."),
    is_nullable=True,
    minimum=1,
    maximum=SYNCHRONOUS_LIMIT,
    is_for_many=True,
)


def _limit_of_queue(name: str, label: Any, help: Any) -> Input:
    _unit, most = queues.LIMITS[name]
    return Input(
        name=name,
        kind=Kind.WHOLE,
        label=label,
        help=help,
        is_nullable=True,
        minimum=1,
        maximum=most,
    )


def _of_schedules(name: str, kind: Kind, **options: Any) -> Input:
    column: Any = Schedule._meta.get_field(name)
    choices = tuple(column.choices or ()) if kind is Kind.CHOICE else ()
    return Input(
        name=name,
        kind=kind,
        label=column.verbose_name,
        help=column.help_text,
        max_length=column.max_length if kind is Kind.TEXT else None,
        choices=choices,
        is_nullable=True,
        **options,
    )


SCHEDULE_INPUTS = (
    _of_schedules("job", Kind.TEXT),
    _of_schedules("payload", Kind.JSON),
    _of_schedules("cron", Kind.TEXT),
    _of_schedules("timezone", Kind.TEXT),
    _of_schedules("every", Kind.WHOLE, minimum=1),
    _of_schedules("at", Kind.MOMENT),
    _of_schedules("queue", Kind.TEXT),
    _of_schedules("catch_up", Kind.CHOICE),
    _of_schedules("overlap", Kind.CHOICE),
    _of_schedules("jitter", Kind.WHOLE, minimum=0, maximum=86_400),
    _of_schedules("expires_after", Kind.WHOLE, minimum=1),
    _of_schedules("starts_at", Kind.MOMENT),
    _of_schedules("ends_at", Kind.MOMENT),
)
"""What says when a schedule runs what."""


# --- The table ------------------------------------------------------------------------------------


def _is_open(state: str) -> bool:
    return state not in states.FINAL


def _is_open_workflow(state: str) -> bool:
    return state in states.OPEN_WORKFLOWS


def _waits(state: str) -> bool:
    return _is_open(state) and state not in (JobStatus.PROCESSING, JobStatus.WAITING)


_EVERYWHERE = SCREENS | Surface.REST | Surface.BULK

_of_waiting_job = functools.partial(
    Action,
    subject=Subject.JOBS,
    permission="retry_job",
    harmless=frozenset({"unchanged"}),
    applies=_waits,
    surfaces=_EVERYWHERE,
)
_of_queue = functools.partial(
    Action,
    subject=Subject.QUEUES,
    permission="pause_queue",
    result="changed",
    rest=RestSchema(problems=(404,)),
)
_of_worker = functools.partial(
    Action,
    subject=Subject.WORKERS,
    permission="control_worker",
    result="asked",
    harmless=frozenset({"unchanged"}),
    rest=RestSchema(problems=(404, 409)),
)

_of_limit = functools.partial(
    Action,
    subject=Subject.LIMITS,
    permission="change_limitcontrol",
    result="changed",
    done=ngettext_lazy("%d limit was changed.", "%d limits were changed."),
)
_of_schedule = functools.partial(
    Action,
    subject=Subject.SCHEDULES,
    result="changed",
    harmless=frozenset({"unchanged"}),
    rest=RestSchema(problems=(404, 409)),
)
_of_workflow = functools.partial(
    Action,
    subject=Subject.WORKFLOWS,
    harmless=frozenset({"unchanged"}),
    surfaces=Surface.DASHBOARD | Surface.REST,
)

TABLE: tuple[Action, ...] = (
    _of_waiting_job(
        name="run_now",
        label=_("Run now"),
        question=_("Let these jobs run now?"),
        about="Let a scheduled job, or a failing one that waits for its next attempt, run now.",
        operation=rescheduling.run_now,
        log="Run now.",
        done=ngettext_lazy("%d job is due now.", "%d jobs are due now."),
        result="due",
        rest=RestSchema(answers={200: "`due`: it was due later; `unchanged`: it was due already."}),
    ),
    Action(
        name="requeue",
        subject=Subject.JOBS,
        label=_("Requeue"),
        question=_("Give these jobs a new run, with all their attempts?"),
        about="Give a job a new run with all its attempts, due now; its dead letters are closed.",
        permission="retry_job",
        operation=jobs.requeue,
        log="Requeued.",
        done=ngettext_lazy("%d job was requeued.", "%d jobs were requeued."),
        result="requeued",
        applies=lambda state: state != JobStatus.WAITING,
        surfaces=_EVERYWHERE,
    ),
    _of_waiting_job(
        name="change_queue",
        label=_("Move to another queue"),
        question=_("Move these jobs to another queue?"),
        about="Move an open job to another queue; its idempotency key is another one there.",
        operation=rescheduling.change_queue,
        log="Moved to {queue}.",
        done=ngettext_lazy("%d job was moved.", "%d jobs were moved."),
        result="moved",
        inputs=(
            Input(
                name="queue",
                kind=Kind.QUEUE,
                label=_("Queue"),
                help=_("Its workers must have the job's handler."),
                is_required=True,
                max_length=MAX_NAME,
                is_in_lists=True,
                check=known_queue,
            ),
        ),
        rest=RestSchema(
            about="Where to.", answers={200: "`moved`, or `unchanged`: it was in that queue."}
        ),
    ),
    _of_waiting_job(
        name="change_expiry",
        label=_("Change expiry"),
        question=_("Change until when these jobs may be started?"),
        about="Change until when an open job may be started; with null, it never expires.",
        operation=rescheduling.change_expiry,
        log="Expiry changed: {inputs}.",
        done=ngettext_lazy(
            "The expiry of %d job was changed.", "The expiry of %d jobs was changed."
        ),
        result="changed",
        inputs=(
            Input(
                name="expires_in",
                kind=Kind.NUMBER,
                label=_("Expires in (seconds; empty: never)"),
                help=_("Seconds from now; null: it never expires."),
                hint=_("Counted from now."),
                is_required=True,
                is_nullable=True,
                minimum=1,
                maximum=LONGEST_DELAY.total_seconds(),
                is_in_lists=True,
            ),
        ),
        rest=RestSchema(
            about="Until when the job may be started.",
            answers={200: "`changed`, or `unchanged`: it expires then already."},
            problems=(404, 409),
        ),
    ),
    Action(
        name="cancel",
        subject=Subject.JOBS,
        label=_("Cancel"),
        question=_("Cancel these jobs?"),
        about="Cancel an open job, or with `abort` ask a running one to end.",
        permission="cancel_job",
        operation=jobs.cancel,
        log="Cancelled.",
        done=ngettext_lazy("%d job was cancelled.", "%d jobs were cancelled."),
        result="cancelled",
        inputs=(
            Input(
                name="abort",
                kind=Kind.FLAG,
                label=_("Also ask running ones to end"),
                help=_("Ask it to end if it is running; without, that is refused."),
            ),
        ),
        applies=_is_open,
        is_dangerous=True,
        surfaces=_EVERYWHERE,
        rest=RestSchema(
            about="How to cancel.",
            answers={200: "It is cancelled.", 202: "It is running, and was asked to end."},
        ),
    ),
    Action(
        name="abort",
        subject=Subject.JOBS,
        label=_("Ask it to abort"),
        about="Ask a running job to end.",
        permission="cancel_job",
        operation=functools.partial(jobs.cancel, abort=True),
        log="Cancelled, or asked to abort.",
        done=ngettext_lazy("%d job was cancelled.", "%d jobs were cancelled."),
        result="cancelled",
        applies=lambda state: state == JobStatus.PROCESSING,
        is_dangerous=True,
        surfaces=Surface.DASHBOARD,
    ),
    Action(
        name="discard",
        subject=Subject.JOBS,
        label=_("Discard dead letters"),
        about="Close the dead letters of jobs that have failed, without running these again.",
        permission="discard_dlq",
        operation=_discard_of_jobs,
        log="Discarded: {note}",
        done=ngettext_lazy("%d dead letter was discarded.", "%d dead letters were discarded."),
        result="discarded",
        inputs=(NOTE,),
        applies=lambda state: state == JobStatus.FAILED,
        is_dangerous=True,
        surfaces=Surface.BULK,
    ),
    Action(
        name="replay",
        subject=Subject.LETTERS,
        label=_("Replay"),
        question=_("Replay these dead letters?"),
        about="Run again what died: its job is requeued, or its message published as it was.",
        permission="replay_dlq",
        operation=dead_letters.replay,
        log="Replayed.",
        done=ngettext_lazy("%d dead letter was replayed.", "%d dead letters were replayed."),
        inputs=(FORCE, RATE, LIMIT),
        surfaces=_EVERYWHERE,
        rest=RestSchema(
            about="How to replay.",
            about_many="Which dead letters to replay, and how.",
            about_bulk="Replay the open dead letters a selection takes, oldest first.",
        ),
    ),
    Action(
        name="edit_and_replay",
        subject=Subject.LETTERS,
        label=_("Edit and replay"),
        about="Replay a dead letter with another payload; it keeps the one it died with. Where it "
        "says `[redacted]`, what the dead letter has there is kept.",
        permission="replay_dlq",
        further_permissions=("edit_payload",),
        operation=_edit_and_replay,
        log="Replayed with another payload.",
        done=ngettext_lazy(
            "Replayed with the payload you gave. It keeps the one it died with.",
            "%d dead letters were replayed.",
        ),
        inputs=(
            Input(
                name="payload",
                kind=Kind.JSON,
                label=_("Payload"),
                help=_("What the handler is given instead."),
                is_required=True,
            ),
        ),
        surfaces=Surface.DASHBOARD | Surface.REST,
        rest=RestSchema(
            body="EditBody",
            about="The repaired payload.",
            example=(
                "The field that was missing",
                {"payload": {"order_id": 7, "customer_id": 3}},
            ),
        ),
    ),
    Action(
        name="discard",
        subject=Subject.LETTERS,
        label=_("Discard"),
        question=_("Close these dead letters without running them again?"),
        about="Close a dead letter without running it again.",
        permission="discard_dlq",
        operation=_discard,
        log="Discarded: {note}",
        done=ngettext_lazy("%d dead letter was discarded.", "%d dead letters were discarded."),
        result="discarded",
        inputs=(NOTE,),
        is_dangerous=True,
        surfaces=_EVERYWHERE,
        rest=RestSchema(
            about="Why.",
            about_many="Which dead letters to discard, and why.",
            about_bulk="Close the open dead letters a selection takes, without running them again.",
            problems=(404, 409),
        ),
    ),
    _of_queue(
        name="pause",
        label=_("Pause"),
        about="Stop handing out jobs of a queue; what runs now ends normally.",
        operation=_each_queue(queues.pause),
        log="Paused.",
        done=ngettext_lazy("%d queue was paused.", "%d queues were paused."),
        applies=lambda state: state != "paused",
    ),
    _of_queue(
        name="resume",
        label=_("Resume"),
        about="Hand out jobs of a queue again.",
        operation=_each_queue(queues.resume),
        log="Resumed.",
        done=ngettext_lazy("%d queue was resumed.", "%d queues were resumed."),
        applies=lambda state: state == "paused",
    ),
    Action(
        name="limit",
        subject=Subject.QUEUES,
        label=_("Change"),
        about="Change limits of a queue, for its present jobs too; workers obey within two "
        "seconds.",
        permission="change_queuecontrol",
        operation=_each_queue(queues.set_policy),
        log="Limits: {inputs}.",
        done=ngettext_lazy(
            "Changed. Running workers obey within two seconds.", "%d queues were changed."
        ),
        result="changed",
        inputs=(
            _limit_of_queue(
                "concurrency", _("Concurrency"), _("Groups of the queue one worker runs at once.")
            ),
            _limit_of_queue(
                "max_attempts", _("Max attempts"), _("Executions before a job is dead-lettered.")
            ),
            _limit_of_queue(
                "backoff_base",
                _("Back-off (seconds)"),
                _("Seconds before the second attempt; doubles each time."),
            ),
        ),
        surfaces=Surface.DASHBOARD | Surface.REST,
        rest=RestSchema(
            body="LimitsBody",
            about="Limits to change; one that is not given stays, null goes back to what is "
            "configured.",
            method="PATCH",
            path="",
            problems=(404,),
        ),
    ),
    _of_worker(
        name="quiet",
        label=_("Quiet"),
        about="Let a worker start nothing more; what runs there ends, and it stays until stopped.",
        operation=workers.quiet,
        log="Asked to start nothing more.",
        done=ngettext_lazy(
            "The worker starts nothing more; what runs there ends.",
            "%d workers start nothing more; what runs there ends.",
        ),
        applies=lambda state: state != "quiet",
    ),
    _of_worker(
        name="unquiet",
        label=_("Go on"),
        about="Let a quiet worker go on.",
        operation=workers.unquiet,
        log="Asked to go on.",
        done=ngettext_lazy("The worker goes on.", "%d workers go on."),
        applies=lambda state: state == "quiet",
    ),
    _of_worker(
        name="stop",
        label=_("Stop"),
        about="Let a worker stop as a SIGTERM would.",
        operation=workers.stop,
        log="Asked to stop.",
        done=ngettext_lazy("The worker is stopping.", "%d workers are stopping."),
        is_dangerous=True,
    ),
    _of_schedule(
        name="run_now",
        label=_("Run now"),
        about="Enqueue the job of a schedule once, now; its ticks stay as they are.",
        permission="run_schedule",
        operation=schedules.run_now,
        log="Run now.",
        done=ngettext_lazy("%d job was enqueued.", "%d jobs were enqueued."),
        result="enqueued",
        harmless=frozenset(),
        applies=lambda state: "broken" not in state.split(),
    ),
    _of_schedule(
        name="pause",
        label=_("Pause"),
        about="Let a schedule have no ticks until it is resumed.",
        permission="pause_schedule",
        operation=schedules.pause,
        log="Paused.",
        done=ngettext_lazy("%d schedule was paused.", "%d schedules were paused."),
        applies=lambda state: not {"paused", "disabled"} & set(state.split()),
    ),
    _of_schedule(
        name="resume",
        label=_("Resume"),
        about="Let a paused schedule have ticks again; those of the meantime are not made up for.",
        permission="pause_schedule",
        operation=schedules.resume,
        log="Resumed.",
        done=ngettext_lazy("%d schedule was resumed.", "%d schedules were resumed."),
        applies=lambda state: "paused" in state.split(),
    ),
    _of_schedule(
        name="edit",
        label=_("Edit"),
        about="Change a schedule. Of one that the code declares, what is changed stays so until a "
        "reset.",
        permission="change_schedule",
        operation=_edit_schedules,
        log="Changed: {inputs}.",
        done=ngettext_lazy("%d schedule was changed.", "%d schedules were changed."),
        inputs=SCHEDULE_INPUTS,
        surfaces=Surface.DASHBOARD | Surface.REST,
        rest=RestSchema(
            body="ScheduleBody",
            about="What to change; one that is not given stays, null goes back to the default.",
            method="PATCH",
            path="",
            problems=(404,),
        ),
    ),
    _of_schedule(
        name="reset",
        label=_("Back to the code"),
        about="Give a schedule back what the code declares.",
        permission="change_schedule",
        operation=schedules.reset,
        log="Given back to the code.",
        done=ngettext_lazy("%d schedule is as declared.", "%d schedules are as declared."),
        applies=lambda state: "overridden" in state.split(),
    ),
    _of_schedule(
        name="delete",
        label=_("Delete"),
        question=_("Delete this schedule?"),
        about="Delete a schedule that the code does not declare; its jobs stay.",
        permission="delete_schedule",
        operation=schedules.delete,
        log="Deleted.",
        done=ngettext_lazy("%d schedule was deleted.", "%d schedules were deleted."),
        result="deleted",
        applies=lambda state: "deletable" in state.split(),
        is_dangerous=True,
        is_confirmed=True,
    ),
    _of_workflow(
        name="cancel",
        label=_("Cancel"),
        question=_("Cancel these workflows?"),
        about="Cancel a workflow: its waiting and open steps are cancelled, running ones are asked "
        "to end.",
        permission="cancel_workflow",
        operation=workflows.cancel,
        log="Cancelled.",
        done=ngettext_lazy("The workflow was cancelled.", "%d workflows were cancelled."),
        result="cancelled",
        applies=_is_open_workflow,
        is_dangerous=True,
    ),
    _of_workflow(
        name="retry",
        label=_("Retry from the failed steps"),
        question=_("Run the failed steps of these workflows again?"),
        about="Requeue the failed and cancelled steps of a workflow, and let it go on from there; "
        "what has completed stays as it is.",
        permission="retry_workflow",
        operation=workflows.retry,
        log="Retried from the failed steps.",
        done=ngettext_lazy(
            "The workflow goes on from its failed steps.",
            "%d workflows go on from their failed steps.",
        ),
        result="retried",
        applies=lambda state: state not in (WorkflowState.RUNNING, WorkflowState.COMPLETED),
    ),
    _of_workflow(
        name="change_deadline",
        label=_("Change deadline"),
        question=_("Change until when this workflow may run?"),
        about="Change until when a workflow may run; with null, it may run for ever.",
        permission="cancel_workflow",
        operation=workflows.set_deadline,
        log="Deadline changed: {inputs}.",
        done=ngettext_lazy("The deadline was changed.", "%d deadlines were changed."),
        result="changed",
        inputs=(
            Input(
                name="seconds",
                kind=Kind.NUMBER,
                label=_("Ends in (seconds; empty: never)"),
                help=_("Seconds from now; null: it has no deadline."),
                hint=_("Counted from now. A workflow that has not ended by then fails."),
                is_required=True,
                is_nullable=True,
                minimum=1,
                maximum=LONGEST_DELAY.total_seconds(),
            ),
        ),
        applies=_is_open_workflow,
        rest=RestSchema(about="Until when the workflow may run."),
    ),
    _of_limit(
        name="change",
        label=_("Change"),
        about="Change a limit of a queue or a job; workers obey within two seconds.",
        operation=_each_queue(control.set_limit),
        log="Limit: {inputs}.",
        # The admin has a page on which it is edited.
        surfaces=Surface.DASHBOARD | Surface.REST,
        inputs=(
            Input(
                name="rate",
                kind=Kind.TEXT,
                label=_("Rate"),
                help=_("How many jobs may start per unit of time, for example 5/s or 100/m."),
                is_nullable=True,
                max_length=40,
            ),
            Input(
                name="burst",
                kind=Kind.WHOLE,
                label=_("Burst"),
                help=_("How many jobs may start at once after a time without any."),
                is_nullable=True,
                minimum=1,
            ),
            Input(
                name="concurrency",
                kind=Kind.WHOLE,
                label=_("Concurrency"),
                help=_("How many jobs may run at once, in all workers together. Not for a queue."),
                is_nullable=True,
                minimum=1,
            ),
        ),
        rest=RestSchema(
            body="LimitBody",
            about="What to change; one that is not given stays, null is as declared.",
            method="PATCH",
            path="",
            problems=(404,),
        ),
    ),
    _of_limit(
        name="clear",
        label=_("As declared"),
        about="Let what was declared hold again.",
        operation=_each_queue(control.clear_limit),
        log="As declared.",
        applies=lambda state: state == "asked",
        rest=RestSchema(problems=(404,)),
    ),
)

ACTIONS: Mapping[str, Action] = {action.key: action for action in TABLE}
"""The entries by their keys."""


def actions_of(subject: Subject, surface: Surface) -> list[Action]:
    """Return the actions that a surface offers for rows of a subject."""
    return [each for each in TABLE if each.subject == subject and surface in each.surfaces]


def find(key: str) -> Action:
    """Return the action of a key.

    :raises ValueError: there is none.
    """
    if key not in ACTIONS:
        raise ValueError(f"There is no action {key!r:.80}")
    return ACTIONS[key]
