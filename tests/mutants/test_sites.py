"""Medium, as its folder: they parse texts, and two modules of the package."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants.sites import ROOMS, Change, draw, mutants_of

ROOT = Path(__file__).resolve().parents[2]


def changed(source: str, change: Change) -> list[str]:
    """Return what the mutants of a kind make of a source."""
    text = source.encode()
    mutants = [each for each in mutants_of(text, "m.py") if each.change is change]
    return [each.apply(text).decode() for each in mutants]


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("if a: f = 1", ["if (not (a)): f = 1"]),
        ("if not a: f = 1", ["if (a): f = 1"]),
        ("if (b := a): f = 1", ["if (not (b := a)): f = 1"]),
        ("x = [a for a in b if a and c]", ["x = [a for a in b if (not (a and c))]"]),
        ("x = 1 if a else 2", ["x = 1 if (not (a)) else 2"]),
        ("while a: f = 1", ["while (not (a)): f = 1"]),
        ("while True: f = 1", []),
        ("if TYPE_CHECKING: import a", []),
    ],
)
def test_each_condition_is_negated(source, mutants):
    assert changed(source, Change.NEGATION) == mutants


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("x = a < b", ["x = a <= b"]),
        ("x = 'ä' and a < b <= c", ["x = 'ä' and a <= b <= c", "x = 'ä' and a < b < c"]),
        ("x = (a) >= (b)", ["x = (a) > (b)"]),
        ("x = a[n + 1:]", ["x = a[(n):]"]),
        ("x = a == b", []),
        ("x = a + 2", []),
    ],
)
def test_bounds_are_moved_by_one(source, mutants):
    assert changed(source, Change.BOUND) == mutants


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        ("a.f(1)", ["pass"]),
        ("async def g():\n    await a.f()", ["async def g():\n    pass"]),
        ("x = f()", []),
        ("logger.info('a')", []),
        ("'a text'", []),
    ],
)
def test_calls_whose_value_nobody_takes_are_left_out(source, mutants):
    assert changed(source, Change.CALL) == mutants


@pytest.mark.parametrize(
    ("source", "mutants"),
    [
        (
            "S = 'DELETE FROM t WHERE a = %s AND b IS NULL'",
            [
                "S = 'DELETE FROM t WHERE (a = %s OR 1 = 1) AND b IS NULL'",
                "S = 'DELETE FROM t WHERE a = %s AND (b IS NULL OR 1 = 1)'",
            ],
        ),
        ("S = f'{x} WHERE t.a <= b.c LIMIT 1'", ["S = f'{x} WHERE (t.a <= b.c OR 1 = 1) LIMIT 1'"]),
        ("S = 'WHERE a = ANY(%s)'", []),
        ("S = 'WHERE a = b + 1'", []),
        ("x = rows.filter(a=1, b=2)", ["x = rows.filter( b=2)", "x = rows.filter(a=1, )"]),
    ],
)
def test_conditions_of_statements_are_cut(source, mutants):
    assert changed(source, Change.WHERE) == mutants


def test_mutants_are_drawn_again_by_their_seed():
    first = draw(ROOT, 7, 20)
    assert draw(ROOT, 7, 5) == first[:5]
    assert draw(ROOT, 8, 20) != first
    assert {each.path.split("/")[1] for each in draw(ROOT, 7, 10**6)} == set(ROOMS)


@pytest.mark.parametrize("path", ["engine/scheduler.py", "store/postgres.py"])
def test_every_mutant_of_a_module_can_be_compiled_and_differs(path):
    source = (ROOT / "kjo_django" / path).read_bytes()
    mutants = mutants_of(source, path)
    assert {each.change for each in mutants} >= {Change.NEGATION, Change.CALL}
    for mutant in mutants:
        assert ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
