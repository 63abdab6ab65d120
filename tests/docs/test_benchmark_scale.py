"""The page on scale says what the raw results say, and the model's arithmetic is right."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.published import page as performance
from tests.benchmarks.scale import page
from tests.benchmarks.scale.cpu import CpuGroup
from tests.benchmarks.scale.measuring import with_middle
from tests.benchmarks.scale.model import Cost, Model, busy, error, fit, process_of, used
from tests.benchmarks.scale.needs import Hardware, first_full, needs, simulate
from tests.benchmarks.scale.points import POINTS, SHARES, Point, from_dict
from tests.cluster.network import obstacle

SERVERS = ("postgres", "kafka", "redis")


def cost(process: float, postgres: float, wait: float = 0.0, **more: float) -> Cost:
    return Cost(
        process,
        wait,
        {"postgres": postgres, "kafka": more.get("kafka", 0.0), "redis": more.get("redis", 0.0)},
        more.get("wal", 0.0),
        more.get("log", 0.0),
        {"postgres": more.get("network", 0.0), "kafka": 0.0, "redis": 0.0},
    )


def model(**costs: Cost) -> Model:
    names = {"enqueue": "enqueue many", "relay": "relay", "work": "work no_op"}
    idle = dict.fromkeys((*SERVERS, "worker"), 0.0)
    return Model({names[name]: each for name, each in costs.items()}, idle)


# --- The page -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results() -> page.Results:
    return page.read()


def test_the_tables_are_those_of_the_raw_results(results):
    text = page.PAGE.read_text()
    wanted = page.rewritten(text, results)
    assert wanted == text, "run `python -m tests.benchmarks.scale --plots`"


def test_the_plots_are_those_of_the_raw_results(results):
    kept = {path.name: path.read_text() for path in page.FOLDER.glob("*.svg")}
    assert kept == page.drawn(results), "run `python -m tests.benchmarks.scale --plots`"


def test_the_page_shows_every_block_and_every_plot_once(results):
    text = page.PAGE.read_text()
    assert sorted(name for _, name, _ in page.BLOCK.findall(text)) == sorted(page.BLOCKS)
    shown = re.findall(r"!\[[^\]]*\]\(scale/([^)]+)\)", text)
    assert sorted(shown) == sorted(page.drawn(results))


def test_every_point_that_is_declared_was_measured(results):
    assert {point.name: point for point, _ in results.points} == {
        point.name: point for point in POINTS
    }


def test_results_name_no_host(results):
    facts = performance.results()["real"]["machine"]
    assert set(results.raw["machine"]) == set(facts)


def test_no_prediction_has_seen_what_it_predicts(results):
    kept = [each for each in results.points if each[0].is_fitted]
    assert len(results.held_out) >= 15
    assert fit(kept) == results.model


@pytest.mark.parametrize("point", POINTS, ids=lambda point: point.name)
def test_all_shares_of_a_deployment_are_within_a_machine_of_two_processors(point):
    shares = point.shares
    used = sum(shares[server] for server in SERVERS)
    used += shares["web"] * bool(point.enqueue)
    used += shares["relay"] * len(point.relays) + shares["worker"] * point.workers
    assert used <= 2.0 + 1e-9


def test_of_each_step_one_deployment_at_least_is_predicted_from_other_ones():
    fitted = {step for point in POINTS if point.is_fitted for step in point.steps}
    unseen = {step for point in POINTS if not point.is_fitted for step in point.steps}
    assert unseen <= fitted
    assert fitted - unseen == {"prune"}
    assert len([point for point in POINTS if not point.is_fitted]) >= 15


# --- Points ---------------------------------------------------------------------------------------


def test_workers_without_a_partition_have_nothing_to_do():
    assert Point("", workers=4, partitions=1).busy_workers == 1
    assert Point("", workers=2, partitions=8).busy_workers == 2


@pytest.mark.parametrize(
    ("relays", "busy"),
    [
        ((("ledger",),), 1),
        ((("ledger",), ("ledger",)), 1),
        ((("ledger", "second"),), 1),
        ((("ledger", "second"), ("second",)), 1),
        ((("ledger",), ("second",)), 2),
    ],
)
def test_of_relays_of_the_same_queue_one_publishes(relays, busy):
    assert Point("", relays=relays).busy_relays == busy


def test_a_point_survives_json():
    point = Point("all", relays=(("ledger",), ("second",)), workers=2, enqueue="many")
    assert from_dict({**point.as_dict(), "relays": [["ledger"], ["second"]]}) == point
    assert point.steps == ("enqueue many", "relay", "work no_op")


# --- The model ------------------------------------------------------------------------------------


def found(rate: float, step: str, **cpu: float) -> dict:
    return {
        "jobs_per_second": rate,
        "step_rates": {step: rate} if step else {},
        "cpu": {**dict.fromkeys((*SERVERS, "web", "relay", "worker"), 0.0), **cpu},
        "wal": rate * 1000.0,
        "log": 0.0,
        "network": {"postgres": rate * 300.0, "kafka": 0.0, "redis": 0.0},
    }


def test_costs_are_what_a_part_uses_more_for_each_job():
    # Given a worker that idles at 1 % and a PostgreSQL that idles at 2 %
    idle = Point("idle", workers=1, is_idle=True, is_fitted=True)
    one = Point("one", workers=1, is_fitted=True)
    other = Point("other", workers=2, is_fitted=True)
    unseen = Point("unseen", workers=4)
    measured = [
        (idle, found(0, "", worker=0.01, postgres=0.02)),
        (one, found(1000, "work no_op", worker=0.11, postgres=0.06)),
        (other, found(4000, "work no_op", worker=0.26, postgres=0.18)),
        (unseen, found(1, "work no_op", worker=9.0, postgres=9.0)),
    ]
    # When
    costs = fit(measured).costs["work no_op"]
    # Then the line through both has (0.13 - 0.11) / (2000 - 1000) = 20 µs for each job of a worker
    assert costs.process_us == pytest.approx(20)
    assert costs.process_fixed == pytest.approx(0.09)
    # The server's 40 µs count twice as much where twice as many jobs were measured.
    assert costs.servers_us["postgres"] == pytest.approx(40)
    assert costs.wal_bytes == pytest.approx(1000)


def test_a_process_that_has_used_its_share_shows_no_waiting():
    # Given one of 20 % that uses all of it, and one of 80 % that uses half
    idle = Point("idle", workers=1, is_idle=True, is_fitted=True)
    small = Point("small", relays=(("ledger",),), is_fitted=True)
    large = Point("large", relays=(("ledger",),), relay=0.8, is_fitted=True)
    measured = [
        (idle, found(0, "")),
        (small, found(4000, "relay", relay=0.2)),
        (large, found(8000, "relay", relay=0.4)),
    ]
    # When
    model = fit(measured)
    # Then a job takes 50 µs of processor, and 1 / 8000 s less that of waiting
    assert model.costs["relay"].process_us == pytest.approx(50)
    assert model.costs["relay"].wait_us == pytest.approx(1e6 / 8000 - 50)
    assert model.rate(small) == pytest.approx(4000)
    assert model.rate(large) == pytest.approx(8000)


LAW = Model(
    {
        "enqueue single": cost(700, 400, wait=500, redis=30, wal=700, network=900),
        "enqueue many": cost(7, 8, wal=500, network=200),
        "relay": replace(cost(22, 18, wait=20, kafka=3, wal=700, log=250), process_fixed=0.03),
        "work no_op": replace(cost(55, 26, wait=30, redis=9, wal=900), process_fixed=0.04),
        "work insert": replace(cost(350, 170, wal=1200), process_fixed=0.01),
        "work no_op, coordination in the database": replace(cost(90, 60), process_fixed=0.01),
        "prune": cost(60, 40, wal=600),
    },
    {"postgres": 0.002, "kafka": 0.05, "redis": 0.002, "worker": 0.01},
)
"""Costs as they may be, the fixed part of a worker that was not measured at two shares being its
use while it is idle."""


def measured_by(law: Model, point: Point) -> dict:
    """Return what a deployment would show if it obeyed this law exactly."""
    rate = law.rate(point) if point.steps else 0.0
    rates = dict.fromkeys(point.steps, rate)
    if len(rates) > 1:  # all but the last step do a little more
        rates = {step: rate * (1.2 if step != point.steps[-1] else 1.0) for step in rates}
    cpu = law.use(rates) | dict.fromkeys(("web", "relay", "worker"), 0.0)
    cpu["worker"] = law.idle["worker"] * (point.workers - (point.busy_workers if rates else 0))
    for step, of_step in rates.items():
        each = law.costs[step]
        count = busy(point, process_of(step))
        cpu[process_of(step)] += count * each.process_fixed + of_step * each.process_us / 1e6
    figures = {
        "seconds": 8.0,
        "jobs_per_second": rate,
        "step_rates": rates,
        "jobs_per_commit": 25.0,
        "cpu": cpu,
        "others": 0.02,
        "wal": sum(of_step * law.costs[step].wal_bytes for step, of_step in rates.items()),
        "log": sum(of_step * law.costs[step].log_bytes for step, of_step in rates.items()),
        "network": {
            server: sum(
                of_step * (law.costs[step].network_bytes or {})[server]
                for step, of_step in rates.items()
            )
            for server in SERVERS
        },
    }
    return with_middle([figures, figures, figures])


@pytest.fixture(scope="module")
def lawful() -> page.Results:
    """What the present points would show if they obeyed the law exactly."""
    measured = [{**point.as_dict(), "found": measured_by(LAW, point)} for point in POINTS]
    parameters = {"rounds": 3, "warm_up": 3.0, "window": 8.0, "shares": SHARES}
    kept = page.read().raw
    return page.Results({**kept, "parameters": parameters, "points": measured})


@pytest.mark.parametrize("step", LAW.costs)
def test_a_known_law_is_found_again(lawful, step):
    found, wanted = lawful.model.costs[step], LAW.costs[step]
    assert found.process_us == pytest.approx(wanted.process_us)
    assert found.process_fixed == pytest.approx(wanted.process_fixed)
    assert found.wal_bytes == pytest.approx(wanted.wal_bytes)
    assert found.servers_us == pytest.approx(wanted.servers_us)
    if wanted.wait_us:
        assert found.wait_us == pytest.approx(wanted.wait_us)


def test_a_known_law_predicts_what_was_not_seen(lawful):
    assert len(lawful.held_out) >= 15
    for point, figures in lawful.held_out:
        assert lawful.model.rate(point) == pytest.approx(figures["jobs_per_second"]), point.name


def test_page_and_plots_can_be_made_of_the_present_points(lawful):
    text = page.rewritten(page.PAGE.read_text(), lawful)
    assert f"- jobs a second: {len(lawful.held_out)} of {len(lawful.held_out)} within 20 %" in text
    assert "not within" not in text
    assert "took 2 % of a processor in the median round" in text
    assert set(page.drawn(lawful)) == {path.name for path in page.FOLDER.glob("*.svg")}


@pytest.mark.parametrize("worker", [0.08, 0.3])
def test_a_fixed_part_that_cannot_be_is_taken_as_idle_use(worker):
    # Given a line that would have a process use less than nothing with no job, or with more jobs
    idle = Point("idle", workers=1, is_idle=True, is_fitted=True)
    measured = [
        (idle, found(0, "", worker=0.02)),
        (Point("one", workers=1, is_fitted=True), found(1000, "work no_op", worker=worker)),
        (
            Point("large", workers=1, worker=0.8, is_fitted=True),
            found(2000, "work no_op", worker=0.22),
        ),
    ]
    # When
    cost = fit(measured).costs["work no_op"]
    # Then
    assert cost.process_fixed == pytest.approx(0.02)
    assert cost.process_us == pytest.approx((1000 * (worker - 0.02) + 2000 * 0.2) / 5)


def test_no_figure_of_a_deployment_that_is_predicted_changes_the_model(results):
    def spoiled(point: Point, figures: dict) -> dict:
        return figures if point.is_fitted else found(1, "work no_op", worker=99.0, postgres=99.0)

    assert fit([(point, spoiled(point, figures)) for point, figures in results.points]) == (
        results.model
    )


def test_the_figures_are_those_of_the_round_in_the_middle():
    rounds = [found(rate, "relay", relay=use) for rate, use in [(30, 3), (10, 1), (20, 2)]]
    kept = with_middle(rounds)
    assert (kept["jobs_per_second"], kept["cpu"]["relay"]) == (20, 2)
    assert kept["rates"] == [30, 10, 20]
    assert kept["rounds"] == rounds
    assert with_middle(rounds[:2])["jobs_per_second"] == 10


def test_the_slowest_part_decides():
    costs = model(work=cost(50, 25))
    # 0.2 of a processor by 50 µs are 4,000 jobs a second of each worker
    assert costs.limits(Point("", workers=2)) == pytest.approx({"worker": 8000, "postgres": 24_000})
    assert costs.rate(Point("", workers=4, partitions=1)) == pytest.approx(4000)
    assert costs.rate(Point("", workers=4, postgres=0.15)) == pytest.approx(6000)


def test_a_server_does_all_steps_of_a_job_and_each_process_one():
    costs = model(enqueue=cost(5, 10), relay=cost(10, 15), work=cost(50, 25))
    point = Point("", enqueue="many", relays=(("ledger",),), workers=2)
    assert costs.limits(point) == pytest.approx(
        {"web": 40_000, "relay": 20_000, "worker": 8000, "postgres": 12_000}
    )
    assert costs.use({"enqueue many": 6000, "relay": 4000})["postgres"] == pytest.approx(0.12)


def test_a_process_waits_while_it_has_to_rest_anyway():
    costs = model(relay=cost(30, 0, wait=120))
    # 30 µs at 15 % of a processor last 200 µs; without a rest, 150 µs
    assert costs.rate(Point("", relays=(("ledger",),), relay=0.15)) == pytest.approx(5000)
    # At 60 % they would last 50 µs, but it still waits: 150 µs
    assert costs.rate(Point("", relays=(("ledger",),), relay=0.6)) == pytest.approx(1e6 / 150)


def test_what_is_used_is_told_of_the_busy_processes_and_of_each_share():
    point = Point("", workers=4, partitions=2, worker=0.15, postgres=0.1)
    # Two of the four workers have a partition, the others use 1 % each
    cpu = {"worker": 0.32, "postgres": 0.05, "kafka": 0.03}
    shares = used(point, found(1, "work no_op", **cpu), {"worker": 0.01})
    assert shares["worker"] == pytest.approx(1)
    assert shares["postgres"] == pytest.approx(0.5)
    assert shares["kafka"] == pytest.approx(0.1)


def test_an_error_has_the_sign_of_the_prediction():
    assert error(120, 100) == pytest.approx(0.2)
    assert error(80, 100) == pytest.approx(-0.2)


# --- What rates need ------------------------------------------------------------------------------

STEPS = ("enqueue many", "relay", "work no_op")
PLANNED = model(
    enqueue=cost(6, 10, wal=400, network=500),
    relay=cost(15, 10, wait=5, kafka=5, wal=300, log=300, network=300),
    work=cost(50, 20, kafka=2, redis=7, wal=300, network=200),
)
PLAIN = Hardware(
    use=0.5,
    postgres_cores=10,
    postgres_log=100e6,
    wal_factor=1.0,
    broker_cores=4,
    broker_log=50e6,
    replicas=3,
    network=1000e6,
)


def test_needs_are_counted_by_hand():
    wanted = needs(PLANNED, STEPS, 100_000, PLAIN)
    # 100,000 times 6 µs are 0.6 processors, half used
    assert wanted.web_cores == pytest.approx(1.2)
    # one relay: 0.5 / 20 µs = 25,000/s; one worker: 0.5 / 50 µs = 10,000/s
    assert (wanted.relays, wanted.workers) == (4, 10)
    # a primary: CPU 0.5 times 10 / 40 µs = 125,000/s, log 50 MB / 1,000 B = 50,000/s
    assert (wanted.primaries, wanted.primary_bound) == (2, "log")
    # a broker: CPU 0.5 times 4 / (3 times 7 µs) = 95,238/s, log 25 MB / 900 B = 27,778/s
    assert (wanted.brokers, wanted.broker_bound) == (4, "log")
    # Redis: 0.5 / 7 µs = 71,429/s
    assert wanted.redis == 2
    assert wanted.wal == pytest.approx(100e6)
    assert wanted.kafka_log == pytest.approx(90e6)


def test_a_topic_of_three_replicas_needs_three_brokers():
    assert needs(PLANNED, STEPS, 10, PLAIN).brokers == 3


def test_a_network_can_be_what_binds():
    slow = replace(PLAIN, network=10e6)
    # (1,000 B sent and received + 1,000 B of log for the standby) times 2,500/s: half of 10 MB/s
    wanted = needs(PLANNED, STEPS, 5000, slow)
    assert (wanted.primaries, wanted.primary_bound) == (2, "network")


def test_the_first_part_to_be_full_comes_first():
    assert first_full(PLANNED, STEPS, PLAIN) == [
        ("worker", pytest.approx(10_000)),
        ("relay", pytest.approx(25_000)),
        ("primary", pytest.approx(50_000)),
        ("redis", pytest.approx(71_429, abs=1)),
        ("brokers", pytest.approx(83_333, abs=1)),
    ]


def test_after_an_outage_the_half_that_was_not_in_use_catches_up():
    # 10 workers, 20,000/s each when they may use all, so 200,000/s; the primaries can do more.
    course = simulate(PLANNED, STEPS, 100_000, outage=60, hardware=PLAIN)
    assert course.most_waiting == pytest.approx(6_000_000, rel=0.01)
    # 6,000,000 wait, and 100,000 a second more are done than come
    assert course.caught_up == pytest.approx(60, rel=0.02)


def test_a_deployment_whose_primary_is_full_never_catches_up():
    # One processor for 40 µs a job: 25,000/s, and as many come.
    full = replace(PLAIN, use=1.0, postgres_cores=1, postgres_log=1e12)
    course = simulate(PLANNED, STEPS, 25_000, outage=10, seconds=120, hardware=full)
    assert course.caught_up is None


# --- Shares of a processor ------------------------------------------------------------------------


def test_a_group_of_version_one_has_a_quota_and_its_use(tmp_path):
    for controller in ("cpu", "cpuacct"):
        (tmp_path / controller).mkdir()
    group = CpuGroup("ours", tmp_path)
    group.hold_to(0.15)
    assert (tmp_path / "cpu/ours/cpu.cfs_period_us").read_text() == "50000"
    assert (tmp_path / "cpu/ours/cpu.cfs_quota_us").read_text() == "7500"
    (tmp_path / "cpuacct/ours/cpuacct.usage").write_text("2500000000\n")
    assert group.seconds == 2.5
    group.release()
    assert (tmp_path / "cpu/ours/cpu.cfs_quota_us").read_text() == "-1"


def test_a_group_of_version_two_has_a_quota_and_its_use(tmp_path):
    group = CpuGroup("ours", tmp_path)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    group.hold_to(0.15)
    assert (tmp_path / "ours/cpu.max").read_text() == "7500 50000"
    group.hold_to(0.01)  # a period of 50 ms would leave less than the kernel's least
    assert (tmp_path / "ours/cpu.max").read_text() == "1000 100000"
    (tmp_path / "ours/cpu.stat").write_text("usage_usec 2500000\nuser_usec 1\n")
    assert group.seconds == 2.5
    group.release()
    assert (tmp_path / "ours/cpu.max").read_text() == "max 50000"


def test_where_no_group_can_be_made_the_reason_is_told(tmp_path):
    with pytest.raises(BenchmarkError, match="No control group"):
        CpuGroup("ours", tmp_path / "nowhere")


# --- That it measures at all ----------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.kafka
@pytest.mark.redis
@pytest.mark.postgres
def test_two_workers_are_measured_and_held_to_their_shares(tmp_path):
    if reason := obstacle():
        pytest.skip(reason)
    out = tmp_path / "out.json"
    arguments = ["--rounds", "1", "--point", "2 workers", "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.scale", *arguments],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
    )
    if "No control group" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stderr
    (point,) = json.loads(out.read_text())["points"]
    found = point["found"]
    assert found["jobs_per_second"] > 0
    assert found["step_rates"]["work no_op"] == pytest.approx(found["jobs_per_second"], abs=0.01)
    assert 0 < found["cpu"]["worker"] < 2 * SHARES["worker"] * 1.2
    assert found["network"]["postgres"] > found["jobs_per_second"]
    assert found["wal"] > found["jobs_per_second"]
