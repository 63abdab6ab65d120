"""Results for programs and for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.rounds import Measured

METHOD = (
    "Every measurement is a process of its own on a fresh copy of one database and, on Kafka, a "
    "fresh topic with the same messages. Ours and the other side run one after the other in every "
    "round, in alternating order; 'ratio' is the median of the rounds' ratios, other figures are "
    "medians, 'spread' is from the lowest to the highest round in percent of the median. A drain "
    "is timed by the rows' finished_at, from the first commit to the last: starting and joining "
    "the group is 'seconds_to_first'. The loop beside a drain makes the same writes (markers, job "
    "rows, the handler's) in batches of 500 with one commit and one asynchronous offset commit "
    "each. CPU is that of the measured process alone. PostgreSQL is durable (fsync, "
    "synchronous_commit) and has 1 GB of shared buffers. A peer is timed from its first to its "
    "last run of a job that does nothing."
)
COLUMNS = (
    "",
    "jobs/s",
    "other/s",
    "ratio",
    "spread %",
    "CPU µs",
    "other µs",
    "queries",
    "Redis",
    "rounds",
)
STEP_COLUMNS = {
    "log B": "wal_bytes",
    "of it pages B": "page_image_bytes",
    "row versions": "row_versions",
    "index entries": "index_entries",
    "sessions µs": "backend_us",
}
"""Of what a job costs the database: what each figure is called."""
NOTES = {
    "seconds_to_first": "s to the first completion",
    "in_flight_peak": "coroutines at once",
    "p50_ms": "ms p50",
    "p95_ms": "ms p95",
    "p99_ms": "ms p99",
    "celery_p50_ms": "ms p50 of Celery on Redis alone",
    "worker_ms": "ms of the worker",
    "kafka_ms": "of Kafka",
    "postgres_ms": "of PostgreSQL",
    "redis_ms": "of Redis",
    "saver_ms": "of who saves",
    "all_ms": "of all",
    "celery_worker_ms": "ms of Celery's worker",
    "celery_all_ms": "of all of Celery's",
    "switches_per_job": "switches of the worker's threads",
    "idle_cpu_percent": "% of a core while idle",
    "saved_per_second": "saved a second",
    "sustained_per_second": "saved and run a second at most",
    "p50_by_few": "× the p50 at 50 a second",
    "statements_per_job": "statements a job, half a second apart",
    "own_statements_per_job": "of them without those of an idle worker",
    "idle_statements_per_second": "statements a second while idle",
    "round_trip_ms": "ms for a round trip",
    "together_seconds": "s for all that were stored at once",
    "ended_per_second": "a second from the first enqueue() to the last end",
    "machine_cpu_percent": "% of all processors in use",
    "rss_before_mb": "MB before",
    "rss_at_a_fifth_mb": "MB at a fifth",
    "rss_after_mb": "MB after",
    "rss_peak_mb": "MB at most",
}
SHOWN = {
    "latency": (
        *("p50_ms", "p95_ms", "p99_ms", "idle_cpu_percent", "saved_per_second"),
        *("sustained_per_second", "p50_by_few"),
    ),
    "lone": (
        *("p50_ms", "p99_ms", "statements_per_job", "own_statements_per_job"),
        *("idle_statements_per_second", "idle_cpu_percent"),
    ),
    "far": ("p50_ms", "p99_ms", "round_trip_ms", "together_seconds"),
    "crowd": ("ended_per_second",),
    "wait": ("p50_ms", "p95_ms", "p99_ms", "celery_p50_ms"),
    "chain": ("p50_ms", "p95_ms", "p99_ms", "celery_p50_ms"),
    "rates": (
        *("p50_ms", "p99_ms", "celery_p50_ms"),
        *("worker_ms", "kafka_ms", "postgres_ms", "redis_ms", "saver_ms", "all_ms"),
        *("celery_worker_ms", "celery_all_ms", "switches_per_job"),
    ),
    "memory": ("rss_before_mb", "rss_at_a_fifth_mb", "rss_after_mb", "rss_peak_mb"),
    "drain": ("seconds_to_first", "in_flight_peak"),
    "processes": ("machine_cpu_percent",),
}


def as_dict(
    everything: Sequence[Measured],
    *,
    peers: Mapping[str, Any],
    versions: Mapping[str, str],
    machine: Mapping[str, Any],
    parameters: Mapping[str, Any],
    seconds: float,
) -> dict[str, Any]:
    """Return all there is to know, ready for JSON."""
    results: dict[str, dict[str, Any]] = {}
    for measured in everything:
        results.setdefault(measured.case.engine, {})[measured.case.name] = measured.as_dict()
    return {
        "method": METHOD,
        "versions": dict(versions),
        "machine": dict(machine),
        "parameters": dict(parameters),
        "seconds": round(seconds, 1),
        "ratios": {
            engine: {name: case["ratio"] for name, case in cases.items() if "ratio" in case}
            for engine, cases in results.items()
        },
        "results": results,
        "peers": dict(peers),
    }


def failures(result: Mapping[str, Any]) -> list[str]:
    """Return what could not be measured, by name."""
    cases = [
        f"{engine} {name}"
        for engine, cases in result["results"].items()
        for name, case in cases.items()
        if "failed" in case
    ]
    return cases + [name for name, peer in result["peers"].items() if "missing" in peer]


def as_text(result: Mapping[str, Any]) -> str:
    """Return a table for people."""
    lines = [
        ", ".join(f"{name} {version}" for name, version in result["versions"].items()),
        "{cpu_count} × {cpu_model}, {memory_gb} GB".format(**result["machine"]),
    ]
    for engine, cases in result["results"].items():
        rows = [(f"{engine}:", *COLUMNS[1:])]
        rows += [_row(name, case) for name, case in cases.items()]
        lines += ["", *_aligned(rows), *_notes(cases)]
        if steps := steps_of(cases):
            lines += ["", *_aligned([("database:", *STEP_COLUMNS), *steps])]
    if result["peers"]:
        rows = [("peers:", *COLUMNS[1:]), *map(_row, *zip(*result["peers"].items(), strict=True))]
        lines += ["", *_aligned(rows)]
        lines += [f"  {n}: {p['missing']}" for n, p in result["peers"].items() if "missing" in p]
    return "\n".join([*lines, "", "Per job unless said otherwise; CPU of the process alone."])


def _row(name: str, case: Mapping[str, Any]) -> tuple[str, ...]:
    ours, limit = case.get("ours", {}), case.get("limit", {})
    return (
        f"  {name}",
        number(ours.get("jobs_per_second"), 0),
        number(limit.get("jobs_per_second"), 0),
        number(case.get("ratio"), 3),
        number(case.get("spread_percent"), 0),
        number(ours.get("cpu_us_per_job"), 0),
        number(limit.get("cpu_us_per_job"), 0),
        number(ours.get("queries_per_job"), 3),
        number(ours.get("redis_round_trips_per_job"), 3),
        str(case.get("rounds", 0)),
    )


def steps_of(cases: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return a row for each step of each case of the scenario ``database``."""
    rows = []
    for name, case in cases.items():
        told = [figure.partition(":") for figure in case.get("ours", {}) if ":" in figure]
        for step in dict.fromkeys(step for step, _, _ in told):
            values = (case["ours"].get(f"{step}:{figure}") for figure in STEP_COLUMNS.values())
            rows.append((f"  {name} {step}", *map(number, values, (0, 0, 2, 2, 1))))
    return rows


def number(value: float | None, digits: int) -> str:
    """Return a number as tables show it; nothing for none."""
    return "" if value is None else f"{value:,.{digits}f}"


def _aligned(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in rows
    ]


def _notes(cases: Mapping[str, Any]) -> list[str]:
    return [f"  {name}: {notes}" for name, case in cases.items() if (notes := notes_of(name, case))]


def notes_of(name: str, case: Mapping[str, Any]) -> str:
    """Return what else is worth telling of a case."""
    if "failed" in case:
        return f"failed: {case['failed'].splitlines()[0]}"
    shown = SHOWN.get(name.partition(".")[0], ())
    ours = case["ours"]
    return ", ".join(f"{ours[key]:,.1f} {NOTES[key]}" for key in shown if key in ours)
