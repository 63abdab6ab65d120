"""A pytest plugin: which tests a run has, by their tier (`tests.tiers`)."""

from __future__ import annotations

import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.tiers import NAMES, Tier, is_case, tier_of, tier_of_folder

MARKED = re.compile(r"\bmark\.(small|medium)\b")
"""Is in each module of large tests that has others, too."""

SLOW = 5.0
"""Seconds after which a test of a tier that is run often is named at the end of the run."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=[*NAMES],
        help="run the tests of this tier and of those before it (default: small, or, where tests "
        "are named, large)",
    )


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    refuse_unknown_markers(config)
    usual = Tier.LARGE if names_tests(config) else Tier.SMALL
    config.option.tier = config.option.tier or usual.value


def names_tests(config: pytest.Config) -> bool:
    """Return whether the command line says which tests it wants."""
    option = config.option
    is_path_named = config.args_source is pytest.Config.ArgsSource.ARGS
    is_filtered = option.keyword or option.deselect or getattr(option, "lf", False)
    return bool(is_path_named or is_filtered or is_marked(config))


def is_marked(config: pytest.Config) -> bool:
    """Return whether the command line has a ``-m`` besides that of the configuration."""
    usual = config.getini("addopts")
    return config.option.markexpr != (usual[usual.index("-m") + 1] if "-m" in usual else "")


def refuse_unknown_markers(config: pytest.Config) -> None:
    """Raise `pytest.UsageError` for a marker of ``-m`` that there is not: pytest would select
    nothing, or everything, by it."""
    known = {re.split(r"[:(]", line)[0].strip() for line in config.getini("markers")}
    wanted = re.sub(r"\([^()]*=[^()]*\)", "", config.option.markexpr or "")
    unknown = set(re.findall(r"[^\W\d][\w.]*", wanted)) - known - {"and", "or", "not"}
    if unknown:
        names, there_are = (", ".join(sorted(each)) for each in (unknown, known))
        raise pytest.UsageError(f"-m {names}: no such marker; there are {there_are}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave alone what has no test of the wanted tier: to import all tests takes longer than to run
    some."""
    return has_none_wanted(collection_path, config) or None


def has_none_wanted(path: Path, config: pytest.Config) -> bool:
    """Return whether it is known of a folder or module, without importing it, that none of its
    tests is of the wanted tier."""
    wanted = NAMES[config.option.tier]
    tier = tier_of_folder(os.path.relpath(path, config.rootpath))
    if wanted.includes(tier) or is_marked(config):
        return False
    if wanted is Tier.SMALL:  # these have folders of their own, but for very few
        return True
    return path.suffix == ".py" and not MARKED.search(path.read_text())


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = NAMES[config.option.tier]
    if not names_tests(config):
        refuse_unknown_cases(items)
    left_out = {
        item
        for item in items
        if not item.get_closest_marker("long") and not wanted.includes(tier_of(item))
    }
    config.hook.pytest_deselected(items=list(left_out))
    items[:] = spread([item for item in items if item not in left_out])


def spread(items: list[pytest.Item]) -> list[pytest.Item]:
    """Put the tests of folders with large ones evenly among the first four fifths of the others.

    They wait most of their time, in which the processes of a parallel run that have others compute.
    Those left for the end are short, so all processes end at the same time. pytest-django would put
    them last. Within both parts the order stays as it is, which is random.
    """
    is_slow = {item: tier_of_folder(item.nodeid) is Tier.LARGE for item in items}
    slow, others = ([item for item in items if is_slow[item] is kind] for kind in (True, False))
    if not slow:
        return others
    apart = 0.8 * len(others) / len(slow)
    places = {item: number * apart for number, item in enumerate(slow)}
    places |= {item: float(number) for number, item in enumerate(others)}
    return sorted(places, key=lambda item: places[item])


def refuse_unknown_cases(items: list[pytest.Item]) -> None:
    """Raise `pytest.UsageError` for a marker of a tier that names a case which its test has not:
    it would leave out what it was to bring in."""
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for test, there_are in tests.items():
        sizes = [mark for mark in there_are[0].iter_markers() if mark.name in NAMES]
        for name in (str(name) for mark in sizes for name in mark.args):
            if not any(is_case(item, name) for item in there_are):
                known = ", ".join(sorted(item.nodeid.removeprefix(test) for item in there_are))
                raise pytest.UsageError(f"{test} has no case {name}; there are {known}")


def pytest_report_header(config: pytest.Config) -> str:
    return f"tier: {config.option.tier} (of {', '.join(NAMES)})"


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests that make a run slow which somebody waits for; where none of those that are
    named is of the tier, say how they are run."""
    if NAMES[config.option.tier] is Tier.LARGE:
        return
    has_run = not set(terminalreporter.stats) <= {"", "deselected", "warnings"}
    if names_tests(config) and not config.option.collectonly and not has_run:
        which = f"none of these tests is {config.option.tier} or smaller"
        terminalreporter.write_line(f"{which}: give --tier large, or python -m tests --all")
    ran = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("failed")]
    slow = sorted((each.duration, each.nodeid) for each in ran if each.duration > SLOW)
    if slow:
        terminalreporter.section(f"slower than {SLOW:g} s: mend them, or mark them large")
        for duration, nodeid in reversed(slow):
            terminalreporter.write_line(f"{duration:6.1f} s  {nodeid}")
