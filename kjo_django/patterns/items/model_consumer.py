"""``ModelConsumer``: a template consumer whose items are rows of a model."""

from __future__ import annotations

from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import connections, models, router
from django.utils import timezone

from kjo_django.patterns.items.consumer import AbstractConsumer
from kjo_django.patterns.items.model_producer import number_of


class ModelConsumer(AbstractConsumer, register=False):
    """Declares a model and its state field, writes ``process``; everything else is done.

    ``completed_at_field`` and ``failed_at_field``, where given, get the time of that.
    """

    model: ClassVar[type[models.Model]]
    state_field: ClassVar[str] = "state"
    key_field: ClassVar[str | None] = None
    """Entry of the message's ``data`` that logs name an item by; its id if not given."""
    completed_at_field: ClassVar[str | None] = None
    failed_at_field: ClassVar[str | None] = None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls._handler is not None and not hasattr(cls, "model"):
            raise ImproperlyConfigured(f"{cls.__name__} needs a model.")

    def get_queryset(self) -> models.QuerySet[Any]:
        """Return the rows that are items, on the database they are written to."""
        return self.model._default_manager.using(self.get_database())

    def get_database(self) -> str:
        """Return where the router has the model written."""
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
        """Return whether the row is completed, or gone: then nothing is left to do.

        Inside a transaction the row stays locked until its end: of two that got here without
        coordination, the second waits and then sees what the first has done.
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
        """Set the state, and the time, unless the item was completed after all."""
        rows = self.get_queryset().filter(pk=item_id)
        done = {self.state_field: self._state("COMPLETED")}
        self._set(rows.exclude(**done), "FAILED", self.failed_at_field)

    def _set(self, rows: models.QuerySet[Any], state: str, time_field: str | None) -> None:
        changes: dict[str, Any] = {self.state_field: self._state(state)}
        if time_field:
            changes[time_field] = timezone.now()
        rows.update(**changes)

    def _state(self, name: str) -> Any:
        return number_of(self.STATES, name)
