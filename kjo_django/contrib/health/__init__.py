"""``/health`` for load balancers and monitors.

urlpatterns = [path("kjo/health/", include("kjo_django.contrib.health.urls"))]

One view: 200 when all is well, 503 when it is not, within its timeout either way.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Hashable
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any, ClassVar

from django.http import HttpRequest, JsonResponse
from django.utils import timezone, translation
from django.views import View

from kjo_django.operations.monitoring.health import (
    Check,
    Thresholds,
    health,
    health_everywhere,
    is_healthy,
    lag_by_partition,
)
from kjo_django.runtime import UnknownDatabaseError, use_database

PERMISSION = "kjo_django.view_job"


_lock = threading.Lock()
_found: dict[Hashable, tuple[float, list[Check]]] = {}
"""When the last run of the checks ended and its result, by timeout and thresholds."""


def _shared_checks(timeout: float, thresholds: Thresholds, seconds: float) -> list[Check]:
    """Return the result of the last ``seconds``, or run the checks now.

    One run at a time: other callers wait for it, and get no check if it takes longer than
    ``timeout`` seconds.
    """
    if not _lock.acquire(timeout=timeout):
        return []
    try:
        key = (timeout, thresholds)
        found_at, checks = _found.get(key, (-math.inf, []))
        if time.monotonic() - found_at >= seconds:
            checks = health_everywhere(timeout, thresholds)
            _found[key] = (time.monotonic(), checks)
        return checks
    finally:
        _lock.release()


class HealthView(View):
    """Answers ``GET`` with whether all checks pass, and which do not, in English.

    Details name hosts and errors, so they are for users with the permission ``view_job``, as are
    thresholds in the query, ``?max_lag=1000&max_failure_rate=0.2&max_idle=600``, and one database
    of several, ``?database=alias``. All other requests
    share one run of the checks every ``cache_seconds`` in each process, so frequent requests cost
    little.

    :cvar timeout: seconds until an answer.
    :cvar thresholds: the limits of the checks.
    :cvar cache_seconds: how long an answer without details is reused.
    """

    timeout: ClassVar[float] = 5.0
    thresholds: ClassVar[Thresholds] = Thresholds()
    cache_seconds: ClassVar[float] = 3.0
    http_method_names: ClassVar[list[str]] = ["get", "head", "options"]  # type: ignore[misc]

    def get(self, request: HttpRequest) -> JsonResponse:
        """Run the checks and answer."""
        with translation.override(None):  # monitors compare texts
            return self._answer(request)

    def _answer(self, request: HttpRequest) -> JsonResponse:
        sees_details = may_see(request)
        # The last tenth is left to the lag of each partition.
        timeout = 0.9 * self.timeout
        if sees_details:
            try:
                checks = _checks(request, timeout, self.thresholds)
            except (ValueError, UnknownDatabaseError) as error:
                return JsonResponse({"error": str(error)}, status=400)
        else:
            checks = _shared_checks(timeout, self.thresholds, self.cache_seconds)
        is_ok = bool(checks) and is_healthy(checks)
        answer: dict[str, Any] = {"healthy": is_ok, "timestamp": timezone.now().isoformat()}
        if sees_details:
            answer["checks"] = [asdict(check) for check in checks]
            answer["lag"] = lag_by_partition(0.1 * self.timeout)
        else:
            answer["checks"] = [{"name": check.name, "ok": check.ok} for check in checks]
        response = JsonResponse(answer, status=200 if is_ok else 503)
        response["Cache-Control"] = "no-store"
        return response


def may_see(request: HttpRequest) -> bool:
    """Return whether the user is logged in and may see jobs."""
    user = getattr(request, "user", None)
    try:
        return user is not None and bool(user.has_perm(PERMISSION))
    except Exception:
        # Whose session cannot be read because the database is away is nobody we know.
        return False


def _checks(request: HttpRequest, timeout: float, usual: Thresholds) -> list[Check]:
    """Return the checks that a request asks for.

    :raises ValueError: a threshold means nothing.
    :raises UnknownDatabaseError: no queue has its jobs in the database that it names.
    """
    thresholds = _read(request, usual)
    if database := request.GET.get("database"):
        with use_database(database):
            return health(timeout, thresholds)
    return health_everywhere(timeout, thresholds)


def _read(request: HttpRequest, usual: Thresholds) -> Thresholds:
    given = request.GET
    changes: dict[str, Any] = {}
    try:
        if "max_lag" in given:
            changes["lag"] = int(given["max_lag"])
        if "max_failure_rate" in given:
            changes["failure_rate"] = float(given["max_failure_rate"])
        if "max_idle" in given:
            changes["idle"] = timedelta(seconds=float(given["max_idle"]))
    except (ValueError, OverflowError) as error:
        raise ValueError(f"A threshold is not a number: {error}") from error
    return replace(usual, **changes)
