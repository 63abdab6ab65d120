"""The text format of Prometheus, version 0.0.4. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class Sample(NamedTuple):
    """One line."""

    suffix: str
    labels: tuple[tuple[str, str], ...]
    value: float


@dataclass(slots=True)
class Family:
    """A metric: its name, its kind, what it means, its lines."""

    name: str
    kind: str
    """``counter``, ``gauge`` or ``histogram``."""
    help: str
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float, suffix: str = "", **labels: str) -> None:
        """Add a line."""
        self.samples.append(Sample(suffix, tuple(labels.items()), value))

    def add_histogram(
        self, bounds: Sequence[float], counts: Sequence[int], summed: float, **labels: str
    ) -> None:
        """Add the lines of a histogram.

        :param counts: by bucket, not yet added up; one more than there are bounds, the last open.
        :param summed: all that was observed, added up.
        """
        total = 0
        for bound, count in zip((*bounds, None), counts, strict=True):
            total += count
            le = "+Inf" if bound is None else repr(bound)
            self.add(total, "_bucket", **labels, le=le)
        self.add(summed, "_sum", **labels)
        self.add(total, "_count", **labels)


def render(families: Iterable[Family]) -> str:
    """Return the page."""
    return "".join(line + "\n" for family in families for line in _lines(family))


def _lines(family: Family) -> Iterable[str]:
    yield f"# HELP {family.name} {_escape(family.help)}"
    yield f"# TYPE {family.name} {family.kind}"
    for suffix, labels, value in family.samples:
        told = ",".join(f'{name}="{_escape(text, quote=True)}"' for name, text in labels)
        name = f"{family.name}{suffix}"
        # True is 1 here.
        yield f"{name}{{{told}}} {+value!r}" if told else f"{name} {+value!r}"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text
