"""The default coordination: leases and marks in the project's own database. No server needed.

On PostgreSQL wake-up calls reach other processes (NOTIFY); elsewhere only this one, and the others
find out by polling. LISTEN needs a session of its own: a pooler in transaction mode swallows it,
which costs the wake-ups and nothing else, unless there is a way around it. Where the database
compares text without regard to case, as MySQL and MariaDB do by default, names that differ only in
case exclude each other.

``OPTIONS``:

``DATABASE``
    Alias of the database with the tables; ``KJO["DATABASE"]`` or the router's choice if not given.
``LISTEN_DATABASE``
    Alias of a direct connection to the same database, to listen on, where the other goes through a
    pooler in transaction mode.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from django.db import InterfaceError, OperationalError, connections, router, transaction
from django.db.models import F, QuerySet

from kjo_django.conf import get_settings
from kjo_django.coordination.base import Claim, Coordination, Listener
from kjo_django.coordination.listeners import LocalListener, call_local_listeners
from kjo_django.exceptions import CoordinationError
from kjo_django.models import Lease, Mark
from kjo_django.probing import answer_within
from kjo_django.store import store_for

T = TypeVar("T")

_LONGEST_NAME = 255
_BATCH = 900
"""Names in one statement, within what SQLite binds."""
_DELIVERIES_KEPT = timedelta(days=1)
_PRUNE_EVERY = 600.0
_TRIES = 10
"""How often one call runs a statement that the database breaks off because of a deadlock."""


class DatabaseCoordination(Coordination):
    """See the module."""

    known_options = frozenset({"DATABASE", "LISTEN_DATABASE"})

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        option: str | None = self.options.get("DATABASE")
        self.database = option or get_settings().database or router.db_for_write(Lease)
        """The alias of the database with the tables."""
        self._store = store_for(self.database)
        self.supports_wake_ups = self._store.has_notify
        self._cannot_listen: CoordinationError | None = None
        # The first prune at a random moment: not every process of a deployment at once.
        delay = _PRUNE_EVERY * random.random()  # noqa: S311
        self._prune_at = self.clock.monotonic() + delay

    @property
    def writes_concurrently(self) -> bool:
        """SQLite knows one writer at a time."""
        return not self._store.has_one_writer

    def releases_within(self, using: str) -> bool:
        """On SQLite, where each transaction waits for the one writer. Elsewhere the rows would stay
        locked until the commit, in an order that claims do not keep."""
        return self._store.has_one_writer and self.database == using

    # --- Leases -----------------------------------------------------------------------------------

    def claim(self, names: Sequence[str], token: str, ttl: timedelta) -> list[Claim]:
        """Take the leases in one short transaction of its own.

        :raises RuntimeError: inside ``atomic``. Nobody else would see the leases before its commit,
            and they would block everybody who asks for the same names.
        """
        stored = [_stored(name) for name in names]
        claims: dict[str, tuple[bool, int]] = {}
        for found in self._run(sorted(set(stored)), partial(self._claim, token, ttl)):
            claims.update(found)
        self._prune_sometimes()
        return [Claim(*claims[name]) for name in stored]

    def _claim(
        self, token: str, ttl: timedelta, names: Sequence[str]
    ) -> dict[str, tuple[bool, int]]:
        with ExitStack() as stack:
            try:
                # Durable: Django itself refuses to nest it, but for the transaction of a TestCase.
                stack.enter_context(self._store.transaction(durable=True))
            except RuntimeError as error:
                raise RuntimeError(
                    "claim() must be called outside transaction.atomic(): others would not see the "
                    "lease before the commit"
                ) from error
            # A lease lost in a crash of the server harms nobody.
            self._store.commit_without_disk()
            return self._store.claim_leases(names, token, ttl)

    def renew(self, names: Sequence[str], token: str, ttl: timedelta) -> list[bool]:
        """Extend in one statement; a second one asks which, if not all were extended."""
        stored = [_stored(name) for name in names]
        held = set().union(*self._run(stored, partial(self._renew, token, ttl)))
        return [name in held for name in stored]

    def _renew(self, token: str, ttl: timedelta, names: Sequence[str]) -> set[str]:
        now = self.clock.now()
        live = self._leases.filter(name__in=names, token=token, expires_at__gt=now)
        extended = live.update(expires_at=now + ttl)
        if extended == len(set(names)):
            return set(names)
        return set(live.values_list("name", flat=True)) if extended else set()

    def release(
        self,
        names: Sequence[str],
        token: str,
        *,
        count_delivery: bool = False,
        undo_claim: bool = False,
    ) -> None:
        """Give up the leases in one statement."""

        def give_up(batch: Sequence[str]) -> None:
            if not (undo_claim or count_delivery):
                self._store.delete_leases(batch, token)
                return
            held = self._leases.filter(name__in=batch, token=token)
            undone = {"deliveries": F("deliveries") - 1} if undo_claim else {}
            held.update(token="", expires_at=self.clock.now(), **undone)

        self._run([_stored(name) for name in names], give_up)

    def holders(self, names: Sequence[str]) -> dict[str, str]:
        """Return the token of each name that has a live lease."""
        stored = {_stored(name): name for name in names}
        live = self._leases.filter(expires_at__gt=self.clock.now())
        found = self._run(
            list(stored),
            lambda batch: list(live.filter(name__in=batch).values_list("name", "token")),
        )
        return {stored[name]: token for batch in found for name, token in batch}

    def names(self, prefix: str) -> Iterable[str]:
        """Return the names with a live lease that start with ``prefix``, taken literally.

        A name beyond 255 characters is shown with its tail hashed.
        """
        live = self._leases.filter(expires_at__gt=self.clock.now(), name__startswith=prefix)
        with self._reached():
            names = list(live.order_by("name").values_list("name", flat=True))
        # SQLite's and MySQL's LIKE ignore case.
        return [name for name in names if name.startswith(prefix)]

    @property
    def _leases(self) -> QuerySet[Lease]:
        return Lease.objects.using(self.database)

    def _run(self, names: Sequence[str], statement: Callable[[Sequence[str]], T]) -> list[T]:
        """Run a statement for each batch of names, again where the database ended a deadlock.

        InnoDB also locks the gaps between names, in which others insert, and so finds deadlocks
        where no two transactions want the same name.
        """
        batches = [names[start : start + _BATCH] for start in range(0, len(names), _BATCH)]
        results: list[T] = []
        tries = _TRIES
        with self._reached():
            while len(results) < len(batches):
                try:
                    results.append(statement(batches[len(results)]))
                except OperationalError as error:
                    tries -= 1
                    is_over = not tries or connections[self.database].in_atomic_block
                    if is_over or "deadlock" not in str(error).lower():
                        raise
                    time.sleep(random.uniform(0, 0.02))  # noqa: S311
        return results

    # --- Marks ------------------------------------------------------------------------------------

    def set_marks(self, marks: Mapping[str, str], ttl: timedelta) -> None:
        """Insert or replace, in one statement where the database takes them all."""
        expires_at = self.clock.now() + ttl
        alias = self.database
        rows = [
            # In one order, so that two writers of the same marks cannot deadlock.
            Mark(name=_stored(name), value=value, expires_at=expires_at)
            for name, value in sorted(marks.items())
        ]
        has_target = connections[alias].features.supports_update_conflicts_with_target
        with self._reached():
            Mark.objects.using(alias).bulk_create(
                rows,
                update_conflicts=True,
                unique_fields=["name"] if has_target else None,
                update_fields=["value", "expires_at"],
            )
        self._prune_sometimes()

    def get_marks(self, names: Sequence[str]) -> dict[str, str]:
        """Return the live values among ``names``."""
        stored = {_stored(name): name for name in names}
        live = Mark.objects.using(self.database).filter(expires_at__gt=self.clock.now())
        found = self._run(
            list(stored),
            lambda batch: list(live.filter(name__in=batch).values_list("name", "value")),
        )
        return {stored[name]: value for batch in found for name, value in batch}

    # --- Wake-up calls ----------------------------------------------------------------------------

    def notify(self, channel: str) -> None:
        """Call the listeners when the caller's transaction commits, at once if there is none."""
        self.notify_all([channel])

    def notify_all(self, channels: Collection[str]) -> None:
        """Call the listeners of several channels, in one query."""
        alias = self.database
        if not self.supports_wake_ups:
            for channel in channels:
                call = partial(call_local_listeners, alias, channel)
                transaction.on_commit(call, using=alias)
            return
        with self._reached():
            self._store.notify(channels)

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
        alias = self.database

        def look() -> str:
            self._leases.exists()
            return f"{connections[alias].display_name} database {alias!r}"

        try:
            return answer_within(timeout, look)
        except Exception as error:
            raise CoordinationError(_unreachable(alias, error)) from error

    def prune(self) -> int:
        """Delete what expired: marks at once, leases when their delivery counts are a day old."""
        now = self.clock.now()
        with self._reached():
            marks = Mark.objects.using(self.database).filter(expires_at__lte=now)
            leases = self._leases.filter(expires_at__lte=now - _DELIVERIES_KEPT)
            return marks._raw_delete(self.database) + leases._raw_delete(self.database)

    def _prune_sometimes(self) -> None:
        now = self.clock.monotonic()
        if now >= self._prune_at and not connections[self.database].in_atomic_block:
            self._prune_at = now + _PRUNE_EVERY
            self.prune()

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Turn an outage into ``CoordinationError`` and drop the connection if it is broken."""
        alias = self.database
        try:
            yield
        except (OperationalError, InterfaceError) as error:
            connection = connections[alias]
            if not connection.in_atomic_block:
                connection.close_if_unusable_or_obsolete()
            raise CoordinationError(_unreachable(alias, error)) from error


def _unreachable(alias: str, error: Exception) -> str:
    return f"Database {alias!r} (KJO['COORDINATION']) cannot be used: {error}"


def _stored(name: str) -> str:
    """Return the name as the column holds it: a long one ends in a hash of the whole."""
    if len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode()).hexdigest()
    return f"{name[: _LONGEST_NAME - len(digest) - 1]}:{digest}"
