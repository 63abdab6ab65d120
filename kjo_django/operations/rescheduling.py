"""Run now, move, change the expiry: when and where an open job runs, not how often.

A job whose message is on its way already gets another one. The old one is not looked for: when its
time comes, its consumer finds that its attempt, or its generation, is past and drops it.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Unpack

from django.db import IntegrityError, transaction
from django.db.models import Q
from django.utils import timezone

from kjo_django import registry, signals, states
from kjo_django.conf import QueueConf, get_settings
from kjo_django.enqueue import storing
from kjo_django.enqueue.definition import known_queue
from kjo_django.models import Job, transition
from kjo_django.operations import internal
from kjo_django.operations.audit import send_signals
from kjo_django.operations.jobs import (
    Outcomes,
    Selection,
    change_open_jobs,
    send,
)
from kjo_django.operations.rows import ChangeOptions
from kjo_django.runtime import jobs_database
from kjo_django.states import JobState


class ChangeResult(enum.StrEnum):
    """What a change of one job ended with; a final job answers with its state."""

    DUE = "due"
    """The job was due later and is due now."""
    MOVED = "moved"
    CHANGED = "changed"
    UNCHANGED = "unchanged"
    """The job is as asked: due already, in that queue, or with that expiry."""
    TAKEN = "taken"
    """Another job of the queue asked for has its unique id."""
    OTHER_KIND = "other_kind"
    """It is a record for others, which no worker here starts, or its route is not that of the
    queue asked for: messages of other services stay where the topics of their kind are."""
    FORBIDDEN = "forbidden"
    """The job is an internal one, and who asked may not do what it does."""
    NOT_FOUND = "not_found"
    PROCESSING = "processing"


def run_now(jobs: Selection, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Let scheduled jobs, and failing ones that wait for their next attempt, run now.

    No attempt is spent and none is given back: what comes is the attempt that was to come. For an
    internal job a ``UserActor`` needs the permission of what it does; it still runs in the name of
    who asked for that.
    """
    actor = options.get("actor", "")

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        now = timezone.now()
        allowed = [job for job in open_jobs if internal.may_run_again(job, actor)]
        later = [job for job in allowed if job.available_at > now]
        outcomes.add(ChangeResult.FORBIDDEN, len(open_jobs) - len(allowed))
        outcomes.add(ChangeResult.UNCHANGED, len(allowed) - len(later))
        # They are locked, but a database that cannot lock rows leaves it to this condition.
        rows = Job.objects.using(jobs_database()).filter(
            available_at__gt=now, state__in=states.OPEN
        )
        for name in sorted({job.queue for job in later}):
            ids = [job.pk for job in later if job.queue == name]
            rows.filter(pk__in=ids).update(available_at=now)
            send(ids, get_settings().queue(name))
        return later

    announce = functools.partial(send_signals, signals.job_run_now, actor=actor)
    return change_open_jobs(jobs, change, ChangeResult.DUE, announce, verb="Made due", **options)


def change_queue(jobs: Selection, queue: str, **options: Unpack[ChangeOptions]) -> Outcomes:
    """Move open jobs to another queue, with the attempts they have spent and the time they are due.

    Each begins a new generation there, so the message it had never runs; its idempotency key is
    another one, as after a requeue.

    :param queue: where to; the jobs keep their handler, so a worker of that queue must have it.
    :raises ValueError: no queue has this name, or nobody here consumes it.
    """
    target = get_settings().queue(known_queue(queue))
    if not target.consume:
        raise ValueError(f"No worker of this project consumes the queue {queue!r}")

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        moved = []
        for job in open_jobs:
            if job.queue == queue:
                outcomes.add(ChangeResult.UNCHANGED)
            elif job.destination or registry.route_of(job.queue) is not registry.route_of(queue):
                outcomes.add(ChangeResult.OTHER_KIND)
            elif job.unique_id is not None and not _move_named(job, target):
                outcomes.add(ChangeResult.TAKEN)
            else:
                moved.append(job)
        if moved:
            _move([job for job in moved if job.unique_id is None], target)
            send([job.pk for job in moved], target)
        return moved

    actor = options.get("actor", "")
    announce = functools.partial(send_signals, signals.job_moved, actor=actor, to_queue=queue)
    verb = f"Moved to {queue}"
    return change_open_jobs(jobs, change, ChangeResult.MOVED, announce, verb=verb, **options)


def change_expiry(
    jobs: Selection, expires_in: float | None, **options: Unpack[ChangeOptions]
) -> Outcomes:
    """Change until when open jobs may be started; a job that is not started by then fails.

    A worker looks at the job's row before it starts the job, so this also holds for a job whose
    message is on its way.

    :param expires_in: seconds from now; None: the jobs never expire.
    """
    expires_at = None if expires_in is None else timezone.now() + timedelta(seconds=expires_in)

    def change(open_jobs: list[Job], outcomes: Outcomes) -> list[Job]:
        ours = [job for job in open_jobs if not job.destination]
        changed = [job for job in ours if job.expires_at != expires_at]
        outcomes.add(ChangeResult.OTHER_KIND, len(open_jobs) - len(ours))
        outcomes.add(ChangeResult.UNCHANGED, len(ours) - len(changed))
        if changed:
            rows = Job.objects.using(jobs_database()).filter(pk__in=[job.pk for job in changed])
            # They are locked, but a database that cannot lock rows leaves it to this condition.
            rows.filter(state__in=states.OPEN).update(expires_at=expires_at)
        return changed

    actor = options.get("actor", "")
    announce = functools.partial(
        send_signals, signals.job_expiry_changed, actor=actor, expires_at=expires_at
    )
    verb = "Changed the expiry of"
    return change_open_jobs(jobs, change, ChangeResult.CHANGED, announce, verb=verb, **options)


# --- Move -----------------------------------------------------------------------------------------


def _move_named(job: Job, target: QueueConf) -> bool:
    """Move a job with a unique id, unless that is taken in the other queue."""
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
        "queued_at": timezone.now() if state == JobState.QUEUED else None,
        "lease_token": "",
        "lease_expires_at": None,
        "topic": "",
        "partition": None,
        "offset": None,
    }
    # One that has failed stays failing; on a transactional transport its message is there all the
    # same, elsewhere the relay takes both states.
    is_failing = Q(state=JobState.FAILING)
    transition("requeue", rows.filter(~is_failing, state__in=states.OPEN), state=state, **changes)
    transition("requeue", rows.filter(is_failing), state=JobState.FAILING, **changes)
