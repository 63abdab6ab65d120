"""The strictest policy a project may have: what is inline is refused, and told in the console."""

from __future__ import annotations

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

POLICY = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
POLICY += "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"


class StrictPolicy:
    """Middleware that sends it with every page."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self._get_response(request)
        response.headers["Content-Security-Policy"] = POLICY
        return response
