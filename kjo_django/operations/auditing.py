"""The log of the admin: who did what to which row, whatever surface it was asked through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from kjo_django.operations.safe_text import InertName, inert


def log_entries(user_id: Any, rows: Iterable[Any], flag: int, message: Any, **more: Any) -> Any:
    """Write an entry for each row; names of rows and texts of people are written inert, since every
    page of the admin shows them as they are.

    To be called where ``django.contrib.admin`` is installed only.

    :param flag: ``ADDITION``, ``CHANGE`` or ``DELETION`` of ``django.contrib.admin.models``.
    :param message: a text, or what the admin's own forms say of a change.
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
    """Return an observer that writes into the log of each row that changed."""

    def write(rows: Sequence[Any]) -> None:
        if rows:
            log_entries(user_id, rows, flag, message)

    return write
