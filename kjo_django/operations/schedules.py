"""What operators do to schedules: add, edit, pause, resume, run now, delete; and what they see."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.utils.translation import gettext_noop as _

from kjo_django.conf import read_schedule
from kjo_django.enqueue.storing import store
from kjo_django.ids import uuid7
from kjo_django.logs import get_logger
from kjo_django.models import Schedule
from kjo_django.operations.jobs import Outcomes
from kjo_django.operations.rows import Observer, key_of, where_written
from kjo_django.refusals import Wording
from kjo_django.runtime import Runtime, current_runtime
from kjo_django.schedules.declarations import (
    COLUMNS,
    TIMES,
    ScheduleFaults,
    change_columns,
    checked,
    columns_of,
    insert,
    locked,
)
from kjo_django.schedules.ticker import id_prefix, tick_job
from kjo_django.values import refuse_unknown

logger = get_logger("kjo_django")

Selection = QuerySet[Schedule] | Iterable[Schedule | UUID | str]
"""Schedules, or their primary keys."""


class ScheduleResult(enum.StrEnum):
    """The result of an operation on one schedule."""

    CHANGED = "changed"
    UNCHANGED = "unchanged"
    ENQUEUED = "enqueued"
    DELETED = "deleted"
    DECLARED = "declared"
    """The code declares the schedule and would bring it back."""
    BROKEN = "broken"
    """Its job cannot be enqueued; ``problem_of`` tells why."""
    NOT_FOUND = "not_found"


CHANGES = frozenset({ScheduleResult.CHANGED, ScheduleResult.ENQUEUED, ScheduleResult.DELETED})


# --- Changes --------------------------------------------------------------------------------------


def add(
    name: str, *, actor: str = "", on_changed: Observer | None = None, **options: Any
) -> Schedule:
    """Add a schedule of operators, and return it.

    :param options: those of ``ScheduleOptions``.
    :param on_changed: called with the row inside the transaction.
    :raises ScheduleFaults: the name is taken, or an option is wrong.
    """
    runtime = current_runtime()
    found = checked(options, runtime.clock.now())
    with runtime.store.transaction():
        row = insert(name, found, runtime, actor=actor)
        if on_changed is not None:
            on_changed([row])
    return row


def edit(
    schedule: Schedule, *, actor: str = "", on_changed: Observer | None = None, **options: Any
) -> set[str]:
    """Change options of a schedule, and return the names of those that differ now.

    What is not given stays. Of a schedule that the code declares, these options are the operator's
    from now on, until ``reset``.

    :raises ScheduleFaults: an option is wrong, or the schedule is gone.
    """
    refuse_unknown(options, COLUMNS, "edit")
    runtime = current_runtime()
    now = runtime.clock.now()
    with locked(runtime, schedule.pk) as row:
        if row is None:
            raise ScheduleFaults({"": Wording(_("The schedule is gone."))})
        given = {name: getattr(row, name) for name in COLUMNS} | options
        found = columns_of(checked(given, now, may_have_ended=not options.keys() & TIMES))
        changed = change_columns(row, found, now)
        if changed:
            if row.source == Schedule.Source.CODE:
                row.overridden = sorted({*row.overridden, *changed})
            _save(row, runtime, actor, on_changed)
    return changed


def reset(selection: Selection, **options: Any) -> Outcomes:
    """Give schedules of the code back what the code declares; ``Outcomes`` counts them."""

    def change(row: Schedule, runtime: Runtime) -> ScheduleResult:
        if not row.overridden or row.declaration is None:
            return ScheduleResult.UNCHANGED
        given = {name: value for name, value in row.declaration.items() if value not in (None, "")}
        declared, problems = read_schedule(given, "declaration")
        if problems:
            return ScheduleResult.BROKEN
        row.overridden = []
        change_columns(row, columns_of(declared), runtime.clock.now())
        return ScheduleResult.CHANGED

    return _change_each(selection, change, **options)


def pause(selection: Selection, **options: Any) -> Outcomes:
    """Let schedules have no ticks until they are resumed."""

    def change(row: Schedule, runtime: Runtime) -> ScheduleResult:
        if row.is_paused:
            return ScheduleResult.UNCHANGED
        row.is_paused = True
        return ScheduleResult.CHANGED

    return _change_each(selection, change, **options)


def resume(selection: Selection, **options: Any) -> Outcomes:
    """Undo ``pause``; ticks of the meantime are not made up for."""

    def change(row: Schedule, runtime: Runtime) -> ScheduleResult:
        if not row.is_paused:
            return ScheduleResult.UNCHANGED
        now = runtime.clock.now()
        row.is_paused = False
        row.next_at = row.timetable.next_after(max(now, row.last_at or now), row.last_at)
        return ScheduleResult.CHANGED

    return _change_each(selection, change, **options)


def run_now(selection: Selection, **options: Any) -> Outcomes:
    """Enqueue the jobs of schedules once, now; their ticks stay as they are."""

    def change(row: Schedule, runtime: Runtime) -> ScheduleResult:
        now = runtime.clock.now().replace(microsecond=0)
        try:
            job = tick_job(row, now, f"{id_prefix(row.name)}now:{uuid7()}")
        except (ValueError, TypeError):
            return ScheduleResult.BROKEN
        (answer,) = store([job], runtime=runtime)
        row.last_job_id = answer.job_id
        return ScheduleResult.ENQUEUED

    return _change_each(selection, change, **options)


def delete(selection: Selection, **options: Any) -> Outcomes:
    """Delete schedules that the code does not declare; their jobs stay."""

    def change(row: Schedule, runtime: Runtime) -> ScheduleResult:
        if row.source == Schedule.Source.CODE and row.is_enabled:
            return ScheduleResult.DECLARED
        return ScheduleResult.DELETED

    return _change_each(selection, change, **options)


def _change_each(
    selection: Selection,
    change: Callable[[Schedule, Runtime], ScheduleResult],
    *,
    actor: str = "",
    on_changed: Observer | None = None,
) -> Outcomes:
    """Carry out a change on each schedule, in a transaction of its own.

    :param change: changes the locked row, unsaved, and returns what becomes of it.
    """
    runtime, outcomes = current_runtime(), Outcomes()
    if isinstance(selection, QuerySet):
        selection = where_written(selection)
    for each in selection:
        with locked(runtime, key_of(each)) as current:
            if current is None:
                outcomes.add(ScheduleResult.NOT_FOUND)
                continue
            result = change(current, runtime)
            if result == ScheduleResult.DELETED:
                if on_changed is not None:
                    on_changed([current])
                current.delete(using=runtime.database)
            elif result in CHANGES:
                _save(current, runtime, actor, on_changed)
        outcomes.add(result)
        outcomes.changed_count += result in CHANGES
    return outcomes


def _save(row: Schedule, runtime: Runtime, actor: str, on_changed: Observer | None) -> None:
    row.changed_by = actor[:150]
    row.updated_at = runtime.clock.now()
    row.problem = ""
    row.save(using=runtime.database)
    if on_changed is not None:
        on_changed([row])
