"""Types of the values people give: each converts, or raises ValueError saying what it wants.

``option`` declares the fields of settings with them, and ``read_options`` reads a dict into those.
"""

from __future__ import annotations

import difflib
import inspect
import math
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from kjo_django.refusals import RefusedError, Wording, shown
from kjo_django.refusals import noop as _

T = TypeVar("T")

ANY_SIZE = sys.maxsize
"""As a limit of bytes: none."""
LONGEST = timedelta(days=36_500)
"""The longest time anything takes or is kept: every database and every clock knows the moment so
far away, and a lock can be waited for so long."""

signature_of = inspect.signature
"""Returns the signature of a function, whose annotations may name what only a type checker imports.
Since Python 3.14 a function can be declared so without ``from __future__ import annotations``."""
if sys.version_info >= (3, 14):
    from annotationlib import Format

    signature_of = partial(inspect.signature, annotation_format=Format.FORWARDREF)


def is_kept(number: float) -> bool:
    """Return whether JSON in a column of every database keeps a number. MySQL rounds whole ones of
    more than 64 bits, and none has a word for infinity."""
    return number in range(-(2**63), 2**64) if isinstance(number, int) else math.isfinite(number)


def duration(value: Any) -> timedelta:
    """A positive timedelta, or a positive number of seconds; more than a century is a century."""
    return min(_positive(value), LONGEST)


def timedelta_of(value: Any) -> Any:
    """Return a number as a timedelta of so many seconds, anything else unchanged."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return timedelta(seconds=value)
        except (OverflowError, ValueError):
            raise ValueError("a timedelta or number of seconds that a calendar can hold") from None
    return value


def _positive(value: Any) -> timedelta:
    value = timedelta_of(value)
    if not isinstance(value, timedelta) or value <= timedelta(0):
        raise ValueError("a positive timedelta or number of seconds")
    return value


def lifetime(value: Any) -> timedelta:
    """A duration that a result may be kept for."""
    found = _positive(value)
    if not timedelta(milliseconds=1) <= found <= LONGEST:
        raise ValueError("a duration from a millisecond to 100 years")
    return found


def whole(minimum: int, maximum: int | None = None) -> Callable[[Any], int]:
    """A whole number, at least ``minimum`` and at most ``maximum``."""
    wanted = _("a whole number from %(least)s to %(most)s")
    if maximum is None:
        wanted = _("a whole number, at least %(least)s")

    def convert(value: Any) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < minimum or (maximum is not None and value > maximum):
            raise RefusedError(wanted, least=minimum, most=maximum)
        return int(value)

    return convert


MAX_ATTEMPTS = 2**31 - 1
"""What the column of a job's attempts holds."""
attempts = whole(1, MAX_ATTEMPTS)
MAX_PRIORITY = 100
"""As in Django's tasks; the least is its negative."""
priority = whole(-MAX_PRIORITY, MAX_PRIORITY)


def number(minimum: float, maximum: float) -> Callable[[Any], float]:
    """A number from ``minimum`` to ``maximum``."""

    def convert(value: Any) -> float:
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not minimum <= value <= maximum:
            raise RefusedError(
                _("a number from %(least)s to %(most)s"), least=minimum, most=maximum
            )
        return float(value)

    return convert


def flag(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise RefusedError(_("True or False"))
    return value


def text(value: Any) -> str:
    """Text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise RefusedError(_("text that is not empty"))
    return value


MAX_QUEUE_LENGTH = 100
"""What the column of a queue's name holds."""
_is_word = re.compile(r"[^\s/]+").fullmatch


def queue_name(value: Any) -> str:
    """The name of a queue: what an address of the REST API and of the dashboard can hold."""
    if not isinstance(value, str) or len(value) > MAX_QUEUE_LENGTH or not _is_word(value):
        raise ValueError(
            f"text of at most {MAX_QUEUE_LENGTH} characters, without blanks and slashes"
        )
    return str(value)


MAX_NAME_LENGTH = 100
"""What the column of a service's name holds."""


def name_text(value: Any) -> str:
    """Text that is not empty, of at most 100 characters."""
    if not isinstance(value, str) or not value.strip() or len(value) > MAX_NAME_LENGTH:
        raise ValueError(f"text of 1 to {MAX_NAME_LENGTH} characters")
    return value


def short_text(value: Any) -> str:
    """Text of at most 100 characters."""
    if not isinstance(value, str) or len(value) > 100:
        raise ValueError("text of at most 100 characters")
    return value


def mapping(value: Any) -> dict[str, Any]:
    """A dict whose keys are text."""
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ValueError("a dict whose keys are text")
    return dict(value)


def texts(value: Any) -> tuple[str, ...]:
    """A list of texts."""
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ValueError("a list of texts")
    return tuple(text(item) for item in value)


def optional(convert: Callable[[Any], T]) -> Callable[[Any], T | None]:
    """What ``convert`` takes, or None."""
    return lambda value: None if value is None else convert(value)


def whole_seconds(minimum: int, maximum: int = 3650 * 86_400) -> Callable[[Any], int]:
    """A whole number of seconds, or a timedelta of one; ten years at most."""
    check = whole(minimum, maximum)

    def convert(value: Any) -> int:
        if isinstance(value, timedelta) and value % timedelta(seconds=1) == timedelta(0):
            value //= timedelta(seconds=1)
        try:
            return check(value)
        except ValueError:
            wanted = _("a timedelta or number of whole seconds from %(least)s to %(most)s")
            raise RefusedError(wanted, least=minimum, most=maximum) from None

    return convert


def one_of(*names: str) -> Callable[[Any], str]:
    """One of these texts."""

    def convert(value: Any) -> str:
        if value not in names:
            raise UnknownNameError(value, names)
        return str(value)

    return convert


class UnknownNameError(RefusedError):
    """A value is none of the texts that there are."""

    def __init__(self, value: Any, names: Collection[str]) -> None:
        super().__init__(_("one of %(names)s"), names=", ".join(map(repr, names)))
        self.hint = did_you_mean(str(value), names, "")


optional_duration = optional(duration)
optional_text = optional(text)


_RATE = re.compile(r"\s*(\d+)\s*/\s*(\d*)\s*([smhd])\s*", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
MOST_AT_ONCE = 1_000_000
"""The largest number of a rate, and of a burst."""
CAUGHT_UP = 0.5
"""Seconds of late starts that a rate catches up, at most."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How many jobs may start in a time: at most ``count + burst - 1`` in any ``seconds``.

    :param burst: how many may start at once when none has started for long. With 1 they are spread
        evenly, but for what has been late, which is caught up.
    """

    count: int
    seconds: float
    burst: int = 1

    @property
    def interval(self) -> float:
        """Seconds from one start to the next where they are evenly spread: a little longer than
        the rate says, since a start counts for up to a two-hundredth longer than its window."""
        return 1.015 * self.seconds / self.count

    @property
    def ahead(self) -> float:
        """Seconds by which a start may come before its even moment."""
        return max(
            (self.burst - 1) * self.interval, min(self.seconds / 2, max(self.interval, CAUGHT_UP))
        )

    def __str__(self) -> str:
        unit = next((u for u, each in reversed(_UNITS.items()) if self.seconds == each), "")
        every = unit or f"{self.seconds:.0f}s"
        return f"{self.count}/{every}"


def rate(value: Any) -> Rate:
    """A number of jobs per time, as ``5/s``, ``100/m`` or ``10/30s``."""
    if isinstance(value, Rate):
        return value
    if not isinstance(value, str):
        raise RefusedError(_A_RATE)
    found = _RATE.fullmatch(value)
    fault = _fault_of_rate(value) if found is None else _fault_of_numbers(*found.groups())
    if found is None or fault is not None:
        raise RefusedError(_("%(wanted)s; %(fault)s"), wanted=Wording(_A_RATE), fault=fault)
    return Rate(int(found[1]), float(int(found[2] or 1) * _UNITS[found[3]]))


_A_RATE = _("a rate such as '5/s', '100/m' or '10/30s'")


def _fault_of_rate(value: str) -> Wording:
    """Return which part of a text keeps it from being a rate."""
    count, slash, every = value.partition("/")
    if not slash:
        return Wording(_("it has no '/'"))
    if re.fullmatch(r"\s*\d+\s*", count, re.ASCII) is None:
        return Wording(_("%(part)r before the '/' is no whole number"), {"part": count.strip()})
    text = _("%(part)r after the '/' is no time: s, m, h or d, or so many of them")
    return Wording(text, {"part": every.strip()})


def _fault_of_numbers(count: str, every: str, unit: str) -> Wording | None:
    if not 1 <= int(count) <= MOST_AT_ONCE:
        text = _("%(count)s is not from 1 to %(most)s")
        return Wording(text, {"count": count, "most": MOST_AT_ONCE})
    if not 1 <= int(every or 1) * _UNITS[unit] <= 31 * 86_400:
        return Wording(_("its time must be from 1 second to 31 days"))
    return None


def option(
    convert: Callable[[Any], Any], default: Any, help: str, *, is_secret: bool = False
) -> Any:
    """Declare a setting: its type, its default and a line for the reference.

    :param is_secret: its value is never shown.
    """
    metadata = {"convert": convert, "help": help, "is_secret": is_secret}
    kwargs: dict[str, Any] = {"metadata": metadata, "repr": not is_secret}
    if isinstance(default, (dict, list)):
        kwargs["default_factory"] = lambda: type(default)(default)
    else:
        kwargs["default"] = default
    return field(**kwargs)


@dataclass(frozen=True)
class Problem:
    """A fault of the settings: what is wrong and what to do."""

    message: str
    hint: str
    is_unknown_key: bool = False
    key: str = ""
    """The key at fault, where it is one."""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()

    def translated(self) -> str:
        """Return what ``str`` says, in the active language."""
        return f"{shown(self.message)} {shown(self.hint)}".strip()


def read_options(
    kind: type[Any], given: Any, where: str, *, upper: bool = False
) -> tuple[Any, list[Problem]]:
    """Return a dict as the options of ``kind``, and its faults; a key at fault keeps the default.

    :param where: what the dict is, for the faults' messages.
    :param upper: whether keys are the options' names in upper case.
    """
    if not isinstance(given, Mapping):
        return kind(), [Problem(f"{where} must be a dict, not {type(given).__name__}.", "")]
    known = {f.name.upper() if upper else f.name: f for f in fields(kind)}
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in given.items():
        declared = known.get(key)
        if declared is None:
            problems.append(_unknown_key(key, known, where))
            continue
        try:
            values[declared.name] = declared.metadata["convert"](value)
        except ValueError as error:
            said = type(value).__name__ if declared.metadata["is_secret"] else f"{value!r:.80}"
            facts = {"field": f"{where}[{key!r}]", "wanted": error, "value": said}
            message = Wording(_("%(field)s must be %(wanted)s, not %(value)s."), facts)
            hint = getattr(error, "hint", "") or declared.metadata["help"]
            problems.append(Problem(message, hint, key=key))
    return kind(**values), problems


MEANT = {
    "attempts": "max_attempts",
    "autoretry_for": "retry_on",
    "countdown": "delay",
    "discard_on": "give_up_on",
    "dont_autoretry_for": "give_up_on",
    "eta": "run_at",
    "expires": "expires_at",
    "job_id": "id",
    "max_retries": "max_attempts",
    "max_tries": "max_attempts",
    "queue_name": "queue",
    "retries": "max_attempts",
    "retry": "max_attempts",
    "retry_backoff": "backoff",
    "run_after": "run_at",
    "soft_time_limit": "timeout",
    "time_limit": "timeout",
    "ttl": "result_ttl",
    "unique_id": "id",
}
"""What people call options elsewhere, and their names here."""


def refuse_unknown(given: Iterable[str], known: Collection[str], function: str) -> None:
    """Check the names of a call's options.

    :param function: how its caller wrote it.
    :raises TypeError: one is not known; says which one was meant, or which there are.
    """
    for name in given:
        if name not in known:
            meant = MEANT.get(name)
            hint = did_you_mean(name, known, f"It takes: {listed(known)}.")
            if meant in known:
                hint = f"Did you mean {meant!r}?"
            raise TypeError(f"{function}() has no option {name!r}. {hint}")


def did_you_mean(name: str, known: Iterable[str], otherwise: str) -> str:
    """Return which known name is close to a wrong one, for a message; ``otherwise`` if none is."""
    return str(meant_by(name, known, Wording(otherwise)))


def meant_by(name: str, known: Iterable[str], otherwise: Wording) -> Wording:
    """Return what ``did_you_mean`` does, for a text that is translated where people read it."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return Wording(_("Did you mean %(name)r?"), {"name": close[0]}) if close else otherwise


def listed(names: Iterable[str]) -> str:
    """Return names for a message, sorted."""
    return ", ".join(sorted(names))


def unknown_key(given: Mapping[Any, Any], known: Collection[str], where: str) -> str:
    """Return what is wrong with the first key that is not known, "" if all are."""
    return next((str(_unknown_key(key, known, where)) for key in given if key not in known), "")


def _unknown_key(key: Any, known: Collection[str], where: str) -> Problem:
    hint = did_you_mean(str(key), known, "") or did_you_mean(
        str(key).upper(), known, f"Known keys: {listed(known)}."
    )
    message = f"{where} has an unknown key {key!r}."
    return Problem(message, hint, is_unknown_key=True, key=str(key))


def count_within(sizes: Iterable[int], max_bytes: int) -> int:
    """Return how many values a limit allows: all up to the one with which they reach it, and so
    one of any size."""
    total = count = 0
    for size in sizes:
        if total >= max_bytes:
            break
        total += size
        count += 1
    return count
