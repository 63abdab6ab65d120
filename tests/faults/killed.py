"""A process that runs a scenario and is killed after one of its calls: ``python -m
tests.faults.killed SCENARIO CALL TRANSPORT`` on the database of ``DATABASE_URL``."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from typing import Any

import django


def main() -> None:
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()

    import pytest
    from django.test import override_settings

    from tests.faults.boundary import Boundary, Fault
    from tests.faults.building import TASKS, built, kjo
    from tests.faults.scenarios import SCENARIOS

    name, at, transport = sys.argv[1:]
    (scenario,) = (each for each in SCENARIOS if each.name == name)
    monkeypatch = pytest.MonkeyPatch()

    def die(killed: Boundary) -> None:
        print("\n".join(killed.calls), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(Boundary, "die", die)
    with (
        override_settings(KJO=kjo(transport), TASKS=TASKS),
        built(monkeypatch, lambda: None, stands=True) as world,
    ):
        world.queues = scenario.queues
        scenario.act(world, world.begin(Fault.DIES_AFTER, int(at)))


def left_behind() -> dict[str, Any]:
    """Return what the database holds, without ids and times."""
    from kjo_django.models import (
        DeadLetter,
        Job,
        JobFailure,
        Lease,
        ProcessedEvent,
        TransportMessage,
        TransportRun,
    )
    from tests.ledger.models import Entry

    return {
        "jobs": Counter(Job.objects.values_list("handler", "state", "attempts", "generation")),
        "leased jobs": Job.objects.exclude(lease_token="").count(),
        "effects": Counter(Entry.objects.values_list("job", flat=True)),
        "letters": Counter(DeadLetter.objects.values_list("handler", "state", "reason")),
        "failures": JobFailure.objects.count(),
        "markers": ProcessedEvent.objects.count(),
        "messages": Counter(
            (topic, bool(token), deliveries)
            for topic, token, deliveries in TransportMessage.objects.values_list(
                "topic", "lease_token", "deliveries"
            )
        ),
        "runs": Counter(
            (number, len(json.loads(messages)))
            for number, messages in TransportRun.objects.values_list("number", "messages")
        ),
        "leases": Counter(
            (name.partition(":")[0], bool(token), deliveries)
            for name, token, deliveries in Lease.objects.values_list("name", "token", "deliveries")
        ),
    }


if __name__ == "__main__":
    main()
