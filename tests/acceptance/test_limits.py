"""Limits over four real workers, of which one is killed or frozen, or whose Redis goes away."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from django.db import connections, transaction
from django.db.models import Max

from kjo_django.models import NEVER, HeldJob, TransportMessage
from tests.acceptance.engine import ALIAS, Engine, Servers
from tests.acceptance.moments import moments_in, most_within
from tests.acceptance.program import Program
from tests.ledger import jobs
from tests.services import RedisServer

pytestmark = pytest.mark.timeout(240)
SECONDS = 10.0
"""How long a rate is watched."""
every_engine = pytest.mark.parametrize(
    "engine_name",
    [
        "embedded",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("real", marks=[pytest.mark.kafka, pytest.mark.redis, pytest.mark.postgres]),
    ],
)


@pytest.fixture
def limiting(engine_name: str, request: Any) -> Engine:
    engine: Engine = request.getfixturevalue(engine_name)
    engine.variables["KJO_TEST_LIMITS"] = "1"
    # A worker counts as dead after three heartbeats: a busy machine may be late by two.
    engine.configure(HEARTBEAT_INTERVAL=1, PROCESSING_TTL=6)
    return engine


@pytest.mark.promise("limit")
@every_engine
@pytest.mark.parametrize("name", ["start_rated", "start_rated_in_transaction"])
def test_a_rate_holds_over_four_workers_one_of_which_is_killed(
    limiting: Engine, limited: Any, name: str, tmp_path: Path
) -> None:
    # Given
    path = tmp_path / "starts"
    workers = [limiting.ready_worker("--concurrency", "2") for _ in range(4)]
    getattr(limited, name).enqueue_many([{"path": str(path)}] * 200)
    limiting.wait_until(lambda: moments_in(path), "Nothing started")
    # When
    limiting.wait_for_moment(SECONDS / 2)
    workers[0].kill()
    killed_at = time.time()
    limiting.wait_for_moment(SECONDS / 2)
    # An idle machine reaches 4.7 a second. A busy one is late for some, which lose their permit.
    limiting.wait_until(
        lambda: sum(moment.at > killed_at for moment in moments_in(path)) >= SECONDS,
        "The rate was not used after the death of a worker",
    )
    for worker in workers[1:]:
        assert worker.stop() == 0, worker.log_tail()
    # Then
    starts = moments_in(path)
    assert most_within(starts, 1.0) <= 5
    print(f"{len(starts)} starts within {starts[-1].at - starts[0].at:.1f} s")


def runs_of(path: Path, lost: dict[int, float]) -> list[tuple[float, float]]:
    """Return when the runs began and ended; those that a lost worker had begun ended with that.

    One that was about to call its handler when its worker was frozen does so at the thaw, and is
    interrupted soon (decision 178): it is left out.
    """
    begun: dict[tuple[int, str], float] = {}
    runs = []
    for moment in moments_in(path):
        run, what = moment.what.rsplit(" ", 1)
        if what == "start":
            begun[moment.pid, run] = moment.at
            continue
        start, end, lost_at = begun.pop((moment.pid, run)), moment.at, lost.get(moment.pid)
        if lost_at is not None and start < lost_at:
            runs.append((start, min(end, lost_at)))
        elif lost_at is None or what == "end":
            runs.append((start, end))
    runs += [(start, lost.get(pid, time.time())) for (pid, _), start in begun.items()]
    return runs


def most_at_once(runs: list[tuple[float, float]]) -> int:
    counts = (sum(1 for start, end in runs if start <= moment < end) for moment, _ in runs)
    return max(counts, default=0)


@every_engine
@pytest.mark.parametrize("fate", ["killed", "frozen"])
def test_slots_hold_over_four_workers_one_of_which_is_lost(
    limiting: Engine, limited: Any, fate: str, tmp_path: Path
) -> None:
    # Given three slots, all of them taken
    path = tmp_path / "runs"
    workers = {w.pid: w for w in [limiting.ready_worker("--concurrency", "4") for _ in range(4)]}
    payloads = [{"tenant": "acme", "path": str(path), "seconds": 1.0}] * 6
    limited.occupy_slot.enqueue_many(payloads)
    limiting.wait_until(lambda: len(moments_in(path)) >= 3, "The slots were not taken")
    # When a worker that has one is lost
    pid = moments_in(path)[-1].pid
    lose(limiting, workers[pid], fate)
    lost = {pid: time.time()}
    # On SQLite the freeze waits until the worker is out of the database: the first may be done.
    limited.occupy_slot.enqueue_many(payloads * 5)

    def most_since() -> int:
        return most_at_once([run for run in runs_of(path, lost) if run[0] > lost[pid]])

    # Then all three are taken again, and never four
    limiting.wait_until(lambda: most_since() == 3, "Its slot was never another's")
    limiting.wait_for_moment(2)
    assert most_at_once(runs_of(path, lost)) <= 3
    if fate == "frozen":
        workers[pid].thaw()
    limiting.settle()
    assert most_at_once(runs_of(path, lost)) <= 3


def lose(engine: Engine, worker: Program, fate: str) -> None:
    if fate == "killed":
        worker.kill()
    else:
        engine.freeze(worker)


@pytest.fixture
def redis_of_its_own(redis_server: Any) -> Iterator[RedisServer]:
    """A Redis to be killed, which forgets everything then."""
    with RedisServer() as server:
        yield server


@pytest.fixture
def without_redis(
    kafka_server: Any, database_url: str, redis_of_its_own: RedisServer, tmp_path: Path
) -> Iterator[Engine]:
    servers = Servers(database_url, kafka_server.bootstrap_servers, redis_of_its_own.url)
    with Engine(servers, tmp_path) as engine:
        engine.variables["KJO_TEST_LIMITS"] = "1"
        engine.configure(HEARTBEAT_INTERVAL=0.5, PROCESSING_TTL=5)
        yield engine


@pytest.mark.promise("limit-without-coordination")
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_limits_hold_while_redis_is_away_and_after_it_has_lost_its_data(
    without_redis: Engine, limited: Any, redis_of_its_own: RedisServer, tmp_path: Path
) -> None:
    # Given jobs with a rate and jobs with slots, of which more wait than run
    engine, starts_path, runs_path = without_redis, tmp_path / "starts", tmp_path / "runs"
    workers = [engine.ready_worker("--concurrency", "4") for _ in range(4)]
    limited.start_rated.enqueue_many([{"path": str(starts_path)}] * 60)
    job = {"tenant": "acme", "path": str(runs_path), "seconds": 1.0}
    limited.occupy_slot.enqueue_many([job] * 24)
    engine.wait_until(
        lambda: len(moments_in(starts_path)) > 4 and len(moments_in(runs_path)) >= 3,
        "Nothing started",
    )
    # When Redis is killed, is away for a while, and comes back with nothing
    redis_of_its_own.kill()
    engine.wait_for_moment(2)
    away = time.time()
    engine.wait_for_moment(2)
    redis_of_its_own.start()
    back = time.time()
    engine.settle()
    # Then all have run, once each, and never more than permitted
    starts = moments_in(starts_path)
    runs = runs_of(runs_path, {})
    assert (len(starts), len(runs)) == (60, 24)
    assert most_within(starts, 1.0) <= 5
    assert most_at_once(runs) <= 3
    # And while it was away none of them started
    begun = [*(start.at for start in starts), *(start for start, _ in runs)]
    assert not [moment for moment in begun if away < moment < back]
    assert [moment for moment in begun if moment > back]
    for worker in workers:
        assert worker.stop() == 0, worker.log_tail()


@pytest.mark.long
@pytest.mark.postgres
def test_ten_thousand_waiting_jobs_cost_next_to_nothing_and_delay_no_others(
    postgres: Engine, limited: Any, tmp_path: Path
) -> None:
    # Given an idle worker
    postgres.variables["KJO_TEST_LIMITS"] = "1"
    worker = postgres.ready_worker()
    before = cost_of(postgres, worker, 15.0)
    # When some jobs wait in line, and as many behind them as make ten thousand
    path = tmp_path / "starts"
    limited.start_rarely.enqueue_many([{"path": str(path)}] * 20)
    waiting = HeldJob.objects.using(ALIAS)
    postgres.wait_until(lambda: waiting.count() >= 19, "They are not in line")
    first = waiting.order_by("id").first()
    assert first is not None
    messages = TransportMessage.objects.using(ALIAS)
    last = messages.aggregate(last=Max("id"))["last"] or 0
    with transaction.atomic(using=ALIAS):
        answers = limited.start_rarely.enqueue_many([{"path": str(path)}] * 9_980)
        ids = [answer.job_id for answer in answers]
        postgres.jobs.filter(pk__in=ids).update(available_at=NEVER)
        messages.filter(id__gt=last).delete()
        rows = {"limit": first.limit, "queue": first.queue, "generation": 1, "rank": 0}
        waiting.bulk_create(
            HeldJob(job_id=id, waiting_since=first.waiting_since, **rows) for id in ids
        )
    assert waiting.count() >= 9_999
    postgres.wait_for_moment(3)
    after = cost_of(postgres, worker, 15.0)
    # Then that is what it costs
    print(f"idle: {before}; while they wait: {after}")
    assert after.cpu < before.cpu + 0.05
    assert after.transactions < before.transactions + 20
    # And others start at once
    delays = [delay_of(postgres, f"other {number}") for number in range(10)]
    print(f"others after {sorted(delays)} s")
    assert statistics.median(delays) < 1
    assert len(moments_in(path)) == 1
    assert worker.stop() == 0, worker.log_tail()


class Cost(NamedTuple):
    cpu: float
    """The worker's share of a core."""
    transactions: float
    """Of the database in a second, this process's look included."""


def cost_of(engine: Engine, worker: Program, seconds: float) -> Cost:
    """Return what a worker costs, whatever else the machine does."""

    def look() -> tuple[float, int]:
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rpartition(")")[2].split()
        ticks = int(fields[11]) + int(fields[12])
        with connections[ALIAS].cursor() as cursor:
            cursor.execute("SELECT pg_stat_clear_snapshot()")
            cursor.execute(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database "
                "WHERE datname = current_database()"
            )
            return ticks / os.sysconf("SC_CLK_TCK"), cursor.fetchone()[0]

    first = look()
    engine.wait_for_moment(seconds)
    last = look()
    return Cost(*((b - a) / seconds for a, b in zip(first, last, strict=True)))


def delay_of(engine: Engine, name: str) -> float:
    """Return after how many seconds a job without a limit has run that is enqueued now."""
    began = time.monotonic()
    jobs.write.enqueue(job=name)
    engine.wait_until(lambda: engine.entries.filter(job=name).exists(), f"{name} did not run", 400)
    return time.monotonic() - began
