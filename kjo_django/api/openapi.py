"""How an endpoint tells of itself in the OpenAPI schema."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from drf_spectacular.extensions import OpenApiSerializerExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers

from kjo_django.api.fields import Body, Shape
from kjo_django.api.problems import CONTENT_TYPE, TYPE

F = TypeVar("F", bound=Callable[..., Any])

ALWAYS = (400, 401, 403, 406, 429)
"""Problems every endpoint may answer with; those that read a body add two."""
WITH_BODY = (413, 415)
MEANINGS = {
    400: "The request is not valid; `errors` tells which fields. Nothing was changed.",
    401: "Nobody is logged in, and there is a way to say who one is.",
    403: "A permission is missing, or nobody is logged in.",
    404: "There is none with this id or name.",
    406: "The answer cannot be had in the wanted format.",
    409: "It cannot be done in the present state; nothing was changed.",
    413: "The body is too long.",
    415: "The body is not JSON.",
    429: "Too many requests; `Retry-After` tells the seconds to wait.",
    503: "A server that is needed is away; try again later.",
}


class BodyExtension(OpenApiSerializerExtension):  # type: ignore[no-untyped-call]
    """Bodies say that they take no other members."""

    target_class = Body
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> Any:
        """Return the schema REST framework's fields give, closed."""
        schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        return schema | {"additionalProperties": False}


class ProblemError(Shape):
    """What is wrong with one field."""

    field = serializers.CharField(
        allow_blank=True, help_text="Its path, as in `payload.order_id`; empty: the whole body."
    )
    detail = serializers.CharField()
    code = serializers.CharField()


class Problem(Shape):
    """An error, as RFC 9457 wants it."""

    type = serializers.CharField(help_text=f"`{TYPE}` and a code.")
    title = serializers.CharField()
    status = serializers.IntegerField()
    detail = serializers.CharField()
    errors = ProblemError(many=True, help_text="One for each field that is wrong.")


def page_of(row: type[Shape]) -> type[Shape]:
    """Return the shape of a page of such rows."""
    members = {
        "results": row(many=True),
        "next_cursor": serializers.CharField(
            allow_null=True, help_text="`cursor` of the next page; null: this is the last."
        ),
        "__doc__": "A page; it may hold fewer rows than asked for and still not be the last.",
    }
    return type(f"{row.__name__}Page", (Shape,), members)


ID = OpenApiParameter(
    "id", OpenApiTypes.UUID, OpenApiParameter.PATH, description="The id of the row."
)


def documented(
    operation_id: str,
    tag: str,
    answers: dict[int, Any],
    *,
    body: Any = None,
    query: type[Shape] | None = None,
    path: Sequence[OpenApiParameter] = (),
    problems: Sequence[int] = (),
    examples: Sequence[OpenApiExample] = (),
) -> Callable[[F], F]:
    """Describe a method of a view.

    :param operation_id: unique and stable: clients generated from the schema name methods after it.
    :param answers: shapes of its answers by status, or ``(shape, meaning)``.
    :param problems: statuses of problems beside those everything may answer with.
    """
    responses: dict[Any, Any] = {}
    for status, answer in answers.items():
        shape, meaning = answer if isinstance(answer, tuple) else (answer, answer.__doc__)
        responses[status] = OpenApiResponse(shape, description=meaning)
    for status in sorted({*ALWAYS, *problems, *(WITH_BODY if body else ())}):
        responses[status, CONTENT_TYPE] = OpenApiResponse(Problem, description=MEANINGS[status])
    return extend_schema(
        operation_id=f"kjo_{operation_id}",
        tags=[f"kjo: {tag}"],
        request=body,
        responses=responses,
        parameters=[*path, *([query] if query else [])],
        examples=list(examples),
    )
