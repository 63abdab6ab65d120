"""Quieting and stopping workers. A wish is a column of the worker's own row: the process obeys
within two seconds, and one started in its place has another row and no wish."""

from __future__ import annotations

import enum
import functools
import uuid
from collections.abc import Iterable, Sequence

from django.db import transaction
from django.db.models import QuerySet
from django.utils import timezone

from kjo_django import signals
from kjo_django.models import Worker
from kjo_django.operations.jobs import Outcomes
from kjo_django.operations.rows import Observer, batched, tell_after_commit
from kjo_django.operations.status import alive_within
from kjo_django.store.transactions import jobs_database

CHUNK = 100
"""Workers asked in one transaction."""


class AskResult(enum.StrEnum):
    """What asking one worker ended with."""

    ASKED = "asked"
    UNCHANGED = "unchanged"
    """It had been asked for that already, or is not quiet."""
    STOPPING = "stopping"
    """It has been asked to stop, which nothing undoes."""
    GONE = "gone"
    """It has stopped, or its heartbeat is old."""
    NOT_FOUND = "not_found"


Workers = Iterable[Worker | uuid.UUID | str]


def quiet(workers: Workers, *, actor: str = "", on_changed: Observer | None = None) -> Outcomes:
    """Let workers start nothing more; what runs there ends, and they stay until stopped.

    Records they have fetched and not begun go to others at once on the database and on Redis; on
    Kafka a quiet worker keeps its partitions, and what is in them waits, until it goes on or stops.
    Its relay goes on.

    :param workers: rows or their ids; ``Worker.id``, which every start of a process has anew.
    :param actor: who asked, for the signal and the log.
    :param on_changed: told of the rows that were asked, inside the transaction.
    """
    return _ask(workers, Worker.Wish.QUIET, actor, on_changed)


def unquiet(workers: Workers, *, actor: str = "", on_changed: Observer | None = None) -> Outcomes:
    """Undo ``quiet``. One that was asked to stop stops."""
    return _ask(workers, Worker.Wish.NONE, actor, on_changed)


def stop(workers: Workers, *, actor: str = "", on_changed: Observer | None = None) -> Outcomes:
    """Let workers stop as a SIGTERM would: what runs gets the grace period, the rest goes back.

    ``kjo_consume --processes N`` starts no other in its place. What runs it may: a process manager
    that restarts whatever ends starts a new worker.
    """
    return _ask(workers, Worker.Wish.STOP, actor, on_changed)


def _ask(workers: Workers, wish: Worker.Wish, actor: str, on_changed: Observer | None) -> Outcomes:
    outcomes = Outcomes()
    using = jobs_database()
    keys = [_key(worker) for worker in workers]
    outcomes.add(AskResult.NOT_FOUND, keys.count(None))
    for chunk in batched(sorted({key for key in keys if key is not None}), CHUNK):
        with transaction.atomic(using=using):
            rows = Worker.objects.using(using).filter(pk__in=chunk)
            asked = [key for key in chunk if _ask_one(rows.filter(pk=key), wish)]
            found = {worker.pk: worker for worker in rows}
            for key in chunk:
                outcomes.add(_result(found.get(key), key in asked, wish))
            changed = [found[key] for key in asked]
            outcomes.changed_count += len(changed)
            if on_changed is not None and changed:
                on_changed(changed)
            tell_after_commit(using, functools.partial(_tell, changed, wish, actor))
    return outcomes


def _ask_one(row: QuerySet[Worker], wish: Worker.Wish) -> int:
    # One conditional UPDATE: of two operators one asks, and a stop is never taken back.
    living = row.filter(heartbeat_at__gte=timezone.now() - alive_within()).exclude(
        state=Worker.State.STOPPED
    )
    return living.exclude(wish__in={wish, Worker.Wish.STOP}).update(wish=wish)


def _result(worker: Worker | None, was_asked: bool, wish: Worker.Wish) -> AskResult:
    if worker is None:
        return AskResult.NOT_FOUND
    if was_asked:
        return AskResult.ASKED
    if not worker.is_alive(alive_within()):
        return AskResult.GONE
    if worker.wish == Worker.Wish.STOP and wish != Worker.Wish.STOP:
        return AskResult.STOPPING
    return AskResult.UNCHANGED


def _key(worker: Worker | uuid.UUID | str) -> uuid.UUID | None:
    if isinstance(worker, Worker):
        return worker.pk
    try:
        return worker if isinstance(worker, uuid.UUID) else uuid.UUID(worker)
    except ValueError:
        return None


def _tell(workers: Sequence[Worker], wish: Worker.Wish, actor: str) -> None:
    for worker in workers:
        signals.send(
            signals.worker_asked,
            sender=worker.name,
            worker_id=str(worker.pk),
            wish=str(wish),
            actor=actor,
        )
