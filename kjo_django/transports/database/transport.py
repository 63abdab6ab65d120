"""The default transport: a message table in the project's own database. No server needed.

``publish`` inserts rows inside whatever transaction the caller is in, so a record exists if and
only if that transaction commits; a group of consumers in any number of processes claims them under
leases. Runs on SQLite, PostgreSQL and MariaDB.

``OPTIONS``:

``DATABASE``
    Alias of the database with the tables; ``KJO["DATABASE"]`` or the router's choice if not given.
``GROUPS``
    ``{topic: [consumer groups]}`` known beforehand; filled from ``QUEUES``.
``LEASE``
    How long a consumer may be silent before its records go to others (timedelta or seconds);
    overrides what the subscriber asks for.
``POLL_INTERVAL``
    The longest wait between two looks at an idle table (timedelta or seconds), default 0.2 s.
    Where the consumer hears of publications it is the longest wait only while rows wait for their
    keys; an idle consumer looks when the next row is due, and each second.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import timedelta
from functools import cached_property
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, router
from django.db.models.signals import post_migrate
from django.utils.translation import gettext as _

from kjo_django.conf import databases_on, get_settings
from kjo_django.exceptions import PublishError
from kjo_django.models import TransportMessage, TransportSubscription
from kjo_django.probing import answer_within
from kjo_django.store import store_for
from kjo_django.store.servers import mend_connection
from kjo_django.transports.base import (
    AssignedCallback,
    Capabilities,
    OutgoingRecord,
    Published,
    RevokedCallback,
    TopicPartition,
    Transport,
)
from kjo_django.transports.database.insertion import insert_rows, rows_of
from kjo_django.transports.database.runs import running
from kjo_django.transports.database.subscription import (
    OUTAGES,
    DatabaseSubscription,
    count_lag,
)
from kjo_django.values import duration

_GROUPS_KEPT = 3.0
_MAX_TOPIC = 249
_NOBODY = ("",)

_generation = 0
"""Grows whenever what processes remember of the groups may be wrong."""


def forget_groups(**kwargs: object) -> None:
    """Make every transport of this process read the groups again."""
    global _generation
    _generation += 1


# ``migrate`` and ``flush`` send it: the tables may just have been emptied.
post_migrate.connect(forget_groups, dispatch_uid="kjo_django.transports.database")


class DatabaseTransport(Transport):
    """See the module."""

    capabilities = Capabilities(
        ordering=True,
        delay=True,
        transactional=True,
        replay=False,
        priority=True,
        counts_deliveries=True,
    )
    known_options = frozenset({"DATABASE", "GROUPS", "LEASE", "POLL_INTERVAL"})

    def __init__(self, alias: str, options: Mapping[str, Any]) -> None:
        super().__init__(alias, options)
        self._lease = self._read_duration("LEASE")
        self._poll_interval = self._read_duration("POLL_INTERVAL") or timedelta(milliseconds=200)
        self._groups: dict[str, tuple[int, float, tuple[str, ...]]] = {}

    def _read_duration(self, option: str) -> timedelta | None:
        value = self.options.get(option)
        try:
            return None if value is None else duration(value)
        except ValueError as error:
            raise ImproperlyConfigured(
                f"KJO['TRANSPORTS'][{self.alias!r}]['OPTIONS'][{option!r}] must be {error}."
            ) from None

    @cached_property
    def database(self) -> str:
        """The alias of the database with the tables."""
        option: str | None = self.options.get("DATABASE")
        return option or self._jobs_database()

    def _jobs_database(self) -> str:
        conf = get_settings()
        usual = conf.database or router.db_for_write(TransportMessage)
        on_it = {database or usual for database in databases_on(conf, self.alias)}
        return on_it.pop() if len(on_it) == 1 else usual

    # --- Publishing -------------------------------------------------------------------------------

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Insert the records in the caller's transaction, one row for each group that reads them.

        The offset is the id of the row (the first group's, if there are several), where the
        database returns it.
        """
        results = [_refusal(record) for record in records]
        accepted = [(n, record) for n, record in enumerate(records) if results[n].error is None]
        if not accepted:
            return results
        alias = self.database
        try:
            groups = self._groups_of(alias, {record.topic for _, record in accepted})
            rows = rows_of([record for _, record in accepted], groups, self.clock.now())
            ids = insert_rows(alias, rows)
        except OUTAGES as error:
            mend_connection(alias)
            raise PublishError(f"Database {alias!r} refused the records: {error}") from error
        first = 0
        for index, record in accepted:
            results[index] = Published(partition=0, offset=ids[first] if ids else None)
            first += len(groups[record.topic])
        return results

    def _groups_of(self, alias: str, topics: set[str]) -> dict[str, Sequence[str]]:
        """Return the groups of each topic, never none: rows of ``""`` wait for the first to come.

        Read from the database every few seconds, so another process learns of a new group a moment
        later: what is published meanwhile counts as published before it subscribed.
        """
        oldest = self.clock.monotonic() - _GROUPS_KEPT
        found: dict[str, Sequence[str]] = {}
        for topic in topics:
            generation, read_at, groups = self._groups.get(topic, (-1, 0.0, ()))
            if generation == _generation and read_at > oldest:
                found[topic] = groups
        missing = topics.difference(found)
        if missing:
            found.update(self._read_groups(alias, missing))
        return found

    def _read_groups(self, alias: str, topics: set[str]) -> dict[str, Sequence[str]]:
        if connections[alias].in_atomic_block:
            # The INSERT comes next, in the same transaction.
            store_for(alias).take_write_lock(TransportSubscription)
        generation = _generation
        read_at = self.clock.monotonic()
        groups: dict[str, dict[str, None]] = {
            topic: dict.fromkeys(self.options.get("GROUPS", {}).get(topic, ())) for topic in topics
        }
        rows = TransportSubscription.objects.using(alias).filter(topic__in=topics).order_by("id")
        for topic, group in rows.values_list("topic", "consumer_group"):
            groups[topic][group] = None
        found: dict[str, Sequence[str]] = {}
        for topic, names in groups.items():
            found[topic] = tuple(names) or _NOBODY
            if names:  # "nobody" is not worth remembering: somebody may come at any moment
                self._groups[topic] = (generation, read_at, tuple(names))
        return found

    # --- Subscribing ------------------------------------------------------------------------------

    def subscribe(
        self,
        topics: Sequence[str],
        group: str,
        *,
        lease: timedelta = timedelta(seconds=30),
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> DatabaseSubscription:
        """Register the group for the topics and open its view of them.

        What is published from now on gets a row for the group; what was published before belongs
        to it only if nobody had subscribed yet. If the database is away just now, ``poll``
        registers later.
        """
        return DatabaseSubscription(
            self.database,
            topics,
            group,
            joins_transactions=self.database == self._jobs_database(),
            lease=self._lease or lease,
            poll_interval=self._poll_interval.total_seconds(),
            clock=self.clock,
            on_registered=forget_groups,
            on_revoked=on_revoked,
            on_assigned=on_assigned,
        )

    def close(self) -> None:
        """Nothing is kept open: connections are Django's own."""

    def lag(self, topics: Sequence[str], group: str) -> dict[TopicPartition, int]:
        """Count the group's rows by topic, those in flight included, delayed ones before their time
        not."""
        try:
            return count_lag(self.database, topics, group, self.clock.now())
        except OUTAGES as error:
            mend_connection(self.database)
            raise PublishError(f"Database {self.database!r} cannot be read: {error}") from error

    def running(
        self, message_ids: Collection[str] | None = None, *, most: int | None = None
    ) -> dict[str, str]:
        """See ``runs``."""
        try:
            return running(self.database, self.clock, message_ids, most)
        except OUTAGES as error:
            mend_connection(self.database)
            raise PublishError(f"Database {self.database!r} cannot be read: {error}") from error

    def probe(self, timeout: float) -> str:
        """Look for a row."""
        alias = self.database

        def look() -> str:
            TransportMessage.objects.using(alias).exists()
            names = {"vendor": connections[alias].display_name, "alias": alias}
            return _("%(vendor)s database %(alias)r") % names

        try:
            return answer_within(timeout, look)
        except Exception as error:
            raise PublishError(f"Database {alias!r} cannot be used: {error}") from error


def _refusal(record: OutgoingRecord) -> Published:
    """Refuse what no row can hold; SQLite would store it and others would fail the whole batch."""
    if not record.topic or len(record.topic) > _MAX_TOPIC:
        return Published(error=f"a topic's name has 1 to {_MAX_TOPIC} characters")
    return Published()
