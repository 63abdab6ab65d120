"""What a job on PostgreSQL alone set out to cost, and what was set out for the others beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.benchmarks.published.targets import Target

Results = Mapping[str, Mapping[str, Any]]
Find = Callable[[Results], float]

OURS = "kjo_django"
RATES = (20, 100, 250)
BEFORE = {
    "real": {
        "drain.no_op": 0.6683,
        "drain.outside": 0.362,
        "drain.insert": 0.8804,
        "drain.insert_only": 0.9194,
        "drain.insert_raw": 0.4471,
        "drain.batch": 0.5429,
        "drain.sleep": 0.9204,
        "drain.async": 0.5516,
    },
    "embedded": {
        "drain.no_op": 0.263,
        "drain.outside": 0.1763,
        "drain.insert": 0.09807,
        "drain.insert_only": 0.09382,
        "drain.batch": 0.292,
        "drain.sleep": 0.2099,
        "drain.async": 9.134,
    },
}
"""The ratios of drains as they were published before the work on PostgreSQL alone began: on Kafka
of a full run, on SQLite of a quick one."""


def _case(found: Results, engine: str, name: str) -> Mapping[str, Any]:
    case: Mapping[str, Any] = found[engine]["results"][engine][name]
    return case


def by_queue(found: Results, case: str) -> Iterator[tuple[str, Mapping[str, float]]]:
    """Yield the name and the figures of each queue that was measured in a case: ours, the peers."""
    cases = found["postgres"]["results"]["postgres"]
    names = {OURS: case} | {peer: f"{case}.{peer}" for peer in found["postgres"]["peers"]}
    for queue, name in names.items():
        if cases.get(name, {}).get("ours"):
            yield queue, cases[name]["ours"]


def _figure(engine: str, name: str, figure: str, side: str = "ours") -> Find:
    return lambda found: float(_case(found, engine, name)[side][figure])


def _ratio(engine: str, name: str) -> Find:
    return lambda found: float(_case(found, engine, name)["ratio"])


def _by(above: Find, below: Find) -> Find:
    return lambda found: above(found) / below(found)


def _by_oban(case: str, figure: str) -> Find:
    return _by(_figure("postgres", case, figure), _figure("postgres", f"{case}.oban", figure))


def _inverse(engine: str, name: str) -> Find:
    """How much longer ours takes: the inverse of the rates' ratio."""
    return lambda found: 1 / float(_case(found, engine, name)["ratio"])


def _round_trips(found: Results) -> float:
    """What a lone job takes longer for each millisecond that a round trip takes longer."""
    near, far = (_case(found, "postgres", f"far.{name}")["ours"] for name in ("2ms", "20ms"))
    return float((far["p50_ms"] - near["p50_ms"]) / (far["round_trip_ms"] - near["round_trip_ms"]))


def _worst_drain(found: Results) -> float:
    return min(
        float(_case(found, engine, name)["ratio"]) / before
        for engine, ratios in BEFORE.items()
        for name, before in ratios.items()
    )


def _at_rates() -> Iterator[Target]:
    for rate in RATES[:2]:
        by = _by_oban(f"rates.{rate}", "worker_ms")
        yield Target(9, f"{rate}/s: worker's CPU by Oban's", by, 1.0, False)
    for rate in RATES[:2]:
        by = _by_oban(f"rates.{rate}", "postgres_ms")
        yield Target(9, f"{rate}/s: PostgreSQL's CPU by Oban's", by, 1.3, False)
    for percentile, bound in (("p50", 5), ("p99", 12)):
        for rate in RATES:
            find = _figure("postgres", f"rates.{rate}", f"{percentile}_ms")
            yield Target(9, f"{rate}/s: {percentile}", find, bound, False, "ms")


def _idle(engine: str, case: str, where: str) -> Target:
    find = _figure(engine, case, "idle_cpu_percent")
    return Target(11, f"An idle worker's CPU {where}", find, 0.3, False, "% of a core")


TARGETS = (
    *_at_rates(),
    Target(10, "`enqueue()`'s CPU by Oban's, 100/s", _by_oban("rates.100", "saver_ms"), 1.0, False),
    Target(
        10,
        "Enqueued one by one while a worker runs, by Oban's",
        _by_oban("crowd", "jobs_per_second"),
        1.5,
    ),
    Target(
        10,
        "`enqueue_many` of 30,000, jobs a second",
        _figure("postgres", "enqueue.many", "jobs_per_second"),
        25_000,
    ),
    Target(
        11,
        "Statements of a lone job in all",
        _figure("postgres", "lone", "statements_per_job"),
        8,
        False,
    ),
    Target(
        11,
        "Statements a second of an idle worker",
        _figure("postgres", "lone", "idle_statements_per_second"),
        1,
        False,
    ),
    _idle("postgres", "lone", "on PostgreSQL alone"),
    _idle("real", "latency", "on Kafka"),
    _idle("embedded", "latency", "on SQLite"),
    Target(12, "Round trips one after the other, from stored to finished", _round_trips, 5, False),
    Target(
        12,
        "The same, p50 with a round trip of 2.5 ms",
        _figure("postgres", "far.2ms", "p50_ms"),
        15,
        False,
        "ms",
    ),
    Target(
        12,
        "1,000 jobs that write a row, 2.5 ms",
        _figure("postgres", "far.2ms", "together_seconds"),
        1.2,
        False,
        "s",
    ),
    Target(
        12,
        "The same, 20 ms",
        _figure("postgres", "far.20ms", "together_seconds"),
        5,
        False,
        "s",
    ),
    Target(
        13,
        "PostgreSQL's log for a job and its marker, 100/s",
        _figure("postgres", "database.steady", "together:wal_bytes"),
        1500,
        False,
        "B",
    ),
    Target(14, "PostgreSQL alone: no-ops, by their loop", _ratio("postgres", "drain.no_op"), 0.6),
    Target(14, "SQLite: no-ops, by their loop", _ratio("embedded", "drain.no_op"), 0.5),
    *(
        Target(
            14,
            f"{where}: `atomic=False` no-ops, by their loop",
            _ratio(engine, "drain.outside"),
            0.6,
        )
        for engine, where in (
            ("postgres", "PostgreSQL alone"),
            ("real", "Kafka"),
            ("embedded", "SQLite"),
        )
    ),
    Target(14, "Any drain's ratio on Kafka and SQLite, by the one before", _worst_drain, 0.97),
    Target(
        15,
        "Kafka, 100/s: worker's CPU by Celery's",
        _by(
            _figure("real", "rates.100", "worker_ms"),
            _figure("real", "rates.100", "worker_ms", "limit"),
        ),
        1.0,
        False,
    ),
    Target(15, "The same, p50", _figure("real", "rates.100", "p50_ms"), 5, False, "ms"),
    Target(
        15, "Kafka: `enqueue_and_wait` by Celery's `get()`", _inverse("real", "wait"), 1.3, False
    ),
    Target(15, "Kafka: a chain of five by Celery's", _inverse("real", "chain"), 2, False),
    Target(
        15,
        "Kafka: p50 at half of what is sustained, by p50 at 50/s",
        _figure("real", "latency.half", "p50_by_few"),
        2,
        False,
    ),
)
