"""A worker of a new project starts at once and stays small (issue 19, item 7)."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from django.db import connections

from tests.acceptance.engine import ALIAS, Engine

MOST_MEGABYTES = 60
MOST_MODULES = 800
"""Of Python, Django with its admin, and this app. Ten more than before a worker wrote a log, kept
that of failed attempts, and pruned."""
OF_DRIVERS = {
    "sqlite": (),
    "mysql": ("MySQLdb", "pymysql", "cryptography"),
    "postgresql": (
        "psycopg",
        "psycopg_binary",
        "kjo_django.coordination.database.postgres_listener",
    ),
}
"""Not counted: a project chooses them."""
MOST_MEGABYTES_OF_A_DRIVER = 8
NEEDED_BY_OTHERS = (
    "tests.urls",  # the views of the project
    "django.db.migrations.executor",
    "kjo_django.api",
    "kjo_django.testing",
    "kjo_django.transports.kafka",
    "kjo_django.transports.memory",
    "kjo_django.transports.redis_streams",
    "kjo_django.coordination.redis",
    "kjo_django.contrib.opentelemetry",
    "kjo_django.contrib.prometheus",
    "kjo_django.patterns.items.consumer",
    *("confluent_kafka", "redis", "django_redis", "psycopg", "rest_framework", "opentelemetry"),
    *("kjo_django.contrib.schema_registry", "fastavro", "google", "httpx2"),
    *("prometheus_client", "msgpack", "unittest", "xml", "distutils", "pydoc"),
)
"""Modules that a worker of the embedded default has no use for."""


def is_of(packages: tuple[str, ...], module: str) -> bool:
    """Return whether a module is one of these, or in one."""
    return any(module == other or module.startswith(f"{other}.") for other in packages)


@pytest.mark.promise("no-servers")
@pytest.mark.timeout(120)
def test_a_worker_of_a_new_project_imports_and_holds_little(
    embedded: Engine, tmp_path: Path
) -> None:
    # Given a job that tells what is imported when it runs
    database = embedded.servers.database_url
    found = tmp_path / "modules"
    first = embedded.run("tests.acceptance.new_project", database, "enqueue", str(found))
    assert first.wait() == 0, first.log_tail()
    # When a worker starts
    began = time.monotonic()
    worker = embedded.run(
        "tests.acceptance.new_project", database, "kjo_consume", "--status-interval", "0"
    )
    embedded.wait_until(lambda: found.exists() and found.read_text(), "No job ran")
    print(f"the first job ran after {time.monotonic() - began:.2f} s")
    # Then it has imported what it needs
    modules = found.read_text().split()
    driver = OF_DRIVERS[connections[ALIAS].vendor]
    counted = [name for name in modules if not is_of(driver, name)]
    assert [name for name in counted if is_of(NEEDED_BY_OTHERS, name)] == []
    assert len(counted) <= MOST_MODULES
    # And idle, with all its threads, it is small
    embedded.wait_for_moment(2)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    (resident,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    print(f"{int(resident) / 1024:.1f} MB resident, {len(modules)} modules")
    drivers = 0 if embedded.is_sqlite else MOST_MEGABYTES_OF_A_DRIVER
    assert int(resident) / 1024 <= MOST_MEGABYTES + drivers
    assert worker.stop() == 0, worker.log_tail()


@pytest.mark.medium
@pytest.mark.parametrize("arguments", [["--processes", "2"], ["--reload"]], ids=" ".join)
def test_a_worker_of_several_processes_or_with_a_reloader_says_what_starts_and_ends(
    embedded: Engine, tmp_path: Path, arguments: list[str]
) -> None:
    # Given a project that says nothing of logging
    embedded.variables["KJO_TEST_LOG_LEVEL"] = ""
    database = embedded.servers.database_url
    options = ["--status-interval", "0", *arguments]
    worker = embedded.run("tests.acceptance.new_project", database, "kjo_consume", *options)
    # When
    for number in range(3):
        path = str(tmp_path / str(number))
        enqueued = embedded.run("tests.acceptance.new_project", database, "enqueue", path)
        assert enqueued.wait() == 0, enqueued.log_tail()

    # Then each start and each end has one line, with its time and zone
    def lines(word: str) -> list[str]:
        line = rf"^\d{{4}}-\d\d-\d\d \S+[+-]\d\d:\d\d INFO {word} ledger\.list_modules (\S+) \("
        return re.findall(line, worker.log, re.MULTILINE)

    embedded.wait_until(lambda: len(lines("Completed")) >= 3, "Not all ends were told")
    assert len(lines("Completed")) == len(set(lines("Completed"))) == 3
    assert sorted(lines("Started")) == sorted(lines("Completed"))
    worker.stop()


@pytest.mark.medium
def test_each_process_of_a_worker_speaks_the_language_of_the_project(embedded: Engine) -> None:
    # Given
    embedded.variables["KJO_TEST_LANGUAGE"] = "de"
    database = embedded.servers.database_url
    options = ["--status-interval", "0", "--processes", "2"]
    worker = embedded.run("tests.acceptance.new_project", database, "kjo_consume", *options)
    # When both have started, and are stopped
    began = ". Beenden mit Strg-C."
    embedded.wait_until(lambda: worker.log.count(began) >= 2, "Not both processes have started")
    assert worker.stop() == 0, worker.log_tail()
    # Then nothing of what they say is in English
    assert worker.log.count(" gestoppt nach ") == 2
    assert [text for text in ("Stop with", "stopped after", "Service ") if text in worker.log] == []
