"""Time that passes when a test says so."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from django.utils import timezone

import kjo_django.clock
from kjo_django import ids
from kjo_django.store.base import Store
from kjo_django.store.postgres import PostgresStore

RIVAL = "rival"
"""Name of the thread that acts while another one's call is under way."""
DAY = 86_400
PATIENCE = 3
"""How often a process waits that acts while another one's call is under way."""
MOST_ADVANCES = 2_000
"""How often one case may let time pass: code that waits for ever is an error of that case."""


class Clock:
    """Shifts ``timezone.now`` and ``time.monotonic`` for the whole process.

    :param stands: whether time passes only when a test says so, and not by itself too.
    :param tick: seconds that pass with each reading of the calendar, so that no two moments are the
        same one.
    """

    def __init__(self, *, stands: bool = False, tick: float = 0.0) -> None:
        self.stands = stands
        self.tick = tick
        self.offset = 0.0
        self.days = 0
        self.advances = 0
        self.rivals_waits = 0

    def install(self, monkeypatch: Any) -> None:
        now, monotonic = timezone.now, time.monotonic
        if self.stands:
            began, began_at = now(), monotonic()
            now, monotonic = lambda: began, lambda: began_at
            wall, whole = time.time(), time.time_ns()
            monkeypatch.setattr(time, "time", lambda: wall + self.days * DAY + self.offset)
            monkeypatch.setattr(
                time, "time_ns", lambda: whole + int((self.days * DAY + self.offset) * 1e9)
            )
            monkeypatch.setattr(time, "perf_counter", lambda: began_at + self.offset)
            # Ids never go back: without this those of later tests would be of the time shown here.
            monkeypatch.setattr(ids, "_last_tick", ids._last_tick)

        def shifted_now() -> datetime:
            self.offset += self.tick
            return now() + timedelta(self.days, self.offset)

        monkeypatch.setattr(timezone, "now", shifted_now)
        monkeypatch.setattr(kjo_django.clock.Clock, "now", staticmethod(shifted_now))
        for store in (Store, *Store.__subclasses__()):
            monkeypatch.setattr(store, "server_time", lambda store: shifted_now())
        for method in ("read_windows", "write_windows"):
            monkeypatch.setattr(PostgresStore, method, getattr(Store, method))
        shifted = lambda: monotonic() + self.offset  # noqa: E731
        monkeypatch.setattr(time, "monotonic", shifted)
        monkeypatch.setattr(kjo_django.clock.Clock, "monotonic", staticmethod(shifted))

    def begin_day(self) -> None:
        """Begin another day of the calendar; the monotonic clock begins anew. So what repeats a
        run meets the same numbers to the last bit, and none that is older than the run."""
        self.days, self.offset = self.days + 1 + int(self.offset // DAY), 0.0

    def advance(self, seconds: float) -> None:
        self.advances += 1
        if self.advances >= MOST_ADVANCES:
            where = "".join(traceback.format_stack(limit=6)[:-1])
            raise AssertionError(f"it waits for ever:\n{where}")
        self.offset += seconds

    def waiting(self, is_virtual: Callable[[], bool], monkeypatch: Any) -> None:
        """Let waits of simulated processes advance this clock instead of taking time.

        Threads beside a process' own, such as the one that renews a relay's leases, wait in real
        time: when they look again must not depend on which thread the interpreter runs next.
        """
        import threading

        really_wait, really_sleep = threading.Event.wait, time.sleep
        steps = threading.current_thread()

        def is_beside() -> bool:
            thread = threading.current_thread()
            return thread is not steps and thread.name != RIVAL

        def wait(event: threading.Event, timeout: float | None = None) -> bool:
            if timeout is None or event.is_set() or not is_virtual() or is_beside():
                return really_wait(event, timeout)
            if threading.current_thread().name == RIVAL:
                self.rivals_waits += 1
                if self.rivals_waits > PATIENCE:
                    # As if it were asked to stop: what it waits for is held by who waits for it.
                    # Time stands, so that what it puts off does not come up again at once, but for
                    # a loop that waits for a moment.
                    if self.rivals_waits > 20 * PATIENCE:
                        self.advance(timeout)
                    return True
            self.advance(timeout)
            return event.is_set()

        def sleep(seconds: float) -> None:
            self.advance(seconds) if is_virtual() else really_sleep(seconds)

        monkeypatch.setattr(threading.Event, "wait", wait)
        monkeypatch.setattr(time, "sleep", sleep)
