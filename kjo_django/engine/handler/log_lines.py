"""A line in the log for each start and each end of a job."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import partial
from typing import Any

from kjo_django.engine.attempt import Attempt, Ending
from kjo_django.engine.handler.context import facts_of
from kjo_django.logs import Logger, get_logger
from kjo_django.messages.serializers import one_line

jobs_logger = get_logger("kjo_django.jobs")
logs_all = partial(jobs_logger.logger.isEnabledFor, logging.INFO)
"""Returns whether a line is written for each start and each completion."""
_LINES: dict[Ending | None, tuple[str, Logger, int]] = {
    Ending.COMPLETED: ("Completed", jobs_logger, logging.INFO),
    Ending.CANCELLED: ("Cancelled", jobs_logger, logging.INFO),
    Ending.RETRIED: ("Failed", jobs_logger, logging.WARNING),
    Ending.DEAD: ("Dead-lettered", get_logger("kjo_django"), logging.ERROR),
}
"""The word, the logger and the level of the line for an ending; others have none."""


def log_starts(attempts: Iterable[Attempt]) -> None:
    """Log a line for each attempt that is about to run."""
    for attempt in attempts:
        facts = facts_of(attempt.delivery, attempt.number)
        jobs_logger.info("%s", one_line(f"Started {_subject(attempt, facts)}"), extra=facts)


def log_end(attempt: Attempt) -> None:
    """Log a line for an attempt whose ending is durable, if its ending has one."""
    if attempt.ending not in _LINES:
        return
    word, logger, level = _LINES[attempt.ending]
    facts = facts_of(attempt.delivery, attempt.number)
    lasted = f"in {attempt.seconds:.3f} s"
    if attempt.ending is Ending.RETRIED:
        lasted += f", again at {attempt.retry_at:%F %T} UTC"
    elif attempt.ending is Ending.DEAD:
        lasted += f": {attempt.reason}"
    failure = attempt.failure
    why = "" if failure is None else f": {type(failure.error).__name__}: {failure.shown_text}"
    # One line, whatever others wrote.
    line = one_line(f"{_subject(attempt, facts)} {lasted}{why}".lstrip())
    facts["seconds"] = round(attempt.seconds, 6)
    logger.log(level, "%s %s", word, line, extra=facts)


def _subject(attempt: Attempt, facts: dict[str, Any]) -> str:
    which = facts["job_id"] or attempt.delivery.record.position
    return f"{facts['handler']} {which} (queue {facts['queue']}, attempt {attempt.number})"
