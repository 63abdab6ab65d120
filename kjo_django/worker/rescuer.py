"""Rescuing queued jobs whose message is gone, for as long as a worker lives."""

from __future__ import annotations

from datetime import timedelta

from kjo_django.conf import get_settings
from kjo_django.operations.maintenance.rescue import rescue
from kjo_django.worker.duty import Duty

LEASE = "RESCUE"
LONGEST_PAUSE = timedelta(minutes=1)


class Rescuer(Duty):
    """Should two rescue at once, conditional updates let one of them win."""

    name = "rescue"
    leases = (LEASE,)

    def pause(self) -> timedelta:
        """A third of what a job has to wait for a rescue, at most a minute."""
        return min(LONGEST_PAUSE, get_settings().rescue_after / 3)

    def work(self, held: list[str]) -> None:
        """Rescue."""
        rescue()
