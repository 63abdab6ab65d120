"""Consumers of items made for one test, what they are sent, and the worker that runs them."""

from __future__ import annotations

import time

from kjo_django import ModelConsumer, ModelProducer
from kjo_django.conf import get_settings
from kjo_django.models import Job
from kjo_django.runtime import get_transport
from kjo_django.worker import Worker
from tests.items.models import Item, Run


def consumer(process=lambda self, message: None, **attributes):
    """Define a consumer of `Item`."""

    def run(self, message):
        self.calls.append(message["id"])
        Run.objects.create(item=message["id"])
        return process(self, message)

    told = []
    body = {
        "topic": "made",
        "consumer_group": "makers",
        "key_prefix": "MADE",
        "model": Item,
        "calls": [],
        "told": told,
        "process": run,
        "on_success": lambda self, item_id: told.append(("success", item_id)),
        "on_failed": lambda self, item_id, error: told.append(("failed", item_id, str(error))),
        **attributes,
    }
    return type("MadeConsumer", (ModelConsumer,), body)


class Producer(ModelProducer):
    model = Item
    queue = "made"
    hash_fields = ("email", "body")
    sent_ttl = 0.001


def send(*items, kind="new"):
    result = Producer().produce_messages({"pk__in": [item.pk for item in items]}, 1000, kind)
    assert result.sent == len(items), result
    time.sleep(0.002)  # sleep: until what was sent may be sent again


def work(until=None):
    worker = Worker(["made"])
    assert worker.run(until=until or worker.is_drained) == 0
    return worker


def settled():
    """Whether nothing is left, retries that are due later included."""
    queue = get_settings().queue("made")
    lag = sum(get_transport().lag([queue.topic], queue.consumer_group).values())
    return lag == 0 and not Job.objects.open().exists()


def always(error):
    def process(self, message):
        raise error

    return process
