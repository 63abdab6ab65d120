"""Strict fields: they accept what the schema says, without conversion."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from django.db import models
from django.db.models import Model
from django.utils import timezone
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import extend_schema_field, extend_schema_serializer
from rest_framework import serializers

from kjo_django.operations.actions import Input, Kind
from kjo_django.retries import LONGEST_DELAY

NAME_PREFIX = "Kjo"
"""Prefix of every component in the schema, since the project has components of its own."""


class Shape(serializers.Serializer):  # type: ignore[misc]
    """Members of an answer. Each is always present unless it has ``required=False``."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        extend_schema_serializer(component_name=NAME_PREFIX + cls.__name__)(cls)


def shape(name: str, about: str, /, *bases: type[Any], **members: Any) -> type[Any]:
    """Return a shape with these members and those of its bases; a plain one without bases.

    :param about: its description in the schema.
    """
    return type(name, bases or (Shape,), {"__doc__": about, **members})


def columns(model: type[Model], names: Sequence[str]) -> dict[str, serializers.Field]:
    """Return the members that show columns of a model."""
    return {name: _column(model._meta.get_field(name)) for name in names}


def _column(column: Any) -> serializers.Field:
    plain: dict[str, Any] = {"allow_null": True} if column.null else {}
    if isinstance(column, models.CharField | models.TextField):
        return serializers.CharField(**plain, **({"allow_blank": True} if column.blank else {}))
    if isinstance(column, models.IntegerField):
        return serializers.IntegerField(**plain)
    if isinstance(column, models.FloatField):
        return serializers.FloatField(**plain)
    if isinstance(column, models.BooleanField):
        return serializers.BooleanField(**plain)
    if isinstance(column, models.DateTimeField):
        return serializers.DateTimeField(**plain)
    return serializers.UUIDField(**plain)


class RequestShape(Shape):
    """Members of a request: of a body, or the parameters of a query. Unknown ones are refused: a
    filter with a typing error would select everything.
    """

    def to_internal_value(self, data: Any) -> Any:
        """Validate, unknown members too."""
        if isinstance(data, dict):
            unknown = sorted(str(name) for name in data if name not in self.fields)
            if unknown:
                text = f"Unknown; known are {', '.join(self.fields)}."
                raise serializers.ValidationError(dict.fromkeys(unknown, text), code="unknown")
        return super().to_internal_value(data)


# --- Of bodies: JSON has types --------------------------------------------------------------------


class Text(serializers.CharField):  # type: ignore[misc]
    """A string without conversion or trimming; NUL and lone surrogates are refused."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("trim_whitespace", False)
        if not kwargs.get("allow_blank"):
            kwargs.setdefault("min_length", 1)  # said in the schema too
        super().__init__(**kwargs)

    def to_internal_value(self, data: Any) -> str:
        """Return the string."""
        if not isinstance(data, str):
            self.fail("invalid")
        return str(super().to_internal_value(data))


class Identifier(serializers.UUIDField):  # type: ignore[misc]
    """A UUID as text; REST framework's own field also accepts numbers and false."""

    def to_internal_value(self, data: Any) -> Any:
        """Return the UUID."""
        if not isinstance(data, str):
            self.fail("invalid", value=data)
        return super().to_internal_value(data)


class Flag(serializers.BooleanField):  # type: ignore[misc]
    """true or false, not "yes" and not 1."""

    def to_internal_value(self, data: Any) -> bool:
        """Return the boolean."""
        if not isinstance(data, bool):
            self.fail("invalid", input=data)
        return bool(data)


class Whole(serializers.IntegerField):  # type: ignore[misc]
    """A whole number, not "1" and not true."""

    def to_internal_value(self, data: Any) -> int:
        """Return the number."""
        if isinstance(data, bool) or not isinstance(data, int | float) or data != data // 1:
            self.fail("invalid")
        return int(data)


class Number(serializers.FloatField):  # type: ignore[misc]
    """A finite number, not "1" and not true."""

    def to_internal_value(self, data: Any) -> float:
        """Return the number."""
        if isinstance(data, bool) or not isinstance(data, int | float):
            self.fail("invalid")
        return finite(self, data)


class QueryNumber(serializers.FloatField):  # type: ignore[misc]
    """A finite number in a query."""

    def to_internal_value(self, data: Any) -> float:
        """Return the number."""
        return finite(self, super().to_internal_value(data))


def finite(field: serializers.Field, value: Any) -> float:
    """Return the number as a float; NaN is refused, since it passes every comparison."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        field.fail("invalid")
    return number


class Seconds(Number):
    """A duration in seconds."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("min_value", 0)
        kwargs.setdefault("max_value", LONGEST_DELAY.total_seconds())
        super().__init__(**kwargs)

    def to_internal_value(self, data: Any) -> timedelta:  # type: ignore[override]
        """Return the duration."""
        number = super().to_internal_value(data)
        self.run_validators(number)
        return timedelta(seconds=number)

    def run_validators(self, value: Any) -> None:
        """Check the bounds in seconds; the duration is checked already."""
        if not isinstance(value, timedelta):
            super().run_validators(value)


EARLIEST, LATEST = datetime(1970, 1, 1, tzinfo=UTC), datetime(9000, 1, 1, tzinfo=UTC)
"""Bounds of times that every database and time zone can hold."""


class Moment(serializers.DateTimeField):  # type: ignore[misc]
    """A date and time with its offset."""

    default_error_messages = {
        "naive": "Give the offset too, as in 2030-01-31T12:00:00Z.",
        "range": "Give a moment between the years 1970 and 9000.",
    }

    def to_internal_value(self, value: Any) -> datetime:
        """Return the time."""
        if not isinstance(value, str):
            self.fail("invalid", format="ISO 8601")
        moment: datetime = super().to_internal_value(value)
        if not EARLIEST <= moment <= LATEST:
            self.fail("range")
        return moment

    def enforce_timezone(self, value: datetime) -> Any:
        """Refuse a time without an offset."""
        if timezone.is_naive(value):
            self.fail("naive")
        return super().enforce_timezone(value)


@extend_schema_field(OpenApiTypes.ANY)
class JSONValue(serializers.Field):  # type: ignore[misc]
    """Any JSON. REST framework's own field serializes the value to check it, which fails on deep
    nesting.
    """

    def to_internal_value(self, data: Any) -> Any:
        """Return it as it is."""
        return data

    def to_representation(self, value: Any) -> Any:
        """Return it as it is."""
        return value


@extend_schema_field({"type": "object", "additionalProperties": {}})
class JSONObject(JSONValue):
    """A JSON object with any members."""

    default_error_messages = {"invalid": "Not an object."}

    def to_internal_value(self, data: Any) -> dict[str, Any]:
        """Return it as it is."""
        if not isinstance(data, dict):
            self.fail("invalid")
        return dict(data)


class NamedChoice(Text):
    """One of several fixed values.

    :param name: of the component in the schema. A choice field's name would be made of the field's,
        and could collide with the project's.
    """

    default_error_messages = {"unknown": "Not one of {words}."}

    def __init__(self, name: str, words: Iterable[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.words = [str(word) for word in words]
        schema = {"type": "string", "enum": self.words}
        extend_schema_field(schema, component_name=NAME_PREFIX + name)(self)

    def to_internal_value(self, data: Any) -> str:
        """Return the value."""
        word = super().to_internal_value(data)
        if word not in self.words:
            self.fail("unknown", words=", ".join(self.words))
        return word

    def to_representation(self, value: Any) -> str:
        """Return the value."""
        return str(value)


# --- Inputs of actions ---------------------------------------------------------------------------


def input_field(given: Input) -> serializers.Field:
    """Return the member of a body for an input of an action."""
    common: dict[str, Any] = {"help_text": given.help}
    if given.kind is Kind.FLAG:
        return Flag(default=False, **common)
    if not given.is_required:
        common["required"] = False
    if given.is_nullable:
        common["allow_null"] = True
    numbers = {"min_value": given.minimum, "max_value": given.maximum}
    match given.kind:
        case Kind.WHOLE:
            return Whole(**common, **numbers)
        case Kind.NUMBER:
            return Number(**common, **numbers)
        case Kind.JSON:
            return JSONValue(**common)
        case Kind.CHOICE:
            name = f"Schedule{given.name.title().replace('_', '')}"
            return NamedChoice(name, [value for value, _label in given.choices], **common)
        case Kind.MOMENT:
            return Moment(**common)
        case _:
            is_trimmed = given.kind is Kind.TEXT
            return Text(**common, max_length=given.max_length, trim_whitespace=is_trimmed)
