"""The arithmetic of the benchmarks, and that they measure at all."""

from __future__ import annotations

import ast
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.db import transaction

import kjo_django
from tests.benchmarks import catalogue, report, rounds
from tests.benchmarks.__main__ import main
from tests.benchmarks.cases import EMBEDDED, ENGINES, REAL, Case, Step, choose
from tests.benchmarks.completions import check_order
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.peers import catalogue as peer_catalogue
from tests.benchmarks.peers.running import MeasuredPeer, Peers, read_tallies
from tests.benchmarks.peers.sides.tally import SHAPE
from tests.benchmarks.profile import AROUND, REST, STAGES, by_stage
from tests.benchmarks.rounds import Measured, medians, rounded, spread_percent
from tests.benchmarks.workloads import WORKLOADS

pytestmark = pytest.mark.large  # about the benchmarks alone


def rate(value: float, **more: float) -> dict[str, float]:
    return {"jobs_per_second": value, **more}


def measured(ours: list[float], limit: list[float]) -> Measured:
    case = Case("drain.no_op", EMBEDDED, Step("nowhere"), Step("nowhere"), about="a case")
    return Measured(case, ours=[*map(rate, ours)], limit=[*map(rate, limit)])


# --- Rounds ---------------------------------------------------------------------------------------


def test_figures_are_medians_and_so_is_the_ratio_of_each_round():
    told = measured([100, 300, 200], [100, 600, 800]).as_dict()

    assert told["ours"] == {"jobs_per_second": 200}
    assert told["limit"] == {"jobs_per_second": 600}
    assert told["ratios"] == [1, 0.5, 0.25]
    assert told["ratio"] == 0.5  # not 200 / 600
    assert told["each"] == [100, 300, 200]
    assert told["spread_percent"] == 100


def test_a_figure_some_rounds_lack_is_the_median_of_the_others():
    assert medians([rate(1, extra=5), rate(3), rate(2, extra=7)]) == {
        "jobs_per_second": 2,
        "extra": 6,
    }


@pytest.mark.parametrize(
    ("value", "told"), [(0, 0), (12345.678, 12350), (0.0123456, 0.01235), (-3.14159, -3.142)]
)
def test_numbers_have_four_digits_that_mean_something(value, told):
    assert rounded(value) == told


def test_the_spread_is_from_the_lowest_to_the_highest_by_the_median():
    assert spread_percent([90, 100, 130]) == 40
    assert spread_percent([7]) == 0


class NoEngine:
    """Prepares nothing; `answers` by function, in order."""

    name = EMBEDDED

    def __init__(self) -> None:
        self.prepared: list[object] = []

    def prepare(self, input: object, copies: int) -> None:
        self.prepared.append((input, copies))


def test_sides_take_turns_in_going_first_and_a_case_that_fails_ends_no_other(monkeypatch):
    order = []

    def answer(step: Step, input: object, engine: object) -> dict[str, float]:
        order.append(step.function)
        if step.function == "broken":
            raise BenchmarkError("no luck")
        return rate(len(order))

    monkeypatch.setattr(rounds, "_run", answer)
    cases = [
        Case("broken", EMBEDDED, Step("broken")),
        Case("whole", EMBEDDED, Step("ours"), Step("limit")),
    ]
    turns: list[int] = []
    found = rounds.measure(
        cases,
        {EMBEDDED: NoEngine()},
        rounds=2,
        most_seconds=0,
        tell=lambda line: None,
        after_round=turns.append,
    )

    assert order == ["broken", "ours", "limit", "limit", "ours"]
    assert turns == [0, 1]
    broken, whole = (one.as_dict() for one in found)
    assert broken["failed"] == "no luck"
    assert whole["rounds"] == 2


def test_late_rounds_are_not_begun(monkeypatch):
    monkeypatch.setattr(rounds, "_run", lambda *arguments: rate(1))
    case = Case("one", EMBEDDED, Step("ours"))
    turns: list[int] = []
    found = rounds.measure(
        [case],
        {EMBEDDED: NoEngine()},
        rounds=5,
        most_seconds=1e-9,
        tell=lambda line: None,
        after_round=turns.append,
    )
    assert len(found[0].ours) == 1
    assert turns == [0]


def test_what_was_measured_before_an_interruption_is_kept(monkeypatch):
    answers = iter([rate(5), KeyboardInterrupt()])

    def answer(*arguments: object) -> dict[str, float]:
        given = next(answers)
        if isinstance(given, BaseException):
            raise given
        return given

    monkeypatch.setattr(rounds, "_run", answer)
    told: list[str] = []
    cases = [Case(name, EMBEDDED, Step("ours")) for name in ("first", "second")]
    found = rounds.measure(
        cases, {EMBEDDED: NoEngine()}, rounds=3, most_seconds=0, tell=told.append
    )

    assert [len(one.ours) for one in found] == [1, 0]
    assert found[1].as_dict()["rounds"] == 0
    assert "interrupted" in told[-1]


def test_what_each_step_costs_the_database_is_a_row_of_a_table():
    found = {"enqueue:wal_bytes": 600.4, "enqueue:row_versions": 1.0, "vacuum:wal_bytes": 30.0}
    cases = {"database.steps": {"ours": found}, "drain.no_op": {"ours": {"seconds": 5.0}}}

    assert report.steps_of(cases) == [
        ("  database.steps enqueue", "600", "", "1.00", "", ""),
        ("  database.steps vacuum", "30", "", "", "", ""),
    ]


# --- Cases ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_every_case_names_steps_and_workloads_that_exist(engine, full):
    cases = catalogue.all_cases(engine, full=full)

    assert len({case.name for case in cases}) == len(cases)
    root = Path(catalogue.__file__).parent
    for case in cases:
        for step in filter(None, (case.ours, case.limit)):
            module, _, function = step.function.rpartition(".")
            source = root.joinpath(*module.split(".")).with_suffix(".py").read_text()
            assert f"def {function}(" in source
        for input in case.inputs:
            assert input.workload in WORKLOADS


def test_a_full_run_has_tables_of_ten_million_rows():
    names = {case.name for case in catalogue.all_cases(REAL, full=True)}
    assert {"table.consumer_10m", "table.relay_10m", "table.consumer_1m"} <= names


def test_scenarios_are_chosen_by_their_name_or_the_cases():
    cases = catalogue.all_cases(REAL)
    assert {case.scenario for case in choose(cases, ["drain"])} == {"drain"}
    assert [case.name for case in choose(cases, ["drain.no_op"])] == ["drain.no_op"]


def test_a_key_out_of_order_is_noticed():
    check_order([("a", "1"), ("b", "1"), ("a", "2"), ("b", "3")])
    with pytest.raises(BenchmarkError, match="a: 1 was carried out after 2"):
        check_order([("a", "2"), ("a", "1")])


# --- Peers ----------------------------------------------------------------------------------------


def test_runs_of_several_processes_are_added_up(tmp_path):
    (tmp_path / "101").write_bytes(SHAPE.pack(3, 50, 90))
    (tmp_path / "102").write_bytes(SHAPE.pack(4, 40, 80))
    (tmp_path / "103").write_bytes(struct.pack("<q", 0))  # not written yet
    (tmp_path / "104").write_bytes(SHAPE.pack(0, 0, 0))
    assert read_tallies(tmp_path) == (7, 40, 90)


def test_a_peer_that_cannot_be_installed_is_told_with_the_reason(monkeypatch):
    def refuse(name: str, requirements: object) -> None:
        raise BenchmarkError("no such package")

    monkeypatch.setattr("tests.benchmarks.peers.environments.python_of", refuse)
    peers = Peers(peer_catalogue.PEERS[:1], None, jobs=None, tell=lambda line: None)  # type: ignore[arg-type]
    peers.prepare()
    peers.run_round(0)

    name = peer_catalogue.PEERS[0].name
    result = {"results": {}, "peers": peers.as_dict()}
    assert result["peers"][name]["missing"] == "no such package"
    assert report.failures(result) == [name]


def test_every_peer_has_its_side():
    sides = Path(peer_catalogue.__file__).parent / "sides"
    for peer in peer_catalogue.PEERS:
        assert (sides / peer.side).exists()
        assert peer.setup
        assert MeasuredPeer(peer, 5).as_dict()["missing"]


# --- The whole ------------------------------------------------------------------------------------


@pytest.mark.large
def test_it_measures_the_embedded_default(tmp_path, capsys):
    out = tmp_path / "result.json"
    sizes = ["--engine", "embedded", "--jobs", "600", "--rounds", "1", "--out", str(out)]
    chosen = ["--scenario", "drain.insert", "--scenario", "enqueue.many"]

    assert main([*sizes, *chosen]) == 0

    result = json.loads(out.read_text())
    drain = result["results"]["embedded"]["drain.insert"]
    assert drain["ours"]["jobs_per_second"] > 0
    assert drain["ratio"] == pytest.approx(
        drain["ours"]["jobs_per_second"] / drain["limit"]["jobs_per_second"], rel=0.01
    )
    assert "drain.insert" in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_it_measures_every_case_and_every_peer(tmp_path):
    sizes = ["--jobs", "1200", "--rounds", "1", "--max-seconds", "0", "--rows", "20000"]
    assert main([*sizes, "--peers", "--out", str(tmp_path / "result.json")]) == 0


# --- Profile --------------------------------------------------------------------------------------


def frames(thread: str, *names: str) -> str:
    return ";".join([f"thread (1): {thread}", *(f"{name} (kjo_django/x.py:1)" for name in names)])


def test_every_frame_of_a_stage_is_a_function_of_today():
    # Given the qualified names of all functions whose frames are looked at
    sources = [*Path(kjo_django.__file__).parent.rglob("*.py"), Path(transaction.__file__)]
    functions = {f"{name} " for path in sources for name in qualified(ast.parse(path.read_text()))}
    # Then
    for stage, beginnings in STAGES.items():
        for beginning in beginnings:
            assert any(name.startswith(beginning) for name in functions), (stage, beginning)


def qualified(node: ast.AST, within: str = "") -> Iterator[str]:
    """Yield the names of the functions and methods in a module, as the interpreter shows them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            is_class = isinstance(child, ast.ClassDef)
            yield from () if is_class else (f"{within}{child.name}",)
            yield from qualified(child, f"{within}{child.name}.{'' if is_class else '<locals>.'}")
        else:
            yield from qualified(child, within)


def test_samples_go_to_the_innermost_stage_that_tells():
    lane = ("Worker._run_lane", "Pipeline.run")
    counted = by_stage(
        [
            f"{frames('kjo-lane-0', *lane, 'LaneRunner._call', 'LeaseBook.claim')} 3",
            f"{frames('kjo-lane-1', *lane, 'Store.complete')};execute (psycopg/cursor.py:9) 2",
            f"{frames('kjo-lane-1', *lane, 'Store.completely')} 1",
            f"{frames('kjo-poll-x', 'Poller._run')} 4",
            f"{frames('kjo-heartbeat', 'Heartbeat.run')} 5",
            "thread (1);<module> (kjo_django/apps.py:1) 50",
        ]
    )
    assert counted == {
        "leases, one script a group": 3,
        "outcomes, one UPDATE a group": 2,
        REST: 5,
        AROUND: 5,
    }
