"""What is kept of an error: in rows, in dead letters and in the headers of their records."""

from __future__ import annotations

import hashlib
import re
import traceback as tracebacks
from dataclasses import dataclass
from typing import Any

from kjo_django.exceptions import answer_of, import_path, text_of
from kjo_django.messages.serializers import MAX_ERROR_LENGTH, kept_json, storable_text

MAX_TRACEBACK_LENGTH = 20_000
MAX_CODE_LENGTH = 100
MAX_DETAILS = 10_000
"""Bytes of JSON; larger details of an error are not kept."""


@dataclass(frozen=True, slots=True)
class FailureFacts:
    """What is kept of one error, read once: an error of somebody else may take long to describe,
    or describe itself in another way the second time.

    Texts are as every database takes them.
    """

    error: BaseException | None = None
    type: str = ""
    """The import path of its type."""
    text: str = ""
    """Its text, of any length; the name of its type where it has none."""
    shown_text: str = ""
    """Its text, as long as rows keep it."""
    code: str = ""
    """Its ``code``, or that of its details."""
    details: Any = None
    """What its ``to_dict()`` returns, or else its ``details``, as far as a column can hold it."""
    traceback: str = ""
    """Its traceback. A long one has lost its beginning, not the line that raised."""

    @classmethod
    def of(cls, error: BaseException | None, intro: str = "") -> FailureFacts:
        """Return the facts of an error.

        :param intro: comes before the error's text.
        """
        if error is None:
            return NO_FAILURE
        kind, said = import_path(type(error)), text_of(error)
        code, details = _code_and_details(error)
        traceback = _traceback_of(error)
        text = storable_text(f"{intro}{said}")
        return cls(
            error,
            type=storable_text(kind, 255),
            text=text,
            shown_text=text[:MAX_ERROR_LENGTH],
            code=code,
            details=details,
            traceback=storable_text(traceback)[-MAX_TRACEBACK_LENGTH:],
        )

    def fingerprint(self, handler: str, place: str | None = None) -> str:
        """Return an id shared by failures of one kind: of one handler, with an error of one type
        and wording, raised in one place.

        :param place: stands for the place; None: the innermost frame, or without one the error's
            ``reason``.
        """
        if self.error is None:
            return ""
        where = _place_of(self.error) if place is None else place
        identity = "\0".join((handler, self.type, where, wording_of(self.text)))
        return hashlib.sha256(identity.encode()).hexdigest()[:16]

    def columns(self) -> dict[str, Any]:
        """Return the columns that failed attempts and dead letters share."""
        return {"error_type": self.type, "error": self.shown_text, "traceback": self.traceback}


NO_FAILURE = FailureFacts()


def error_text(error: BaseException | None, limit: int = MAX_ERROR_LENGTH) -> str:
    """Return what is shown of an error: its text, or its type when it has none."""
    return "" if error is None else storable_text(text_of(error), limit)


def _code_and_details(error: BaseException) -> tuple[str, Any]:
    def details_of() -> Any:
        described = getattr(error, "to_dict", None)
        found = described() if callable(described) else getattr(error, "details", None)
        return None if found is None else kept_json(found, MAX_DETAILS)

    def code_of() -> str:
        code = getattr(error, "code", None)
        if code is None and isinstance(details, dict):
            code = details.get("code")
        is_code = isinstance(code, (str, int)) and not isinstance(code, bool)
        return storable_text(str(code), MAX_CODE_LENGTH) if is_code else ""

    details = answer_of(details_of, None)
    return answer_of(code_of, ""), details


def _traceback_of(error: BaseException) -> str:
    if error.__traceback__ is None:
        return ""
    lines: list[str] = answer_of(lambda: tracebacks.format_exception(error), [])
    if not lines:
        # Notes that raise, a SyntaxError of other things than text: where it was is left.
        lines = [*tracebacks.format_tb(error.__traceback__), type(error).__name__]
    return "".join(lines)


WORDING_READ, WORDING_KEPT = 5_000, 100
"""Characters of an error's text that are looked at, and those of its wording that count."""
_QUOTED = re.compile(
    r"""(?<!\w)[bu]?'.*?(?:'(?!\w)|\Z)|"[^"]*(?:"|\Z)|`[^`]*(?:`|\Z)|[“«][^”»]*[”»]?|<\w[^<>]*>""",
    re.DOTALL,
)
_IN_VALUES = re.compile(r"[\d*@/\\=]")
"""A word with one of these is a number, an id, a time, an address, a path, or has quoted text."""


def wording_of(error: str) -> str:
    """Return what texts of an error share that differ in values only: the first line, its quoted
    texts and the words with digits, ``@``, ``/``, ``\\`` or ``=`` as ``*``, of several in a row
    one. At most 100 characters."""
    lines = _QUOTED.sub("*", error[:WORDING_READ]).strip().splitlines() or [""]
    words = ("*" if _IN_VALUES.search(word) else word for word in lines[0].split())
    return re.sub(r"\*(?: \*)+", "*", " ".join(words))[:WORDING_KEPT]


def _place_of(error: BaseException) -> str:
    frames = tracebacks.extract_tb(error.__traceback__)
    if frames:
        return f"{frames[-1].filename}:{frames[-1].name}"
    return answer_of(lambda: str(getattr(error, "reason", "")), "")
