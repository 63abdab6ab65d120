"""A process of its own on a database, for the tests of several.

python -m tests.conformance.database_process '<settings as JSON>' publish TOPIC COUNT
... consume TOPIC GROUP IDLE     prints "subscribed"; acknowledges; prints a line each, until idle
... hold TOPIC GROUP             claims, prints "held <n>" and never comes back
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

KEYS = 10


def main(database: str, role: str, topic: str, *arguments: str) -> None:
    os.environ["DJANGO_SETTINGS_MODULE"] = "tests.settings"
    import django

    import tests.settings

    settings = json.loads(database)
    if "mysql" in settings["ENGINE"]:
        tests.settings.use_pymysql()
    tests.settings.DATABASES = {"default": settings}
    django.setup()
    {"publish": publish, "consume": consume, "hold": hold}[role](topic, *arguments)


def publish(topic: str, count: str) -> None:
    """Publish in small batches: ``COUNT`` numbered values over ten keys."""
    from kjo_django.transports.base import OutgoingRecord
    from kjo_django.transports.database import DatabaseTransport

    transport = DatabaseTransport("process", {})
    records = [
        OutgoingRecord(topic, b"%d" % number, b"key-%d" % (number % KEYS))
        for number in range(int(count))
    ]
    for start in range(0, len(records), 5):
        outcomes = transport.publish(records[start : start + 5])
        assert all(outcome.error is None for outcome in outcomes)
        time.sleep(0.005)  # sleep: the pace of the load


def consume(topic: str, group: str, idle: str) -> None:
    """Consume until nothing has come for ``idle`` seconds since the last record, or for 40 since
    the start; half of it settles in a transaction."""
    from django.db import transaction

    from kjo_django.transports.database import DatabaseTransport

    subscription = DatabaseTransport("process", {}).subscribe(
        [topic], group, lease=timedelta(seconds=30)
    )
    print("subscribed", flush=True)
    until = time.monotonic() + 40  # whoever publishes may take long to start
    turn = 0
    while time.monotonic() < until:  # timed loop: put off by each record
        records = subscription.poll(7, 0.2)
        for record in records:
            key, value = record.key or b"", record.value or b""
            print(time.monotonic_ns(), key.decode(), value.decode(), flush=True)
            until = time.monotonic() + float(idle)
        turn += 1
        if turn % 2 and records:
            with transaction.atomic():
                subscription.acknowledge_in_transaction(records)
        else:
            subscription.acknowledge(records)
    assert subscription.last_error is None, subscription.last_error
    subscription.close()


def hold(topic: str, group: str) -> None:
    """Claim, and stay silent: not even renewing, as if frozen."""
    from kjo_django.transports.database import DatabaseTransport

    subscription = DatabaseTransport("process", {}).subscribe(
        [topic], group, lease=timedelta(seconds=2)
    )
    held = 0
    while not held:
        held = len(subscription.poll(100, 1))
    print(f"held {held}", flush=True)
    time.sleep(300)  # sleep: until it is killed


if __name__ == "__main__":
    main(*sys.argv[1:])
