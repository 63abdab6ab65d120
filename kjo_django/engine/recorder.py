"""Recording what has ended: the transactions, what to do when one fails, and the recorder's thread.

The recorder settles what has ended outside a transaction, while those who ran it go on.
"""

from __future__ import annotations

import enum
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from kjo_django import states
from kjo_django.clock import CLOCK
from kjo_django.engine.admission import HeldBack, is_awaited, why_skip
from kjo_django.engine.attempt import Attempt, Delivery, Ending, Reason
from kjo_django.engine.handler.call import recording
from kjo_django.engine.handler.connections import (
    answers,
    begin_new_session,
    drop_broken_connections,
    is_busy,
)
from kjo_django.engine.handler.timeouts import RunAbandoned
from kjo_django.exceptions import PublishError
from kjo_django.logs import get_logger
from kjo_django.models import EventKey, Job, transition
from kjo_django.runtime import Runtime
from kjo_django.states import JobState
from kjo_django.store.base import Store
from kjo_django.store.rows import Completing, Completion, JobRow, Place
from kjo_django.transports.base import NOWHERE, Record, Subscription
from kjo_django.workflows.countdown import Receiver, count_ended
from kjo_django.workflows.step_context import WorkflowContext

logger = get_logger("kjo_django")

OUTAGES = (DatabaseError, InterfaceError, OSError, PublishError)
"""What is raised while a server is away; or refuses, which the database tells apart."""
REFUSALS = 3
"""Times a database that is there may refuse to record one outcome before that counts."""
DELAY_MIN, DELAY_MAX = 0.2, 5.0
"""Seconds before the first try after an outage, and the most this grows to by doubling."""
UNRECORDED = 0.1
"""Part of its patience for which what has run may stay unrecorded when another handler starts."""
KEPT_CONNECTED = 5.0
"""Seconds for which the recorder keeps its database connection when it has nothing to do."""
_AWAITING = frozenset(state.value for state in states.AWAITING_PUBLISH)


# --- Transactions ---------------------------------------------------------------------------------


def record_completions(
    runtime: Runtime, completed: Sequence[Attempt], token: str, receiver: Receiver | None = None
) -> None:
    """Commit completions outside a transaction with their markers; those that have lost their row's
    lease are none any more, see ``end_lost``. Of completions that a handler of their group has
    committed, only the rows are missing.

    :param token: of the row leases.
    :param receiver: as ``count_ended`` takes it.
    """
    if completed[0].is_committed:
        _record_committed(runtime, completed, receiver)
        return
    store = runtime.store
    for attempt in completed:  # as before an earlier try, which was undone
        attempt.ending, attempt.reason = Ending.COMPLETED, ""
    with recording(store) as recorded:
        fresh = store.insert_markers([attempt.key for attempt in completed])
        winners = _judge_by_markers(completed, fresh)
        written = complete(runtime, winners, token, receiver=receiver)
        lost = [a for a in winners if a.row is not None and a.row.id not in written]
        if lost:
            _end_overtaken(store, lost, fresh)
        acknowledge_within([a for a in completed if a.ending is not Ending.DEFERRED])
        recorded += [a for a in completed if a.ending is Ending.COMPLETED]


def _end_overtaken(store: Store, lost: Sequence[Attempt], fresh: Collection[EventKey]) -> None:
    """End completions whose rows were another worker's when they were to be written."""
    for attempt in lost:
        has_ended = attempt.key not in fresh and is_awaited(attempt)
        attempt.ending = Ending.DUPLICATE if has_ended else Ending.SKIPPED
        attempt.reason = Reason.LEASE_LOST
    end_lost(store, lost)
    store.delete_markers([attempt.key for attempt in lost if attempt.key in fresh])


def _judge_by_markers(completed: Sequence[Attempt], fresh: Collection[EventKey]) -> list[Attempt]:
    """Return the completions whose rows are to be written, and end those that another worker has
    completed before.

    :param fresh: the markers that were not there before.
    """
    winners = []
    for attempt in completed:
        if attempt.key in fresh:
            attempt.is_marked = True
            winners.append(attempt)
        elif attempt.is_in_doubt and attempt.is_marked:
            attempt.is_confirmed = True
        elif _is_judged_by_row(attempt):
            winners.append(attempt)
        else:
            attempt.ending, attempt.reason = Ending.DUPLICATE, Reason.LEASE_LOST
            attempt.announcements = ()
    return winners


def _is_judged_by_row(attempt: Attempt) -> bool:
    """Return whether the row tells whether an attempt outside a transaction has been overtaken,
    though its marker is there already."""
    return attempt.delivery.handler.judges_itself or is_awaited(attempt)


def end_lost(store: Store, lost: Sequence[Attempt]) -> None:
    """Defer those attempts whose rows were another's when they were to be recorded, and still wait
    for them; the others keep their endings.

    Whoever has such a row may be gone before it ends, and the message at hand may be the only one
    that is left of it. Coming up again it is judged anew.
    """
    ids = [attempt.row.id_text for attempt in lost if attempt.row is not None]
    rows = store.job_rows(ids, lock=False) if ids else {}
    for attempt in lost:
        row = None if attempt.row is None else rows.get(attempt.row.id_text)
        if row is not None and not why_skip(attempt.delivery, row):
            attempt.ending, attempt.reason = Ending.DEFERRED, Reason.LEASE_LOST


def _record_committed(
    runtime: Runtime, completed: Sequence[Attempt], receiver: Receiver | None
) -> None:
    """Commit the rows of completions. One that was cancelled meanwhile stays so, and is announced
    as no completion."""
    store = runtime.store
    for attempt in completed:  # as before an earlier try, which was undone
        attempt.ending, attempt.reason = Ending.COMPLETED, ""
    with recording(store) as recorded:
        store.take_write_lock()
        rows = store.job_rows([a.row.id_text for a in completed if a.row is not None], lock=True)
        still_open = []
        for attempt in completed:
            row = None if attempt.row is None else rows.get(attempt.row.id_text)
            if attempt.row is None or (row is not None and not why_skip(attempt.delivery, row)):
                still_open.append(attempt)
            elif row is None or row.state != JobState.COMPLETED:
                attempt.ending, attempt.reason = Ending.SKIPPED, Reason.CHANGED
        acknowledge_within(completed)
        complete(runtime, still_open, receiver=receiver)
        recorded += completed


def complete(
    runtime: Runtime,
    attempts: Sequence[Attempt],
    token: str | None = None,
    *,
    receiver: Receiver | None = None,
    is_last: bool = False,
) -> set[Any]:
    """Record completions of jobs in one statement, inside the caller's transaction; of a workflow's
    steps, release what has waited for them.

    :param token: of a row lease that must still be this worker's; those who lost it are refused.
    :param receiver: as ``count_ended`` takes it.
    :param is_last: the caller does nothing more but commit, and what it would do about a refusal is
        nothing either: the commit may go along with the statement.
    :returns: the ids of the jobs recorded.
    """
    completions = [
        Completion(
            row,
            attempt.number,
            attempt.started_at,
            attempt.result,
            _place_of(row, attempt.delivery.record) if row.state in _AWAITING else None,
            attempt.result_ttl,
            attempt.worker,
        )
        for attempt in attempts
        if (row := attempt.row) is not None
    ]
    now = CLOCK.now()
    steps = [attempt for attempt in attempts if attempt.step is not None]
    if not steps:
        return runtime.store.complete(completions, now, token=token, is_last=is_last)
    for attempt in steps:
        attempt.announcements = ()  # of an earlier try, which was undone
    completing: Completing = None
    if token is None:
        # The caller's transaction has locked the rows: they are written along with the counts.
        completing, written = (completions, now), {one.row.id for one in completions}
    else:
        written = runtime.store.complete(completions, now, token=token)
    announcements: list[Callable[[], object]] = []
    ended = _ended_steps(steps, written, announcements)
    count_ended(
        runtime,
        [(step.stage_id, id, JobState.COMPLETED) for step, id in ended],
        [step for step, _ in ended],
        announce=announcements.append,
        receiver=receiver,
        is_last=is_last,
        completing=completing,
    )
    return written


def _ended_steps(
    steps: Sequence[Attempt],
    written: Collection[UUID],
    announcements: Sequence[Callable[[], object]],
) -> list[tuple[WorkflowContext, UUID]]:
    """Return the steps whose completions are written, with the ids of their jobs. The first of them
    announces what all have ended: they are committed together, maybe along with the last statement,
    and then without an answer."""
    ended: list[tuple[WorkflowContext, UUID]] = []
    for attempt in steps:
        step, row = attempt.step, attempt.row
        if step is not None and row is not None and row.id in written:
            attempt.announcements = () if ended else announcements
            ended.append((step, row.id))
    return ended


def complete_open_rows(using: str, duplicates: Sequence[Attempt]) -> None:
    """Complete the open rows of messages that have taken effect without them: another copy of a
    foreign message has, while this one failed and left a row for its retries.

    Nothing else would ever end such a row: each of its attempts is a duplicate.
    """
    now = CLOCK.now()
    for attempt in duplicates:
        job = attempt.row
        assert job is not None
        transition(
            "complete",
            Job.objects.using(using).at(job.id, job.generation).filter(attempts=job.attempts),
            finished_at=now,
            error="",
            lease_token="",
            lease_expires_at=None,
            result_expires_at=now + timedelta(milliseconds=job.result_ttl),
            **publication(attempt),
        )


def _place_of(job: JobRow, record: Record) -> Place | None:
    """Return where the message was and since when; None of a step that was not published.

    The message at hand is the one the row speaks of: an earlier one would not have run.
    """
    if record.partition == NOWHERE:
        return None
    # Some clocks are read to the millisecond only: nothing is published before it is there.
    since = max(record.timestamp or job.created_at, job.created_at)
    return Place(record.topic, record.partition, record.offset, since)


def publication(attempt: Attempt) -> dict[str, Any]:
    """Return the columns that say where the message was, if the relay has not written them yet."""
    job = attempt.row
    if job is None or job.state not in _AWAITING:
        return {}
    place = _place_of(job, attempt.delivery.record)
    return {} if place is None else place._asdict()


def acknowledge_within(attempts: Sequence[Attempt]) -> None:
    """Acknowledge in the transaction that makes the endings durable, where the transport can join
    it."""
    groups: defaultdict[Subscription, list[Attempt]] = defaultdict(list)
    for attempt in attempts:
        if attempt.delivery.subscription.joins_transactions:
            groups[attempt.delivery.subscription].append(attempt)
    for subscription, group in groups.items():
        subscription.acknowledge_in_transaction([a.delivery.record for a in group])
        for attempt in group:
            attempt.is_acknowledged = True


# --- Outages --------------------------------------------------------------------------------------


class Next(enum.Enum):
    """What to do after outcomes could not be recorded."""

    AGAIN = "again"
    SPLIT = "split"
    """Record them one by one: the database is there and refuses something among them."""
    REFUSED = "refused"
    """This one can never be recorded as it is."""
    STOPPED = "stopped"
    """The worker stops, and the server is still away."""


class Unwritten(NamedTuple):
    """Why outcomes could not be written."""

    following: Next
    """What is to be done; not ``Next.AGAIN``, which has been done."""
    error: Exception


class OutageRetry:
    """Waits for servers that are away, longer each time and no longer than the worker lives, and
    decides whether to try again.

    :param stopping: set when the worker stops; None: every error is raised.
    :param has_run: whether handlers have run, so that a worker that stops tries once more: a COMMIT
        without an answer may have taken effect, and nobody else would announce what it recorded.
    """

    def __init__(self, stopping: threading.Event | None, *, has_run: bool = False) -> None:
        self._stopping = stopping
        self._has_run = has_run
        self._refusals = self._waits = 0
        self._delay = DELAY_MIN

    def after(self, error: Exception, using: str, what: str, count: int) -> Next:
        """Return what to do after this error, having waited where that is to try again.

        :param using: the alias of the database.
        :param what: what cannot be done, for the log.
        :param count: how many outcomes were to be recorded together.
        :raises Exception: the error itself, where outages are not waited out.
        """
        if self._stopping is None:
            raise error
        # What a handler has set in the session may be the reason.
        begin_new_session(using)
        is_outage = isinstance(error, OUTAGES)
        # Not what somebody else's lock was in the way of: that passes, like an outage.
        is_refused = not is_outage or (
            isinstance(error, DatabaseError) and not is_busy(error) and answers(using)
        )
        if is_refused and count > 1:
            logger.warning("%s, now one by one (%d of them): %s", what, count, error)
            return Next.SPLIT
        drop_broken_connections()
        self._refusals += is_refused
        if self._refusals > REFUSALS:
            logger.error("%s: refused %d times: %s", what, self._refusals, error)
            return Next.REFUSED
        if not is_outage:  # a bug: waiting does not make it pass
            logger.exception("%s", what)
            return Next.AGAIN
        logger.error("%s, trying again in %.1f s: %s", what, self._delay, error)
        self._waits += 1
        delay, self._delay = self._delay, min(self._delay * 2, DELAY_MAX)
        is_last_try = self._has_run and self._waits == 1
        return Next.STOPPED if self._stopping.wait(delay) and not is_last_try else Next.AGAIN


# --- The recorder's thread ------------------------------------------------------------------------


class EndedQueue:
    """Attempts that have ended and are not settled yet, in order.

    :param settle: settles attempts; returns the deferred.
    :param patience: seconds from the begin of an attempt after which the recorder settles it, if
        the thread that has put it here has not.
    :param recorder: the recorder, where there is one.
    """

    def __init__(
        self,
        settle: Callable[[list[Attempt]], list[Delivery]],
        patience: float,
        recorder: Recorder | None,
    ) -> None:
        self.patience = patience
        self.held_back = HeldBack()
        self.deferred: list[Delivery] = []
        """Of what was settled."""
        self._settle = settle
        self._recorder = recorder
        self._ended: deque[tuple[float, Sequence[Attempt]]] = deque()
        self._not_run: deque[Attempt] = deque()
        self._settling = threading.Lock()

    def put(self, began: float, attempts: Sequence[Attempt]) -> None:
        """Add attempts that began then (monotonic)."""
        self._ended.append((began, attempts))

    def put_not_run(self, attempts: Sequence[Attempt]) -> None:
        """Add attempts that have ended without a run; they are settled together with others."""
        self._not_run += attempts
        self.held_back.after(attempts)

    def has_any_from_before(self, moment: float) -> bool:
        """Return whether an attempt waits here that began before then."""
        try:
            return self._ended[0][0] < moment
        except IndexError:
            return False

    def before_handler(self) -> None:
        """Settle what waits here, if it began some time ago, before another handler starts; else
        let the recorder do that should the handler take long."""
        now = time.monotonic()
        if self.has_any_from_before(now - UNRECORDED * self.patience):
            self.settle()
        elif self._recorder is not None and self.has_any_from_before(now):
            self._recorder.watch(self)

    def settle(self, *, again: bool = False) -> None:
        """Settle what waits here; if another thread does, wait for it.

        :param again: what could not be settled is put back, for another thread. What a thread that
            was given up has taken is put back in any case.
        """
        with self._settling:
            taken = [self._ended.popleft() for _ in range(len(self._ended))]
            ended = [self._not_run.popleft() for _ in range(len(self._not_run))]
            ended += [attempt for _, attempts in taken for attempt in attempts]
            if not ended:
                return
            try:
                self.deferred += self.held_back.defer(self._settle(ended))
            except BaseException as error:
                if again or isinstance(error, RunAbandoned):
                    self._ended.extendleft(reversed(taken))
                raise


class Recorder:
    """Settles what waits in queues for longer than it may. Its one thread starts with the first
    queue, and calls ``step`` again and again.

    :param on_thread: called first in that thread.
    """

    def __init__(self, on_thread: Callable[[], None]) -> None:
        self._on_thread = on_thread
        self._queues: set[EndedQueue] = set()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    @property
    def threads(self) -> list[threading.Thread]:
        """Its thread, once that was started."""
        return [] if self._thread is None else [self._thread]

    def watch(self, queue: EndedQueue) -> None:
        """Settle what waits in this queue as soon as it has waited for its time."""
        with self._changed:
            if queue in self._queues:
                return
            self._queues.add(queue)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kjo-recorder", daemon=True)
                thread.start()
                self._thread = thread
            if len(self._queues) == 1 or not queue.patience:
                self._changed.notify()

    def forget(self, queue: EndedQueue) -> None:
        """Leave a queue to the thread that fills it."""
        if queue in self._queues:
            with self._changed:
                self._queues.discard(queue)

    def step(self) -> float | None:
        """Settle what is due; return the seconds until something else may be, None where nothing
        is watched."""
        now = time.monotonic()
        with self._changed:
            due = [q for q in self._queues if q.has_any_from_before(now - q.patience)]
            # Until something new is put there, there is nothing more to settle.
            self._queues = {q for q in self._queues if q.patience and q not in due}
        for queue in due:
            try:
                queue.settle(again=queue.patience > 0)
            except Exception:
                logger.exception("Endings could not be settled while their lane was busy")
        with self._changed:
            return min((queue.patience for queue in self._queues), default=None)

    def close(self, timeout: float) -> None:
        """End the thread, waiting so many seconds for it."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread is not None:
            self._thread.join(timeout)

    def _run(self) -> None:
        def has_work() -> bool:
            return bool(self._queues) or self._is_closed

        self._on_thread()
        try:
            while not self._is_closed:
                wait = self.step()
                with self._changed:
                    if wait is None:
                        is_idle = not self._changed.wait_for(has_work, KEPT_CONNECTED)
                    elif not self._is_closed:
                        self._changed.wait(wait)
                if wait is None and is_idle:
                    # A connection kept meanwhile would be one more for each worker.
                    connections.close_all()
                    with self._changed:
                        self._changed.wait_for(has_work)
        finally:
            connections.close_all()
