"""Texts that are English for programs and logs, and in the reader's language for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from django.utils.formats import number_format
from django.utils.translation import get_language, gettext


class Wording(str):
    """An English text that knows how it was made, and so its translation.

    :param template: marked for translation by ``gettext_noop``, with ``%(name)s`` for each value.
    :param values: numbers are written with their digits in groups; a ``Wording``, or an error with
        one, is translated, too.
    """

    template: str
    values: Mapping[str, Any]

    def __new__(cls, template: str, values: Mapping[str, Any] | None = None) -> Self:
        """Make the English text."""
        values = values or {}
        shown = {name: f"{v:,}" if _is_number(v) else v for name, v in values.items()}
        self = super().__new__(cls, template % shown if shown else template)
        self.template, self.values = template, values
        return self

    def translated(self) -> str:
        """Return the text in the active language; in English if translation is deactivated."""
        if get_language() is None:  # Django then writes numbers without groups
            return str(self)
        values = {name: _translated(value) for name, value in self.values.items()}
        return gettext(self.template) % values if values else gettext(self.template)


class RefusedError(ValueError):
    """A value that an operation refuses. Its own text is English.

    :param template: see ``Wording``.
    """

    def __init__(self, template: str, **values: Any) -> None:
        super().__init__(Wording(template, values))


def shown(value: object) -> str:
    """Return a text, or that of an error, for a screen or a command: in the active language if it
    has a translation."""
    translated: Callable[[], str] | None = getattr(value, "translated", None)
    if translated is not None:
        return translated()
    first = next(iter(getattr(value, "args", ())), None)
    return first.translated() if isinstance(first, Wording) else str(value)


def noop(text: str) -> str:
    """Mark a text for translation and return it, where a module does without Django."""
    return text


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _translated(value: Any) -> Any:
    if _is_number(value):
        return number_format(value, force_grouping=True)
    return shown(value) if isinstance(value, (Wording, BaseException)) else value
