"""Every sentence that promises something has its tests, or is known to have none."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.promises import PAGE, WITHOUT_TEST, Promise, by_promise, marked_in, promises

ROOT = Path(__file__).parents[1]
IN_DEFAULT_TIERS = "promise and not long and not cluster and not mysql"
LATER = {"synchronous-standby"}
"""Promises all of whose tests are large."""


def stated() -> list[Promise]:
    return list(promises(PAGE.read_text()))


@pytest.mark.small
def test_every_sentence_has_an_id_of_its_own() -> None:
    assert [each.text for each in stated() if each.id is None] == [], "end it with <!-- its-id -->"
    assert [id for id, count in Counter(each.id for each in stated()).items() if count > 1] == []
    assert len(stated()) > 50


@pytest.mark.small
def test_no_id_begins_a_line() -> None:
    """A page with such a line shows its text as it is written, without emphasis and links."""
    assert re.findall(r"^ *<!--.*", PAGE.read_text(), re.MULTILINE) == []


@pytest.mark.small
def test_no_test_names_an_unknown_promise() -> None:
    assert set(by_promise()) - {each.id for each in stated()} == set()


@pytest.mark.small
def test_a_promise_has_tests_or_a_reason_why_it_has_none() -> None:
    assert {each.id for each in stated()} - set(by_promise()) == set(WITHOUT_TEST)


@pytest.mark.medium  # collects the tests of many files
def test_every_promise_has_a_test_in_the_default_tiers() -> None:
    files = sorted({f"tests/{module}" for modules in by_promise().values() for module in modules})
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:randomly"]
    options = ["--tier=medium", "-m", IN_DEFAULT_TIERS, *files]
    run = subprocess.run([*command, *options], cwd=ROOT, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    collected = {line.partition("[")[0] for line in run.stdout.splitlines()}
    collected |= {line.rpartition("::")[0] for line in collected}  # a class may be marked
    late = {
        id
        for id, modules in by_promise().items()
        if not any(
            f"tests/{module}::{name}" in collected for module in modules for name in modules[module]
        )
    }
    assert late == LATER


# --- What is read -----------------------------------------------------------------------------


@pytest.mark.small
def test_sentences_are_read_with_their_ids() -> None:
    page = """# Promises

Introduced here. And here.

1. **Nothing is lost.** A job
   is [run](how.md). <!-- is-run --> So is `another`. <!-- another-is-run -->
2. **A [tick](tick.md) is one job**, whatever happens. <!-- tick -->

## The limits

- **Order is by key.** It holds. A level (of 5.1) has its own! `Both` do. <!-- level -->
- **Not yet named.** It has no id.
"""
    assert [(each.id, each.title, each.text) for each in promises(page)] == [
        ("is-run", "Nothing is lost", "A job is [run](how.md)."),
        ("another-is-run", "Nothing is lost", "So is `another`."),
        ("tick", "A tick is one job", "A [tick](tick.md) is one job, whatever happens."),
        (None, "Order is by key", "It holds."),
        (None, "Order is by key", "A level (of 5.1) has its own!"),
        ("level", "Order is by key", "`Both` do."),
        (None, "Not yet named", "It has no id."),
    ]


@pytest.mark.small
def test_markers_of_functions_and_classes_are_read() -> None:
    code = """
@pytest.mark.promise("a", "b")
@pytest.mark.parametrize("one", [1])
async def test_one(one): ...

@pytest.mark.promise("a")
class TestThem:
    @pytest.mark.promise("c")
    def test_two(self): ...
"""
    assert sorted(marked_in("here.py", code)) == [
        ("a", "TestThem"),
        ("a", "test_one"),
        ("b", "test_one"),
        ("c", "TestThem::test_two"),
    ]


@pytest.mark.small
def test_a_marker_that_nobody_would_find_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"here\.py: mark functions"):
        list(marked_in("here.py", 'pytestmark = pytest.mark.promise("a")'))
