"""``kjo_prune``: delete what has been kept long enough."""

from __future__ import annotations

from argparse import ArgumentParser
from collections import Counter
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.management.commands._shared import KjoCommand, chosen_databases, duration, using
from kjo_django.operations.maintenance.prune import Retention, prune
from kjo_django.operations.translations import grouped, translated

RETENTIONS = ("completed", "failed", "open_dead_letters", "processed_events", "metrics")


class Command(KjoCommand):
    """Delete finished jobs, dead letters, old markers and metrics by their retention."""

    without_database = "all of them if not given"
    help = "Delete what has been kept longer than the KJO['RETENTION_…'] settings say."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare an override for each retention."""
        super().add_arguments(parser)
        parser.add_argument("--dry-run", action="store_true", help="Only count.")
        for name in RETENTIONS:
            parser.add_argument(
                f"--{name.replace('_', '-')}",
                type=duration,
                metavar="AGE",
                help=f"Instead of KJO['RETENTION_{name.upper()}'], such as 12h or 7d.",
            )

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Delete, or count with ``--dry-run``."""
        retention = Retention.of_settings(**{name: options[name] for name in RETENTIONS})
        shows: dict[str, Any] = {}

        def progress(kind: str, count: int) -> None:
            shows.setdefault(kind, self.progress(translated(kind)))(count, None)

        counts: Counter[str] = Counter()
        for database in chosen_databases(options):
            with using(database):
                counts.update(prune(retention, dry_run=options["dry_run"], progress=progress))
        return {"dry_run": options["dry_run"], "deleted": dict(counts)}, True

    def show(self, answer: Any) -> None:
        """Print the counts."""
        would, done = _("%(kind)s: %(count)s would be deleted"), _("%(kind)s: %(count)s deleted")
        for kind, count in answer["deleted"].items():
            text = would if answer["dry_run"] else done
            self.stdout.write(text % {"kind": translated(kind), "count": grouped(count)})
