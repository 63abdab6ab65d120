"""Fixtures of every test."""

import gc
import logging
import uuid
from collections.abc import Callable, Generator, Iterator
from typing import Any

import pytest
from hypothesis import Phase, settings

from kjo_django import garbage_collection, registry, signals
from kjo_django.exceptions import CoordinationError
from kjo_django.runtime import get_coordination

# Not Phase.explain: it traces what fails, and under a trace Python 3.11 has hung in an endless loop
# that no time limit ended.
settings.register_profile("default", phases=[p for p in Phase if p is not Phase.explain])

pytest_plugins = [
    "tests.cluster.options",
    "tests.databases",
    "tests.rewriting",
    "tests.selection",
    "tests.services.fixtures",
    "tests.without",
]


def pytest_collection() -> None:
    """Do not look for garbage while everything is imported: it all stays."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep the garbage collector from visiting what all tests have loaded: a collection, which each
    worker in a thread asks for at its start, takes a second of it and holds up every thread."""
    garbage_collection.set_apart()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Spell out what no encoding knows: a report that has it, in a line of the log say, cannot be
    sent to the process that collects them, and ends the whole run."""
    report = yield
    report.sections = [(name, sendable(text)) for name, text in report.sections]
    if report.failed and sendable(text := str(report.longrepr)) != text:
        report.longrepr = sendable(text)
    return report


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print what tests have told (``record_property("told", …)``), wherever they ran."""
    for report in terminalreporter.getreports("passed"):
        for name, value in report.user_properties:
            if name == "told":
                terminalreporter.write_line(str(value))


def sendable(text: str) -> str:
    return text.encode(errors="backslashreplace").decode()


@pytest.fixture(scope="session")
def django_db_modify_db_settings(
    request: pytest.FixtureRequest, django_db_modify_db_settings_parallel_suffix: None
) -> Iterator[None]:
    """With ``--engine`` the tests that ask for Django's own test database have it there."""
    # Not imported above: pytest rewrites the assertions of a plugin that nobody has imported.
    from tests.databases import in_place_of_sqlite, led_to
    from tests.settings import database

    engine = in_place_of_sqlite(request.config)
    if not engine:
        yield
        return
    server = request.getfixturevalue(f"{engine}_server")
    name = f"kjo_django_{uuid.uuid4().hex[:12]}"
    # Made here, too: where no test asks for it, nobody makes it, and whatever database a query is
    # for, Django asks the alias `default` for the server's version.
    url = server.createdb(name)
    with led_to({**database(url), "TEST": {"NAME": name}}):
        yield
    server.dropdb(name)


@pytest.fixture(autouse=True)
def the_logger_is_left_as_it_was() -> Iterator[None]:
    """Fail a test that leaves the app's logger changed: later tests of the process would not find
    what they look for in its log."""
    logger = logging.getLogger("kjo_django")
    before = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)
    yield
    after = logger.level, logger.disabled, list(logger.handlers), list(logger.filters)
    assert after == before, "undo what the test has changed"


@pytest.fixture(autouse=True)
def no_limit_is_left() -> Iterator[None]:
    """Fail a test that leaves a handler with a limit behind: the groups of every later test of the
    process would ask for permits, and lists of limits would name it."""
    before = limited_handlers()
    yield
    assert limited_handlers() <= before, "forget what the test has declared"


def limited_handlers() -> set[str]:
    """Return the names of the handlers that ask for permits or are listed with a limit."""
    declared = [h for h in registry.handlers() if h.options.rate or h.options.concurrency]
    return {*registry.limited, *(handler.name for handler in declared)}


@pytest.fixture
def forgotten_definitions() -> Iterator[None]:
    """Handlers, routes and queues that a test defines are forgotten after it."""
    with registry.isolated():
        yield


@pytest.fixture
def hear() -> Iterator[Callable[..., list[dict[str, Any]]]]:
    """Listen to signals by their names; return a list that grows by the facts of each that is sent,
    with its ``signal``'s name."""
    connected = []

    def hear(*names: str) -> list[dict[str, Any]]:
        heard: list[dict[str, Any]] = []
        for name in names:

            def receiver(_name: str = name, **facts: Any) -> None:
                heard.append({**facts, "signal": _name})

            signal = getattr(signals, name)
            signal.connect(receiver, weak=False)
            connected.append((signal, receiver))
        return heard

    yield hear
    for signal, receiver in connected:
        signal.disconnect(receiver)


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[BaseException]]:
    """Have the first calls of a function raise errors, one each; return those still to come."""

    def failing(owner: Any, name: str, *errors: BaseException) -> list[BaseException]:
        original, left = getattr(owner, name), list(errors)

        def call(*arguments: Any, **options: Any) -> Any:
            if left:
                raise left.pop(0)
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, call)
        return left

    return failing


@pytest.fixture
def coordination_away(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Have methods of the coordination fail, as they do while it cannot be reached."""

    def away(*names: str) -> None:
        def refuse(*arguments: Any, **options: Any) -> None:
            raise CoordinationError("away")

        for name in names:
            monkeypatch.setattr(get_coordination(), name, refuse)

    return away
