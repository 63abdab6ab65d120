"""What a handler may know and ask about its own run."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from kjo_django.exceptions import JobCancelledError


@dataclass(slots=True)
class JobContext:
    """Passed first to handlers declared with ``takes_context=True``."""

    job_id: str
    """The job's id, or the message's where no job was enqueued here."""
    attempt: int
    """From 1."""
    max_attempts: int
    idempotency_key: str
    """Equal for all attempts of one job. Hand it to systems outside the database, so that a repeat
    of an attempt that got that far has no second effect there."""
    queue: str
    headers: Mapping[str, str] = field(default_factory=dict)
    created_at: datetime | None = None
    _aborted: threading.Event = field(default_factory=threading.Event)

    @property
    def aborted(self) -> bool:
        """Whether the worker wants the handler to end soon: shutdown, timeout, or the lease was
        lost. A handler with a long loop should look at it."""
        return self._aborted.is_set()

    def raise_if_aborted(self) -> None:
        """Raise ``JobCancelledError`` if the run was aborted."""
        if self.aborted:
            raise JobCancelledError(f"The run of job {self.job_id} was aborted")

    def abort(self) -> None:
        """Ask the handler to end; the worker's side of ``aborted``."""
        self._aborted.set()
