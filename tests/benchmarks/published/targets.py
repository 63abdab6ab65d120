"""What the system set out to reach, and what the results say of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Result = Mapping[str, Any]


@dataclass(frozen=True)
class Target:
    """One aim: a figure of the results, and what it must not fall below or exceed.

    ``find`` is given a run on the real engine, or, where runs on several engines are compared, all
    of them by name.
    """

    group: int
    text: str
    find: Callable[[Result], float]
    bound: float
    is_least: bool = True
    unit: str = ""

    def value(self, result: Result) -> float | None:
        """Return the figure, or None where it was not measured."""
        try:
            return self.find(result)
        except KeyError:
            return None

    def is_reached(self, value: float) -> bool:
        """Whether the figure is as good as it must be."""
        return value >= self.bound if self.is_least else value <= self.bound


def case(result: Result, name: str) -> Mapping[str, Any]:
    """Return a case of the real engine.

    :raises KeyError: it was not measured.
    """
    found: Mapping[str, Any] = result["results"]["real"][name]
    return found


def _ratio(name: str) -> Callable[[Result], float]:
    return lambda result: float(case(result, name)["ratio"])


def _ours(name: str, figure: str) -> Callable[[Result], float]:
    return lambda result: float(case(result, name)["ours"][figure])


def _by_peer(name: str) -> Callable[[Result], float]:
    def find(result: Result) -> float:
        ours = case(result, "drain.no_op")["ours"]["jobs_per_second"]
        return float(ours / result["peers"][name]["ours"]["jobs_per_second"])

    return find


def _cost(name: str) -> Callable[[Result], float]:
    """How much more a job costs than with empty tables: the inverse of the rates' ratio."""
    return lambda result: 1 / float(case(result, name)["ratio"])


def _growth(result: Result) -> float:
    ours = case(result, "memory")["ours"]
    return float(ours["rss_after_mb"] - ours["rss_at_a_fifth_mb"])


TARGETS = (
    Target(1, "Drain of no-ops, by the loop with the same writes", _ratio("drain.no_op"), 0.4),
    Target(1, "The same, by tuned Dramatiq", _by_peer("dramatiq"), 3),
    Target(1, "The same, by Celery at its fastest", _by_peer("celery"), 10),
    Target(1, "The same, by Celery with a row and run-once", _by_peer("celery with a row"), 35),
    Target(1, "Two processes, by one", _ratio("processes"), 1.6),
    Target(
        2,
        "Handlers with one ORM INSERT, by the loop without savepoints",
        _ratio("drain.insert"),
        0.8,
    ),
    Target(2, "The same, declared `database_only`", _ratio("drain.insert_only"), 0.8),
    Target(2, "Batch handlers with one bulk INSERT, by the raw loop", _ratio("drain.batch"), 0.4),
    Target(3, "`enqueue()`, by Django's bare `create()`", _ratio("enqueue.single"), 0.7),
    Target(3, "`enqueue_many` of 10,000, by COPY + produce", _ratio("enqueue.many"), 0.7),
    Target(4, "Save to done at 50/s, p50", _ours("latency", "p50_ms"), 8, False, "ms"),
    Target(4, "Save to done at 50/s, p99", _ours("latency", "p99_ms"), 30, False, "ms"),
    Target(4, "An idle worker", _ours("latency", "idle_cpu_percent"), 2, False, "% of a core"),
    Target(5, "Queries per job", _ours("drain.no_op", "queries_per_job"), 0.05, False),
    Target(
        5,
        "Redis round trips per job",
        _ours("drain.no_op", "redis_round_trips_per_job"),
        0.05,
        False,
    ),
    Target(5, "Resident memory at most", _ours("memory", "rss_peak_mb"), 150, False, "MB"),
    Target(5, "Its growth after the first fifth", _growth, 10, False, "MB"),
    Target(
        6, "Cost per job with ten million rows, consumer", _cost("table.consumer_10m"), 1.2, False
    ),
    Target(6, "Cost per job with ten million rows, relay", _cost("table.relay_10m"), 1.2, False),
    Target(7, "Eight lanes on one partition, by one", _ratio("lanes"), 7),
)


def judged(
    result: Result, targets: Sequence[Target] = TARGETS
) -> Iterator[tuple[Target, float | None]]:
    """Yield every target with what was found."""
    for target in targets:
        yield target, target.value(result)
