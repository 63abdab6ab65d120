"""The progress that running jobs report."""

from __future__ import annotations

from collections.abc import Sequence

from kjo_django.engine.handler.running import Progress, load_progress, progress_name
from kjo_django.exceptions import CoordinationError
from kjo_django.runtime import get_coordination

__all__ = ["Progress", "progress_of"]


def progress_of(job_ids: Sequence[object]) -> dict[str, Progress]:
    """Return the latest report of each job that has made one within the hour, by its id as text.

    While coordination cannot be reached, the answer is empty.
    """
    if not job_ids:
        return {}
    names = {progress_name(str(id)): str(id) for id in job_ids}
    try:
        marks = get_coordination().get_marks(list(names))
    except CoordinationError:
        return {}
    found = {names[name]: load_progress(value) for name, value in marks.items()}
    return {id: progress for id, progress in found.items() if progress is not None}
