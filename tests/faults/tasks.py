"""A Django task that does as its ending says. Imported while ``TASKS`` names our backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kjo_django.contrib.tasks import task
from tests.ledger.models import Entry

behaviour: list[Callable[[str, str], Exception | None]] = []


@task
def write(job: str, ending: str) -> Any:
    Entry.objects.create(job=job)
    if error := behaviour[0](job, ending):
        raise error
