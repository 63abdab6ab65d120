"""The schedules that the code declares, and how they come into the table.

``@job(schedule=…)`` and ``KJO["SCHEDULES"]`` declare them; of one name the settings count. What an
operator has changed of a schedule stays as the operator wants it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder
from django.db import IntegrityError, connections
from django.db.models import Q, QuerySet
from django.utils.translation import gettext_noop as _

from kjo_django import registry
from kjo_django.conf import ScheduleOptions, Settings, read_schedule
from kjo_django.logs import get_logger
from kjo_django.models import Schedule
from kjo_django.refusals import RefusedError, Wording, shown
from kjo_django.runtime import Runtime, current_runtime
from kjo_django.values import Problem, meant_by

logger = get_logger("kjo_django")

MAX_NAME = 100
COLUMNS = (
    *("job", "payload", "cron", "every", "at", "timezone", "queue", "catch_up", "overlap"),
    *("jitter", "expires_after", "starts_at", "ends_at"),
)
"""The columns of a schedule that its declaration gives, and that operators may change."""
TIMES = frozenset({"cron", "every", "at", "timezone", "starts_at", "ends_at"})
"""Those of them that say when its ticks are."""
GIVEN = "schedule"
"""What the options that an operator gives are called in the texts of problems."""
REMOVED = _("The code does not declare it any more.")
STALE_AFTER = timedelta(hours=1)
"""A schedule that the code declares again after this begins anew: its old ticks are not made up
for. During a deploy, workers of two releases declare and remove it in turn."""


# --- What is wrong with one -----------------------------------------------------------------------


def name_fault(name: Any) -> Wording | None:
    """Return why a schedule cannot have this name; None if it can."""
    if not isinstance(name, str) or not name.strip() or len(name) > MAX_NAME:
        text = _("The name of a schedule is text of 1 to %(most)s characters, not %(name).120s.")
        return Wording(text, {"most": MAX_NAME, "name": repr(name)})
    if ":" in name or not name.isprintable():
        text = _("The name of a schedule has no ':' and no control characters: %(name).120s.")
        return Wording(text, {"name": repr(name)})
    return None


def job_faults(options: ScheduleOptions, where: str) -> list[Problem]:
    """Return why a tick of a schedule could not be enqueued by this process."""
    handler = registry.enqueueable(options.job)
    if handler is None:
        known = [each.name for each in registry.handlers()]
        hint = meant_by(options.job, known, Wording(_("Is the app that declares it installed?")))
        text = _("%(field)s: no job is named %(name)r.")
        facts = {"field": f"{where}['job']", "name": options.job}
        return [Problem(Wording(text, facts), hint, key="job")]
    problems = []
    if fault := handler.check_arguments(options.payload):
        text = _("%(field)s: the job %(job)s: %(fault)s.")
        facts = {"field": f"{where}['payload']", "job": options.job, "fault": argument_fault(fault)}
        problems.append(Problem(Wording(text, facts), "", key="payload"))
    if options.queue and options.queue not in registry.queue_names():
        otherwise = Wording(_("Declare it in KJO['QUEUES']."))
        hint = meant_by(options.queue, registry.queue_names(), otherwise)
        text = _("%(field)s: no queue is named %(name)r.")
        facts = {"field": f"{where}['queue']", "name": options.queue}
        problems.append(Problem(Wording(text, facts), hint, key="queue"))
    return problems


_ARGUMENTS = (
    (re.compile("missing a required argument: '(.+)'"), _("missing a required argument: %(name)r")),
    (
        re.compile("missing a required keyword-only argument: '(.+)'"),
        _("missing a required keyword-only argument: %(name)r"),
    ),
    (
        re.compile("got an unexpected keyword argument '(.+)'"),
        _("got an unexpected keyword argument %(name)r"),
    ),
)


def argument_fault(fault: str) -> str:
    """Return what Python says of arguments that do not fit, for people if it is known."""
    for pattern, template in _ARGUMENTS:
        if found := pattern.fullmatch(fault):
            return Wording(template, {"name": found[1]})
    return fault


class ScheduleFaults(RefusedError):
    """The options of a schedule are wrong: by field, "" for their combination."""

    def __init__(self, faults: Mapping[str, Problem | str | Exception]) -> None:
        self._faults = faults
        ValueError.__init__(self, _joined(self.faults))

    @property
    def faults(self) -> dict[str, str]:
        """By field, in English."""
        return self._texts(str)

    def translated_faults(self) -> dict[str, str]:
        """Return them by field, in the active language."""
        return self._texts(shown)

    def translated(self) -> str:
        """Return what ``str`` says, in the active language."""
        return _joined(self.translated_faults())

    def _texts(self, text_of: Callable[[object], str]) -> dict[str, str]:
        return {
            key: field_text(fault, text_of) if isinstance(fault, Problem) else text_of(fault)
            for key, fault in self._faults.items()
        }


def _joined(faults: Mapping[str, str]) -> str:
    return " ".join(f"{key}: {fault}" if key else fault for key, fault in faults.items())


def checked(
    given: Mapping[str, Any], now: datetime, *, may_have_ended: bool = False
) -> ScheduleOptions:
    """Return the options of a schedule that an operator gives.

    :param given: those of ``ScheduleOptions``; None and "" leave an option at its default.
    :param may_have_ended: whether it needs no tick in the future.
    :raises ScheduleFaults: some are wrong, or there will be no tick.
    """
    where = GIVEN
    kept = {name: value for name, value in given.items() if value not in (None, "")}
    options, problems = read_schedule(kept, where)
    if not options.job:
        message = Wording(_("%(field)s is needed."), {"field": f"{where}['job']"})
        problems.append(Problem(message, "", key="job"))
    problems = problems or job_faults(options, where)
    if not (problems or is_held(options, current_runtime())):
        text = _("%(field)s: its jobs are in another database than this schedule.")
        hint = Wording(
            _("Add the schedule there: kjo_schedule --database, or the database of the dashboard.")
        )
        message = Wording(text, {"field": f"{where}['queue']"})
        problems.append(Problem(message, hint, key="queue"))
    table = Schedule(**columns_of(options)).timetable
    if not (problems or may_have_ended) and table.next_after(now) is None:
        when = "at" if options.at else "cron"
        text = _("%(field)s: there is no tick in the future.")
        message = Wording(text, {"field": f"{where}[{when!r}]"})
        problems = [Problem(message, "", key=when)]
    if problems:
        raise ScheduleFaults({one.key: one for one in reversed(problems)})
    return options


def field_text(problem: Problem, text_of: Callable[[str], str]) -> str:
    """Return the text of a problem beside the field it is about, with which its own begins.

    :param text_of: ``str`` for programs, ``shown`` for people.
    """
    text = text_of(problem.message).removeprefix(f"{GIVEN}[{problem.key!r}]").removeprefix(GIVEN)
    text = text.lstrip(": ")
    is_needed = problem.key in ("job", "queue") or problem.is_unknown_key
    hint = text_of(problem.hint) if is_needed else ""
    return f"{text[:1].upper()}{text[1:]} {hint}".strip()


def setting_faults(settings: Settings) -> list[Problem]:
    """Return what is wrong with ``KJO["SCHEDULES"]``, for the system checks."""
    problems = []
    for name, given in settings.schedules.items():
        where = f"KJO['SCHEDULES'][{name!r}]"
        if fault := name_fault(name):
            problems.append(Problem(f"{where}: {fault}", ""))
            continue
        options, found = read_schedule(given, where)
        problems += found or job_faults(options, where)
    return problems


def problem_of(row: Schedule) -> str:
    """Return why the next tick of a schedule cannot be stored; "" if nothing is known against it.

    This process looks at its own handlers; the row tells what a worker met.
    """
    faults = job_faults(options_of(row), GIVEN)
    return str(faults[0]) if faults else row.problem


def problem_shown(row: Schedule) -> str:
    """Return ``problem_of`` for people, in the active language if it has a translation."""
    faults = job_faults(options_of(row), GIVEN)
    if faults or row.problem != REMOVED:
        return faults[0].translated() if faults else row.problem
    return shown(Wording(REMOVED))


# --- Rows -----------------------------------------------------------------------------------------


def options_of(row: Schedule) -> ScheduleOptions:
    """Return the options of a row."""
    return ScheduleOptions(**{name: getattr(row, name) for name in COLUMNS})


def columns_of(options: ScheduleOptions) -> dict[str, Any]:
    """Return the columns of a row with these options."""
    return {name: getattr(options, name) for name in COLUMNS}


def declared(settings: Settings) -> dict[str, ScheduleOptions]:
    """Return the schedules that the code of this process declares, by name.

    A faulty one is left out; the system checks and the log name it.
    """
    found = {
        handler.name: replace(handler.options.schedule, job=handler.name)
        for handler in registry.handlers()
        if handler.options.schedule is not None
    }
    for name, given in settings.schedules.items():
        options, problems = read_schedule(given, f"KJO['SCHEDULES'][{name!r}]")
        if not problems and not options.job:
            problems = job_faults(options, f"KJO['SCHEDULES'][{name!r}]")
        if fault := name_fault(name) or next(iter(problems), None):
            logger.error("The schedule %r is left as it is: %s", name, fault)
            continue
        found[name] = options
    return found


def synchronize(runtime: Runtime) -> None:
    """Bring the declared schedules into the table; any number of processes may do so at once.

    New ones are inserted, changed ones updated except for what operators have changed, and those
    that are not declared any more are disabled. A schedule is in the database of its jobs.
    """
    every = declared(runtime.settings)
    wanted = {name: each for name, each in every.items() if is_held(each, runtime)}
    rows = Schedule.objects.using(runtime.database)
    # In no order: see in_order.
    ours = rows.filter(Q(source="code") | Q(name__in=list(wanted))).order_by()
    known = {row.name: row for row in ours}
    now = runtime.clock.now()
    fresh = [_new_row(name, wanted[name], now) for name in wanted if name not in known]
    if fresh:
        runtime.store.insert_missing(fresh)
    faulty = runtime.settings.schedules.keys() - every.keys()
    for name, row in known.items():
        if row.source != Schedule.Source.CODE:
            logger.warning(
                "The schedule %r is declared in code and was added by an operator: the operator's "
                "stays, rename one of them",
                name,
            )
        elif name not in wanted and name not in faulty:
            rows.filter(pk=row.pk, is_enabled=True).update(
                is_enabled=False, problem=REMOVED, updated_at=now
            )
        elif name in wanted and _differs(row, wanted[name]):
            _update_row(row, wanted[name], runtime)


def is_held(options: ScheduleOptions, runtime: Runtime) -> bool:
    """Return whether the jobs of a schedule are in this database; those of no job are in all."""
    handler = registry.find(options.job)
    queue = options.queue or (handler.options.queue if handler is not None else "")
    return not queue or runtime.holds(queue)


def _new_row(name: str, options: ScheduleOptions, now: datetime) -> Schedule:
    row = Schedule(
        name=name,
        source=Schedule.Source.CODE,
        is_enabled=options.enabled,
        declaration=declaration_of(options),
        created_at=now,
        updated_at=now,
        **columns_of(options),
    )
    row.next_at = row.timetable.next_after(now)
    return row


def declaration_of(options: ScheduleOptions) -> dict[str, Any]:
    """Return the declared columns as JSON holds them."""
    found: dict[str, Any] = json.loads(json.dumps(columns_of(options), cls=DjangoJSONEncoder))
    return found


def _differs(row: Schedule, options: ScheduleOptions) -> bool:
    return row.is_enabled != options.enabled or row.declaration != declaration_of(options)


def _update_row(row: Schedule, options: ScheduleOptions, runtime: Runtime) -> None:
    with locked(runtime, row.pk) as current:
        if current is None or not _differs(current, options):
            return
        changes = {
            name: value
            for name, value in columns_of(options).items()
            if name not in current.overridden
        }
        begins = options.enabled and not current.is_enabled
        current.is_enabled = options.enabled
        current.declaration = declaration_of(options)
        current.problem = ""
        change_columns(current, changes, runtime.clock.now(), begins=begins)
        current.save(using=runtime.database)


@contextmanager
def locked(runtime: Runtime, key: UUID | None) -> Iterator[Schedule | None]:
    """Yield a schedule as it is now, locked in a transaction; None if it is gone."""
    if key is None:
        yield None
        return
    with runtime.store.writing():
        yield Schedule.objects.using(runtime.database).select_for_update().filter(pk=key).first()


def insert(name: str, options: ScheduleOptions, runtime: Runtime, *, actor: str) -> Schedule:
    """Store a schedule of operators, and return it; one that is not enabled is paused.

    :raises ScheduleFaults: it cannot have the name.
    """
    if fault := name_fault(name):
        raise ScheduleFaults({"name": fault})
    now = runtime.clock.now()
    row = Schedule(
        name=name,
        is_paused=not options.enabled,
        changed_by=actor[:150],
        created_at=now,
        updated_at=now,
        **columns_of(options),
    )
    row.next_at = row.timetable.next_after(now)
    try:
        with runtime.store.transaction():
            row.save(using=runtime.database, force_insert=True)
    except IntegrityError:
        taken = Wording(_("There is a schedule named %(name)r."), {"name": name})
        raise ScheduleFaults({"name": taken}) from None
    return row


def change_columns(
    row: Schedule, changes: Mapping[str, Any], now: datetime, *, begins: bool = False
) -> set[str]:
    """Set columns of a locked row, unsaved, and when its next tick is; return those that differ.

    :param begins: whether it has ticks from now on, and had none before.
    """
    changed = {name for name, value in changes.items() if getattr(row, name) != value}
    for name in changed:
        setattr(row, name, changes[name])
    is_stale = begins and (row.next_at is None or row.next_at < now - STALE_AFTER)
    if is_stale or changed & TIMES:
        row.next_at = row.timetable.next_after(max(now, row.last_at or now), row.last_at)
    row.updated_at = now
    return changed


# --- Rows in their order --------------------------------------------------------------------------


def in_order(rows: QuerySet[Schedule], limit: int | None = None) -> list[Schedule]:
    """Return the first rows. MySQL sorts none whose JSON is larger than its buffer for sorting, of
    256 kB, so there their keys are sorted; rows to be locked are locked by that."""
    if getattr(connections[rows.db], "mysql_is_mariadb", True):
        return list(rows[:limit])
    keys = list(rows.values_list("pk", flat=True)[:limit])
    found = Schedule.objects.using(rows.db).order_by().in_bulk(keys)
    return [found[key] for key in keys if key in found]
