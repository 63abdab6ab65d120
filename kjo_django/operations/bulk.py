"""Large work as a job of our own: replaying or discarding dead letters, changing jobs, by the
thousands. It shows how far it is, can be cancelled, and goes on after a crash with what is open.

What is asked for is fixed when it is asked: letters that die, and jobs that are created or end,
after that are not touched. ``kjo_django.jobs`` registers the handlers in every process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.db.models import Q, QuerySet
from django.utils import timezone
from django.utils.dateparse import parse_datetime

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.engine.handler.context import JobContext
from kjo_django.enqueue.definition import JobDefinition, known_queue
from kjo_django.exceptions import PermanentError, Retry
from kjo_django.models import DeadLetter, Job
from kjo_django.operations import dead_letters, jobs
from kjo_django.operations.counting import COUNT_LIMIT, bounded_count
from kjo_django.operations.dead_letters.table import DeadLetterFilter, ReplayReport
from kjo_django.operations.internal import Action, Request, UserActor, actor_of
from kjo_django.operations.jobs import rescheduling, search
from kjo_django.operations.jobs.changes import Outcomes
from kjo_django.operations.jobs.search import JobFilter
from kjo_django.operations.rows import Observer, Progress, checked_rate, no_progress
from kjo_django.store.transactions import jobs_database

SYNCHRONOUS_LIMIT = 1000
"""Rows up to which a request does the work itself."""
PATIENT_SECONDS = 5
"""A pace that takes longer makes it a background job too."""
REPLAY = "kjo_django.replay_dead_letters"
DISCARD = "kjo_django.discard_dead_letters"
CHANGE = "kjo_django.change_jobs"
RESTS_FOR = timedelta(minutes=1)
"""After the transport refused several in a row."""


_HANDLERS = {Action.REPLAY_LETTERS: REPLAY, Action.DISCARD_LETTERS: DISCARD}


def start_bulk(
    action: Action | str,
    selection: DeadLetterFilter | JobFilter,
    *,
    actor: str,
    note: str = "",
    queue: str = "",
    rate: float | None = None,
    force: bool = False,
) -> Job:
    """Enqueue a job that does it; returns its row.

    It goes to ``KJO["OPERATIONS_QUEUE"]``, or where no queue of that name is known to the first one
    that workers consume. Its result is the report, of the last run where it was interrupted.

    :param selection: of dead letters for the first two actions, of jobs for the others.
    :param actor: who asked; kept in the job's payload, and in the notes of letters. Of a
        ``UserActor`` the permission is checked again when the job runs.
    :param note: why; needed to discard.
    :param queue: where to, for ``change_queue``.
    :param rate: at most so many a second, from ``RATE_MIN`` to ``RATE_MAX``.
    :param force: see ``dead_letters.replay``.
    :raises ValueError: what is asked cannot be done.
    """
    action = Action(action)
    of_letters = action in _HANDLERS
    if of_letters != isinstance(selection, DeadLetterFilter):
        kind = "a DeadLetterFilter" if of_letters else "a JobFilter"
        raise ValueError(f"{action} needs {kind}")
    if action in (Action.DISCARD, Action.DISCARD_LETTERS) and not note.strip():
        raise ValueError("A note is needed that says why they are discarded")
    if action == Action.CHANGE_QUEUE:
        known_queue(queue)
    now = timezone.now()
    request = Request(
        action=str(action),
        filter=dump_filter(selection, now),
        asked_at=now.isoformat(),
        note=note.strip()[:500],
        queue=queue,
        rate=rate,
        force=force,
    ).asked_by(actor)
    handler = registry.find(_HANDLERS.get(action, CHANGE))
    assert handler is not None, "kjo_django is in INSTALLED_APPS"
    definition = JobDefinition(handler).using(queue=_operations_queue())
    stored = definition.enqueue(**dataclasses.asdict(request))
    return Job.objects.using(jobs_database()).get(pk=stored.job_id)


def replay_or_start(
    selection: DeadLetterFilter,
    *,
    actor: str,
    rate: float | None = None,
    force: bool = False,
    limit: int | None = None,
    on_changed: Observer | None = None,
) -> ReplayReport | Job:
    """Replay dead letters here and now if they are few, else as a job.

    :param rate: at most so many a second, from ``RATE_MIN`` to ``RATE_MAX``.
    :param limit: the oldest so many only, at most ``SYNCHRONOUS_LIMIT``.
    :param on_changed: told of what is changed here; a job tells by its own row.
    :raises ValueError: what is asked cannot be done.
    """
    checked_rate(rate)
    if limit is not None:
        if not 0 < limit <= SYNCHRONOUS_LIMIT:
            raise ValueError(f"A limit must be from 1 to {SYNCHRONOUS_LIMIT}, not {limit!r}")
        # By their ids: a job that is interrupted must not begin with others.
        keys = dead_letters.select(selection).values_list("pk", flat=True)
        selection = DeadLetterFilter(ids=list(keys[:limit]))
    if _is_large(dead_letters.select(selection), rate):
        return start_bulk(Action.REPLAY_LETTERS, selection, actor=actor, rate=rate, force=force)
    return dead_letters.replay(
        selection, rate=rate, force=force, actor=actor, on_changed=on_changed
    )


def discard_or_start(
    selection: DeadLetterFilter, *, note: str, actor: str, on_changed: Observer | None = None
) -> int | Job:
    """The same for discarding; returns how many were closed, or the job."""
    if _is_large(dead_letters.select(selection)):
        return start_bulk(Action.DISCARD_LETTERS, selection, actor=actor, note=note)
    return dead_letters.discard(selection, note=note, actor=actor, on_changed=on_changed)


def change_or_start(
    action: Action | str,
    selection: JobFilter,
    *,
    actor: str,
    note: str = "",
    queue: str = "",
    on_changed: Observer | None = None,
) -> Outcomes | Job:
    """The same for jobs: requeue, cancel, run now, move to another queue, or discard."""
    found = search.find(selection)
    if _is_large(found):
        return start_bulk(action, selection, actor=actor, note=note, queue=queue)
    return _change(action, found, actor, note, queue, on_changed, no_progress)


# --- What the jobs do -----------------------------------------------------------------------------


def replay_dead_letters(context: JobContext, **payload: Any) -> dict[str, Any]:
    """Replay what a request asks for; the handler of ``REPLAY``."""
    request = Request(**payload)
    actor = actor_of(request)
    selection = load_letter_filter(request.filter)
    total = bounded_count(dead_letters.select(selection))
    report = dead_letters.replay(
        selection,
        rate=request.rate,
        force=request.force,
        actor=actor,
        progress=_telling(context, total),
    )
    if report.stopped:
        # What is left is open still: the next attempt goes on with it.
        raise Retry(report.stopped, delay=RESTS_FOR)
    return report.as_dict()


def discard_dead_letters(context: JobContext, **payload: Any) -> dict[str, Any]:
    """Discard what a request asks for; the handler of ``DISCARD``."""
    request = Request(**payload)
    actor = actor_of(request)
    selection = load_letter_filter(request.filter)
    total = bounded_count(dead_letters.select(selection))
    count = dead_letters.discard(
        selection,
        note=request.note,
        actor=actor,
        progress=_telling(context, total, request.rate),
    )
    return {"discarded": count}


def change_jobs(context: JobContext, **payload: Any) -> dict[str, Any]:
    """Change the jobs a request asks for; the handler of ``CHANGE``."""
    request = Request(**payload)
    actor = actor_of(request)
    assert isinstance(request.filter, str)
    # What has ended since was run again by an earlier attempt of this very job, or by others. It is
    # not to change itself either.
    ended_since = Q(finished_at__gte=_moment(request.asked_at))
    found = search.find(_as_seen_by(actor, search.parse(request.filter))).exclude(ended_since)
    found = found.exclude(pk=context.job_id)
    progress = _telling(context, bounded_count(found), request.rate)
    outcomes = _change(request.action, found, actor, request.note, request.queue, None, progress)
    return {"counts": outcomes.counts, "changed": outcomes.changed_count}


def _change(
    action: Action | str,
    found: QuerySet[Job],
    actor: str,
    note: str,
    queue: str,
    on_changed: Observer | None,
    progress: Progress,
) -> Outcomes:
    match Action(action):
        case Action.REQUEUE:
            return jobs.requeue(found, actor=actor, on_changed=on_changed, progress=progress)
        case Action.CANCEL:
            return jobs.cancel(found, actor=actor, on_changed=on_changed, progress=progress)
        case Action.RUN_NOW:
            return rescheduling.run_now(
                found, actor=actor, on_changed=on_changed, progress=progress
            )
        case Action.CHANGE_QUEUE:
            return rescheduling.change_queue(
                found, queue, actor=actor, on_changed=on_changed, progress=progress
            )
        case Action.DISCARD:
            letters = DeadLetter.objects.filter(job__in=found.order_by().values("pk"))
            count = dead_letters.discard(
                letters, note=note, actor=actor, on_changed=on_changed, progress=progress
            )
            return Outcomes({"discarded": count} if count else {}, count)
        case other:
            raise ValueError(f"{other} is not done to jobs")


def _telling(context: JobContext, total: int, rate: float | None = None) -> Progress:
    """Return what is called after each chunk: it tells, keeps the pace, and ends an aborted run,
    with what was done so far committed."""
    began = timezone.now()
    of = f"{total:,}+" if total >= COUNT_LIMIT else f"{total:,}"

    def tell(done: int, _: int | None) -> None:
        percent = min(100.0, 100 * done / total) if total else 100.0
        context.progress(percent, f"{done:,} of {of}")
        if rate is not None:
            ahead = done / rate - (timezone.now() - began).total_seconds()
            context.cancel_event.wait(max(0.0, ahead))
        context.raise_if_aborted()

    return tell


def _as_seen_by(actor: str, selection: JobFilter) -> JobFilter:
    """Return what a user means by it: one who may not see payloads does not search them."""
    if not isinstance(actor, UserActor) or actor.user.has_perm("kjo_django.view_payload"):
        return selection
    try:
        return selection.limited()
    except ValueError as error:
        raise PermanentError(f"{actor}: {error}") from None


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
    plain: dict[str, Callable[[Any], Any]] = {
        "ids": lambda ids: [str(id) for id in ids],
        "since": datetime.isoformat,
        "until": datetime.isoformat,
    }
    frozen_letters = dataclasses.replace(selection, until=until)
    return {
        field.name: plain.get(field.name, str)(value)
        for field in dataclasses.fields(frozen_letters)
        if (value := getattr(frozen_letters, field.name)) is not None
    }


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


def _is_large(rows: QuerySet[Any], rate: float | None = None) -> bool:
    count = bounded_count(rows, SYNCHRONOUS_LIMIT + 1)
    return count > SYNCHRONOUS_LIMIT or bool(rate and count / rate > PATIENT_SECONDS)


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
