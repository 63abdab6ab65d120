"""Log records that know their job: whatever logs while a handler runs, however deep below it.

LOGGING = {
    "filters": {"job": {"()": "kjo_django.contrib.logging.JobContextFilter"}},
    "formatters": {"json": {"()": "kjo_django.contrib.logging.JsonFormatter"}},
    "handlers": {"console": {"class": "logging.StreamHandler", "filters": ["job"], ...}},
    ...
}
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable
from datetime import datetime
from typing import Any

from django.core.exceptions import MiddlewareNotUsed

from kjo_django import tracing
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
            "time": datetime.fromtimestamp(record.created).astimezone().isoformat(),
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


def log_jobs(call_next: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Do nothing: each start and end of a job is logged without it.

    It remains for a ``KJO["MIDDLEWARE"]`` that names it.
    """
    text = "kjo_django.contrib.logging.log_jobs does nothing: take it out of KJO['MIDDLEWARE']"
    warnings.warn(text, DeprecationWarning, stacklevel=2)
    raise MiddlewareNotUsed
