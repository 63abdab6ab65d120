"""The queue that tests with processes of their own share: found by every worker at boot."""

from __future__ import annotations

import time
from typing import Any

from kjo_django import Queue
from tests.ledger.models import Entry

ledger = Queue("ledger")


@ledger.handler
def write(job: Any) -> dict[str, Any] | None:
    """Add the job's one entry, after as long as its payload says; do nothing without a payload."""
    if job.payload is None:
        return None
    time.sleep(job.payload.get("seconds", 0))  # sleep: as long as the test wants it to take
    Entry.objects.create(job=job.id, note=str(job.payload.get("note", "")))
    return {"id": job.id, "attempts": job.attempts}
