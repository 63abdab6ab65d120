"""Workers: the partitions in their rows, and how operators quiet and stop them.

A column of the worker's row holds what operators asked. The process obeys within two seconds. A
process started in its place has another row, which asks nothing.
"""

from __future__ import annotations

import functools
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction

from kjo_django import signals
from kjo_django.clock import CLOCK
from kjo_django.conf import Settings, get_settings
from kjo_django.models import Worker
from kjo_django.operations.jobs import ChangeResult, Outcomes
from kjo_django.operations.rows import Observer, batched, key_of, on_commit
from kjo_django.runtime import jobs_database

THREADS_DIED = "Threads have died"
"""How the last error of a worker begins that ended for that reason."""
MOST = 5_000
"""Partitions of one worker that are read."""
ALIVE_HEARTBEATS = 6
"""Heartbeats a worker may miss before it counts as gone."""


def alive_within(conf: Settings | None = None) -> timedelta:
    """Return how old the last heartbeat of a living worker may be."""
    return ALIVE_HEARTBEATS * (conf or get_settings()).heartbeat_interval


@dataclass(frozen=True, slots=True)
class RunningJob:
    """A job that a worker was running at its last heartbeat."""

    id: str
    """The job's id, or the message's where no job was enqueued here."""
    handler: str
    started_at: datetime


@dataclass(frozen=True, slots=True)
class Assignment:
    """One partition of a worker."""

    topic: str
    partition: int
    group: str | None = None
    """The consumer group."""
    rebalanced_at: datetime | None = None
    """When the worker's assignment in this group changed last."""
    resting_until: datetime | None = None
    """It hands out nothing until then, since a server that its messages need is down."""
    running: tuple[RunningJob, ...] = ()
    """Jobs of it that have run longest, the longest first."""
    waiting_since: datetime | None = None
    """Since when a record of it that the worker has fetched waits for a free lane."""

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        return asdict(self) | {
            "rebalanced_at": _isoformat(self.rebalanced_at),
            "resting_until": _isoformat(self.resting_until),
            "waiting_since": _isoformat(self.waiting_since),
            "running": [
                asdict(each) | {"started_at": each.started_at.isoformat()} for each in self.running
            ],
        }

    def stored(self) -> dict[str, Any]:
        """Return it as the row holds it: without unknown values."""
        return {name: value for name, value in self.as_dict().items() if value not in (None, [])}


def assignments(partitions: Any) -> list[Assignment]:
    """Return the partitions in a worker's row. An entry in the form of another release is left
    out: a screen shows less, and never fails."""
    found = []
    for each in partitions[:MOST] if isinstance(partitions, list) else ():
        with suppress(AttributeError, KeyError, TypeError, ValueError):
            running = [
                RunningJob(job["id"], job["handler"], datetime.fromisoformat(job["started_at"]))
                for job in each.get("running", ())
            ]
            found.append(
                Assignment(
                    topic=str(each["topic"]),
                    partition=int(each["partition"]),
                    group=each.get("group"),
                    rebalanced_at=_moment(each.get("rebalanced_at")),
                    resting_until=_moment(each.get("resting_until")),
                    waiting_since=_moment(each.get("waiting_since")),
                    running=tuple(running),
                )
            )
    return found


def rebalanced_at(assigned: list[Assignment]) -> datetime | None:
    """Return when an assignment of the worker changed last, or None."""
    return max((each.rebalanced_at for each in assigned if each.rebalanced_at), default=None)


# --- Details --------------------------------------------------------------------------------------


def _moment(found: str | None) -> datetime | None:
    return datetime.fromisoformat(found) if found is not None else None


def _isoformat(moment: datetime | None) -> str | None:
    return moment.isoformat() if moment is not None else None


CHUNK = 100
"""Workers asked in one transaction."""


Workers = Iterable[Worker | uuid.UUID | str]


def quiet(workers: Workers, *, actor: str = "", on_changed: Observer | None = None) -> Outcomes:
    """Ask workers to start nothing more. Running jobs end, and the workers stay until stopped.

    On the database and on Redis, records that a worker has fetched and not begun go to other
    workers at once. On Kafka a quiet worker keeps its partitions, and their records wait until it
    goes on or stops. Its relay goes on.

    :param workers: rows or their ids; ``Worker.id``, which every start of a process has anew.
    :param actor: who asked, for the signal and the log.
    :param on_changed: called with the rows that were asked, inside the transaction.
    """
    return _ask(workers, Worker.Request.QUIET, actor, on_changed)


def unquiet(workers: Workers, *, actor: str = "", on_changed: Observer | None = None) -> Outcomes:
    """Undo ``quiet``. A worker that was asked to stop stops all the same."""
    return _ask(workers, Worker.Request.NONE, actor, on_changed)


def stop(workers: Workers, *, actor: str = "", on_changed: Observer | None = None) -> Outcomes:
    """Ask workers to stop as after a SIGTERM: running jobs get the grace period, others go back.

    ``kjo_consume --processes N`` starts no process in its place. A process manager that restarts
    whatever ends starts a new worker.
    """
    return _ask(workers, Worker.Request.STOP, actor, on_changed)


def _ask(
    workers: Workers, request: Worker.Request, actor: str, on_changed: Observer | None
) -> Outcomes:
    outcomes = Outcomes()
    using = jobs_database()
    keys = list(map(key_of, workers))
    outcomes.add(ChangeResult.NOT_FOUND, keys.count(None))
    for chunk in batched(sorted(set(filter(None, keys))), CHUNK):
        with transaction.atomic(using=using):
            rows = Worker.objects.using(using).filter(pk__in=chunk)
            # A conditional UPDATE each: of two operators one asks, and a stop is never taken back.
            living = rows.filter(heartbeat_at__gte=CLOCK.now() - alive_within())
            free = living.exclude(state=Worker.State.STOPPED).exclude(
                asked_to__in={request, Worker.Request.STOP}
            )
            asked = [key for key in chunk if free.filter(pk=key).update(asked_to=request)]
            found = {worker.pk: worker for worker in rows}
            changed = [found[key] for key in asked]
            for key in set(chunk) - set(asked):
                outcomes.add(_refusal(found.get(key), request))
            outcomes.add_changed(ChangeResult.ASKED, len(changed))
            if on_changed is not None and changed:
                on_changed(changed)
            for worker in changed:
                on_commit(using, _announcement(worker, request, actor))
    return outcomes


def _announcement(worker: Worker, request: Worker.Request, actor: str) -> Callable[[], object]:
    facts = {"worker_id": str(worker.pk), "asked_to": str(request), "actor": actor}
    return functools.partial(signals.worker_asked.send_robust, sender=worker.name, **facts)


def _refusal(worker: Worker | None, request: Worker.Request) -> ChangeResult:
    if worker is None:
        return ChangeResult.NOT_FOUND
    if not worker.is_alive(alive_within()):
        return ChangeResult.GONE
    if worker.asked_to == Worker.Request.STOP and request != Worker.Request.STOP:
        return ChangeResult.STOPPING
    return ChangeResult.UNCHANGED
