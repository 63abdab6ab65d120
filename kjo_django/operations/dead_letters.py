"""Replay and discard: what operators do to open dead letters.

A dead letter of a job is replayed by requeueing the job; if the job's id has been enqueued again
since, as a job of its own with what the letter holds; that of a message nobody enqueued here by
publishing it again, byte for byte. Each letter changes in a transaction of its own, so a run that
is interrupted is simply run again: it goes on with what is still open.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils import timezone

from kjo_django import signals
from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import check_payload_size
from kjo_django.exceptions import MessageError
from kjo_django.messages.serializers import JSON, serializer_for
from kjo_django.models import DeadLetter, DeadLetterState, source_of_job
from kjo_django.operations import redaction, republishing
from kjo_django.operations.counting import COUNT_LIMIT, bounded_count
from kjo_django.operations.internal import is_internal
from kjo_django.operations.notifications import tell_of_letters
from kjo_django.operations.replayer import Replayer
from kjo_django.operations.reports import (
    REFUSED_LOOP,
    REFUSED_PROCESSED,
    Pace,
    ReplayReport,
)
from kjo_django.operations.reprocessing import Reprocessor
from kjo_django.operations.rows import (
    Observer,
    Progress,
    chunks,
    lock,
    no_progress,
    tell_after_commit,
)
from kjo_django.states import JobState
from kjo_django.store.transactions import jobs_database


class Mode(enum.StrEnum):
    """How dead letters are replayed."""

    REPUBLISH = "republish"
    """Publish the message, or requeue the job: a worker runs it."""
    REPROCESS = "reprocess"
    """Run it here and now, in this process."""


PREVIEW_LIMIT = 1000
"""Dead letters a preview looks at, unless it is told otherwise."""
FAILURES_IN_A_ROW = 3
"""After so many refusals of the transport a run stops: it is down, not picky."""


@dataclass(frozen=True, slots=True)
class DeadLetterFilter:
    """Which open dead letters; what is not given does not restrict."""

    ids: Collection[UUID | str] | None = None
    queue: str | None = None
    """Of this queue, and of the one that carries its messages' retries."""
    handler: str | None = None
    reason: str | None = None
    error: str | None = None
    """Part of the error's text or type, in any case."""
    fingerprint: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    @property
    def is_empty(self) -> bool:
        """Whether it takes everything."""
        return self == DeadLetterFilter()


Selection = DeadLetterFilter | QuerySet[DeadLetter]


def select(selection: Selection) -> QuerySet[DeadLetter]:
    """Return the open dead letters of a selection, oldest first."""
    using = jobs_database()
    if isinstance(selection, QuerySet):
        return selection.using(using).filter(state=DeadLetterState.OPEN).order_by("pk")
    rows = DeadLetter.objects.using(using).filter(state=DeadLetterState.OPEN)
    return restricted(rows, selection).order_by("pk")


def restricted(rows: QuerySet[DeadLetter], selection: DeadLetterFilter) -> QuerySet[DeadLetter]:
    """Return those of the rows, of any state, that a filter describes."""
    exact = {"handler": selection.handler, "reason": selection.reason}
    exact["fingerprint"] = selection.fingerprint
    rows = rows.filter(**{name: value for name, value in exact.items() if value is not None})
    if selection.queue is not None:
        retries = get_settings().queue(selection.queue).retries
        rows = rows.filter(queue__in={selection.queue, retries})
    if selection.ids is not None:
        rows = rows.filter(pk__in=[_id(each) for each in selection.ids])
    if selection.error:
        rows = rows.filter(
            Q(error__icontains=selection.error) | Q(error_type__icontains=selection.error)
        )
    if selection.since is not None:
        rows = rows.filter(failed_at__gte=selection.since)
    if selection.until is not None:
        rows = rows.filter(failed_at__lt=selection.until)
    return rows


def replay(
    selection: Selection,
    *,
    limit: int | None = None,
    rate: float | None = None,
    dry_run: bool = False,
    force: bool = False,
    mode: Mode = Mode.REPUBLISH,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
) -> ReplayReport:
    """Replay open dead letters, oldest first, up to those there are now.

    :param limit: replay at most so many.
    :param rate: at most so many a second, from ``reports.RATE_MIN`` to ``RATE_MAX``.
    :param dry_run: change nothing; report what would be replayed and what would be refused.
    :param force: replay also what has been replayed too often or has taken effect before; a message
        of the latter kind gets a new id, or it would be dropped as a duplicate.
    :param mode: publish them for the workers, or run them here and now.
    :param actor: who asked, for the log and the letters' notes.
    :param on_changed: told of each letter inside its transaction.
    """
    pace = Pace(rate)
    rows = select(selection)
    if dry_run:
        return preview(rows, limit=limit, force=force, progress=progress)
    report = ReplayReport("table")
    known = bounded_count(rows)
    total = None if known == COUNT_LIMIT else known
    if limit is not None:
        total = min(limit, known)
    failures = 0
    with ExitStack() as stack:
        reprocessor = stack.enter_context(Reprocessor()) if mode == Mode.REPROCESS else None
        replayer = Replayer(
            report, force=force, actor=actor, on_changed=on_changed, reprocessor=reprocessor
        )
        for key in _keys(rows):
            if limit is not None and report.replayed >= limit:
                break
            pace.wait()
            failed_before = report.failed
            replayer.replay(key)
            failures = failures + 1 if report.failed > failed_before else 0
            progress(report.matched, total)
            if failures == FAILURES_IN_A_ROW:
                report.stopped = f"{failures} in a row were not accepted; run it again later"
                break
    return report


def edit_and_replay(
    id: UUID | str,
    value: bytes,
    *,
    actor: str = "",
    on_changed: Observer | None = None,
) -> ReplayReport:
    """Replay one open dead letter with another value; it keeps the value it died with.

    Whoever calls this for somebody has checked the permission ``edit_payload``.

    :param value: the payload, or the event's bytes, repaired. Where it says ``[redacted]``, as
        ``redaction.shown_value`` showed it, what the letter has there is kept.
    :raises MessageError: it is not what its content type says.
    :raises ValueError: it is too large, or nothing was hidden where it says so, or it is that of an
        internal job.
    """
    check_payload_size(value)
    letter = select(DeadLetterFilter(ids=[id])).select_related("job").first()
    if letter is not None:
        of_job = letter.job.handler if letter.job is not None else ""
        if is_internal(letter.handler) or is_internal(of_job):
            raise ValueError("An internal job cannot be edited: its payload says who may do what")
        value = _with_hidden(letter, value)
        check_payload_size(value)
    report = ReplayReport("table")
    replayer = Replayer(report, force=False, actor=actor, on_changed=on_changed, value=value)
    replayer.replay(_id(id))
    return report


def not_open(ids: Collection[UUID | str]) -> tuple[list[str], dict[str, str]]:
    """Return those of the ids that no dead letter has, and the states of those that are closed.

    :raises ValueError: one is no id.
    """
    wanted = {_id(each): str(each) for each in ids}
    rows = DeadLetter.objects.using(jobs_database()).filter(pk__in=wanted)
    states = dict(rows.values_list("pk", "state"))
    unknown = [given for id, given in wanted.items() if id not in states]
    closed = {str(id): state for id, state in states.items() if state != DeadLetterState.OPEN}
    return unknown, closed


def count(selection: Selection) -> tuple[int, bool]:
    """Return how many there are among the newest 100,000 open dead letters, and whether there may
    be more beyond them."""
    every = select(DeadLetterFilter()).order_by("-pk").values_list("pk", flat=True)
    floor = next(iter(every[COUNT_LIMIT:][:1]), None)
    rows = select(selection)
    return (rows if floor is None else rows.filter(pk__gt=floor)).count(), floor is not None


def preview(
    selection: Selection,
    *,
    limit: int | None = PREVIEW_LIMIT,
    force: bool = False,
    progress: Progress = no_progress,
) -> ReplayReport:
    """Report what a replay would do, with what it would refuse and what has taken effect already;
    changes nothing.

    :param limit: look at no more than the oldest so many, ``report.is_capped`` says if there are
        more; None for all.
    """
    rows = select(selection)
    report = ReplayReport("table", is_dry_run=True)
    columns = (
        *("pk", "reason", "handler", "error_type", "replay_count", "message_id", "source_id"),
        *("job_id", "job__state", "job__generation"),
    )
    for keys in chunks(rows):
        found = list(rows.filter(pk__in=keys).values(*columns))
        done = republishing.processed({row["message_id"]: row["handler"] for row in found})
        for row in found:
            if limit is not None and report.matched >= limit:
                report.is_capped = True
                return report
            report.count(row["reason"], row["handler"], row["error_type"])
            report.already_processed += row["message_id"] in done
            refusal = None if force else _foreseen_refusal(row, is_done=row["message_id"] in done)
            if refusal is not None:
                report.refuse(str(row["pk"]), refusal)
        progress(report.matched, None)
    return report


def _foreseen_refusal(row: dict[str, Any], *, is_done: bool) -> str | None:
    if row["replay_count"] >= get_settings().max_replays:
        return REFUSED_LOOP
    if row["job__state"] is not None:
        if row["source_id"] != source_of_job(row["job_id"], row["job__generation"]):
            return None  # it runs as a job of its own
        return None if row["job__state"] == JobState.FAILED else f"the job is {row['job__state']}"
    return REFUSED_PROCESSED if is_done else None


def discard(
    selection: Selection,
    *,
    note: str,
    actor: str = "",
    on_changed: Observer | None = None,
    progress: Progress = no_progress,
) -> int:
    """Close open dead letters without replay; returns how many.

    :param note: why, for whoever finds them.
    """
    if not note.strip():
        raise ValueError("A note is needed that says why these dead letters are discarded")
    using = jobs_database()
    text = f"{note.strip()} ({actor})" if actor else note.strip()
    count = 0
    for keys in chunks(select(selection)):
        with transaction.atomic(using=using):
            open_rows = DeadLetter.objects.using(using).filter(state=DeadLetterState.OPEN)
            letters = lock(open_rows.only("pk", "queue", "handler", "topic", "message_id"), keys)
            count += open_rows.filter(pk__in=[letter.pk for letter in letters]).update(
                state=DeadLetterState.DISCARDED, closed_at=timezone.now(), note=text[:500]
            )
            if on_changed is not None and letters:
                on_changed(letters)
            tell = functools.partial(
                tell_of_letters, signals.message_discarded, letters, note=note.strip()
            )
            tell_after_commit(using, tell)
        progress(count, None)
    return count


# --- Details --------------------------------------------------------------------------------------


def _id(given: UUID | str) -> UUID:
    try:
        return given if isinstance(given, UUID) else UUID(given)
    except ValueError:
        raise ValueError(f"{given!r:.80} is no id of a dead letter") from None


def _with_hidden(letter: DeadLetter, value: bytes) -> bytes:
    """Return an edited value, with what its editor was not shown; byte for byte if it was all."""
    serializer = serializer_for(letter.content_type or JSON.content_type)
    edited = serializer.loads(value)
    try:
        if not redaction.is_marked(edited):
            return value
        try:
            original = [serializer.loads(bytes(letter.value))] if letter.value is not None else []
        except MessageError:
            original = []  # nothing was shown of it, so nothing was hidden
        return serializer.dumps(redaction.restored(edited, *original))
    except RecursionError:
        raise ValueError("The value is nested too deeply") from None


def _keys(rows: QuerySet[DeadLetter]) -> Iterator[Any]:
    for keys in chunks(rows):
        yield from keys
