"""``kjo_check_idempotency``: is an event acted on once, on this database and this broker?"""

from __future__ import annotations

from argparse import ArgumentParser
from typing import Any

from django.utils.translation import gettext as _

from kjo_django.management.commands._shared import KjoCommand, seconds
from kjo_django.operations.translations import translated
from kjo_django.patterns.events.idempotency import check_idempotency


class Command(KjoCommand):
    """Run the six checks of idempotency against the database and the broker."""

    help = "Prove that an event takes effect once, on this database and this broker."

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare transport and timeout."""
        super().add_arguments(parser)
        parser.add_argument("--transport", default="default", help="Alias in TRANSPORTS.")
        parser.add_argument(
            "--timeout", type=seconds, default=30.0, help="Seconds to wait for the broker."
        )

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Run the checks."""
        results = check_idempotency(transport=options["transport"], timeout=options["timeout"])
        found = [{"name": name, "passed": not error, "error": error} for name, error in results]
        return {"checks": found}, all(check["passed"] for check in found)

    def show(self, answer: Any) -> None:
        """Print one line for each number."""
        for check in answer["checks"]:
            text = _("✅ %(name)s: PASSED")
            if not check["passed"]:
                text = _("❌ %(name)s: FAILED (%(error)s)")
            self.stdout.write(text % {**check, "name": translated(check["name"])})
