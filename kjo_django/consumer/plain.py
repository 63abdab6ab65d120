"""Running ``atomic=False`` handlers: outside any transaction, under a lease in the job's row.

The lease is durable, so of two workers one runs the job even when coordination has vanished. The
outcome is recorded with the marker in one transaction afterwards, and only by whoever still holds
the lease: a worker that was frozen past it loses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any
from uuid import UUID

from django.db import connections
from django.utils import timezone

from kjo_django import states
from kjo_django.conf import get_settings
from kjo_django.consumer import attempts, settlement
from kjo_django.consumer.batches import Batch, Started, call_concurrently, in_steps, run_batch
from kjo_django.consumer.execution import ENDINGS, Ran, call, make_context
from kjo_django.consumer.leases import LeaseBook
from kjo_django.consumer.outcomes import Resting, acknowledge, outcome_of
from kjo_django.consumer.rows import lease_rows, load_rows, row_id
from kjo_django.consumer.timeouts import TimeoutWatch
from kjo_django.consumer.work import Delivery, Outcome, Result
from kjo_django.models import EventKey, Job, ProcessedEvent
from kjo_django.producer.dispatch import jobs_database


class PlainRunner:
    """Claims rows, runs handlers, records what still counts."""

    def __init__(
        self, leases: LeaseBook, watch: TimeoutWatch, on_measure: Callable[[str, float], None]
    ) -> None:
        self._leases = leases
        self._watch = watch
        self._on_measure = on_measure

    def run(self, deliveries: Sequence[Delivery], *, concurrently: bool) -> list[Outcome]:
        """Run a group; its completions are durable on return, its failures are still to settle."""
        if concurrently:
            return self._run_group(deliveries)
        outcomes: list[Outcome] = []
        resting = Resting()
        service = get_settings().service_name
        for step in in_steps(deliveries, {d: d.event_key(service) for d in deliveries}):
            awake = [delivery for delivery in step if delivery not in resting]
            outcomes += [
                Outcome(delivery, Result.DEFERRED, reason="paused")
                for delivery in step
                if delivery in resting
            ]
            if awake:
                outcomes += resting.noting(self._run_group(awake))
        return outcomes

    def _run_group(self, deliveries: Sequence[Delivery]) -> list[Outcome]:
        started, ended = self.claim(deliveries)
        if not started:
            return ended
        try:
            return ended + self.record(started, self._call(started))
        finally:
            self.let_go(started)

    def claim(self, deliveries: Sequence[Delivery]) -> tuple[list[Started], list[Outcome]]:
        """Decide what may run and take the row leases, which are renewed until ``let_go``.

        In one short transaction where rows can be locked. Elsewhere each lease is taken by an
        UPDATE that looks again; a transaction there would only make SQLite refuse the write at
        once, whatever its time-out, when somebody else writes after our read.
        """
        using, service = jobs_database(), get_settings().service_name
        locks = connections[using].features.has_select_for_update
        now = timezone.now()
        started: list[Started] = []
        ended: list[Outcome] = []
        with settlement.in_transaction(using) if locks else nullcontext():
            wanted = {d: d.event_key(service) for d in deliveries}
            rows = load_rows(using, deliveries, lock=True)
            known = _processed(using, wanted.values())
            for delivery in deliveries:
                row = rows.get(row_id(delivery))
                start = attempts.judge(
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
            won = self._take_leases(using, [row for _, _, row in started if row is not None], now)
            ended += [
                Outcome(delivery, Result.DEFERRED, job=row, reason="leased")
                for delivery, _, row in started
                if row is not None and row["id"] not in won
            ]
            started = [one for one in started if one[2] is None or one[2]["id"] in won]
        self._leases.hold_rows(_ids(started))
        return started, ended

    def let_go(self, started: Sequence[Started]) -> None:
        """Stop renewing the row leases."""
        self._leases.let_rows_go(_ids(started))

    def _take_leases(self, using: str, rows: Sequence[dict[str, Any]], now: datetime) -> set[UUID]:
        """Take the row leases, and return the ids of the jobs whose it got."""
        if connections[using].features.has_select_for_update:
            # Locked since they were judged.
            ids = [row["id"] for row in rows]
            lease_rows(using, ids, self._leases.token, now, now + self._leases.ttl)
            return set(ids)
        return {row["id"] for row in rows if self._take_lease(using, row, now)}

    def _take_lease(self, using: str, row: dict[str, Any], now: datetime) -> bool:
        # Conditional on the lease that was judged: whoever else takes it first, wins.
        changed = (
            Job.objects.using(using)
            .at(row["id"], row["generation"])
            .filter(
                lease_token=row["lease_token"],
                lease_expires_at=row["lease_expires_at"],
                state__in=states.OPEN,
            )
            .update(
                lease_token=self._leases.token,
                lease_expires_at=now + self._leases.ttl,
                started_at=now,
            )
        )
        return bool(changed)

    def _call(self, started: Sequence[Started]) -> list[Ran]:
        delivery, start, row = started[0]
        assert delivery.handler is not None
        if delivery.handler.is_async:
            return call_concurrently(started, self._watch)
        if delivery.batch is not None:
            batch = run_batch(Batch(started), lambda batch: batch.call(self._watch))
            self._on_measure(delivery.kind, sum(one.seconds for one in batch) / len(batch))
            return batch
        context = make_context(delivery, start.attempt, start.max_attempts, row)
        ran, clock = Ran(timezone.now(), 0.0), time.perf_counter()
        try:
            ran.value = call(delivery, context, self._watch)
        except ENDINGS as error:
            ran.error, ran.abort_reason = error, context.abort_reason
        ran.seconds, ran.result_ttl = time.perf_counter() - clock, context.result_ttl
        self._on_measure(delivery.kind, ran.seconds)
        return [ran]

    def record(self, started: Sequence[Started], ran: Sequence[Ran]) -> list[Outcome]:
        """Commit completions with their markers; what lost its lease is dropped."""
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
        with settlement.in_transaction(using):
            keys = {id(o): o.delivery.event_key(service) for o in done}
            fresh = ProcessedEvent.objects.using(using).mark(list(keys.values()))
            winners = [o for o in done if keys[id(o)] in fresh or _judges_itself(o)]
            recorded = settlement.complete(using, winners, self._leases.token)
            won = {id(outcome) for outcome in winners}
            for outcome in done:
                if id(outcome) not in won:
                    outcome.result = Result.DUPLICATE
                elif outcome.job is not None and outcome.job["id"] not in recorded:
                    outcome.result, outcome.reason = Result.SKIPPED, "lease lost"
            lost = [keys[id(o)] for o in done if o.result is Result.SKIPPED]
            lost = [key for key in lost if key in fresh]
            ProcessedEvent.objects.using(using).unmark(lost)
            acknowledge(done, in_transaction=True)
        return outcomes


def _ids(started: Sequence[Started]) -> list[UUID]:
    return [row["id"] for _, _, row in started if row is not None]


def _judges_itself(outcome: Outcome) -> bool:
    handler = outcome.delivery.handler
    return handler is not None and handler.judges_itself


def _processed(using: str, keys: Iterable[EventKey]) -> set[EventKey]:
    """Return the event keys of the group that are marked already."""
    wanted = set(keys)
    rows = ProcessedEvent.objects.using(using).filter(
        service_name__in={key.service_name for key in wanted},
        event_id__in={key.event_id for key in wanted},
    )
    return {row.event_key for row in rows}
