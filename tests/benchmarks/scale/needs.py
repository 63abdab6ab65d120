"""What so many jobs a second need of everything, from what one job costs.

`needs` counts processes and servers. `simulate` follows a queue through its deployment, in steps of
a tenth of a second: it shows that the deployment keeps up, and how long it takes after an outage.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.scale.model import Cost, Model

STEP = 0.1
"""Seconds of one step of the simulation."""


@dataclass(frozen=True)
class Hardware:
    """What one server is, and how much of it may be in use.

    :param use: of processors, disks and networks, so that a part that is lost leaves enough.
    :param wal_factor: bytes of log for each that was measured: a table that is changed after a
        checkpoint has its pages in the log too.
    """

    use: float = 0.6
    postgres_cores: int = 16
    postgres_log: float = 300e6
    wal_factor: float = 2.0
    broker_cores: int = 8
    broker_log: float = 300e6
    replicas: int = 3
    network: float = 1250e6


@dataclass(frozen=True)
class Needs:
    """How many of each, for a rate."""

    web_cores: float
    relays: int
    """Each of a queue of its own."""
    workers: int
    primaries: int
    primary_bound: str
    """What of a primary is used up first."""
    brokers: int
    broker_bound: str
    redis: int
    wal: float
    """Bytes a second of all primaries."""
    kafka_log: float
    """Bytes a second of all brokers, replicas included."""


def needs(
    model: Model, steps: Sequence[str], rate: float, hardware: Hardware | None = None
) -> Needs:
    """Return what a rate needs, where every job goes through these steps: one that enqueues, the
    relay, one that works; and others that no process of the project must keep up with."""
    on = hardware or Hardware()
    costs = [model.costs[step] for step in steps]
    enqueue, relay, work = costs[:3]
    primary = _primary(model, steps, on)
    broker = _broker(model, steps, on)
    redis = _micros(model, steps, "redis")
    return Needs(
        web_cores=rate * enqueue.process_us / 1e6 / on.use,
        relays=math.ceil(rate / process_rate(relay, on.use)),
        workers=math.ceil(rate / process_rate(work, on.use)),
        primaries=math.ceil(rate / min(primary.values())),
        primary_bound=min(primary, key=lambda name: primary[name]),
        # Each replica is on a broker of its own.
        brokers=max(on.replicas, math.ceil(rate / min(broker.values()))),
        broker_bound=min(broker, key=lambda name: broker[name]),
        redis=math.ceil(rate * redis / 1e6 / on.use),
        wal=rate * sum(cost.wal_bytes for cost in costs) * on.wal_factor,
        kafka_log=rate * sum(cost.log_bytes for cost in costs) * on.replicas,
    )


def process_rate(cost: Cost, use: float) -> float:
    """Return the jobs a second of one process, which has one interpreter and so one processor."""
    return use * cost.process_rate(1.0)


def first_full(
    model: Model, steps: Sequence[str], hardware: Hardware | None = None
) -> list[tuple[str, float]]:
    """Return each part of which there is one at first, and up to which rate one is enough; the part
    that is full first comes first."""
    on = hardware or Hardware()
    relay, work = (model.costs[step] for step in steps[1:3])
    found = {
        "worker": process_rate(work, on.use),
        "relay": process_rate(relay, on.use),
        "primary": min(_primary(model, steps, on).values()),
        "brokers": on.replicas * min(_broker(model, steps, on).values()),
    }
    if redis := _micros(model, steps, "redis"):
        found["redis"] = on.use * 1e6 / redis
    return sorted(found.items(), key=lambda each: each[1])


def _primary(model: Model, steps: Sequence[str], on: Hardware) -> dict[str, float]:
    """Return the jobs a second that one primary takes, by each of what it has."""
    costs = [model.costs[step] for step in steps]
    wal = sum(cost.wal_bytes for cost in costs) * on.wal_factor
    sent = sum((cost.network_bytes or {}).get("postgres", 0.0) for cost in costs)
    return _rates(
        {
            "CPU": (on.postgres_cores * 1e6, _micros(model, steps, "postgres")),
            "log": (on.postgres_log, wal),
            # Its standby is sent the log.
            "network": (on.network, sent + wal),
        },
        on.use,
    )


def _broker(model: Model, steps: Sequence[str], on: Hardware) -> dict[str, float]:
    """Return the jobs a second that each broker of a cluster takes, by each of what it has."""
    costs = [model.costs[step] for step in steps]
    log = sum(cost.log_bytes for cost in costs)
    sent = sum((cost.network_bytes or {}).get("kafka", 0.0) for cost in costs)
    return _rates(
        {
            # A replica is taken to cost the broker that has it as much as the leader's cost that.
            "CPU": (on.broker_cores * 1e6, on.replicas * _micros(model, steps, "kafka")),
            "log": (on.broker_log, on.replicas * log),
            # Each further replica is sent by one broker and received by another.
            "network": (on.network, sent + 2 * (on.replicas - 1) * log),
        },
        on.use,
    )


def _rates(budgets: dict[str, tuple[float, float]], use: float) -> dict[str, float]:
    return {name: use * most / each for name, (most, each) in budgets.items() if each}


def _micros(model: Model, steps: Sequence[str], server: str) -> float:
    return sum(model.costs[step].servers_us[server] for step in steps)


# --- Simulation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Course:
    """What a simulation has shown.

    :param most_waiting: jobs that had not been run, at most.
    :param caught_up: seconds after the outage until no more jobs waited than before it; None if
        never.
    """

    most_waiting: float
    caught_up: float | None


def simulate(
    model: Model,
    steps: Sequence[str],
    rate: float,
    *,
    outage: float,
    seconds: float = 3600.0,
    hardware: Hardware | None = None,
) -> Course:
    """Follow jobs through the deployment that ``needs`` gives for a rate, while all workers stand
    still for so many seconds at first. All parts may be used up entirely to catch up."""
    on = hardware or Hardware()
    found = needs(model, steps, rate, on)
    costs = [model.costs[step] for step in steps]
    relay_most = found.relays * process_rate(costs[1], 1.0)
    work_most = found.workers * process_rate(costs[2], 1.0)
    micros = [cost.servers_us["postgres"] for cost in costs]
    # What others do, such as pruning, is done all the time.
    beside = rate * sum(micros[3:])
    budget = found.primaries * on.postgres_cores * 1e6 - beside
    pending = queued = most = 0.0
    for number in range(round(seconds / STEP)):
        now = number * STEP
        pending += rate * STEP
        # What enqueues comes first, since people wait for it; then the relay, then the workers.
        left = budget * STEP - rate * STEP * micros[0]
        relayed = min(pending, relay_most * STEP, max(0.0, left) / micros[1])
        left -= relayed * micros[1]
        pending, queued = pending - relayed, queued + relayed
        if now >= outage:
            worked = min(queued, work_most * STEP, max(0.0, left) / micros[2])
            queued -= worked
        most = max(most, pending + queued)
        if now >= outage and pending + queued < 1:
            return Course(most, now + STEP - outage)
    return Course(most, None)
