"""Large work of operators as an internal job: any action of the table that may be done to all rows
a filter finds. The job shows how far it is, can be cancelled, and after a crash goes on with what
is open.

The selection is fixed when the action is asked for: dead letters that arise later, and jobs that
are created or end later, are not touched. ``kjo_django.jobs`` registers the handlers in every
process.
"""

from __future__ import annotations

import dataclasses
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from kjo_django import registry
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
from kjo_django.runtime import jobs_database
from kjo_django.store.counting import COUNT_LIMIT, bounded_count

PATIENT_SECONDS = 5
"""A pace that takes longer makes it a background job too."""
REPLAY = "kjo_django.replay_dead_letters"
DISCARD = "kjo_django.discard_dead_letters"
CHANGE = "kjo_django.change_jobs"
RETRY_DELAY = timedelta(minutes=1)
"""After the transport refused several in a row."""


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
    """Enqueue an internal job that carries out an action; return its row.

    It goes to ``KJO["OPERATIONS_QUEUE"]``, or where no queue of that name is known to the first one
    that workers consume. Its result is the report, of the last run where it was interrupted.

    :param key: of the action, such as ``requeue`` or ``replay_letters``.
    :param selection: of dead letters for actions of these, else of jobs.
    :param actor: who asked; kept in the job's payload, and in the notes of letters. Of a
        ``UserActor`` the permission is checked again when the job runs.
    :param rate: at most so many a second, from ``RATE_MIN`` to ``RATE_MAX``.
    :param inputs: of the action: ``note`` to discard, ``queue`` to move, ``force`` to replay.
    :raises ValueError: what is asked cannot be done.
    """
    action = find(key)
    if not action.is_bulk:
        raise ValueError(f"{key} is not done to many rows at once")
    wanted = DeadLetterFilter if action.subject == Subject.LETTERS else JobFilter
    if not isinstance(selection, wanted):
        raise ValueError(f"{key} needs a {wanted.__name__}")
    now = timezone.now()
    request = Request(
        action=action.key,
        filter=dump_filter(selection, now),
        asked_at=now.isoformat(),
        rate=rate,
        inputs=action.checked(inputs),
    ).asked_by(actor)
    handler = registry.find(handler_of(action))
    assert handler is not None, "kjo_django is in INSTALLED_APPS"
    definition = JobDefinition(handler).using(queue=_operations_queue())
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
    """Carry out an action here and now if it is for few rows, else start an internal job.

    :param rate: at most so many a second, from ``RATE_MIN`` to ``RATE_MAX``.
    :param limit: the oldest so many dead letters only, at most ``SYNCHRONOUS_LIMIT``.
    :param on_changed: called with the rows that are changed here; a job is a row of its own.
    :param inputs: of the action.
    :raises ValueError: what is asked cannot be done.
    """
    action = find(key)
    checked_rate(rate)
    if limit is not None:
        if LIMIT not in action.inputs or not isinstance(selection, DeadLetterFilter):
            raise ValueError(f"{key} takes no limit")
        if not 0 < limit <= SYNCHRONOUS_LIMIT:
            raise ValueError(f"A limit must be from 1 to {SYNCHRONOUS_LIMIT}, not {limit!r}")
        # By their ids: a job that is interrupted must not begin with others.
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
    """Replay dead letters here and now if they are few, else start an internal job; see
    ``change_or_start`` for the options, and ``force`` of ``dead_letters.replay``."""
    done = change_or_start("replay_letters", selection, actor=actor, **options)
    assert isinstance(done, ReplayReport | Job)
    return done


def discard_or_start(
    selection: DeadLetterFilter, *, note: str, actor: str, on_changed: Observer | None = None
) -> int | Job:
    """Discard dead letters here and now if they are few, else start an internal job; see
    ``change_or_start``. Return how many were closed, or the job."""
    done = change_or_start(
        "discard_letters", selection, actor=actor, note=note, on_changed=on_changed
    )
    assert not isinstance(done, ReplayReport)
    return done if isinstance(done, Job) else done.changed_count


# --- What the jobs do -----------------------------------------------------------------------------


def carry_out(context: JobContext, **payload: Any) -> dict[str, Any]:
    """Carry out what a request asks for; the handler of every internal job."""
    request = Request(**payload)
    action = find(request.action)
    actor = actor_of(request, f"kjo_django.{action.permission}")
    if action.subject == Subject.LETTERS:
        rows: QuerySet[Any] = dead_letters.select(load_letter_filter(request.filter))
    else:
        rows = _jobs_of(request, actor).exclude(pk=context.job_id)
    progress = _progress_of(context, bounded_count(rows), request.rate)
    report = action.perform(rows, actor=actor, progress=progress, **request.inputs)
    if not isinstance(report, ReplayReport):
        return {"counts": report.counts, "changed": report.changed_count}
    if report.stopped:
        # What is left is open still: the next attempt goes on with it.
        raise Retry(report.stopped, delay=RETRY_DELAY)
    return report.as_dict()


def permission_of(request: Request) -> str | None:
    """Return what a user needs for a request, None where its action is unknown."""
    action = ACTIONS.get(request.action)
    return None if action is None else f"kjo_django.{action.permission}"


def _jobs_of(request: Request, actor: str) -> QuerySet[Job]:
    assert isinstance(request.filter, str)
    # What has ended since was run again by an earlier attempt of this very job, or by others.
    ended_since = Q(finished_at__gte=_moment(request.asked_at))
    selection = search.parse(request.filter)
    if isinstance(actor, UserActor) and not actor.user.has_perm("kjo_django.view_payload"):
        try:
            selection = selection.limited()
        except ValueError as error:
            raise PermanentError(f"{actor}: {error}") from None
    return search.find(selection).exclude(ended_since)


def _progress_of(context: JobContext, total: int, rate: float | None) -> Progress:
    """Return what is called after each chunk: it shows how far the job is, keeps the pace, and ends
    an aborted run, with what was done so far committed."""
    began = timezone.now()
    of = f"{total:,}+" if total >= COUNT_LIMIT else f"{total:,}"

    def show(done: int, _: int | None) -> None:
        percent = min(100.0, 100 * done / total) if total else 100.0
        context.progress(percent, f"{done:,} of {of}")
        if rate is not None:
            ahead = done / rate - (timezone.now() - began).total_seconds()
            context.cancel_event.wait(max(0.0, ahead))
        context.raise_if_aborted()

    return show


# --- Filters as JSON ------------------------------------------------------------------------------


def dump_filter(selection: DeadLetterFilter | JobFilter, now: datetime) -> dict[str, Any] | str:
    """Return a filter ready for JSON, restricted to what there is at this time."""
    if isinstance(selection, JobFilter):
        frozen = selection.at(now)
        assert not isinstance(frozen.until, timedelta)
        # The key knows the millisecond of its making: those of this one are there already.
        there = now + timedelta(milliseconds=1)
        until = there if frozen.until is None else min(frozen.until, there)
        return str(dataclasses.replace(frozen, until=until))
    until = now if selection.until is None else min(selection.until, now)
    letters = dataclasses.replace(selection, until=until)
    plain: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(letters)
        if (value := getattr(letters, field.name)) is not None
    }
    if "ids" in plain:
        plain["ids"] = list(map(str, plain["ids"]))
    return plain | {name: plain[name].isoformat() for name in ("since", "until") if name in plain}


def load_letter_filter(stored: Any) -> DeadLetterFilter:
    """Undo ``dump_filter`` of a filter of dead letters."""
    times = {name: _moment(stored[name]) for name in ("since", "until") if name in stored}
    return DeadLetterFilter(**{**stored, **times})


def _moment(text: str) -> datetime:
    moment = parse_datetime(text)
    if moment is None:
        raise ValueError(f"{text!r:.80} is no time")
    return moment


# --- Details --------------------------------------------------------------------------------------


def _operations_queue() -> str:
    wanted = get_settings().operations_queue
    if wanted in registry.queue_names():
        return wanted
    for name in registry.consumed_queue_names():
        if registry.route_of(name) is registry.JOBS:
            return name
    raise ValueError(
        f"No worker would run it: no queue is named {wanted!r}, KJO['OPERATIONS_QUEUE'], and "
        "none is declared"
    )
