"""Taking over what Celery beat does: the tables of django-celery-beat, or ``CELERY_BEAT_SCHEDULE``.

Neither Celery nor django-celery-beat needs to be installed for the tables. What cannot be taken
over is named with the reason, and nothing of it is stored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.apps.registry import Apps
from django.conf import settings as django_settings
from django.db import connections, models
from django.utils import timezone
from django.utils.module_loading import import_string

from kjo_django import registry
from kjo_django.models import Schedule
from kjo_django.runtime import Runtime, current_runtime
from kjo_django.schedules.declarations import ScheduleFaults, checked, insert, name_fault
from kjo_django.values import signature_of

PREFIX = "django_celery_beat_"
SETTINGS = ("CELERY_BEAT_SCHEDULE", "CELERYBEAT_SCHEDULE")
CLEANUP = "celery.backend_cleanup"
BOTH_DAYS = (
    "Celery runs it when the day of the month and the day of the week both match, cron when either "
    "does"
)


class CannotTakeOver(Exception):
    """A task has something that schedules do not have."""


@dataclass(slots=True)
class _Task:
    """One entry of Celery beat."""

    name: str
    task: str
    when: dict[str, Any]
    """The options of the schedule that say when."""
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    queue: str = ""
    enabled: bool = True
    last_run_at: datetime | None = None
    remarks: list[str] = field(default_factory=list)
    """What is left out."""


def take_over(
    source: str | None = None,
    *,
    jobs: Mapping[str, str] | None = None,
    dry_run: bool = False,
    actor: str = "",
) -> list[dict[str, Any]]:
    """Store a schedule for each task of Celery beat; return what became of each.

    :param source: import path of a dict like ``CELERY_BEAT_SCHEDULE``. If None: the tables of
        django-celery-beat, or the setting where there are no tables.
    :param jobs: names of jobs by names of tasks, where they differ.
    :param dry_run: store nothing.
    :raises ValueError: there is neither, or the source is none.
    """
    runtime = current_runtime()
    entries = _entries(source, runtime)
    known = set(Schedule.objects.using(runtime.database).values_list("name", flat=True))
    answers = []
    for name, read in entries:
        remarks: list[str] = []
        try:
            if name in known:
                raise CannotTakeOver("There is a schedule of this name.")
            task = read()
            _store(task, jobs or {}, runtime, actor, dry_run=dry_run)
            remarks = task.remarks
        except CannotTakeOver as error:
            answers.append({"name": name, "is_taken": False, "remarks": [str(error)]})
        except ScheduleFaults as error:
            texts = [f"{key}: {text}" if key else text for key, text in error.faults.items()]
            answers.append({"name": name, "is_taken": False, "remarks": texts})
        else:
            answers.append({"name": name, "is_taken": True, "remarks": remarks})
    return answers


def _store(
    task: _Task, jobs: Mapping[str, str], runtime: Runtime, actor: str, *, dry_run: bool
) -> None:
    handler = _handler_of(task.task, jobs)
    options = {
        **task.when,
        "job": handler.name,
        "payload": _payload(handler, task.args, task.kwargs),
        "queue": task.queue,
        "enabled": task.enabled,
    }
    if task.queue and task.queue not in registry.queue_names():
        task.remarks.append(f"No queue is named {task.queue!r}: its jobs go to the job's own.")
        options["queue"] = ""
    now = runtime.clock.now()
    found = checked(options, now)
    name = task.name.replace(":", "-")
    if name != task.name:
        task.remarks.append(f"Its name is {name!r}: a schedule's name has no ':'.")
    if fault := name_fault(name):
        raise CannotTakeOver(fault)
    if dry_run:
        return
    row = insert(name, found, runtime, actor=actor)
    if task.last_run_at is not None and found.every and found.starts_at is None:
        # The interval goes on from the last run, which may have been long ago.
        Schedule.objects.using(runtime.database).filter(pk=row.pk).update(
            next_at=row.timetable.next_after(now, task.last_run_at)
        )


def _handler_of(task: str, jobs: Mapping[str, str]) -> registry.Handler:
    """Return the job that stands for a task: the one that is given, or of that name, or the only
    one whose app and function have the task's names."""
    if task == CLEANUP:
        raise CannotTakeOver("Not needed: kjo_prune deletes old results.")
    name = jobs.get(task, task)
    if handler := registry.enqueueable(name):
        return handler
    parts = name.split(".")
    near = [
        each
        for each in registry.handlers()
        if each.name.rpartition(".")[2] == parts[-1] and each.name.split(".")[0] in parts
    ]
    if len(near) == 1 and (handler := registry.enqueueable(near[0].name)):
        return handler
    raise CannotTakeOver(
        f"No job is named {name!r}. Declare it with @job(name={task!r}), or say --job {task}=JOB."
    )


def _payload(handler: registry.Handler, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return the payload of a job that a task's arguments make, those by place named."""
    if not isinstance(kwargs, Mapping) or not isinstance(args, (list, tuple)):
        raise CannotTakeOver("Its arguments are not a list and an object.")
    if not args:
        return dict(kwargs)
    names = [
        parameter.name
        for parameter in signature_of(handler.function).parameters.values()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    ][1 if handler.options.takes_context else 0 :]
    if handler.options.batch is not None or len(args) > len(names):
        raise CannotTakeOver(f"{handler.name} does not take {len(args)} arguments by place.")
    return {**dict(zip(names, args, strict=False)), **kwargs}


# --- Sources --------------------------------------------------------------------------------------


def _entries(source: str | None, runtime: Runtime) -> list[tuple[str, Any]]:
    """Return the name of each task, and a function that reads it."""
    if source is None:
        tables = connections[runtime.database].introspection.table_names()
        if f"{PREFIX}periodictask" in tables:
            return _rows(runtime.database)
    return _of_setting(_setting(source))


def _setting(source: str | None) -> Mapping[str, Any]:
    if source is not None:
        try:
            found = import_string(source)
        except ImportError as error:
            raise ValueError(f"{source!r} cannot be imported: {error}") from None
    else:
        given = (getattr(django_settings, name, None) for name in SETTINGS)
        found = next((each for each in given if each is not None), None)
    if not isinstance(found, Mapping):
        raise ValueError(
            "There are no tables of django-celery-beat, and no dict is named "
            f"{source or SETTINGS[0]}."
        )
    return found


def _of_setting(entries: Mapping[str, Any]) -> list[tuple[str, Any]]:
    def reader(name: str, entry: Any) -> Any:
        return lambda: _task_of_setting(name, entry)

    return [(str(name), reader(str(name), entry)) for name, entry in entries.items()]


def _task_of_setting(name: str, entry: Any) -> _Task:
    if not isinstance(entry, Mapping) or not isinstance(entry.get("task"), str):
        raise CannotTakeOver("It is not a dict with a task.")
    options = entry.get("options") or {}
    zone = getattr(django_settings, "CELERY_TIMEZONE", None) or "UTC"
    task = _Task(
        name,
        entry["task"],
        _when(entry.get("schedule"), str(zone)),
        entry.get("args") or (),
        entry.get("kwargs") or {},
        options.get("queue") or "",
        entry.get("enabled", True) is not False,
    )
    _take_expiry(task, options.get("expires"))
    _name_left_out(task, options, {"queue", "expires"})
    if entry.get("relative"):
        task.remarks.append("relative: its ticks are counted from now, and not rounded.")
    return task


def _when(schedule: Any, zone: str) -> dict[str, Any]:
    """Return the options that stand for one of Celery's schedules, which is known by its shape."""
    if isinstance(schedule, (int, float)) and not isinstance(schedule, bool):
        schedule = timedelta(seconds=schedule)
    if isinstance(schedule, timedelta):
        return {"every": _every(schedule)}
    kind = type(schedule).__name__
    if hasattr(schedule, "_orig_minute"):
        fields = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
        own = getattr(schedule, "tz", None)
        return {
            "cron": _cron(*(getattr(schedule, f"_orig_{name}") for name in fields)),
            "timezone": str(getattr(own, "key", None) or zone),
        }
    if isinstance(getattr(schedule, "run_every", None), timedelta):
        return {"every": _every(schedule.run_every)}
    if isinstance(getattr(schedule, "clocked_time", None), datetime):
        return {"at": schedule.clocked_time}
    raise CannotTakeOver(f"A schedule of the kind {kind!r} is not known.")


def _every(interval: timedelta) -> timedelta:
    if interval < timedelta(seconds=1) or interval % timedelta(seconds=1):
        raise CannotTakeOver(f"An interval has whole seconds, not {interval.total_seconds():g}.")
    return interval


def _cron(minute: Any, hour: Any, day: Any, month: Any, weekday: Any) -> str:
    """Return the cron expression that stands for a ``crontab`` of Celery."""
    parts = [_cron_field(each) for each in (minute, hour, day, month, weekday)]
    if not parts[2].startswith("*") and not parts[4].startswith("*"):
        raise CannotTakeOver(f"{BOTH_DAYS}: {' '.join(parts)}.")
    return " ".join(parts)


def _cron_field(value: Any) -> str:
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = ",".join(map(str, sorted(value)))
    text = re.sub(r"[][ {}'\"]", "", str(value)).upper()  # a list may be kept as its text
    # Celery knows the whole names of days and months, cron their first three letters.
    return re.sub(r"[A-Z]{3,}", lambda found: found[0][:3], text) or "*"


def _take_expiry(task: _Task, expires: Any) -> None:
    if isinstance(expires, datetime):
        task.when["ends_at"] = _aware(expires)
    elif isinstance(expires, timedelta):
        task.when["expires_after"] = max(1, round(expires.total_seconds()))
    elif isinstance(expires, (int, float)) and not isinstance(expires, bool):
        task.when["expires_after"] = max(1, round(expires))
    elif expires is not None:
        task.remarks.append(f"expires is left out: {expires!r:.60}")


def _name_left_out(task: _Task, options: Mapping[str, Any], taken: set[str]) -> None:
    for name, value in options.items():
        if name not in taken and value not in (None, "", {}, "{}"):
            task.remarks.append(f"{name} is left out: {value!r:.60}")


def _aware(moment: datetime) -> datetime:
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


# --- The tables of django-celery-beat -------------------------------------------------------------


def _table(name: str, /, **columns: models.Field[Any, Any]) -> Any:
    """Return an unmanaged model of one table, which no other code sees."""
    meta = {"app_label": "kjo_celery_beat", "apps": Apps(), "managed": False}
    attributes = {
        "__module__": __name__,
        "Meta": type("Meta", (), {**meta, "db_table": PREFIX + name}),
        "id": models.AutoField(primary_key=True),
        **columns,
    }
    return type(name, (models.Model,), attributes)


def _tables() -> dict[str, Any]:
    def text() -> Any:
        return models.TextField(null=True)

    def number() -> Any:
        return models.IntegerField(null=True)

    def moment() -> Any:
        return models.DateTimeField(null=True)

    def flag() -> Any:
        return models.BooleanField(null=True)

    return {
        "interval": _table("intervalschedule", every=number(), period=text()),
        "crontab": _table(
            "crontabschedule",
            minute=text(),
            hour=text(),
            day_of_month=text(),
            month_of_year=text(),
            day_of_week=text(),
            timezone=text(),
        ),
        "solar": _table("solarschedule", event=text()),
        "clocked": _table("clockedschedule", clocked_time=moment()),
        "task": _table(
            "periodictask",
            name=text(),
            task=text(),
            interval_id=number(),
            crontab_id=number(),
            solar_id=number(),
            clocked_id=number(),
            args=text(),
            kwargs=text(),
            queue=text(),
            exchange=text(),
            routing_key=text(),
            headers=text(),
            priority=number(),
            expires=moment(),
            expire_seconds=number(),
            one_off=flag(),
            start_time=moment(),
            enabled=flag(),
            last_run_at=moment(),
        ),
    }


def _rows(alias: str) -> list[tuple[str, Any]]:
    """Return the rows of the tables, whichever release of django-celery-beat made them."""
    connection = connections[alias]
    found: dict[str, list[dict[str, Any]]] = {}
    with connection.cursor() as cursor:
        tables = set(connection.introspection.table_names(cursor))
        for kind, model in _tables().items():
            table = model._meta.db_table
            if table not in tables:
                found[kind] = []
                continue
            described = connection.introspection.get_table_description(cursor, table)
            present = {column.name for column in described}
            columns = [each.column for each in model._meta.fields if each.column in present]
            found[kind] = list(model.objects.using(alias).order_by("id").values(*columns))
    tasks = found.pop("task")
    whens = {(kind, row["id"]): row for kind, rows in found.items() for row in rows}

    def reader(row: Mapping[str, Any]) -> Any:
        return lambda: _task_of_row(row, whens)

    return [(row["name"], reader(row)) for row in tasks]


_LEFT_OUT = ("exchange", "routing_key", "headers", "priority")


def _task_of_row(
    row: Mapping[str, Any], whens: Mapping[tuple[str, int], Mapping[str, Any]]
) -> _Task:
    task = _Task(
        row["name"],
        row["task"],
        _when_of_row(row, whens),
        _json(row["args"], []),
        _json(row["kwargs"], {}),
        row.get("queue") or "",
        bool(row["enabled"]),
        row.get("last_run_at"),
    )
    if row.get("start_time") is not None:
        task.when["starts_at"] = _aware(row["start_time"])
    _take_expiry(task, row.get("expires"))
    _take_expiry(task, row.get("expire_seconds"))
    _name_left_out(task, {name: row.get(name) for name in _LEFT_OUT}, set())
    return task


def _when_of_row(
    row: Mapping[str, Any], whens: Mapping[tuple[str, int], Mapping[str, Any]]
) -> dict[str, Any]:
    for kind in ("interval", "crontab", "solar", "clocked"):
        when = whens.get((kind, row.get(f"{kind}_id") or 0))
        if when is not None:
            break
    else:
        raise CannotTakeOver("It has no interval, crontab or moment.")
    if kind == "solar":
        raise CannotTakeOver(f"kjo_django has no solar schedules ({when['event']}).")
    if kind == "clocked":
        return {"at": _aware(when["clocked_time"])}
    if row.get("one_off"):
        raise CannotTakeOver(
            "It runs once, at the next time of its interval or crontab; add a schedule with a "
            "moment instead."
        )
    if kind == "interval":
        return {"every": _every(timedelta(**{when["period"]: when["every"]}))}
    fields = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")
    return {
        "cron": _cron(*(when[name] for name in fields)),
        "timezone": when.get("timezone") or "UTC",
    }


def _json(text: str | None, otherwise: Any) -> Any:
    try:
        return json.loads(text) if text else otherwise
    except ValueError:
        raise CannotTakeOver(f"Its arguments are not JSON: {text!r:.60}.") from None
