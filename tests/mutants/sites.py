"""Where a module can be changed so that some test should fail."""

from __future__ import annotations

import ast
import random
import re
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

ROOMS = ("engine", "outbox", "store", "transports", "limits", "workflows")
"""The packages of which mutants are made: those that keep the promises about jobs."""


class Change(StrEnum):
    """What a mutant differs in."""

    NEGATION = "condition negated"
    BOUND = "bound off by one"
    CALL = "call left out"
    WHERE = "condition of a statement cut"


@dataclass(frozen=True)
class Mutant:
    """One change of one module."""

    path: str
    """The module, relative to the repository."""
    line: int
    """The line of the change, from 1."""
    change: Change
    start: int
    """Where the text begins that is replaced, in bytes of the module."""
    end: int
    text: str
    """What replaces it."""

    def apply(self, source: bytes) -> bytes:
        """Return the module with the change."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def before(self, source: bytes) -> str:
        """Return the text that is replaced."""
        return source[self.start : self.end].decode()


def draw(root: Path, seed: int, count: int) -> list[Mutant]:
    """Return mutants of the rooms, drawn evenly from all there are, in the order they were drawn.

    :param root: the repository.
    """
    every = [
        mutant
        for room in ROOMS
        for path in sorted((root / "kjo_django" / room).rglob("*.py"))
        for mutant in mutants_of(path.read_bytes(), path.relative_to(root).as_posix())
    ]
    # Not for cryptography: the same seed is to draw the same mutants, however many are asked for.
    random.Random(seed).shuffle(every)
    return every[:count]


def mutants_of(source: bytes, path: str) -> list[Mutant]:
    """Return all mutants of a module, from its beginning to its end.

    :param path: what the mutants name as their module.
    """
    finder = _Finder(source, path)
    finder.visit(ast.parse(source))
    return sorted(finder.found, key=lambda each: (each.start, each.end, each.change))


_BOUNDS: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
}
_CONDITION = re.compile(
    rb"\b(?:WHERE|AND)\s+"
    rb"((?:\w+\.)?\w+ (?:(?:=|<>|<=|>=|<|>) (?:%s|'[^'\n]*'|[\w.]+)|IS (?:NOT )?NULL))"
    rb"(?![\w.(\[]|::| [-+*/])"
)
"""A condition of a statement in SQL that compares two plain values."""
_FILTERS = frozenset({"filter", "exclude"})
_LOGGERS = frozenset({"logger", "jobs_logger", "logging", "warnings"})


class _Finder(ast.NodeVisitor):
    def __init__(self, source: bytes, path: str) -> None:
        self.found: list[Mutant] = []
        self._source, self._path = source, path
        lengths = [len(line) for line in source.splitlines(keepends=True)]
        self._offsets = [0]
        for length in lengths:
            self._offsets.append(self._offsets[-1] + length)

    # --- Conditions -------------------------------------------------------------------------------

    def visit_If(self, node: ast.If) -> None:
        if not _is_for_type_checkers(node.test):
            self._negate(node.test)
            self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self._negate(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self._negate(condition)
        self.generic_visit(node)

    def _negate(self, condition: ast.expr) -> None:
        start, end = self._span(condition)
        text = self._source[start:end].decode()
        if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
            start_inner, end_inner = self._span(condition.operand)
            text = f"({self._source[start_inner:end_inner].decode()})"
        elif isinstance(condition, ast.NamedExpr):
            text = f"not ({text})"
        else:
            text = f"(not ({text}))"
        self._add(condition.lineno, Change.NEGATION, start, end, text)

    # --- Bounds -----------------------------------------------------------------------------------

    def visit_Compare(self, node: ast.Compare) -> None:
        left: ast.expr = node.left
        for operator, right in zip(node.ops, node.comparators, strict=True):
            if signs := _BOUNDS.get(type(operator)):
                before, after = signs
                start = self._source.index(before.encode(), self._span(left)[1])
                self._add(left.lineno, Change.BOUND, start, start + len(before), after)
            left = right
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_one = isinstance(node.right, ast.Constant) and node.right.value == 1
        if is_one and isinstance(node.op, ast.Add | ast.Sub):
            start, end = self._span(node)
            inner_start, inner_end = self._span(node.left)
            text = f"({self._source[inner_start:inner_end].decode()})"
            self._add(node.lineno, Change.BOUND, start, end, text)
        self.generic_visit(node)

    # --- Calls ------------------------------------------------------------------------------------

    def visit_Expr(self, node: ast.Expr) -> None:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(call, ast.Call) and not _is_of_log(call):
            self._add(node.lineno, Change.CALL, *self._span(node), "pass")
        if not isinstance(call, ast.Constant):  # no docstrings
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        if isinstance(node.func, ast.Attribute) and node.func.attr in _FILTERS:
            for keyword in node.keywords:
                if keyword.arg is not None:
                    self._cut(keyword)
        self.generic_visit(node)

    def _cut(self, keyword: ast.keyword) -> None:
        """Leave a condition out of a query of Django's."""
        start, end = self._span(keyword)
        following = re.compile(rb"\s*,").match(self._source, end)
        self._add(keyword.lineno, Change.WHERE, start, following.end() if following else end, "")

    # --- Statements -------------------------------------------------------------------------------

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self._cut_text(node)

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        self._cut_text(node)

    def _cut_text(self, node: ast.expr) -> None:
        """Make a condition of a statement true, with the parameters it has."""
        start, end = self._span(node)
        for match in _CONDITION.finditer(self._source, start, end):
            line = self._source.count(b"\n", 0, match.start(1)) + 1
            text = f"({match[1].decode()} OR 1 = 1)"
            self._add(line, Change.WHERE, *match.span(1), text)

    # ----------------------------------------------------------------------------------------------

    def _span(self, node: ast.expr | ast.stmt | ast.keyword) -> tuple[int, int]:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self._offsets[node.lineno - 1] + node.col_offset
        return start, self._offsets[node.end_lineno - 1] + node.end_col_offset

    def _add(self, line: int, change: Change, start: int, end: int, text: str) -> None:
        self.found.append(Mutant(self._path, line, change, start, end, text))


def _is_for_type_checkers(condition: ast.expr) -> bool:
    return isinstance(condition, ast.Name) and condition.id == "TYPE_CHECKING"


def _is_of_log(call: ast.Call) -> bool:
    names = [node.id for node in ast.walk(call.func) if isinstance(node, ast.Name)]
    return bool(_LOGGERS.intersection(names))
