"""Log records that know their job: whatever logs while a handler runs, however deep below it. And
a line for each start and end of a job, for those who want to read along.

LOGGING = {
    "filters": {"job": {"()": "kjo_django.contrib.logging.JobContextFilter"}},
    "formatters": {"json": {"()": "kjo_django.contrib.logging.JsonFormatter"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["job"], ...}},
    ...
}
KJO = {"MIDDLEWARE": ["kjo_django.contrib.logging.log_jobs"], ...}
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from inspect import iscoroutinefunction
from typing import Any

from django.core.exceptions import MiddlewareNotUsed
from django.utils.decorators import sync_and_async_middleware

from kjo_django import signals, tracing
from kjo_django.logs import get_logger
from kjo_django.messages.serializers import one_line
from kjo_django.running_job import running, worker_name

FIELDS = (
    *("job_id", "handler", "queue", "attempt", "message_id"),
    *("topic", "partition", "offset", "worker", "trace_id"),
)
"""The attributes of every record after the filter. Never a payload."""


class JobContextFilter(logging.Filter):
    """Adds ``FIELDS`` to every record.

    Put it on handlers: a filter of a logger does not see the records of loggers below it.
    Attributes that a record has already (``extra``) stay.

    :param default: the value of a field that does not apply: outside a job, or for a batch whose
        jobs differ.
    """

    def __init__(self, default: Any = None) -> None:
        super().__init__()
        self._default = default

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the missing attributes; every record passes."""
        run = running.get()
        facts = {} if run is None else run.log_fields
        tracer = tracing.tracer
        trace_id = "" if tracer is None else tracer.trace_id()
        facts["trace_id"] = trace_id or ("" if run is None else run.trace_id)
        facts["worker"] = worker_name.get()
        for name in FIELDS:
            if not hasattr(record, name):
                value = facts.get(name)
                setattr(record, name, self._default if value in (None, "") else value)
        return True


class JsonFormatter(logging.Formatter):
    """Writes each record as one JSON object on a line: time, level, logger, message, and of
    ``FIELDS`` and ``seconds`` those that apply."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line = {
            "time": self.formatTime(record),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        for name in (*FIELDS, "seconds"):
            if (value := getattr(record, name, None)) not in (None, ""):
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str, ensure_ascii=False)


# --- A line for each start and end ----------------------------------------------------------------

jobs = get_logger("kjo_django.jobs")


@sync_and_async_middleware
def log_jobs(call_next: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Log a line for each start and end of a job, to ``kjo_django.jobs``, at the level INFO.

    It is for ``KJO["MIDDLEWARE"]``, the first of it. Failed attempts and dead letters have a line
    without it. Ends are logged when they are committed. Where the logger does not take INFO when a
    handler is first called, nothing is logged and nothing is spent from then on.
    """
    if not jobs.isEnabledFor(logging.INFO):
        raise MiddlewareNotUsed
    signals.job_completed.connect(_log_completion, weak=False, dispatch_uid="kjo_log_jobs")
    signals.job_cancelled.connect(_log_cancellation, weak=False, dispatch_uid="kjo_log_jobs")

    def middleware(context: Any) -> Any:
        _log_start(context)
        return call_next(context)

    async def on_loop(context: Any) -> Any:
        _log_start(context)
        return await call_next(context)

    return on_loop if iscoroutinefunction(call_next) else middleware


def _log_start(context: Any) -> None:
    for run in getattr(context, "items", [context]):
        facts = {**run.log_fields}
        facts |= {"job_id": run.job_id, "handler": run.handler, "attempt": run.attempt}
        _log("Started", facts | {"queue": run.queue})


def _log_completion(*, seconds: float, **facts: Any) -> None:
    _log("Completed", facts, seconds)


def _log_cancellation(**facts: Any) -> None:
    _log("Cancelled", facts)


def _log(what: str, facts: dict[str, Any], seconds: float | None = None) -> None:
    """Log one line about a job."""
    attempt = f", attempt {facts['attempt']}" if facts.get("attempt") else ""
    lasted = "" if seconds is None else f" in {seconds:.3f} s"
    where = f"(queue {facts['queue']}{attempt}){lasted}"
    line = one_line(f"{what} {facts['handler']} {facts['job_id']} {where}")
    extra = {name: facts[name] for name in FIELDS if facts.get(name) is not None}
    if seconds is not None:
        extra["seconds"] = round(seconds, 6)
    jobs.info("%s", line, extra=extra)
