"""The run and the worker of the current thread or task, as log records name them.

Workers set both. This module imports no model, since logging is configured before the apps are.
"""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any, Protocol


class Run(Protocol):
    """One call of a handler, for one job or for a batch."""

    @property
    def log_fields(self) -> dict[str, Any]:
        """What a log record says about the run."""

    @property
    def trace_id(self) -> str:
        """The id of the trace that its message carries, or ""."""


running: ContextVar[Run | None] = ContextVar("kjo_running", default=None)
"""In the handler's thread or task; None outside a handler."""
worker_name: ContextVar[str] = ContextVar("kjo_worker", default="")
"""The name of the worker whose lane this thread is; "" elsewhere."""
