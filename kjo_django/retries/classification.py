"""What an error means for the attempt and for the messages behind it.

Errors are matched by class through the MRO and by class name, so exceptions of libraries that use
these names need no import here.
"""

from __future__ import annotations

import enum
import errno
from collections.abc import Collection

from kjo_django.exceptions import (
    JobTimeoutError,
    MessageError,
    PayloadError,
    PermanentError,
    StalledError,
)


class Verdict(enum.Enum):
    """How the pipeline treats a failed attempt."""

    RETRY = "retry"
    PERMANENT = "permanent"
    PAUSE = "pause"


PAUSABLE_NAMES = frozenset(
    {
        "DatabaseConnectionError",
        "ServiceUnavailableError",
        "RateLimitExceededError",
        "CircuitBreakerOpenError",
        "PausableError",
    }
)
_RATE_LIMIT_NAMES = frozenset({"RateLimitExceededError"})
_NETWORK_NAMES = frozenset({"ServiceUnavailableError", "CircuitBreakerOpenError"})
_DATABASE_NAMES = frozenset({"DatabaseConnectionError", "OperationalError", "InterfaceError"})
_NETWORK_ERRNOS = frozenset(
    {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
)
_PERMANENT = (PermanentError, MessageError, PayloadError)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def is_rate_limit_error(error: BaseException) -> bool:
    """Return whether a service refuses more requests for now."""
    return not _RATE_LIMIT_NAMES.isdisjoint(_names(error))


def is_network_error(error: BaseException) -> bool:
    """Return whether something at the other end of a connection is out of reach."""
    if isinstance(error, OSError) and not isinstance(error, JobTimeoutError):
        # Of an OSError of somebody's own ``errno`` is its first argument, whatever that is.
        number = error.errno if isinstance(error.errno, int) else None
        return isinstance(error, (ConnectionError, TimeoutError)) or number in _NETWORK_ERRNOS
    return not _NETWORK_NAMES.isdisjoint(_names(error))


def is_database_error(error: BaseException) -> bool:
    """Return whether a database could not be used (as opposed to refusing the data)."""
    return not _DATABASE_NAMES.isdisjoint(_names(error))


def error_class(error: BaseException) -> str:
    """Return ``rate_limit``, ``network``, ``database`` or ``default``."""
    if is_rate_limit_error(error):
        return "rate_limit"
    if is_network_error(error):
        return "network"
    if is_database_error(error):
        return "database"
    return "default"


def import_path(kind: type[BaseException]) -> str:
    """Return ``module.QualName``; builtins without their module."""
    if kind.__module__ == "builtins":
        return kind.__qualname__
    return f"{kind.__module__}.{kind.__qualname__}"


def classify(error: BaseException, pausable: Collection[str] = ()) -> Verdict:
    """Return what a failed attempt means.

    :param pausable: import paths or names of further exceptions that pause a partition.
    """
    if isinstance(error, StalledError):
        return Verdict.RETRY
    if isinstance(error, _PERMANENT):
        return Verdict.PERMANENT
    names = _names(error)
    if not PAUSABLE_NAMES.isdisjoint(names):
        return Verdict.PAUSE
    if pausable:
        paths = {import_path(kind) for kind in type(error).__mro__}
        if not paths.isdisjoint(pausable) or not names.isdisjoint(pausable):
            return Verdict.PAUSE
    return Verdict.RETRY
