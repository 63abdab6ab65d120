"""The contract of coordination: what may vanish without harm.

Leases, recently-sent marks, delivery counts and wake-up calls. Correctness never depends on them:
the database row decides. Losing all of it costs duplicate deliveries and a slower wake-up, nothing
else. Every method raises ``CoordinationError`` when the backend cannot be reached; the caller
decides what its absence means.
"""

from __future__ import annotations

import abc
from collections.abc import Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NamedTuple

from django.core.exceptions import ImproperlyConfigured

from kjo_django.values import unknown_key


class Claim(NamedTuple):
    """The answer for one name of ``claim``."""

    acquired: bool
    """False: somebody else holds a live lease on it."""
    deliveries: int
    """How often it was claimed since its deliveries were last forgotten, this claim included. More
    than 1 means an earlier owner vanished without releasing it: a crash or a freeze."""


FIRST_CLAIM = Claim(True, 1)
"""Of a name nobody has held."""


class Listener(abc.ABC):
    """Waits for wake-up calls on some channels. One thread owns it; ``wake`` is thread-safe."""

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
    """Thread-safe; one instance per process, made without I/O.

    Lease names are built by the callers, ``CONS:PREFIX:id`` for the lease on an item (KJO-60).
    """

    supports_wake_ups: bool = False
    """Whether ``notify`` reaches other processes; without it they find out by polling."""

    @property
    def writes_concurrently(self) -> bool:
        """Whether it can be written to while a handler holds the jobs' database in a transaction.
        False for SQLite, which knows one writer at a time."""
        return True

    def releases_within(self, using: str) -> bool:
        """Whether ``release`` is to be called in the transaction of the jobs' database ``using``
        that makes the outcomes durable: it is part of it then, and spares a transaction."""
        return False

    known_options: ClassVar[frozenset[str] | None] = None
    """Names of its ``OPTIONS``, where others are a mistake; None where any may be passed on."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self.options = dict(options)
        if self.known_options is not None:
            where = "KJO['COORDINATION']['OPTIONS']"
            if fault := unknown_key(self.options, sorted(self.known_options), where):
                raise ImproperlyConfigured(fault)

    # --- Leases -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def claim(self, names: Sequence[str], token: str, ttl: timedelta) -> list[Claim]:
        """Take a lease on each name that has no live one, all in one round trip (KJO-F1).

        A name already held by the same ``token`` is acquired again without a new delivery. The
        delivery count of a name outlives its lease, so a crash is counted.
        """

    @abc.abstractmethod
    def renew(self, names: Sequence[str], token: str, ttl: timedelta) -> list[bool]:
        """Extend the leases still held by ``token``; False where it holds it no more (KJO-F11)."""

    @abc.abstractmethod
    def release(
        self,
        names: Sequence[str],
        token: str,
        *,
        count_delivery: bool = False,
        undo_claim: bool = False,
    ) -> None:
        """Give up the leases held by ``token`` (compare-and-delete, KJO-F10).

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

    # --- Marks: small values that expire, such as PREFIX_SENT:id = content hash (KJO-28) ----------

    @abc.abstractmethod
    def set_marks(self, marks: Mapping[str, str], ttl: timedelta) -> None:
        """Store each value under its name for ``ttl``, replacing what was there."""

    @abc.abstractmethod
    def get_marks(self, names: Sequence[str]) -> dict[str, str]:
        """Return the live values among ``names``, in one round trip."""

    # --- Wake-up calls ----------------------------------------------------------------------------

    @abc.abstractmethod
    def notify(self, channel: str) -> None:
        """Wake whoever listens on ``channel``. Best effort: losing it costs time only."""

    def notify_all(self, channels: Collection[str]) -> None:
        """Wake whoever listens on any of the channels, in one round trip where that is possible."""
        for channel in channels:
            self.notify(channel)

    @abc.abstractmethod
    def listen(self, channels: Sequence[str]) -> Listener:
        """Open a listener. It hears calls made after this returned."""

    # --- Health -----------------------------------------------------------------------------------

    @abc.abstractmethod
    def probe(self, timeout: float) -> str:
        """Answer within ``timeout`` seconds with a short description of what was reached."""

    def close(self) -> None:
        """Release what is held open. Idempotent."""
        return
