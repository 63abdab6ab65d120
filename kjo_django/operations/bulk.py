"""Actions on all rows that a filter finds, carried out by an internal job.

The job reports its progress, can be cancelled, and goes on with the rows that are left after a
crash. The filter is fixed when the job is enqueued: dead letters that arise later, and jobs that
are created or end later, are not changed. ``kjo_django.jobs`` registers the handlers in every
process.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q, QuerySet
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.clock import CLOCK
from kjo_django.conf import get_settings
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.definition import JobDefinition
from kjo_django.exceptions import PermanentError, Retry
from kjo_django.models import Job
from kjo_django.operations import dead_letters, search
from kjo_django.operations.actions import (
    ACTIONS,
    LIMIT,
    RATE,
    SYNCHRONOUS_LIMIT,
    Action,
    Report,
    Subject,
    find,
)
from kjo_django.operations.dead_letters import DeadLetterFilter, ReplayReport
from kjo_django.operations.internal import Request, UserActor, actor_of
from kjo_django.operations.rows import Observer, Progress, checked_rate
from kjo_django.operations.search import JobFilter
from kjo_django.refusals import RefusedError
from kjo_django.runtime import current_runtime, jobs_database
from kjo_django.store.counting import COUNT_LIMIT, bounded_count

PATIENT_SECONDS = 5
"""An action whose rate makes it take longer is done by an internal job."""
REPLAY = "kjo_django.replay_dead_letters"
DISCARD = "kjo_django.discard_dead_letters"
CHANGE = "kjo_django.change_jobs"
RETRY_DELAY = timedelta(minutes=1)
"""The delay of the next attempt after several errors of the transport in a row."""


def handler_of(action: Action) -> str:
    """Return the name of the internal job that carries out an action."""
    of_letters = {"replay": REPLAY, "discard": DISCARD}
    return of_letters[action.name] if action.subject == Subject.LETTERS else CHANGE


def start_bulk(
    key: str,
    selection: DeadLetterFilter | JobFilter,
    *,
    actor: str,
    rate: float | None = None,
    **inputs: Any,
) -> Job:
    """Enqueue an internal job that carries out an action, and return its row.

    Its queue is ``KJO["OPERATIONS_QUEUE"]``, or the first queue that workers consume if there is no
    queue of that name. Its result is the report of its last attempt.

    :param key: the key of the action, such as ``requeue`` or ``replay_letters``.
    :param selection: a filter of dead letters for actions on dead letters, else of jobs.
    :param actor: who asked; stored in the job's payload and in the notes of letters. The permission
        of a ``UserActor`` is checked again when the job runs.
    :param rate: at most so many rows a second, from ``RATE_MIN`` to ``RATE_MAX``.
    :param inputs: the action's inputs: ``note`` to discard, ``queue`` to move, ``force`` to replay.
    :raises ValueError: there is no such action, or its inputs or its selection are wrong.
    """
    action = find(key)
    if not action.is_bulk:
        raise ValueError(f"{key} is not possible for many rows")
    wanted = DeadLetterFilter if action.subject == Subject.LETTERS else JobFilter
    if not isinstance(selection, wanted):
        raise ValueError(f"{key} needs a {wanted.__name__}")
    now = CLOCK.now()
    request = Request(
        action=action.key,
        filter=dump_filter(selection, now),
        asked_at=now.isoformat(),
        rate=rate,
        inputs=action.checked(inputs),
    ).asked_by(actor)
    handler = registry.find(handler_of(action))
    assert handler is not None, "kjo_django is in INSTALLED_APPS"
    definition: JobDefinition[..., Any] = JobDefinition(handler).using(queue=operations_queue())
    stored = definition.enqueue(**dataclasses.asdict(request))
    return Job.objects.using(jobs_database()).get(pk=stored.job_id)


def change_or_start(
    key: str,
    selection: DeadLetterFilter | JobFilter,
    *,
    actor: str,
    rate: float | None = None,
    limit: int | None = None,
    on_changed: Observer | None = None,
    **inputs: Any,
) -> Report | Job:
    """Carry out an action on few rows and return its report; for many rows start an internal job.

    :param rate: at most so many rows a second, from ``RATE_MIN`` to ``RATE_MAX``.
    :param limit: only the oldest so many dead letters, at most ``SYNCHRONOUS_LIMIT``.
    :param on_changed: called with the rows that are changed; not with those of an internal job.
    :param inputs: the action's inputs.
    :raises ValueError: there is no such action, or its inputs or its selection are wrong.
    """
    action = find(key)
    checked_rate(rate)
    if limit is not None:
        if LIMIT not in action.inputs or not isinstance(selection, DeadLetterFilter):
            raise ValueError(f"{key} takes no limit")
        if not 0 < limit <= SYNCHRONOUS_LIMIT:
            text = _("A limit must be from 1 to %(most)s, not %(limit)s")
            raise RefusedError(text, most=SYNCHRONOUS_LIMIT, limit=repr(limit))
        # Their ids are fixed: a job that was interrupted must not go on with other letters.
        keys = dead_letters.select(selection).values_list("pk", flat=True)
        selection = DeadLetterFilter(ids=list(keys[:limit]))
    rows: QuerySet[Any]
    if isinstance(selection, JobFilter):
        rows = search.find(selection)
    else:
        rows = dead_letters.select(selection)
    count = bounded_count(rows, SYNCHRONOUS_LIMIT + 1)
    if count > SYNCHRONOUS_LIMIT or (rate and count / rate > PATIENT_SECONDS):
        return start_bulk(key, selection, actor=actor, rate=rate, **inputs)
    if rate is not None and RATE in action.inputs:
        inputs["rate"] = rate
    return action.perform(rows, actor=actor, on_changed=on_changed, **inputs)


def replay_or_start(
    selection: DeadLetterFilter, *, actor: str, **options: Any
) -> ReplayReport | Job:
    """Replay few dead letters and return the report; for many start an internal job.

    :param options: those of ``change_or_start``, and ``force`` of ``dead_letters.replay``.
    """
    done = change_or_start("replay_letters", selection, actor=actor, **options)
    assert isinstance(done, ReplayReport | Job)
    return done


def discard_or_start(
    selection: DeadLetterFilter, *, note: str, actor: str, on_changed: Observer | None = None
) -> int | Job:
    """Discard few dead letters and return how many; for many start an internal job."""
    done = change_or_start(
        "discard_letters", selection, actor=actor, note=note, on_changed=on_changed
    )
    assert not isinstance(done, ReplayReport)
    return done if isinstance(done, Job) else done.changed_count


# --- The handler ----------------------------------------------------------------------------------


def carry_out(context: JobContext, **payload: Any) -> dict[str, Any]:
    """Carry out a request; the handler of every internal job."""
    request = Request(**payload)
    action = find(request.action)
    actor = actor_of(request, f"kjo_django.{action.permission}")
    if action.subject == Subject.LETTERS:
        rows: QuerySet[Any] = dead_letters.select(load_letter_filter(request.filter))
    else:
        rows = _jobs_of(request, actor).exclude(pk=context.job_id)
    progress = _progress_of(context, bounded_count(rows), request.rate)
    inputs = dict(request.inputs)
    if request.rate is not None and RATE in action.inputs:
        inputs["rate"] = request.rate  # then it is done one by one, and not by the chunk
    report = action.perform(rows, actor=actor, progress=progress, **inputs)
    if not isinstance(report, ReplayReport):
        return {"counts": report.counts, "changed": report.changed_count}
    if report.stopped:
        # The next attempt goes on with the letters that are still open.
        raise Retry(report.stopped, delay=RETRY_DELAY)
    return report.as_dict()


def permission_of(request: Request) -> str | None:
    """Return the permission that a request needs, or None if its action is unknown."""
    action = ACTIONS.get(request.action)
    return None if action is None else f"kjo_django.{action.permission}"


def _jobs_of(request: Request, actor: str) -> QuerySet[Job]:
    assert isinstance(request.filter, str)
    # A job that has ended since was run again by an earlier attempt of this job, or by others.
    ended_since = Q(finished_at__gte=_moment(request.asked_at))
    selection = search.parse(request.filter)
    if isinstance(actor, UserActor) and not actor.user.has_perm("kjo_django.view_payload"):
        try:
            selection = selection.limited()
        except ValueError as error:
            raise PermanentError(f"{actor}: {error}") from None
    return search.find(selection).exclude(ended_since)


def _progress_of(context: JobContext, total: int, rate: float | None) -> Progress:
    """Return a function to call after each chunk: it reports progress, keeps to the rate, and
    raises an error if the job was aborted."""
    began = CLOCK.now()
    of = f"{total:,}+" if total >= COUNT_LIMIT else f"{total:,}"

    def show(done: int, _: int | None) -> None:
        percent = min(100.0, 100 * done / total) if total else 100.0
        context.progress(percent, f"{done:,} of {of}")
        if rate is not None:
            ahead = done / rate - (CLOCK.now() - began).total_seconds()
            context.cancel_event.wait(max(0.0, ahead))
        context.raise_if_aborted()

    return show


# --- Filters as JSON ------------------------------------------------------------------------------


def dump_filter(selection: DeadLetterFilter | JobFilter, now: datetime) -> dict[str, Any] | str:
    """Return a filter ready for JSON, restricted to the rows that there are now."""
    if isinstance(selection, JobFilter):
        frozen = selection.at(now)
        assert not isinstance(frozen.until, timedelta)
        # A key has the millisecond of its creation: rows of this one are there already.
        there = now + timedelta(milliseconds=1)
        until = there if frozen.until is None else min(frozen.until, there)
        return str(dataclasses.replace(frozen, until=until))
    until = now if selection.until is None else min(selection.until, now)
    letters = dataclasses.replace(selection, until=until)
    given = {
        name: value for name, value in dataclasses.asdict(letters).items() if value is not None
    }
    if "ids" in given:
        given["ids"] = list(map(str, given["ids"]))
    return given | {name: given[name].isoformat() for name in ("since", "until") if name in given}


def load_letter_filter(stored: Any) -> DeadLetterFilter:
    """Return the filter of dead letters that ``dump_filter`` made ready for JSON."""
    times = {name: _moment(stored[name]) for name in ("since", "until") if name in stored}
    return DeadLetterFilter(**{**stored, **times})


def _moment(text: str) -> datetime:
    moment = parse_datetime(text)
    if moment is None:
        raise ValueError(f"{text!r:.80} is no time")
    return moment


# --- Details --------------------------------------------------------------------------------------


def operations_queue() -> str:
    """Return the queue of internal jobs, which are in the database whose rows they change.

    :raises ValueError: no worker would run them.
    """
    wanted = get_settings().operations_queue
    holds = current_runtime().holds
    if wanted in registry.queue_names() and holds(wanted):
        return wanted
    for name in filter(holds, registry.consumed_queue_names()):
        if registry.route_of(name) is registry.JOBS:
            return name
    text = _(
        "No worker would run it: no queue is named %(name)r, KJO['OPERATIONS_QUEUE'], and none is "
        "declared"
    )
    raise RefusedError(text, name=wanted)
