"""Each requirement has a lowest version, which ``tox -e floors`` installs."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.floors import (
    ITSELF,
    TESTS,
    constraints,
    floors,
    of_this_project,
    parts,
    read,
    requirements,
)

ROOT = Path(__file__).resolve().parents[1]
SHOP: dict[str, Any] = {
    "name": "shop",
    "dependencies": ["django>=5.2"],
    "optional-dependencies": {
        "kafka": ["Confluent-Kafka>=2.9"],
        "registry": ["confluent-kafka[avro, json]>=2.10", "protobuf>=4.22"],
        "all": ["shop[kafka,registry]"],
    },
}


def test_the_constraints_are_the_lowest_versions() -> None:
    """Of two for one package it is the higher, by numbers: 2.9 is less than 2.10."""
    assert constraints(SHOP) == "confluent-kafka==2.10\ndjango==5.2\nprotobuf==4.22\n"


@pytest.mark.parametrize("text", ["django~=5.2", "django>=5,<6", 'django>=5; os_name == "nt"'])
def test_a_requirement_of_another_form_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not of the form"):
        read(text)


@pytest.mark.parametrize(("one", "other"), [("2.1", "2.1.0"), ("1", "1.0.0"), ("2.10", "2.10")])
def test_zeros_at_the_end_make_no_difference(one: str, other: str) -> None:
    assert parts(one) == parts(other)


def test_every_requirement_has_a_lowest_version() -> None:
    wanted = [each for them in requirements(of_this_project()).values() for each in them]
    assert len(wanted) > 10
    assert [each.name for each in wanted if not each.floor] == []


def test_every_extra_has_tests_that_concern_it() -> None:
    assert set(TESTS) == set(requirements(of_this_project()))
    assert ITSELF in TESTS
    paths = {path for them in TESTS.values() for path in them}
    assert [path for path in sorted(paths) if not (ROOT / path).exists()] == []


def test_what_tests_need_goes_as_low() -> None:
    """Or pip would find no versions for ``tox -e floors``."""
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
    lowest = floors(of_this_project())
    both = [each for each in map(read, group) if each.name in lowest]
    assert {each.name for each in both} >= {"libcst", "prometheus-client", "psycopg", "pymysql"}
    assert [each.name for each in both if parts(each.floor) > parts(lowest[each.name])] == []


def test_the_extra_leaves_open_which_psycopg_and_the_tests_have_one() -> None:
    """A project may build psycopg[c]. The README's commands need no libpq."""
    assert [each.extras for each in requirements(of_this_project())["postgres"]] == [()]
    group = tomllib.loads((ROOT / "pyproject.toml").read_text())["dependency-groups"]["test"]
    assert ("binary",) in [read(each).extras for each in group if each.startswith("psycopg[")]
