"""The one state machine of a job: its states, its legal transitions, its picture.

    waiting (a workflow's step)
       │  ▲ └──cancel──> cancelled
    release └await (the workflow is retried: cancelled steps wait again)
       ▼
    pending ──publish──> queued ──success──> completed
       │  ▲                │ ▲ └──retry left──> failing ──publish──┐
       │  └requeue, rescue─┼─┼──────────────────── │ <─────────────┘ (back to queued)
       │                   │ └─ consumed before the relay recorded it: pending and failing may
       │                   │    finish too, so a slow relay never makes a finished job look open
       └──cancel──> cancelled    └──attempts spent──> failed

``processing`` and ``scheduled`` are never stored: processing is a live lease, scheduled a pending
job due in the future: a crash leaves nothing of them to clean up. Every transition
is one conditional UPDATE on the expected states and the generation, so a late or duplicate actor
loses by construction.
"""

from __future__ import annotations

from django.db import models
from django.utils.translation import gettext_lazy as _


class JobState(models.TextChoices):
    """What is stored in ``Job.state``."""

    WAITING = "waiting", _("Waiting")
    PENDING = "pending", _("Pending")
    QUEUED = "queued", _("Queued")
    FAILING = "failing", _("Failing")
    COMPLETED = "completed", _("Completed")
    FAILED = "failed", _("Failed")
    CANCELLED = "cancelled", _("Cancelled")


class JobStatus(models.TextChoices):
    """What people are shown: the stored states and the two virtual ones."""

    WAITING = "waiting", _("Waiting")
    PENDING = "pending", _("Pending")
    SCHEDULED = "scheduled", _("Scheduled")
    QUEUED = "queued", _("Queued")
    PROCESSING = "processing", _("Processing")
    FAILING = "failing", _("Failing")
    COMPLETED = "completed", _("Completed")
    FAILED = "failed", _("Failed")
    CANCELLED = "cancelled", _("Cancelled")


class WorkflowState(models.TextChoices):
    """What is stored in ``Workflow.state``."""

    RUNNING = "running", _("Running")
    HELD = "held", _("Held")
    COMPLETED = "completed", _("Completed")
    FAILED = "failed", _("Failed")
    CANCELLED = "cancelled", _("Cancelled")


class OnFailure(models.TextChoices):
    """What becomes of a workflow's step when one that it waits for has failed for good."""

    CANCEL = "cancel", _("Is cancelled")
    RUN = "run", _("Runs all the same")
    HOLD = "hold", _("Waits until the failed step has completed")


class ItemState(models.IntegerChoices):
    """What template producers and consumers keep in the items' own table; processing is virtual
    there too."""

    PENDING = 1, _("Pending")
    COMPLETED = 2, _("Completed")
    FAILED = 3, _("Failed")


OPEN = (JobState.PENDING, JobState.QUEUED, JobState.FAILING)
"""States in which a job may run, or runs."""
UNFINISHED = (JobState.WAITING, *OPEN)
"""``OPEN`` and the state of a step that waits for other steps: no message of it runs."""
FINAL = (JobState.COMPLETED, JobState.FAILED, JobState.CANCELLED)
AWAITING_PUBLISH = (JobState.PENDING, JobState.FAILING)
OPEN_WORKFLOWS = (WorkflowState.RUNNING, WorkflowState.HELD)

TRANSITIONS: dict[str, list[JobState]] = {
    "publish": sorted(AWAITING_PUBLISH),
    "complete": sorted(OPEN),
    "retry": sorted(OPEN),
    "fail": sorted(OPEN),
    "cancel": sorted(UNFINISHED),
    "requeue": sorted((*OPEN, *FINAL)),
    "republish": [JobState.QUEUED],
    "hold": [JobState.QUEUED],
    "release": [JobState.WAITING],
    "await": [JobState.CANCELLED],
}
"""The states that each action may start from. ``requeue`` begins a new generation, so it may start
anywhere but in ``waiting``, which only ``release`` and ``cancel`` end; ``republish`` is the rescue
of a queued job whose message is gone: same generation, same attempt; ``hold`` lets a job wait for a
limit, due never until it is let go."""

RESULT_OF: dict[str, JobState] = {
    "publish": JobState.QUEUED,
    "complete": JobState.COMPLETED,
    "retry": JobState.FAILING,
    "fail": JobState.FAILED,
    "cancel": JobState.CANCELLED,
    "requeue": JobState.PENDING,
    "republish": JobState.PENDING,
    "hold": JobState.PENDING,
    "release": JobState.PENDING,
    "await": JobState.WAITING,
}


# --- Names of states in the other interfaces: pure mappings of the status shown -----------------

KJO_NUMBERS = {"pending": 1, "completed": 2, "failed": 3}
"""The numbers of `ItemState`; PROCESSING is virtual and has none."""

_TO_KJO = {
    JobStatus.COMPLETED: "COMPLETED",
    JobStatus.FAILED: "FAILED",
    JobStatus.CANCELLED: "FAILED",
    JobStatus.PROCESSING: "PROCESSING",
}
_TO_QUEUE = dict.fromkeys((JobStatus.WAITING, JobStatus.PENDING, JobStatus.SCHEDULED), "queued")
_TO_DJANGO_TASKS = {
    JobStatus.PROCESSING: "RUNNING",
    JobStatus.COMPLETED: "SUCCESSFUL",
    JobStatus.FAILED: "FAILED",
    JobStatus.CANCELLED: "FAILED",
}


def to_kjo(status: str) -> str:
    """Map to PENDING, PROCESSING, COMPLETED, FAILED, as items and streams name them."""
    return _TO_KJO.get(JobStatus(status), "PENDING")


def to_queue(status: str) -> str:
    """Map to queued, processing, failing, completed, failed, cancelled, as `Queue` names them."""
    return _TO_QUEUE.get(JobStatus(status), JobStatus(status).value)


def to_django_tasks(status: str) -> str:
    """Map to Django Tasks' READY, RUNNING, SUCCESSFUL, FAILED."""
    return _TO_DJANGO_TASKS.get(JobStatus(status), "READY")
