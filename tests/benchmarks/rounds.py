"""Measuring cases in rounds, and what the rounds come to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks import child
from tests.benchmarks.cases import Case, Step
from tests.benchmarks.engines import Engine

Figures = Mapping[str, float]


@dataclass
class Measured:
    """A case and its rounds so far."""

    case: Case
    ours: list[Figures] = field(default_factory=list)
    limit: list[Figures] = field(default_factory=list)
    longest: float = 0.0
    """Seconds its longest round took."""

    @property
    def ratios(self) -> list[float]:
        """Ours by the limit, round by round: both met the same disturbances."""
        name = self.case.compared
        return [
            ours[name] / limit[name] for ours, limit in zip(self.ours, self.limit, strict=False)
        ]

    def as_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        result: dict[str, Any] = {
            "about": self.case.about,
            "rounds": len(self.ours),
            "ours": medians(self.ours),
        }
        if self.limit:
            result["limit"] = medians(self.limit)
            result["ratio"] = rounded(statistics.median(self.ratios))
            result["ratios"] = [rounded(ratio) for ratio in self.ratios]
        if self.case.compared in self.ours[0]:
            result["each"] = [rounded(figures[self.case.compared]) for figures in self.ours]
        return result


def measure(
    cases: Sequence[Case],
    engines: Mapping[str, Engine],
    *,
    repeat: int,
    most_seconds: float,
    tell: Callable[[str], None],
) -> list[Measured]:
    """Measure every case once, then again and again up to ``repeat`` rounds.

    :param most_seconds: a further round of a case is only begun when it should end by then, so a
        slow machine gives fewer rounds instead of a late answer. 0: no limit.
    """
    began = time.monotonic()
    everything = [Measured(case) for case in cases]
    _prepare(cases, engines, repeat, tell)
    for number in range(repeat):
        for measured in everything:
            case = measured.case
            if number >= (case.most_rounds or repeat):
                continue
            late = time.monotonic() - began + measured.longest > most_seconds > 0
            if number and late:
                continue
            start = time.monotonic()
            _measure_once(measured, engines[case.engine], ours_first=number % 2 == 0)
            measured.longest = max(measured.longest, time.monotonic() - start)
            tell(_progress(measured, number + 1, repeat))
    return everything


def _prepare(
    cases: Sequence[Case],
    engines: Mapping[str, Engine],
    repeat: int,
    tell: Callable[[str], None],
) -> None:
    for engine in engines.values():
        wanted: dict[Any, int] = {}
        for case in cases:
            if case.engine == engine.name and case.input is not None:
                rounds = min(repeat, case.most_rounds or repeat)
                copies = rounds * (1 if case.limit is None else 2)
                wanted[case.input] = wanted.get(case.input, 0) + copies
        for input, copies in wanted.items():
            tell(f"{engine.name}: preparing {input.count} jobs of {input.handler}")
            engine.prepare(input, copies)


def _measure_once(measured: Measured, engine: Engine, *, ours_first: bool) -> None:
    case = measured.case
    if case.limit is None:
        answer = _run(case.ours, case, engine)
        if "ours" in answer:
            measured.ours.append(answer["ours"])
            measured.limit.append(answer["limit"])
        else:
            measured.ours.append(answer)
        return
    if ours_first:
        measured.ours.append(_run(case.ours, case, engine))
    measured.limit.append(_run(case.limit, case, engine))
    if not ours_first:
        measured.ours.append(_run(case.ours, case, engine))


def _run(step: Step, case: Case, engine: Engine) -> Any:
    with engine.fresh(case.input) as environment:
        return child.run(step.function, step.arguments, environment)


def _progress(measured: Measured, number: int, repeat: int) -> str:
    case, ours = measured.case, measured.ours[-1]
    parts = [f"{case.engine} {case.name} ({number}/{min(repeat, case.most_rounds or repeat)}):"]
    if case.compared in ours:
        parts.append(f"{ours[case.compared]:,.0f}/s")
    if "p50_ms" in ours:
        parts.append(f"p50 {ours['p50_ms']:.1f} ms, p99 {ours['p99_ms']:.1f} ms")
    if measured.limit:
        parts.append(f"of {measured.limit[-1][case.compared]:,.0f}/s, {measured.ratios[-1]:.3f}")
    return " ".join(parts)


def medians(rounds: Sequence[Figures]) -> dict[str, float]:
    """Return the median of every figure."""
    names = dict.fromkeys(name for figures in rounds for name in figures)
    return {
        name: rounded(statistics.median(f[name] for f in rounds if name in f)) for name in names
    }


def rounded(value: float) -> float:
    """Return four significant digits: more would claim a precision nobody measured."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
