"""The rules that keep the package readable: names, docstrings, and which package may do what.

A name is the noun of the field, as a manual of Kafka, PostgreSQL or Django has it, and no metaphor.
No two modules have one name. A docstring is understood without its neighbour. What does not hold
yet is listed here, by its room; the lists only ever get shorter.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import kjo_django
from kjo_django.garbage_collection import paused

pytestmark = pytest.mark.medium

ROOT = Path(kjo_django.__file__).parent

METAPHORS = {
    *("aside", "buried", "bury", "flies", "flight", "flights", "fly", "flying", "goodbye"),
    *("hand", "hands", "notes", "rest", "rested", "resting", "rests", "said", "say", "saying"),
    *("says", "silence", "sortie", "suspect", "suspects", "tell", "teller", "telling", "tells"),
    *("told", "turn", "turns", "unburied", "wish", "wished", "wishes", "wishing", "word", "words"),
}
NOUNS_OF_THE_FIELD = {"RestSchema", "_words", "in_words"}
"""Names that only look like one of these: REST is an interface, and texts have words."""

REQUIREMENT = re.compile(r"\b(KJO|PJQ|KII|RST|KDLQ)-F?\d+")

ROLES = {"__init__", "__main__", "apps", "base", "checks", "urls", "views"}
"""Names of modules that Django gives, or that hold what a package's other modules share."""
PARALLEL = (
    r"transports\.\w+",
    r"patterns\.\w+",
    r"(admin|admin\.dashboard|api|operations(\.\w+)?)",
    r"(worker|testing)(\.\w+)?",
    r"contrib\.\w+",
)
"""Packages that do the like for different things: a transport, a pattern, an interface. A role or a
resource has one name in all of them."""
STILL_TWICE = {
    *("definition", "events", "handlers", "headers", "jobs", "publishing", "rows"),
}


@cache
@paused()
def modules() -> dict[str, ast.Module]:
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): ast.parse(path.read_text())
        for path in sorted(ROOT.rglob("*.py"))
        if "migrations" not in path.parts
    }


def source(module: str) -> str:
    return ROOT.joinpath(*module.split(".")).with_suffix(".py").read_text()


def test_names_are_no_metaphors():
    found = {
        f"{module}: {name}"
        for module, name in names()
        if METAPHORS & words_of(name) and name not in NOUNS_OF_THE_FIELD
    }
    assert not found, "use the noun of the field, see docs/how-to/contributing.md"


def test_docstrings_do_not_begin_with_the_same():
    found = {
        f"{module}:{node.lineno}"
        for module, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and str(node.value.value).lstrip().startswith("The same")
    }
    assert not found, "say what it is or does, for readers who see only this docstring"


def test_requirement_ids_are_for_tests_and_decisions():
    found = {
        f"{module}: {match[0]}"
        for module in modules()
        for match in REQUIREMENT.finditer(source(module))
    }
    assert not found, "an IDE shows docstrings to users, who do not know these ids"


def test_no_two_modules_have_one_name():
    packages = defaultdict(set)
    for module in modules():
        package, _, name = module.rpartition(".")
        if name not in ROLES | STILL_TWICE:
            packages[name].add(package)
    twice = {name: found for name, found in packages.items() if not are_parallel(found)}
    assert not twice, "name each after what only it holds"


def names() -> Iterator[tuple[str, str]]:
    """Every module, class and function of the package, but tests of the conformance suites."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for module, tree in modules().items():
        yield module, module.rpartition(".")[2]
        for node in ast.walk(tree):
            if isinstance(node, kinds) and not node.name.startswith("test_"):
                yield module, node.name


def words_of(name: str) -> set[str]:
    return {word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)}


def are_parallel(packages: set[str]) -> bool:
    return len(packages) == 1 or any(
        all(re.fullmatch(pattern, package) for package in packages) for pattern in PARALLEL
    )


# --- Which package may do what --------------------------------------------------------------------

SQL = re.compile(
    r"\b(SELECT|UPDATE|INSERT INTO|DELETE FROM|COPY)\s+[\w\"{%(*]+[\s\S]*"
    r"\b(FROM|SET|VALUES|STDIN|WHERE)\b|\bpg_\w+\("
)


def outside(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    return ((path, tree) for path, tree in modules().items() if not path.startswith(packages))


def texts(tree: ast.Module) -> Iterator[str]:
    """Return all strings but docstrings, f-strings with their fields left out."""
    statements = (node for node in ast.walk(tree) if isinstance(node, ast.Expr))
    documentation = {id(statement.value) for statement in statements}
    for node in ast.walk(tree):
        if id(node) in documentation:
            continue
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "%s" for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_only_the_store_and_the_database_transport_write_sql():
    found = {
        path
        for path, tree in outside("store.", "transports.database.")
        if any(map(SQL.search, texts(tree)))
    }
    assert found == set()


def test_only_the_store_and_the_database_transport_ask_which_database_it_is():
    found = {
        path
        for path, tree in outside("store.", "transports.database.")
        if any(isinstance(node, ast.Attribute) and node.attr == "vendor" for node in ast.walk(tree))
    }
    assert found == set()


def test_only_the_store_inserts_what_may_be_there():
    """By ``insert_missing``: what Django does on MariaDB cuts off values that are too long."""
    found = {
        path
        for path, tree in outside("store.")
        if any(
            isinstance(node, ast.keyword)
            and node.arg == "ignore_conflicts"
            and not path.startswith("enqueue.storing")  # the store's own insert_jobs
            for node in ast.walk(tree)
        )
    }
    assert found == set()


INTERNALS = {
    *("atomic_blocks", "autocommit", "closed_in_transaction", "errors_occurred", "in_atomic_block"),
    *("needs_rollback", "run_on_commit", "savepoint_ids"),
}
"""What Django does not document of a connection."""


def test_in_the_engine_only_its_handler_package_touches_the_internals_of_a_connection():
    found = {
        f"{path}: {node.attr}"
        for path, tree in outside("engine.handler.")
        if path.startswith("engine.")
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in INTERNALS
    }
    assert found == set()


def test_sql_is_recognised():
    for text in (
        "SELECT id FROM kjo_job",
        "UPDATE kjo_job SET state = %s",
        "INSERT INTO kjo_lease (name) VALUES (%s)",
        "DELETE FROM kjo_lease WHERE name = %s",
        'COPY kjo_job ("id") FROM STDIN',
        "\nWITH free AS (SELECT id FROM kjo_job FOR UPDATE)",
        "SELECT pg_backend_pid()",
    ):
        assert SQL.search(text), text
