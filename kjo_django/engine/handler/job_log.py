"""The last lines that were logged while a job ran: they are kept with an attempt that fails."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from kjo_django.engine.handler.context import BatchContext, JobContext
from kjo_django.exceptions import text_of
from kjo_django.logs import PASSED, stamp
from kjo_django.messages.serializers import one_line, storable_text
from kjo_django.running_job import Run, running

LONGEST_LINE = 1_000
LONGEST_LOG = 20_000
"""Characters of a line, and of all lines of an attempt, that are kept."""

_lock, _thread = threading.Lock(), threading.local()
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
            # Where somebody else has put one around it meanwhile, it stays, and keeps nothing.
            if logging.getLogRecordFactory() is keeper:
                logging.setLogRecordFactory(keeper.make)
            for other in _keepers:
                if other.make is keeper:
                    other.make = keeper.make


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
        # A record that is made of a dictionary, as of another process, has no name yet.
        if run is not None and record.name and _keepers and _keepers[-1] is self:
            _keep(run, record, self.most)
        return record


def _keep(run: Run, record: logging.LogRecord, most: int) -> None:
    """Keep the line of a record with its run; of a batch of several items, which have all their
    lines in common, with none."""
    if not isinstance(run, JobContext):
        assert isinstance(run, BatchContext)
        if len(run.items) > 1:
            return
        (run,) = run.items
    if getattr(_thread, "is_writing", False):
        return  # an argument of a record logs while it is made text
    _thread.is_writing = True
    try:
        line = _line_of(record)
    except PASSED:
        raise
    except Exception:
        return  # whoever writes the record meets the same error
    finally:
        _thread.is_writing = False
    if run.log_lines is None:
        run.log_lines = deque(maxlen=most)
    run.log_lines.append(line)


def _line_of(record: logging.LogRecord) -> str:
    text = record.getMessage()[:LONGEST_LINE]
    if record.exc_info and (error := record.exc_info[1]) is not None:
        text = f"{text}: {type(error).__name__}: {text_of(error)[:LONGEST_LINE]}"
    line = f"{stamp(record.created)} {record.levelname} {record.name}: {one_line(text)}"
    return line[:LONGEST_LINE]
