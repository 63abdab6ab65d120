"""Every test there is, with the servers they need: `python -m tests [PYTEST ARGUMENTS]`.

Installs Kafka, Redis, PostgreSQL, MariaDB and Chromium where they are missing, then runs pytest.
ruff, the import contracts and mypy are tests too (`tests/checks`), so pytest's last line tells of
everything.
Without the servers the rest is run all the same, and the exit code says that something is missing.
"""

import sys

import pytest

from tests.services.errors import ServiceError
from tests.services.provisioning import provision

WORKERS = 3
"""Most tests wait: for servers to come back, leases to end, processes to start. Side by side they
wait at the same time; each worker has servers of its own."""


def main(arguments: list[str]) -> int:
    if not any(argument.startswith(("-n", "--numprocesses")) for argument in arguments):
        arguments = ["-n", str(WORKERS), *arguments]
    arguments = ["--durations=15", "--durations-min=5", *arguments]
    # Not left to the fixtures: installing may take longer than a test is given.
    try:
        provision(browser=True, mariadb=True)
    except ServiceError as error:
        print(f"error: {error}\n", file=sys.stderr)
        return int(pytest.main(arguments)) or 1
    return int(pytest.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
