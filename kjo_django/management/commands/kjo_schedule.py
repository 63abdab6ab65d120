"""``kjo_schedule``: the ticks of schedules in a process of their own, and what operators do."""

from __future__ import annotations

import threading
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from kjo_django.management.commands._shared import KjoCommand, chosen_databases, positive
from kjo_django.models import Schedule
from kjo_django.operations import schedules
from kjo_django.operations.translations import grouped, translated
from kjo_django.runtime import Runtime, current_runtime, runtime_for
from kjo_django.schedules import celery_beat, shown
from kjo_django.schedules.declarations import declared, is_held
from kjo_django.schedules.ticker import Ticker
from kjo_django.values import did_you_mean
from kjo_django.worker.duties import ClockCheck, DutyThread
from kjo_django.worker.report import announce, surroundings
from kjo_django.worker.supervisor import stop_on_signals

IMPORT = "import-celery-beat"
CHANGES = {"pause": schedules.pause, "resume": schedules.resume, "run": schedules.run_now}
ACTIONS = ("list", "next", *sorted(CHANGES), IMPORT)
ACTOR = "kjo_schedule"
MOST_NAMED = 10
"""Schedules that the line at the start names."""


class Command(KjoCommand):
    """Store the jobs of schedules until stopped; or list, run, pause, resume and import schedules.

    Workers do the former too, unless they have ``--no-schedules``. Any number may.
    """

    writes_log = True
    without_database = "if not given, all of them, and for an action the first"
    help = (
        "Store the jobs of due schedules until stopped. With an action: list the schedules, show "
        "the next ticks of one, run, pause or resume some, or import those of Celery beat."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the action and its options."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("action", nargs="?", choices=ACTIONS, help="None: store jobs until stopped.")
        add("names", nargs="*", metavar="name", help="Schedules that the action is for.")
        add("--once", action="store_true", help="Store what is due now, then exit.")
        add("--count", type=positive, default=5, help="Ticks that next shows.")
        add(
            "--from",
            dest="source",
            help=f"{IMPORT}: import path of a dict like CELERY_BEAT_SCHEDULE. By default the "
            "tables of django-celery-beat if there are any, else that setting.",
        )
        add(
            "--job",
            dest="jobs",
            action="append",
            default=[],
            metavar="TASK=JOB",
            help=f"{IMPORT}: the job that stands for a task of another name; may be repeated.",
        )
        add("--dry-run", action="store_true", help=f"{IMPORT}: only say what would be imported.")

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Carry out the action, or work until stopped."""
        action, names = options["action"], options["names"]
        if action is None:
            return self._work(options), True
        if action == IMPORT:
            jobs = dict(_pair(each) for each in options["jobs"])
            taken = celery_beat.take_over(
                options["source"], jobs=jobs, dry_run=options["dry_run"], actor=ACTOR
            )
            return {"action": action, "imported": taken}, all(one["is_taken"] for one in taken)
        if action == "list":
            return {"action": action, "schedules": shown.overview(names)}, True
        rows = _rows(names)
        if action == "next":
            ticks = {row.name: shown.next_runs(row, options["count"]) for row in rows}
            return {"action": action, "next": ticks}, True
        outcomes = CHANGES[action](rows, actor=ACTOR)
        is_ok = schedules.ScheduleResult.BROKEN not in outcomes.counts
        return {"action": action, "outcomes": outcomes.counts}, is_ok

    def _work(self, options: dict[str, Any]) -> dict[str, Any]:
        runtimes = [runtime_for(alias) for alias in chosen_databases(options)]
        tickers = [Ticker(runtime) for runtime in runtimes]
        if options["once"]:
            for runtime, ticker in zip(runtimes, tickers, strict=True):
                ClockCheck(runtime).work()
                while ticker.step() == 0.0:
                    pass
            return {"action": "once", "stored": sum(each.stored_count for each in tickers)}
        threads = [
            DutyThread(runtime, "kjo-schedules", [ClockCheck(runtime), ticker])
            for runtime, ticker in zip(runtimes, tickers, strict=True)
        ]
        stopping = threading.Event()
        restore = stop_on_signals(stopping)
        for runtime in () if options["json"] else runtimes:  # which is one object, at the end
            self._announce(runtime)
        self.stdout.flush()
        try:
            _run(threads, stopping)
        finally:
            restore()
        return {"action": "worked", "stored": sum(each.stored_count for each in tickers)}

    def _announce(self, runtime: Runtime) -> None:
        """Say which schedules there are in code."""
        every = declared(runtime.settings)
        names = sorted(name for name, each in every.items() if is_held(each, runtime))
        named = ", ".join(names[:MOST_NAMED]) or _("none")
        if len(names) > MOST_NAMED:
            rest = {"names": named, "count": len(names) - MOST_NAMED}
            named = _("%(names)s and %(count)d more") % rest
        what = _("Storing the jobs of all schedules; those in code: %s") % named
        announce(self.stdout, what, surroundings(runtime, ()))

    def show(self, answer: Any) -> None:
        """Print the answer of the action."""
        if "stored" in answer:
            text = ngettext("Stored %s jobs.", "Stored %s jobs.", answer["stored"])
            self.stdout.write(text % grouped(answer["stored"]))
        for result, count in answer.get("outcomes", {}).items():
            self.stdout.write(f"{grouped(count)} {translated(result)}")
        for name, ticks in answer.get("next", {}).items():
            self.stdout.write(f"{name}:")
            for tick in ticks:
                self.stdout.write(f"  {tick:%Y-%m-%d %H:%M:%S %Z}")
        if "schedules" in answer:
            self._show_schedules(answer["schedules"])
        for one in answer.get("imported", ()):
            state = _("taken over") if one["is_taken"] else _("NOT taken over")
            self.stdout.write(f"{one['name']}: {state}")
            for remark in one["remarks"]:
                self.stdout.write(f"  {remark}")

    def _show_schedules(self, rows: list[dict[str, Any]]) -> None:
        heading = _("name"), _("job"), _("when"), _("next"), _("last job"), _("state")
        table: list[tuple[object, ...]] = [heading]
        for row in rows:
            when = row["cron"] or (_("every %s s") % row["every"] if row["every"] else row["at"])
            next_at = row["next_at"]
            shown = "-" if next_at is None else f"{next_at:%Y-%m-%d %H:%M:%S %Z}"
            last = translated(row["last_status"] or "-")
            state = row["problem"] or translated(row["state"])
            table.append((row["name"], row["job"], when, shown, last, state))
        self.table(table)


def _pair(text: str) -> tuple[str, str]:
    task, _equals, job = text.partition("=")
    if not task or not job:
        raise ValueError(_("--job %r is not TASK=JOB.") % text)
    return task, job


def _rows(names: list[str]) -> list[Schedule]:
    """Return the schedules of these names.

    :raises ValueError: none is named, or there is no schedule of one of the names.
    """
    if not names:
        raise ValueError(_("Name the schedules."))
    known = Schedule.objects.using(current_runtime().database)
    found = {row.name: row for row in known.filter(name__in=names)}
    for name in names:
        if name not in found:
            every = known.values_list("name", flat=True)
            hint = did_you_mean(name, every, _("See kjo_schedule list."))
            raise ValueError(" ".join((_("No schedule is named %r.") % name, hint)))
    return [found[name] for name in dict.fromkeys(names)]


def _run(threads: Sequence[DutyThread], stopping: threading.Event) -> None:
    """Run threads until the command is asked to stop.

    :raises ImproperlyConfigured: one of them has ended by itself.
    """
    for thread in threads:
        thread.start()
    try:
        while not stopping.wait(0.2):
            if not all(thread.is_alive() for thread in threads):
                raise ImproperlyConfigured(_("The thread that stores the jobs has ended"))
    finally:
        for thread in threads:
            thread.stop()
        for thread in threads:
            thread.join(10.0)
