"""``kjo_consume``: the worker."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentTypeError
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import CommandError, CommandParser
from django.utils import autoreload
from django.utils.translation import gettext as _

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.enqueue.definition import known_queue
from kjo_django.management.commands._shared import (
    ParsedCommand,
    chosen_databases,
    positive,
    seconds,
)
from kjo_django.operations.monitoring.health import missing_tables
from kjo_django.operations.translations import grouped
from kjo_django.runtime import database_of, jobs_database, refuse_elsewhere, use_database
from kjo_django.worker.report import StatusReporter
from kjo_django.worker.supervisor import WAS_SIGNALLED, supervise

REPORTS = (
    "Seconds between status reports, 0 for none; KJO['STATUS_REPORT_INTERVAL'] if not given, "
    "and none without that."
)


class Command(ParsedCommand):
    """Run jobs until stopped: one process, or ``--processes``, for each database of the queues."""

    writes_log = True
    without_database = "all of them if not given"
    help = "Consume queues: run their jobs, and relay committed ones, until stopped."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add(
            "queues",
            nargs="*",
            metavar="queue[=weight]",
            help="Queues to consume; all if none is named. A queue with weight N starts N "
            "groups of jobs for one of a queue without.",
        )
        threads = "Threads that run handlers (lanes); else as KJO['CONCURRENCY'] says."
        add("--concurrency", type=positive, help=threads)
        add("--processes", type=positive, default=1, help="Worker processes, supervised.")
        add("--pin", action="store_true", help="Give each process a processor of its own, in turn.")
        add(
            "--max-messages",
            type=positive,
            help="Exit once this many have been settled; no more are begun.",
        )
        add("--drain", action="store_true", help="Exit when nothing is left that is due.")
        add("--no-relay", action="store_true", help="Leave publishing to kjo_produce.")
        schedules = "Leave periodic schedules to other workers, or to kjo_schedule."
        add("--no-schedules", action="store_true", help=schedules)
        add("--status-interval", type=_interval, help=REPORTS)
        add("--reload", action="store_true", help="Restart when code changes (development).")
        add("--heartbeat-file", help="Touched while alive, for liveness probes.")
        add("--json", action="store_true", help="The start and status reports as JSON lines.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the worker, with a reloader or a supervisor where that is asked for."""
        try:
            code = self._run(options)
        except ImproperlyConfigured as error:
            raise CommandError(str(error)) from error
        if code:
            sys.exit(code)

    def _check(self, options: dict[str, Any]) -> dict[str, list[str]]:
        """Check the options, and return the databases to serve and which queues of each.

        Before anything is forked: a child that ends of it would be started again and again.
        """
        try:
            options["queues"], options["weights"] = _weighted(options["queues"])
            for name in options["queues"]:
                # Of messages of other services, dead letters would be made.
                if not get_settings().queue(known_queue(name)).consume:
                    raise ValueError(
                        _("KJO['QUEUES'][%r] has consume=False: this service only publishes to it.")
                        % name
                    )
            if path := options["heartbeat_file"]:
                try:
                    Path(path).touch()
                except OSError as error:
                    text = _("--heartbeat-file %(path)s cannot be written: %(error)s")
                    message = text % {"path": path, "error": error.strerror}
                    raise ValueError(message) from error
            served = _by_database(options)
            if options["reload"]:
                _check_reloading(options["processes"], served)
            if options["pin"]:
                _check_pinning(options["processes"])
            return served
        except ValueError as error:
            raise CommandError(str(error), returncode=2) from error

    def _run(self, options: dict[str, Any]) -> int:
        served = self._check(options)
        for database in served:
            with use_database(database):
                advice = missing_tables()
            if advice:
                missing = " ".join((_("The tables of kjo_django are missing."), advice))
                if options["drain"]:
                    raise CommandError(missing)
                # It begins all the same, and works once they are there.
                self.stderr.write(missing)
        if options["reload"]:
            options["is_supervised"] = False
            autoreload.run_with_reloader(self._work, *served, **options)
            return 0
        count = options["processes"] * len(served)
        options["is_supervised"] = count > 1
        if count > 1:
            places = [*served.items()]

            def work(place: int) -> int:
                database, queues = places[place % len(places)]
                return self._work(database, **{**options, "queues": queues})

            return supervise(count, work, pins=options["pin"])
        return self._work(*served, **options)

    def _work(self, alias: str, /, **options: Any) -> int:
        with use_database(alias):
            return self._work_here(**options)

    def _work_here(self, **options: Any) -> int:
        from kjo_django.worker import Worker

        worker = Worker(
            options["queues"] or None,
            weights={
                queue: weight
                for queue, weight in options["weights"].items()
                if database_of(queue) == jobs_database()
            },
            concurrency=options["concurrency"],
            relay=not options["no_relay"],
            schedules=not options["no_schedules"],
            install_signal_handlers=not options["reload"],
            max_messages=options["max_messages"],
            heartbeat_file=options["heartbeat_file"],
        )
        reporter = StatusReporter(worker, self.stdout, options["status_interval"], options["json"])
        parent, is_supervised = os.getppid(), options["is_supervised"]

        def until() -> bool:
            reporter.report_if_due()
            if is_supervised and os.getppid() != parent:
                return True  # the supervisor was killed; nobody would stop this process any more
            return bool(options["drain"]) and worker.is_drained()

        code = worker.run(until, reporter.announce)
        reporter.conclude()
        return WAS_SIGNALLED if is_supervised and worker.was_signalled and not code else code


def _by_database(options: dict[str, Any]) -> dict[str, list[str]]:
    """Return the databases to serve, and which queues of each; no queues are all of them.

    :raises ValueError: a queue is not in the database that ``--database`` names.
    """
    if not options["queues"]:
        return {alias: [] for alias in chosen_databases(options)}
    served: dict[str, list[str]] = {}
    for name in options["queues"]:
        served.setdefault(database_of(name), []).append(name)
        if options.get("database"):  # which this thread works with
            refuse_elsewhere(name)
    return served


MOST_WEIGHT = 1000


def _weighted(given: list[str]) -> tuple[list[str], dict[str, float]]:
    """Return the names of queues, and the weights of those that have one.

    :raises ValueError: a weight is none, or a queue is named twice.
    """
    names: list[str] = []
    weights: dict[str, float] = {}
    for text in given:
        name, equals, weight = text.rpartition("=")
        if not equals or text in registry.queue_names():
            name = text
        elif weight.isdecimal() and 1 <= int(weight) <= MOST_WEIGHT:
            weights[name] = int(weight)
        else:
            fault = _(
                "%(text)r: the weight of a queue must be a whole number from 1 to %(most)s, "
                "not %(weight)r."
            )
            raise ValueError(fault % {"text": text, "most": grouped(MOST_WEIGHT), "weight": weight})
        if name in names:
            raise ValueError(_("The queue %r is named twice.") % name)
        names.append(name)
    return names, weights


def _interval(text: str) -> float:
    """Read a number of seconds; 0 says never."""
    try:
        return 0.0 if float(text) == 0 else seconds(text)
    except (ValueError, ArgumentTypeError):
        raise ArgumentTypeError(_("%r is not a number of seconds; 0 for none") % text) from None


def _check_reloading(processes: int, served: Iterable[str]) -> None:
    if processes > 1:
        raise ValueError(_("--reload goes with a single process; leave --processes out."))
    if len(aliases := list(served)) > 1:
        raise ValueError(_("--reload goes with one --database of %s.") % ", ".join(aliases))


def _check_pinning(processes: int) -> None:
    if processes == 1:
        raise ValueError(
            _("--pin goes with --processes above 1; pin a single process with taskset.")
        )
    if not hasattr(os, "sched_setaffinity"):
        raise ValueError(
            _("--pin does not work on %s: no process can be pinned there.") % sys.platform
        )
