"""Whether somebody else has committed to the database, where asking costs next to nothing."""

from __future__ import annotations

import threading
import time
from typing import Any

from django.db import connections

SHORTEST, LONGEST = 0.01, 0.1
"""Seconds between two looks at SQLite's counter. The look is a few microseconds, waking up for it a
hundred: an idle worker does that ten times a second."""


class Changes:
    """Waits for a commit of another connection on SQLite, those of this process' other threads
    included. Elsewhere no commit is seen: there others call.

    Belongs to the thread that polls.
    """

    def __init__(self, alias: str) -> None:
        self._alias = alias
        self._seen: tuple[Any, Any] = (None, None)
        self._changed_at = 0.0

    def wait(self, woken: threading.Event, timeout: float) -> bool:
        """Wait for ``woken``, for a commit or for so many seconds; whether it was woken.

        A commit that came since the last wait ends this one at once.
        """
        if connections[self._alias].vendor != "sqlite":
            return woken.wait(timeout)
        deadline = time.monotonic() + timeout
        while not self._has_changed():
            now = time.monotonic()
            if now >= deadline:
                return False
            # A tenth of the time nobody has written: who comes later than that was late anyway.
            pause = min(LONGEST, max(SHORTEST, (now - self._changed_at) / 10))
            if woken.wait(min(pause, deadline - now)):
                return True
        self._changed_at = time.monotonic()
        return woken.is_set()

    def _has_changed(self) -> bool:
        """Whether the counter is another than at the last look. Each connection has its own, which
        its own commits leave alone."""
        connection: Any = connections[self._alias]
        with connection.wrap_database_errors:
            connection.ensure_connection()
            # Past Django's cursors, which take longer than the look.
            (version,) = connection.connection.execute("PRAGMA data_version").fetchone()
        before, self._seen = self._seen, (connection.connection, version)
        return before != self._seen
