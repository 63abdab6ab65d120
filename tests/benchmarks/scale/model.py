"""What a job costs each part, taken from some of the points; and what the others should show then.

A server takes the same from its processor for each job of a step, and a little while it has nothing
to do. A process (web process, relay, worker) does so too, and between waits for answers while it
does nothing else. A process that works also takes a fixed part, however few jobs it does: it asks,
renews leases, and comes back from each rest. Where a step was measured at two shares,
a line through both gives the fixed part and the cost of a job.

A process that is held to a small share waits while it has to rest anyway: so either its processor
time decides how many jobs it does, or that and its waits without a rest, whichever allows less. The
rate of a deployment is that of its slowest part.
"""

from __future__ import annotations

import operator
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.benchmarks.scale.points import SERVERS, Point

PROCESSES = {"enqueue": "web", "relay": "relay", "work": "worker", "prune": "web"}
"""Which process does a step, by the first word of the step's name."""

FULL = 0.97
"""Of its share: a process that uses more is taken to be held up by that alone."""

Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Cost:
    """What one job of one step takes.

    :param process_us: microseconds of processor of the process that does it.
    :param process_fixed: what this process takes of a processor besides, however few jobs it does.
    :param wait_us: microseconds that this process waits besides, for each job, where it had its
        largest share; one that has used all of it shows none.
    :param servers_us: microseconds of processor of each server.
    :param wal_bytes: of PostgreSQL's log.
    :param log_bytes: of Kafka's log, once for each replica.
    :param network_bytes: sent and received by each server.
    """

    process_us: float
    wait_us: float
    servers_us: Mapping[str, float]
    wal_bytes: float = 0.0
    log_bytes: float = 0.0
    network_bytes: Mapping[str, float] | None = None
    process_fixed: float = 0.0

    def process_rate(self, share: float) -> float:
        """Return the most jobs a second of one process that has this share of a processor."""
        by_share = (share - self.process_fixed) / self.process_us
        by_waits = (1 - self.process_fixed) / (self.process_us + self.wait_us)
        return max(0.0, min(by_share, by_waits)) * 1e6


@dataclass(frozen=True)
class Model:
    """Costs by step, and the share of a processor that each part uses while there is no job."""

    costs: Mapping[str, Cost]
    idle: Mapping[str, float]

    def limits(self, point: Point) -> dict[str, float]:
        """Return the most jobs a second that each part of a deployment allows, by part."""
        found = {}
        for step in point.steps:
            cost, kind = self.costs[step], process_of(step)
            found[kind] = busy(point, kind) * cost.process_rate(point.shares[kind])
        for server in SERVERS:
            micros = sum(self.costs[step].servers_us[server] for step in point.steps)
            if micros > 0:
                found[server] = (point.shares[server] - self.idle[server]) * 1e6 / micros
        return found

    def rate(self, point: Point) -> float:
        """Return the jobs a second that a deployment should do."""
        return min(self.limits(point).values())

    def use(self, rates: Mapping[str, float]) -> dict[str, float]:
        """Return the processors that each server should use, where each step has a rate."""
        return {
            server: self.idle[server]
            + sum(rate * self.costs[step].servers_us[server] for step, rate in rates.items()) / 1e6
            for server in SERVERS
        }


def process_of(step: str) -> str:
    """Return the kind of process that does a step."""
    return PROCESSES[step.split()[0]]


def busy(point: Point, kind: str) -> int:
    """Return how many processes of a kind have something to do."""
    return {"web": 1, "relay": point.busy_relays, "worker": point.busy_workers}[kind]


def fit(measured: Sequence[tuple[Point, Figures]]) -> Model:
    """Take the costs from the points that are for this, each step's from points of it alone."""
    fitted = [(point, found) for point, found in measured if point.is_fitted]
    idle = next(found["cpu"] for point, found in fitted if point.is_idle)
    idle = {part: idle[part] for part in (*SERVERS, "worker")}
    by_step: dict[str, list[tuple[Point, Figures]]] = {}
    for point, found in fitted:
        if not point.is_idle:
            (step,) = point.steps
            by_step.setdefault(step, []).append((point, found))
    return Model({step: _cost(step, points, idle) for step, points in by_step.items()}, idle)


def _cost(step: str, points: Sequence[tuple[Point, Figures]], idle: Mapping[str, float]) -> Cost:
    kind = process_of(step)
    rates = [found["step_rates"][step] for _, found in points]
    counts = [busy(point, kind) for point, _ in points]
    fixed, micros = _line(
        [rate / count for rate, count in zip(rates, counts, strict=True)],
        [found["cpu"][kind] / count for (_, found), count in zip(points, counts, strict=True)],
        idle.get(kind, 0.0),
    )
    # Where a share was used up, and where it is small, what is seen is rest.
    share, each_rate, use = max(
        (point.shares[kind], rate / count, found["cpu"][kind] / count)
        for (point, found), rate, count in zip(points, rates, counts, strict=True)
    )
    wait = (1 - fixed) / each_rate * 1e6 - micros if use < FULL * share else 0.0

    def each(value: Callable[[Figures], float]) -> float:
        return max(0.0, _slope(rates, [value(found) for _, found in points]))

    return Cost(
        process_us=micros,
        process_fixed=fixed,
        wait_us=max(0.0, wait),
        servers_us={
            server: each(lambda found, name=server: (found["cpu"][name] - idle[name]) * 1e6)
            for server in SERVERS
        },
        wal_bytes=each(lambda found: found["wal"]),
        log_bytes=each(lambda found: found["log"]),
        network_bytes={
            server: each(lambda found, name=server: found["network"][name]) for server in SERVERS
        },
    )


def _line(rates: Sequence[float], uses: Sequence[float], least: float) -> tuple[float, float]:
    """Return the fixed part of a processor that is used, and the microseconds of each job.

    :param least: the fixed part where there is one point, and what it is not less than.
    """
    if len(set(rates)) > 1:
        slope, fixed = statistics.linear_regression(rates, uses)
        if slope > 0 and fixed > least:
            return fixed, slope * 1e6
    return least, _slope(rates, [use - least for use in uses]) * 1e6


def _slope(rates: Sequence[float], values: Sequence[float]) -> float:
    """Return the value for each job, by least squares: what is fixed and not known weighs little,
    since it is a small part of what was measured at a high rate."""
    return sum(map(operator.mul, rates, values)) / sum(rate * rate for rate in rates)


def used(point: Point, found: Figures, idle: Mapping[str, float]) -> dict[str, float]:
    """Return how much of its share each busy part has used: 1 is all of it.

    :param idle: what processes without anything to do use.
    """
    shares = {server: found["cpu"][server] / point.shares[server] for server in SERVERS}
    for step in point.steps:
        kind = process_of(step)
        count = busy(point, kind)
        others = point.workers - count if kind == "worker" else 0
        mine = found["cpu"][kind] - others * idle.get(kind, 0.0)
        shares[kind] = mine / (count * point.shares[kind])
    return shares


def error(predicted: float, found: float) -> float:
    """Return by what part of the measured value a prediction is too high."""
    return predicted / found - 1
