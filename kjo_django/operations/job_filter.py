"""What somebody looks for among the jobs, and how it is written:

    queue:emails handler:shop.send_* state:failed error:"rate limit" args.order_id:17 since:2h word

Each qualifier once, words as many as wanted; all of them must hold. ``str`` writes what ``parse``
reads, so that a search can be kept as an address.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from datetime import datetime, time, timedelta
from typing import Any
from uuid import UUID

from django.utils import timezone
from django.utils.dateparse import parse_date, parse_datetime

from kjo_django.messages.serializers import storable_text
from kjo_django.operations.redaction import is_redacted
from kjo_django.retries.policy import LONGEST_DELAY
from kjo_django.states import JobStatus

MAX_LENGTH = 40_000
"""Characters of a search."""
MAX_IDS = 1000
MAX_WORDS = 100
"""Each is a condition of its own; a thousand are more than SQLite takes."""
NEEDS_PAYLOADS = (
    "To search payloads, keys, unique ids and error texts takes the permission to see payloads."
)
_UNITS = {"w": 604_800, "d": 86_400, "h": 3600, "m": 60, "s": 1}

Moment = datetime | timedelta
"""A time, or how long ago."""


@dataclass(frozen=True, slots=True)
class JobFilter:
    """Which jobs; what is not given does not restrict. A text that ends in ``*`` is a beginning."""

    ids: tuple[UUID, ...] = ()
    state: str | None = None
    """As people are shown it, ``scheduled`` and ``processing`` included."""
    queue: str | None = None
    handler: str | None = None
    key: str | None = None
    unique_id: str | None = None
    error: str | None = None
    """Part of the latest error's text, in any case."""
    attempts: int | None = None
    """At least so many are spent."""
    since: Moment | None = None
    """Created then or later."""
    until: Moment | None = None
    """Created earlier."""
    arguments: tuple[tuple[str, str], ...] = ()
    """Paths into the payload, such as ``order.id``, and what is to be found there."""
    words: tuple[str, ...] = ()
    """Each is the id, unique id or key, or a part of the handler's name or of the error."""

    is_limited: bool = field(default=False, compare=False)
    """Words are looked for in ids and names of handlers only."""

    def limited(self) -> JobFilter:
        """Return it for who may not see payloads: what is found tells what is in there.

        :raises ValueError: it asks for what a payload holds, or for what may quote one.
        """
        asked = [name for name in ("key", "unique_id", "error") if getattr(self, name) is not None]
        if asked or self.arguments:
            raise ValueError(NEEDS_PAYLOADS)
        return replace(self, is_limited=True)

    @property
    def is_empty(self) -> bool:
        """Whether it takes everything."""
        return self == JobFilter()

    def __str__(self) -> str:
        parts = [",".join(map(str, self.ids))] if self.ids else []
        parts = [f"id:{part}" for part in parts]
        for name, attribute in _SIMPLE.items():
            value = getattr(self, attribute)
            if value is not None:
                parts.append(f"{name}:{_quoted(_text_of(value))}")
        parts += [f"args.{path}:{_quoted(value)}" for path, value in self.arguments]
        parts += [_quoted(word, is_word=True) for word in self.words]
        return " ".join(parts)

    def at(self, now: datetime) -> JobFilter:
        """Return it with every "so long ago" made a time, to mean the same later on."""
        return replace(
            self,
            since=now - self.since if isinstance(self.since, timedelta) else self.since,
            until=now - self.until if isinstance(self.until, timedelta) else self.until,
        )


def parse(text: str) -> JobFilter:
    """Read a search.

    :raises ValueError: it cannot be understood; the text says why, and what is near.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"A search has at most {MAX_LENGTH} characters")
    if storable_text(text) != text:
        raise ValueError("The search holds a character that no database keeps")
    found: dict[str, Any] = {}
    arguments: list[tuple[str, str]] = []
    words: list[str] = []
    for qualifier, value in _tokens(text):
        if qualifier is None:
            words.append(value)
        elif qualifier.startswith("args."):
            arguments.append((_path(qualifier.removeprefix("args.")), value))
        else:
            name = _QUALIFIERS.get(_ALIASES.get(qualifier, qualifier))
            if name is None:
                raise ValueError(_unknown(qualifier))
            if name in found:
                raise ValueError(f"{qualifier}: is given twice")
            found[name] = _CONVERT.get(name, _some_text)(qualifier, value)
    if len(words) + len(arguments) > MAX_WORDS:
        raise ValueError(f"A search has at most {MAX_WORDS} words and args.")
    return JobFilter(**found, arguments=tuple(arguments), words=tuple(words))


# --- Reading --------------------------------------------------------------------------------------

_ALIASES = {"task": "handler", "status": "state", "unique_id": "unique"}
_SIMPLE = {
    "state": "state",
    "queue": "queue",
    "handler": "handler",
    "key": "key",
    "unique": "unique_id",
    "error": "error",
    "attempts": "attempts",
    "since": "since",
    "until": "until",
}
_QUALIFIERS = {"id": "ids", **_SIMPLE}
_VALUE = r'"(?:[^"\\]|\\.)*"|[^\s"]+'
_TOKEN = re.compile(rf"\s*(?:(?P<name>[A-Za-z_][\w.-]*):(?P<value>{_VALUE})?|(?P<word>{_VALUE}))")
_AGO = re.compile(r"(\d{1,9})([wdhms])")


def _tokens(text: str) -> list[tuple[str | None, str]]:
    tokens: list[tuple[str | None, str]] = []
    place, text = 0, text.rstrip()
    while place < len(text):
        match = _TOKEN.match(text, place)
        if match is None or (match.end() < len(text) and not text[match.end()].isspace()):
            raise ValueError(f"A quote is not closed, or text follows it: {text[place:].strip()}")
        name, value, word = match["name"], match["value"], match["word"]
        if name is not None and value is None:
            raise ValueError(f"{name}: needs a value, without a space before it")
        tokens.append((name, _unquoted(value if name is not None else word)))
        place = match.end()
    return tokens


def _unquoted(text: str) -> str:
    if text.startswith('"'):
        return re.sub(r"\\(.)", r"\1", text[1:-1], flags=re.DOTALL)
    return text


def _unknown(qualifier: str) -> str:
    known = [*_QUALIFIERS, "args."]
    close = difflib.get_close_matches(qualifier, known, n=1)
    hint = f"did you mean {close[0]}:?" if close else f"known are {', '.join(known)}<name>."
    return f"There is no {qualifier}: to search by; {hint} To look for the text itself, quote it."


def _some_text(qualifier: str, value: str) -> str:
    if not value or len(value) > 255:
        raise ValueError(f"{qualifier}: takes text of 1 to 255 characters")
    return value


def _state(qualifier: str, value: str) -> str:
    if value not in JobStatus.values:
        close = difflib.get_close_matches(value, JobStatus.values, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(JobStatus.values)}."
        raise ValueError(f"{value!r:.80} is no state; {hint}")
    return str(value)


def _ids(qualifier: str, value: str) -> tuple[UUID, ...]:
    parts = value.split(",")
    if len(parts) > MAX_IDS:
        raise ValueError(f"id: takes at most {MAX_IDS} ids")
    try:
        return tuple(UUID(part) for part in parts)
    except ValueError:
        raise ValueError(f"id: takes ids of jobs, not {value!r:.80}") from None


def _attempts(qualifier: str, value: str) -> int:
    if not value.isascii() or not value.isdigit() or len(value) > 9:
        raise ValueError(f"attempts: takes a whole number, not {value!r:.80}")
    return int(value)


def _moment(qualifier: str, value: str) -> Moment:
    ago = _AGO.fullmatch(value)
    if ago is not None and (span := int(ago[1]) * _UNITS[ago[2]]) <= LONGEST_DELAY.total_seconds():
        return timedelta(seconds=span)
    try:
        moment = parse_datetime(value)
        day = parse_date(value) if moment is None else None
    except ValueError:
        moment = day = None
    if day is not None:
        moment = datetime.combine(day, time())
    if moment is None or not 1970 < moment.year < 9000:
        known = "2026-01-31, 2026-01-31T12:00 or 2h"
        raise ValueError(f"{qualifier}: takes a time such as {known}, not {value!r:.80}")
    return timezone.make_aware(moment) if timezone.is_naive(moment) else moment


def _path(path: str) -> str:
    if any(is_redacted(part) for part in path.split(".")):
        raise ValueError(f"args.{path} is a secret; it is not searched")
    if not all(path.split(".")):
        raise ValueError("args. takes the name of a field, such as args.order_id:17")
    return path


_CONVERT: dict[str, Callable[[str, str], Any]] = {
    "ids": _ids,
    "state": _state,
    "attempts": _attempts,
    "since": _moment,
    "until": _moment,
}


# --- Writing --------------------------------------------------------------------------------------


def _text_of(value: Any) -> str:
    if isinstance(value, timedelta):
        seconds = int(value.total_seconds())
        unit = next(unit for unit, size in _UNITS.items() if seconds % size == 0)
        return f"{seconds // _UNITS[unit]}{unit}"
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _quoted(text: str, *, is_word: bool = False) -> str:
    is_plain = text and not re.search(r'[\s"]', text) and not (is_word and ":" in text)
    return text if is_plain else '"' + re.sub(r'(["\\])', r"\\\1", text) + '"'


assert {each.name for each in fields(JobFilter)} == {
    *_QUALIFIERS.values(),
    *("arguments", "words", "is_limited"),
}
