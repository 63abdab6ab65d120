"""The tests as they run where extras are not installed: ``KJO_TEST_WITHOUT=kafka,redis pytest``.

Their packages cannot be imported, neither here nor in the processes that tests start with
these settings. ``tests/without.py`` skips the tests that need one of them.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Sequence
from types import ModuleType

PACKAGES = {
    "kafka": ("confluent_kafka",),
    "redis": ("django_redis", "redis"),
    "postgres": ("psycopg", "psycopg_pool"),
    "mysql": ("pymysql", "MySQLdb"),
    "api": ("rest_framework", "drf_spectacular"),
    "msgpack": ("msgpack",),
    "metrics": ("prometheus_client",),
    "tracing": ("opentelemetry",),
    "registry": ("confluent_kafka.schema_registry", "fastavro", "google.protobuf"),
    "fast": ("orjson", "hiredis"),
    "migrate": ("libcst",),
}
"""What each extra brings, as it is imported."""
VARIABLE = "KJO_TEST_WITHOUT"


class NotInstalledError(ModuleNotFoundError):
    """A package of an absent extra is imported."""


class Absence(importlib.abc.MetaPathFinder):
    """Finds none of these packages, before anybody else finds them."""

    def __init__(self, packages: frozenset[str]) -> None:
        self.packages = packages

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parents = [name[:at] for at, letter in enumerate(name) if letter == "."]
        if not self.packages.isdisjoint([name, *parents]):
            raise NotInstalledError(f"No module named {name!r}", name=name)
        return None


def absent() -> list[str]:
    """Return which extras are absent, as the environment says: ``kafka,redis``, or none.

    :raises ValueError: there is no such extra.
    """
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if unknown := {*names} - {*PACKAGES}:
        raise ValueError(f"{VARIABLE}: no extra is named {unknown}; there are {[*PACKAGES]}")
    return names


def take_away() -> None:
    """Keep the packages of the absent extras, if there are any, from being imported."""
    packages = frozenset(package for name in absent() for package in PACKAGES[name])
    if packages and not any(isinstance(finder, Absence) for finder in sys.meta_path):
        assert packages.isdisjoint(sys.modules), "some were imported before"
        sys.meta_path.insert(0, Absence(packages))


def is_missing(error: BaseException | None) -> bool:
    """Return whether an exception comes of a package that is not installed."""
    while error is not None:
        if isinstance(error, NotInstalledError):
            return True
        error = error.__cause__ or error.__context__
    return False
