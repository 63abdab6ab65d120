"""The idempotency table: one row per message whose database effects are committed."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from django.db import connections, models
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from kjo_django.ids import uuid7, uuid7_texts, uuid7s
from kjo_django.store.postgres import text_array


class EventKey(NamedTuple):
    """What makes an effect unique, in the order of the constraint."""

    event_id: str
    service_name: str
    event_type: str


class LongNameIndex(models.Index):
    """An index whose name is the one other systems sharing the table know (KII-19).

    Django limits names to 30 characters for Oracle's sake; PostgreSQL, SQLite and MySQL take 63.
    """

    max_name_length = 63


class ProcessedEventQuerySet(models.QuerySet["ProcessedEvent"]):
    """Marks events; must run inside the transaction that carries their effects."""

    def mark(self, keys: Sequence[EventKey], *, now: Any = None) -> set[EventKey]:
        """Insert a marker for each key and return those that were new.

        One INSERT … ON CONFLICT DO NOTHING. A concurrent transaction marking the same
        key blocks this one until it ends: committed, the key is a duplicate here; rolled back, it
        is new here. Keys are inserted in one fixed order, so two groups never deadlock.
        """
        if not keys:
            return set()
        now = now or timezone.now()
        ordered = sorted(set(keys))
        connection = connections[self.db]
        if connection.vendor == "postgresql":
            marking = Marking(ordered, now)
            with connection.cursor() as cursor:
                cursor.execute(*marking.statement)
                return marking.fresh(cursor, cursor.rowcount)
        if connection.vendor == "sqlite":
            return _mark_one_by_one(connection, ordered, now)
        times = {"processed_at": now, "created_at": now, "updated_at": now}
        rows = [ProcessedEvent(**key._asdict(), **times) for key in ordered]
        self.bulk_create(rows, ignore_conflicts=True)
        # Without ON CONFLICT … RETURNING: ours are the rows that carry the ids minted above.
        ours = set(self.filter(pk__in=[row.pk for row in rows]).values_list("pk", flat=True))
        return {row.event_key for row in rows if row.pk in ours}

    def known(self, keys: Collection[EventKey]) -> set[EventKey]:
        """Return those of the keys that are marked."""
        if not keys:
            return set()
        ids = sorted({key.event_id for key in keys})
        services = sorted({key.service_name for key in keys})
        connection = connections[self.db]
        if connection.vendor == "postgresql":
            with connection.cursor() as cursor:
                cursor.execute(_KNOWN, [ids, services])
                rows = cursor.fetchall()
        else:
            marked = self.filter(service_name__in=services, event_id__in=ids).order_by()
            rows = list(marked.values_list(*EventKey._fields))
        return {EventKey(*row) for row in rows}.intersection(keys)

    def unmark(self, keys: Collection[EventKey]) -> None:
        """Take markers of this transaction back: their handlers failed or must not run."""
        for service, event_type in {(key.service_name, key.event_type) for key in keys}:
            self.filter(
                service_name=service,
                event_type=event_type,
                event_id__in=[
                    key.event_id
                    for key in keys
                    if (key.service_name, key.event_type) == (service, event_type)
                ],
            ).delete()


_INSERT = """INSERT INTO processed_events
    (id, event_id, service_name, event_type, processed_at, created_at, updated_at)
"""
_UNLESS_KNOWN = " ON CONFLICT DO NOTHING"
_FROM_ARRAYS = f"""{_INSERT}
SELECT v.id, v.event_id, v.service_name, v.event_type, v.moment, v.moment, v.moment
FROM (
    SELECT *, %s::timestamptz AS moment
    FROM unnest(%s::uuid[], %s::text[], %s::text[], %s::text[])
        AS u (id, event_id, service_name, event_type)
) AS v {_UNLESS_KNOWN}
"""  # noqa: S608 - constants of this module; values are parameters
_OURS = """
SELECT event_id, service_name, event_type FROM processed_events WHERE id = ANY(%s::uuid[])
"""

_KNOWN = """SELECT event_id, service_name, event_type FROM processed_events
WHERE event_id = ANY(%s::text[]) AND service_name = ANY(%s::text[])
"""


class Marking:
    """The INSERT of a group's markers on PostgreSQL: its text does not grow with the group, and
    nothing is returned where all are new, as they nearly always are.

    :param keys: without repeats, in the order all groups insert them.
    :param now: when they took effect (aware).
    """

    def __init__(self, keys: Sequence[EventKey], now: Any) -> None:
        self._keys = keys
        ids, services, types = zip(*keys, strict=True)
        self._minted = text_array(uuid7_texts(len(keys)))
        columns = [text_array(column) for column in (ids, services, types)]
        self.statement: tuple[str, list[Any]] = (_FROM_ARRAYS, [now, self._minted, *columns])

    def fresh(self, cursor: Any, inserted: int) -> set[EventKey]:
        """Return the keys that were new, given how many rows it inserted."""
        if inserted == len(self._keys):
            return set(self._keys)
        if not inserted:
            return set()
        # Ours are the rows that carry the ids minted for them.
        cursor.execute(_OURS, [self._minted])
        return {EventKey(*row) for row in cursor.fetchall()}


def _mark_one_by_one(connection: Any, keys: Sequence[EventKey], now: Any) -> set[EventKey]:
    """SQLite: one statement, executed for each; which were new is asked where not all were."""
    moment = connection.ops.adapt_datetimefield_value(now)
    minted = dict(zip((id.hex for id in uuid7s(len(keys))), keys, strict=True))
    with connection.cursor() as cursor:
        rows = [(id, *key, moment, moment, moment) for id, key in minted.items()]
        cursor.executemany(f"{_INSERT} VALUES ({_PLACES}) {_UNLESS_KNOWN}", rows)
        if cursor.rowcount == len(keys):
            return set(keys)
        if not cursor.rowcount:
            return set()
        ids = list(minted)
        fresh: set[EventKey] = set()
        for start in range(0, len(ids), _IDS_AT_ONCE):
            chunk = ids[start : start + _IDS_AT_ONCE]
            places = ", ".join(["%s"] * len(chunk))
            cursor.execute(
                f"SELECT id FROM processed_events WHERE id IN ({places})",  # noqa: S608 - places
                chunk,
            )
            fresh.update(minted[id] for (id,) in cursor.fetchall())
    return fresh


_PLACES = ", ".join(["%s"] * 7)
_IDS_AT_ONCE = 900
"""Below the 999 parameters an old SQLite takes."""


class ProcessedEvent(models.Model):
    """Event ``event_id`` of type ``event_type`` took effect for ``service_name`` (KII-17).

    Kept longer than any redelivery or replay can come (KII-F10); ``kjo_prune`` removes the rest.
    """

    id = models.UUIDField(primary_key=True, default=uuid7, editable=False)
    event_id = models.CharField(_("event id"), max_length=255)
    event_type = models.CharField(_("event type"), max_length=100)
    service_name = models.CharField(_("service name"), max_length=100)
    processed_at = models.DateTimeField(_("processed at"), default=timezone.now)
    event_data = models.JSONField(_("event data"), null=True, blank=True)
    created_at = models.DateTimeField(_("created at"), default=timezone.now)
    updated_at = models.DateTimeField(_("updated at"), default=timezone.now)

    objects = ProcessedEventQuerySet.as_manager()

    class Meta:
        db_table = "processed_events"
        verbose_name = _("processed event")
        verbose_name_plural = _("processed events")
        ordering = ("-id",)
        default_permissions = ("view",)
        constraints = (
            models.UniqueConstraint(
                fields=("event_id", "service_name", "event_type"),
                name="uk_processed_events_event_service",
            ),
        )
        indexes = (
            # Pruning by age. Of seed 5's other three, event_id is the constraint's prefix and
            # nothing asks by service or type alone.
            LongNameIndex(fields=("processed_at",), name="idx_processed_events_processed_at"),
        )

    def __str__(self) -> str:
        return f"{self.event_type} {self.event_id}"

    @property
    def event_key(self) -> EventKey:
        """The unique triple."""
        return EventKey(self.event_id, self.service_name, self.event_type)
