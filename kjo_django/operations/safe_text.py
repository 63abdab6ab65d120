"""Texts of others with their control and formatting characters spelt out."""

from __future__ import annotations

import unicodedata

from django.db.models import Model
from django.utils.safestring import SafeString, mark_safe

KEPT = "\n\t"
_ACTIVE = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Categories of characters that move cursors, or reverse or hide text."""


def is_active(character: str) -> bool:
    """Whether a character controls or formats the text; a line break and a tab do not count."""
    return character not in KEPT and unicodedata.category(character) in _ACTIVE


def inert(text: str) -> str:
    """Return the text with control and formatting characters spelt out. Safe HTML stays safe."""
    if text.isprintable():
        return text
    spelt = "".join(f"\\u{ord(c):04x}" if is_active(c) else c for c in text)
    # The escapes have no character that is special in HTML.
    return mark_safe(spelt) if isinstance(text, SafeString) else spelt  # noqa: S308


class InertName:
    """The inert name and the key of a row, for pages and logs of the admin."""

    def __init__(self, row: Model) -> None:
        self._meta = row._meta
        self.pk = row.pk
        self._name = inert(str(row))

    def __str__(self) -> str:
        return self._name
