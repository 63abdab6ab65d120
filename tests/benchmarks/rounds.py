"""Measuring cases in rounds, and what the rounds come to."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tests.benchmarks import child
from tests.benchmarks.cases import Case, Input, Step
from tests.benchmarks.engines import Engine
from tests.benchmarks.errors import BenchmarkError

Figures = Mapping[str, Any]
"""Numbers by name; under "series" the points of curves, by name."""


@dataclass
class Measured:
    """A case and its rounds so far."""

    case: Case
    ours: list[Figures] = field(default_factory=list)
    limit: list[Figures] = field(default_factory=list)
    longest: float = 0.0
    """Seconds its longest round took."""
    failed: str = ""
    """Why it has no further rounds; one that fails does not end the run of the others."""

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
        if self.failed:
            # Its last line says what; the lines before name places of one machine.
            result["failed"] = self.failed.strip().splitlines()[-1]
        if not self.ours:
            return result
        if self.ratios:
            result["against"] = self.case.against
            result["limit"] = medians(self.limit)
            result["ratio"] = rounded(statistics.median(self.ratios))
            result["ratios"] = [rounded(ratio) for ratio in self.ratios]
        if self.case.compared in self.ours[0]:
            result["each"] = [rounded(figures[self.case.compared]) for figures in self.ours]
            result["spread_percent"] = spread_percent(result["each"])
        if self.case.scenario == "memory":
            result["series"] = self.ours[0]["series"]
        return result


def measure(
    cases: Sequence[Case],
    engines: Mapping[str, Engine],
    *,
    rounds: int,
    most_seconds: float,
    tell: Callable[[str], None],
    after_round: Callable[[int], None] = lambda number: None,
) -> list[Measured]:
    """Measure every case once, then again and again up to ``rounds`` rounds.

    :param most_seconds: a further round of a case is only begun when it should end by then, so a
        slow machine gives fewer rounds instead of a late answer; preparing is not counted. 0: no
        limit.
    :param after_round: called with the number of each round once all cases had their turn.
    """
    everything = [Measured(case) for case in cases]
    _prepare(cases, engines, rounds, tell)
    ends_at = time.monotonic() + most_seconds if most_seconds else math.inf
    try:
        for number in range(rounds):
            if number and time.monotonic() > ends_at:
                break
            for measured in everything:
                if number and time.monotonic() + measured.longest > ends_at:
                    continue
                if not measured.failed and number < measured.case.rounds_of(rounds):
                    _measure_round(measured, engines[measured.case.engine], number, rounds, tell)
            after_round(number)
    except KeyboardInterrupt:
        # An hour of measurements is worth keeping.
        tell("interrupted: no further measurement is begun")
    return everything


def _measure_round(
    measured: Measured, engine: Engine, number: int, rounds: int, tell: Callable[[str], None]
) -> None:
    start = time.monotonic()
    try:
        _measure_once(measured, engine, ours_first=number % 2 == 0)
    except BenchmarkError as error:
        measured.failed = str(error)
        tell(f"{measured.case.engine} {measured.case.name}: failed: {error}")
        return
    measured.longest = max(measured.longest, time.monotonic() - start)
    tell(_progress(measured, number + 1, rounds))


def _prepare(
    cases: Sequence[Case],
    engines: Mapping[str, Engine],
    rounds: int,
    tell: Callable[[str], None],
) -> None:
    for engine in engines.values():
        wanted: dict[Any, int] = {}
        for case in cases:
            if case.engine == engine.name:
                for input in case.inputs:
                    wanted[input] = wanted.get(input, 0) + case.rounds_of(rounds)
        for input, copies in wanted.items():
            rows = f" on {input.rows:,} rows" if input.rows else ""
            tell(f"{engine.name}: preparing {input.count:,} jobs of {input.workload}{rows}")
            engine.prepare(input, copies)


def _measure_once(measured: Measured, engine: Engine, *, ours_first: bool) -> None:
    case = measured.case
    if case.limit is None:
        answer = _run(case.ours, case.input, engine)
        if "ours" in answer:
            measured.ours.append(answer["ours"])
            measured.limit.append(answer["limit"])
        else:
            measured.ours.append(answer)
        return
    if ours_first:
        measured.ours.append(_run(case.ours, case.input, engine))
    measured.limit.append(_run(case.limit, case.limit_input or case.input, engine))
    if not ours_first:
        measured.ours.append(_run(case.ours, case.input, engine))


def _run(step: Step, input: Input | None, engine: Engine) -> Any:
    with engine.fresh(input) as environment:
        return child.run(step.function, step.arguments, environment)


def _progress(measured: Measured, number: int, rounds: int) -> str:
    case, ours = measured.case, measured.ours[-1]
    parts = [f"{case.engine} {case.name} ({number}/{case.rounds_of(rounds)}):"]
    if case.compared in ours:
        parts.append(f"{ours[case.compared]:,.0f}/s")
    if "p50_ms" in ours and not measured.limit:
        parts.append(f"p50 {ours['p50_ms']:.1f} ms, p99 {ours['p99_ms']:.1f} ms")
    if measured.limit:
        parts.append(f"of {measured.limit[-1][case.compared]:,.0f}/s, {measured.ratios[-1]:.3f}")
    return " ".join(parts)


def medians(rounds: Sequence[Figures]) -> dict[str, float]:
    """Return the median of every figure."""
    names = dict.fromkeys(name for figures in rounds for name in figures if name != "series")
    return {
        name: rounded(statistics.median(f[name] for f in rounds if name in f)) for name in names
    }


def spread_percent(values: Sequence[float]) -> float:
    """Return the distance from the lowest to the highest in percent of the median."""
    return rounded(100 * (max(values) - min(values)) / statistics.median(values))


def rounded(value: float) -> float:
    """Return four significant digits: more would claim a precision nobody measured."""
    if value == 0 or not math.isfinite(value):
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))
