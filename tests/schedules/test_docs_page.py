"""The snippets of docs/how-to/schedules.md."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks

from kjo_django import job
from kjo_django.models import Schedule
from tests.docs.test_docs import FENCE
from tests.schedules.conftest import minutes, now, step

PAGE = Path(__file__).resolve().parents[2] / "docs/how-to/schedules.md"
JOBS, SETTINGS, OPERATIONS = (
    code for _, language, code in FENCE.findall(PAGE.read_text()) if language == "python"
)


@pytest.mark.django_db
def test_the_snippets(settings, clock):
    names: dict[str, Any] = {"__name__": "shop.jobs"}
    exec(JOBS, names)
    job(name="shop.cleanup")(lambda days: None)
    job(name="shop.sales")(lambda: None)
    job(name="shop.launch")(lambda: None)
    exec(SETTINGS, names)
    settings.KJO = {**settings.KJO, **names["KJO"]}
    assert run_checks(tags=["kjo"]) == []
    step()
    rows = {row.name: row for row in Schedule.objects.all()}
    assert set(rows) == {
        *("cleanup", "sales", "launch"),
        *("shop.jobs.nightly_report", "shop.jobs.refresh_prices", "shop.jobs.statement"),
    }
    assert rows["cleanup"].next_at == now() + minutes(5)
    exec(OPERATIONS, names)
    assert not Schedule.objects.filter(name="weekly").exists()
