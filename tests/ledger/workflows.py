"""A workflow of the steps in ``jobs``, for the tests of whatever shows or changes workflows."""

from __future__ import annotations

from kjo_django import chain, group
from kjo_django.models import Workflow
from kjo_django.runtime import jobs_database
from kjo_django.testing import drain
from tests.ledger.jobs import fetch_parts, load_part, report_parts


def imported(
    *,
    loads: int = 5,
    on_failure: str = "cancel",
    name: str = "import",
    id: str | None = None,
    fails: bool = False,
) -> Workflow:
    """Enqueue a step, some after it and one at the end; return the row.

    :param fails: whether the first of those in the middle does, until an entry says it is mended.
    """
    steps = (load_part.step(part=part, fails=fails and part == 0) for part in range(loads))
    parts = chain(fetch_parts.step(), group(steps), report_parts.step())
    handle = parts.enqueue(name=name, id=id, on_failure=on_failure)
    return Workflow.objects.using(jobs_database()).get(pk=handle.workflow_id)


def ended(**options: object) -> Workflow:
    """Run such a workflow until nothing more is due; return the row."""
    row = imported(**options)  # type: ignore[arg-type]
    drain("ledger", raise_errors=False)
    row.refresh_from_db()
    return row
