"""The web application of a mixed load: carries out a plan's work, and notes what was promised.

python -m tests.mixed.application SEED ENGINE PHASES

It notes the moment the plan's times count from, once it is told that workers are ready.
"""

from __future__ import annotations

import io
import json
import os
import sys
import threading
import time
from collections.abc import Iterable
from datetime import timedelta
from itertools import groupby
from pathlib import Path
from typing import Any

from django.core.management import CommandError, call_command
from django.db import DatabaseError, InterfaceError, connections, transaction
from django.utils import timezone

from kjo_django.exceptions import KjoError
from tests.mixed.names import RUN, topic
from tests.mixed.plan import EXHAUSTED, RELAYED_BY_ALL, Plan, Work, draw
from tests.mixed.trace import FILE, note
from tests.waiting import wait_until

OUTAGES = (DatabaseError, InterfaceError, KjoError)
PATIENCE = 60.0
"""Seconds in which items may be pending still, once everything is enqueued."""
HANDLERS = {
    "keyed": "write",
    "slow": "write_slowly",
    "hot": "write_hot",
    "long": "write_long",
    "uneven": "write_unevenly",
    "paused": "write_paused",
    "killer": "write_or_kill",
    "rated": "write_rated",
    "slotted": "write_in_slot",
}
"""Which handler runs a kind of work, where it has another name."""
BACKLOGS = ("slow", "hot", "uneven", "rated", "slotted")
"""Kinds of which many are enqueued in one transaction."""
FLOW = ("first_step", "step", "last_step")
"""Kinds of the steps of a workflow, which are enqueued together."""
REFUSED_BYTES = 60_000
"""More than the topic of `write_large` takes."""


class _RolledBack(Exception):
    """Raised where the plan says that a transaction is not to be."""


class Application:
    """Enqueues what a plan says.

    :param start: the moment, by ``time.time()``, the plan's times count from.
    """

    def __init__(self, plan: Plan, start: float) -> None:
        from tests.mixed import handlers

        self._plan = plan
        self.start = start
        self._run = os.environ[RUN]
        self._handlers = handlers
        self._is_enqueued = threading.Event()

    def carry_out(self) -> None:
        """Return when everything was enqueued; probes are enqueued beside the rest."""
        probes = [work for work in self._plan.works if work.kind == "probe"]
        others = [work for work in self._plan.works if work.kind != "probe"]
        beside = [
            threading.Thread(target=self._carry_out, args=[probes]),
            threading.Thread(target=self._produce_items),
        ]
        for thread in beside:
            thread.start()
        self._carry_out(others)
        self._is_enqueued.set()
        for thread in beside:
            thread.join()

    def _carry_out(self, works: Iterable[Work]) -> None:
        ordered = sorted(works, key=lambda work: (work.at, work.transaction))
        try:
            for _, group in groupby(ordered, key=lambda work: work.transaction):
                together = list(group)
                self._wait_until(together[0].at)
                self._transact(together)
        finally:
            connections.close_all()

    def _wait_until(self, at: float) -> None:
        time.sleep(max(0.0, self.start + at - time.time()))  # sleep: until the plan says

    def _produce_items(self) -> None:
        """Poll the items, as a producer's process would, until all that will come were done."""
        producer = self._handlers.ItemProducer()
        try:
            at, is_done, last = 0.5, False, float("inf")
            while not is_done and at < last:
                self._wait_until(at)
                are_all_there = self._is_enqueued.is_set()
                if are_all_there:
                    last = min(last, at + PATIENCE)
                is_done = self._produce(producer) and are_all_there
                at += 1.5
        finally:
            connections.close_all()

    def _produce(self, producer: Any) -> bool:
        """Send what is pending; return whether nothing was."""
        try:
            return producer.produce_messages({"state": 1}, 100).total == 0
        except OUTAGES as error:
            note("outage", "items", type(error).__name__)
            connections.close_all()
            return False

    # --- One transaction --------------------------------------------------------------------------

    def _transact(self, works: list[Work]) -> None:
        after: list[Any] = []
        began = time.time()
        try:
            with transaction.atomic():
                if works[0].kind in FLOW:
                    self._enqueue_flow(works)
                elif self._plan.away and works[0].kind in BACKLOGS:
                    self._enqueue_together(works)
                else:
                    after = [(work, does) for work in works if (does := self._enqueue(work))]
                if not works[0].commits:
                    raise _RolledBack
        except _RolledBack:
            return
        except OUTAGES as error:
            # Whether it was committed is not known to an application that lost its connection.
            for work in works:
                note("unsure", work.name, type(error).__name__)
            connections.close_all()
            return
        took = time.time() - began
        for work in works:
            note("committed", work.name, f"{took:.3f}")
        if works[0].how == RELAYED_BY_ALL:
            self._relay_twice()
        for work, does in after:
            try:
                does()
            except OUTAGES as error:
                note("unsure", work.name, type(error).__name__)
                connections.close_all()

    def _relay_twice(self) -> None:
        """Relay what is due with two commands at once, as cron would beside the workers."""
        relays = [threading.Thread(target=self._relay) for _ in range(2)]
        for relay in relays:
            relay.start()
        for relay in relays:
            relay.join()

    def _relay(self) -> None:
        try:
            call_command("kjo_produce", "--once", stdout=io.StringIO())
        except (*OUTAGES, CommandError) as error:
            note("outage", "relay", type(error).__name__)
        finally:
            connections.close_all()

    def _enqueue(self, work: Work) -> Any:
        """Enqueue within the transaction; return what is to be done once that is committed."""
        return getattr(self, f"_enqueue_{work.kind}", self._enqueue_job)(work)

    def _enqueue_together(self, works: list[Work]) -> None:
        """Enqueue a backlog at once, as who is far from their database does."""
        self._handler_of(works[0]).enqueue_many([self._payload_of(work) for work in works])

    def _handler_of(self, work: Work) -> Any:
        return getattr(self._handlers, HANDLERS.get(work.kind, work.kind))

    def _payload_of(self, work: Work) -> dict[str, Any]:
        payload: dict[str, Any] = {"job": work.name, **work.behaviour}
        if work.ms:
            payload["ms"] = work.ms
        if work.key:
            payload["key"] = work.key
        return payload

    def _enqueue_job(self, work: Work) -> Any:
        options: dict[str, Any] = {}
        if work.end == "exhaust":
            options["max_attempts"] = EXHAUSTED
        if work.delay:
            options["delay"] = timedelta(seconds=work.delay)
        if work.end == "expire":
            options["expires_at"] = timezone.now() + timedelta(seconds=work.delay / 2)
        answer = self._handler_of(work).using(**options).enqueue(**self._payload_of(work))
        if work.copies:
            return lambda: self._copy_message(answer.job_id, work.copies)
        return None

    def _enqueue_once(self, work: Work) -> Any:
        """Enqueue it several times in its transaction, and once more afterwards."""

        def enqueue() -> None:
            self._handlers.write_once.enqueue(job=work.name, **work.behaviour)

        for _ in range(work.copies):
            enqueue()
        return enqueue

    def _enqueue_flow(self, works: list[Work]) -> None:
        """Enqueue a workflow: one step, those beside one another, the last one."""
        from kjo_django import chain, group

        def steps(kind: str) -> list[Any]:
            step = self._handlers.write_step.step
            return [step(job=one.name, **one.behaviour) for one in works if one.kind == kind]

        (first,), (last,) = steps("first_step"), steps("last_step")
        chain(first, group(steps("step")), last).enqueue()

    def _enqueue_write_batch(self, work: Work) -> None:
        options = {"delay": timedelta(seconds=work.delay)} if work.delay else {}
        self._handlers.write_batch.using(**options).enqueue(job=work.name, given=work.behaviour)

    def _enqueue_large(self, work: Work) -> None:
        size = REFUSED_BYTES if work.end == "too_large" else 10
        self._handlers.write_large.enqueue(job=work.name, filling="x" * size)

    def _copy_message(self, job_id: Any, copies: int) -> None:
        """Publish the job's message again, as a relay does that died before it noted it."""
        from kjo_django.conf import get_settings
        from kjo_django.enqueue.storing import record_of
        from kjo_django.models import Job

        job = Job.objects.get(pk=job_id)
        self._publish([record_of(job, get_settings().queue(job.queue))] * copies)

    def _publish(self, records: list[Any]) -> None:
        from kjo_django.exceptions import PublishError
        from kjo_django.runtime import get_transport

        for answer in get_transport().publish(records):
            if answer.error is not None:
                raise PublishError(answer.error)

    def _enqueue_task(self, work: Work) -> Any:
        options: dict[str, Any] = {"delay": timedelta(seconds=work.delay)} if work.delay else {}
        if work.end == "exhaust":
            options["max_attempts"] = EXHAUSTED
        payload = {"job": work.name, "given": work.behaviour}
        tasks = self._handlers.tasks
        tasks.enqueue(work.name, payload, **options)

        def after() -> None:
            for _ in range(work.copies):
                tasks.enqueue(work.name, payload, **options)
            if work.end == "cancel":
                self._cancel(work)

        return after

    def _cancel(self, work: Work) -> None:
        """Cancel it, however often that takes: it would be waited for otherwise."""
        for _ in range(50):
            try:
                note("cancel", work.name, self._handlers.tasks.cancel(work.name).name)
                return
            except OUTAGES:
                connections.close_all()
                time.sleep(0.1)  # sleep: until it is tried again

    def _enqueue_event(self, work: Work) -> None:
        self._tell(topic("events", self._run), work, 1 + work.copies)

    def _enqueue_other(self, work: Work) -> None:
        self._tell(topic("others", self._run), work, 1)

    def _tell(self, where: str, work: Work, times: int) -> None:
        from kjo_django import BaseEvent, publish_event

        event = BaseEvent(
            id=work.name, type="MIXED", data={"userId": work.name, "given": work.behaviour}
        )
        for _ in range(times):
            publish_event(where, event)

    def _enqueue_stream(self, work: Work) -> None:
        self._handlers.StreamProducer().send_task({"job": work.name, "given": work.behaviour})

    def _enqueue_item(self, work: Work) -> None:
        from tests.items.models import Item

        Item.objects.create(email=work.name, body=json.dumps(work.behaviour))

    def _enqueue_kdlq(self, work: Work) -> Any:
        from kjo_django.transports.base import OutgoingRecord

        value = json.dumps({"job": work.name, "given": work.behaviour}).encode()
        record = OutgoingRecord(topic("kdlq", self._run), value, key=work.name.encode())
        return lambda: self._publish([record])

    def _enqueue_foreign(self, work: Work) -> Any:
        from kjo_django.transports.base import OutgoingRecord

        headers = {
            "kjo-id": work.name.encode(),
            "kjo-type": self._handlers.write.name.encode(),
            "content-type": b"application/json",
        }
        value = json.dumps({"job": work.name, **work.behaviour}).encode()
        if work.end == "garbage":
            value = f"{{ {work.name} is no JSON".encode()
        record = OutgoingRecord(
            topic("work", self._run), value, key=work.name.encode(), headers=headers
        )
        return lambda: self._publish([record] * (1 + work.copies))


def begin(plan: Plan) -> Application:
    """Wait until workers are ready, and note the moment the plan begins."""
    told = Path(f"{os.environ[FILE]}.ready")
    wait_until(told.exists, "workers are ready")
    start = time.time() + 0.2 - min(work.at for work in plan.works)
    note("start", f"{start:.4f}")
    return Application(plan, start)


def main(seed: str, engine: str, phases: str) -> None:
    from tests.mixed.manage import set_up

    set_up()
    begin(draw(int(seed), engine, int(phases))).carry_out()
    note("enqueued")


if __name__ == "__main__":
    main(*sys.argv[1:])
