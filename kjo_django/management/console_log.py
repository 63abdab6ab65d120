"""The log of a command that runs on and on, where the project's ``LOGGING`` has no place for it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from django.utils.module_loading import import_string

from kjo_django.logs import stamp

LEVELS = (logging.WARNING, logging.INFO)
"""From which level on a line is written, by ``--verbosity``; DEBUG above."""


class TextFormatter(logging.Formatter):
    """Writes each record as a line with its time in the process's time zone, and that zone."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        """Return the record's time, to the millisecond, and the offset of its zone."""
        return stamp(record.created)


@contextmanager
def logged_to_stderr(verbosity: int, *, as_json: bool = False) -> Iterator[None]:
    """Write what ``kjo_django`` logs in the block to the standard error stream: Python itself
    writes warnings only, and without their time.

    A logger below ``kjo_django`` that has a handler of its own is left to that. Nothing is changed
    where the project's ``LOGGING`` gives ``kjo_django``, or the root, a handler;
    a level that it gives ``kjo_django`` stays.

    :param verbosity: 0 for warnings and errors, 1 for a line of each start and end of a job, more
        for all.
    :param as_json: each line is a JSON object.
    """
    logger = logging.getLogger("kjo_django")  # noqa: TID251 - it is configured, not called
    if logger.hasHandlers():
        yield
        return
    handler, level = logging.StreamHandler(), logger.level
    handler.addFilter(_has_no_handler_of_its_own)
    if as_json:
        handler.addFilter(import_string("kjo_django.contrib.logging.JobContextFilter")())
        handler.setFormatter(import_string("kjo_django.contrib.logging.JsonFormatter")())
    else:
        handler.setFormatter(TextFormatter())
    logger.addHandler(handler)
    if level == logging.NOTSET:
        logger.setLevel(LEVELS[verbosity] if verbosity < len(LEVELS) else logging.DEBUG)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _has_no_handler_of_its_own(record: logging.LogRecord) -> bool:
    name = record.name
    while name.startswith("kjo_django."):
        if logging.getLogger(name).handlers:  # noqa: TID251 - it is looked at, not called
            return False
        name = name.rpartition(".")[0]
    return True
