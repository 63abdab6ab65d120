"""``kjo_health`` knows schedules that nobody stores the ticks of."""

from __future__ import annotations

from kjo_django.operations.monitoring.health import Check, health
from tests.schedules.conftest import scheduled, step


def check() -> Check:
    (found,) = (
        each
        for each in health(only={"settings", "database", "schedules"})
        if each.name == "schedules"
    )
    return found


def test_late_schedules_are_not_well(sqlite_file, clock):
    scheduled()
    scheduled("paused", is_paused=True)
    assert (check().ok, check().detail) == (True, "none is late")
    clock.advance(125)
    assert (check().ok, check().detail) == (False, "due for a minute or longer: nightly")
    assert "kjo_schedule" in check().fix
    step()
    assert check().ok


def test_a_broken_schedule_is_named_with_its_reason(sqlite_file, clock):
    scheduled(job="shop.gone")
    clock.advance(125)
    step()
    assert "nightly (No job is named 'shop.gone' here)" in check().detail
    assert check().fix == "Install the jobs they name, or edit or pause them."
