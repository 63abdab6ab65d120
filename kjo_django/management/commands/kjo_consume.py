"""``kjo_consume``: the worker."""

from __future__ import annotations

import gc
import os
import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.utils import autoreload

from kjo_django.worker.report import StatusReporter
from kjo_django.worker.supervisor import supervise


class Command(BaseCommand):
    """Run jobs until stopped."""

    help = "Consume queues: run their jobs, and relay committed ones, until stopped."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        add = parser.add_argument
        add("queues", nargs="*", help="Queues to consume; all if none is named.")
        add("--concurrency", type=_positive, help="Threads that run handlers.")
        add("--processes", type=_positive, default=1, help="Worker processes, supervised.")
        add("--max-messages", type=_positive, help="Exit after this many have been settled.")
        add("--drain", action="store_true", help="Exit when nothing is left that is due.")
        add("--no-relay", action="store_true", help="Leave publishing to kjo_produce.")
        add("--status-interval", type=float, help="Seconds between status reports; 0 for none.")
        add("--reload", action="store_true", help="Restart when code changes (development).")
        add("--heartbeat-file", help="Touched while alive, for liveness probes.")
        add("--json", action="store_true", help="Status reports as JSON lines.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run, reload or supervise."""
        if options["reload"]:
            if options["processes"] > 1:
                raise CommandError("--reload goes with a single process; leave --processes out.")
            autoreload.run_with_reloader(self._work, **options)
            return
        if options["processes"] > 1:
            code = supervise(options["processes"], lambda: self._work(**options))
        else:
            code = self._work(**options)
        if code:
            sys.exit(code)

    def _work(self, **options: Any) -> int:
        from kjo_django.worker import Worker

        worker = Worker(
            options["queues"] or None,
            concurrency=options["concurrency"],
            relay=not options["no_relay"],
            install_signal_handlers=not options["reload"],
            max_messages=options["max_messages"],
            heartbeat_file=options["heartbeat_file"],
        )
        reporter = StatusReporter(worker, self.stdout, options["status_interval"], options["json"])
        reporter.announce()
        if getattr(self, "_called_from_command_line", False):
            _spare_the_collector()  # the process is the worker's own
        parent = os.getppid()

        def until() -> bool:
            reporter.report_if_due()
            if options["processes"] > 1 and os.getppid() != parent:
                return True  # the supervisor was killed; nobody would stop this process any more
            return bool(options["drain"]) and worker.is_drained()

        code = worker.run(until)
        reporter.farewell()
        return code


def _spare_the_collector() -> None:
    """What is there at the start stays: keep the garbage collector from walking it for ever, and
    let it look at the young less often than every 700 objects, which is a dozen jobs."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError(text)
    return value
