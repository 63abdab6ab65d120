"""What is permitted is used: two rates in one topic, beside jobs that nothing limits, watched for a
minute. All are long: each takes more than a minute, and what it says depends on the machine.

``pytest -m long -s tests/acceptance/test_rates.py`` prints a row for each.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from kjo_django.conf import Settings
from kjo_django.models import HeldJob, MetricBucket
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.moments import Moment, moments_in, most_within
from tests.busy import burning

pytestmark = [pytest.mark.long, pytest.mark.timeout(400)]
MINUTE = 60.0
RATES = {"often": 30, "seldom": 5}
MOST_RELEASED = {"often": 120, "seldom": 20}
"""What the page on limits says: four seconds of a rate."""
AT_DEFAULT = ("heartbeat_interval", "processing_ttl", "poll_interval", "record_lease")
"""Settings that other tests of engines have shorter, as suits a crash."""


def at_default(engine: Engine) -> None:
    """Give an engine the settings that a project has by default."""
    engine.configure(
        **{each.name.upper(): each.default for each in fields(Settings) if each.name in AT_DEFAULT}
    )


@pytest.fixture(
    params=[
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("redis", marks=[pytest.mark.redis, pytest.mark.postgres]),
        pytest.param("kafka", marks=[pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres]),
    ]
)
def engine(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[Engine]:
    """PostgreSQL alone, with Redis for coordination, and with Kafka."""
    name, redis, kafka = request.param, None, None
    if name != "postgres":
        redis = request.getfixturevalue("redis_server").url
    if name == "kafka":
        kafka = request.getfixturevalue("kafka_server").bootstrap_servers
    with Engine(Servers(database_url, kafka, redis), tmp_path) as engine:
        at_default(engine)
        engine.variables["KJO_TEST_LIMITS"] = "1"
        yield engine


@pytest.mark.parametrize("way", ["quiet", "8-busy", "5-ms", "20-ms"])
@pytest.mark.parametrize(
    ("worker_count", "job_counts"),
    [
        (1, {"write_often": 2_400, "write_seldom": 1_500, "write_at_will": 300}),
        (3, {"write_often": 7_000, "write_seldom": 3_000, "write_at_will": 2_000}),
    ],
    ids=["one-worker", "three-workers"],
)
def test_what_is_permitted_is_used_and_no_more(
    engine: Engine,
    limited: Any,
    tmp_path: Path,
    request: pytest.FixtureRequest,
    way: str,
    worker_count: int,
    job_counts: dict[str, int],
) -> None:
    # Given
    path = tmp_path / "starts"
    released: dict[str, int] = defaultdict(int)
    limits = {name: getattr(limited, f"write_{name}").name for name in RATES}

    def note_released() -> bool:
        for name in RATES:
            places = HeldJob.objects.using(ALIAS).filter(
                limit__startswith=f"RATE:job:{limits[name]}"
            )
            released[name] = max(released[name], places.filter(is_released=True).count())
        starts = moments_in(path)
        return bool(starts) and starts[-1].at > starts[0].at + MINUTE

    with ExitStack() as circumstances:
        if way == "8-busy":
            circumstances.enter_context(burning(8))
        elif way != "quiet":
            circumstances.enter_context(engine.database_away(int(way[:-3]) / 1000))
        for name, count in job_counts.items():
            getattr(limited, name).enqueue_many([{"path": str(path)}] * count)
        # When
        workers = [engine.ready_worker() for _ in range(worker_count)]
        engine.wait_until(note_released, "No job started a minute after the first one")
        for worker in workers:
            worker.stop()
    # Then
    starts: dict[str, list[Moment]] = defaultdict(list)
    for moment in moments_in(path):
        starts[moment.what].append(moment)
    first = min(map(min, starts.values())).at
    used = {
        name: sum(1 for start in starts[name] if start.at < first + MINUTE) / (rate * MINUTE)
        for name, rate in RATES.items()
    }
    most = {name: most_within(starts[name], 1.0) for name in RATES}
    counts = MetricBucket.objects.using(ALIAS).values_list("unused_permit_count", flat=True)
    unused = sum(counts)
    free_after = max(starts["at will"]).at - first
    print(
        f"\n| {request.node.callspec.id} | {used['often']:.3f} | {used['seldom']:.3f} | {most} | "
        f"{free_after:.1f} s | {dict(released)} | {unused} | load {os.getloadavg()[0]:.1f} |"
    )
    assert len(starts["at will"]) == job_counts["write_at_will"]
    assert all(most[name] <= rate for name, rate in RATES.items()), most
    assert all(released[name] <= bound for name, bound in MOST_RELEASED.items()), released
    assert all(part >= 0.95 for part in used.values()), used
    if worker_count == 1:
        assert free_after <= 5.0
