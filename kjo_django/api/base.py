"""What all our views share: permissions, problems, strict bodies, audited changes."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from django.apps import apps
from django.http import Http404
from rest_framework.exceptions import PermissionDenied, ValidationError
from rest_framework.permissions import SAFE_METHODS, BasePermission
from rest_framework.request import Request
from rest_framework.response import Response
from rest_framework.settings import api_settings
from rest_framework.views import APIView

from kjo_django.api import problems
from kjo_django.api.fields import Body, Query
from kjo_django.api.parsing import StrictJSONParser
from kjo_django.operations.audit import audit_of
from kjo_django.operations.internal import UserActor

logger = logging.getLogger("kjo_django")

VIEW_PAYLOAD = "view_payload"


class HasPermissions(BasePermission):  # type: ignore[misc]
    """Whoever may do it in the admin may do it here."""

    def has_permission(self, request: Request, view: KjoView) -> bool:
        """Ask for every permission the view names for this method."""
        if not (request.user and request.user.is_authenticated):
            return False
        method = "GET" if request.method == "HEAD" else str(request.method)
        # A method the view does not have is answered as such, with 405.
        return all(may(request, codename) for codename in view.permissions.get(method, ()))


def may(request: Request, codename: str) -> bool:
    """Whether the user has one of our permissions, such as ``view_payload``."""
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
        """``kjo-read`` or ``kjo-write``, if the project has set a rate for it."""
        request = getattr(self, "request", None)
        is_reading = request is None or request.method in SAFE_METHODS
        scope = "kjo-read" if is_reading else "kjo-write"
        # ScopedRateThrottle takes a scope without a rate for a mistake, and answers 500.
        return scope if scope in (api_settings.DEFAULT_THROTTLE_RATES or {}) else None

    def get_exception_handler(self) -> Callable[..., Response | None]:
        """Errors are told as problem details, whatever the project's other views do."""
        return problems.handle

    def finalize_response(
        self, request: Request, response: Response, *args: Any, **kwargs: Any
    ) -> Response:
        """Say what it is, so that nobody guesses, and that it is nobody else's."""
        response = super().finalize_response(request, response, *args, **kwargs)
        renderer = getattr(response, "accepted_renderer", None)
        if response.exception and getattr(renderer, "format", None) == "json":
            response.content_type = problems.CONTENT_TYPE
        response["X-Content-Type-Options"] = "nosniff"
        response["Cache-Control"] = "private, no-store"
        return response

    # --- Reading requests -------------------------------------------------------------------------

    def body(self, shape: type[Body]) -> dict[str, Any]:
        """Return the validated body."""
        given = shape(data=self.request.data)
        given.is_valid(raise_exception=True)
        return dict(given.validated_data)

    def query(self, shape: type[Query]) -> dict[str, Any]:
        """Return the validated parameters of the query, each given at most once."""
        parameters = self.request.query_params
        twice = [name for name in parameters if len(parameters.getlist(name)) > 1]
        if twice:
            raise ValidationError(dict.fromkeys(twice, "Given more than once."))
        # A plain dict: of a form's, REST framework would leave out what is empty.
        values = parameters.dict()
        values.pop(api_settings.URL_FORMAT_OVERRIDE, None)
        given = shape(data=values)
        given.is_valid(raise_exception=True)
        return dict(given.validated_data)

    @property
    def sees_payloads(self) -> bool:
        """Whether payloads, results and tracebacks are shown."""
        return may(self.request, VIEW_PAYLOAD)

    def refuse_texts(self, values: Mapping[str, Any]) -> None:
        """Refuse a filter that would tell what may quote a payload.

        :raises PermissionDenied: it has one, and the user may not see payloads.
        """
        if values.get("error") is not None and not self.sees_payloads:
            raise PermissionDenied("To search error texts takes the permission to see payloads.")

    # --- Changing ---------------------------------------------------------------------------------

    @property
    def actor(self) -> UserActor:
        """Who asks, for signals, notes and the log."""
        return UserActor(self.request.user)

    def audit(self, message: str, *, is_new: bool = False) -> Callable[[Sequence[Any]], None]:
        """Return an observer that writes who did it into the log of each object, as the admin does;
        into our logger where the project has no admin."""
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

    :raises Http404: it is none, so nothing has it.
    """
    try:
        return uuid.UUID(given)
    except ValueError:
        raise Http404 from None
