"""The lowest version of each package that an extra or the package itself asks for.

``pyproject.toml`` has them as ``name>=version``; nowhere else are they listed. ``tox -e floors``
installs just these on the lowest Python and runs the tests that concern them:

    python -m tests.floors constraints FILE          # what pip is not to go beyond
    python -m tests.floors test [EXTRA …] [OPTION …] # options are pytest's; all extras by default
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Iterable, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENT = re.compile(r"([\w.-]+)(?:\[([\w,-]+)\])?(?:>=([\d.]+))?")
ITSELF = "itself"
"""In place of an extra: what the package always needs."""

TESTS: dict[str, tuple[str, ...]] = {
    ITSELF: ("tests/schedules", "tests/unit/engine", "tests/unit/enqueue", "tests/dashboard"),
    "kafka": (
        "tests/conformance/test_kafka_mock.py",
        "tests/conformance/test_kafka_real.py",
        "tests/events",
        "tests/kdlq",
        "tests/unit/transports/kafka/test_transport_broker.py",
        "tests/unit/transports/kafka/test_clients.py",
        "tests/unit/transports/kafka/test_kafka.py",
        "tests/unit/operations/test_topic_replay_on_kafka.py",
        "tests/unit/operations/maintenance/test_topics.py",
    ),
    "redis": (
        "tests/acceptance/test_redis_streams.py",
        "tests/conformance/test_coordination_redis.py",
        "tests/conformance/test_coordination_redis_keys.py",
        "tests/conformance/test_redis_streams.py",
        "tests/unit/engine/test_leases_frozen_redis.py",
        "tests/unit/test_checks.py",
        "tests/unit/coordination/test_redis_listener.py",
    ),
    "postgres": (
        "tests/conformance/test_coordination_database.py",
        "tests/conformance/test_database_claims.py",
        "tests/conformance/test_database_postgres.py",
        "tests/queueing/test_rescuing.py",
        "tests/unit/enqueue",
        "tests/unit/store/test_session_changes.py",
        "tests/unit/store/test_postgres_copying.py",
        "tests/unit/engine/runners/test_loop.py",
        "tests/unit/engine/handler/test_savepoint_postgres.py",
        "tests/unit/engine/test_recorder.py",
        "tests/unit/engine/test_group_shared_transactions.py",
        "tests/unit/store/test_postgres_transactions.py",
        "tests/unit/enqueue/test_storing_wakeups.py",
    ),
    "mysql": (
        "tests/conformance/test_coordination_database.py",
        "tests/conformance/test_database_mariadb.py",
        "tests/unit/store/test_session_changes.py",
        "tests/unit/store/test_store.py",
    ),
    "api": ("tests/api",),
    "msgpack": ("tests/unit/messages/test_messages.py",),
    "metrics": (
        "tests/unit/contrib/prometheus/test_exposition.py",
        "tests/docs/test_monitoring.py",
    ),
    "tracing": ("tests/contrib/test_opentelemetry.py",),
    "registry": ("tests/contrib/test_schema_registry.py",),
    "fast": (
        "tests/conformance/test_coordination_redis.py",
        "tests/conformance/test_redis_streams.py",
        "tests/unit/messages/test_serializers_fast_json.py",
        "tests/unit/messages/test_messages.py",
    ),
    "migrate": ("tests/contrib/test_celery_codemod.py", "tests/contrib/test_celery_sample.py"),
}
"""By extra, the tests that notice if one of its packages is too old."""


class Requirement(NamedTuple):
    """``name[extras]>=floor``."""

    name: str
    extras: tuple[str, ...]
    floor: str
    """Empty where any version will do."""


def read(text: str) -> Requirement:
    """Return what a requirement says.

    :raises ValueError: it says anything but a name, extras and a floor.
    """
    found = REQUIREMENT.fullmatch(text.replace(" ", ""))
    if found is None:
        raise ValueError(f"{text!r} is not of the form name[extras]>=version")
    name, extras, floor = found.groups("")
    return Requirement(name.lower(), tuple(filter(None, extras.split(","))), floor)


def requirements(project: Mapping[str, Any]) -> dict[str, list[Requirement]]:
    """Return what each extra asks for, and the package itself; an extra of others is left out.

    :param project: the table ``project`` of ``pyproject.toml``.
    """
    asked = {ITSELF: project["dependencies"], **project["optional-dependencies"]}
    found = {extra: [read(each) for each in texts] for extra, texts in asked.items()}
    return {
        extra: wanted
        for extra, wanted in found.items()
        if not any(each.name == project["name"] for each in wanted)
    }


def floors(project: Mapping[str, Any]) -> dict[str, str]:
    """Return the lowest version by package. Where extras differ it is the highest of theirs, for
    they are installed together."""
    found: dict[str, str] = {}
    for wanted in requirements(project).values():
        for each in wanted:
            found[each.name] = max(found.get(each.name, "0"), each.floor, key=parts)
    return found


def parts(version: str) -> tuple[int, ...]:
    """Return a version to compare: zeros at its end do not count."""
    return tuple(map(int, re.sub(r"(\.0+)*$", "", version).split(".")))


def constraints(project: Mapping[str, Any]) -> str:
    """Return a file for ``pip install --constraint``."""
    return "".join(f"{name}=={floor}\n" for name, floor in sorted(floors(project).items()))


def of_this_project() -> dict[str, Any]:
    """Return the table ``project`` of this project's ``pyproject.toml``."""
    loaded: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return loaded


def other_than_floors(wanted: Mapping[str, str]) -> list[str]:
    """Return what is installed in another version than its lowest, with both versions."""
    installed = {name: metadata.version(name) for name in wanted}
    return [
        f"{name} {installed[name]}, not {floor}"
        for name, floor in wanted.items()
        if parts(installed[name]) != parts(floor)
    ]


def test(arguments: Iterable[str]) -> int:
    """Run the tests of these extras, of all where none is named; return pytest's code.

    :raises SystemExit: some package is installed in another version than its lowest.
    """
    import pytest

    given = list(arguments)
    extras = [each for each in given if each in TESTS] or [*TESTS]
    if wrong := other_than_floors(floors(of_this_project())):
        raise SystemExit(f"Installed are {', '.join(wrong)}: run `tox -e floors`.")
    paths = dict.fromkeys(path for extra in extras for path in TESTS[extra])
    return pytest.main(["--tier", "medium", *paths, *(each for each in given if each not in TESTS)])


def main(arguments: list[str]) -> int:
    match arguments:
        case ["constraints", path]:
            Path(path).write_text(constraints(of_this_project()))
            return 0
        case ["test", *others]:
            return test(others)
    raise SystemExit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
