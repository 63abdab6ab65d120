"""Medium: each starts pytest two to four times on a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import judging, sites
from tests.mutants.judging import JudgingError, judge, own_tests
from tests.mutants.sites import Change, mutants_of

ITS_TEST = "tests/unit/store/test_numbers.py::test_it"
SOURCE = "def larger(a, b):\n    return a if a > b else b\n"


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    """A package with one module, and the tests that a test gives it."""
    package = tmp_path / "kjo_django" / "store"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package.parent / "__init__.py").touch()
    (package / "numbers.py").write_text(SOURCE)
    (tmp_path / "tests" / "unit" / "store").mkdir(parents=True)
    # Its tests know nothing of this project's settings.
    own = ("-c", "/dev/null", "--rootdir=.", "-p", "no:django")
    monkeypatch.setattr(judging, "OPTIONS", (*judging.OPTIONS, *own))
    monkeypatch.setattr(judging, "WORKERS", 0)
    monkeypatch.delenv("DJANGO_SETTINGS_MODULE", raising=False)
    return tmp_path


def judged(repository: Path, body: str, change: Change, stage: str = "own") -> judging.Verdict:
    """Return what becomes of the module's mutant of a kind, with one test of this body."""
    test = f"from kjo_django.store.numbers import larger\ndef test_it():\n    {body}\n"
    (repository / "tests/unit/store/test_numbers.py").write_text(test)
    path = "kjo_django/store/numbers.py"
    mutants = mutants_of(SOURCE.encode(), path)
    (mutant,) = (each for each in mutants if each.change is change)
    verdict = judge(mutant, repository, [stage])
    assert (repository / path).read_text() == SOURCE
    return verdict


def test_a_mutant_is_killed_by_the_test_that_fails(repository):
    verdict = judged(repository, "assert larger(1, 2) == 2", Change.NEGATION)
    assert verdict.killed_by == ITS_TEST
    assert verdict.stage == "own"


def test_a_mutant_that_nobody_can_import_is_killed_too(repository, monkeypatch):
    monkeypatch.setattr(sites.Mutant, "apply", lambda self, source: b"raise RuntimeError")
    verdict = judged(repository, "pass", Change.NEGATION)
    assert verdict.killed_by == "tests/unit/store/test_numbers.py"


def test_a_mutant_survives_tests_that_pass(repository):
    verdict = judged(repository, "assert larger(1, 2) == 2", Change.BOUND)
    assert verdict.killed_by == verdict.stage == ""


def test_a_test_that_fails_once_kills_nothing(repository):
    once = "import pathlib; p = pathlib.Path('seen'); seen = p.exists(); p.touch(); assert seen"
    assert judged(repository, once, Change.BOUND).killed_by == ""


def test_a_test_that_fails_without_the_mutant_too_kills_nothing(repository):
    """As some do that ask for what a copy of the repository does not have."""
    assert judged(repository, "assert False", Change.NEGATION).killed_by == ""


def test_a_run_that_ends_without_a_failed_test_is_no_verdict(repository):
    """Such a mutant passed for killed, and nobody had looked at it."""
    with pytest.raises(JudgingError, match="pytest ended with 3"):
        judged(repository, "import os; os._exit(3)", Change.BOUND)


def test_what_looks_at_the_text_of_the_package_kills_nothing(repository):
    """A negated condition stands in brackets that the formatter would take away."""
    tests = repository / "tests"
    option = "def pytest_addoption(parser): parser.addoption('--tier')"
    (tests / "conftest.py").write_text(option)
    for folder in judging.NOT_OF_A_TIER:
        (repository / folder).mkdir()
        (repository / folder / "test_text.py").write_text("def test_it(): assert False")
    passes = "assert larger(1, 2) == 2"
    assert judged(repository, passes, Change.BOUND, "medium").killed_by == ""
    # And what runs it does
    verdict = judged(repository, passes, Change.NEGATION, "medium")
    assert (verdict.killed_by, verdict.stage) == (ITS_TEST, "medium")


def test_a_modules_tests_are_those_of_its_name_or_of_its_package(repository):
    unit = repository / "tests" / "unit" / "store"
    for name in ("test_rows.py", "test_rows_locked.py", "test_numbers.py"):
        (unit / name).touch()

    def named(path: str) -> list[str]:
        return [each.as_posix() for each in own_tests(f"kjo_django/{path}", repository)]

    assert named("store/rows.py") == [
        "tests/unit/store/test_rows.py",
        "tests/unit/store/test_rows_locked.py",
    ]
    assert named("store/servers.py") == ["tests/unit/store"]
    assert named("outbox/lines/line.py") == ["tests/unit"]
