"""Records nobody can handle: unreadable ones, and those no handler is registered for."""

from __future__ import annotations

from kjo_django.conf import get_settings
from kjo_django.engine import admission
from kjo_django.engine.attempt import Delivery, Outcome, Result
from kjo_django.engine.job_rows import load_rows, row_id
from kjo_django.exceptions import MessageError
from kjo_django.store.rows import NAMED_BY_OTHERS
from kjo_django.store.transactions import jobs_database


def poison_outcome(delivery: Delivery) -> Outcome:
    """Judge a record nobody can handle, and its job where it has one."""
    problem = delivery.problem
    message = delivery.message
    if problem is None:
        assert message is not None
        problem = MessageError("unknown_type", f"No handler is registered for {message.type!r}")
    row = None
    if message is not None and message.job_id is not None:
        using = jobs_database()
        rows = load_rows(using, [delivery], lock=False)
        row = rows.get(row_id(delivery, get_settings().service_name))
        if row is not None and row.generation == NAMED_BY_OTHERS:
            row = None
        if row is not None and (skipped := admission.why_skip(delivery, row)):
            return Outcome(delivery, Result.SKIPPED, job=row, reason=skipped)
    attempt = row.attempts if row else 0
    return Outcome(
        delivery, Result.DEAD, attempt=attempt, job=row, error=problem, reason=problem.reason
    )
