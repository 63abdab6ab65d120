"""What a run of the codemod has found and changed, for people and for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

KINDS = ("declarations", "calls", "mocks", "settings")
"""What is counted, each as changed or left."""


@dataclass(frozen=True, slots=True, order=True)
class Finding:
    """One place that a person has to look at."""

    file: str
    line: int
    what: str
    why: str
    to_do: str
    is_left: bool = True
    """Whether the code was left as it is; False: it was changed, and something is to be known."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.what}: {self.why}. To do: {self.to_do}."


@dataclass(slots=True)
class Report:
    """The outcome of a run."""

    file_count: int = 0
    has_celery: bool = False
    diffs: list[str] = field(default_factory=list)
    """A unified diff of each file that changes."""
    changed_files: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    unreadable: dict[str, str] = field(default_factory=dict)
    """Why a file could not be read or changed, by its path."""
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Numbers by kind and by ``changed`` or ``left``."""
    is_written: bool = False

    @property
    def is_complete(self) -> bool:
        """Whether nothing is left that a person has to do."""
        return not self.findings and not self.unreadable

    def share(self, *kinds: str) -> float:
        """Return the share of what was found that was changed, 1.0 if nothing was found."""
        changed = sum(self.counts[kind, "changed"] for kind in kinds)
        left = sum(self.counts[kind, "left"] for kind in kinds)
        return changed / (changed + left) if changed + left else 1.0

    def as_dict(self) -> dict[str, Any]:
        """Return the report for JSON."""
        return {
            "files": self.file_count,
            "has_celery": self.has_celery,
            "written": self.is_written,
            "changed_files": self.changed_files,
            "unreadable": self.unreadable,
            "counts": {
                kind: {end: self.counts[kind, end] for end in ("changed", "left")} for kind in KINDS
            },
            "findings": [asdict(each) for each in sorted(self.findings)],
            "diff": "".join(self.diffs),
        }

    def summary(self) -> Iterator[str]:
        """Yield the lines that end the report."""
        for kind in KINDS:
            changed, left = self.counts[kind, "changed"], self.counts[kind, "left"]
            if changed or left:
                yield f"{kind}: {changed} changed, {left} left"
