"""The consumer of the items. Only processes that ask for it know it."""

import os
import time
from pathlib import Path

from kjo_django import ModelConsumer, PermanentError
from kjo_django.exceptions import RateLimitExceededError
from tests.items.models import Item, Run

CALLS = os.environ.get("KJO_TEST_ITEMS", "")
"""File each call of ``process`` and of a hook adds a line to, committed or not."""


def note(*words: object) -> None:
    line = " ".join(map(str, (time.time(), os.getpid(), *words))) + "\n"
    with Path(CALLS).open("a") as file:
        file.write(line)


class ItemConsumer(ModelConsumer, register=bool(CALLS)):
    """Does what the item's body says."""

    topic = "items"
    consumer_group = "items"
    key_prefix = "ITEM"
    model = Item
    key_field = "email"
    completed_at_field = "completed_at"
    failed_at_field = "failed_at"
    atomic = not os.environ.get("KJO_TEST_ITEMS_PLAIN")

    def process(self, message):
        item_id, body = message["id"], message["data"]["body"]
        note("process", item_id, message["type"])
        order, _, argument = body.partition(" ")
        if order == "sleep":
            time.sleep(float(argument))  # sleep: as long as the test wants it to take
        elif order == "refuse":
            raise PermanentError("no")
        elif order == "fail":
            raise RuntimeError(f"no {argument}")
        elif order == "limit" and self.calls(item_id) <= int(argument):
            raise RateLimitExceededError("slow down")
        Run.objects.create(item=item_id)
        return {"result": "", "zero": 0}.get(order)

    def calls(self, item_id):
        lines = (line.split() for line in Path(CALLS).read_text().splitlines())
        return sum(line[2:4] == ["process", item_id] for line in lines)

    def handle_processing_result(self, item_id, result):
        Item.objects.filter(pk=item_id).update(result=f"kept {result!r}")

    def on_success(self, item_id):
        note("success", item_id)

    def on_failed(self, item_id, error):
        note("failed", item_id, error)
