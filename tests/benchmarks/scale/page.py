"""docs/explanation/scale.md: what stands between its markers comes from the raw results."""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.benchmarks.published.page import BLOCK, DOCS, NAMES, table
from tests.benchmarks.published.svg import Bars, Curve, bar_chart, line_chart
from tests.benchmarks.scale.model import Model, error, fit, used
from tests.benchmarks.scale.needs import Hardware, first_full, needs, simulate
from tests.benchmarks.scale.points import SERVERS, Point, from_dict

PAGE = DOCS / "scale.md"
FOLDER = DOCS / "scale"
RESULTS = FOLDER / "scale.json"
TITLES = {
    "postgres": "PostgreSQL",
    "kafka": "Kafka",
    "redis": "Redis",
    "web": "web process",
    "relay": "relay",
    "worker": "worker",
    "primary": "one PostgreSQL primary",
    "brokers": "three brokers",
}
RATES = (10_000, 100_000, 1_000_000)
AIM = 0.2
"""By what part a prediction may be wrong."""
OUTAGE = 60.0
WAYS = {
    "one at a time, a handler with an INSERT": ("enqueue single", "relay", "work insert", "prune"),
    "1,000 at a time, a handler that does nothing": (
        "enqueue many",
        "relay",
        "work no_op",
        "prune",
    ),
}
"""The two kinds of jobs that are planned for: a dear one, and the cheapest there is."""
NO_REDIS = (
    "enqueue many",
    "relay",
    "work no_op, coordination in the database",
    "prune",
)


class Results:
    """The raw results, and the model that they give."""

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = raw
        self.points: list[tuple[Point, Mapping[str, Any]]] = []
        for each in raw["points"]:
            facts = {name: value for name, value in each.items() if name != "found"}
            self.points.append((from_dict(facts), each["found"]))

    @cached_property
    def model(self) -> Model:
        return fit(self.points)

    @property
    def loaded(self) -> list[tuple[Point, Mapping[str, Any]]]:
        """Those that say how many jobs a second a deployment does."""
        return [each for each in self.points if not (each[0].is_idle or each[0].is_prune)]

    @property
    def held_out(self) -> list[tuple[Point, Mapping[str, Any]]]:
        """Those that the model has not seen."""
        return [each for each in self.loaded if not each[0].is_fitted]

    def named(self, name: str) -> tuple[Point, Mapping[str, Any]]:
        """Return a point by its name."""
        return next(each for each in self.points if each[0].name == name)


def read() -> Results:
    """Return the results that are published."""
    return Results(json.loads(RESULTS.read_text()))


def rewritten(text: str, results: Results) -> str:
    """Return the page with every block as the results have it."""

    def anew(match: re.Match[str]) -> str:
        lines = "\n".join(BLOCKS[match[2]](results)).strip()
        return f"{match[1]}\n{lines}\n\n{match[3]}"

    return BLOCK.sub(anew, text)


def write() -> list[Path]:
    """Write the blocks and the plots anew; return what has changed."""
    results = read()
    wanted = {PAGE: rewritten(PAGE.read_text(), results)}
    wanted |= {FOLDER / name: text for name, text in drawn(results).items()}
    changed = [p for p, text in wanted.items() if not p.exists() or p.read_text() != text]
    for path in changed:
        path.write_text(wanted[path])
    return changed


# --- Tables ---------------------------------------------------------------------------------------


def machine(results: Results) -> Iterator[str]:
    """Yield where and how it was measured."""
    facts, parameters = results.raw["machine"], results.raw["parameters"]
    versions = ", ".join(f"{NAMES.get(n, n)} {v}" for n, v in results.raw["versions"].items())
    rounds = "1 round" if parameters["rounds"] == 1 else f"{parameters['rounds']} rounds"
    others = [each["others"] for _, found in results.points for each in found.get("rounds", ())]
    yield (
        f"{facts['cpu_count']} processors ({facts['cpu_model']}), {facts['memory_gb']} GB, "
        f"{facts['system']}; {rounds} of {parameters['window']:g} s for each "
        f"deployment, {results.raw['seconds'] / 60:.0f} minutes without preparations. {versions}."
    )
    if others:
        yield ""
        yield (
            "What did not belong to the deployment, this program included, took "
            f"{_percent(statistics.median(others))} of a processor in the median round, "
            f"{_percent(max(others))} in the worst."
        )
    yield ""
    shares = parameters["shares"].items()
    yield from table(
        ("Each", "share of one processor"),
        ((TITLES[part], _percent(share)) for part, share in shares),
    )


def costs(results: Results) -> Iterable[str]:
    """Yield what a job costs, by step."""
    rows = []
    for step, cost in results.model.costs.items():
        sent = sum((cost.network_bytes or {}).values())
        is_prune = step == "prune"
        rows.append(
            (
                f"`{step}`",
                "" if is_prune else _micros(cost.process_us),
                "" if is_prune else _micros(cost.wait_us),
                "" if is_prune else f"{100 * cost.process_fixed:.1f} %",
                *(_micros(cost.servers_us[server]) for server in SERVERS),
                f"{cost.wal_bytes:,.0f}",
                f"{cost.log_bytes:,.0f}",
                f"{sent:,.0f}",
            )
        )
    head = (
        "Step",
        "its process, µs",
        "waits, µs",
        "fixed",
        *(f"{TITLES[server]}, µs" for server in SERVERS),
        "PostgreSQL's log, B",
        "Kafka's log, B",
        "network of the servers, B",
    )
    return table(head, rows)


def idle(results: Results) -> Iterable[str]:
    """Yield what is used while there is no job."""
    shares = results.model.idle.items()
    return table(
        ("With nothing to do", "of one processor"),
        ((TITLES[part], f"{100 * share:.1f} %") for part, share in shares),
    )


def deployments(results: Results) -> Iterator[str]:
    """Yield every deployment: measured, predicted, and what was used up."""
    rows = []
    for point, found in results.loaded:
        rate = found["jobs_per_second"]
        predicted = results.model.rate(point)
        rows.append(
            (
                point.name,
                f"{rate:,.0f}",
                f"{min(found['rates']):,.0f} to {max(found['rates']):,.0f}",
                "taken for the costs" if point.is_fitted else f"{predicted:,.0f}",
                "" if point.is_fitted else f"{100 * error(predicted, rate):+.0f} %",
                f"{found['jobs_per_commit']:,.0f}" if point.workers else "",
                _most_used(results.model, point, found),
            )
        )
    head = (
        "Deployment",
        "jobs/s",
        "rounds",
        "predicted",
        "error",
        "jobs in a commit",
        "most used",
    )
    yield from table(head, rows)
    spread = [(max(found["rates"]) / min(found["rates"]), point) for point, found in results.loaded]
    most, where = max(spread, key=lambda each: each[0])
    yield ""
    if results.raw["parameters"]["rounds"] == 1:
        yield "With one round nothing says how much the figures differ from round to round."
        return
    yield (
        "The fastest round of a deployment is faster than the slowest by a factor of "
        f"{statistics.median(factor for factor, _ in spread):.2f} in the median, and of {most:.2f} "
        f"at most ({where.name})."
    )


def _most_used(model: Model, point: Point, found: Mapping[str, Any]) -> str:
    shares = sorted(used(point, found, model.idle).items(), key=lambda each: -each[1])
    return ", ".join(f"{TITLES[part]} {_percent(share)}" for part, share in shares[:2])


def errors(results: Results) -> Iterator[str]:
    """Yield how far the predictions are off: of the rates, and of what each server uses."""
    rates = {
        point.name: error(results.model.rate(point), found["jobs_per_second"])
        for point, found in results.held_out
    }
    misses = [f"{name} ({100 * off:+.0f} %)" for name, off in rates.items() if abs(off) > AIM]
    yield _summed("jobs a second", list(map(abs, rates.values())))
    if misses:
        yield f"- not within {_percent(AIM)}: {', '.join(misses)}"
    for server in SERVERS:
        off = [
            abs(error(results.model.use(found["step_rates"])[server], value))
            for _, found in results.held_out
            if (value := found["cpu"][server]) > 2 * results.model.idle[server]
        ]
        yield _summed(f"processor time of {TITLES[server]} at the measured rates", off)


def _summed(what: str, off: list[float]) -> str:
    if not off:
        return f"- {what}: never twice what it uses with nothing to do, so nothing to compare"
    within = sum(each <= AIM for each in off)
    return (
        f"- {what}: {within} of {len(off)} within {_percent(AIM)}, median "
        f"{_percent(statistics.median(off))}, worst {_percent(max(off))}"
    )


def hardware(results: Results) -> Iterable[str]:
    """Yield what is assumed of a server."""
    on = Hardware()
    return table(
        ("Assumed", "value"),
        (
            ("in use of any part, at most", _percent(on.use)),
            ("processors of a PostgreSQL primary", f"{on.postgres_cores}"),
            ("its log, bytes a second", f"{on.postgres_log / 1e6:,.0f} MB"),
            ("log written for each byte that was measured", f"{on.wal_factor:g}"),
            ("processors of a Kafka broker", f"{on.broker_cores}"),
            ("its log, bytes a second", f"{on.broker_log / 1e6:,.0f} MB"),
            ("replicas of a topic", f"{on.replicas}"),
            ("network of a server, bytes a second", f"{on.network / 1e6:,.0f} MB"),
            ("processors that Redis and a process of Python use", "1"),
        ),
    )


def first(results: Results) -> Iterable[str]:
    """Yield up to which rate one of each is enough."""
    found = {name: dict(first_full(results.model, steps)) for name, steps in WAYS.items()}
    order = sorted(next(iter(found.values())), key=lambda part: next(iter(found.values()))[part])
    rows = (
        (TITLES.get(part, part), *(_rate(each[part]) for each in found.values())) for part in order
    )
    return table(("One is enough up to", *found), rows)


def plan(results: Results) -> Iterator[str]:
    """Yield what the rates need, a table for each way."""
    for name, steps in WAYS.items():
        columns = [_needed(results.model, steps, rate) for rate in RATES]
        yield from table(
            (f"Enqueued {name}", *(f"{rate:,}/s" for rate in RATES)),
            ((what, *(column[what] for column in columns)) for what in columns[0]),
        )
        yield ""


def _needed(model: Model, steps: Sequence[str], rate: float) -> dict[str, str]:
    found, course = needs(model, steps, rate), simulate(model, steps, rate, outage=OUTAGE)
    caught_up = "never" if course.caught_up is None else f"after {course.caught_up:,.0f} s"
    return {
        "processors for enqueueing": f"{found.web_cores:,.1f}",
        "queues, each with a relay": f"{found.relays:,}",
        "worker processes": f"{found.workers:,}",
        "PostgreSQL primaries, and what of them is used up": (
            f"{found.primaries:,}, {found.primary_bound}"
        ),
        "Kafka brokers, and what of them is used up": f"{found.brokers:,}, {found.broker_bound}",
        "Redis": f"{found.redis:,}",
        "PostgreSQL's logs, a second": f"{found.wal / 1e6:,.0f} MB",
        "Kafka's logs, a second": f"{found.kafka_log / 1e6:,.0f} MB",
        "jobs that wait after a minute without workers": f"{course.most_waiting:,.0f}",
        "none of them waits any more": caught_up,
    }


def without_redis(results: Results) -> Iterable[str]:
    """Yield what the cheapest jobs need where the databases coordinate."""
    steps = WAYS["1,000 at a time, a handler that does nothing"]
    rows = []
    for rate in RATES:
        beside, alone = (needs(results.model, each, rate) for each in (steps, NO_REDIS))
        rows.append(
            (
                f"{rate:,}",
                f"{beside.primaries:,} and {beside.redis:,}",
                f"{alone.primaries:,}",
                f"{beside.workers:,}",
                f"{alone.workers:,}",
            )
        )
    head = (
        "jobs/s",
        "primaries and Redis",
        "primaries, without Redis",
        "workers with Redis",
        "workers without",
    )
    return table(head, rows)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _micros(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}"


def _rate(value: float) -> str:
    """Return a rate with the two digits that a plan can have."""
    size = 10 ** max(0, len(str(int(value))) - 2)
    return f"{round(value / size) * size:,}/s"


BLOCKS: dict[str, Callable[[Results], Iterable[str]]] = {
    "machine": machine,
    "costs": costs,
    "idle": idle,
    "deployments": deployments,
    "errors": errors,
    "hardware": hardware,
    "first full": first,
    "plan": plan,
    "without redis": without_redis,
}

# --- Plots ----------------------------------------------------------------------------------------

NARROW = ", narrow PostgreSQL"
ALL_WORKERS = ("1 worker", "2 workers", "3 workers", "4 workers")


def drawn(results: Results) -> dict[str, str]:
    """Return the plots by the names of their files."""
    return {
        "workers.svg": _curves(
            results,
            "Jobs a second against workers",
            [(number, name) for number, name in enumerate(ALL_WORKERS, 1)],
            "workers",
        ),
        "narrow.svg": _curves(
            results,
            "The same with a PostgreSQL that is held to less",
            [(number, f"{name}{NARROW}") for number, name in enumerate(ALL_WORKERS, 1)],
            "workers",
        ),
        "partitions.svg": _curves(
            results,
            "Jobs a second of four workers against partitions",
            [
                (1, "4 workers, 1 partition"),
                (2, "4 workers, 2 partitions"),
                (4, "4 workers"),
                (8, "4 workers, 8 partitions"),
            ],
            "partitions",
        ),
        "relays.svg": _relays(results),
        "used.svg": _used(results),
    }


def _curves(results: Results, title: str, names: list[tuple[int, str]], x_unit: str) -> str:
    points = [(float(x), *results.named(name)) for x, name in names]
    measured = [(0.0, 0.0)] + [(x, found["jobs_per_second"]) for x, _, found in points]
    predicted = [(0.0, 0.0)] + [(x, results.model.rate(point)) for x, point, _ in points]
    curves = [Curve("measured", measured), Curve("predicted", predicted)]
    return line_chart(title, curves, unit="jobs a second", x_unit=x_unit)


def _relays(results: Results) -> str:
    groups = [
        Bars(point.name, [found["jobs_per_second"], results.model.rate(point)])
        for point, found in results.loaded
        if point.steps == ("relay",)
    ]
    title = "Messages a second against relays"
    return bar_chart(title, groups, series=["measured", "predicted"])


def _used(results: Results) -> str:
    """What is used up while workers are added and PostgreSQL is held to less."""
    groups = []
    for name in ALL_WORKERS:
        point, found = results.named(f"{name}{NARROW}")
        shares = used(point, found, results.model.idle)
        groups.append(Bars(name, [shares[part] * 100 for part in ("worker", "postgres", "kafka")]))
    title = "Used of its share, with a PostgreSQL that is held to less"
    return bar_chart(title, groups, series=["workers", "PostgreSQL", "Kafka"], unit="%")
