"""What the browser tests want of the site: the strictest content policy, and a count of queries."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from django.db import connection
from django.http import HttpRequest, HttpResponse

logger = logging.getLogger("tests.queries")

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


class CountQueries:
    """Middleware that logs how many queries each request cost."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self._get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        count = 0

        def counted(execute: Callable[..., Any], *arguments: Any) -> Any:
            nonlocal count
            count += 1
            return execute(*arguments)

        with connection.execute_wrapper(counted):
            response = self._get_response(request)
        logger.info("%d queries for %s", count, request.path)
        return response
