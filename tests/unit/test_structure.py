"""Rules about which package may do what."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import kjo_django

ROOT = Path(kjo_django.__file__).parent
SQL = re.compile(
    r"\b(SELECT|UPDATE|INSERT INTO|DELETE FROM|COPY)\s+[\w\"{%(*]+[\s\S]*"
    r"\b(FROM|SET|VALUES|STDIN|WHERE)\b|\bpg_\w+\("
)


def sources() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(ROOT.rglob("*.py")):
        yield str(path.relative_to(ROOT)), ast.parse(path.read_text())


def outside(*packages: str) -> Iterator[tuple[str, ast.Module]]:
    return ((path, tree) for path, tree in sources() if not path.startswith(packages))


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
        for path, tree in outside("store/", "transports/database/", "migrations/")
        if any(map(SQL.search, texts(tree)))
    }
    assert found == set()


def test_only_the_store_and_the_database_transport_ask_which_database_it_is():
    found = {
        path
        for path, tree in outside("store/", "transports/database/", "migrations/")
        if any(isinstance(node, ast.Attribute) and node.attr == "vendor" for node in ast.walk(tree))
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
        for path, tree in outside("engine/handler/")
        if path.startswith("engine/")
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
