"""A worker of a new project starts at once and stays small (issue 19, item 7)."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.acceptance.engine import Engine

MOST_MEGABYTES = 60
MOST_MODULES = 790
"""Of Python, Django with its admin, and this app."""
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
    *("prometheus_client", "msgpack", "unittest", "xml", "distutils", "pydoc"),
)
"""Modules that a worker of the embedded default has no use for."""


@pytest.mark.timeout(120)
def test_a_worker_of_a_new_project_imports_and_holds_little(
    embedded: Engine, tmp_path: Path
) -> None:
    # Given a job that tells what is imported when it runs
    database = embedded.servers.database_url.removeprefix("sqlite:///")
    found = tmp_path / "modules"
    first = embedded.run("tests.acceptance.new_project", database, "enqueue", str(found))
    assert first.wait(60) == 0, first.log_tail()
    # When a worker starts
    began = time.monotonic()
    worker = embedded.run(
        "tests.acceptance.new_project", database, "kjo_consume", "--status-interval", "0"
    )
    embedded.wait_until(lambda: found.exists() and found.read_text(), "No job ran")
    print(f"the first job ran after {time.monotonic() - began:.2f} s")
    # Then it has imported what it needs
    modules = found.read_text().split()
    needless = [
        name
        for name in modules
        if any(name == other or name.startswith(f"{other}.") for other in NEEDED_BY_OTHERS)
    ]
    assert needless == []
    assert len(modules) <= MOST_MODULES
    # And idle, with all its threads, it is small
    embedded.wait_for_moment(2)
    status = Path(f"/proc/{worker.pid}/status").read_text()
    (resident,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS:"))
    print(f"{int(resident) / 1024:.1f} MB resident, {len(modules)} modules")
    assert int(resident) / 1024 <= MOST_MEGABYTES
    assert worker.stop() == 0, worker.log_tail()
