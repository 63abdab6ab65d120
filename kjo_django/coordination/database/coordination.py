"""The default coordination: leases and marks in the project's own database. No server needed.

On PostgreSQL wake-up calls reach other processes (NOTIFY); elsewhere only this one, and the others
find out by polling. LISTEN needs a session of its own: a pooler in transaction mode swallows it,
which costs the wake-ups and nothing else, unless there is a way around it.

``OPTIONS``:

``DATABASE``
    Alias of the database with the tables; ``KJO["DATABASE"]`` or the router's choice if not given.
``LISTEN_DATABASE``
    Alias of a direct connection to the same database, to listen on, where the other goes through a
    pooler in transaction mode.
"""

from __future__ import annotations

import random
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from datetime import datetime, timedelta
from functools import partial
from typing import Any, TypeVar

from django.db import (
    InterfaceError,
    InternalError,
    OperationalError,
    connections,
    router,
    transaction,
)
from django.db.models import F, QuerySet
from django.utils.translation import gettext

from kjo_django.conf import get_settings
from kjo_django.coordination.base import (
    Claim,
    Coordination,
    Listener,
    slot_name,
)
from kjo_django.coordination.database.windows import LONGEST_NAME, RateWindows, stored_name
from kjo_django.coordination.starts import Ask, Permit, Used
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Lease, Mark, RateWindow
from kjo_django.probing import answer_within
from kjo_django.store import store_for
from kjo_django.store.servers import mend_connection

T = TypeVar("T")
U = TypeVar("U")

OUTAGES = (OperationalError, InterfaceError, InternalError)

_BATCH = 900
"""Names in one statement, within what SQLite binds."""
_ASKS = 200
"""Asks for slots in one transaction."""
_DELIVERIES_KEPT = timedelta(days=1)
_PRUNE_EVERY = 600.0
_TRIES = 10
"""How often one call runs a statement again that the database breaks off for another session."""


class DatabaseCoordination(Coordination):
    """See the module."""

    known_options = frozenset({"DATABASE", "LISTEN_DATABASE"})
    is_with_jobs = True

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        option: str | None = self.options.get("DATABASE")
        self.database = option or get_settings().database or router.db_for_write(Lease)
        """The alias of the database with the tables."""
        self._store = store_for(self.database)
        self.supports_wake_ups = self._store.has_notify
        self.writes_concurrently = not self._store.has_one_writer
        self.permits_in_transactions = self.writes_concurrently
        self._windows = RateWindows(self._store)
        self._thread: ThreadPoolExecutor | None = None
        # Where there is more than one writer the rows would stay locked until the commit, in an
        # order that claims do not keep, unless they are deleted behind it.
        with_commit = self._store.has_one_writer or self._store.sends_several
        self.releases_within = self.database if with_commit else None
        self._cannot_listen: CoordinationError | None = None
        # The first prune at a random moment: not every process of a deployment at once.
        delay = _PRUNE_EVERY * random.random()  # noqa: S311
        self._prune_at = self.clock.monotonic() + delay

    # --- Leases -----------------------------------------------------------------------------------

    def claim(self, names: Sequence[str], token: str, ttl: timedelta) -> list[Claim]:
        """Take the leases in one short transaction of its own.

        :raises RuntimeError: inside ``atomic``. Nobody else would see the leases before its commit,
            and they would block everybody who asks for the same names.
        """
        try:
            claims = self._run(names, partial(self._store.claim_leases, token=token, ttl=ttl))
        except RuntimeError as error:
            error.add_note("In transaction.atomic() others would not see what claim() has taken.")
            raise
        if self.clock.monotonic() >= self._prune_at:
            self._prune_outside_transactions()
        return [Claim(*claims[name]) for name in names]

    def renew(self, names: Sequence[str], token: str, ttl: timedelta) -> list[bool]:
        """Extend in one statement. If not all were extended, a second one asks which were."""

        def extend(batch: Sequence[str]) -> dict[str, str]:
            with nullcontext() if self.writes_concurrently else self._store.transaction():
                # Waiting for the one writer takes seconds at times, in which a lease may expire.
                self._store.take_write_lock(Lease)
                now = self.clock.now()
                live = self._leases.filter(name__in=batch, token=token, expires_at__gt=now)
                extended = live.update(expires_at=now + ttl)
                if extended == len(batch):
                    return dict.fromkeys(batch, token)
                return dict(live.values_list("name", "token")) if extended else {}

        renewed = self._run(names, extend)
        return [name in renewed for name in names]

    def release(
        self,
        names: Sequence[str],
        token: str,
        *,
        count_delivery: bool = False,
        undo_claim: bool = False,
    ) -> None:
        """Give up the leases in one statement."""
        if not (undo_claim or count_delivery):
            self._run(names, partial(self._store.delete_leases, token=token))
            return

        def end(batch: Sequence[str]) -> None:
            owned = self._leases.filter(name__in=batch, token=token)
            undone = {"deliveries": F("deliveries") - 1} if undo_claim else {}
            owned.update(token="", expires_at=self.clock.now(), **undone)

        self._run(names, end)

    def holders(self, names: Sequence[str]) -> dict[str, str]:
        """Return the token of each name that has a live lease."""
        live = self._leases.filter(expires_at__gt=self.clock.now())
        pairs = live.values_list("name", "token")
        return self._run(names, lambda batch: dict(pairs.filter(name__in=batch)))

    def names(self, prefix: str) -> Iterable[str]:
        """Return the names with a live lease that start with ``prefix``, taken literally.

        A name beyond 255 characters is shown with its tail hashed.
        """
        live = self._leases.filter(expires_at__gt=self.clock.now(), name__startswith=prefix)
        try:
            names = list(live.order_by("name").values_list("name", flat=True))
        except OUTAGES as error:
            raise self._lost(error) from error
        # SQLite's and MySQL's LIKE ignore case.
        return [name for name in names if name.startswith(prefix)]

    # --- Limits -----------------------------------------------------------------------------------

    supports_limits = True

    def permit(
        self,
        asks: Sequence[Ask],
        sign: tuple[str, str] | None = None,
        used: Sequence[Used] = (),
    ) -> list[Permit]:
        """See ``RateWindows.permit``. It is in no transaction: a permit that is forgotten would be
        given twice, so the write waits for the disk.

        The sign is not looked at: a database is taken to keep what it has committed.

        Inside the caller's transaction another thread does so, with a connection of its own; not
        where the database has one writer, which is the caller.
        """
        action = partial(self._settled, partial(self._windows.permit, asks, used))
        if self.permits_in_transactions and connections[self.database].in_atomic_block:
            return self._in_own_thread(action)
        return action()

    def _in_own_thread(self, action: Callable[[], U]) -> U:
        with _registry_lock:
            if self._thread is None:
                self._thread = ThreadPoolExecutor(1, "kjo-permits")
        return self._thread.submit(action).result()

    def close(self) -> None:
        """End the thread that takes permits beside transactions, and its connection."""
        with _registry_lock:
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.submit(connections[self.database].close)
            thread.shutdown(wait=False)

    def claim_slots(
        self,
        asks: Sequence[tuple[str, int]],
        token: str,
        ttl: timedelta,
        sign: tuple[str, str] | None = None,
    ) -> list[str]:
        """Take all in one short transaction of its own. The lease of the name itself, which nobody
        holds, is locked meanwhile."""

        def claim_of(batch: Sequence[tuple[str, int]]) -> list[str]:
            slots = dict(batch)
            with self._store.transaction(durable=True):
                self._lock(sorted(map(stored_name, slots)))
                now = self.clock.now()
                free = {name: self._free_slots(name, count, now) for name, count in slots.items()}
                found = [free[name].pop(0) if free[name] else "" for name, _ in batch]
                self._set({stored_name(slot): now + ttl for slot in found if slot}, token)
            return found

        answers = self._each(asks, claim_of)
        if self.clock.monotonic() >= self._prune_at:
            self._prune_outside_transactions()
        return answers

    def _free_slots(self, name: str, count: int, now: datetime) -> list[str]:
        """Return the slots of a name that nobody has."""
        every = [slot_name(name, number) for number in range(1, count + 1)]
        stored, taken = list(map(stored_name, every)), set[str]()
        for start in range(0, count, _BATCH):
            some = self._leases.filter(name__in=stored[start : start + _BATCH])
            live = some.filter(expires_at__gt=now)
            taken.update(live.values_list("name", flat=True))
        return [each for each in every if stored_name(each) not in taken]

    def _each(self, asks: Sequence[T], change: Callable[[Sequence[T]], list[U]]) -> list[U]:
        """Call ``change`` with as many asks at a time as its statements can name; return all its
        answers."""
        answers: list[U] = []
        for start in range(0, len(asks), _ASKS):
            answers += self._settled(partial(change, asks[start : start + _ASKS]))
        return answers

    def _settled(self, action: Callable[[], U]) -> U:
        """Return what ``action`` returns. It is called again, a bounded number of times, where the
        database has broken it off for the sake of another session: because of a deadlock, or at
        REPEATABLE READ and above of a row that was written since.

        InnoDB also locks the gaps between names, in which others insert, and so finds deadlocks
        where no two transactions want the same name.

        :raises CoordinationError: the database cannot be reached, or breaks it off each time.
        """
        try:
            for _ in range(_TRIES):
                try:
                    return action()
                except OperationalError as error:
                    if connections[self.database].in_atomic_block or not _is_broken_off(error):
                        raise
                time.sleep(random.uniform(0, 0.02))  # noqa: S311
            return action()
        except OUTAGES as error:
            raise self._lost(error) from error

    def _lock(self, names: Sequence[str]) -> dict[str, datetime]:
        """Return when each of these leases expires, locked until the transaction ends; a name that
        has no row gets one.

        :param names: in order, so that two who lock never deadlock.
        """
        found: dict[str, datetime] = {}
        while missing := [name for name in names if name not in found]:
            # A row that is pruned between the two statements is inserted again.
            rows = self._store.lock_leases(missing)
            found.update((name, row.expires_at) for name, row in rows.items())
        return found

    def _set(self, expiries: Mapping[str, datetime], token: str) -> None:
        """Write leases of this token, whatever was there."""
        leases = [
            Lease(name=name, token=token, expires_at=expires_at, deliveries=1)
            for name, expires_at in sorted(expiries.items())
        ]
        if leases:
            self._store.insert_or_update(leases, "name", ["token", "expires_at", "deliveries"])

    @property
    def _leases(self) -> QuerySet[Lease]:
        return Lease.objects.using(self.database)

    def _run(
        self, names: Collection[str], statement: Callable[[Sequence[str]], dict[str, T] | None]
    ) -> dict[str, T]:
        """Run a statement for each batch of names, again where the database has ended a deadlock.

        :param statement: takes names in order, as their column holds them.
        :returns: what the statement found, by name as it was given.
        """
        given = {n if len(n) <= LONGEST_NAME else stored_name(n): n for n in names}
        waiting = sorted(given)
        found: dict[str, T] = {}
        while waiting:
            answer = self._settled(partial(statement, waiting[:_BATCH]))
            found |= answer or {}
            del waiting[:_BATCH]
        return {given[name]: value for name, value in found.items()}

    def _lost(self, error: Exception) -> CoordinationError:
        """Close the connection if it is broken; return what to raise for an outage."""
        mend_connection(self.database)
        return CoordinationError(self._outage(error))

    def _outage(self, error: Exception) -> str:
        return f"Database {self.database!r} (KJO['COORDINATION']) cannot be used: {error}"

    # --- Marks ------------------------------------------------------------------------------------

    def set_marks(self, marks: Mapping[str, str], ttl: timedelta) -> None:
        """Insert or replace, in one statement where the database takes them all."""
        expires_at = self.clock.now() + ttl
        values = {stored_name(name): value for name, value in marks.items()}

        def store(batch: Sequence[str]) -> None:
            # In one order, so that two writers of the same marks cannot deadlock.
            rows = [Mark(name=name, value=values[name], expires_at=expires_at) for name in batch]
            self._store.insert_or_update(rows, "name", ["value", "expires_at"])

        self._run(marks, store)
        if self.clock.monotonic() >= self._prune_at:
            self._prune_outside_transactions()

    def get_marks(self, names: Sequence[str]) -> dict[str, str]:
        """Return the live values among ``names``."""
        live = Mark.objects.using(self.database).filter(expires_at__gt=self.clock.now())
        pairs = live.values_list("name", "value")
        return self._run(names, lambda batch: dict(pairs.filter(name__in=batch)))

    # --- Wake-up calls ----------------------------------------------------------------------------

    def notify(self, *channels: str) -> None:
        """Call the listeners when the caller's transaction commits, at once if there is none."""
        if not self.supports_wake_ups:
            call = partial(call_local_listeners, self.database, channels)
            transaction.on_commit(call, using=self.database)
            return
        try:
            self._store.notify(channels)
        except OUTAGES as error:
            raise self._lost(error) from error

    def listen(self, channels: Sequence[str]) -> Listener:
        """Open a listener; on PostgreSQL with a connection of its own.

        :raises CoordinationError: it cannot be made, or a pooler would swallow what it listens for.
            The latter is found out once: it takes a restart of this process to try again.
        """
        if not self.supports_wake_ups:
            return LocalListener(self.database, channels)
        from kjo_django.coordination.database.postgres_listener import (
            PostgresListener,
            SessionLentError,
        )

        if self._cannot_listen is not None:
            raise self._cannot_listen
        try:
            return PostgresListener(self.options.get("LISTEN_DATABASE") or self.database, channels)
        except SessionLentError as error:
            self._cannot_listen = error
            raise

    # --- Health and cleaning ----------------------------------------------------------------------

    def probe(self, timeout: float) -> str:
        """Look for a row."""

        def look() -> str:
            self._leases.exists()
            vendor = connections[self.database].display_name
            names = {"vendor": vendor, "alias": self.database}
            return gettext("%(vendor)s database %(alias)r") % names

        try:
            return answer_within(timeout, look)
        except Exception as error:
            raise CoordinationError(self._outage(error)) from error

    def _prune_outside_transactions(self) -> None:
        if not connections[self.database].in_atomic_block:
            self._prune_at = self.clock.monotonic() + _PRUNE_EVERY
            with suppress(CoordinationError):  # what was claimed before it is claimed
                self.prune()

    def prune(self) -> int:
        """Delete what expired: marks at once, leases when their delivery counts are a day old."""
        now = self.clock.now()
        marks = Mark.objects.using(self.database).filter(expires_at__lte=now)
        leases = self._leases.filter(expires_at__lte=now - _DELIVERIES_KEPT)
        windows = RateWindow.objects.using(self.database).filter(expires_at__lte=now)
        return sum(self._settled(partial(self._delete, each)) for each in (marks, leases, windows))

    def _delete(self, rows: QuerySet[Any]) -> int:
        """Delete rows, but those that somebody has locked, until a later prune: to wait for them
        while others wait for those that are deleted would be a deadlock."""
        if not connections[self.database].features.has_select_for_update_skip_locked:
            return rows._raw_delete(self.database)
        free, count = rows.select_for_update(skip_locked=True).values_list("pk", flat=True), 0
        while True:
            with self._store.transaction(waits_for_disk=False):
                names = list(free[:_BATCH])
                count += rows.filter(pk__in=names)._raw_delete(self.database) if names else 0
            if len(names) < _BATCH:
                return count


def _is_broken_off(error: OperationalError) -> bool:
    is_serialization_failure = getattr(error.__cause__, "sqlstate", None) == "40001"
    return is_serialization_failure or "deadlock" in str(error).lower()


class LocalListener(Listener):
    """Hears the calls of its own process.

    :param space: keeps databases apart.
    """

    def __init__(self, space: str, channels: Sequence[str]) -> None:
        self.space = space
        self.channels = frozenset(channels)
        # Callers take the lock itself, not the condition: a handler's timeout that is raised within
        # the condition's own Python code would leave it locked for ever, and every caller waiting.
        self.lock = threading.RLock()
        self.condition = threading.Condition(self.lock)
        self.called: set[str] = set()
        self._is_woken = False
        with _registry_lock:
            _local_listeners.add(self)

    def wait(self, timeout: float) -> set[str]:
        """Wait for a call or for ``wake``."""
        with self.condition:
            self.condition.wait_for(lambda: self.called or self._is_woken, timeout)
            called, self.called, self._is_woken = self.called, set(), False
        return called

    def wake(self) -> None:
        """Make ``wait`` return."""
        with self.lock:
            self._is_woken = True
            self.condition.notify_all()

    def close(self) -> None:
        """Hear nothing more."""
        with _registry_lock:
            _local_listeners.discard(self)
        self.wake()


_local_listeners: weakref.WeakSet[LocalListener] = weakref.WeakSet()
_registry_lock = threading.Lock()


def call_local_listeners(space: str, channels: Collection[str]) -> None:
    """Wake the listeners of this process to any of the channels."""
    with _registry_lock:
        listeners = [each for each in _local_listeners if each.space == space]
    for listener in listeners:
        if called := listener.channels.intersection(channels):
            with listener.lock:
                listener.called |= called
                listener.condition.notify_all()
