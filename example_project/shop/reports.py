"""A day's orders in euros: a workflow, as a shop would run it every night.

    fetch_orders ──> split_orders ──> convert_order, for each ──> report_day

Nobody knows how many orders there are before they are fetched, so ``split_orders`` adds the steps
that convert them. ``report_day`` waits for ``split_orders``, and so for all that it has added.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from example_project.shop import reading
from example_project.shop.models import Batch, DayReport, Order
from kjo_django import chain, job

EUROS = Decimal("1.1655")
"""What a pound cost on 22 December 2010."""
MOST = 500
"""Orders of one report."""
CENT = Decimal("0.01")


@job(queue="reports")
def fetch_orders(batch_id: int) -> list[int]:
    """Return the orders whose amount can be read."""
    orders = Order.objects.filter(batch=batch_id).order_by("row_number")
    return [order.pk for order in orders if is_readable(order)][:MOST]


@job(queue="reports", takes_context=True)
def split_orders(context: Any, order_ids: list[int]) -> None:
    """Add a step for each order. They are stored in the transaction that completes this one."""
    for order_id in order_ids:
        context.workflow.add(convert_order, order_id=order_id)


@job(queue="reports")
def convert_order(order_id: int) -> dict[str, str]:
    """Return where an order goes, and what it is worth."""
    order = Order.objects.get(pk=order_id)
    return {"country": order.country, "euros": str(euros(order))}


@job(queue="reports", takes_context=True)
def report_day(context: Any, batch_id: int) -> None:
    """Add up what the orders are worth, by country."""
    count, by_country = added_up(context.workflow.results(convert_order))
    DayReport.objects.create(
        batch_id=batch_id,
        order_count=count,
        total=sum(by_country.values()),
        by_country={country: str(total) for country, total in by_country.items()},
    )


def start(batch: Batch) -> str:
    """Start the workflow of a batch, once however often it is asked for; return its id."""
    steps = chain(
        fetch_orders.step(batch_id=batch.pk),
        split_orders.step(),
        report_day.step(batch_id=batch.pk),
    )
    return str(steps.enqueue(name="orders of a day", id=batch.code).workflow_id)


def is_readable(order: Order) -> bool:
    """Return whether the order's amount can be read."""
    return not reading.faults(order, reading.units, reading.unit_price)


def euros(order: Order) -> Decimal:
    """Return what the order is worth."""
    amount = reading.units(order) * reading.unit_price(order) * EUROS
    return amount.quantize(CENT, ROUND_HALF_UP)


def added_up(rows: Iterable[dict[str, str]]) -> tuple[int, dict[str, Decimal]]:
    """Return how many rows there are, and their totals by country."""
    count, totals = 0, defaultdict[str, Decimal](Decimal)
    for row in rows:
        count += 1
        totals[row["country"]] += Decimal(row["euros"])
    return count, dict(sorted(totals.items()))
