"""The job that the programs enqueue."""

from kjo_django import job
from tests.ledger.models import Entry


@job(name="shop.mail", queue="ledger")
def mail(order: str) -> None:
    """Add the entry of an order's mail."""
    Entry.objects.create(job=f"mail {order}")
