"""The pictures of the page, by file name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.benchmarks.published import alone
from tests.benchmarks.published.svg import Bars, Curve, bar_chart, line_chart

Results = Mapping[str, Mapping[str, Any]]
"""The raw results by name of their file, without its ending."""

PLOTS: dict[str, Callable[[Results], str | None]] = {}


def _plot(function: Callable[[Results], str | None]) -> Callable[[Results], str | None]:
    PLOTS[f"{function.__name__}.svg"] = function
    return function


def drawn(results: Results) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each picture whose figures were measured."""
    for name, draw in PLOTS.items():
        text = draw(results)
        if text is not None:
            yield name, text


def _rates(results: Results, engine: str, title: str) -> str | None:
    cases = results.get(engine, {}).get("results", {}).get(engine, {})
    groups = [
        Bars(name, [case["ours"]["jobs_per_second"], case["limit"]["jobs_per_second"]])
        for name, case in cases.items()
        if "ratio" in case and not name.startswith("table.")
    ]
    if not groups:
        return None
    series = ["kjo_django", "what it is compared with"]
    return bar_chart(title, groups, series=series, unit="jobs a second", is_logarithmic=True)


@_plot
def real(results: Results) -> str | None:
    """Every case of the real engine beside the other side of its ratio."""
    return _rates(results, "real", "Kafka, Redis and PostgreSQL")


@_plot
def embedded(results: Results) -> str | None:
    """Every case of the embedded default."""
    return _rates(results, "embedded", "SQLite, no server")


@_plot
def postgres(results: Results) -> str | None:
    """Every case of PostgreSQL alone beside the other side of its ratio."""
    return _rates(results, "postgres", "PostgreSQL alone")


def _by_queue(
    results: Results, title: str, figures: Mapping[str, str], unit: str, is_logarithmic: bool
) -> str | None:
    """Draw figures of each queue on PostgreSQL alone at each rate, each a series of its name."""
    if "postgres" not in results:
        return None
    groups = [
        Bars(f"{queue}, {rate} a second", [measured.get(figure) for figure in figures])
        for rate in alone.RATES
        for queue, measured in alone.by_queue(results, f"rates.{rate}")
    ]
    if not groups:
        return None
    series = [*figures.values()]
    return bar_chart(title, groups, series=series, unit=unit, is_logarithmic=is_logarithmic)


@_plot
def postgres_rates(results: Results) -> str | None:
    """Processor time of a job on PostgreSQL alone, by who spends it."""
    figures = {"worker_ms": "worker", "postgres_ms": "PostgreSQL", "saver_ms": "who enqueues"}
    return _by_queue(results, "Processor time of a job", figures, "ms", False)


@_plot
def postgres_latency(results: Results) -> str | None:
    """Percentiles from saved to done on PostgreSQL alone."""
    figures = {"p50_ms": "p50", "p99_ms": "p99"}
    return _by_queue(results, "From saved to done", figures, "ms", True)


@_plot
def peers(results: Results) -> str | None:
    """No-ops of all."""
    run = results.get("real", {})
    measured = {n: p for n, p in run.get("peers", {}).items() if "ours" in p}
    if not measured:
        return None
    ours = run["results"]["real"]["drain.no_op"]["ours"]["jobs_per_second"]
    groups = [Bars("kjo_django", [ours])]
    groups += [Bars(n, [p["ours"]["jobs_per_second"]]) for n, p in measured.items()]
    groups.sort(key=lambda group: -(group.values[0] or 0))
    return bar_chart(
        "Jobs that do nothing", groups, series=[""], unit="jobs a second", is_logarithmic=True
    )


@_plot
def latency(results: Results) -> str | None:
    """Percentiles from saved to done."""
    cases = results.get("real", {}).get("results", {}).get("real", {})
    named = [("50 a second", "latency"), ("1,000 a second", "latency.loaded")]
    found = [(text, cases[name]["ours"]) for text, name in named if name in cases]
    if not found:
        return None
    groups = [
        Bars(f"{text}, {percentile}", [ours[f"{percentile}_ms"]])
        for text, ours in found
        for percentile in ("p50", "p95", "p99")
    ]
    return bar_chart("From saved to done", groups, series=[""], unit="ms", is_logarithmic=True)


@_plot
def memory(results: Results) -> str | None:
    """Resident memory over a long drain."""
    case = results.get("real", {}).get("results", {}).get("real", {}).get("memory", {})
    if "series" not in case:
        return None
    points = [(float(done), float(size)) for done, size in case["series"]["memory_mb"]]
    curve = Curve("worker", points)
    return line_chart("Resident memory of a worker", [curve], unit="MB", x_unit="jobs done")


@_plot
def tables(results: Results) -> str | None:
    """What a job costs with many rows in the table, in units of an empty one."""
    cases = results.get("real", {}).get("results", {}).get("real", {})
    groups = [
        Bars(name.removeprefix("table.").replace("_", ", "), [1 / case["ratio"]])
        for name, case in cases.items()
        if name.startswith("table.") and "ratio" in case
    ]
    if not groups:
        return None
    title = "Cost of a job against the rows in the table"
    return bar_chart(title, groups, series=[""], unit="with empty tables: 1")
