"""What the service does with events of the programs, and with messages they redeliver.

The test names the topics: each run has its own.
"""

from __future__ import annotations

import json
import os
from datetime import timedelta
from functools import partial

from kjo_django import BaseEvent, DlqConfig, ProcessingStatus, event_handler, kdlq_handler
from kjo_django.patterns.kdlq.headers import KILLS, counter
from kjo_django.transports.base import Record
from tests.ledger.models import Entry

ORDERS = "KJO_TEST_ORDERS"
PAYMENTS = "KJO_TEST_PAYMENTS"
"""Names of variables: the topic of events; the topics of payments, in JSON."""
MOST_REDELIVERIES, MOST_KILLS = 4, 3
"""As the programs have them."""
config_of = partial(
    DlqConfig,
    max_redeliveries=MOST_REDELIVERIES,
    max_kills=MOST_KILLS,
    redelivery_delay=timedelta(0),
)


def note_payment(event: BaseEvent) -> None:
    """Add the entry of an order that is paid."""
    Entry.objects.create(job=f"paid {event.data['order']}", note=event.key)


def book(record: Record) -> ProcessingStatus:
    """Answer as the message asks for after so many kills."""
    answers = json.loads(record.value or b"")["django"]
    return ProcessingStatus(answers[min(counter(record.headers, KILLS), len(answers) - 1)])


if ORDERS in os.environ:
    event_handler("ORDER_PAID", topic=os.environ[ORDERS], versions=["1"])(note_payment)
for topic in json.loads(os.environ.get(PAYMENTS, "[]")):
    config = config_of(f"{topic}-dlq", redelivery_topic=f"{topic}-again")
    kdlq_handler("django", topic=topic, config=config)(book)
