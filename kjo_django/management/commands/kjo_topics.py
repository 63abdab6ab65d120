"""``kjo_topics``: plan, check or create the topics the settings ask for."""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.enqueue.definition import known_queue
from kjo_django.management.commands._shared import KjoCommand
from kjo_django.operations.maintenance import topics
from kjo_django.operations.translations import translated


class Command(KjoCommand):
    """Compare the topics with the settings, and create what is missing.

    ``plan`` shows what there is to do; ``check`` exits with 1 when there is anything; ``create``
    creates and grows. Nothing is ever deleted or shrunk.
    """

    help = "Plan, check or create the topics of all queues and their dead letters."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the action."""
        super().add_arguments(parser)
        parser.add_argument("action", choices=("create", "check", "plan"))
        parser.add_argument("--queue", dest="queues", action="append", help="Only this queue.")

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Create topics if that is asked, then compare the topics with the settings."""
        for name in options["queues"] or ():
            known_queue(name)
        changes = topics.create(options["queues"]) if options["action"] == "create" else []
        reports = topics.plan(options["queues"])
        is_ok = options["action"] == "plan" or all(report.is_ok for report in reports)
        rows = [asdict(report) for report in reports]
        return {"action": options["action"], "changes": changes, "topics": rows}, is_ok

    def show(self, answer: Any) -> None:
        """Print the changes and the topics."""
        for line in answer["changes"]:
            self.stdout.write(line)
        rows = [(_("topic"), _("transport"), _("partitions"), _("to do"), "")]
        for topic in answer["topics"]:
            count = topic["wanted_partitions" if topic["partitions"] is None else "partitions"]
            state = "; ".join(topic["differences"]) or _("as configured")
            rows.append(
                (topic["name"], topic["transport"], count, translated(topic["action"]), state)
            )
        self.table(rows)
