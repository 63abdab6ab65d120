"""``ModelProducer``: a template producer whose items are rows of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from typing import Any, ClassVar
from uuid import UUID

from django.core.exceptions import ImproperlyConfigured
from django.db import models

from kjo_django.patterns.items import windows
from kjo_django.patterns.items.producer import AbstractProducer
from kjo_django.states import ItemState

_PLAIN = (str, int, float, bool, list, dict, date, datetime, time, timedelta, Decimal, UUID)


class ModelProducer(AbstractProducer):
    """Declares a model, the fields that matter and where to send; everything else is done.

    ``model`` or ``queryset``; ``fields``: what is sent, all concrete fields if not given;
    ``hash_fields``: those whose change sends an item again, all that is sent if not given;
    ``key_field``: what logs name an item by.
    """

    model: ClassVar[type[models.Model] | None] = None
    queryset: ClassVar[models.QuerySet[Any] | None] = None
    fields: ClassVar[Sequence[str] | None] = None
    key_field: ClassVar[str | None] = None
    state_field: ClassVar[str] = "state"
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
        return windows.take(self._matching(criteria), limit, excluded_ids, self.get_item_id)

    def windows(
        self, criteria: dict[str, Any], limit: int, excluded_ids: Collection[str]
    ) -> Iterator[list[Any]]:
        """Yield pages, each row once."""
        excluded = set(excluded_ids)
        for page in windows.pages(self._matching(criteria), limit):
            rows = [row for row in page if self.get_item_id(row) not in excluded]
            if rows:
                yield rows

    def _matching(self, criteria: Mapping[str, Any]) -> models.QuerySet[Any]:
        return self.get_queryset().filter(**self.resolve_criteria(criteria))

    def resolve_criteria(self, criteria: Mapping[str, Any]) -> dict[str, Any]:
        """Return lookups of the queryset; the name of a state becomes its number (KJO-70)."""
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
