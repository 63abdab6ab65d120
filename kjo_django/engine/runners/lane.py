"""Running handlers on a lane's thread, one call after the other.

Atomic handlers run in the transaction of their group, each behind a savepoint of its own where
there are others.

``atomic=False`` handlers run outside any transaction, under a lease in the job's row. The lease is
durable, so of two workers one runs the job even when coordination has vanished. The ending is
recorded with the marker in one transaction afterwards, and only by whoever still holds the lease: a
worker that was frozen past it loses. The jobs of a group are admitted together, run one by one, and
recorded together. What has run and is not recorded yet would run again after a crash, so it is
recorded before another starts as soon as it has taken a small part of the groups' budget; of
handlers that take longer than that, each is. Where one keeps its lane although those before it were
quick, the recorder records these meanwhile.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter

from django.db import connections

from kjo_django.engine import failures
from kjo_django.engine.admission import HeldBack, defer_limited, end_expired
from kjo_django.engine.attempt import UNWANTED, Attempt, Delivery, Departed, Ending, Reason
from kjo_django.engine.handler.call import call_step, in_steps
from kjo_django.engine.handler.connections import (
    FreshConnections,
    TransactionGuard,
    freshen_connections,
    is_of_database,
    open_blocks,
    watching,
)
from kjo_django.engine.handler.context import facts_of
from kjo_django.engine.handler.savepoint import LazySavepoint
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.recorder import EndedQueue
from kjo_django.failure_facts import error_text
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import one_line
from kjo_django.models import EventKey
from kjo_django.runtime import Runtime
from kjo_django.store.session_changes import changed

logger = get_logger("kjo_django")

OVERRUN = 100
"""Times its budget a group may run before it ends with the handler that runs: what has completed is
committed, and what has not begun comes up again."""
_seconds_of = attrgetter("seconds")
_key_of = attrgetter("key")
_limit_state_of = attrgetter("delivery.limit_state")
_RAN = (Ending.COMPLETED, Ending.RETRIED, Ending.DEAD, Ending.CANCELLED)


class RolledBack(Exception):
    """A handler has failed, and its transaction is to be rolled back as a whole: the handler has no
    savepoint of its own, going back to it did not help, or the handler has ended the transaction.

    :param guard: knows whose call has ended the transaction, if one has.
    """

    def __init__(self, guard: TransactionGuard) -> None:
        super().__init__()
        self.guard = guard

    def __str__(self) -> str:
        calls = self.guard.ended_by or self.guard.calls
        return f"{calls[0].delivery.kind}: {error_text(self.__cause__)}"


class LaneRunner:
    """Calls handlers one after the other; used by every lane's thread.

    :param on_measure: is called with a handler's name and the seconds that its call took.
    :param stopping: set when the worker stops.
    :param is_own: whether the threads that call handlers are a worker's own.
    :param take_permits: takes what deliveries with a limit need to start; returns those that may.
    """

    def __init__(
        self,
        runtime: Runtime,
        watch: TimeoutWatch,
        on_measure: Callable[[str, float], None],
        stopping: threading.Event,
        *,
        is_own: bool,
        take_permits: Callable[[Sequence[Delivery]], Sequence[Delivery]],
    ) -> None:
        self._take_permits = take_permits
        self._runtime = runtime
        self._watch = watch
        self._on_measure = on_measure
        self._stopping = stopping
        self._is_own = is_own

    def run_in_transaction(
        self,
        attempts: Sequence[Attempt],
        guard: TransactionGuard,
        savepoint: LazySavepoint | None = None,
    ) -> None:
        """Call the handlers of the attempts that have no ending, in the transaction of the caller;
        each has one then.

        :param guard: of the transaction; is told whose call begins.
        :param savepoint: what stands behind each handler; None: a handler that fails undoes the
            whole transaction.
        :raises RolledBack: the transaction cannot go on.
        """
        first = attempts[0]
        is_free = first.ending is None and first.delivery.limit_state is None
        # Before the call of one job alone there is nothing to decide, unless it has a limit.
        steps = [attempts] if is_free and len(attempts) == 1 else self._steps_of(attempts, guard)
        has_others = len(connections.settings) > 1
        with _fresh_others(self._runtime.database) if has_others else nullcontext():
            for step in steps:
                guard.calls = step
                raised = self._call(step, savepoint or guard.pristine(), guard)
                if raised is not None:
                    _check_goes_on(guard, savepoint, raised)
                guard.ran += step if raised is None else _ended(step)

    def _steps_of(
        self, attempts: Sequence[Attempt], guard: TransactionGuard
    ) -> Iterator[Sequence[Attempt]]:
        """Yield what is called together, one call of a group after the other. What is not to run
        after the calls before it, or may not start, ends here without one. Each has to be called
        before the next is asked for."""
        until = time.monotonic() + OVERRUN * self._runtime.group_budget.seconds
        held_back, ran = HeldBack(), dict[EventKey, Attempt]()
        last: Sequence[Attempt] = ()
        # Mostly a group has one record of each message, and no limits.
        has_copies = len(set(map(_key_of, attempts))) < len(attempts)
        has_limits = any(map(_limit_state_of, attempts))
        for step in in_steps(attempts):
            held_back.after(last)
            if has_copies:
                _end_copies(step, last, ran)
            is_late = bool(last) and (guard.has_changed or time.monotonic() >= until)
            calls = _may_begin(step, held_back, is_late=is_late)
            if has_limits:
                self._defer_what_may_not_start(calls)
            if calls:
                yield calls
            if len(calls) > 1:
                yield from _items_again(calls, guard)
            last = step

    def run_leased(
        self,
        attempts: Sequence[Attempt],
        ended: EndedQueue,
        departed: Departed,
        behind: Sequence[Delivery],
    ) -> None:
        """Call the handlers of the attempts that have no ending, outside a transaction, as long as
        their admission is good: for the groups' budget. When the worker stops, nothing begins any
        more but the first. While a handler runs, free lanes may take what has not begun.

        :param ended: takes what has ended; what has not begun is left without an ending.
        :param departed: what has left the group.
        :param behind: comes after these attempts in the group.
        """
        until = time.monotonic() + self._runtime.group_budget.seconds
        has_begun, steps = False, in_steps(attempts)
        for number, step in enumerate(steps, start=1):
            if not_run := [attempt for attempt in step if attempt.ending is not None]:
                ended.put_not_run(not_run)
            if has_begun and (self._stopping.is_set() or time.monotonic() >= until):
                continue
            calls = [
                each
                for each in step
                if each.ending is None
                and each.delivery not in departed
                and not ended.held_back.covers(each.delivery)
            ]
            if calls:
                departed.offer(steps[number:], behind)
                try:
                    has_begun |= self._call_outside(calls, ended)
                finally:
                    departed.keep()

    def _call_outside(self, calls: list[Attempt], ended: EndedQueue) -> bool:
        """Make one call outside a transaction, of a batch that fails one for each item; return
        whether any was made: those that may not start are deferred."""
        # Before permits are taken: what is written here may take longer than a start may be late.
        ended.before_handler()
        if refused := self._defer_what_may_not_start(calls):
            ended.put_not_run(refused)
        if not calls:
            return False
        began = time.monotonic()
        self._call(calls, FreshConnections(is_own=self._is_own))
        for attempt in calls:
            if attempt.ending is None:
                self._call([attempt], FreshConnections(is_own=self._is_own))
        ended.held_back.after(calls)
        ended.put(began, calls)
        return True

    def _defer_what_may_not_start(self, calls: list[Attempt]) -> list[Attempt]:
        """Take the permits of calls that are about to be made, and take those out of the list that
        may not start; return these."""
        refused = defer_limited(calls, self._take_permits)
        for attempt in refused:
            calls.remove(attempt)
        return refused

    def _call(
        self,
        step: Sequence[Attempt],
        around: AbstractContextManager[object],
        guard: TransactionGuard | None = None,
    ) -> BaseException | None:
        """Make one call, and judge how it ended; return what it raised. The attempts of a batch
        that has failed have no ending then, but for those that are to blame or were aborted.

        :param guard: of the transaction, where it is made in one.
        """
        raised = call_step(self._runtime, self._watch, step, around, guard)
        if guard is not None and changed:
            guard.note_changed_sessions()
        ended = step if raised is None else [each for each in step if each.error is not None]
        if not ended:
            return raised
        seconds = max(map(_seconds_of, ended))
        if guard is not None and guard.has_changed:
            # Its group ends with it, so a group is not to have more than one of them.
            seconds = max(seconds, self._runtime.group_budget.seconds)
        self._on_measure(step[0].delivery.kind, seconds)
        for attempt in ended:
            if attempt.error is None:
                attempt.ending = Ending.COMPLETED
            elif guard is not None and guard.is_shared and _may_complete_alone(attempt, guard):
                attempt.ending, attempt.reason = Ending.DEFERRED, Reason.ALONE
            else:
                failures.judge(self._runtime, attempt)
        return raised


def _ended(step: Sequence[Attempt]) -> list[Attempt]:
    return [attempt for attempt in step if attempt.ending is not None]


def _may_complete_alone(attempt: Attempt, guard: TransactionGuard) -> bool:
    """Return whether others in its transaction may be why an attempt has failed: by their locks,
    their temporary tables, or the moment of the database's clock that all of them find."""
    if attempt.abort_reason is not None or not is_of_database(attempt.error, guard.connection):
        return False
    why = "%s failed in the transaction of its group, and runs again alone: %s"
    text = error_text(attempt.error)
    logger.info(why, attempt.delivery.kind, one_line(text), extra=facts_of(attempt.delivery))
    return True


@contextmanager
def _fresh_others(using: str) -> Iterator[None]:
    """Leave connections to other databases than this one like new.

    :raises TransactionManagementError: a transaction was left open, and so was undone.
    """
    outer = open_blocks()
    with watching(but=using):
        yield
    others = [each for each in connections.all(initialized_only=True) if each.alias != using]
    if left := freshen_connections(outer=outer, may_close=False, among=others):
        raise left


def _items_again(batch: Sequence[Attempt], guard: TransactionGuard) -> Iterator[list[Attempt]]:
    """Yield the items that are not known to be to blame for the failure of their batch, each to be
    called by itself. Once one has changed the session, the others are deferred."""
    for attempt in batch:
        if attempt.ending is not None:
            continue
        if guard.has_changed:
            attempt.ending, attempt.reason = Ending.DEFERRED, Reason.ALONE
        else:
            yield [attempt]


def _may_begin(step: Sequence[Attempt], held_back: HeldBack, *, is_late: bool) -> list[Attempt]:
    """Return which attempts of the next call run after the calls before it; the others end.

    :param is_late: nothing more begins in the group.
    """
    may_begin = []
    for attempt in step:
        if attempt.ending is not None:
            continue
        if is_late:
            attempt.ending, attempt.reason = Ending.DEFERRED, Reason.OUT_OF_BUDGET
        elif held_back and held_back.covers(attempt.delivery):
            attempt.ending, attempt.reason = Ending.DEFERRED, Reason.PAUSED
        else:
            end_expired(attempt)
            if attempt.ending is None:
                may_begin.append(attempt)
    return may_begin


def _end_copies(
    step: Sequence[Attempt], last: Sequence[Attempt], ran: dict[EventKey, Attempt]
) -> None:
    """End the attempts of the next call whose messages have run in the group.

    :param last: the attempts of the call before.
    :param ran: those of earlier ones; these are added to it.
    """
    ran |= {attempt.key: attempt for attempt in last if attempt.ending in _RAN}
    for attempt in step:
        if first := ran.get(attempt.key):
            _end_copy(attempt, first)


def _end_copy(attempt: Attempt, first: Attempt) -> None:
    """End the second of two records of one message in a group, as a crashed relay leaves them. The
    row says nothing of what the first has just ended with."""
    has_completed = first.ending is Ending.COMPLETED
    attempt.ending = Ending.DUPLICATE if has_completed else Ending.SKIPPED
    attempt.reason = "" if has_completed else Reason.ATTEMPT
    attempt.error = None


def _check_goes_on(
    guard: TransactionGuard, savepoint: LazySavepoint | None, raised: BaseException
) -> None:
    """Check that a transaction can go on with others after a handler has failed in it.

    :param raised: what its call has raised.
    :raises RolledBack: it cannot.
    """
    if not guard.ended_by and savepoint is not None and savepoint.is_transaction_pristine():
        return
    guard.unwanted = [each for each in guard.calls if each.abort_reason in UNWANTED]
    raise RolledBack(guard) from raised
