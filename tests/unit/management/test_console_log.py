"""What commands write of the log where the project's LOGGING has no handler for it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime

import pytest
from django.core.management import call_command

from kjo_django.management.console_log import logged_to_stderr
from kjo_django.worker import Worker
from tests.unit.deliveries import KJO

logger = logging.getLogger("kjo_django")
jobs = logging.getLogger("kjo_django.jobs")


@contextmanager
def without_logging() -> Iterator[None]:
    """As in a project without LOGGING: nobody has a handler for the app's loggers."""
    # No fixture: pytest looks for loggers that do not propagate before it calls the test.
    logger.propagate = False
    try:
        assert not jobs.hasHandlers()
        yield
        assert logger.handlers == [] and logger.level == logging.NOTSET
    finally:
        logger.propagate = True


def log_one_of_each() -> None:
    logger.debug("looked")
    jobs.info("Started shop.charge 1", extra={"job_id": "1"})
    logger.error("Dead-lettered shop.charge 1")


@pytest.mark.parametrize(
    ("verbosity", "expected"),
    [(0, ["ERROR"]), (1, ["INFO", "ERROR"]), (3, ["DEBUG", "INFO", "ERROR"])],
)
def test_a_line_has_its_time_its_zone_and_its_level(capsys, verbosity, expected):
    before = datetime.now().astimezone()
    with without_logging(), logged_to_stderr(verbosity):
        log_one_of_each()
    lines = capsys.readouterr().err.splitlines()
    assert [re.split(r" ", line, maxsplit=3)[2] for line in lines] == expected
    assert lines[-1].endswith(" ERROR Dead-lettered shop.charge 1")
    at = datetime.fromisoformat(" ".join(lines[-1].split()[:2]))
    assert at.utcoffset() == before.utcoffset()
    assert abs((at - before).total_seconds()) < 60


def test_as_json_a_line_is_an_object_that_names_the_job(capsys):
    with without_logging(), logged_to_stderr(1, as_json=True):
        log_one_of_each()
    started, dead = map(json.loads, capsys.readouterr().err.splitlines())
    assert started["message"] == "Started shop.charge 1"
    assert (started["job_id"], started["level"]) == ("1", "INFO")
    assert datetime.fromisoformat(dead["time"]).tzinfo is not None


def test_a_level_that_the_project_has_set_stays(capsys):
    jobs.setLevel(logging.WARNING)
    try:
        with without_logging(), logged_to_stderr(1):
            log_one_of_each()
    finally:
        jobs.setLevel(logging.NOTSET)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Dead-lettered" in line


def test_a_logger_with_a_handler_of_its_own_is_left_to_that(capsys):
    own = logging.NullHandler()
    jobs.addHandler(own)
    try:
        logger.propagate = False
        with logged_to_stderr(1):
            log_one_of_each()
    finally:
        logger.propagate = True
        jobs.removeHandler(own)
    (line,) = capsys.readouterr().err.splitlines()
    assert "Dead-lettered" in line


@pytest.mark.parametrize("name", ["kjo_django", ""], ids=["of the app", "of the root"])
def test_a_projects_own_handler_decides_alone(capsys, monkeypatch, name):
    own = logging.NullHandler()
    configured = logging.getLogger(name)
    configured.addHandler(own)
    try:
        before = list(logger.handlers), logger.level
        with logged_to_stderr(1):
            assert (logger.handlers, logger.level) == before
    finally:
        configured.removeHandler(own)


@pytest.mark.usefixtures("_sqlite_worker")
@pytest.mark.parametrize("options", [{}, {"json": True}], ids=["text", "json"])
def test_a_worker_writes_its_log_while_it_runs(capsys, monkeypatch, options):
    def run(self: Worker, *_: object) -> int:
        jobs.info("Started shop.charge 1")
        return 0

    monkeypatch.setattr(Worker, "run", run)
    with without_logging():
        call_command("kjo_consume", "ledger", **options)
    err = capsys.readouterr().err
    assert "Started shop.charge 1" in err
    assert err.startswith("{") is bool(options)


@pytest.fixture
def _sqlite_worker(settings, db) -> None:
    settings.KJO = KJO
