"""The handlers running in this process, and what others want of them.

A running job's row cannot carry a wish or a word while its handler runs in a transaction: the row
is locked. So both go through coordination, as marks: they may be lost without harm, and then a job
runs to its end, or its progress is a second old.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Collection
from datetime import timedelta
from typing import NamedTuple

from kjo_django.engine.attempt import Delivery
from kjo_django.engine.handler.context import Abort, BatchContext, JobContext, runs_of
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.exceptions import CoordinationError
from kjo_django.messages.serializers import storable_text
from kjo_django.runtime import current_runtime, get_coordination
from kjo_django.transports.base import Record

logger = logging.getLogger("kjo_django")

SETTLED_AFTER = 0.5
"""Seconds a handler runs before anybody asks about it: the quick ones cost nothing."""
ABORT_TTL = timedelta(minutes=10)
PROGRESS_TTL = timedelta(hours=1)
MAX_TEXT = 150


class Progress(NamedTuple):
    """How far a job says it has got."""

    percent: float | None
    text: str


class Run(NamedTuple):
    """One handler that runs."""

    job_id: str
    handler: str
    record: Record
    seconds: float
    """For how long it has."""


def abort_name(job_id: str) -> str:
    """Return the mark that asks a running job to end; its value is the generation meant."""
    return f"ABORT:{job_id}"


def progress_name(job_id: str) -> str:
    """Return the mark that tells a running job's progress."""
    return f"PROGRESS:{job_id}"


def dump_progress(percent: float | None, text: str) -> str:
    """Write progress as a mark holds it: at most 255 characters."""
    text = storable_text(text.replace("\0", ""), MAX_TEXT)
    while True:
        value = json.dumps([percent, text], ensure_ascii=False, separators=(",", ":"))
        if len(value) <= 250:
            return value
        text = text[:-10]  # quotes and control characters grow when they are escaped


def load_progress(value: str) -> Progress | None:
    """Undo ``dump_progress``; None for what it never wrote."""
    try:
        percent, text = json.loads(value)
    except (TypeError, ValueError):
        return None
    return Progress(percent, str(text))


class RunningJobs:
    """Contexts of running handlers. Lanes enter and leave; the heartbeat looks after them."""

    def __init__(self) -> None:
        self._contexts: dict[int, tuple[JobContext, float, Delivery]] = {}

    def enter(self, context: JobContext | BatchContext) -> None:
        """Note that a run starts."""
        now = time.monotonic()
        for run in runs_of(context):
            if run.delivery is not None:
                self._contexts[id(run)] = (run, now, run.delivery)

    def leave(self, context: JobContext | BatchContext) -> None:
        """Note that a run has ended."""
        for run in runs_of(context):
            self._contexts.pop(id(run), None)

    def abort_all(self, reason: Abort) -> None:
        """Ask every handler to end."""
        for context, _, _ in list(self._contexts.values()):
            context.abort(reason)

    def of(self, deliveries: Collection[Delivery]) -> list[tuple[JobContext, float, Delivery]]:
        """Return those of these deliveries whose handlers run, and for how many seconds."""
        now = time.monotonic()
        return [
            (context, now - since, delivery)
            for context, since, delivery in list(self._contexts.values())
            if delivery in deliveries
        ]

    def longest(self, count: int) -> list[Run]:
        """Return those that have run longest, without those that have only begun; thread-safe."""
        now = time.monotonic()
        runs = [
            Run(context.job_id, delivery.kind, delivery.record, now - since)
            for context, since, delivery in list(self._contexts.values())
        ]
        settled = [run for run in runs if run.seconds >= SETTLED_AFTER]
        return sorted(settled, key=lambda run: -run.seconds)[:count]

    def look_after(self, token: str) -> None:
        """Store progress, and abort those whose cancellation is asked for or whose lease is gone.

        :param token: this worker's.
        """
        settled = time.monotonic() - SETTLED_AFTER
        contexts = [c for c, since, _ in list(self._contexts.values()) if since <= settled]
        if not contexts:
            return
        try:
            self._store_progress(contexts)
            self._abort_unwanted(contexts, token)
        except CoordinationError as error:
            logger.warning("Running jobs cannot be asked after: %s", error)

    def _store_progress(self, contexts: list[JobContext]) -> None:
        coordination = get_coordination()
        told = [
            context
            for context in contexts
            if context.noted_progress is not None
            and (coordination.writes_concurrently or not context.is_atomic)
        ]
        marks = {}
        for context in told:
            noted, context.noted_progress = context.noted_progress, None
            if noted is not None:
                marks[progress_name(context.job_id)] = dump_progress(*noted)
        if marks:
            coordination.set_marks(marks, PROGRESS_TTL)

    def _abort_unwanted(self, contexts: list[JobContext], token: str) -> None:
        coordination = get_coordination()
        running = [context for context in contexts if not context.aborted]
        if not running:
            return
        unheld: list[JobContext] = []
        asked = coordination.get_marks([abort_name(context.job_id) for context in running])
        holders = coordination.holders([context.lease for context in running])
        for context in running:
            if asked.get(abort_name(context.job_id)) == str(context.generation):
                context.abort(Abort.CANCELLED)
            elif context.lease not in holders:
                unheld.append(context)
            elif holders[context.lease] != token:
                context.abort(Abort.LOST)
        for context in self._finished_elsewhere(unheld, token):
            context.abort(Abort.LOST)

    def _finished_elsewhere(self, contexts: list[JobContext], token: str) -> list[JobContext]:
        """Return those of these contexts, whose leases nobody holds, that another worker has run.

        Nobody holds a lease either that coordination never had, having been away, or has forgotten;
        then the rows of the jobs decide. Within a transaction the row is locked, nobody else runs.
        """
        entries = [self._contexts.get(id(context)) for context in contexts if not context.is_atomic]
        runs = [(entry[0], entry[2]) for entry in entries if entry is not None]
        if not runs:
            return []
        runtime = current_runtime()
        service = runtime.service
        keys = {id(context): delivery.event_key(service) for context, delivery in runs}
        known = runtime.store.known_markers(keys.values())
        rows = load_rows(runtime, [delivery for _, delivery in runs], lock=False)
        found = []
        for context, delivery in runs:
            row = rows.get(row_id(delivery, service))
            judges_itself = delivery.handler is not None and delivery.handler.judges_itself
            is_done = keys[id(context)] in known and not judges_itself
            if is_done or (row is not None and row.lease_token != token):
                found.append(context)
        return found
