"""Making durable how handlers outside a transaction ended: with the endings in hand, since those
who have run are not to run again because a database was away."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from django.db import DatabaseError, InterfaceError

from kjo_django.consumer.batches import Started
from kjo_django.consumer.connections import (
    answers,
    drop_broken_connections,
    freshen_connections,
    is_busy,
)
from kjo_django.consumer.execution import Ran
from kjo_django.consumer.leases import LeaseBook
from kjo_django.consumer.outages import Patience
from kjo_django.consumer.plain import PlainRunner
from kjo_django.consumer.work import Delivery, Outcome
from kjo_django.exceptions import PublishError
from kjo_django.producer.dispatch import jobs_database

logger = logging.getLogger("kjo_django")

REFUSALS = 3
"""Times a database that is there may refuse to record one ending, before its job runs again."""
OUTAGES = (DatabaseError, InterfaceError, OSError, PublishError)


class Settle(Protocol):
    """Writes outcomes down and acknowledges them."""

    def __call__(self, outcomes: list[Outcome], keep: Collection[str] = ()) -> list[Delivery]:
        """Return the deferred.

        :param keep: names of leases that are not released with them.
        """


class Recorder:
    """Records and settles, in the threads of those who ask. Keeps no state.

    :param stopping: set when the worker stops; None: outages are raised.
    """

    def __init__(
        self,
        plain: PlainRunner,
        leases: LeaseBook,
        settle: Settle,
        stopping: threading.Event | None,
    ) -> None:
        self._plain = plain
        self._leases = leases
        self._settle = settle
        self._stopping = stopping

    def record(
        self,
        started: Sequence[Started],
        ran: Sequence[Ran],
        ended: Sequence[Outcome] = (),
        keep: Collection[str] = (),
    ) -> list[Delivery]:
        """Make the endings durable; returns what is deferred. An outage is waited out, unless the
        worker stops: then, and where the database refuses again and again, they run again.

        :param ended: outcomes of those that were not to run.
        :param keep: names of leases somebody else of their group still needs.
        """
        patience = None if self._stopping is None else Patience(self._stopping)
        refusals = 0
        while True:
            try:
                freshen_connections(is_own=patience is not None)
                return self._settle([*ended, *self._plain.record(started, ran)], keep)
            except OUTAGES as error:
                if patience is None:
                    raise
                # Not what somebody else's lock was in the way of: that passes, like an outage.
                is_refused = (
                    isinstance(error, DatabaseError)
                    and not is_busy(error)
                    and answers(jobs_database())
                )
                if is_refused and len(started) + len(ended) > 1:
                    count = len(started) + len(ended)
                    logger.warning("%d endings are settled one by one: %s", count, error)
                    return self._record_one_by_one(started, ran, ended, keep)
                drop_broken_connections()
                # An outage that was waited out before is none of them.
                refusals += is_refused
                gives_up = refusals > REFUSALS
                if gives_up or not patience.goes_on("Endings cannot be settled", error):
                    deliveries = [o.delivery for o in ended] + [one[0] for one in started]
                    logger.error(
                        "The endings of %d jobs are given up, they run again, first %s: %s",
                        len(deliveries),
                        deliveries[0].kind,
                        error,
                    )
                    self._leases.release([delivery.lease for delivery in deliveries])
                    return deliveries

    def _record_one_by_one(
        self,
        started: Sequence[Started],
        ran: Sequence[Ran],
        ended: Sequence[Outcome],
        keep: Collection[str],
    ) -> list[Delivery]:
        deferred = []
        for outcome in ended:
            deferred += self.record((), (), [outcome], keep)
        for one, ending in zip(started, ran, strict=True):
            deferred += self.record([one], [ending], (), keep)
        return deferred
