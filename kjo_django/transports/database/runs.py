"""Which messages of the table are begun, by whom, and how often they were begun before.

A consumer writes one row for all that it begins together, before it runs. Writing to the row of
each message would cost as much as a second claim. A message is begun if such a row of the consumer
that leases it names it. So nothing needs to be written when it ends: its own row is deleted then,
and the other one is overwritten by the next run. If the consumer dies, whoever claims the message
next finds that it was begun.

What starts as soon as it is claimed is named in such a row by the claim itself.
"""

from __future__ import annotations

import base64
import heapq
import json
import math
import threading
from collections.abc import Collection, Iterable, Mapping
from datetime import timedelta

from django.db import connections
from django.db.models import Exists, OuterRef

from kjo_django.clock import Clock
from kjo_django.models import TransportMessage, TransportRun
from kjo_django.store import store_for

_KEPT = timedelta(days=1)
_PRUNE_EVERY = 3600.0
LONGEST_START = 1.0
"""Seconds after which a message that its claim has named waits after all."""


class Runs:
    """The runs of one consumer. Messages are named by the ids of their rows. Thread-safe.

    :param consumer: the token of its leases.
    """

    def __init__(self, alias: str, consumer: str, clock: Clock) -> None:
        self._alias = alias
        self._consumer = consumer
        self._clock = clock
        self._lock = threading.Lock()
        self._ending = threading.Lock()
        """Held while runs are written of which something was taken out."""
        self._written: set[int] = set()
        """These runs: their numbers are not used again until they are written."""
        self._number_of: dict[int, int] = {}
        """The run of each message that is begun."""
        self._left: dict[int, dict[int, bytes]] = {}
        """The ids of the messages of each run, but for those that have ended."""
        self._worker = ""
        self._free: list[int] = []
        """Numbers that may be used again; the smallest comes first."""
        self._claimed: dict[int, float] = {}
        """Messages that their claims have named, and that have not begun yet: since when
        (monotonic)."""
        self._doubtful: list[int] = []
        """Numbers of runs that may name messages which are not theirs."""
        self._prune_at = -math.inf

    def __contains__(self, message: int) -> bool:
        return message in self._number_of and message not in self._claimed

    def names(self, message: int) -> bool:
        """Return whether a message is begun, or its claim has named it."""
        return message in self._number_of

    # --- Begun by their claims --------------------------------------------------------------------

    def reserve(self, worker: str) -> int | None:
        """Return the number of a run that a claim may write, until ``note_claimed`` or ``doubt``;
        None where none was written that may be overwritten.

        :param worker: the token of the worker that runs what is claimed.
        """
        with self._lock:
            if not self._free:
                return None
            number, self._worker = heapq.heappop(self._free), worker
            self._left[number] = {}
            return number

    def note_claimed(self, number: int, messages: Mapping[int, bytes]) -> None:
        """Note what a claim has named in its run: nothing, if it has not written it."""
        with self._lock:
            self._left[number] = dict(messages)
            self._number_of.update(dict.fromkeys(messages, number))
            self._claimed.update(dict.fromkeys(messages, self._clock.monotonic()))
            self._drop_empty([number])

    def doubt(self, number: int) -> None:
        """Note that a claim may have named in its run what does not begin here."""
        with self._lock:
            self._doubtful.append(number)

    def end_doubt(self) -> None:
        """Let such runs name nothing: what they name would count when it is claimed again."""
        self.end(())
        while self._doubtful:
            number = self._doubtful[-1]
            self.store(number, {})
            with self._lock:
                self._doubtful.pop()
                self._drop(number)

    def end_claimed(self, messages: Iterable[int]) -> None:
        """Note durably that those of the messages do not run that their claims have named, and that
        have not begun."""
        self._end(messages, self._claimed)

    def end_waiting(self) -> None:
        """Note durably that what has not begun long after its claim does not run: it waits, and is
        not to count if what runs meanwhile kills its worker."""
        late = self._clock.monotonic() - LONGEST_START
        waiting = [each for each, since in self._claimed.copy().items() if since <= late]
        if waiting:
            self.end_claimed(waiting)

    # --- Begun and ended --------------------------------------------------------------------------

    def begin(self, messages: Mapping[int, bytes], worker: str) -> None:
        """Note durably that these messages are begun; the disk is not waited for. Those that their
        claims have named are noted so already.

        :param messages: the id of each.
        :param worker: the token of the worker that runs them.
        """
        with self._lock:
            claimed = {each: self._claimed.pop(each) for each in messages if each in self._claimed}
        new = {each: id for each, id in messages.items() if each not in claimed}
        if not new:
            return
        try:
            self._write(new, worker)
        except BaseException:
            with self._lock:  # none of them begins
                self._claimed.update(claimed)
            raise

    def _write(self, messages: Mapping[int, bytes], worker: str) -> None:
        with self._lock:
            number = heapq.heappop(self._free) if self._free else len(self._left)
            self._left[number], self._worker = dict(messages), worker
        try:
            self.store(number, messages)
        except BaseException:
            with self._lock:
                self._drop(number)
            raise
        with self._lock:
            self._number_of.update(dict.fromkeys(messages, number))

    def forget(self, messages: Iterable[int]) -> None:
        """Forget messages that are no longer this consumer's."""
        with self._lock:
            self._drop_empty(self._take_out(messages))

    def end(self, messages: Iterable[int]) -> None:
        """Note durably that these messages do not run, though they stay this consumer's. What the
        database refuses is written the next time."""
        self._end(messages, self._number_of)

    def _end(self, messages: Iterable[int], among: Mapping[int, object]) -> None:
        with self._ending:
            with self._lock:
                self._written |= self._take_out([each for each in messages if each in among])
                left = {number: dict(self._left[number]) for number in self._written}
            for number, messages_left in left.items():
                self.store(number, messages_left)
                with self._lock:
                    self._written.discard(number)
                    self._drop_empty([number])

    def _take_out(self, messages: Iterable[int]) -> set[int]:
        """Take messages out of their runs, and return these; the caller holds the lock."""
        touched: set[int] = set()
        for each in messages:
            self._claimed.pop(each, None)
            if (number := self._number_of.pop(each, None)) is not None:
                touched.add(number)
                self._left[number].pop(each)
        return touched

    def _drop_empty(self, numbers: Iterable[int]) -> None:
        """Let the numbers of runs of which nothing is left be used again; the caller holds the
        lock."""
        for number in numbers:
            if number not in self._written and not self._left.get(number, True):
                self._drop(number)

    def close(self) -> None:
        """Delete what is written, unless some of it still runs."""
        with self._lock:
            if self._number_of.keys() - self._claimed.keys():
                return
        TransportRun.objects.using(self._alias).filter(consumer=self._consumer).delete()

    def prune(self) -> None:
        """Delete once in a while what dead consumers have left whose messages others have by now.
        A living one writes its row again."""
        now = self._clock.monotonic()
        if now < self._prune_at:
            return
        leased = TransportMessage.objects.filter(lease_token=OuterRef("consumer"))
        old = TransportRun.objects.using(self._alias).filter(
            ~Exists(leased.exclude(lease_token="")), begun_at__lt=self._clock.now() - _KEPT
        )
        ids = list(old.values_list("pk", flat=True))
        if ids:
            TransportRun.objects.using(self._alias).filter(pk__in=ids).delete()
        self._prune_at = now + _PRUNE_EVERY

    def _drop(self, number: int) -> None:
        """Let a number be used again; the caller holds the lock."""
        del self._left[number]
        heapq.heappush(self._free, number)

    def store(self, number: int, messages: Mapping[int, bytes]) -> None:
        """Let a run name these messages, and no other."""
        moment = self._clock.now()
        ids = {each: base64.b64encode(id).decode() for each, id in messages.items()}
        text = json.dumps(ids, separators=(",", ":"))
        adapted = connections[self._alias].ops.adapt_datetimefield_value(moment)
        values = [self._worker, text, adapted, self._consumer, number]
        if not store_for(self._alias).execute_alone(_UPDATE, values):
            TransportRun.objects.using(self._alias).create(
                consumer=self._consumer,
                number=number,
                worker=self._worker,
                messages=text,
                begun_at=moment,
            )


_UPDATE = """
UPDATE kjo_transport_run SET worker = %s, messages = %s, begun_at = %s
WHERE consumer = %s AND number = %s
"""


def begun_by(alias: str, consumers: Collection[str]) -> dict[tuple[str, int], str]:
    """Return what consumers have begun and not ended, as far as it is still leased to them: the
    consumer and the id of the message's row, each with the token of the worker."""
    rows = TransportRun.objects.using(alias).filter(consumer__in=consumers)
    return {
        (consumer, int(id)): worker
        for consumer, worker, messages in rows.values_list("consumer", "worker", "messages")
        for id in json.loads(messages)
    }


def running(
    alias: str, clock: Clock, message_ids: Collection[str] | None, most: int | None
) -> dict[str, str]:
    """Return the ids of messages that are begun, each with the token of its worker.

    :param message_ids: only of these.
    :param most: no more than so many.
    """
    begun = _begun(alias, None if message_ids is None else set(message_ids))
    found: dict[str, str] = {}
    if not begun or most == 0:
        return found
    for id, consumer in _leased(alias, clock, list(begun)):
        begun_by, worker, message_id = begun[id]
        if consumer == begun_by:
            found[message_id] = worker
            if len(found) == most:
                break
    return found


def _begun(alias: str, message_ids: Collection[str] | None) -> dict[int, tuple[str, str, str]]:
    """Return what runs name, by the ids of the rows: the consumer, its worker and the message."""
    runs = TransportRun.objects.using(alias).order_by("id")
    return {
        int(id): (consumer, worker, message_id)
        for consumer, worker, messages in runs.values_list("consumer", "worker", "messages")
        for id, stored in json.loads(messages).items()
        for message_id in [_message_id(stored or "")]
        if message_ids is None or message_id in message_ids
    }


def _message_id(stored: str) -> str:
    """Return the id of a message as a run has it: in base64, as its headers are. A worker of an
    earlier version writes it as it is."""
    try:
        return base64.b64decode(stored, validate=True).decode("utf-8", "replace")
    except ValueError:
        return stored


def _leased(alias: str, clock: Clock, ids: Collection[int]) -> Iterable[tuple[int, str]]:
    """Yield which of the messages are leased, and to which consumer."""
    rows = TransportMessage.objects.using(alias).filter(lease_expires_at__gt=clock.now())
    listed = list(ids)
    most = connections[alias].features.max_query_params or 5_000
    for start in range(0, len(listed), most - 10):
        some = rows.filter(pk__in=listed[start : start + most - 10])
        yield from some.values_list("pk", "lease_token")
