"""Strict parsing of bodies, and errors as RFC 9457 problem details, for this API only."""

from __future__ import annotations

import http
import json
from collections.abc import Iterator
from typing import Any

from django.core.exceptions import PermissionDenied
from django.http import Http404
from rest_framework import exceptions, status
from rest_framework.parsers import BaseParser
from rest_framework.response import Response
from rest_framework.views import exception_handler

from kjo_django.conf import get_settings
from kjo_django.exceptions import (
    CoordinationError,
    JobExistsError,
    JobNotFoundError,
    JobStateError,
    MessageError,
    PausableError,
    PayloadError,
    PublishError,
    StorageError,
    UncommittedJobError,
)

CONTENT_TYPE = "application/problem+json"
TYPE = "urn:kjo:problem:"
"""Prefix of every ``type``; the code of the error follows."""


class Conflict(exceptions.APIException):  # type: ignore[misc]
    """The present state does not allow the request; nothing was changed."""

    status_code = status.HTTP_409_CONFLICT
    default_code = "conflict"


class TooLarge(exceptions.APIException):  # type: ignore[misc]
    """The body is over the limit."""

    status_code = status.HTTP_413_REQUEST_ENTITY_TOO_LARGE
    default_code = "too_large"


class Unavailable(exceptions.APIException):  # type: ignore[misc]
    """A needed server is away; try again later."""

    status_code = status.HTTP_503_SERVICE_UNAVAILABLE
    default_code = "unavailable"


_OURS: tuple[tuple[tuple[type[Exception], ...], type[exceptions.APIException]], ...] = (
    ((PayloadError, MessageError), exceptions.ValidationError),
    ((JobNotFoundError,), exceptions.NotFound),
    ((JobStateError, JobExistsError, UncommittedJobError), Conflict),
    ((CoordinationError, PausableError, PublishError, StorageError), Unavailable),
)


def handle(error: Exception, context: dict[str, Any]) -> Response | None:
    """Return the problem of an error; None for an error of the server itself (500)."""
    error = _as_api_exception(error)
    response = exception_handler(error, context)
    if response is None:
        return None
    response.data = problem(error, response.status_code)
    return response


def problem(error: exceptions.APIException, status_code: int) -> dict[str, Any]:
    """Return the members of the problem."""
    title = http.HTTPStatus(status_code).phrase
    members: dict[str, Any] = {"type": TYPE, "title": title, "status": status_code}
    if isinstance(error, exceptions.ValidationError):
        members["type"] += "invalid"
        members["detail"] = "The request is not valid; nothing was changed."
        members["errors"] = list(_errors(error.detail, ""))
    else:
        members["type"] += str(error.get_codes()).replace("_", "-")
        members["detail"] = str(error.detail)
        members["errors"] = []
    return members


def _as_api_exception(error: Exception) -> Exception:
    known: Exception = error
    if isinstance(error, Http404):
        known = exceptions.NotFound()
    elif isinstance(error, PermissionDenied):
        known = exceptions.PermissionDenied()
    for ours, theirs in _OURS:
        if isinstance(error, ours):
            known = theirs(str(error))
    return known


def _errors(detail: Any, place: str) -> Iterator[dict[str, str]]:
    """Flatten REST framework's errors, which are nested by field."""
    if isinstance(detail, dict):
        for name, below in detail.items():
            # What is wrong with the whole body belongs to no field.
            inner = place if name == "non_field_errors" else f"{place}.{name}".lstrip(".")
            yield from _errors(below, inner)
    elif isinstance(detail, list):
        for each in detail:
            yield from _errors(each, place)
    else:
        yield {"field": place, "detail": str(detail), "code": str(detail.code)}


# --- Bodies: JSON in UTF-8, of bounded size and depth ---------------------------------------------

ROOM = 64 * 1024
"""Bytes of a body beside its payload."""


DEEPEST = 200
"""Most levels of nesting, since payloads are walked by recursion."""
TOO_DEEP = f"The body has more than {DEEPEST} levels."


def longest_body() -> int:
    """Return the most bytes of a body: an allowed payload fits, escaped too."""
    return 2 * get_settings().max_payload_bytes + ROOM


class StrictJSONParser(BaseParser):  # type: ignore[misc]
    """Refuses a body that is too long before it is read, NaN, infinities and deep nesting."""

    media_type = "application/json"

    def parse(self, stream: Any, media_type: Any = None, parser_context: Any = None) -> Any:
        """Return the decoded body.

        :raises TooLarge: it has more bytes than ``longest_body()``.
        :raises ParseError: it is not JSON.
        """
        limit = longest_body()
        body = stream.read(limit + 1)
        if len(body) > limit:
            raise TooLarge(f"The body has more than {limit} bytes.")
        try:
            value = json.loads(body.decode(), parse_constant=_refuse)
        except RecursionError:
            raise exceptions.ParseError(TOO_DEEP) from None
        except ValueError as error:
            raise exceptions.ParseError(f"The body is not JSON: {error}") from None
        if not _is_flat_enough(value):
            raise exceptions.ParseError(TOO_DEEP)
        return value


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _is_flat_enough(value: Any) -> bool:
    level = [value]
    for _ in range(DEEPEST):
        level = [
            each
            for one in level
            if isinstance(one, dict | list)
            for each in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return True
    return False
