"""What runs here, for log records: set by workers, known to whatever a handler calls.

At the bottom, and without a model: logging is configured before the apps are there.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Run(Protocol):
    """A handler's run, of one job or of a batch."""

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a log record says of the run."""

    @property
    def trace_id(self) -> str:
        """The id of the trace that its message carries, or ""."""


running: ContextVar[Run | None] = ContextVar("kjo_running", default=None)
"""In the handler's thread or task; None outside a handler."""
worker_name: ContextVar[str] = ContextVar("kjo_worker", default="")
"""Of the worker whose lane this thread is; "" elsewhere."""
