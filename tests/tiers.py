"""The tier of a test, by what it needs: small, medium or large, as Google sizes its tests.

- ``small`` needs nothing but this process and SQLite.
- ``medium`` needs real servers or a browser on this machine, for seconds.
- ``large`` needs many processes, or minutes of them.

A tier includes those before it. `pytest` without arguments runs the small tests, `python -m tests`
the medium ones, too, and `python -m tests --all` everything that is not marked ``long``. What is
named (a path, ``-k``, ``-m``) runs whatever its tier, unless ``--tier`` says otherwise.
"""

from __future__ import annotations

from enum import Enum

import pytest


class Tier(Enum):
    SMALL = "small"
    MEDIUM = "medium"
    LARGE = "large"

    def includes(self, other: Tier) -> bool:
        """Return whether a run of this tier has the tests of the other one."""
        return ORDER.index(other) <= ORDER.index(self)


ORDER = list(Tier)
NAMES = {tier.value: tier for tier in Tier}

FOLDERS = {
    "tests/acceptance": Tier.LARGE,
    "tests/api": Tier.MEDIUM,
    "tests/checks": Tier.MEDIUM,
    "tests/clients": Tier.LARGE,
    "tests/cluster": Tier.LARGE,
    "tests/conformance": Tier.MEDIUM,
    "tests/contrib": Tier.MEDIUM,
    "tests/dashboard": Tier.MEDIUM,
    "tests/events": Tier.MEDIUM,
    "tests/faults": Tier.LARGE,
    "tests/kdlq": Tier.MEDIUM,
    "tests/mixed": Tier.LARGE,
    "tests/mutants": Tier.MEDIUM,
    "tests/packaging": Tier.MEDIUM,
    "tests/simulation": Tier.MEDIUM,
    "tests/trace": Tier.MEDIUM,
}
"""The tier of the tests of a folder; those of other folders are small. None of these is."""

SERVERS = frozenset({"kafka", "mariadb", "mysql", "postgres", "redis"})
"""Markers of tests that talk to a server: none of them is small. With ``_server`` behind it, each
is the name of that server's fixture."""


def tier_of(item: pytest.Item) -> Tier:
    """Return the tier of the nearest marker that names one for it, else of its folder."""
    tier = _marked(item) or tier_of_folder(item.nodeid)
    return Tier.MEDIUM if tier is Tier.SMALL and needs_server(item) else tier


def needs_server(item: pytest.Item) -> bool:
    """Return whether a test says that it talks to a server, or has one's fixture."""
    fixtures = getattr(item, "fixturenames", ())
    is_marked = any(map(item.get_closest_marker, SERVERS))
    return is_marked or any(f"{server}_server" in fixtures for server in SERVERS)


def tier_of_folder(path: str) -> Tier:
    """Return the tier of a folder's tests, unless markers say otherwise.

    Args:
        path: of the folder or of what is in it, from the project's root.
    """
    for folder, tier in FOLDERS.items():
        if f"{path}/".startswith(f"{folder}/"):
            return tier
    return Tier.SMALL


def speaks_of(marker: pytest.Mark, item: pytest.Item) -> bool:
    """Return whether a marker of a tier is about this case of a test.

    ``@pytest.mark.medium("real")`` is about each case in whose id ``real`` stands alone or between
    hyphens, and ``@pytest.mark.medium`` about all of them.
    """
    return not marker.args or any(is_case(item, str(name)) for name in marker.args)


def is_case(item: pytest.Item, name: str) -> bool:
    """Return whether a part of a case's id is this one."""
    callspec = getattr(item, "callspec", None)
    return bool(callspec and f"-{name}-" in f"-{callspec.id}-")


def _marked(item: pytest.Item) -> Tier | None:
    for node in reversed(item.listchain()):
        marks = [mark for mark in node.own_markers if mark.name in NAMES and speaks_of(mark, item)]
        if marks:
            # One that names cases knows better; so does a parameter's, which comes after the
            # function's.
            return NAMES[sorted(marks, key=lambda mark: bool(mark.args))[-1].name]
    return None
