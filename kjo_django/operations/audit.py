"""Signals about changes, and entries in the admin's log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from django.db import transaction
from django.dispatch import Signal

from kjo_django.models import DeadLetter, Job
from kjo_django.operations.safe_text import InertName, inert
from kjo_django.runtime import jobs_database


def send_signals(signal: Signal, rows: Iterable[Job | DeadLetter], **facts: Any) -> None:
    """Send the signal once for each job or dead letter, with facts that hold for all of them."""
    for row in rows:
        if isinstance(row, Job):
            ids = {"job_id": str(row.pk), "unique_id": row.unique_id}
        else:
            ids = {"dead_letter_id": str(row.pk)}
        signal.send_robust(sender=row.handler, queue=row.queue, handler=row.handler, **ids, **facts)


def send_after_commit(signal: Signal, rows: Sequence[Job | DeadLetter], **facts: Any) -> None:
    """Send the signal once for each row after the current transaction is committed."""
    send = functools.partial(send_signals, signal, rows, **facts)
    transaction.on_commit(send, using=jobs_database(), robust=True)


def log_entries(user_id: Any, rows: Iterable[Any], flag: int, message: Any, **more: Any) -> Any:
    """Write an entry into the admin's log for each row, and return the answer of ``log_actions``.

    Names and texts are written inert, since every page of the admin shows them as they are. Only
    for projects with ``django.contrib.admin``.

    :param flag: ``ADDITION``, ``CHANGE`` or ``DELETION`` of ``django.contrib.admin.models``.
    :param message: a text, or the change that the admin's own forms describe.
    :param more: passed on to Django's ``log_actions``.
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
    """Return an observer that writes an entry into the admin's log for each changed row."""

    def write(rows: Sequence[Any]) -> None:
        if rows:
            log_entries(user_id, rows, flag, message)

    return write
