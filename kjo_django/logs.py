"""Loggers whose own errors are nobody else's: what becomes of a job does not depend on logging."""

from __future__ import annotations

import logging
import sys
import threading
import time
import traceback
from asyncio import CancelledError
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Any

from kjo_django.exceptions import JobTimeoutError

COMPLAINT_INTERVAL = 60.0
"""Seconds between two complaints about logging on the standard error stream."""

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


FOREIGN = ("asyncio", "django.dispatch", "django.tasks", "django_tasks", "py.warnings")
"""Loggers of others that are called where an error would end more than it is about: an event loop,
or the calls of a signal's other receivers."""
PASSED = (JobTimeoutError, SystemExit, KeyboardInterrupt, GeneratorExit, CancelledError)
"""What is raised wherever a thread or a task is, logging or not."""
_thread = threading.local()


class Logger(_Adapter):
    """A logger that raises nothing.

    The standard library keeps an error of a handler's ``emit`` from the caller. What a filter or a
    handler's ``handle`` raises reaches whoever logs, and would end a worker's thread in the middle
    of recording a job. Here it is reported on the standard error stream, once a minute at most.

    What interrupts or ends a thread may come while it logs, and is raised on.
    """

    _complain_at = 0.0

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Log a message, as ``logging.Logger.log`` does."""
        if not self.isEnabledFor(level):
            return
        # The caller is one frame further up.
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        with contained(msg):
            self.logger.log(level, msg, *args, **kwargs)


def stamp(moment: float) -> str:
    """Return a time (seconds since 1970) in the process's time zone, to the millisecond, with the
    offset of that zone."""
    return datetime.fromtimestamp(moment).astimezone().isoformat(" ", "milliseconds")


def get_logger(name: str) -> Logger:
    """Return the logger of this name, as ``logging.getLogger`` does.

    :param name: ``kjo_django``, or a name below it.
    """
    return Logger(logging.getLogger(name), {})  # noqa: TID251 - the one that all use


def contain_others() -> None:
    """Keep what ``LOGGING`` raises for the records of ``FOREIGN`` from who logs them, in this
    process; to be called by who runs jobs."""
    for name in FOREIGN:
        logger = logging.getLogger(name)  # noqa: TID251 - it is another's
        if getattr(logger.handle, "is_contained", False):
            continue
        logger.handle = _contained_handle(logger.handle)  # type: ignore[method-assign, assignment]


def _contained_handle(
    handle: Callable[[logging.LogRecord], None],
) -> Callable[[logging.LogRecord], None]:
    def handle_contained(record: logging.LogRecord) -> None:
        with contained(record.msg):
            handle(record)

    handle_contained.is_contained = True  # type: ignore[attr-defined]
    return handle_contained


@contextmanager
def contained(msg: object) -> Iterator[None]:
    """Keep an error of ``LOGGING`` from the caller, and report it. What a handler logs itself is
    contained with what it was called for: it would go on for ever else, were it called again.

    :param msg: says in the report what was to be logged.
    """
    if getattr(_thread, "is_contained", False):
        yield
        return
    _thread.is_contained = True
    try:
        yield
    except PASSED:
        raise
    except BaseException:
        _complain(msg)
    finally:
        _thread.is_contained = False


def _complain(msg: object) -> None:
    """Report the error that is being handled, unless one was reported just now."""
    now = time.monotonic()
    if now < Logger._complain_at or sys.stderr is None:
        return
    Logger._complain_at = now + COMPLAINT_INTERVAL
    try:
        sys.stderr.write(f"A filter or a handler of LOGGING failed. The message: {msg}\n")
        traceback.print_exc(file=sys.stderr)
    except PASSED:
        raise
    except Exception:  # noqa: S110 - nobody is left to tell
        pass
