"""``manage.py demo``: orders in, jobs done, and what became of each."""

from __future__ import annotations

import argparse
import json
import logging
import sys
from pathlib import Path
from typing import Any

from django.conf import settings
from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import OperationalError

from example_project.shop.demo import report
from example_project.shop.demo.run import run
from example_project.shop.demo.text import FileError
from kjo_django.exceptions import KjoError

LEFT_TO_DO = (
    "Not all orders are settled. `python manage.py kjo_consume` works off what is left: every "
    "order that was saved has its job."
)
SHIPPED = Path(__file__).resolve().parents[2] / "data" / "orders.csv"


def count(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number, at least 1, not {text!r}")
    return int(text)


def is_no_dead_letter(record: logging.LogRecord) -> bool:
    """Return whether the record tells of anything but a dead letter."""
    return not record.getMessage().startswith("Dead-lettered")


class Command(BaseCommand):
    """Parses and shows; ``example_project.shop.demo`` does the work."""

    help = (
        "Save the orders of a CSV file, run their jobs until all are settled, and tell what "
        "completed, was retried and was dead-lettered. Exit code 0: rows in = completed + "
        "dead-lettered; 1: not so; 2: the file or an option is of no use, nothing was saved."
    )
    # The demo makes its own tables.
    requires_migrations_checks = False

    def add_arguments(self, parser: CommandParser) -> None:
        """Declare the options."""
        parser.add_argument("--input", type=Path, default=SHIPPED, metavar="FILE.csv")
        parser.add_argument("--orders", type=count, metavar="N", help="Take the first N rows.")
        parser.add_argument("--encoding", help="Of the file; UTF-8 unless it begins with a BOM.")
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *, input: Path, orders: int | None, **options: Any) -> None:
        """Run the demo."""
        # In DEBUG Django keeps the text of the last 9000 queries, which for a long run is a lot.
        settings.DEBUG = False
        # Failed attempts and dead letters are logged. Here they are expected, and counted below.
        logging.getLogger("kjo_django").addFilter(is_no_dead_letter)
        logging.getLogger("kjo_django.jobs").setLevel(logging.ERROR)
        try:
            demo = run(input, options["encoding"], orders, sys.stderr)
        except FileError as error:
            place = f"{input}, line {error.line}" if error.line else str(input)
            raise CommandError(f"{place}: {error}", returncode=2) from None
        except OperationalError as error:
            raise CommandError(f"The database cannot be used: {error}") from None
        except KjoError as error:
            raise CommandError(f"{error}. Nothing was saved.") from None
        except KeyboardInterrupt:
            raise CommandError(LEFT_TO_DO, returncode=130) from None
        if options["json"]:
            self.stdout.write(json.dumps(report.as_json(demo), ensure_ascii=False))
        else:
            self.stdout.write("\n".join(report.as_text(demo)))
        if not demo.outcome.is_exact:
            raise CommandError(LEFT_TO_DO)
