"""Making durable how handlers outside a transaction ended: with the endings in hand, since those
who have run are not to run again because a database was away."""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from typing import Protocol

from kjo_django.engine.attempt import Delivery, Outcome
from kjo_django.engine.handler.call import Ran
from kjo_django.engine.handler.connections import freshen_connections
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outage_retry import Next, OutageRetry
from kjo_django.engine.runners.batch import Started
from kjo_django.engine.runners.leased import PlainRunner


class Settle(Protocol):
    """Acknowledges and announces what is durable, and records failures."""

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
        worker stops: then they run again.

        A completion the database refuses again and again is a failure of its attempt.

        :param ended: outcomes of those that were not to run.
        :param keep: names of leases somebody else of their group still needs.
        """
        retry = OutageRetry(self._stopping)
        while True:
            try:
                freshen_connections(is_own=self._stopping is not None)
                outcomes = self._plain.record(started, ran)
            except Exception as error:
                following = retry.after(error, "Endings cannot be recorded", len(started))
                if following is Next.SPLIT:
                    deferred = self._settle([*ended], keep) if ended else []
                    for one, ending in zip(started, ran, strict=True):
                        deferred += self.record([one], [ending], (), keep)
                    return deferred
                completions = [ending for ending in ran if ending.error is None]
                if following is Next.REFUSED and completions:
                    for ending in completions:
                        ending.error, ending.value = error, None
                elif following is not Next.AGAIN:
                    deferred = [delivery for delivery, _, _ in started]
                    names = [delivery.lease for delivery in deferred]
                    self._leases.release(
                        [name for name in names if name not in keep],
                        count_delivery=following is Next.REFUSED,
                    )
                    return deferred + (self._settle([*ended], keep) if ended else [])
            else:
                return self._settle([*ended, *outcomes], keep)
