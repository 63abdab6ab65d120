"""The sizes the package is held to, so that it stays readable.

A feature may raise one of them by a decision that says what it buys.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp

import kjo_django
from kjo_django.garbage_collection import paused

ROOT = Path(kjo_django.__file__).parent
MOST_MODULES = 295
MOST_CLASSES = 591
MOST_CORE_LINES = 29_830
FEATURES = {"limits", "personal_data", "schedules", "workflows"}
"""Packages that came after the redesign; decision 170 says what they buy."""
OUTSIDE_THE_CORE = {"patterns", "admin", "api", "contrib", "testing", "migrations", *FEATURES}


@cache
@paused()
def sources() -> dict[Path, ast.Module]:
    return {
        path.relative_to(ROOT): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
        if "migrations" not in path.parts
    }


def test_the_number_of_modules_stays_bounded():
    assert len(sources()) <= MOST_MODULES


def test_the_number_of_classes_stays_bounded():
    classes = [n for tree in sources().values() for n in ast.walk(tree) if is_class(n)]
    assert len(classes) <= MOST_CLASSES


def test_the_core_stays_within_its_lines_of_code():
    """Docstrings, comments and blank lines do not count."""
    core = [path for path in sources() if path.parts[0] not in OUTSIDE_THE_CORE]
    assert sum(code_lines(path) for path in core) <= MOST_CORE_LINES


def test_no_modules_import_one_another_in_a_circle():
    """Imports that only type checkers see count."""
    graph = grimp.build_graph("kjo_django", cache_dir=None)
    assert list(circles(graph)) == []


def is_class(node: ast.AST) -> bool:
    return isinstance(node, ast.ClassDef)


def code_lines(path: Path) -> int:
    texts = {
        number
        for node in ast.walk(sources()[path])
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate((ROOT / path).read_text().splitlines(), start=1)
    return sum(
        1
        for number, line in lines
        if line.strip() and not line.lstrip().startswith("#") and number not in texts
    )


def circles(graph: grimp.ImportGraph) -> Iterator[set[str]]:
    """Yield the sets of modules each of which imports all others, directly or not (Tarjan)."""
    numbers: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []

    def visit(module: str) -> Iterator[set[str]]:
        numbers[module] = lowest[module] = len(numbers)
        path.append(module)
        for imported in graph.find_modules_directly_imported_by(module):
            if imported not in numbers:
                yield from visit(imported)
                lowest[module] = min(lowest[module], lowest[imported])
            elif imported in path:
                lowest[module] = min(lowest[module], numbers[imported])
        if lowest[module] == numbers[module]:
            found = set(path[path.index(module) :])
            del path[path.index(module) :]
            if len(found) > 1:
                yield found

    for module in sorted(graph.modules):
        if module not in numbers:
            yield from visit(module)
