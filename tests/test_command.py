"""The test command: what is repeated, what the verdict is, and which tests a tier has."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import pytest

from tests import selection
from tests.outcomes import Outcomes
from tests.repeats import MOST_UNSTEADY, Verdict
from tests.waiting import wait_until

ROOT = Path(__file__).parents[1]
PYTEST = ["-p", "xdist", "-p", "randomly", "-n", "1"]

pytestmark = pytest.mark.large  # most start pytest, twice or more, and are about the tests alone


def environment(**variables: str) -> dict[str, str]:
    """Return the environment of a run that is no part of this one."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    # Each start is quicker without the plugins that these tests do not need.
    return {**ours, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **variables}


@dataclass(frozen=True)
class Suite:
    """Tests of their own, in a directory of their own, for the command to run."""

    directory: Path

    def write(self, tests: str) -> None:
        (self.directory / "test_them.py").write_text(dedent(tests))
        # As there are in any project: with more than one, pytest asks plugins for their hash.
        for folder in ("tests_of_one_kind", "tests_of_another"):
            (self.directory / folder).mkdir()
            (self.directory / folder / "conftest.py").touch()

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        own = ["-c", str(self.directory / "pytest.ini")]
        return subprocess.Popen(
            [sys.executable, "-m", "tests", *PYTEST, *own, *arguments],
            cwd=self.directory,  # and no path is named, as where everything is run
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(COLUMNS="120", PYTHONPATH=str(ROOT)),
            start_new_session=True,
            # A process of a parallel run ignores interrupts, and so would those that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and what was printed."""
        with self.start(*arguments) as process:
            output, _ = process.communicate()
        return process.returncode, output


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    (tmp_path / "pytest.ini").write_text(
        '[pytest]\naddopts = -p tests.selection -m "not long"\n'
        "markers = \n  small\n  medium\n  large\n  long\n  kafka\n"
    )
    return Suite(tmp_path)


def last_line(output: str) -> str:
    return output.splitlines()[-1]


def name_of(told: dict[str, str]) -> str:
    return told["test"].partition("::")[2]


# --- What fails is run again, alone ---------------------------------------------------------------

# Fails where it runs beside others, as one does that a load or an earlier test disturbs.
BESIDE_OTHERS = """
import os
beside_others = "PYTEST_XDIST_WORKER" in os.environ
"""


def test_what_fails_among_others_and_passes_alone_is_unsteady_and_does_not_fail_the_run(
    suite: Suite, tmp_path: Path
) -> None:
    suite.write(
        BESIDE_OTHERS
        + """
from pathlib import Path
import pytest

def test_steady():
    pass

def test_disturbed():
    assert not beside_others, "disturbed by a neighbour"

def test_disturbed_twice():
    rounds = Path(__file__).with_name("rounds")
    rounds.write_text(rounds.read_text() + "." if rounds.exists() else ".")
    assert len(rounds.read_text()) == 3

@pytest.fixture
def clean_up():
    yield
    assert not beside_others, "left behind"

def test_disturbed_when_it_ends(clean_up):
    pass

@pytest.mark.medium("a", "b")
@pytest.mark.parametrize("name", ["a", "b"])
def test_case(name):
    assert not beside_others or name == "a"
"""
    )
    file = tmp_path / "unsteady.json"
    # When
    code, output = suite.run("--unsteady-to", str(file))
    # Then the run is green, and its last line tells of the whole
    assert code == 0, output
    assert re.search(r"^=+ 6 passed, 4 unsteady in [\d.]+s \(0:00:\d\d\) =+$", last_line(output))
    # And each of them is named with its first failure
    told = output.partition("unsteady: failed among others, passed alone")[2]
    assert "test_disturbed (passed in repeat 1)" in told
    assert "AssertionError: disturbed by a neighbour" in told
    assert "test_disturbed_twice (passed in repeat 2)" in told
    report = json.loads(file.read_text())
    rounds = {
        each["test"].partition("::")[2]: each["passed_in_round"] for each in report["unsteady"]
    }
    assert rounds == {
        "test_disturbed": 1,
        "test_disturbed_twice": 2,
        "test_disturbed_when_it_ends": 1,
        "test_case[b]": 1,
    }
    assert all(each["failure"] for each in report["unsteady"])
    assert report["failed"] == []
    assert report["seed"] > 0


@pytest.mark.medium
def test_what_fails_again_fails_the_run(suite: Suite, tmp_path: Path) -> None:
    suite.write(
        BESIDE_OTHERS
        + """
import pytest

def test_steady():
    pass

def test_disturbed():
    assert not beside_others

def test_wrong():
    assert 1 == 2

def test_that_is_skipped_alone():
    if not beside_others:
        pytest.skip("alone")
    assert 3 == 4
"""
    )
    file, results = tmp_path / "unsteady.json", tmp_path / "results.xml"
    code, output = suite.run("--unsteady-to", str(file), "--junit-xml", str(results))
    assert code == 1
    assert "2 failed, 2 passed, 1 unsteady" in last_line(output), output
    assert 'tests="4"' in results.read_text(), "a repeat has overwritten the first round's"
    report = json.loads(file.read_text())
    failed = {name_of(each) for each in report["failed"]}
    assert failed == {"test_wrong", "test_that_is_skipped_alone"}


def test_tests_that_share_an_id_are_repeated_all_of_them(suite: Suite, tmp_path: Path) -> None:
    # Given two tests of one id, of which the first fails beside others
    suite.write(
        BESIDE_OTHERS
        + "def test_shared(): pass\n"
        + "def disturbed(): assert not beside_others, 'disturbed by a neighbour'\n"
    )
    (tmp_path / "conftest.py").write_text(
        dedent(
            """
            import pytest

            def pytest_pycollect_makeitem(collector, name, obj):
                if name == "test_shared":
                    make = pytest.Function.from_parent
                    tests = (collector.obj.disturbed, obj)
                    return [make(collector, name=name, callobj=each) for each in tests]
            """
        )
    )
    code, output = suite.run("--randomly-dont-reorganize")
    assert code == 0, output
    assert "disturbed by a neighbour" in output
    assert "1 unsteady" in last_line(output)


def test_one_that_kills_its_process_fails_the_run(suite: Suite) -> None:
    suite.write("import os\ndef test_deadly(): os._exit(3)\ndef test_steady(): pass")
    code, output = suite.run("--randomly-dont-reorganize")
    assert code == 1
    assert "1 failed, 1 passed" in last_line(output), output
    assert "repeat 2 broke off, with exit code 3" in output


def test_one_that_locks_the_interpreter_is_ended_and_the_others_run(suite: Suite) -> None:
    """No timeout interrupts it, and no other thread of its process goes on."""
    suite.write(
        "import ctypes, os\n"
        "def test_locked(): 'PYTEST_XDIST_WORKER' in os.environ and ctypes.PyDLL(None).sleep(600)\n"
        "def test_steady(): pass"
    )
    code, output = suite.run("--randomly-dont-reorganize", "--override-ini=faulthandler_timeout=2")
    assert code == 0, output
    assert "Timeout (0:00:02)!" in output
    assert "2 passed, 1 unsteady" in last_line(output)


def test_a_strict_run_repeats_nothing(suite: Suite) -> None:
    suite.write(BESIDE_OTHERS + "def test_disturbed(): assert not beside_others")
    code, output = suite.run("--strict")
    assert code == 1
    assert "1 failed" in last_line(output)
    assert "repeat 1 of" not in output


def test_files_that_cannot_be_collected_fail_the_run_at_once(suite: Suite) -> None:
    suite.write("import nothing_of_this_name")
    code, output = suite.run()
    assert code != 0
    assert "1 error" in last_line(output)


def test_a_run_that_ends_at_its_first_failure_does_not_pass_by_a_repeat(suite: Suite) -> None:
    suite.write(
        BESIDE_OTHERS
        + "def test_disturbed(): assert not beside_others\n"
        + "".join(f"def test_{number}(): pass\n" for number in range(9))
    )
    code, output = suite.run("-x", "--randomly-dont-reorganize")
    assert code != 0
    assert re.search(r"ended after \d of 10 tests", output)


def outcomes_of(failed: int) -> Outcomes:
    return Outcomes(passed=["steady"], failed={f"test {n}": "E  why" for n in range(failed)})


@pytest.mark.medium
def test_five_unsteady_tests_pass_and_six_do_not() -> None:
    for failed, code in ((MOST_UNSTEADY, 0), (MOST_UNSTEADY + 1, 1)):
        verdict = Verdict(outcomes_of(failed))
        verdict.note(1, Outcomes(passed=[*verdict.first.failed]))
        assert verdict.exit_code == code
        assert verdict.failed == []
        assert ("the run has failed" in verdict.summary(1)) is bool(code)


@pytest.mark.medium
def test_one_that_fails_again_outweighs_those_that_pass() -> None:
    verdict = Verdict(outcomes_of(3))
    verdict.note(1, Outcomes(passed=["test 0", "test 1"], failed={"test 1": "its end fails"}))
    verdict.note(2, Outcomes(passed=["test 2"]))
    assert verdict.unsteady == {"test 0": 1, "test 2": 2}
    assert verdict.failed == ["test 1"]
    assert verdict.exit_code == 1
    assert "FAILED test 1" in verdict.summary(3671)
    assert "= 1 failed, 3 passed, 2 unsteady in 3671.00s (1:01:11) =" in verdict.summary(3671)


@pytest.mark.medium
def test_tests_that_share_an_id_are_counted_each_and_one_that_fails_fails_the_id() -> None:
    verdict = Verdict(Outcomes(passed=["one", "one", "other"], failed={"other": "E  why"}))
    assert "= 1 failed, 2 passed in 1.00s" in verdict.summary(1)
    verdict.note(1, Outcomes(passed=["other", "other"], failed={"other": "E  why"}))
    assert verdict.failed == ["other"]


# --- Ctrl-C ---------------------------------------------------------------------------------------

WAITING = """
import subprocess, sys, time
import pytest

@pytest.fixture(scope="session")
def server():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        yield
        process.kill()

def test_before():
    pass

def test_that_waits(server):
    if {condition}:
        print("waiting", file=sys.__stderr__, flush=True)
        open({mark!r}, "w").close()
        time.sleep(600)
    assert False
"""


@pytest.mark.parametrize(
    ("condition", "told"),
    [
        pytest.param("beside_others", "ended after 1 of 2 tests", id="first-round"),
        pytest.param("not beside_others", "interrupted", id="repeat"),
    ],
)
def test_an_interrupt_ends_the_run_at_once_and_leaves_nothing_running(
    suite: Suite, tmp_path: Path, condition: str, told: str
) -> None:
    mark = tmp_path / "waiting"
    suite.write(BESIDE_OTHERS + WAITING.format(condition=condition, mark=str(mark)))
    with suite.start("--randomly-dont-reorganize") as process:
        try:
            # Given a run with a server and a test that waits
            wait_until(lambda: mark.exists() or process.poll() is not None, "the test waits")
            assert process.poll() is None
            started = psutil.Process(process.pid).children(recursive=True)
            # When somebody presses Ctrl-C, which every process of the group hears
            os.killpg(process.pid, signal.SIGINT)
            output, _ = process.communicate(timeout=60)
        finally:
            process.kill()
    # Then
    assert process.returncode == pytest.ExitCode.INTERRUPTED, output
    assert told in output
    psutil.wait_procs(started, timeout=30)
    assert [each for each in started if each.is_running()] == []


# --- Which tests a run has ------------------------------------------------------------------------

SIZED = """
import pytest

def test_of_the_folder(): pass
@pytest.mark.kafka
def test_with_a_server(): pass
@pytest.fixture
def kafka_server(): pass
@pytest.fixture
def topic(kafka_server): pass
def test_with_the_fixture_of_a_server(topic): pass
@pytest.mark.small
@pytest.mark.kafka
def test_said_to_be_small_with_a_server(): pass
@pytest.mark.large
@pytest.mark.kafka
def test_large(): pass
@pytest.mark.parametrize("size", ["a", pytest.param("b", marks=pytest.mark.large)])
@pytest.mark.medium
def test_of_two_sizes(size): pass
@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.large
@pytest.mark.medium("b")
def test_of_a_case(name): pass
@pytest.mark.long
def test_long(): pass
"""
SMALL = {"test_of_the_folder"}
MEDIUM = {"test_with_a_server", "test_said_to_be_small_with_a_server"}
MEDIUM |= {"test_of_two_sizes[a]", "test_of_a_case[b]", "test_with_the_fixture_of_a_server"}
MARKED_KAFKA = {"test_large", "test_with_a_server", "test_said_to_be_small_with_a_server"}
LARGE = {"test_large", "test_of_two_sizes[b]", "test_of_a_case[a]"}


# Many runs in one process: most of the time of each would be its start.
COLLECT_EACH = """
import json, sys
import pytest

class Collected:
    def pytest_collection_finish(self, session):
        print("collected", json.dumps([item.name for item in session.items]))

for arguments in json.loads(sys.argv[1]):
    code = pytest.main([*arguments, "--collect-only", "-q"], plugins=[Collected()])
sys.exit(code)
"""


def collect(suite: Suite, *runs: list[str]) -> subprocess.CompletedProcess[str]:
    """Have pytest itself collect the tests once with each of these arguments."""
    own = [*PYTEST, "-n", "0", "-c", str(suite.directory / "pytest.ini")]
    return subprocess.run(
        [sys.executable, "-c", COLLECT_EACH, json.dumps([[*own, *each] for each in runs])],
        cwd=suite.directory,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
    )


def test_a_run_has_the_tests_of_its_tier_and_what_was_named(suite: Suite) -> None:
    suite.write(SIZED)
    here = str(suite.directory)
    expected = [
        ([], SMALL),
        ([here], SMALL | MEDIUM | LARGE),
        (["-k", "test_large"], {"test_large"}),
        (["-m", "kafka"], MARKED_KAFKA),
        (["--tier", "small", here], SMALL),
        (["--tier", "medium"], SMALL | MEDIUM),
        (["--tier", "large"], SMALL | MEDIUM | LARGE),
        (["-m", "long", "--tier", "small"], {"test_long"}),
    ]
    process = collect(suite, *(arguments for arguments, _ in expected))
    found = re.findall(r"^collected (.*)$", process.stdout, re.M)
    assert [set(json.loads(names)) for names in found] == [names for _, names in expected]


@pytest.mark.parametrize(("option", "tests"), [((), SMALL | MEDIUM), (("--all",), LARGE)])
def test_the_command_runs_the_medium_tests_and_all_but_the_long_ones_when_asked(
    suite: Suite, option: tuple[str, ...], tests: set[str]
) -> None:
    suite.write(SIZED)
    _, output = suite.run("--collect-only", "-q", "-n", "0", *option)
    assert {test for test in SMALL | MEDIUM | LARGE if f"::{test}\n" in output} >= tests
    assert ("test_large" in output) is bool(option)
    assert "test_long" not in output


def test_a_run_that_leaves_out_all_tests_that_are_named_says_how_they_are_run(
    suite: Suite,
) -> None:
    suite.write("import pytest\n@pytest.mark.large\ndef test_large(): pass")
    for processes in ([], ["-n", "0"]):
        code, output = suite.run(*processes, str(suite.directory))
        assert code == pytest.ExitCode.NO_TESTS_COLLECTED, output
        assert "none of these tests is medium or smaller: give --tier large" in output


def test_a_marker_of_a_tier_for_a_case_that_there_is_not_is_refused(suite: Suite) -> None:
    suite.write(SIZED.replace('medium("b")', 'medium("c")'))
    process = collect(suite, [])
    assert process.returncode == pytest.ExitCode.USAGE_ERROR
    assert "test_of_a_case has no case c; there are [a], [b]" in process.stderr, process.stderr


@pytest.mark.medium
@pytest.mark.parametrize(
    ("tier", "path", "text", "is_left_alone"),
    [
        ("medium", "tests/mixed/test_one.py", "@pytest.mark.long\ndef test(): ...", True),
        ("medium", "tests/mixed/test_one.py", "@pytest.mark.medium\ndef test(): ...", False),
        ("medium", "tests/mixed/test_one.py", "pytestmark = [pytest.mark.small]", False),
        ("medium", "tests/unit/test_one.py", "pytestmark = pytest.mark.large", False),
        ("medium", "tests/mixed", None, False),
        ("large", "tests/mixed/test_one.py", "", False),
        ("small", "tests/mixed", None, True),
        ("small", "tests/api", None, True),
    ],
)
def test_modules_without_a_test_of_the_tier_are_not_imported(
    tmp_path: Path, tier: str, path: str, text: str | None, is_left_alone: bool
) -> None:
    module = tmp_path / path
    (module if text is None else module.parent).mkdir(parents=True)
    if text is not None:
        module.write_text(text)
    option = SimpleNamespace(tier=tier, markexpr="not long")
    usual = ["-m", "not long"]
    config: Any = SimpleNamespace(rootpath=tmp_path, option=option, getini=lambda name: usual)
    assert selection.has_none_wanted(module, config) is is_left_alone
    option.markexpr = "kafka"  # then each test is asked
    assert not selection.has_none_wanted(module, config)


@pytest.mark.medium
def test_slow_tests_are_spread_among_the_others_and_none_is_left_for_the_end() -> None:
    names = [f"unit/{number}" for number in range(10)] + [f"mixed/{letter}" for letter in "abcd"]
    items: list[Any] = [Item(f"tests/{name}::test_it") for name in names]
    found = "".join(item.nodeid.partition("::")[0][-1] for item in selection.spread(items))
    assert found == "a01b23c45d6789"
    assert selection.spread([]) == []


class Item(NamedTuple):
    nodeid: str


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--tier", "tiny"], "invalid choice: 'tiny' (choose from 'small', 'medium', 'large')"),
        (["-m", "kafak"], "-m kafak: no such marker; there are "),
        (["-m", "kafka and not slwo"], "-m slwo: no such marker; there are "),
        (["--unsteady-to", "nowhere/here.json"], "nowhere/here.json: there is no such directory"),
        (["--strict", "--unsteady-to", "here.json"], "not allowed with argument --strict"),
    ],
)
def test_what_there_is_not_is_refused_with_what_there_is(
    suite: Suite, arguments: list[str], told: str
) -> None:
    suite.write("def test_it(): pass")
    code, output = suite.run(*arguments)
    assert code not in (0, 1)
    assert told in " ".join(output.split())


@pytest.mark.medium
def test_slow_tests_are_named_at_the_end_unless_everything_was_asked_for() -> None:
    reports = {"passed": [Report("quick", 5.0), Report("slow", 5.1)], "failed": [Report("bad", 9)]}
    source = pytest.Config.ArgsSource.TESTPATHS
    for tier, told in (("medium", ["   9.0 s  bad", "   5.1 s  slow"]), ("large", [])):
        lines: list[str] = []
        reporter = SimpleNamespace(
            getreports=reports.get,
            section=lambda title: None,
            write_line=lines.append,
            stats=reports,
        )
        option = SimpleNamespace(tier=tier, keyword="", deselect=None, markexpr="", collectonly=0)
        config: Any = SimpleNamespace(option=option, args_source=source, getini=lambda name: [])
        selection.pytest_terminal_summary(reporter, config)
        assert lines == told


class Report(NamedTuple):
    nodeid: str
    duration: float
