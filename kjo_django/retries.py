"""When and whether to try again, without a clock and without a database.

Errors are matched by class through the MRO and by class name, so exceptions of libraries that use
these names need no import here.
"""

from __future__ import annotations

import errno
import inspect
import random
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any, Literal

from kjo_django.exceptions import (
    JobTimeoutError,
    MessageError,
    PayloadError,
    PermanentError,
    Retry,
    StalledError,
    import_path,
    is_ctrl_c,
)
from kjo_django.logs import get_logger
from kjo_django.values import number, signature_of, timedelta_of

logger = get_logger("kjo_django")

LONGEST_DELAY = timedelta(days=3650)
"""What somebody asks for beyond this would overflow the calendar sooner or later."""
LONGEST_PAUSE = timedelta(hours=1)
"""The longest pause that a ``Retry-After`` makes. Then the service is asked again, and may name
another time."""


@dataclass(frozen=True, slots=True)
class Backoff:
    """The delay before the next attempt: ``base · 2^(attempt-1)``, at most ``maximum``.

    :param jitter: the share of the delay, 0 to 1, drawn at random, so that jobs which failed
        together do not come back together. The delay never exceeds ``maximum`` and never falls
        below ``(1 - jitter)`` of the undisturbed one.
    :param is_minimum: the undisturbed delay is the least there is; jitter is added to it instead,
        also beyond ``maximum``.
    """

    base: timedelta
    maximum: timedelta
    jitter: float = 0.2
    is_minimum: bool = False

    def delay(self, attempt: int, draw: float | None = None) -> timedelta:
        """Return the delay after failed attempt number ``attempt`` (from 1).

        :param draw: a number from 0 to 1 in place of the random one.
        """
        # Beyond 2^62 every sensible base has long reached the cap.
        most = max(self.maximum.total_seconds(), 0.0)
        exact = min(self.base.total_seconds() * 2.0 ** min(attempt - 1, 62), most)
        draw = random.random() if draw is None else draw  # noqa: S311 - no secret
        jitter = self.jitter if self.is_minimum else -self.jitter
        return timedelta(seconds=exact * (1 + jitter * draw))


def exponential(
    base: timedelta | float, *, max: timedelta | float = 600, jitter: float = 0.2
) -> Backoff:
    """Return a back-off that waits ``base`` before the second attempt and doubles the delay each
    time.

    :param base: the first delay, a timedelta or seconds.
    :param max: the longest delay, a timedelta or seconds.
    :param jitter: the random part of each delay, from 0 to 1.
    :raises ValueError: a value is not valid.
    """
    given = {"base": (base, _delay), "max": (max, _delay), "jitter": (jitter, number(0, 1))}
    for name, (value, check) in given.items():
        try:
            check(value)
        except ValueError as error:
            raise ValueError(f"exponential(): {name} must be {error}, not {value!r:.80}") from None
    least, most = _delay(base), _delay(max)
    if not timedelta(0) < least <= most:
        raise ValueError(f"exponential(): base must be above 0 and at most max, not {base!r:.80}")
    return Backoff(least, most, jitter)


OwnBackoff = Backoff | Callable[[int, BaseException], Any]
"""A job's own back-off. A function is given the number of the failed attempt and its error, and
returns the delay: a timedelta, or seconds."""


def backoff_of(value: Any) -> OwnBackoff:
    """A back-off: ``exponential(…)``, a delay, an ascending list of delays whose last one repeats,
    or a function of attempt and error. Delays are timedeltas or seconds."""
    if isinstance(value, Backoff):
        return value
    if callable(value):
        with suppress(ValueError):  # the signature of a builtin is not known
            try:
                signature_of(value).bind(1, Exception())
            except TypeError:
                raise TypeError("a function that takes the attempt and its error") from None
        if inspect.iscoroutinefunction(value):
            raise TypeError("an ordinary function, not a coroutine's")
        return value  # type: ignore[no-any-return]
    if not isinstance(value, (list, tuple)):
        try:
            return Backoff(delay := _delay(value), delay, 0.0)
        except ValueError as error:
            raise ValueError(f"{error}, a list of these, exponential(…) or a function") from None
    delays = [_delay(each) for each in value]
    if not delays or delays != sorted(delays):
        raise ValueError("an ascending list of delays, with at least one")
    return lambda attempt, error: delays[min(attempt, len(delays)) - 1]


def _delay(value: Any) -> timedelta:
    """A timedelta or a number of seconds, from 0 to ten years."""
    with suppress(ValueError):
        value = timedelta_of(value)
    if not isinstance(value, timedelta) or not timedelta(0) <= value <= LONGEST_DELAY:
        most = LONGEST_DELAY.days
        raise ValueError(f"a timedelta or a number of seconds, from 0 to {most:,} days")
    return value


def error_types(value: Any) -> tuple[type[BaseException], ...]:
    """An exception class, or a list of them."""
    found = tuple(value) if isinstance(value, (list, tuple, set, frozenset)) else (value,)
    if not found or not all(
        isinstance(each, type) and issubclass(each, BaseException) for each in found
    ):
        raise ValueError("an exception class or a list of exception classes")
    return found


PAUSABLE_NAMES = frozenset(
    {
        "DatabaseConnectionError",
        "ServiceUnavailableError",
        "RateLimitExceededError",
        "CircuitBreakerOpenError",
        "PausableError",
    }
)
_CLASSES = {
    "rate_limit": {"RateLimitExceededError"},
    "network": {"ServiceUnavailableError", "CircuitBreakerOpenError"},
    "database": {"DatabaseConnectionError", "OperationalError", "InterfaceError"},
}
"""Names of exceptions by the class of error they are."""
_NETWORK_ERRNOS = frozenset(
    {errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH, errno.ENETDOWN, errno.ETIMEDOUT}
)


def _names(error: BaseException) -> set[str]:
    return {kind.__name__ for kind in type(error).__mro__}


def error_class(error: BaseException) -> str:
    """Return ``rate_limit``, ``network``, ``database`` or ``default``."""
    names = _names(error)
    found = next(
        (kind for kind, known in _CLASSES.items() if not known.isdisjoint(names)), "default"
    )
    if not isinstance(error, OSError) or isinstance(error, JobTimeoutError):
        return found
    if found == "rate_limit":
        return found
    # Of an OSError of somebody's own ``errno`` is its first argument, whatever that is.
    code = error.errno if isinstance(error.errno, int) else None
    if isinstance(error, (ConnectionError, TimeoutError)) or code in _NETWORK_ERRNOS:
        return "network"
    return "database" if found == "database" else "default"


def retry_after(
    error: BaseException, now: datetime | None, *, pauses: bool = True
) -> timedelta | None:
    """Return the time that an answer of a service asked its caller to wait: the header
    ``Retry-After``, in seconds or as an HTTP date; None where there is none that can be read.

    It is the error's ``retry_after``, as ``RateLimitExceededError`` has one; or it stands in the
    answer with the status 429 or 503 that the error carries, as those of requests, httpx,
    aiohttp and urllib do.

    :param now: from which an HTTP date counts; None: no date is read.
    :param pauses: whether the error pauses by its class; otherwise only an answer counts.
    """
    try:
        value = getattr(error, "retry_after", None) if pauses else None
        if value is None:
            value = _header_of(error)
        if isinstance(value, str):
            value = _seconds_of_header(value.strip(), now)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            value = timedelta(seconds=value)
        if isinstance(value, timedelta):
            return min(max(value, timedelta(0)), LONGEST_PAUSE)
    except BaseException as wrong:
        if is_ctrl_c(wrong):
            raise
        # Whatever a service or a library put there, the error itself has to be judged.
        logger.debug("A Retry-After could not be read: %s", wrong)
    return None


def _header_of(error: BaseException) -> Any:
    """Return the header of the answer with the status 429 or 503 that an error carries, or is."""
    answer = getattr(error, "response", None)
    answer = error if answer is None else answer
    statuses = {getattr(answer, name, None) for name in ("status_code", "status", "code")}
    headers = getattr(answer, "headers", None)
    if headers is None or statuses.isdisjoint((429, 503)):
        return None
    return headers.get("Retry-After")


def _seconds_of_header(value: str, now: datetime | None) -> float:
    if value.isdecimal():
        return min(float(value), LONGEST_PAUSE.total_seconds())
    moment = parsedate_to_datetime(value)
    if now is None:
        raise ValueError("A date counts from no moment")
    if moment.tzinfo is None:  # "-0000", which says UTC
        moment = moment.replace(tzinfo=UTC)
    return (moment - now).total_seconds()


def classify(
    error: BaseException, pausable: Collection[str] = ()
) -> Literal["retry", "permanent", "pause"]:
    """Return how a failed attempt is treated.

    :param pausable: import paths or names of further exceptions that pause a partition.
    """
    if isinstance(error, StalledError):
        return "retry"
    if isinstance(error, (PermanentError, MessageError, PayloadError)):
        return "permanent"
    names = _names(error)
    if not PAUSABLE_NAMES.isdisjoint(names):
        return "pause"
    if pausable:
        paths = {import_path(kind) for kind in type(error).__mro__}
        if not paths.isdisjoint(pausable) or not names.isdisjoint(pausable):
            return "pause"
    return "retry"


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens after a failed attempt."""

    retry: bool
    """False: the job is dead-lettered."""
    delay: timedelta
    """Until the next attempt; zero when there is none."""
    pause: timedelta | None
    """How long the partition is paused; None: not at all."""
    reason: str
    """``exhausted`` or ``fatal`` of a dead letter; ``retry`` otherwise."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Decides whether and when to try again.

    :param floors: least seconds before the next attempt by class of error, where the handler has no
        back-off of its own; how long an error that pauses does so.
    :param own: the handler's own back-off, in place of ``backoff``.
    :param retry_on: the only errors that are tried again, but for ``Retry`` and those that pause;
        none named: all.
    :param give_up_on: errors that are never tried again.
    """

    backoff: Backoff
    floors: Mapping[str, float] = field(default_factory=dict)
    pausable: Collection[str] = ()
    own: OwnBackoff | None = None
    retry_on: tuple[type[BaseException], ...] = ()
    give_up_on: tuple[type[BaseException], ...] = ()

    def decide(
        self, error: BaseException, attempt: int, max_attempts: int, now: datetime | None = None
    ) -> Decision:
        """Return what follows attempt number ``attempt`` (from 1), which ended with ``error``.

        :param now: from which an HTTP date in ``Retry-After`` counts.
        """
        treatment: str = classify(error, self.pausable)
        floor = timedelta(seconds=float(self.floors.get(error_class(error), 0)))
        if treatment != "permanent":
            asked = retry_after(error, now, pauses=treatment == "pause")
            if asked is not None:
                treatment, floor = "pause", asked
        if treatment == "permanent" or self._gives_up(error, treatment):
            return Decision(False, timedelta(0), None, "fatal")
        pause = floor if treatment == "pause" else None
        if attempt >= max_attempts:
            return Decision(False, timedelta(0), pause, "exhausted")
        if isinstance(error, Retry) and isinstance(error.delay, timedelta):
            delay = min(max(error.delay, timedelta(0)), LONGEST_DELAY)
            return Decision(True, delay, None, "retry")
        delay = max(self._delay_after(error, attempt, floor), pause or timedelta(0))
        return Decision(True, min(delay, LONGEST_DELAY), pause, "retry")

    def _gives_up(self, error: BaseException, treatment: str) -> bool:
        """Whether the handler's declaration forbids another attempt."""
        if isinstance(error, StalledError):
            return False
        if isinstance(error, self.give_up_on):
            return True
        is_asked_for = treatment == "pause" or isinstance(error, Retry)
        return bool(self.retry_on) and not is_asked_for and not isinstance(error, self.retry_on)

    def _delay_after(self, error: BaseException, attempt: int, floor: timedelta) -> timedelta:
        """Return the back-off after an attempt: the handler's own; the default one, at least the
        floor, where it has none, or its own raises or returns what is no delay."""
        own = self.own
        if isinstance(own, Backoff):
            return own.delay(attempt)
        if own is None:
            return max(self.backoff.delay(attempt), floor)
        try:
            answer = own(attempt, error)
            try:
                return _delay(answer)
            except ValueError as wrong:
                raise ValueError(f"It returned {answer!r:.80}; it must return {wrong}") from None
        except BaseException as wrong:
            if is_ctrl_c(wrong):
                raise
            note = f"The job's own back-off failed, the default one was taken: {wrong!r:.300}"
            logger.exception(note)
            with suppress(Exception):
                error.add_note(note)
            return max(self.backoff.delay(attempt), floor)
