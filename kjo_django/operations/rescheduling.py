"""When and where open jobs run: run now, move to another queue, change the expiry.

A job whose message is on its way gets another message. Nobody looks for the old message: its
consumer finds that its attempt, or its generation, is over and drops it.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any, Unpack

from django.db import IntegrityError, transaction
from django.db.models import Case, Q, When
from django.db.models.functions import Coalesce
from django.utils.translation import gettext_noop as _

from kjo_django import registry, signals, states
from kjo_django.clock import CLOCK
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import storing
from kjo_django.enqueue.definition import known_queue
from kjo_django.limits import lines
from kjo_django.models import NEVER, Job, transition
from kjo_django.operations import internal
from kjo_django.operations.audit import send_after_commit
from kjo_django.operations.jobs import ChangeResult, Outcomes, Selection, change_open_jobs, send
from kjo_django.operations.rows import ChangeOptions
from kjo_django.refusals import RefusedError
from kjo_django.runtime import current_runtime, database_of, jobs_database
from kjo_django.states import JobState


def run_now(jobs: Selection, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Make scheduled jobs, and failing ones that wait for their next attempt, due now.

    The number of attempts stays. A job that waits for a limit goes on waiting. For an internal job
    a ``UserActor`` needs the permission of what the job does; the job still runs in the name of the
    user who started it.
    """
    actor = options.get("actor", "")

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        now, later = CLOCK.now(), []
        allowed = [job for job in open_jobs if internal.may_run_again(job, actor)]
        outcomes.add(ChangeResult.FORBIDDEN, len(open_jobs) - len(allowed))
        limited = lines.waiting_ids(current_runtime(), allowed)
        for job in allowed:
            if job.pk in limited:
                outcomes.add(ChangeResult.LIMITED)
            elif job.available_at <= now:
                outcomes.add(ChangeResult.UNCHANGED)
            else:
                later.append(job)
        _make_due(later, now)
        send_after_commit(signals.job_run_now, later, actor=actor)
        return later

    return change_open_jobs(jobs, change, ChangeResult.DUE, verb="Made due", **options)


def _make_due(jobs: Sequence[Job], now: datetime) -> None:
    """Make jobs due at this time, inside the caller's transaction."""
    # The jobs are locked, but a database that cannot lock rows needs this condition.
    rows = Job.objects.using(jobs_database()).filter(available_at__gt=now, state__in=states.OPEN)
    for name in sorted({job.queue for job in jobs}):
        ids = [job.pk for job in jobs if job.queue == name]
        rows.filter(pk__in=ids).update(available_at=now)
        send(ids, get_settings().queue(name))


def change_queue(jobs: Selection, queue: str, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Move open jobs to another queue, with the attempts they have spent and the time they are due.

    Each job begins a new generation, so the message that it had never runs. Its idempotency key is
    another one, as after a requeue.

    :param queue: the new queue. Its workers must have the handlers of the jobs.
    :raises ValueError: no queue has this name, no worker of the project consumes it, or its jobs
        are in another database.
    """
    target, actor = _target(queue), options.get("actor", "")

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        moved = []
        for job in open_jobs:
            if refusal := _refusal(job, target):
                outcomes.add(refusal)
            else:
                moved.append(job)
        if moved:
            _move([job for job in moved if job.unique_id is None], target)
            send([job.pk for job in moved], target)
        send_after_commit(signals.job_moved, moved, actor=actor, to_queue=queue)
        return moved

    verb = f"Moved to {queue}"
    return change_open_jobs(jobs, change, ChangeResult.MOVED, verb=verb, **options)


def change_expiry(
    jobs: Selection, expires_in: float | None, **options: Unpack[ChangeOptions]
) -> Outcomes:
    """Change until when open jobs may be started. A job that is not started by then fails.

    A worker reads the job's row before it starts the job, so the change also holds for a job whose
    message is on its way.

    :param expires_in: seconds from now; None: the jobs never expire.
    """
    expires_at = None if expires_in is None else CLOCK.now() + timedelta(seconds=expires_in)
    facts = {"actor": options.get("actor", ""), "expires_at": expires_at}

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        ours = [job for job in open_jobs if not job.destination]
        changed = [job for job in ours if job.expires_at != expires_at]
        outcomes.add(ChangeResult.OTHER_KIND, len(open_jobs) - len(ours))
        outcomes.add(ChangeResult.UNCHANGED, len(ours) - len(changed))
        if changed:
            rows = Job.objects.using(jobs_database()).filter(pk__in=[job.pk for job in changed])
            # The jobs are locked, but a database that cannot lock rows needs this condition.
            rows.filter(state__in=states.OPEN).update(expires_at=expires_at)
        send_after_commit(signals.job_expiry_changed, changed, **facts)
        return changed

    verb = "Changed the expiry of"
    return change_open_jobs(jobs, change, ChangeResult.CHANGED, verb=verb, **options)


# --- Move -----------------------------------------------------------------------------------------


def _target(queue: str) -> QueueConf:
    """Return the settings of a queue that jobs are to move to.

    :raises ValueError: see ``change_queue``.
    """
    target = get_settings().queue(known_queue(queue))
    if not target.consume:
        raise RefusedError(_("No worker of this project consumes the queue %(queue)r"), queue=queue)
    if (jobs_are_in := database_of(queue)) != (here := jobs_database()):
        text = _(
            "The jobs of the queue %(queue)r are in the database %(other)r, these are in "
            "%(here)r, and a job stays in its database."
        )
        raise RefusedError(text, queue=queue, other=jobs_are_in, here=here)
    return target


def _refusal(job: Job, target: QueueConf) -> ChangeResult | None:
    """Return why a job does not move; None: it may. One with a unique id has moved then."""
    if job.queue == target.name:
        return ChangeResult.UNCHANGED
    if job.destination or registry.route_of(job.queue) is not registry.route_of(target.name):
        return ChangeResult.OTHER_KIND
    if job.unique_id is not None and not _move_named(job, target):
        return ChangeResult.TAKEN
    return None


def _move_named(job: Job, target: QueueConf) -> bool:
    """Move a job with a unique id; return False if another job of the queue has that id."""
    using = jobs_database()
    if Job.objects.using(using).filter(queue=target.name, unique_id=job.unique_id).exists():
        return False
    try:
        with transaction.atomic(using=using):
            _move([job], target)
    except IntegrityError:
        return False  # taken this moment
    return True


def _move(jobs: Sequence[Job], target: QueueConf) -> None:
    using = jobs_database()
    state = storing.initial_state(target)
    rows = Job.objects.using(using).filter(pk__in=[job.pk for job in jobs])
    changes: dict[str, Any] = {
        "queue": target.name,
        # The new queue's limits are asked anew.
        "available_at": Case(When(available_at=NEVER, then=CLOCK.now()), default="available_at"),
        "queued_at": CLOCK.now() if state == JobState.QUEUED else None,
        "lease_token": "",
        "lease_expires_at": None,
        "topic": "",
        "partition": None,
        "offset": None,
    }
    if len(target.levels) > 1:
        changes["priority"] = Coalesce("priority", 0)
    # A failing job stays failing. A transactional transport stores its message all the same, and
    # the relay of any other transport publishes both states.
    is_failing = Q(state=JobState.FAILING)
    transition("requeue", rows.filter(~is_failing, state__in=states.OPEN), state=state, **changes)
    transition("requeue", rows.filter(is_failing), state=JobState.FAILING, **changes)
