"""One item at a time, whoever speaks of it, and partitions that rest."""

from __future__ import annotations

import time
from datetime import timedelta

import pytest

from kjo_django.exceptions import RateLimitExceededError
from kjo_django.models import Job
from kjo_django.runtime import get_coordination
from tests.items.models import Item
from tests.unit.template_consumer.made import Producer, consumer, send, settled, work

pytestmark = pytest.mark.usefixtures("forgotten_definitions")


def test_an_item_somebody_else_processes_waits(quick):
    """KJO-60, KJO-62, KJO-F14: it is neither run nor counted as done."""
    made = consumer()
    item = Item.objects.create()
    name = f"CONS:MADE:{item.pk}"
    alive = "WORKER:other"
    get_coordination().claim([name], "other", timedelta(seconds=30))
    get_coordination().claim([alive], "other", timedelta(seconds=30))
    send_all = Producer().produce_messages({}, 10)
    assert send_all.sent == 0  # KJO-08: nor is it sent meanwhile
    get_coordination().release([name], "other")
    send(item)
    get_coordination().claim([name], "other", timedelta(seconds=30))
    deadline = time.monotonic() + 1.0
    work(until=lambda: time.monotonic() > deadline)
    assert made.calls == []
    get_coordination().release([name], "other")
    work()
    assert made.calls == [str(item.pk)]


def test_the_lease_lasts_as_long_as_the_class_says(quick):
    """KJO-61, KJO-65, KJO-87."""
    seen = []

    def process(self, message):
        from kjo_django.models import Lease

        lease = Lease.objects.get(name=f"CONS:MADE:{message['id']}")
        seen.append((lease.expires_at, lease.token))

    consumer(process, processing_ttl=77, atomic=False)
    send(Item.objects.create())
    worker = work()
    from django.utils import timezone

    left = (seen[0][0] - timezone.now()).total_seconds()
    assert 60 < left <= 77
    assert seen[0][1] == worker.id.hex


def test_messages_of_one_item_run_one_at_a_time_under_every_type(quick):
    """KJO-54, KJO-101, KJO-F7: though their keys differ; items, not partitions, are sequential."""
    running, most = set(), []

    def process(self, message):
        assert message["id"] not in running
        running.add(message["id"])
        most.append(len(running))
        time.sleep(0.02)
        running.discard(message["id"])
        Item.objects.filter(pk=message["id"]).update(looked_at=1)

    made = consumer(
        process, atomic=False, is_item_completed=lambda self, i: False, max_concurrency=4
    )
    items = [Item.objects.create() for _ in range(3)]
    for kind in ("new", "retry", "other"):
        send(*items, kind=kind)
    work()
    assert len(made.calls) == 9


def test_a_pausable_error_spares_the_rest_of_its_group(quick):
    """KJO-72, KJO-76: whatever waits in the partition does not run into the same wall."""
    fails = []

    def process(self, message):
        if len(self.calls) > 30 and not fails:
            fails.append(message["id"])
            raise RateLimitExceededError("slow down")

    made = consumer(process, max_concurrency=1)
    items = Item.objects.bulk_create(Item() for _ in range(60))
    send(*items)
    work(until=settled)
    assert Item.objects.filter(state=2).count() == 60
    # No attempt was lost: it was its turn again when the pause was over.
    assert len(made.calls) == 61
    assert Job.objects.count() == 0
