"""``ModelProducer`` and ``ModelConsumer``: template classes whose items are rows of a model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models, router

from kjo_django.clock import CLOCK
from kjo_django.patterns.items.consumer import AbstractConsumer
from kjo_django.patterns.items.producer import AbstractProducer
from kjo_django.states import ItemState

_PLAIN = (str, int, float, bool, list, dict, date, datetime, time, timedelta, Decimal, UUID)


class ModelProducer(AbstractProducer):
    """A producer of a model's rows: declare the model, its fields and where to send.

    It has the three methods that ``AbstractProducer`` asks for. It takes rows in the order of their
    primary key.
    """

    model: ClassVar[type[models.Model] | None] = None
    """The model whose rows are items; this or ``queryset`` is required."""
    queryset: ClassVar[models.QuerySet[Any] | None] = None
    """The rows that are items, where these are not all of ``model``."""
    fields: ClassVar[Sequence[str] | None] = None
    """The fields that are sent; all concrete fields if not given."""
    key_field: ClassVar[str | None] = None
    """The field that names an item in logs; ``name`` or ``email``, else the id, if not given."""
    state_field: ClassVar[str] = "state"
    """The field for which criteria may name a state."""
    STATES: ClassVar[Any] = ItemState
    """Names of states that criteria may use: ``{"state": "FAILED"}``."""

    def __init__(self, config: Mapping[str, Any] | None = None) -> None:
        super().__init__(config)
        if self.model is None and self.queryset is None:
            raise ImproperlyConfigured(f"{type(self).__name__} needs a model or a queryset.")

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return the rows items are taken from."""
        if self.queryset is not None:
            return self.queryset.all()
        assert self.model is not None
        return self.model._default_manager.all()

    def get_next_processing_items(
        self, criteria: dict[str, Any], limit: int, excluded_ids: Collection[str]
    ) -> list[Any]:
        """Filter by ``criteria``, in the order of the primary key."""
        return take(self._matching(criteria), limit, excluded_ids, self.get_item_id)

    def windows(
        self, criteria: dict[str, Any], limit: int, excluded_ids: Collection[str]
    ) -> Iterator[list[Any]]:
        """Yield pages, each row once."""
        excluded = set(excluded_ids)
        for page in pages(self._matching(criteria), limit):
            rows = [row for row in page if self.get_item_id(row) not in excluded]
            if rows:
                yield rows

    def _matching(self, criteria: Mapping[str, Any]) -> models.QuerySet[Any]:
        return self.get_queryset().filter(**self.resolve_criteria(criteria))

    def resolve_criteria(self, criteria: Mapping[str, Any]) -> dict[str, Any]:
        """Return lookups of the queryset; the name of a state becomes its number.

        :param criteria: what was given to ``produce_messages``.
        """
        resolved = dict(criteria)
        state = resolved.get(self.state_field)
        if isinstance(state, str):
            resolved[self.state_field] = number_of(self.STATES, state)
        return resolved

    def get_item_id(self, item: Any) -> str:
        """Return the primary key."""
        return str(item.pk)

    def get_item_key(self, item: Any) -> str:
        """Return ``key_field``, else a name or an e-mail address, else the id."""
        names = [self.key_field] if self.key_field else ["name", "email"]
        found = (getattr(item, name, None) for name in names if name)
        return next((str(value) for value in found if value), self.get_item_id(item))

    def serialize_item(self, item: Any) -> dict[str, Any]:
        """Return the fields as JSON can write them; a foreign key is its id."""
        wanted = self.fields
        return {
            field.attname: _value_of(field, item)
            for field in item._meta.concrete_fields
            if wanted is None or field.name in wanted or field.attname in wanted
        }


def number_of(states: Any, name: str) -> Any:
    """Return the value of the state of this name, or the text itself where there is none."""
    found = states.get(name) if isinstance(states, Mapping) else getattr(states, name, None)
    return name if found is None else found


def _value_of(field: models.Field[Any, Any], item: Any) -> Any:
    value = field.value_from_object(item)
    return value if value is None or isinstance(value, _PLAIN) else field.value_to_string(item)


class ModelConsumer(AbstractConsumer, register=False):
    """A consumer of a model's rows: declare the model and the field of its state, and write
    ``process``.
    """

    model: ClassVar[type[models.Model]]
    """The model whose rows are items. Required."""
    state_field: ClassVar[str] = "state"
    """The field that holds an item's state."""
    key_field: ClassVar[str | None] = None
    """The entry of the message's ``data`` that names an item in logs; its id if not given."""
    completed_at_field: ClassVar[str | None] = None
    """The field that is set to the time at which the item was completed, if there is one."""
    failed_at_field: ClassVar[str | None] = None
    """The field that is set to the time at which the item failed for good, if there is one."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls._handler is not None and not hasattr(cls, "model"):
            raise ImproperlyConfigured(f"{cls.__name__} needs a model.")

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return the rows that are items, on the database they are written to."""
        return self.model._default_manager.using(self.get_database())

    def get_database(self) -> str:
        """Return the database that the router chooses for writes of the model."""
        return router.db_for_write(self.model)

    def get_message_id(self, message: dict[str, Any]) -> Any:
        """Return the message's ``id``."""
        return message["id"]

    def get_message_key(self, message: dict[str, Any]) -> Any:
        """Return ``key_field`` of the data, else the id."""
        data = message.get("data")
        found = data.get(self.key_field) if self.key_field and isinstance(data, dict) else None
        return found or message["id"]

    def is_item_completed(self, item_id: str) -> bool:
        """Return whether the row is completed or deleted.

        Inside a transaction the row stays locked until its end: of two consumers without
        coordination, the second waits and then sees the first one's state.
        """
        rows = self.get_queryset().filter(pk=item_id)
        connection = connections[self.get_database()]
        if connection.in_atomic_block and connection.features.has_select_for_update:
            rows = rows.select_for_update(no_key=connection.features.has_select_for_no_key_update)
        states = list(rows.values_list(self.state_field, flat=True))
        return not states or states[0] == self._state("COMPLETED")

    def mark_item_as_completed(self, item_id: str) -> None:
        """Set the state, and the time."""
        self._set(self.get_queryset().filter(pk=item_id), "COMPLETED", self.completed_at_field)

    def mark_item_as_failed(self, item_id: str) -> None:
        """Set the state and the time, unless the item is completed."""
        rows = self.get_queryset().filter(pk=item_id)
        done = {self.state_field: self._state("COMPLETED")}
        self._set(rows.exclude(**done), "FAILED", self.failed_at_field)

    def _set(self, rows: models.QuerySet[Any], state: str, time_field: str | None) -> None:
        changes: dict[str, Any] = {self.state_field: self._state(state)}
        if time_field:
            changes[time_field] = CLOCK.now()
        rows.update(**changes)

    def _state(self, name: str) -> Any:
        return number_of(self.STATES, name)


# --- Reading a queryset past any number of excluded rows ------------------------------------------


SMALLEST_PAGE = 100
LARGEST_PAGE = 5000


def pages(queryset: models.QuerySet[Any], size: int) -> Iterator[list[Any]]:
    """Yield the rows in pages, in the order of their primary key.

    Each page starts after the last row of the one before, so rows that change or vanish meanwhile
    do not hide others.
    """
    ordered = queryset.order_by("pk")
    last: Any = None
    size = max(size, SMALLEST_PAGE)
    while True:
        page = list((ordered if last is None else ordered.filter(pk__gt=last))[:size])
        if page:
            yield page
        if len(page) < size:
            return
        last = page[-1].pk
        size = min(2 * size, max(size, LARGEST_PAGE))


def take(
    queryset: models.QuerySet[Any],
    limit: int,
    excluded_ids: Collection[str],
    id_of: Callable[[Any], str] = lambda row: str(row.pk),
) -> list[Any]:
    """Return the first ``limit`` rows whose id is not excluded.

    The excluded ids are not part of the query, so their number meets no limit of the database.
    """
    excluded = excluded_ids if isinstance(excluded_ids, (set, frozenset)) else set(excluded_ids)
    found: list[Any] = []
    for page in pages(queryset, limit + min(len(excluded), LARGEST_PAGE)):
        found += [row for row in page if id_of(row) not in excluded][: limit - len(found)]
        if len(found) >= limit:
            break
    return found
