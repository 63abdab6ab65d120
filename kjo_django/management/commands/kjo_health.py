"""``kjo_health``: is it well? Exit code 1 when it is not."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.management.commands._shared import (
    KjoCommand,
    duration,
    seconds,
    share,
)
from kjo_django.operations.monitoring.health import (
    Thresholds,
    health,
    health_everywhere,
    is_healthy,
)


class Command(KjoCommand):
    """Check settings, database, coordination, transports, topics, relay, workers and lag."""

    without_database = "all of them if not given"
    help = "Check that everything is well; exits with 1 when it is not."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare timeout and thresholds."""
        super().add_arguments(parser)
        usual, add = Thresholds(), parser.add_argument
        add("--timeout", type=seconds, default=5.0, help="Seconds to answer in.")
        add("--max-lag", type=int, default=usual.lag, help="Messages a queue may be behind.")
        rate = "Share of the finished jobs that may have failed, 0 to 1."
        add("--max-failure-rate", type=share, default=usual.failure_rate, help=rate)
        wait = "How long due work may wait, such as 90s, 5m or 2h; a bare number counts seconds."
        add("--max-idle", type=duration, default="5m", help=wait)

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Return the checks and whether all is well."""
        thresholds = Thresholds(
            lag=options["max_lag"],
            failure_rate=options["max_failure_rate"],
            idle=options["max_idle"],
        )
        ask = health if options["database"] else health_everywhere
        checks = ask(options["timeout"], thresholds)
        is_ok = is_healthy(checks)
        return {"healthy": is_ok, "checks": [asdict(check) for check in checks]}, is_ok

    def show(self, answer: Any) -> None:
        """Print a line for each check, and what to do."""
        styles = {True: self.style.SUCCESS, False: self.style.ERROR, None: self.style.WARNING}
        words, warning = {True: _("ok"), False: _("FAILED"), None: _("skipped")}, _("warning")
        width = max(map(len, (*words.values(), warning)))
        for check in answer["checks"]:
            word = styles[check["ok"]](words[check["ok"]].ljust(width))
            if check["ok"] and check["fix"]:
                word = self.style.WARNING(warning.ljust(width))
            self.stdout.write(f"{word}  {check['name'].ljust(12)}  {check['detail']}")
            if check["fix"]:
                self.stdout.write(f"{'':{width + 16}}{check['fix']}")
