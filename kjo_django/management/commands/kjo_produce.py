"""``kjo_produce``: the relay as a process of its own."""

from __future__ import annotations

import signal
from typing import Any

from django.core.management.base import BaseCommand, CommandParser

from kjo_django.producer.relay import Relay


class Command(BaseCommand):
    """Publish committed jobs until stopped."""

    help = "Run the relay: publish committed jobs to their transports."

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("queues", nargs="*", help="Queues to relay; all if none is named.")
        parser.add_argument(
            "--once", action="store_true", help="Publish what is due now, then exit."
        )

    def handle(self, *args: Any, **options: Any) -> None:
        """Run."""
        relay = Relay(options["queues"] or None)
        if not relay.queues:
            self.stdout.write("Nothing to relay: these queues publish with the job's transaction.")
            return
        if options["once"]:
            while relay.publish_due():
                pass
            self.stdout.write(f"Published {relay.published_count}.")
            return
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
            signal.signal(number, lambda *_: relay.stop())
        self.stdout.write("Relaying. Stop with Ctrl-C.")
        relay.run()
        self.stdout.write(f"Stopped after {relay.published_count} messages.")
