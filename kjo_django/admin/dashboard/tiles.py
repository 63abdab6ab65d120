"""Figures of a screen, in groups of what belongs together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tile:
    """One figure.

    :param value: as it is shown.
    :param url: leads to the rows that are counted.
    :param detail: what the figure counts, in a few words.
    """

    label: Any
    value: str
    url: str = ""
    detail: str = ""
    is_bad: bool = False
    is_unknown: bool = False


@dataclass(frozen=True, slots=True)
class TileGroup:
    """Figures that belong together; the first is the largest."""

    title: Any
    tiles: Sequence[Tile]
