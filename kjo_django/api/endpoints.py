"""How an endpoint is declared: a function, its permissions, its body, its answers and problems.

``endpoint`` makes a method of a function, and describes it in the OpenAPI schema; ``address`` makes
a view of one or more methods. What all views share is in ``KjoView``: permissions, problems, strict
bodies, audited changes.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from django.apps import apps
from django.http import Http404
from django.urls import reverse
from django.utils.http import urlencode
from drf_spectacular.extensions import OpenApiSerializerExtension
from drf_spectacular.types import OpenApiTypes
from drf_spectacular.utils import OpenApiExample, OpenApiParameter, OpenApiResponse, extend_schema
from rest_framework import serializers
from rest_framework.exceptions import NotAcceptable, PermissionDenied, ValidationError
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import APIView

from kjo_django.api import problems
from kjo_django.api.fields import RequestShape, Shape, shape
from kjo_django.api.problems import CONTENT_TYPE, TYPE, StrictJSONParser
from kjo_django.logs import get_logger
from kjo_django.operations.audit import audit_of
from kjo_django.operations.internal import UserActor
from kjo_django.runtime import databases, jobs_database, use_database

logger = get_logger("kjo_django")

VIEW_PAYLOAD = "view_payload"
DATABASE = "database"
"""The parameter that names the database."""


ALWAYS = (400, 401, 403, 406, 429)
"""Problems that every endpoint may answer with; those with a body have two more."""
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
    """Request bodies allow no further members."""

    target_class = RequestShape
    match_subclasses = True

    def map_serializer(self, auto_schema: Any, direction: Any) -> Any:
        """Return the schema REST framework's fields give, closed."""
        schema = auto_schema._map_serializer(self.target, direction, bypass_extensions=True)
        return schema | {"additionalProperties": False}


ProblemError = shape(
    "ProblemError",
    "What is wrong with one field.",
    field=serializers.CharField(
        allow_blank=True, help_text="Its path, as in `payload.order_id`; empty: the whole body."
    ),
    detail=serializers.CharField(),
    code=serializers.CharField(),
)


Problem = shape(
    "Problem",
    "An error, as RFC 9457 wants it.",
    type=serializers.CharField(help_text=f"`{TYPE}` and a code."),
    title=serializers.CharField(),
    status=serializers.IntegerField(),
    detail=serializers.CharField(),
    errors=ProblemError(many=True, help_text="One for each field that is wrong."),
)


def page_of(row: type[Any]) -> type[Any]:
    """Return the shape of a page of such rows."""
    members = {
        "results": row(many=True),
        "next_cursor": serializers.CharField(
            allow_null=True, help_text="`cursor` of the next page; null: this is the last."
        ),
        "__doc__": "A page; it may hold fewer rows than asked for and still not be the last.",
    }
    return type(f"{row.__name__}Page", (Shape,), members)


class HasPermissions(BasePermission):  # type: ignore[misc]
    """Asks for the permissions that the admin asks for."""

    def has_permission(self, request: Request, view: KjoView) -> bool:
        """Ask for every permission the view names for this method."""
        if not (request.user and request.user.is_authenticated):
            return False
        method = "GET" if request.method == "HEAD" else str(request.method)
        # A method the view does not have is answered as such, with 405.
        return all(may(request, codename) for codename in view.permissions.get(method, ()))


def may(request: Request, codename: str) -> bool:
    """Return whether the user has a permission of the app, such as ``view_payload``."""
    return bool(request.user.has_perm(f"kjo_django.{codename}"))


class KjoView(APIView):  # type: ignore[misc]
    """One address. Authentication, renderers and throttles are the project's own.

    :cvar permissions: the codenames each method needs, all of them.
    """

    permissions: ClassVar[Mapping[str, Sequence[str]]] = {}
    permission_classes = [HasPermissions]
    parser_classes = [StrictJSONParser]
    http_method_names = ["get", "head", "post", "patch"]

    @property
    def throttle_scope(self) -> str | None:
        """The throttle scope, ``kjo-read`` or ``kjo-write``, if the project has set its rate."""
        request = getattr(self, "request", None)
        is_reading = request is None or request.method in SAFE_METHODS
        scope = "kjo-read" if is_reading else "kjo-write"
        # ScopedRateThrottle takes a scope without a rate for a mistake, and answers 500.
        return scope if scope in (api_settings.DEFAULT_THROTTLE_RATES or {}) else None

    def get_exception_handler(self) -> Callable[..., Response | None]:
        """Answer errors as problem details, whatever the project's other views do."""
        return problems.handle

    def perform_content_negotiation(self, request: Request, force: bool = False) -> Any:
        """Answer 406 where ``?format=`` names a format that there is not, as for ``Accept``.

        REST framework answers 404: that there is no such job or queue.
        """
        try:
            return super().perform_content_negotiation(request, force)
        except Http404:
            raise NotAcceptable from None

    def finalize_response(
        self, request: Request, response: Response, *args: Any, **kwargs: Any
    ) -> Response:
        """Set the headers against content sniffing and shared caches."""
        response = super().finalize_response(request, response, *args, **kwargs)
        renderer = getattr(response, "accepted_renderer", None)
        if response.exception and getattr(renderer, "format", None) == "json":
            response.content_type = CONTENT_TYPE
        response["X-Content-Type-Options"] = "nosniff"
        response["Cache-Control"] = "private, no-store"
        return response

    def dispatch(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Answer from the database that ``?database=`` names."""
        wanted = request.GET.get(DATABASE)
        with use_database(wanted if wanted in databases() else databases()[0]):
            return super().dispatch(request, *args, **kwargs)

    def initial(self, request: Request, *args: Any, **kwargs: Any) -> None:
        """Check who asks, then that there is such a database."""
        super().initial(request, *args, **kwargs)
        wanted, known = request.query_params.get(DATABASE), databases()
        if wanted not in (None, *known) and request.method in self.allowed_methods:
            text = f"No jobs are in {wanted!r:.80}. Databases with jobs: {', '.join(known)}."
            raise ValidationError({DATABASE: text}, code="unknown")

    def url_of(self, name: str, key: Any, database: str | None = None) -> str:
        """Return the address of a row under the project's prefix.

        :param name: of the URL.
        :param database: the alias of the row's database; by default the one that is answered from.
        """
        match = self.request.resolver_match
        url = reverse(f"{match.namespace if match else 'kjo_django_api'}:{name}", args=(key,))
        alias = database or jobs_database()
        return url if alias == databases()[0] else f"{url}?{urlencode({DATABASE: alias})}"

    # --- Reading requests -------------------------------------------------------------------------

    def body(self, shape: type[RequestShape]) -> dict[str, Any]:
        """Return the validated body."""
        given = shape(data=self.request.data)
        given.is_valid(raise_exception=True)
        return dict(given.validated_data)

    def query(self, shape: type[RequestShape]) -> dict[str, Any]:
        """Return the validated parameters of the query, each given at most once."""
        parameters = self.request.query_params
        twice = [name for name in parameters if len(parameters.getlist(name)) > 1]
        if twice:
            raise ValidationError(dict.fromkeys(twice, "Given more than once."))
        # A plain dict: of a form's, REST framework would leave out what is empty.
        values = parameters.dict()
        values.pop(api_settings.URL_FORMAT_OVERRIDE, None)
        values.pop(DATABASE, None)
        given = shape(data=values)
        given.is_valid(raise_exception=True)
        return dict(given.validated_data)

    @property
    def sees_payloads(self) -> bool:
        """Return whether this user sees payloads, results and tracebacks."""
        return may(self.request, VIEW_PAYLOAD)

    def refuse_texts(self, values: Mapping[str, Any]) -> None:
        """Refuse a filter on a text that may quote a payload.

        :raises PermissionDenied: there is one, and the user may not see payloads.
        """
        if values.get("error") is not None and not self.sees_payloads:
            raise PermissionDenied("To search error texts takes the permission to see payloads.")

    # --- Changing ---------------------------------------------------------------------------------

    @property
    def actor(self) -> UserActor:
        """The user, for signals, notes and the log."""
        return UserActor(self.request.user)

    def audit(self, message: str, *, is_new: bool = False) -> Callable[[Sequence[Any]], None]:
        """Return an observer that writes a log entry with the user for each object; without the
        admin, to the logger.
        """
        user = self.request.user

        def write(rows: Sequence[Any]) -> None:
            if not apps.is_installed("django.contrib.admin"):
                logger.info("%s by %s: %s", message, user, ", ".join(str(row.pk) for row in rows))
                return
            from django.contrib.admin.models import ADDITION, CHANGE

            audit_of(user.pk, ADDITION if is_new else CHANGE, message)(rows)

        return write


def id_of(given: str) -> uuid.UUID:
    """Return the id in an address.

    :raises Http404: it is not an id.
    """
    try:
        return uuid.UUID(given)
    except ValueError:
        raise Http404 from None


@dataclass(frozen=True, slots=True)
class Method:
    """A method of an address."""

    name: str
    operation_id: str
    permissions: tuple[str, ...]
    handle: Callable[..., Response]


ID = OpenApiParameter(
    "id", OpenApiTypes.UUID, OpenApiParameter.PATH, description="The id of the row."
)


IN_DATABASE = OpenApiParameter(
    DATABASE,
    OpenApiTypes.STR,
    description="Where queues have databases of their own: the alias of the one to work with; the "
    "first of them if not given.",
)


def endpoint(
    operation_id: str,
    tag: str,
    permissions: Sequence[str],
    answers: Mapping[int, Any],
    *,
    method: str = "GET",
    about: str | None = None,
    body: Any = None,
    query: type[Shape] | None = None,
    path: Sequence[OpenApiParameter] = (),
    problems: Sequence[int] = (),
    examples: Sequence[OpenApiExample] = (),
) -> Callable[[Callable[..., Response]], Method]:
    """Make the method of a view of a function, which is called with the view and the parts of the
    address.

    :param operation_id: unique and stable: clients generated from the schema name methods after it.
    :param permissions: the codenames that it takes, all of them.
    :param answers: shapes of its answers by status, or ``(shape, meaning)``.
    :param about: what it does, for the schema; the function's docstring if not given.
    :param problems: statuses of problems beside those everything may answer with.
    """
    responses: dict[Any, Any] = {}
    for status, answer in answers.items():
        shape, meaning = answer if isinstance(answer, tuple) else (answer, answer.__doc__)
        responses[status] = OpenApiResponse(shape, description=meaning)
    for status in sorted({*ALWAYS, *problems, *(WITH_BODY if body else ())}):
        responses[status, CONTENT_TYPE] = OpenApiResponse(Problem, description=MEANINGS[status])
    describe = extend_schema(
        operation_id=f"kjo_{operation_id}",
        tags=[f"kjo: {tag}"],
        request=body,
        responses=responses,
        parameters=[*path, *([query] if query else []), IN_DATABASE],
        examples=list(examples),
    )

    def declare(function: Callable[..., Response]) -> Method:
        def handle(view: KjoView, request: Request, **parts: str) -> Response:
            return function(view, **parts)

        handle.__name__ = method.lower()
        handle.__doc__ = about or function.__doc__
        return Method(method, operation_id, tuple(permissions), describe(handle))

    return declare


def address(*methods: Method) -> Callable[..., Any]:
    """Return the view of an address that has these methods."""
    members: dict[str, Any] = {each.name.lower(): each.handle for each in methods}
    members["permissions"] = {each.name: each.permissions for each in methods}
    name = methods[0].operation_id.title().replace("_", "")
    view: type[KjoView] = type(f"{name}View", (KjoView,), members)
    return view.as_view()  # type: ignore[no-any-return]
