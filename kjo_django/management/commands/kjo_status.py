"""``kjo_status``: what is going on."""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from kjo_django.enqueue.definition import known_queue
from kjo_django.management.commands._shared import KjoCommand
from kjo_django.operations.monitoring.status import COUNTED, status
from kjo_django.operations.queues import overview
from kjo_django.operations.translations import grouped, translated
from kjo_django.runtime import refuse_elsewhere


class Command(KjoCommand):
    """Show queues, workers and the relay's backlog."""

    help = "Show queues, workers and the relay's backlog."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the filter."""
        super().add_arguments(parser)
        parser.add_argument("queues", nargs="*", help="Only these queues.")

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Return what the queues asked for are doing."""
        for name in options["queues"]:
            known_queue(name, also=[row["queue"] for row in overview()])
            refuse_elsewhere(name)
        return status(options["queues"] or None), True

    def show(self, answer: Any) -> None:
        """Print one line for each queue and worker."""
        heading = (
            _("queue"),
            *map(translated, COUNTED),
            translated("running"),
            _("dead"),
            _("oldest dead"),
            _("lag"),
            _("oldest"),
        )
        queues = [(*heading, "")]
        for row in answer["queues"]:
            jobs = (grouped(row["states"][state]) for state in COUNTED)
            running, lag = _count(row["running_count"]), _count(row["lag"])
            dead = grouped(row["open_dead_letters"]), _age(row["oldest_dead_letter_seconds"])
            oldest = _age(row["oldest_waiting_seconds"])
            note = _("paused") if row["is_paused"] else row["lag_error"] or ""
            queues.append((row["queue"], *jobs, running, *dead, lag, oldest, note))
        self.table(queues)
        if answer["is_capped"]:
            text = _("Counts of %s and more are lower bounds.")
            self.stdout.write(text % grouped(answer["count_limit"]))
        relay = answer["relay"]
        if relay["is_needed"]:
            count, age = relay["backlog"], _age(relay["oldest_seconds"])
            text = ngettext(
                "Relay: %(count)s due jobs to publish, oldest %(age)s",
                "Relay: %(count)s due jobs to publish, oldest %(age)s",
                count,
            )
            self.stdout.write(text % {"count": grouped(count), "age": age})
        workers = [worker for worker in answer["workers"] if worker["is_alive"]]
        if not workers:
            self.stdout.write(_("No worker is alive; start one with manage.py kjo_consume"))
            return
        heading = _("worker"), _("queues"), _("in flight/lanes"), _("processed"), _("failed")
        rows = [(*heading, _("heartbeat"))]
        for worker in workers:
            consumed = ", ".join(worker["queues"]) or _("all")
            busy = f"{worker['in_flight']}/{worker['concurrency']}"
            counts = grouped(worker["processed"]), grouped(worker["failed"])
            heartbeat = _age(worker["heartbeat_age_seconds"])
            rows.append((worker["name"], consumed, busy, *counts, heartbeat))
        self.table(rows)


def _count(value: int | None) -> str:
    return "?" if value is None else grouped(value)


def _age(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"
