"""The demo from file to outcome."""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from django.conf import settings
from django.core.management import call_command
from django.db import connection

from example_project.shop import reports
from example_project.shop.demo.batches import (
    QUEUES,
    Outcome,
    Reporting,
    Settling,
    import_orders,
    outcome_of,
)
from example_project.shop.demo.orders_file import OrdersFile
from example_project.shop.demo.progress import Progress
from example_project.shop.demo.text import FileError
from example_project.shop.models import CELL, Batch
from kjo_django.conf import get_settings
from kjo_django.models import Job, Workflow
from kjo_django.runtime import get_coordination, get_transport
from kjo_django.worker import Worker
from kjo_django.workflows import lists

PROBE_TIMEOUT = 5.0
"""Seconds a server gets to answer."""


@dataclass(frozen=True)
class Demo:
    """A run of the demo that came to its end."""

    source: str
    batch: Batch
    outcome: Outcome
    seconds: float
    """From the first row saved to the last job settled."""
    workflow: dict[str, Any]
    """What the workflow of the day's report became; see ``workflows.lists.facts``."""

    def mails(self) -> int:
        """Return how many mails of this batch were written."""
        folder = Path(settings.EMAIL_FILE_PATH) / self.batch.code
        return sum(1 for _file in folder.glob("*.eml"))


def run(path: Path, encoding: str | None, orders: int | None, stderr: TextIO) -> Demo:
    """Check the file, then save its orders, then work until all of them are settled.

    :raises FileError: the file is of no use; nothing was saved.
    :raises KjoError: a server does not answer; nothing was saved.
    """
    with OrdersFile(path, encoding, max_cell=CELL) as file:
        with Progress(f"Checking {path.name}, bytes", file.size, stderr) as progress:
            rows = file.check(progress.update)
            progress.update(file.size)
        if orders is not None and orders > rows:
            raise FileError(f"it has {rows:,} rows, --orders {orders} asks for more")
        call_command("migrate", verbosity=0, interactive=False)
        probe()
        if is_work_left():
            stderr.write(
                "An earlier run was interrupted; its jobs run first and are not counted.\n"
            )
        began = time.monotonic()
        with Progress("Saving orders", orders or rows, stderr) as progress:
            batch = import_orders(path.name, itertools.islice(file.rows(), orders), progress.update)
    with Progress("Running jobs", 3 * (orders or rows), stderr) as progress:
        Worker(QUEUES, install_signal_handlers=True).run(until=Settling(batch, progress))
    seconds = time.monotonic() - began
    return Demo(path.name, batch, outcome_of(batch), seconds, report(batch, stderr))


def report(batch: Batch, stderr: TextIO) -> dict[str, Any]:
    """Run the workflow of the batch's report to its end, and return the facts about it."""
    workflow_id = reports.start(batch)
    with Progress("Running the day's workflow, steps", 3, stderr) as progress:
        worker = Worker(("reports",), install_signal_handlers=True)
        worker.run(until=Reporting(workflow_id, progress))
    workflow = Workflow.objects.get(pk=workflow_id)
    return lists.facts([workflow])[workflow.pk]


def probe() -> None:
    """Ask the servers for a sign of life. Without it, orders would be saved and wait for them."""
    get_transport().probe(PROBE_TIMEOUT)
    get_coordination().probe(PROBE_TIMEOUT)


def is_work_left() -> bool:
    """Return whether jobs of earlier runs are open."""
    return Job.objects.open().filter(queue__in=QUEUES).exists()


def engine() -> dict[str, str]:
    """Name what the demo ran on: the module of each backend."""
    conf = get_settings()
    return {
        "database": connection.vendor,
        "transport": _module(conf.transports["default"]),
        "coordination": _module(conf.coordination),
    }


def _module(declared: dict[str, Any]) -> str:
    return str(declared["BACKEND"]).split(".")[-2]
