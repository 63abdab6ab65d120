"""Scenarios of handlers that end the transaction of their group, beside innocent neighbours.

What a neighbour that ran before has written is committed with the guilty one's COMMIT, without the
record that it has run. If its worker dies or loses its leases right then, it runs again: it may
take effect twice, but never not at all. Those behind the guilty one take effect once, whatever
happens.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from django.db import connection

from kjo_django import job
from tests.adversaries import COMMITS, UNDOES
from tests.faults.boundary import Fault
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE, Kinds, scenario
from tests.faults.world import World
from tests.ledger.models import Entry

GUILTY = "f3"
HANDED_ON = (Fault.DIES_AFTER, Fault.TAKES_40_S)
"""Faults after which another worker takes over what this one has not recorded."""


def declare(kinds: Kinds, table: dict[str, Any], way: str, **options: Any) -> Any:
    """Declare a handler that ends its transaction where it is the guilty one."""

    def write(job: str) -> None:
        Entry.objects.create(job=job)
        kinds.world.calls[job] += 1
        if job == GUILTY:
            table[connection.vendor][way]()

    return job(name="faults.adversary", queue=QUEUE, **options)(write)


def _act(world: World, process: Process, table: Any, way: str, **options: Any) -> None:
    adversary = declare(world.kinds, table, way, max_attempts=2, **options)
    world.many.add(GUILTY)  # what it has committed stays, though it fails
    is_handed_on = world.first.boundary.fault in HANDED_ON
    for name in ("f1", "f2", GUILTY, "f4", "f5"):
        put = partial(adversary.enqueue, job=name)
        world.enqueue(process, name, put, many=name < GUILTY and table is COMMITS and is_handed_on)
    process.work()
    world.clock.advance(3)
    process.work()


for _kind, _options in (("atomic", {}), ("database-only", {"database_only": True})):
    for _name, _table, _way in (
        ("commits", COMMITS, "commit"),
        ("script", COMMITS, "script with a transaction"),
        ("closes", COMMITS, "commit past Django and close"),
        ("rolls-back", UNDOES, "rollback"),
    ):
        scenario(f"adversary-{_kind}-{_name}")(partial(_act, table=_table, way=_way, **_options))
