"""Pages of the docs with figures: what stands between their markers comes from the raw results.

A block stands between ``<!-- from the results: NAME -->`` and ``<!-- end -->``; people write the
rest. `tests/docs/test_benchmark_page.py` fails when a block is not what the results say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import report
from tests.benchmarks.published import alone, plots
from tests.benchmarks.published.targets import Target, judged
from tests.benchmarks.report import number

DOCS = Path(__file__).resolve().parents[3] / "docs" / "explanation"
PAGE = DOCS / "performance.md"
SIZING = DOCS.parent / "how-to" / "sizing.md"
PAGES = (PAGE, SIZING)
FOLDER = DOCS / "performance"
BLOCK = re.compile(r"(<!-- from the results: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

Results = Mapping[str, Mapping[str, Any]]
BLOCKS: dict[str, Callable[[Results], Iterable[str]]] = {}
NAMES = {
    "kjo_django": "kjo_django",
    "python": "Python",
    "sqlite": "SQLite",
    "librdkafka": "librdkafka",
    "postgresql_server": "PostgreSQL",
    "redis_server": "Redis",
    "kafka_server": "Kafka",
}


def results(folder: Path = FOLDER) -> dict[str, Any]:
    """Return the raw results by name of their file, without its ending."""
    return {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}


def runs(found: Results) -> dict[str, Mapping[str, Any]]:
    """Return those that are of measurements, not of a profile."""
    return {name: run for name, run in found.items() if "results" in run}


def rewritten(text: str, found: Results) -> str:
    """Return the page with every block as the results have it."""

    def anew(match: re.Match[str]) -> str:
        lines = BLOCKS[match[2]](found)
        return f"{match[1]}\n{chr(10).join(lines).strip()}\n\n{match[3]}"

    return BLOCK.sub(anew, text)


def write() -> list[Path]:
    """Write the blocks of the pages and the pictures anew; return what has changed."""
    found = results()
    wanted = {page: rewritten(page.read_text(), found) for page in PAGES}
    wanted |= {FOLDER / name: text for name, text in plots.drawn(found)}
    changed = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in changed:
        path.write_text(wanted[path])
    return changed


def _block(function: Callable[[Results], Iterable[str]]) -> Callable[[Results], Iterable[str]]:
    BLOCKS[function.__name__.strip("_").replace("_", " ")] = function
    return function


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join(['---', *['---:'] * (len(head) - 1)])} |"
    for row in rows:
        yield f"| {' | '.join(row)} |"


@_block
def machine(found: Results) -> Iterator[str]:
    """Yield where each file of results was measured, and on what."""
    for name, run in runs(found).items():
        facts, parameters = run["machine"], run["parameters"]
        versions = ", ".join(f"{NAMES.get(n, n)} {v}" for n, v in run["versions"].items())
        sizes = "full sizes" if parameters["full"] else "the sizes of a quick run"
        yield (
            f"- `{name}.json`: {facts['cpu_count']} processors ({facts['cpu_model']}), "
            f"{facts['memory_gb']} GB, {facts['system']}; load "
            f"{facts['load_average'][0]} at the start; {parameters['rounds']} rounds, {sizes}, "
            f"{run['seconds'] / 60:,.0f} minutes. {versions}."
        )


@_block
def targets(found: Results) -> Iterator[str]:
    """Yield every target and whether it is reached."""
    return _judged(judged(found["real"]))


@_block
def postgres_targets(found: Results) -> Iterator[str]:
    """Yield what was set out for PostgreSQL alone, and for the others beside it."""
    return _judged(judged(found, alone.TARGETS))


def _judged(found: Iterable[tuple[Target, float | None]]) -> Iterator[str]:
    rows = []
    for target, value in found:
        if value is None:
            verdict, told = "not measured", ""
        else:
            verdict = "reached" if target.is_reached(value) else "**not reached**"
            told = f"{_short(value)} {target.unit}".strip()
        bound = f"{'≥' if target.is_least else '≤'} {target.bound:g} {target.unit}".strip()
        rows.append((f"{target.group}. {target.text}", bound, told, verdict))
    return table(("Target", "Aim", "Found", ""), rows)


def _cases(found: Results, engine: str) -> Iterator[str]:
    rows = []
    run = found[engine]
    for name, case in run["results"][engine].items():
        if name.rpartition(".")[2] in run["peers"]:  # those have a table of their own
            continue
        ours, limit = case["ours"], case.get("limit", {})
        rows.append(
            (
                f"`{name}`: {case['about']}",
                number(ours.get("jobs_per_second"), 0),
                number(limit.get("jobs_per_second"), 0),
                case.get("against", ""),
                number(case.get("ratio"), 2),
                number(case.get("spread_percent"), 0),
                number(ours.get("cpu_us_per_job"), 0),
                report.notes_of(name, case),
            )
        )
    head = ("Case", "jobs/s", "beside it", "what that is", "ratio", "spread %", "CPU µs/job", "")
    return table(head, rows)


@_block
def real(found: Results) -> Iterator[str]:
    """Yield the cases of the real engine."""
    return _cases(found, "real")


@_block
def embedded(found: Results) -> Iterator[str]:
    """Yield the cases of the embedded default."""
    return _cases(found, "embedded")


@_block
def postgres(found: Results) -> Iterator[str]:
    """Yield the cases of PostgreSQL alone."""
    return _cases(found, "postgres")


@_block
def postgres_database(found: Results) -> Iterator[str]:
    """Yield what jobs cost PostgreSQL where it is alone."""
    head = ("For each job", *(name.replace(" B", ", bytes") for name in report.STEP_COLUMNS))
    steps = report.steps_of(found["postgres"]["results"]["postgres"])
    return table(head, ((f"`{name.strip()}`", *figures) for name, *figures in steps))


@_block
def postgres_rates(found: Results) -> Iterator[str]:
    """Yield what a job costs on PostgreSQL alone at the rates that people run, by queue."""
    keys = ("worker_ms", "postgres_ms", "saver_ms", "p50_ms", "p99_ms")
    rows = [
        (f"{queue}, {rate}/s", *(_short(figures.get(key)) for key in keys))
        for rate in alone.RATES
        for queue, figures in alone.by_queue(found, f"rates.{rate}")
    ]
    head = ("Queue and rate", "worker, CPU ms", "PostgreSQL, CPU ms", "saver, CPU ms")
    return table((*head, "p50 ms", "p99 ms"), rows)


@_block
def postgres_peers(found: Results) -> Iterator[str]:
    """Yield the queues that PostgreSQL alone is compared with, and how fast each enqueues."""
    run = found["postgres"]
    told = {
        name: (
            f"{name} ({next(iter(peer['versions'].values()), 'not installed')})",
            peer["leaves"],
            peer["setup"] + "".join(f", {n.lower()} {v}" for n, v in peer["options"].items()),
            peer.get("missing", ""),
        )
        for name, peer in run["peers"].items()
    }
    ours = f"kjo_django {run['versions']['kjo_django']}"
    told[alone.OURS] = (ours, "a row, and a marker against a second run", "defaults", "")
    rates = [dict(alone.by_queue(found, name)) for name in ("enqueue.single", "crowd")]
    rows = [
        (
            *told[name][:3],
            *(number(rate.get(name, {}).get("jobs_per_second"), 0) for rate in rates),
            told[name][3],
        )
        for name in (alone.OURS, *run["peers"])
    ]
    head = ("Queue", "what a job leaves", "set up", "enqueued/s", "while a worker runs", "")
    return table(head, rows)


@_block
def asked(found: Results) -> Iterator[str]:
    """Yield what is asked of the servers for a job."""
    keys = ("queries_per_job", "redis_round_trips_per_job", "redis_commands_per_job")
    rows = [
        (f"{engine}, `{name}`", *(_short(case["ours"].get(key)) for key in keys))
        for engine, run in runs(found).items()
        for name, case in run["results"].get(engine, {}).items()
        if keys[0] in case["ours"] and not name.startswith("table.")
    ]
    return table(("Case", "queries/job", "Redis round trips/job", "Redis commands/job"), rows)


@_block
def peers(found: Results) -> Iterator[str]:
    """Yield the peers."""
    run = found["real"]
    ours = run["results"]["real"]["drain.no_op"]
    rate = ours["ours"]["jobs_per_second"]
    rows = [
        (
            f"kjo_django {run['versions']['kjo_django']}",
            "a row, and a marker against a second run",
            "defaults, one process",
            number(rate, 0),
            number(ours.get("spread_percent"), 0),
            "1",
        )
    ]
    for name, peer in run["peers"].items():
        version = next(iter(peer["versions"].values()), "")
        chosen = ", ".join(f"{n.lower()} {v}" for n, v in peer["options"].items())
        setup = f"{peer['setup']}; {chosen}"
        if "missing" in peer:
            rows.append((name, peer["leaves"], setup, "not measured", "", peer["missing"]))
            continue
        theirs = peer["ours"]["jobs_per_second"]
        rows.append(
            (
                f"{name} ({version})",
                peer["leaves"],
                setup,
                number(theirs, 0),
                number(peer["spread_percent"], 0),
                number(rate / theirs, 1),
            )
        )
    head = ("Queue", "what a job leaves", "set up", "jobs/s", "spread %", "ours is × faster")
    return table(head, rows)


HANDLERS = {
    "drain.no_op": "does nothing",
    "drain.insert": "inserts one row by the ORM",
    "drain.batch": "takes 500 jobs in one call (`batch=500`) and inserts their rows at once",
    "drain.sleep": "waits for 5 ms in a transaction; four lanes",
    "drain.async": "waits for 100 ms as a coroutine with `atomic=False`",
}
"""Cases that say what one process does with a kind of handler, and what the handler does."""


@_block
def one_process(found: Results) -> Iterator[str]:
    """Yield how many jobs one process runs a second, by what its handler does."""
    rows = []
    for name, does in HANDLERS.items():
        real = found["real"]["results"]["real"][name]["ours"]
        embedded = found["embedded"]["results"]["embedded"][name]["ours"]
        rates = (number(run["jobs_per_second"], 0) for run in (real, embedded))
        rows.append((does, *rates, number(real["cpu_us_per_job"], 0)))
    head = (
        "The handler",
        "jobs/s with PostgreSQL, Kafka and Redis",
        "jobs/s on SQLite",
        "CPU µs/job",
    )
    return table(head, rows)


@_block
def profile(found: Results) -> Iterator[str]:
    """Yield where the microseconds go, before and after."""
    profiles = found["profile"]
    stages = dict.fromkeys(stage for one in profiles.values() for stage in one["stages"])
    rows = [
        (stage, *(_microseconds(one, one["stages"].get(stage, 0)) for one in profiles.values()))
        for stage in stages
    ]
    rows.append(("**together**", *(_microseconds(one, 1) for one in profiles.values())))
    yield from table(("µs of CPU for each job", *profiles), rows)


def _microseconds(profile: Mapping[str, Any], share: float) -> str:
    return number(share * profile["cpu_us_per_job"], 1)


def _short(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
