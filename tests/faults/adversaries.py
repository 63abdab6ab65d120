"""Scenarios of adversaries beside innocent neighbours: handlers that end the transaction of their
group, or leave a session that nobody can use, and logging that raises.

What a neighbour that ran before has written is committed with the guilty one's COMMIT, without the
record that it has run. If its worker dies or loses its leases right then, it runs again: it may
take effect twice, but never not at all. Those behind the guilty one take effect once, whatever
happens.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from django.db import OperationalError, connection, transaction

from kjo_django import job
from tests.adversaries import COMMITS, SPOILS, UNDOES
from tests.faults.boundary import Fault
from tests.faults.patterns import REFUSED
from tests.faults.process import Process
from tests.faults.scenarios import QUEUE, Kinds, scenario
from tests.faults.world import World
from tests.ledger.models import Entry

GUILTY = "f3"
HANDED_ON = (Fault.DIES_AFTER, Fault.TAKES_40_S, Fault.RIVAL_DIES)
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


def _spoil(world: World, process: Process, way: str, **options: Any) -> None:
    names = ("f1", "f2", GUILTY, "f4", "f5")
    adversary = declare(world.kinds, SPOILS, way, max_attempts=2, **options)
    for name in names:
        is_many = not options.get("atomic", True)
        world.enqueue(process, name, partial(adversary.enqueue, job=name), many=is_many)
    process.work()
    world.clock.advance(3)
    process.work()


for _kind, _options in (("atomic", {}), ("outside", {"atomic": False})):
    scenario(f"adversary-{_kind}-spoils-its-session")(
        partial(_spoil, way="temporary table", **_options)
    )


def _share(world: World, process: Process, **options: Any) -> None:
    """Jobs of a handler that fails where another one has run in its transaction before."""

    def work(job: str) -> None:
        Entry.objects.create(job=job)
        world.calls[job] += 1
        if connection.run_on_commit:
            raise OperationalError(REFUSED)
        transaction.on_commit(lambda: None)

    world.never = REFUSED
    sharing = job(name="faults.adversary", queue=QUEUE, **options)(work)
    for name in ("f1", "f2", "f3", "f4"):
        world.enqueue(process, name, partial(sharing.enqueue, job=name))
    process.work()


for _kind, _options in (("atomic", {}), ("database-only", {"database_only": True})):
    scenario(f"adversary-{_kind}-fails-beside-others")(partial(_share, **_options))


class Raising(logging.Handler):
    """A handler of LOGGING that raises for every record."""

    def handle(self, record: logging.LogRecord) -> bool:
        raise AttributeError("request")


@contextmanager
def raising() -> Iterator[None]:
    """Let every record raise where it is logged, and let the app log all it has to tell."""
    raises, logger = Raising(), logging.getLogger("kjo_django")
    level = logger.level
    logging.root.addHandler(raises)
    logger.setLevel(logging.DEBUG)
    try:
        yield
    finally:
        logging.root.removeHandler(raises)
        logger.setLevel(level)


def _log(world: World, process: Process, kind: str) -> None:
    names = (("f1", "completed"), ("f2", "dead"), ("f3", "retried"), ("f4", "completed"))
    with raising():
        for name, ending in names:
            world.kinds.enqueue(process, kind, name, ending)
        process.work()
        world.clock.advance(3)
        process.work()


for _kind in ("atomic", "outside", "coroutine"):
    scenario(f"adversary-logging-{_kind}")(partial(_log, kind=_kind))
