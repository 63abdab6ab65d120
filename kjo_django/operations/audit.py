"""Who did what: signals to receivers, lines in the log, and entries in the admin's log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.dispatch import Signal

from kjo_django.models import DeadLetter, Job
from kjo_django.operations.safe_text import InertName, inert

logger = logging.getLogger("kjo_django")


def send_signals(signal: Signal, rows: Iterable[Job | DeadLetter], **facts: Any) -> None:
    """Send the signal for each of the jobs or dead letters, with facts that hold for all."""
    for row in rows:
        if isinstance(row, Job):
            ids = {"job_id": str(row.pk), "unique_id": row.unique_id}
        else:
            ids = {"dead_letter_id": str(row.pk)}
        signal.send_robust(sender=row.handler, queue=row.queue, handler=row.handler, **ids, **facts)


def log_change(verb: str, count: int, actor: str) -> None:
    """Log how many jobs somebody changed, if any were."""
    if count:
        logger.info("%s %d jobs%s", verb, count, f" for {actor}" if actor else "")


def log_entries(user_id: Any, rows: Iterable[Any], flag: int, message: Any, **more: Any) -> Any:
    """Write an entry into the admin's log for each row, whatever surface was used.

    Names of rows and texts of people are written inert, since every page of the admin shows them as
    they are. To be called where ``django.contrib.admin`` is installed only.

    :param flag: ``ADDITION``, ``CHANGE`` or ``DELETION`` of ``django.contrib.admin.models``.
    :param message: a text, or the change that the admin's own forms describe.
    :param more: passed on to Django's ``log_actions``, whose answer is returned.
    """
    from django.contrib.admin.models import LogEntry

    named: list[Any] = [InertName(row) for row in rows]
    return LogEntry.objects.log_actions(
        user_id=user_id,
        queryset=named,
        action_flag=flag,
        change_message=inert(message) if isinstance(message, str) else message,
        **more,
    )


def audit_of(user_id: Any, flag: int, message: str) -> Callable[[Sequence[Any]], None]:
    """Return an observer that writes into the admin's log of each row that changed."""

    def write(rows: Sequence[Any]) -> None:
        if rows:
            log_entries(user_id, rows, flag, message)

    return write
