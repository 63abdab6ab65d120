"""What in the source of a test makes its verdict depend on how quick the machine is."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Iterator
from typing import NamedTuple

from kjo_django.garbage_collection import paused
from tests.waiting import PATIENCE

ARITHMETIC = {"abs", "float", "int", "max", "mean", "median", "min", "round", "sorted", "sum"}
"""Functions whose answer is a time where they are given one."""
CLOCKS = {"monotonic", "perf_counter", "time", "monotonic_ns", "perf_counter_ns", "time_ns"}
"""Functions of the module ``time`` that tell the real time."""
IMPORTS_TIME = re.compile(r"^\s*(import .*\btime\b|from time import )", re.MULTILINE)
SLEEP_REASON = re.compile(r"#\s*sleep: \S")
"""Ends the line of a sleep, and says what it is for."""
LOOP_REASON = re.compile(r"#\s*timed loop: \S")
"""Ends the line of a loop that looks at the clock, or is before it, and says why it is no wait for
a state."""
MOMENT = re.compile(r"\bnow\(\)\s*\+")
"""A moment to come."""
WAITS = {"join", "result", "wait"}
"""Methods of threads, processes, events and futures that wait for so many seconds."""
WAITS_SECONDS = re.compile(rf"\.({'|'.join(sorted(WAITS))})\(\d")
ELAPSED = (
    "asserts that little real time has passed: set a clock, wait for an event, or mark it long"
)
SLEEP = "sleeps: wait for what it is about, or end the line with '# sleep: ' and the reason"
DEADLINE = "waits with a deadline of its own: give tests.waiting.PATIENCE"
LOOP = "waits in a loop of its own: tests.waiting.wait_until, or '# timed loop: ' and the reason"


class Finding(NamedTuple):
    line: int
    problem: str

    def __str__(self) -> str:
        return f"line {self.line} {self.problem}"


def findings(source: str, measuring: Collection[str] = ()) -> list[Finding]:
    """Return what is wrong with the source of a module of the tests.

    :param measuring: names of functions, of any module, that return how much time has passed.
    """
    is_about_time = _is_about_time(source, measuring) or bool(MOMENT.search(source))
    if not is_about_time and not WAITS_SECONDS.search(source):
        return []
    return sorted(_Module(source, measuring, is_about_time).findings())


def measuring_functions(sources: Collection[str]) -> set[str]:
    """Return the names of the functions in modules that return how much time has passed, by
    themselves or by one another."""
    found: set[str] = set()
    while (
        more := {
            name
            for source in sources
            if _is_about_time(source, found)
            for name in _Module(source, found).measuring()
        }
        - found
    ):
        found |= more
    return found


def _is_about_time(source: str, measuring: Collection[str]) -> bool:
    return bool(IMPORTS_TIME.search(source)) or any(name in source for name in measuring)


@functools.cache
@paused()
def _parsed(source: str) -> tuple[ast.Module, list[ast.AST]]:
    """Return a module's tree, and all its nodes: each is looked at several times."""
    tree = ast.parse(source)
    return tree, list(ast.walk(tree))


class _Module:
    def __init__(
        self, source: str, measuring: Collection[str] = (), is_about_time: bool = True
    ) -> None:
        self._is_about_time = is_about_time
        self._measuring = measuring
        self._tree, self._nodes = _parsed(source)
        self._lines = source.splitlines()
        self._names = {
            each.asname or each.name: each.name
            for node in self._nodes
            if isinstance(node, ast.ImportFrom) and node.module == "time"
            for each in node.names
        }
        """Functions of ``time`` that were imported from it, by the name they have here."""

    def findings(self) -> Iterator[Finding]:
        if self._is_about_time and not any(map(_is_long, _marks_of(self._tree))):
            yield from self._elapsed(self._tree)
        for node in self._nodes:
            if self._sleeps(node):
                yield Finding(node.lineno, SLEEP)  # type: ignore[attr-defined]
            elif self._has_own_deadline(node):
                yield Finding(node.lineno, DEADLINE)  # type: ignore[attr-defined]
            elif isinstance(node, ast.While) and self._looks_at_clock(node):
                yield Finding(node.lineno, LOOP)

    def measuring(self) -> Iterator[str]:
        for function in self._nodes:
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                differences = [
                    node.value
                    for node in _of_same_function(function)
                    if isinstance(node, ast.Return) and self._is_difference(node.value)
                ]
                names = self._told_by_clock(function) if differences else set()
                if any(self._is_of_clock(each, names) for each in differences):
                    yield function.name

    def _is_difference(self, value: ast.expr | None) -> bool:
        """Return whether a value is a difference, or what a function that measures has returned."""
        if isinstance(value, ast.Call):
            return self._called(value) in self._measuring
        return isinstance(value, ast.BinOp) and isinstance(value.op, ast.Sub)

    @staticmethod
    def _called(call: ast.Call) -> str:
        name: str = getattr(call.func, "attr", getattr(call.func, "id", ""))
        return name

    def _function(self, call: ast.Call) -> str:
        """Return which function of ``time`` is called, or ""."""
        match call.func:
            case ast.Attribute(value=ast.Name(id="time"), attr=name):
                return name
            case ast.Name(id=name):
                return self._names.get(name, "")
        return ""

    def _tells_time(self, node: ast.AST) -> bool:
        if not isinstance(node, ast.Call):
            return False
        return self._function(node) in CLOCKS or self._called(node) in self._measuring

    def _sleeps(self, node: ast.AST) -> bool:
        """Return whether a node is a sleep without its reason."""
        if not isinstance(node, ast.Call) or self._function(node) != "sleep":
            return False
        numbers = range(node.lineno, (node.end_lineno or node.lineno) + 1)
        return not any(SLEEP_REASON.search(self._lines[number - 1]) for number in numbers)

    @staticmethod
    def _has_own_deadline(node: ast.AST) -> bool:
        """Return whether a call waits for some seconds. Who waits for less than two wants nothing
        to come."""
        match node:
            case ast.Call(
                func=ast.Attribute(attr=attr),
                args=[ast.Constant(value=int() | float() as seconds)],
                keywords=[],
            ):
                return attr in WAITS and 2 <= seconds < PATIENCE
        return False

    def _looks_at_clock(self, loop: ast.While) -> bool:
        """Return whether a loop compares the real time with something, or sleeps between two looks,
        and does not say why."""
        if any(map(LOOP_REASON.search, self._lines[max(0, loop.lineno - 2) : loop.lineno])):
            return False
        return any(
            self._sleeps(node)
            or (isinstance(node, ast.Compare) and any(map(self._tells_time, ast.walk(node))))
            for node in _of_same_function(loop)
        )

    # --- Assertions -------------------------------------------------------------------------------

    def _elapsed(self, scope: ast.AST) -> Iterator[Finding]:
        """Yield the assertions on what a clock has told, and those that something was before a
        moment to come, in a function and in those within it."""
        names, moments = self._told_by_clock(scope), _moments(scope)
        for node in _of_same_function(scope):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                if not any(map(_is_long, node.decorator_list)):
                    yield from self._elapsed(node)
            elif isinstance(node, ast.Assert):
                compared = [each for each in ast.walk(node.test) if isinstance(each, ast.Compare)]
                if any(
                    self._limits_time(each, names) or _is_before(each, moments) for each in compared
                ):
                    yield Finding(node.lineno, ELAPSED)

    def _limits_time(self, compare: ast.Compare, names: set[str]) -> bool:
        """Return whether a comparison says that no more than so much time has passed. That at least
        so much has holds on a slow machine, too, and so does that something was between two looks
        at the clock."""
        operands = [compare.left, *compare.comparators]
        told = [self._is_of_clock(each, names) for each in operands]
        if len(told) == 3 and told == [True, False, True]:
            return False
        for at, operator in enumerate(compare.ops):
            if isinstance(operator, ast.Lt | ast.LtE) and told[at]:
                return True
            # Else something happened after a moment that the clock has told.
            is_limit = told[at] or isinstance(operands[at], ast.Constant)
            if isinstance(operator, ast.Gt | ast.GtE) and told[at + 1] and is_limit:
                return True
        return False

    def _told_by_clock(self, scope: ast.AST) -> set[str]:
        """Return the names that hold what a clock has told, or what was computed with that."""
        found: set[str] = set()
        assigned = [(_targets(node), node) for node in _of_same_function(scope)]
        while (
            more := {
                name
                for names, node in assigned
                if names and self._is_of_clock(_value(node), found)
                for name in names
            }
            - found
        ):
            found |= more
        return found

    def _is_of_clock(self, node: ast.AST | None, names: set[str]) -> bool:
        """Return whether a value is what a clock has told, or computed with that. The answer of a
        call that is given the time is something else."""
        match node:
            case None:
                return False
            case ast.Call(args=arguments) if not self._tells_time(node):
                is_arithmetic = self._called(node) in ARITHMETIC
                return is_arithmetic and any(self._is_of_clock(one, names) for one in arguments)
            case ast.Name(id=name):
                return name in names
        children = ast.iter_child_nodes(node)
        return self._tells_time(node) or any(self._is_of_clock(one, names) for one in children)


def _moments(scope: ast.AST) -> set[str]:
    """Return the names that hold the present and some time more."""
    return {
        name
        for node in _of_same_function(scope)
        if isinstance(node, ast.Assign) and _is_to_come(node.value, ())
        for name in _targets(node)
    }


def _is_to_come(node: ast.AST, moments: Collection[str]) -> bool:
    """Return whether a value is a moment to come."""
    each = list(ast.walk(node))
    is_sum = isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add)
    tells_time = any(isinstance(one, ast.Attribute) and one.attr == "now" for one in each)
    is_named = any(isinstance(one, ast.Name) and one.id in moments for one in each)
    return is_named or (is_sum and tells_time)


def _is_before(compare: ast.Compare, moments: Collection[str]) -> bool:
    """Return whether a comparison says that something was before a moment to come."""
    operands = [compare.left, *compare.comparators]
    comes = [_is_to_come(each, moments) for each in operands]
    for at, operator in enumerate(compare.ops):
        before, after = comes[at : at + 2]
        if isinstance(operator, ast.Lt | ast.LtE) and after and not before:
            return True
        if isinstance(operator, ast.Gt | ast.GtE) and before and not after:
            return True
    return False


def _of_same_function(scope: ast.AST) -> Iterator[ast.AST]:
    """Yield what is in a function, with the definitions in it but without what is in those."""
    for child in ast.iter_child_nodes(scope):
        yield child
        if not isinstance(
            child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda
        ):
            yield from _of_same_function(child)


def _targets(node: ast.AST) -> list[str]:
    """Return the names that a statement or expression gives a value to."""
    match node:
        case ast.Assign(targets=targets):
            found = targets
        case ast.NamedExpr(target=target) | ast.AnnAssign(target=target):
            found = [target]
        case ast.For(target=target) | ast.comprehension(target=target):
            found = [target]
        case _:
            return []
    return [each.id for one in found for each in ast.walk(one) if isinstance(each, ast.Name)]


def _value(node: ast.AST) -> ast.expr | None:
    """Return what a statement or expression gives to names."""
    value: ast.expr | None = getattr(node, "value", getattr(node, "iter", None))
    return value


def _marks_of(tree: ast.Module) -> list[ast.expr]:
    """Return the marks that a module gives all its tests."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and _targets(node) == ["pytestmark"]:
            return node.value.elts if isinstance(node.value, ast.List) else [node.value]
    return []


def _is_long(mark: ast.expr) -> bool:
    """Return whether a decorator is ``pytest.mark.long``."""
    return isinstance(mark, ast.Attribute) and mark.attr == "long"
