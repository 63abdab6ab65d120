"""The last lines that were logged while a job ran: they are kept with an attempt that fails."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from kjo_django.engine.handler.context import BatchContext, JobContext, runs_of
from kjo_django.exceptions import text_of
from kjo_django.logs import PASSED, stamp
from kjo_django.messages.serializers import one_line, storable_text
from kjo_django.running_job import running

LONGEST_LINE = 1_000
LONGEST_LOG = 20_000
"""Characters of a line, and of all lines of an attempt, that are kept."""

_lock = threading.Lock()
_keepers: list[_Keeper] = []
"""Those of the blocks that are open, from the outermost; the last one keeps lines."""


@contextmanager
def kept(most: int) -> Iterator[None]:
    """Within the block, let runs of handlers in this process keep the last lines that are logged
    while they run: in their own thread or task, and in those that have taken its context along.

    Every record that some logger makes is kept, as the levels of ``LOGGING`` let it. A handler of
    ``logging`` would see less, and would change what is logged where there is no other one.

    :param most: lines of a run; 0 for none.
    """
    if not most:
        yield
        return
    with _lock:
        keeper = _Keeper(logging.getLogRecordFactory(), most)
        logging.setLogRecordFactory(keeper)
        _keepers.append(keeper)
    try:
        yield
    finally:
        with _lock:
            _keepers.remove(keeper)
            # Where somebody has put another one around it meanwhile, it stays, and keeps nothing.
            if logging.getLogRecordFactory() is keeper:
                logging.setLogRecordFactory(keeper.make)


def log_of(lines: Iterable[str]) -> str:
    """Return the lines that a run has kept as one text; the last of them, where they are long."""
    return storable_text("\n".join(lines)[-LONGEST_LOG:])


class _Keeper:
    """Makes log records, and keeps their lines for the runs that log them.

    :param make: makes a record.
    """

    def __init__(self, make: Callable[..., logging.LogRecord], most: int) -> None:
        self.make, self.most = make, most

    def __call__(self, *arguments: Any, **named: Any) -> logging.LogRecord:
        record = self.make(*arguments, **named)
        run = running.get()
        if run is not None and _keepers and _keepers[-1] is self:
            assert isinstance(run, JobContext | BatchContext)
            try:
                _keep(runs_of(run), record, self.most)
            except PASSED:
                raise
            except Exception:  # noqa: S110 - whoever writes the record meets the same error
                pass
        return record


def _keep(runs: Sequence[JobContext], record: logging.LogRecord, most: int) -> None:
    if (lines := runs[0].log_lines) is None:
        lines = deque[str](maxlen=most)
        for run in runs:
            run.log_lines = lines
    text = record.getMessage()
    if record.exc_info and (error := record.exc_info[1]) is not None:
        text = f"{text}: {type(error).__name__}: {text_of(error)}"
    line = f"{stamp(record.created)} {record.levelname} {record.name}: {one_line(text)}"
    lines.append(line[:LONGEST_LINE])
