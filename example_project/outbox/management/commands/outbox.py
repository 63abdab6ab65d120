"""``manage.py outbox``: write emails to be sent, or see what became of them."""

from __future__ import annotations

from typing import Any

from django.core.management import call_command
from django.core.management.base import BaseCommand, CommandParser

from example_project.outbox.models import Email
from kjo_django.states import ItemState


class Command(BaseCommand):
    """Fill the outbox and look at it."""

    help = "Write emails to be sent, or show what became of them."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the action."""
        parser.add_argument("action", choices=("write", "show"))
        parser.add_argument("count", nargs="?", type=int, default=10, help="Emails to write (10).")

    def handle(self, *args: Any, **options: Any) -> None:
        """Do it, then count by state."""
        call_command("migrate", verbosity=0, interactive=False)
        if options["action"] == "write":
            first = Email.objects.count() + 1
            Email.objects.bulk_create(
                Email(
                    recipient=f"customer-{number}@example.com",
                    subject=f"News {number}",
                    body="What is new, in two lines.\nThis is the second.",
                )
                for number in range(first, first + options["count"])
            )
        counts = (
            f"{Email.objects.filter(state=state).count()} {state.name}" for state in ItemState
        )
        self.stdout.write(f"Outbox: {', '.join(counts)}")
