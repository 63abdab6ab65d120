"""What is unique, in the shape that costs least."""

from __future__ import annotations

from typing import Any

from django.db import models


class UniqueWhereGiven(models.UniqueConstraint):
    """Unique among the rows that have a value; in SQL, no two NULLs are the same anyway.

    Where the database has partial indexes, rows without a value are not in this one: to write them
    does not cost an entry. Elsewhere it is the usual constraint, with the same meaning.

    :param fields: names; those that may be NULL decide.
    """

    def __eq__(self, other: object) -> bool:
        # Or migrations would not tell it from the usual constraint.
        return isinstance(other, UniqueWhereGiven) and super().__eq__(other)

    __hash__ = None  # type: ignore[assignment] # as its base class

    def constraint_sql(self, model: Any, schema_editor: Any) -> Any:
        """For ``CREATE TABLE``."""
        return self._in(model, schema_editor).constraint_sql(model, schema_editor)

    def create_sql(self, model: Any, schema_editor: Any) -> Any:
        """For a table that is there."""
        return self._in(model, schema_editor).create_sql(model, schema_editor)

    def remove_sql(self, model: Any, schema_editor: Any) -> Any:
        """Of what ``create_sql`` made."""
        return self._in(model, schema_editor).remove_sql(model, schema_editor)

    def _in(self, model: Any, schema_editor: Any) -> models.UniqueConstraint:
        condition = None
        if schema_editor.connection.features.supports_partial_indexes:
            optional = [name for name in self.fields if model._meta.get_field(name).null]
            condition = models.Q(**{f"{name}__isnull": False for name in optional})
        return models.UniqueConstraint(fields=self.fields, name=self.name, condition=condition)
