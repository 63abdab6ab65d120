"""Where jobs are written, and transactions that read before they write."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from django.db import connections, router, transaction

from kjo_django.conf import get_settings
from kjo_django.models.embedded import TransportSubscription
from kjo_django.models.job import Job
from kjo_django.store.postgres import BeginAlong

_NO_ROW = -1


def jobs_database() -> str:
    """Return the alias of the database that holds the jobs."""
    return get_settings().database or router.db_for_write(Job)


def take_write_lock(alias: str) -> None:
    """Make SQLite's transaction a writing one before it reads.

    A transaction that has read and then wants to write is refused at once ("database is locked")
    if another wrote in between; one that starts with a write waits its turn. A statement that
    changes no row takes the lock all the same, and dirties no page.
    """
    if connections[alias].vendor == "sqlite":
        TransportSubscription.objects.using(alias).filter(pk=_NO_ROW).update(topic="")


@contextmanager
def atomic_along(alias: str, *, savepoint: bool = True, durable: bool = False) -> Iterator[None]:
    """``transaction.atomic()``, which on PostgreSQL takes no round trip to begin: the ``BEGIN``
    goes along with the first query."""
    connection = connections[alias]
    along = BeginAlong(connection) if connection.vendor == "postgresql" else nullcontext()
    with transaction.atomic(using=alias, savepoint=savepoint, durable=durable), along:
        yield


@contextmanager
def writing(alias: str) -> Iterator[None]:
    """A transaction that is going to write, whatever it reads first."""
    with transaction.atomic(using=alias):
        take_write_lock(alias)
        yield
