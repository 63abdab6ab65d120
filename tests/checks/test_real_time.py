"""No verdict of a test depends on how quick the machine is.

No test asserts that little real time has passed, unless it is marked ``long``; what
``tests/benchmarks`` measures with may. Each waits by ``tests.waiting.wait_until``, or as long as
that does; a sleep says what it is for.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checks.real_time import DEADLINE, ELAPSED, LOOP, SLEEP, findings, measuring_functions

pytestmark = pytest.mark.small  # reads files

TESTS = Path(__file__).resolve().parents[1]
NOT_HELD = ("benchmarks",)
"""Folders that are about real time, but for the tests in them."""


def found() -> dict[str, list[str]]:
    """Return the findings in each module that has any, by its path in the tests."""
    modules = {path.relative_to(TESTS): path.read_text() for path in sorted(TESTS.rglob("*.py"))}
    held = {name: text for name, text in modules.items() if is_held(name)}
    measuring = measuring_functions(held.values())
    return {
        name.as_posix(): [str(each) for each in all_of_it]
        for name, text in held.items()
        if (all_of_it := findings(text, measuring))
    }


def is_held(name: Path) -> bool:
    return name.parts[0] not in NOT_HELD or name.name.startswith("test_")


def test_no_verdict_depends_on_how_quick_the_machine_is() -> None:
    assert found() == {}


# --- What is found --------------------------------------------------------------------------------

TIMED = """
import time
from time import monotonic as now

def test_it_is_quick():
    began = time.monotonic()
    {}
"""


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began < 5",
        "assert 0.1 < time.monotonic() - began < 5",
        "took = time.perf_counter() - began; assert took <= 5",
        "deadline = began + 5; assert deadline > time.monotonic()",
        "assert 5 > now() - began",
        "assert a and (took := time.time() - began) < 5",
        "assert max(time.monotonic() - began, 1) < 5",
    ],
)
def test_that_little_time_has_passed_is_found(line: str) -> None:
    assert [each.problem for each in findings(TIMED.format(line))] == [ELAPSED]


@pytest.mark.parametrize(
    "line",
    [
        "assert time.monotonic() - began >= 0.05",
        "assert 0.05 < time.monotonic() - began",
        "assert began <= row.finished_at <= time.time()",
        "assert clock.monotonic() - began_at < 5",
        "answer = wait_until(time.monotonic() + 5, began); assert answer < 5",
        "assert row.count < 5",
        "assert row.finished_at > began",
    ],
)
def test_what_holds_on_a_slow_machine_is_left_alone(line: str) -> None:
    assert findings(TIMED.format(line)) == []


BEFORE = """
def test_it_comes():
    due = timezone.now() + timedelta(seconds=2)
    {}
"""


@pytest.mark.parametrize(
    ("line", "is_found"),
    [
        ("assert started < due", True),
        ("assert started < due <= other", True),
        ("assert max(first, second) < due + timedelta(seconds=9)", True),
        ("assert due > started", True),
        ("assert started < clock.now() + timedelta(seconds=9)", True),
        ("assert due <= started", False),
        ("assert due <= started < other", False),
        ("assert started > due", False),
        ("assert due < due + timedelta(seconds=1)", False),
        ("assert row.available_at == due", False),
    ],
)
def test_that_something_was_before_a_moment_to_come_is_found(line: str, is_found: bool) -> None:
    assert [each.problem for each in findings(BEFORE.format(line))] == [ELAPSED] * is_found


def test_a_function_that_measures_counts_as_a_clock() -> None:
    measure = "import time\ndef delay_of(it):\n    began = time.monotonic()\n    it()\n"
    measure += "    return time.monotonic() - began"
    by_another = "def delay_of_other(): return worker.delay_of(other)"
    measuring = measuring_functions([by_another, measure])
    assert measuring == {"delay_of", "delay_of_other"}
    used = "def test_it_is_quick():\n    delays = [delay_of_other() for _ in range(9)]\n"
    used += "    assert all(delay < 2 for delay in delays)"
    assert [each.problem for each in findings(used, measuring)] == [ELAPSED]


@pytest.mark.parametrize(
    "marked",
    [
        "import time, pytest\n@pytest.mark.long\ndef test(): assert time.monotonic() - began < 5",
        "import time, pytest\npytestmark = [pytest.mark.long]\ndef test(): assert time.time() < 5",
    ],
)
def test_a_test_marked_long_may_be_about_time(marked: str) -> None:
    assert findings(marked) == []
    assert [each.problem for each in findings(marked.replace("long", "large"))] == [ELAPSED]


@pytest.mark.parametrize(
    ("source", "problems"),
    [
        ("while not it.exists():\n    time.sleep(1)", [LOOP, SLEEP]),
        ("while time.monotonic() < deadline:\n    poll()", [LOOP]),
        ("while not it:\n    if time.monotonic() > deadline:\n        raise Late", [LOOP]),
        ("time.sleep(0.1)", [SLEEP]),
        ("time.sleep(0.1)  # a moment", [SLEEP]),
        ("time.sleep(\n    0.1  # sleep: the pace of the load\n)", []),
        ("while not stopped:\n    time.sleep(0.1)  # sleep: the pace of the load", []),
        ("while time.monotonic() < end:  # timed loop: a load of ten seconds\n    call()", []),
        ("# timed loop: a load\nwhile time.monotonic() < end:\n    call()", []),
        ("while queue:\n    queue.pop()", []),
        ("assert event.wait(10)", [DEADLINE]),
        ("thread.join(2.5)", [DEADLINE]),
        ("future.result(30)", [DEADLINE]),
        ("event.wait(PATIENCE)", []),
        ("assert not event.wait(0.2)", []),
        ("handle.wait(3600)", []),
        ("','.join(parts)", []),
    ],
)
def test_loops_sleeps_and_deadlines_are_found(source: str, problems: list[str]) -> None:
    assert [each.problem for each in findings(f"import time\n{source}")] == problems


def test_deadlines_are_found_in_modules_that_import_no_clock() -> None:
    assert [each.problem for each in findings("assert event.wait(10)")] == [DEADLINE]
