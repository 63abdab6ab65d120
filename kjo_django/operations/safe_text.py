"""Texts that others wrote, without the characters that do things to the text round them."""

from __future__ import annotations

import unicodedata

from django.db.models import Model
from django.utils.safestring import SafeString, mark_safe

KEPT = "\n\t"
_ACTIVE = ("Cc", "Cf", "Co", "Cs", "Zl", "Zp")
"""Categories that move cursors, turn text round or hide it."""


def is_active(character: str) -> bool:
    """Return whether a character does something, beyond a line break or a tab."""
    return character not in KEPT and unicodedata.category(character) in _ACTIVE


def inert(text: str) -> str:
    """Spell out control and formatting characters instead of obeying them; HTML stays HTML."""
    if text.isprintable():
        return text
    spelt = "".join(f"\\u{ord(c):04x}" if is_active(c) else c for c in text)
    # What is put in has nothing that HTML would read otherwise.
    return mark_safe(spelt) if isinstance(text, SafeString) else spelt  # noqa: S308


class InertName:
    """Stands for a row where only its name and its key are asked: pages and logs of the admin."""

    def __init__(self, row: Model) -> None:
        self._meta = row._meta
        self.pk = row.pk
        self._name = inert(str(row))

    def __str__(self) -> str:
        return self._name
