"""Reading an order's text: each function returns the value, or raises ``Unusable`` saying why not.

Reasons name the fault and never the row, so that equal faults are counted together.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from typing import Any

from django.utils import timezone

from example_project.shop.models import Order

# Bounded on purpose: Decimal("1e999999999") is a number too, and costs all the memory there is.
_WHOLE = re.compile(r"[+-]?\d{1,7}(\.0+)?", re.ASCII)
_PRICE = re.compile(r"[+-]?\d{1,7}(\.\d{1,4}0*)?", re.ASCII)
_STOCK_CODE = re.compile(r"[A-Za-z0-9 ._&-]{1,40}")
_CUSTOMER = re.compile(r"([A-Za-z0-9_-]{1,40})(\.0)?", re.ASCII)


class Unusable(ValueError):
    """The text of an order that a job cannot use; the message is the reason."""


def is_cancellation(order: Order) -> bool:
    """Return whether the row takes an earlier one back; its invoice number begins with C."""
    return order.invoice_number.strip().upper().startswith("C")


def customer(order: Order) -> str:
    """Return the customer number; spreadsheets write 17593 as 17593.0."""
    text = order.customer_id.strip()
    if not text:
        raise Unusable("no customer number")
    found = _CUSTOMER.fullmatch(text)
    if found is None:
        raise Unusable("unreadable customer number")
    return found[1]


def invoice_number(order: Order) -> str:
    """Return the number of the invoice the row belongs to."""
    text = " ".join(order.invoice_number.split())
    if not text:
        raise Unusable("no invoice number")
    return text


def stock_code(order: Order) -> str:
    """Return the product's code; 84030e is 84030E."""
    text = order.stock_code.strip()
    if not text:
        raise Unusable("no stock code")
    if not _STOCK_CODE.fullmatch(text):
        raise Unusable("unreadable stock code")
    return text.upper()


def description(order: Order) -> str:
    """Return what was ordered, on one line."""
    text = " ".join(order.description.split())
    if not text:
        raise Unusable("no description")
    return text


def units(order: Order) -> int:
    """Return the number of units; only a cancellation may take some back."""
    text = order.quantity.strip()
    if not _WHOLE.fullmatch(text):
        raise Unusable("quantity is not a whole number")
    count = int(Decimal(text))
    if count == 0:
        raise Unusable("quantity is zero")
    if count < 0 and not is_cancellation(order):
        raise Unusable("negative quantity")
    return count


def unit_price(order: Order) -> Decimal:
    """Return the price of one unit."""
    text = order.unit_price.strip()
    if not _PRICE.fullmatch(text):
        raise Unusable("unit price is not an amount of money")
    price = Decimal(text)
    if price == 0:
        raise Unusable("unit price is zero")
    if price < 0:
        raise Unusable("negative unit price")
    return price


def invoiced_at(order: Order) -> datetime:
    """Return when the invoice was made; times without a zone are the shop's."""
    try:
        moment = datetime.fromisoformat(order.invoiced_at.strip())
    except ValueError:
        raise Unusable("unreadable invoice date") from None
    if not 1900 <= moment.year <= 2100:
        raise Unusable("invoice date out of range")
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


def faults(order: Order, *readers: Callable[[Order], Any]) -> list[str]:
    """Return why ``readers`` cannot read the order, all reasons at once."""
    found = []
    for read in readers:
        try:
            read(order)
        except Unusable as reason:
            found.append(str(reason))
    return found
