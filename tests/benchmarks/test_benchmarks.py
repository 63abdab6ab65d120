"""The arithmetic of the benchmarks, and that they measure at all."""

from __future__ import annotations

import ast
import io
import json
import os
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import psycopg
import pytest
from django.db import transaction

import kjo_django
from tests.benchmarks import __main__ as command_line
from tests.benchmarks import catalogue, report, rounds
from tests.benchmarks.__main__ import main
from tests.benchmarks.cases import EMBEDDED, ENGINES, POSTGRES, REAL, Case, Step, choose
from tests.benchmarks.completions import check_order
from tests.benchmarks.engines import open_engine
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measures.rates import Spent
from tests.benchmarks.peers import catalogue as peer_catalogue
from tests.benchmarks.peers import environments, timed
from tests.benchmarks.peers.running import MeasuredPeer, Peers, read_tallies
from tests.benchmarks.peers.sides import saving
from tests.benchmarks.peers.sides.tally import SHAPE
from tests.benchmarks.profile import AROUND, REST, STAGES, by_stage
from tests.benchmarks.rounds import Measured, medians, rounded, spread_percent
from tests.benchmarks.wire import Asked, Reader, listening
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


def test_each_rate_of_ours_is_followed_by_that_of_each_other_queue_on_postgresql():
    names = [case.name for case in choose(catalogue.all_cases(POSTGRES), ["rates"])]

    queues = [f".{peer.name}" for peer in peer_catalogue.TIMED_PEERS]
    assert names == [f"rates.{rate}{queue}" for rate in (20, 100, 250) for queue in ("", *queues)]


@pytest.mark.parametrize(
    ("arguments", "peers"),
    [
        ([], set()),
        (["--peers"], {peer.name for peer in peer_catalogue.TIMED_PEERS}),
        (["--peers", "--peer", "oban"], {"oban"}),
    ],
)
def test_other_queues_are_measured_when_asked_for(arguments: list[str], peers: set[str]):
    parser = command_line._parser()
    options = parser.parse_args(["--engine", "postgres", *arguments])

    cases = command_line._cases(parser, options)

    assert {case.peer for case in cases} - {""} == peers
    assert command_line._drained(cases, options) == []


def test_without_an_engine_two_are_measured():
    parser = command_line._parser()
    cases = command_line._cases(parser, parser.parse_args([]))
    assert {case.engine for case in cases} == {REAL, EMBEDDED}


def test_what_runs_on_postgresql_alone_is_told_of_no_other_server():
    environment = {
        "DATABASE_URL": "postgresql://somewhere/db",
        "REDIS_URL": "redis://x",
        "KAFKA_BOOTSTRAP_SERVERS": "x:1",
    }
    told = {name: open_engine(name, environment)._environment for name in (REAL, POSTGRES)}
    assert told == {REAL: environment, POSTGRES: {"DATABASE_URL": "postgresql://somewhere/db"}}


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
    for peer in (*peer_catalogue.PEERS, *peer_catalogue.TIMED_PEERS):
        assert (sides / peer.side).exists()
        assert peer.setup
        assert MeasuredPeer(peer, 5).as_dict()["missing"]


def test_a_queue_that_cannot_be_installed_is_told_with_the_reason(monkeypatch):
    def refuse(*arguments: object) -> None:
        raise BenchmarkError("no such package")

    monkeypatch.setattr(environments, "python_of", refuse)
    told = timed.prepared(peer_catalogue.TIMED_PEERS[:1], lambda line: None)
    assert told["oban"]["missing"] == "no such package"
    assert report.failures({"results": {}, "peers": told}) == ["oban"]
    with pytest.raises(BenchmarkError, match="no such package"), timed.running("oban"):
        pass


def test_an_environment_has_a_python_that_is_new_enough():
    assert environments.interpreter_for(sys.version_info[:2]) == sys.executable
    with pytest.raises(BenchmarkError, match=r"there is no Python 3\.98 or newer"):
        environments.interpreter_for((3, 98))


def test_a_side_saves_as_many_as_it_is_told_and_tells_how_long_that_took(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("[3, 0]\n[4, 200]\n"))
    moments: list[float] = []

    saving.save(moments.append)

    at_once, evenly = map(float, capsys.readouterr().out.split())
    assert len(moments) == 7
    assert at_once < moments[3] - moments[0] + 1
    assert evenly >= 3 / 200


def test_a_job_of_a_side_tells_when_it_ran(monkeypatch, tmp_path):
    times = tmp_path / "times"
    times.touch()
    monkeypatch.setenv("TIMES", str(times))
    saving._times.cache_clear()
    before = time.monotonic()
    saving.ran(before - 2)
    os.close(saving._times())
    saving._times.cache_clear()

    side = timed.Running(None, None, times)  # type: ignore[arg-type]
    ((delay, at),) = side.wait_for(1)
    assert delay >= 2
    assert before <= at <= time.monotonic()


def test_what_a_process_spends_on_the_measurement_is_left_out():
    spent = Spent({"worker": os.getpid(), "saver": os.getpid()})
    sum(range(1_000_000))
    spent.leave_out("saver", 0.5)
    figures = spent.figures(1)
    assert figures["worker_ms"] - figures["saver_ms"] == pytest.approx(500, abs=50)


# --- Statements on their way ----------------------------------------------------------------------


def message(kind: bytes, *parts: bytes) -> bytes:
    body = b"".join(part + b"\0" for part in parts)
    return kind + (len(body) + 4).to_bytes(4, "big") + body


STARTUP = message(b"", (196608).to_bytes(4, "big") + b"user")
ENCRYPTION = (8).to_bytes(4, "big") + (80877103).to_bytes(4, "big")


@pytest.mark.parametrize("piece", [1, 3, 1000])
def test_statements_are_read_in_whatever_pieces_they_come(piece: int):
    # Given a prepared statement that runs twice in one pipeline, inside a transaction
    sent = b"".join(
        [
            ENCRYPTION + STARTUP,
            message(b"Q", b"BEGIN"),
            message(b"P", b"claim", b"UPDATE one"),
            *[message(b"B", b"", b"claim"), message(b"E", b"")] * 2,
            message(b"S"),
            message(b"Q", b"COMMIT"),
        ]
    )
    asked = Asked()
    reader = Reader(asked)
    # When
    for start in range(0, len(sent), piece):
        reader.read(sent[start : start + piece])
    # Then
    assert [text for _, text in asked.statements] == ["BEGIN", "UPDATE one", "UPDATE one", "COMMIT"]
    assert asked.counts() == (2, 2, 3)


def test_statements_that_are_sent_together_are_counted_one_by_one():
    asked = Asked()
    text = b"""BEGIN; SET LOCAL x TO off; SELECT set_config('a', 'b', true);
    DELETE FROM "a;b" WHERE token = 'it''s; one'; UPDATE c SET d = 1; COMMIT;"""
    Reader(asked).read(STARTUP + message(b"Q", text))

    deleted = """DELETE FROM "a;b" WHERE token = 'it''s; one'"""
    assert deleted in [text for _, text in asked.statements]
    assert asked.counts() == (2, 4, 1)


@pytest.mark.postgres
def test_a_process_is_counted_by_what_reaches_the_server(postgres_server: Any):
    import psycopg

    url = urlsplit(postgres_server.url)
    with listening(str(url.hostname), int(url.port or 0)) as (port, asked):
        far = url._replace(netloc=url.netloc.replace(f":{url.port}", f":{port}")).geturl()
        with psycopg.connect(far) as connection:
            for number in range(8):
                connection.execute("SELECT %s", [number])
    # Preparing a statement that comes often is a round trip in which none runs.
    assert asked.counts() == (8, 2, 11)


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


@pytest.mark.postgres
def test_it_measures_postgresql_alone(postgres_server: Any, tmp_path, monkeypatch):
    monkeypatch.setenv("DATABASE_URL", postgres_server.url)
    monkeypatch.delenv("KAFKA_BOOTSTRAP_SERVERS", raising=False)
    out = tmp_path / "result.json"
    sizes = ["--engine", "postgres", "--jobs", "600", "--rounds", "1", "--out", str(out)]
    chosen = ["--scenario", "drain.insert", "--scenario", "database.steps", "--scenario", "crowd"]

    # A session of another database that was there before disturbs nothing.
    with psycopg.connect(postgres_server.url):
        assert main([*sizes, *chosen]) == 0

    found = json.loads(out.read_text())
    assert found["versions"]["postgresql_server"]
    assert "kafka_server" not in found["versions"]
    cases = found["results"]["postgres"]
    assert cases["drain.insert"]["limit"]["jobs_per_second"] > 0
    assert cases["crowd"]["ours"]["jobs_per_second"] > 0
    # A job's row is written when it is stored and when it ends; its marker, its message once
    assert cases["database.steps"]["ours"]["together:row_versions"] >= 3
    assert "relay:wal_bytes" not in cases["database.steps"]["ours"]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_it_measures_every_case_and_every_peer(tmp_path):
    engines = [argument for name in ENGINES for argument in ("--engine", name)]
    sizes = ["--jobs", "1200", "--rounds", "1", "--max-seconds", "0", "--rows", "20000"]
    assert main([*engines, *sizes, "--peers", "--out", str(tmp_path / "result.json")]) == 0


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
