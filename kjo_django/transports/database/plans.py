"""When a consumer looks at the message table next, and what its claims begin with. Plans only
decide: who asks the database tells them what came of it."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from datetime import timedelta

from kjo_django.clock import Clock
from kjo_django.retries import Backoff

SHORTEST_WAIT = 0.005
"""Seconds until the table is looked at again after activity; each wait is twice the one before."""
WAIT_TO_BE_WOKEN = 0.1
"""Seconds until the table is looked at again after a claim on a publisher's wake-up: the next
publisher wakes this consumer, too, and nobody does for a row whose time has come."""
IDLE_INTERVAL = 1.0
"""Seconds between two looks of an idle consumer that hears of every publication: it could have
missed one."""
FAIR_EVERY, SELDOM_FAIR_EVERY = 4, 16
"""Of so many claims of a backlog one begins with the next lower priority there is, so that none
starves; the second number holds while no lower one is found."""
_AFTER_OUTAGE = Backoff(timedelta(seconds=0.1), timedelta(seconds=5), jitter=0.5)
_MOST_LOCK_ERRORS = 2
"""Lock errors in a row that are not reported: each has waited for SQLite's own timeout."""


class LookPlan:
    """When a consumer looks at its table next, and whether it claims without a look.

    A look is a plain SELECT. A claim locks and writes, so it comes after a look that has found
    something, but where something is likely to be there.

    :param poll_interval: the longest wait between two looks, in seconds.
    :param locks_rows: whether a claim locks rows. Where it waits for the one writer of a database,
        a consumer that was woken looks first.
    """

    def __init__(self, poll_interval: float, clock: Clock, *, locks_rows: bool) -> None:
        self._poll_interval = poll_interval
        self._clock = clock
        self._locks_rows = locks_rows
        self._next_wait = SHORTEST_WAIT
        self._claimed_at = 0.0
        self._retry_at = 0.0
        self._outage_count = 0
        self._is_woken = False
        self._idle_until = 0.0
        self._next_due_at: float | None = None
        """When the next row is due (monotonic), where that is known."""
        self.hears_publishers = False
        """Whether the consumer hears of every publication."""
        self.may_have_more = True
        """Whether rows are likely to be due: then they are claimed without a look."""
        self.has_all = False
        """Whether the last claim, on a wake-up, took all there was: then there is no look before
        the next wait is over."""

    @property
    def is_put_off(self) -> bool:
        """Whether the database has refused, and is left alone for a while."""
        return self._clock.monotonic() < self._retry_at

    @property
    def is_idle(self) -> bool:
        """Whether nothing is due, and nothing is going to be for a while."""
        return self._clock.monotonic() < self._idle_until

    @property
    def asks_ahead(self) -> bool:
        """Whether a claim is to find out when the next row is due. It costs less than the look that
        would come after it; while jobs come sooner one after the other, none does."""
        since = self._clock.monotonic() - self._claimed_at
        return self.hears_publishers and self._is_woken and since > WAIT_TO_BE_WOKEN

    def next_wait(self, longest: float) -> float:
        """Return the seconds until the next look, so many at most."""
        if self.is_idle:
            return min(longest, self._idle_until - self._clock.monotonic())
        # Jittered, so that consumers do not look all at once.
        seconds = self._next_wait * random.uniform(0.75, 1.0)  # noqa: S311
        self._next_wait = min(self._poll_interval, self._next_wait * 2)
        self.has_all = False
        return min(longest, max(seconds, self._retry_at - self._clock.monotonic()))

    def ask_now(self) -> None:
        """Note that somebody asks what is there, and is not going to wait."""
        self.has_all, self._idle_until = False, 0.0

    def expect_more(self) -> None:
        """Note that rows may be claimed that were to be left alone before."""
        self.may_have_more = True
        self.end_idleness()

    def end_idleness(self) -> None:
        """Note that the next row may be due before it was said to be: somebody has committed or
        called, this consumer has claimed or given back, or may claim what it left alone before, or
        the database did not answer."""
        self._idle_until, self._next_due_at = 0.0, None

    def note_ahead(self, seconds: float) -> None:
        """Note in how many seconds the next row is due that nobody holds, infinity if there is
        none. One that was due and was not claimed waits for its key, for which nobody wakes."""
        if seconds > 0:
            self.note_idle(seconds)

    def note_idle(self, seconds: float) -> None:
        """Note that nothing waits that is due, and in how many seconds something will be. A
        consumer that hears of every publication looks again then; any other goes on looking."""
        if self.hears_publishers:
            now = self._clock.monotonic()
            self._next_due_at = now + seconds
            self._idle_until = min(self._next_due_at, now + max(self._poll_interval, IDLE_INTERVAL))

    def is_idle_again(self) -> bool:
        """Return whether it is still known that the next row is due later; look again then."""
        seconds = (self._next_due_at or 0.0) - self._clock.monotonic()
        if seconds > 0:
            self.note_idle(seconds)
        return seconds > 0

    def note_wake_up(self) -> None:
        """Note that a publisher has woken the consumer, or that somebody has committed."""
        self._next_wait = SHORTEST_WAIT
        self.end_idleness()
        if self._locks_rows:
            self.may_have_more = self._is_woken = True

    def note_look(self, seconds: float) -> None:
        """Note how long a look took. Walking past a backlog of delayed or busy rows takes time: no
        more than a tenth of it."""
        self._next_wait = max(self._next_wait, 9 * seconds)
        if self.is_idle:
            self._idle_until = max(self._idle_until, self._clock.monotonic() + 9 * seconds)

    def note_nothing_due(self) -> None:
        """Note that a look has found nothing."""
        self.may_have_more = self._is_woken = False

    def note_claim(
        self, *, has_rows: bool, is_full: bool, has_others: bool, ahead: float | None = None
    ) -> None:
        """Note what a claim has come to.

        :param has_rows: whether it has taken any.
        :param is_full: whether it has taken as much as it was allowed to.
        :param has_others: whether others were claiming some of it just then.
        :param ahead: when the next row is due, see ``note_ahead``; None: nobody knows.
        """
        self._claimed_at = self._clock.monotonic()
        self.end_idleness()
        self.may_have_more = is_full
        if has_rows or has_others:
            self._next_wait = SHORTEST_WAIT
        if self._is_woken and not has_others and not is_full:
            self._next_wait = min(WAIT_TO_BE_WOKEN, self._poll_interval)
            self.note_ahead(ahead or 0.0)
            self.has_all = not self.is_idle
        self._is_woken = False

    def note_urgent_claim(self, *, has_rows: bool, has_others: bool) -> None:
        """Note what a claim of the more urgent has come to, see ``note_claim``; it says nothing of
        the less urgent."""
        self._claimed_at = self._clock.monotonic()
        if has_rows or has_others:
            self._next_wait = SHORTEST_WAIT

    def note_collision(self) -> None:
        """Note that a claim met somebody else's change: it is to be made again soon."""
        self._next_wait = SHORTEST_WAIT
        self.end_idleness()

    def note_answer(self) -> None:
        """Note that the database does what it is asked."""
        self._outage_count, self._retry_at = 0, 0.0

    def note_refusal(self, *, is_locked: bool) -> bool:
        """Note that the database was away, and return whether that is worth a word.

        :param is_locked: whether another process was writing to SQLite just then. What was to be
            looked at is still there.
        """
        self._outage_count += 1
        self.end_idleness()
        delay = _AFTER_OUTAGE.delay(self._outage_count)
        self._retry_at = self._clock.monotonic() + delay.total_seconds()
        if is_locked:
            self._next_wait = SHORTEST_WAIT
        return not is_locked or self._outage_count > _MOST_LOCK_ERRORS


class ClaimOrder:
    """What the claims of a consumer begin with: each with the topic after that of the one before,
    and, of a backlog, one of a few with a lower priority."""

    def __init__(self) -> None:
        self._count = 0
        self._fair: dict[str, tuple[int, int]] = {}
        """Of topics with a backlog: the claim that next begins with a lower priority, and after
        which rank."""

    def next(self, topics: Sequence[str]) -> list[str]:
        """Count a claim, and return these topics in its order."""
        self._count += 1
        start = self._count % max(1, len(topics))
        return [*topics[start:], *topics[:start]]

    def rank_before(self, topic: str) -> int | None:
        """Return the rank after which this claim of a topic begins; None: with the first there
        is."""
        due_at, rank = self._fair.get(topic, (math.inf, 0))
        return rank if due_at <= self._count else None

    def ranks_before(self, topics: Sequence[str]) -> dict[str, int]:
        """Return the rank after which this claim begins, of the topics of which it does not begin
        with the first."""
        found = ((topic, self.rank_before(topic)) for topic in topics)
        return {topic: rank for topic, rank in found if rank is not None}

    def note(self, topic: str, backlog: int | None, *, is_fair: bool, has_lower: bool) -> None:
        """Note what this claim has taken of a topic.

        :param backlog: the rank of the last row of a full share; None: there were fewer.
        :param is_fair: whether it began with a lower priority.
        :param has_lower: whether there was one.
        """
        if backlog is None:
            self._fair.pop(topic, None)
        elif is_fair:
            pause = FAIR_EVERY if has_lower else SELDOM_FAIR_EVERY
            self._fair[topic] = self._count + pause, backlog
        else:
            self._fair.setdefault(topic, (self._count + FAIR_EVERY, backlog))
