"""The contract of coordination: leases, marks and wake-ups, which may vanish without harm.

Correctness never depends on them: the database row decides. Losing all of them costs duplicate
deliveries and a slower wake-up, nothing else. Every method raises ``CoordinationError`` when the
server cannot be reached; the caller decides what its absence means.
"""

from __future__ import annotations

import abc
import contextlib
import hashlib
import math
import random
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from django.core.exceptions import ImproperlyConfigured

from kjo_django.clock import CLOCK, Clock
from kjo_django.conf import QueueConf
from kjo_django.coordination.starts import Ask, Permit, Used
from kjo_django.logs import get_logger
from kjo_django.values import unknown_key

logger = get_logger("kjo_django.coordination")


MAX_LEASED_ID = 210
"""Longer than every message id of ours; ids of others may have 255 characters."""


def lease_name(queue: QueueConf, message_id: str) -> str:
    """Return ``CONS:PREFIX:id``; a digest stands for an id too long for a name."""
    if len(message_id) > MAX_LEASED_ID:
        message_id = hashlib.sha256(message_id.encode("utf-8", "replace")).hexdigest()
    return f"CONS:{queue.key_prefix}:{message_id}"


def alive_name(token: str) -> str:
    """Return the name under which a worker shows that it lives; absent, its leases are void."""
    return f"WORKER:{token}"


class Claim(NamedTuple):
    """The answer for one name of ``claim``."""

    acquired: bool
    """False: somebody else holds a live lease on it."""
    deliveries: int
    """How often it was claimed since its deliveries were last forgotten, this claim included. More
    than 1 means an earlier owner vanished without releasing it: a crash or a freeze."""


FIRST_CLAIM = Claim(True, 1)
"""The answer for a name that has never been leased."""


class Listener(abc.ABC):
    """Waits for wake-up calls on some channels. One thread owns it; ``wake`` is thread-safe."""

    on_connection: Callable[[bool], None] | None = None
    """Called within ``wait``: with False when no call reaches it any more, since its connection was
    lost, and with True when it has another one."""

    @abc.abstractmethod
    def wait(self, timeout: float) -> set[str]:
        """Return the channels called since the last wait, or an empty set after ``timeout``
        seconds. Calls may be lost (the backend restarted): a slow poll is always needed beside it.
        Never raises for outages; it waits and reconnects."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make a waiting ``wait`` return."""

    @abc.abstractmethod
    def close(self) -> None:
        """Release its connection. Idempotent."""


class Coordination(abc.ABC):
    """Leases, marks and wake-ups on one server. Thread-safe; one instance per process, made without
    I/O.

    :param options: the ``OPTIONS`` of ``KJO["COORDINATION"]``.
    :raises ImproperlyConfigured: an option is not known.
    """

    known_options: ClassVar[frozenset[str] | None] = None
    """Names of its ``OPTIONS``, where others are a mistake; None where any may be passed on."""
    clock: Clock = CLOCK
    """The clock by which leases and marks expire, where that is not a server's own."""

    writes_concurrently: bool = True
    """Whether leases can be written while a handler holds the jobs' database in a transaction.
    False for SQLite, which knows one writer at a time."""
    releases_within: str | None = None
    """The jobs' database, by alias, in whose transaction that makes outcomes durable ``release`` is
    to be called: what it releases is free when that is committed, and it spares a round trip. None:
    ``release`` is called after the commit."""
    is_with_jobs: ClassVar[bool] = False
    """Whether it is in the database with the jobs unless its option ``DATABASE`` names another:
    where jobs are in several databases, each has one then."""
    supports_wake_ups: bool = False
    """Whether ``notify`` reaches other processes; without it they find out by polling."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        if self.known_options is not None:
            where = "KJO['COORDINATION']['OPTIONS']"
            if fault := unknown_key(self.options, sorted(self.known_options), where):
                raise ImproperlyConfigured(fault)

    # --- Leases: names that one owner at a time holds, for a while --------------------------------

    @abc.abstractmethod
    def claim(self, names: Sequence[str], token: str, ttl: timedelta) -> list[Claim]:
        """Take a lease on each name that has no live one, all in one round trip. The caller chooses
        names and tokens.

        A name that the same ``token`` owns already is acquired again, for ``ttl`` from now, without
        a new delivery. The delivery count of a name outlives its lease, so a crash is counted.
        """

    @abc.abstractmethod
    def renew(self, names: Sequence[str], token: str, ttl: timedelta) -> list[bool]:
        """Extend the leases still owned by ``token``; False for each name it owns no more."""

    @abc.abstractmethod
    def release(
        self,
        names: Sequence[str],
        token: str,
        *,
        count_delivery: bool = False,
        undo_claim: bool = False,
    ) -> None:
        """Give up the leases still owned by ``token``; those of another owner stay.

        The delivery counts of the names released are forgotten: the outcome is durable. With
        ``count_delivery=True`` they stay as they are, so the attempt stays spent. With
        ``undo_claim=True`` they are what they were before the claim: nothing was begun.
        """

    @abc.abstractmethod
    def holders(self, names: Sequence[str]) -> dict[str, str]:
        """Return the token of each name that has a live lease: what is being processed now."""

    @abc.abstractmethod
    def names(self, prefix: str) -> Iterable[str]:
        """Iterate the names with a live lease that start with ``prefix`` (taken literally)."""

    # --- Limits: rates, and leases that are numbered slots ----------------------------------------

    supports_limits: bool = False
    """Whether the next two methods do something. Where they do not, nothing may be limited."""

    permits_in_transactions: bool = True
    """Whether ``permit`` may be called inside a transaction of the jobs' database that has written:
    what it gives is not undone with that, and nobody waits for its end."""

    def permit(
        self,
        asks: Sequence[Ask],
        sign: tuple[str, str] | None = None,
        used: Sequence[Used] = (),
    ) -> list[Permit]:
        """Take a permit of each of its rates for each ask, or none; in order and in one round trip.
        What is given nothing stands before those that come after it. All who ask for a rate give
        one value of that.

        :param sign: a lease and its token. A server that does not have it has lost its data.
        :param used: permits of which it is known by now when they were used.
        :returns: counted from a moment within the call.
        :raises CoordinationForgotError: the sign is missing; nothing is given.
        """
        raise NotImplementedError

    def claim_slots(
        self,
        asks: Sequence[tuple[str, int]],
        token: str,
        ttl: timedelta,
        sign: tuple[str, str] | None = None,
    ) -> list[str]:
        """Take for each ask a free one of its slots, in one round trip. A slot is a lease like any
        other, to be renewed and released as ``slot_name`` calls it. One that ``token`` holds is not
        free.

        :param asks: a name and the number of its slots.
        :param sign: as of ``permit``.
        :returns: the lease taken for each ask, "" where no slot is free.
        :raises CoordinationForgotError: the sign is missing; nothing is taken.
        """
        raise NotImplementedError

    # --- Marks: small values that expire, such as the hash of what a producer sent last -----------

    @abc.abstractmethod
    def set_marks(self, marks: Mapping[str, str], ttl: timedelta) -> None:
        """Store each value under its name for ``ttl``, replacing what was there."""

    @abc.abstractmethod
    def get_marks(self, names: Sequence[str]) -> dict[str, str]:
        """Return the live values among ``names``, in one round trip."""

    # --- Wake-ups: calls on named channels that end the waiting of whoever listens ----------------

    @abc.abstractmethod
    def notify(self, *channels: str) -> None:
        """Wake whoever listens on any of the channels, in one round trip where that is possible.
        Best effort: losing a call costs time only."""

    @abc.abstractmethod
    def listen(self, channels: Sequence[str]) -> Listener:
        """Open a listener. It hears calls made after this returned."""

    # --- Health -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def probe(self, timeout: float) -> str:
        """Answer within ``timeout`` seconds with a short description of what was reached."""

    def close(self) -> None:
        """Release what is kept open. Idempotent."""
        return


def slot_name(name: str, number: int) -> str:
    """Return the lease that is slot ``number``, from 1, of a name."""
    return f"{name}:{number}"


SLOW_FAILURE = 0.1
"""Seconds. A call that fails more quickly, of a refused connection say, is tried each time."""
LONGEST_PAUSE = 30.0
"""Seconds, at most, until a call is tried again."""


class CircuitBreaker:
    """Opens when a call fails slowly, and closes when a call is answered.

    While it is open, one call at a time is tried: first after twice the time of the failed call,
    then after twice as long each time. Thread-safe; while it is closed, asking costs nothing.
    """

    def __init__(self, clock: Clock = CLOCK) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._open_until = 0.0
        self._pause = 0.0
        self._opened_at = 0.0

    def is_open(self) -> bool:
        """Return whether not to call now. A caller that gets False must call, and must record the
        answer or the failure."""
        if not self._open_until:
            return False
        with self._lock:
            now = self._clock.monotonic()
            if now < self._open_until:
                return True
            if self._open_until:
                self._open_until = now + LONGEST_PAUSE
            return False

    def record_failure(self, began: float) -> None:
        """Note that a call begun at that time (monotonic) got no answer."""
        with self._lock:
            now = self._clock.monotonic()
            took = now - began
            if took < SLOW_FAILURE:
                self._open_until = self._pause = 0.0
            elif began >= self._opened_at:  # else it is one of several calls of the same time
                self._pause = min(LONGEST_PAUSE, 2 * (self._pause or took))
                self._open_until, self._opened_at = now + self._pause, now

    def record_success(self) -> bool:
        """Note an answer; return whether it closed the breaker."""
        if not self._open_until:
            return False
        with self._lock:
            was_open, self._open_until, self._pause = bool(self._open_until), 0.0, 0.0
            return was_open


_LONGEST_RETRY = 5.0


class ReconnectingListener(Listener):
    """Hears calls on a connection of its own, and connects again after an outage. The constructor
    connects, and raises what the client raises. The thread that waits owns it; other threads may
    call ``wake``.

    :param server: what it listens to, for the log.
    """

    outages: ClassVar[tuple[type[Exception], ...]]
    """What is raised for a connection that is lost, or cannot be made just now: the client's own
    errors, and with them OSError and ValueError, of a descriptor that was closed meanwhile."""
    longest_sleep: ClassVar[float] = math.inf
    """Seconds until ``_heard`` is asked again although nothing arrived."""

    def __init__(self, server: str, channels: Iterable[str]) -> None:
        self._server = server
        self._channels = frozenset(channels)
        self._failures = 0
        self._retry_at = 0.0
        self._closed = False
        # A thread that waits for the connection's socket waits for this pair, too.
        self._wakes, self._waker = socket.socketpair()
        self._wakes.setblocking(False)
        self._waker.setblocking(False)
        try:
            self._connection: Any = self._connect()
        except BaseException:
            self._wakes.close()
            self._waker.close()
            raise

    @abc.abstractmethod
    def _connect(self) -> Any:
        """Return a connection that hears whatever is called after this returned."""

    @abc.abstractmethod
    def _descriptor(self, connection: Any) -> int:
        """Return the file descriptor that becomes readable with a call."""

    @abc.abstractmethod
    def _heard(self, connection: Any) -> set[str]:
        """Read all that is there, without waiting, and return the channels called."""

    @abc.abstractmethod
    def _disconnect(self, connection: Any) -> None:
        """Give back a connection, which may be broken; raises nothing."""

    def wait(self, timeout: float) -> set[str]:
        """Wait for calls. After an outage all channels count as called, since calls may have been
        missed."""
        deadline = time.monotonic() + timeout
        while not self._closed:
            try:
                called, woken = self._wait_once(deadline)
            except self.outages as error:
                self._note_outage(error)
                continue
            if called or woken or time.monotonic() >= deadline:
                return called
        return set()

    def _wait_once(self, deadline: float) -> tuple[set[str], bool]:
        """Listen, or connect; return the channels called, and whether ``wake`` was."""
        now, connection = time.monotonic(), self._connection
        if connection is None:
            if now < self._retry_at:
                return set(), self._is_woken_within(min(self._retry_at, deadline) - now)
            self._connection = self._connect()
            self._failures = 0
            self._report_connection(is_connected=True)
            return set(self._channels), False
        # First what the client or TLS has read ahead: the socket is not readable for that.
        if called := self._heard(connection):
            return called, False
        # Both in one wait. Looking now and then would cost time, and CPU of a worker that is idle.
        longest = min(deadline - now, self.longest_sleep)
        woken = self._is_woken_within(longest, self._descriptor(connection))
        return self._heard(connection), woken

    def _note_outage(self, error: Exception) -> None:
        """Drop the connection, and let some time pass before another one is made."""
        if self._failures == 0:
            logger.warning("Lost the listening connection to %s: %s", self._server, error)
            self._report_connection(is_connected=False)
        self._drop_connection()
        pause = min(_LONGEST_RETRY, 0.1 * 2.0**self._failures)
        self._failures += 1
        self._retry_at = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311

    def _report_connection(self, *, is_connected: bool) -> None:
        if self.on_connection is not None:
            self.on_connection(is_connected)

    def _is_woken_within(self, timeout: float, *descriptors: int) -> bool:
        """Wait for ``wake`` or for a file descriptor that becomes readable.

        :raises OSError: a descriptor is closed.
        :raises ValueError: likewise.
        """
        poller = select.poll()
        for descriptor in (self._wakes.fileno(), *descriptors):
            poller.register(descriptor, select.POLLIN)
        ready = {descriptor for descriptor, _ in poller.poll(max(0.0, timeout) * 1000)}
        if self._wakes.fileno() not in ready:
            return False
        with contextlib.suppress(BlockingIOError):
            while self._wakes.recv(4096):
                pass
        return True

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._disconnect(connection)

    def wake(self) -> None:
        """Make ``wait`` return; never blocks. A full buffer means that it returns anyway."""
        with contextlib.suppress(OSError):
            self._waker.send(b"!")

    def close(self) -> None:
        """Give the connection back; to be called by the owning thread."""
        if self._closed:
            return
        self._closed = True
        self._drop_connection()
        self._wakes.close()
        self._waker.close()
