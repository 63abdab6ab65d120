"""Metrics for Prometheus, in its text format and without its client.

urlpatterns = [path("kjo/metrics", include("kjo_django.contrib.prometheus.urls"))]

One view: everything that is measured, for Prometheus or for people who may see jobs.
"""

from __future__ import annotations

from typing import ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse
from django.utils.crypto import constant_time_compare
from django.views import View

from kjo_django.conf import settings_as_read
from kjo_django.contrib.health import may_see
from kjo_django.contrib.prometheus.exposition import CONTENT_TYPE, collect, render
from kjo_django.runtime import UnknownDatabaseError, databases, use_database


class MetricsView(View):
    """Answers ``GET`` of clients that send ``Authorization: Bearer <METRICS_TOKEN>``, and of users
    with the permission ``view_job``.

    The labels name queues and handlers. Where queues have databases of their own, each database is
    a target: ``?database=alias``.

    :cvar timeout: seconds that the transports and Redis have to answer; otherwise their metrics are
        left out.
    """

    timeout: ClassVar[float] = 5.0
    http_method_names: ClassVar[list[str]] = ["get", "head", "options"]  # type: ignore[misc]

    def get(self, request: HttpRequest) -> HttpResponse:
        """Collect and render."""
        if not _has_token(request) and not may_see(request):
            response = HttpResponse("Not allowed.\n", content_type="text/plain", status=401)
            response["WWW-Authenticate"] = "Bearer"
        else:
            try:
                with use_database(request.GET.get("database") or databases()[0]):
                    text = render(collect(self.timeout))
                response = HttpResponse(text, content_type=CONTENT_TYPE)
            except UnknownDatabaseError as error:
                response = HttpResponse(f"{error}\n", content_type="text/plain", status=400)
            except DatabaseError:
                response = _unavailable("The database does not answer.\n")
            except ImproperlyConfigured:
                response = _unavailable("The KJO setting is wrong; see manage.py check.\n")
        response["Cache-Control"] = "no-store"
        return response


def _unavailable(text: str) -> HttpResponse:
    return HttpResponse(text, content_type="text/plain", status=503)


def _has_token(request: HttpRequest) -> bool:
    wanted = settings_as_read().metrics_token  # one that is wrong lets nobody in
    scheme, _, given = request.headers.get("Authorization", "").partition(" ")
    return (
        wanted is not None
        and scheme.lower() == "bearer"
        and constant_time_compare(given.strip(), wanted)
    )
