"""What happens to an order once it is saved.

    Order.save() ──> send_confirmation ──┬──> adjust_stock
                     (queue emails)      └──> write_invoice

The save hook enqueues one job per order. That job sends the mail and enqueues the other two in its
own transaction: an order that cannot be confirmed moves no stock and is not invoiced.
"""

from __future__ import annotations

from collections.abc import Callable
from decimal import ROUND_HALF_UP, Decimal
from typing import Any

from django.core.mail import EmailMessage

from example_project.shop import (
    reading,
    reports,  # noqa: F401 - declares the jobs of the day's report
)
from example_project.shop.models import Invoice, InvoiceLine, Order, StockMovement
from kjo_django import PermanentError, enqueue_on_save, job


# One customer's mails go out one at a time and in order; different customers' do not wait.
@job(queue="emails", key="customer_id", takes_context=True)
def send_confirmation(context: Any, order_id: int, customer_id: str) -> None:
    """Tell the customer, then let stock and invoice follow."""
    order = find(order_id)
    refuse(
        order,
        reading.customer,
        reading.invoice_number,
        reading.stock_code,
        reading.description,
        reading.units,
        reading.unit_price,
    )
    adjust_stock.using(id=order.reference).enqueue(
        order_id=order.pk, stock_code=reading.stock_code(order)
    )
    write_invoice.using(id=order.reference).enqueue(
        order_id=order.pk, invoice_number=reading.invoice_number(order)
    )
    # Last: a mail cannot be rolled back. If it is refused, the two enqueues above are undone with
    # everything else; if the process dies between here and the commit, it is sent again.
    confirmation(order, context.idempotency_key).send()


# A product's movements happen one at a time, different products' side by side.
@job(queue="stock", key="stock_code")
def adjust_stock(order_id: int, stock_code: str) -> None:
    """Take the units from stock; a cancellation, whose units are negative, gives them back."""
    order = find(order_id)
    refuse(order, reading.units)
    StockMovement.objects.create(order=order, stock_code=stock_code, change=-reading.units(order))


@job(queue="invoices", key="invoice_number")
def write_invoice(order_id: int, invoice_number: str) -> None:
    """Add the order to its invoice."""
    order = find(order_id)
    if reading.is_cancellation(order):
        raise PermanentError("a cancellation needs a credit note, not an invoice")
    refuse(order, reading.customer, reading.units, reading.unit_price, reading.invoiced_at)
    units, price = reading.units(order), reading.unit_price(order)
    amount = (units * price).quantize(Decimal("0.01"), ROUND_HALF_UP)
    invoice, _created = Invoice.objects.select_for_update().get_or_create(
        batch_id=order.batch_id,
        number=invoice_number,
        defaults={"customer": reading.customer(order), "invoiced_at": reading.invoiced_at(order)},
    )
    InvoiceLine.objects.create(
        invoice=invoice, order=order, units=units, unit_price=price, amount=amount
    )
    # Added here and not by the database: SQLite would compute with floating point numbers.
    invoice.total += amount
    invoice.save(update_fields=["total"])


enqueue_on_save(
    Order,
    send_confirmation,
    created=True,
    id=lambda order: order.reference,
    payload=lambda order: {"order_id": order.pk, "customer_id": order.customer_id},
)


def find(order_id: int) -> Order:
    """Return the order, or give up for good: it was deleted after its job had been enqueued."""
    try:
        return Order.objects.get(pk=order_id)
    except Order.DoesNotExist:
        raise PermanentError("the order was deleted") from None


def refuse(order: Order, *readers: Callable[[Order], Any]) -> None:
    """Give up for good when the order's text cannot be used: no further attempt would help."""
    faults = reading.faults(order, *readers)
    if faults:
        raise PermanentError(", ".join(faults))


def confirmation(order: Order, idempotency_key: str) -> EmailMessage:
    """Write the mail. Its key stays the same in every attempt, so a gateway can drop repeats."""
    return EmailMessage(
        subject=f"Your order {reading.invoice_number(order)}",
        body=(
            f"{reading.units(order)} x {reading.description(order)}\n"
            f"at {reading.unit_price(order)} GBP each\n"
        ),
        to=[f"customer-{reading.customer(order)}@example.com"],
        headers={"X-Idempotency-Key": idempotency_key, "X-Order": order.reference},
    )
