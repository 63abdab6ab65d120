"""Texts that are English for programs and logs, and in the reader's language for people."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from django.utils.formats import number_format
from django.utils.translation import get_language, gettext


@dataclass(frozen=True, slots=True)
class Wording:
    """A text with its values; as ``str`` it is English.

    :param template: marked for translation by ``gettext_noop``, with ``%(name)s`` for each value.
    :param values: numbers are written with their digits in groups; a ``Wording``, or an error with
        one, is translated, too.
    """

    template: str
    values: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        values = {name: f"{v:,}" if _is_number(v) else v for name, v in self.values.items()}
        return self.template % values if values else self.template

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
        self.wording = Wording(template, values)
        super().__init__(str(self.wording))


def shown(error: BaseException) -> str:
    """Return the text of an error for a screen or a command, in the active language if it has a
    translation."""
    return error.wording.translated() if isinstance(error, RefusedError) else str(error)


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _translated(value: Any) -> Any:
    if isinstance(value, BaseException):
        return shown(value)
    if isinstance(value, Wording):
        return value.translated()
    return number_format(value, force_grouping=True) if _is_number(value) else value
