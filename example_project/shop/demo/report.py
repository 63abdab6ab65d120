"""What the demo tells: one JSON object for programs, a page for people."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from django.conf import settings

from example_project.shop.demo.batches import Reason
from example_project.shop.demo.run import Demo, engine
from example_project.shop.models import DayReport

SERVER_VARIABLES = ("KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DATABASE_URL")


def as_json(demo: Demo) -> dict[str, Any]:
    """Describe the run. Figures at the top count orders, those in ``jobs`` count jobs."""
    outcome = demo.outcome
    return {
        "orders": outcome.orders,
        "enqueued": outcome.enqueued,
        "completed": outcome.completed,
        "dead_letters": outcome.dead_letters,
        "retried": outcome.retried,
        "seconds": round(demo.seconds, 2),
        "jobs": outcome.jobs,
        "mails": demo.mails(),
        "reasons": {reason.text: reason.count for reason in outcome.reasons},
        "retries": {reason.text: reason.count for reason in outcome.retries},
        "workflow": _workflow(demo),
        "engine": engine(),
        "source": demo.source,
        "batch": demo.batch.code,
    }


def _workflow(demo: Demo) -> dict[str, Any]:
    """Describe the workflow of the day's report, and what it has written."""
    written = DayReport.objects.filter(batch=demo.batch).first()
    return {
        **{name: demo.workflow[name] for name in ("name", "state", "steps", "seconds")},
        "orders": written.order_count if written else 0,
        "euros": str(written.total) if written else "0.00",
    }


def as_text(demo: Demo) -> Iterator[str]:
    """Yield the lines of the page."""
    outcome, on = demo.outcome, engine()
    yield ""
    yield (
        f"{outcome.orders:,} orders of {demo.source} settled in {demo.seconds:.1f} s on "
        f"{on['database']}, transport {on['transport']}, coordination {on['coordination']}."
    )
    yield ""
    yield f"{outcome.completed:>9,} completed: confirmed by mail, stock moved, invoiced"
    yield f"{outcome.dead_letters:>9,} dead-lettered: kept, with the reason, for a person to decide"
    yield f"{outcome.retried:>9,} retried on the way: an attempt failed, a later one settled it"
    yield ""
    if outcome.is_exact:
        yield (
            f"Nothing is lost: {outcome.orders:,} rows in = "
            f"{outcome.completed:,} completed + {outcome.dead_letters:,} dead-lettered."
        )
    yield "An order is completed when all its jobs are, dead-lettered when one of them is."
    yield (
        f"Jobs: {outcome.jobs['enqueued']:,} enqueued, {outcome.jobs['completed']:,} completed, "
        f"{outcome.jobs['dead_letters']:,} dead-lettered. Mails written: {demo.mails():,}."
    )
    workflow = _workflow(demo)
    yield (
        f'Workflow "{workflow["name"]}": {workflow["state"]} in {workflow["seconds"]:.1f} s, '
        f"{workflow['steps']:,} steps (fetch, split, convert {workflow['orders']:,} orders, "
        f"report): {workflow['euros']} EUR."
    )
    yield from _listed("Dead-lettered because of", outcome.reasons)
    yield from _listed(
        "Retried because of (simulated: the shop's mail gateway refuses every "
        f"{settings.SHOP_GATEWAY_REFUSES_EVERY}th mail once)",
        outcome.retries,
    )
    yield ""
    yield from _admin_hint()


def _admin_hint() -> Iterator[str]:
    servers = [name for name in SERVER_VARIABLES if os.environ.get(name)]
    if servers:
        yield f"To see it in the admin, while the servers run and {', '.join(servers)} are set:"
    else:
        yield "To see it in the admin:"
    yield "    python manage.py createsuperuser"
    yield "    python manage.py runserver      # then open http://127.0.0.1:8000/admin/"


def _listed(title: str, reasons: list[Reason]) -> Iterator[str]:
    if not reasons:
        return
    yield ""
    yield f"{title}:"
    for reason in reasons:
        rows = ", ".join(map(str, reason.rows)) + ", …" * (reason.count > len(reason.rows))
        yield f"{reason.count:>9,} {reason.text}{f' (row {rows})' if reason.rows else ''}"
