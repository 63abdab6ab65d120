"""What processes write at their start, and a worker's status report: as text or as JSON lines."""

from __future__ import annotations

import json
import platform
import time
from contextlib import suppress
from datetime import datetime, timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.utils import timezone
from django.utils.timesince import timesince
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from kjo_django.clock import CLOCK
from kjo_django.messages.serializers import one_line
from kjo_django.operations.translations import decimal, grouped
from kjo_django.runtime import Runtime, transport_class
from kjo_django.worker.process import Worker
from kjo_django.worker.statistics import memory_bytes, memory_limit

if TYPE_CHECKING:
    from collections.abc import Iterable

    from _typeshed import SupportsWrite


def status_of(worker: Worker) -> dict[str, Any]:
    """Return what the report shows, as numbers."""
    statistics, scheduler = worker.statistics, worker.scheduler
    # Of one moment: no job that ends meanwhile is in one of the numbers and not in another.
    processed, failed, retried = statistics.totals()
    minutes, failed_at = max(statistics.uptime / 60, 1e-9), worker.last_error_at
    return {
        "worker": worker.name,
        "queues": [queue.name for queue in worker.queues],
        "active": scheduler.running,
        "concurrency": worker.slots,
        "capacity_percent": round(100 * scheduler.running / worker.slots, 2),
        "peak": scheduler.peak,
        "queue_length": scheduler.waiting,
        "oldest_waiting_ms": round(scheduler.oldest_wait * 1000),
        "processed": processed,
        "per_minute": round(processed / minutes, 2),
        # Of attempts: one that failed is a failure, though another follows.
        "success_percent": (
            round(100 * (processed - failed - retried) / processed, 1) if processed else 100.0
        ),
        "failed": failed,
        "retried": retried,
        "uptime_seconds": round(statistics.uptime, 3),
        "started_at": statistics.started_at.isoformat(),
        "partitions": sorted(
            f"{tp.topic}[{tp.partition}]" for p in worker.pollers for tp in p.partitions
        ),
        "last_error": worker.last_error or None,
        "last_error_at": failed_at.isoformat() if failed_at is not None else None,
        "memory_bytes": memory_bytes(),
        "memory_limit_bytes": memory_limit(),
    }


def render(worker: Worker) -> str:
    """Return the report as text."""
    s = status_of(worker)
    hours, rest = divmod(int(s["uptime_seconds"]), 3600)
    failures, uptime = s["failed"] + s["retried"], f"{hours:02}:{rest // 60:02}:{rest % 60:02}"
    counts = {name: grouped(s[name]) for name in ("queue_length", "processed", "failed")}
    values = {**s, **counts, "failures": grouped(failures), "uptime": uptime}
    values["success_percent"] = decimal(s["success_percent"], 1)
    values["capacity_percent"] = decimal(s["capacity_percent"], 2)
    values["per_minute"] = decimal(s["per_minute"], 2)
    values["started"] = timezone.localtime(worker.statistics.started_at).strftime("%I:%M %p")
    success = ngettext(
        "%(success_percent)s%% (%(failures)s failures)",
        "%(success_percent)s%% (%(failures)s failures)",
        failures,
    )
    if s["retried"]:
        success = ngettext(
            "%(success_percent)s%% (%(failures)s failures, %(failed)s for good)",
            "%(success_percent)s%% (%(failures)s failures, %(failed)s for good)",
            failures,
        )
    active = _("%(active)s/%(concurrency)s (%(capacity_percent)s%% capacity)")
    facts = {
        _("Active Tasks:"): active % values,
        _("Queue Length:"): _("%(queue_length)s (waiting for slot)") % values,
        _("Total Processed:"): _("%(processed)s (%(per_minute)s/min average)") % values,
        _("Success Rate:"): success % values,
        _("Uptime:"): _("%(uptime)s (started %(started)s)") % values,
        _("Active Partitions:"): _partitions(s["partitions"]),
    }
    if s["last_error"]:
        at = worker.last_error_at
        facts[_("Last Error:")] = f'"{one_line(s["last_error"])}"{_age(at) if at else ""}'
    if s["memory_bytes"]:
        facts[_("Memory Usage:")] = _memory(s["memory_bytes"], s["memory_limit_bytes"])
    width = max(map(len, facts))
    lines = (f"  {label.ljust(width)} {text}" for label, text in facts.items())
    queues = ", ".join(s["queues"]) or _("no queues")
    return "\n".join((f"{worker.name}: {queues}", *lines))


def _partitions(names: list[str]) -> str:
    """Return ``[0, 1]`` where all are of one topic, else each with its topic."""
    parts = [name.rstrip("]").rpartition("[") for name in names]
    if len({topic for topic, _bracket, _number in parts}) > 1:
        return f"[{', '.join(names)}]"
    return f"[{', '.join(str(n) for n in sorted(int(part[2]) for part in parts))}]"


def _age(moment: datetime) -> str:
    seconds = int((CLOCK.now() - moment).total_seconds())
    if seconds < 60:
        return ngettext(" (%d second ago)", " (%d seconds ago)", seconds) % seconds
    # Django separates number and unit by a space that terminals may not know.
    return (_(" (%s ago)") % timesince(moment)).replace("\xa0", " ")


def _memory(used: int, limit: int | None) -> str:
    text = f"{used / 2**20:.0f}MB"
    return f"{text} / {limit / 2**20:.0f}MB ({decimal(100 * used / limit, 1)}%)" if limit else text


class StatusReporter:
    """Writes the report every so often while there is something to tell, where that is asked for.

    :param interval: seconds; None for the setting, 0 for never.
    """

    def __init__(
        self, worker: Worker, out: SupportsWrite[str], interval: float | None, as_json: bool = False
    ) -> None:
        self._worker = worker
        self._out = out
        if interval is None:
            asked = worker.runtime.settings.status_report_interval
            interval = 0.0 if asked is None else asked.total_seconds()
        self._interval = interval
        self._as_json = as_json
        self._due = time.monotonic() + self._interval
        self._reported = 0

    def announce(self) -> None:
        """Write what was started, in three lines or as one JSON object."""
        worker = self._worker
        facts, queues = start_of(worker), ", ".join(queue.name for queue in worker.queues)
        lanes = ngettext("%d lanes", "%d lanes", worker.concurrency) % worker.concurrency
        text = _("Consuming %(queues)s with %(lanes)s as %(worker)s")
        if worker.follows_distance:
            # How far away its database is, and so how many there are, is not known yet.
            text = _("Consuming %(queues)s with %(lanes)s or more as %(worker)s")
        values = {"queues": queues or _("no queues"), "lanes": lanes, "worker": worker.name}
        announce(self._out, text % values, facts, as_json=self._as_json)

    def report_if_due(self) -> None:
        """Write when it is time and something has happened."""
        if not self._interval or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + self._interval
        processed = self._worker.statistics.processed
        if processed != self._reported or self._worker.scheduler.outstanding:
            self._reported = processed
            self.report()

    def conclude(self) -> None:
        """Write what the worker has done, once it has stopped: the report, where reports are asked
        for or are JSON, else one line."""
        if self._interval or self._as_json:
            self.report()
            return
        (processed, failed, retried), worker = self._worker.statistics.totals(), self._worker
        lasted = timedelta(seconds=int(worker.statistics.uptime))
        text = ngettext(
            "%(worker)s stopped after %(time)s: %(count)s attempt, %(failed)s failed, "
            "%(lost)s for good.",
            "%(worker)s stopped after %(time)s: %(count)s attempts, %(failed)s failed, "
            "%(lost)s for good.",
            processed,
        )
        values = {"worker": worker.name, "time": lasted, "count": grouped(processed)}
        values |= {"failed": grouped(failed + retried), "lost": grouped(failed)}
        self._out.write(f"{text % values}\n")

    def report(self) -> None:
        """Write a report."""
        text = json.dumps(status_of(self._worker)) if self._as_json else render(self._worker)
        self._out.write(text + "\n")


# --- The start ------------------------------------------------------------------------------------

PACKAGES = (
    *("kjo-django", "Django", "psycopg", "PyMySQL", "mysqlclient", "confluent-kafka", "redis"),
    *("hiredis", "orjson", "msgpack"),
)
"""Packages whose versions decide what a worker can do."""


def start_of(worker: Worker) -> dict[str, Any]:
    """Return what a worker serves, and with which versions: no address and no secret."""
    return {
        "worker": worker.name,
        "queues": [queue.name for queue in worker.queues],
        "concurrency": worker.concurrency,
        "relays": worker.is_relaying,
        "stores_schedules": worker.ticker is not None,
        **surroundings(worker.runtime, {queue.transport for queue in worker.queues}),
    }


def surroundings(runtime: Runtime, transports: Iterable[str]) -> dict[str, Any]:
    """Return what a process works with, and its versions: no address and no secret.

    :param transports: aliases of those that it uses.
    """
    return {
        "service": runtime.service,
        "release": runtime.settings.release,
        "database": connections[runtime.database].settings_dict["ENGINE"],
        "transports": {name: transport_class(name).__name__ for name in sorted(transports)},
        "coordination": type(runtime.coordination).__name__,
        "versions": _versions(),
    }


def announce(
    out: SupportsWrite[str], what: str, facts: dict[str, Any], *, as_json: bool = False
) -> None:
    """Write that a process has started, in three lines or as one JSON object.

    :param what: what it serves, as a sentence without its full stop.
    :param facts: ``surroundings``, and for JSON more.
    """
    text = json.dumps({"event": "started", **facts}) if as_json else _announcement(what, facts)
    out.write(text + "\n")


def _versions() -> dict[str, str]:
    found = {"Python": platform.python_version()}
    for package in PACKAGES:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def _announcement(what: str, facts: dict[str, Any]) -> str:
    service = (
        _("Service %(service)s, release %(release)s")
        if facts["release"]
        else _("Service %(service)s")
    )
    duties = {"relays": _("relays jobs"), "stores_schedules": _("stores the jobs of schedules")}
    transport = _("transport %(name)s: %(kind)s")
    kinds = facts["transports"].items()
    backends = (
        service % facts,
        _("database: %s") % facts["database"],
        *(transport % {"name": name, "kind": kind} for name, kind in kinds),
        _("coordination: %s") % facts["coordination"],
        *(text for name, text in duties.items() if facts.get(name)),
    )
    lines = (
        _("%s. Stop with Ctrl-C.") % what,
        "; ".join(backends),
        ", ".join(f"{name} {number}" for name, number in facts["versions"].items()),
    )
    return "\n  ".join(map(one_line, lines))
