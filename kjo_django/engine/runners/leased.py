"""What ``atomic=False`` handlers need: a lease in the job's row, and an outcome recorded under it.

The lease is durable, so of two workers one runs the job even when coordination has vanished. The
outcome is recorded with the marker in one transaction afterwards, and only by whoever still holds
the lease: a worker that was frozen past it loses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from uuid import UUID

from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.engine import admission, completion, failures
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.handler.call import ENDINGS, Ran, call, is_interrupt, make_context
from kjo_django.engine.handler.connections import (
    freshen_connections,
    open_blocks,
    undone_with_others,
)
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.outcomes import acknowledge, noting_doubt, outcome_of
from kjo_django.engine.runners.batch import Batch, Started, call_concurrently, run_batch
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database


class PlainRunner:
    """Claims rows, calls handlers, records what still counts.

    :param is_workers: whether the threads that call handlers are a worker's own.
    """

    def __init__(
        self,
        leases: LeaseBook,
        watch: TimeoutWatch,
        on_measure: Callable[[str, float], None],
        *,
        is_workers: bool,
    ) -> None:
        self._leases = leases
        self._watch = watch
        self._on_measure = on_measure
        self._is_workers = is_workers

    def run_at_once(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        """Run coroutines at the same time and wait for all; their completions are durable on
        return, their failures are still to settle."""
        started, ended = self.claim(deliveries)
        if not started:
            return ended
        outer = self._around()
        try:
            ran = call_concurrently(started, self._watch)
            left = freshen_connections(is_own=self._is_workers, outer=outer)
            if left is not None:
                for one in ran:
                    one.error = one.error or undone_with_others(left)
            return ended + self.record(started, ran)
        finally:
            self.let_go(started)

    def claim(self, deliveries: Sequence[Delivery]) -> tuple[list[Started], list[Outcome]]:
        """Decide what may run and take the row leases, which are renewed until ``let_go``.

        Of two records of one job one is deferred.
        """
        using, service = jobs_database(), get_settings().service_name
        now = timezone.now()
        started: list[Started] = []
        ended: list[Outcome] = []
        wanted = {d: d.event_key(service) for d in deliveries}
        rows = load_rows(using, deliveries, lock=False)
        known = store_for(using).known_markers(wanted.values())
        for delivery in deliveries:
            row = rows.get(row_id(delivery, service))
            start = admission.judge(
                delivery,
                row,
                is_fresh=wanted[delivery] not in known,
                leases=self._leases,
                now=now,
            )
            if isinstance(start, Outcome):
                ended.append(start)
            else:
                started.append((delivery, start, row))
        judged = {row.id: row for _, _, row in started if row is not None}
        # Another record of a job may be with another lane, and its lease is this worker's too.
        free = self._leases.hold_rows(judged)
        won: set[UUID] = set()
        try:
            # Whoever else changed a row since, and be it by taking its lease, has it.
            won = store_for(using).take_row_leases(
                [row for id, row in judged.items() if id in free],
                self._leases.token,
                now,
                now + self._leases.ttl,
            )
        finally:
            self._leases.let_rows_go(free - won)
        mine: list[Started] = []
        for delivery, start, row in started:
            if row is not None:
                if row.id not in won:
                    ended.append(Outcome(delivery, Result.DEFERRED, job=row, reason="leased"))
                    continue
                won.discard(row.id)  # a second record of the job waits for the first
            mine.append((delivery, start, row))
        return mine, ended

    def let_go(self, started: Sequence[Started]) -> None:
        """Stop renewing the row leases."""
        if self._watch.is_abandoned:
            return  # they may be another thread's by now
        self._leases.let_rows_go(_ids(started))

    def give_back(self, started: Sequence[Started]) -> None:
        """Let others have at once what was claimed and has no ending that was recorded."""
        if self._watch.is_abandoned:
            return
        store_for(jobs_database()).release_row_leases(_ids(started), self._leases.token)

    def give_back_of(self, outcomes: Sequence[Outcome]) -> None:
        """Let others have at once what ran and comes again."""
        ids = [outcome.job.id for outcome in outcomes if outcome.job is not None]
        store_for(jobs_database()).release_row_leases(ids, self._leases.token)

    def call(self, step: Sequence[Started]) -> list[Ran]:
        """Make one call, for a delivery or for a batch handler's several; return how each ended."""
        delivery, start, row = step[0]
        outer = self._around()
        if delivery.batch is not None:
            batch = run_batch(Batch(step), lambda batch: self._call_batch(batch, outer))
            self._on_measure(delivery.kind, sum(one.seconds for one in batch) / len(batch))
            return batch
        context = make_context(delivery, start.attempt, start.max_attempts, row)
        ran, clock = Ran(timezone.now(), 0.0), time.perf_counter()
        try:
            ran.value = call(delivery, context, self._watch)
        except ENDINGS as error:
            if is_interrupt(error):
                raise
            ran.error, ran.abort_reason = error, context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(delivery.kind, ran.seconds)
        # Nor is what it has left of its connection the next one's fault.
        left = freshen_connections(is_own=self._is_workers, outer=outer)
        if left is not None and ran.error is None:
            ran.error, ran.value = left, None
        return [ran]

    def _call_batch(self, batch: Batch, outer: Mapping[str, int] | None) -> list[Ran]:
        left: Exception | None = None
        try:
            endings = batch.call(self._watch)
        finally:
            left = freshen_connections(is_own=self._is_workers, outer=outer)
        if left is not None:
            raise left
        return endings

    def _around(self) -> Mapping[str, int] | None:
        """The blocks of ``atomic()`` a call is made in: none, in a thread of a worker's own."""
        return None if self._is_workers else open_blocks()

    def record(self, started: Sequence[Started], ran: Sequence[Ran]) -> list[Outcome]:
        """Commit completions with their markers; what lost its lease is dropped."""
        self._watch.check()
        using, service = jobs_database(), get_settings().service_name
        outcomes = [
            outcome_of(delivery, one, start, row)
            for (delivery, start, row), one in zip(started, ran, strict=True)
        ]
        for outcome in outcomes:
            # Of a failure too: who lost the lease must not spend an attempt of who has it.
            outcome.notes["lease_token"] = self._leases.token
        done = [outcome for outcome in outcomes if outcome.result is Result.COMPLETED]
        if not done:
            return outcomes
        with noting_doubt() as in_doubt, failures.in_transaction(using):
            keys = {id(o): o.delivery.event_key(service) for o in done}
            fresh = store_for(using).insert_markers(keys.values())
            winners = [o for o in done if keys[id(o)] in fresh or _judges_itself(o)]
            recorded = completion.complete(using, winners, self._leases.token)
            won = {id(outcome) for outcome in winners}
            for outcome in done:
                if id(outcome) not in won:
                    outcome.result, outcome.reason = Result.DUPLICATE, "lease lost"
                elif outcome.job is not None and outcome.job.id not in recorded:
                    outcome.result, outcome.reason = Result.SKIPPED, "lease lost"
            lost = [keys[id(o)] for o in done if o.result is Result.SKIPPED]
            lost = [key for key in lost if key in fresh]
            store_for(using).delete_markers(lost)
            acknowledge(done, in_transaction=True)
            in_doubt += [outcome for outcome in done if outcome.result is Result.COMPLETED]
        return outcomes


def _ids(started: Collection[Started]) -> list[UUID]:
    return [row.id for _, _, row in started if row is not None]


def _judges_itself(outcome: Outcome) -> bool:
    handler = outcome.delivery.handler
    return handler is not None and handler.judges_itself
