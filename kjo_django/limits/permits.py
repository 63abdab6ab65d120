"""The permits that one worker has of rates: which of its deliveries may start, and from when on.

Coordination is asked for all that wait in this worker together, in their order, by one thread at a
time. So a worker asks a few times a second at most, however far away coordination is and however
many lanes it has; and who waits for an answer that another thread gets asks for nothing.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from kjo_django.clock import Clock
from kjo_django.coordination.starts import Ask, Pace, Permit, Used
from kjo_django.exceptions import CoordinationError

SHORTEST_LIFE = 0.1
"""Of the window of a rate, the part for which a permit is good at least; half a second at most."""
LONGEST_LIFE = 2.0
"""Seconds for which a permit is good at most, beside the time of a call of coordination."""
TO_THE_CALL = 0.05
"""Seconds that pass at most, nearly always, between the use of a permit and the handler's call."""
LEAST_AHEAD = 0.1
"""Seconds by which the moment of a permit may be ahead, at least where its rate allows for it."""
LONGEST_PREPARATION = 0.5
"""Seconds for which a lane waits for the moment of a permit at most."""
LONGEST_CALL = 2.0
"""Seconds that a call of coordination is expected to take at most."""
EARLY = 0.001
"""Seconds by which a wait may end before its time."""
MUCH_EARLIER = 0.01
"""Seconds by which a delivery comes up earlier for a permit, at least."""
MOST_ASKED = 300
"""Deliveries of one rate that are asked for at a time."""
MOST_CALLS = 10
"""How often in a row others are asked for where all of those got a permit: a burst."""
LATE = 0.5
"""Seconds after which a permit that became old is given back, unless its delivery asks again."""
FORGOTTEN_AFTER = 2.0
"""Seconds after the moment for which its own lane was told to come that a delivery is not waited
for any more."""


class Taken(NamedTuple):
    """A permit that a delivery has."""

    paces: Sequence[Pace]
    stamp: int
    begin: float
    """From when (monotonic) on the start may come."""
    end: float
    """Until when (monotonic) the call for it must be made."""


class Starting(Protocol):
    """What is asked of a delivery."""

    @property
    def is_in_transaction(self) -> bool: ...

    is_released: bool
    paces: Sequence[Pace]
    permit: Taken | None
    permit_from: float
    asked_at: float
    comes_by: float
    prepared_from: float


class Permits:
    """See the module.

    :param permit: asks coordination; see ``Coordination.permit``.
    :param waits_in_transactions: whether lanes may wait for the moment of a permit in a
        transaction: nobody else waits for its end.
    :param on_earlier: is called with deliveries that may start earlier than they were told, and the
        moments (monotonic) at which a lane is to prepare their starts.
    :param on_unused: is called with a delivery for each permit with which it did not start in time.
    """

    def __init__(
        self,
        permit: Callable[[Sequence[Ask], Sequence[Used]], list[Permit]],
        clock: Clock,
        *,
        waits_in_transactions: bool = True,
        on_earlier: Callable[[Mapping[Any, float]], None] = lambda moments: None,
        on_unused: Callable[[Any], None] = lambda delivery: None,
    ) -> None:
        self._permit = permit
        self._on_earlier = on_earlier
        self._on_unused = on_unused
        self._clock = clock
        self._waits_in_transactions = waits_in_transactions
        self._calling = threading.Lock()
        """Is held by the thread that asks."""
        self._lock = threading.Lock()
        """Guards all of the following, and what the permits of deliveries are."""
        self._line: dict[int, Starting] = {}
        """The deliveries that wait for a permit, or have one and have not started, by their ids, in
        order."""
        self._asking: set[int] = set()
        """Those of them whose lanes wait for an answer."""
        self._used: list[tuple[Taken, float | None]] = []
        """Permits of which coordination does not know yet when (monotonic) their starts came, if
        they came."""
        self._delay = 0.0
        """Seconds from the moment of a permit to the start, as they were of late."""
        self._took, self._took_more = 0.01, 0.01
        """Seconds that it takes to prepare a start, and how much they differ."""
        self._call_took = 0.0
        """Seconds that a call of coordination takes at most, of late."""

    # --- Asking -----------------------------------------------------------------------------------

    def ask(self, deliveries: Sequence[Starting]) -> None:
        """Take permits for deliveries, as far as there are any. Each has its ``permit`` then, or
        only knows when it might get one: ``permit_from``.

        :raises CoordinationError: nobody knows.
        """
        since = self._clock.monotonic()
        with self._lock:
            for delivery in deliveries:
                self._line[id(delivery)] = delivery
                self._asking.add(id(delivery))
                delivery.comes_by = max(delivery.comes_by, since + FORGOTTEN_AFTER)
                if delivery.permit is not None and delivery.permit.paces != delivery.paces:
                    self._return(delivery)
        try:
            with self._calling:
                if unanswered := [each for each in deliveries if each.asked_at <= since]:
                    self._ask_for_all({pace.name for each in unanswered for pace in each.paces})
        finally:
            with self._lock:
                self._asking.difference_update(map(id, deliveries))
                for delivery in deliveries:
                    moment = delivery.permit_from + FORGOTTEN_AFTER
                    delivery.comes_by = max(delivery.comes_by, moment)

    def _ask_for_all(self, names: Collection[str]) -> None:
        """Ask for every delivery here that waits for one of these rates."""
        for _ in range(MOST_CALLS):
            if not self._ask_for_first(names):
                return

    def _ask_for_first(self, names: Collection[str]) -> bool:
        """Ask for the first deliveries that wait for one of these rates; return whether others may
        have a permit, too."""
        began = self._clock.monotonic()
        with self._lock:
            self._forget(began)
            waiting = self._first_waiting(names, began)
            asks = [self._ask_of(delivery) for delivery in waiting]
        answers, ended = self._call(asks)
        earlier = dict[Starting, float]()
        with self._lock:
            for delivery, ask, answer in zip(waiting, asks, answers, strict=True):
                self._note(delivery, ask, answer, (began, ended), earlier)
        if earlier:
            self._on_earlier(earlier)
        return len(waiting) >= MOST_ASKED and all(answer.stamp for answer in answers)

    def _call(self, asks: Sequence[Ask]) -> tuple[list[Permit], float]:
        """Ask coordination, and tell it what was used; return its answers and when they came."""
        began = self._clock.monotonic()
        with self._lock:
            used, self._used = self._used, []
        told = [
            Used(taken.paces, taken.stamp, None if at is None else began - at) for taken, at in used
        ]
        try:
            answers = self._permit(asks, told)
        except CoordinationError as error:
            # Told twice, what another has counted since might count no longer.
            if not error.may_have_effect:
                with self._lock:
                    self._used[:0] = used
            raise
        finally:
            ended = self._clock.monotonic()
            # Quick to believe that it takes long, slower to believe that it does not.
            took = min(ended - began, LONGEST_CALL)
            self._call_took = max(took, 0.9 * self._call_took + 0.1 * took)
        return answers, ended

    def _note(
        self,
        delivery: Starting,
        ask: Ask,
        answer: Permit,
        call: tuple[float, float],
        earlier: dict[Starting, float],
    ) -> None:
        """Note what a call that began and ended then was answered; the caller holds the lock."""
        began, ended = call
        taken = None
        if answer.stamp:
            end = began + answer.wait + ask.lasts - TO_THE_CALL
            taken = Taken(ask.paces, answer.stamp, ended + answer.wait, end)
        delivery.asked_at = began
        if self._line.get(id(delivery)) is not delivery:
            # It starts no more, as it was found meanwhile.
            if taken is not None:
                self._used.append((taken, None))
                self._on_unused(delivery)
            return
        if delivery.permit is not None:
            self._on_unused(delivery)  # it became old
        moment = ended + answer.wait
        if moment < delivery.permit_from - MUCH_EARLIER:
            earlier[delivery] = moment - self.soon(delivery)
            delivery.comes_by = min(delivery.comes_by, moment + FORGOTTEN_AFTER)
        delivery.permit, delivery.permit_from = taken, moment

    def _first_waiting(self, names: Collection[str], now: float) -> list[Starting]:
        """Return the deliveries to ask for, in order, and tell the last of very many when they
        start if all before them do so evenly; the caller holds the lock."""
        first: list[Starting] = []
        asked = Counter[str]()
        for key, delivery in self._line.items():
            wanted = {pace.name for pace in delivery.paces}
            if wanted.isdisjoint(names) or self._is_good(delivery, now):
                continue
            if key not in self._asking and now > delivery.permit_from:
                continue  # it is late: its own lane asks when it comes
            if any(asked[name] >= MOST_ASKED for name in wanted):
                wait = max(asked[pace.name] * pace.interval for pace in delivery.paces)
                delivery.asked_at, delivery.permit_from = now, now + wait
            else:
                first.append(delivery)
            asked.update(wanted)
        return first

    def _ask_of(self, delivery: Starting) -> Ask:
        shortest = min(pace.seconds for pace in delivery.paces)
        lasts = max(min(SHORTEST_LIFE * shortest, 0.5), min(2.5 * self._delay, LONGEST_LIFE))
        lasts += TO_THE_CALL + 1.5 * self._call_took
        within = max(LEAST_AHEAD, 2 * self.preparation) + self._call_took
        stamp = delivery.permit.stamp if delivery.permit is not None else 0
        return Ask(delivery.paces, lasts, within, stamp)

    def _forget(self, now: float) -> None:
        """Return the permits that became old of deliveries that did not come for them, and forget
        those that do not come any more; the caller holds the lock."""
        for key, delivery in list(self._line.items()):
            is_gone = now > delivery.comes_by
            if is_gone:
                del self._line[key]
            if is_gone or (delivery.permit is not None and now > delivery.permit.end + LATE):
                self._return(delivery)

    def _return(self, delivery: Starting) -> None:
        """Give back a permit that is not used; the caller holds the lock."""
        if delivery.permit is not None:
            self._used.append((delivery.permit, None))
            self._on_unused(delivery)
            delivery.permit = None

    def report(self) -> None:
        """Tell coordination what it does not know yet of permits that were used, or not.

        :raises CoordinationError: it cannot be told.
        """
        with self._calling:
            with self._lock:
                self._forget(self._clock.monotonic())
                has_any = bool(self._used)
            if has_any:
                self._call([])

    # --- What was answered ------------------------------------------------------------------------

    @property
    def preparation(self) -> float:
        """Seconds that it takes at most, nearly always, until a start is prepared."""
        return min(self._took + 2 * self._took_more, LONGEST_PREPARATION)

    def soon(self, delivery: Starting) -> float:
        """Return how many seconds before its moment a lane is to prepare a start: so early that it
        nearly always is in time, or so late that it nearly never waits in a transaction that keeps
        others from writing."""
        before = self.preparation
        if delivery.is_in_transaction and not self._waits_in_transactions:
            before = min(max(0.0, self._took - 2 * self._took_more), LONGEST_PREPARATION)
        return min(before, min(pace.seconds for pace in delivery.paces) / 2)

    @staticmethod
    def _is_good(delivery: Starting, now: float) -> bool:
        return delivery.permit is not None and now <= delivery.permit.end

    def has_permit(self, delivery: Starting) -> bool:
        """Return whether a delivery has a permit of its rates that is good now, or will be."""
        with self._lock:
            taken = delivery.permit
            is_good = self._is_good(delivery, self._clock.monotonic())
            return is_good and taken is not None and taken.paces == delivery.paces

    def waiting_for(self, pace: Pace) -> list[Starting]:
        """Return the deliveries that wait here for a rate."""
        now = self._clock.monotonic()
        with self._lock:
            return [
                each for each in self._line.values() if pace in each.paces and now <= each.comes_by
            ]

    def end_of_line(self, pace: Pace) -> float:
        """Return in how many seconds the last delivery that waits here for a rate has started."""
        last = max((each.permit_from for each in self.waiting_for(pace)), default=0.0)
        return max(0.0, last + pace.interval - self._clock.monotonic())

    # --- Starting ---------------------------------------------------------------------------------

    def note_prepared(self, delivery: Starting) -> None:
        """Note that a start is ready now: how long that took, and how late it is."""
        now = self._clock.monotonic()
        if delivery.prepared_from:
            took, delivery.prepared_from = now - delivery.prepared_from, 0.0
            self._took_more += 0.25 * (abs(took - self._took) - self._took_more)
            self._took += 0.125 * (took - self._took)
        late = max(0.0, now - delivery.permit_from)
        # As of calls.
        self._delay += (0.7 if late > self._delay else 0.05) * (late - self._delay)

    def use(self, delivery: Starting) -> bool:
        """Use the permit of a delivery whose handler is called next; False: it has none any more.
        It counts as if the start came as late as it may, until ``note_start``."""
        with self._lock:
            taken, now = delivery.permit, self._clock.monotonic()
            if taken is None or not taken.begin - EARLY <= now <= taken.end:
                return False
            self._line.pop(id(delivery), None)
            return True

    def note_start(self, delivery: Starting) -> None:
        """Note that the handler of a delivery is called now."""
        with self._lock:
            taken, delivery.permit = delivery.permit, None
            if taken is not None:
                self._used.append((taken, self._clock.monotonic()))

    def give_back_all(self) -> None:
        """Give back the permits of all that wait here: the worker ends."""
        with self._lock:
            waiting, self._line = self._line, {}
            for delivery in waiting.values():
                self._return(delivery)

    def give_back(self, deliveries: Collection[Starting]) -> None:
        """Give back the permits of deliveries that do not start, if they have any."""
        with self._lock:
            for delivery in deliveries:
                self._line.pop(id(delivery), None)
                self._return(delivery)
