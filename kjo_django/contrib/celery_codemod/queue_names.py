"""The names of queues that declarations and calls of tasks use, as texts or by constants."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass

from kjo_django.contrib.celery_codemod.migration_report import Finding
from kjo_django.contrib.celery_codemod.project_index import (
    Module,
    Name,
    ProjectIndex,
    dotted,
    top_level,
)
from kjo_django.contrib.celery_codemod.task_bases import assigned
from kjo_django.contrib.celery_codemod.task_options import Plans

SETTINGS = ("django", "conf", "settings")
CALLS = frozenset({("apply_async",), ("set",)})


@dataclass(frozen=True, slots=True, order=True)
class QueueUse:
    """One place that names a queue."""

    file: str
    line: int
    code: str
    name: str
    """Empty: no value was found."""


def queue_uses(plans: Plans, index: ProjectIndex) -> Iterator[QueueUse]:
    """Yield the uses of queues by declarations, base classes and calls."""
    for module in index.modules:
        finder = _Finder(module, index)
        finder.visit(module.file.tree)
        yield from finder.found
    for module, value in plans.bases.queues:
        yield _use_of(module, index, value)


def unknown_queues(plans: Plans, index: ProjectIndex) -> Iterator[Finding]:
    """Yield what is to be done about queues whose names were not found."""
    for use in sorted({each for each in queue_uses(plans, index) if not each.name}):
        why = "the name of the queue was not found: it is no text, nor a constant of these files"
        yield Finding(use.file, use.line, f"queue={use.code}", why, "name it in KJO['QUEUES']")


class _Finder(ast.NodeVisitor):
    """Finds the queues of one module, where it knows which names are local ones."""

    def __init__(self, module: Module, index: ProjectIndex) -> None:
        self.found: list[QueueUse] = []
        self._module = module
        self._index = index
        self._local: set[str] = set()

    def visit_Call(self, node: ast.Call) -> None:
        """Note the queue of a call that enqueues, or of a decorator."""
        if dotted(node.func)[-1:] in CALLS or self._index.is_task_decorator(self._module, node):
            for keyword in node.keywords:
                if keyword.arg == "queue" and not _is_none(keyword.value):
                    use = _use_of(self._module, self._index, keyword.value, self._local)
                    self.found.append(use)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        """Enter a function, whose decorators belong to what is around it."""
        for each in node.decorator_list:
            self.visit(each)
        around = self._local
        self._local = around | set(_locals(node))
        for statement in node.body:
            self.visit(statement)
        self._local = around

    visit_AsyncFunctionDef = visit_FunctionDef


def _locals(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            yield each.arg
        elif isinstance(each, ast.Name) and not isinstance(each.ctx, ast.Load):
            yield each.id


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _use_of(
    module: Module, index: ProjectIndex, value: ast.expr, local: set[str] | None = None
) -> QueueUse:
    name = value.value if isinstance(value, ast.Constant) else None
    parts = dotted(value)
    if parts and parts[0] not in (local or ()):
        name = _constant(module, index, parts)
    text = name if isinstance(name, str) else ""
    return QueueUse(module.file.shown_path, value.lineno, ast.unparse(value), text)


def _constant(module: Module, index: ProjectIndex, name: Name) -> str | None:
    """Return the text that a dotted name stands for, None if that is not known."""
    origin = module.origin(name)
    if origin[:3] == SETTINGS and len(origin) == 4:
        return _setting(index, origin[3])
    found = index.defined(module, name)
    return _text_of(*found) if found is not None else None


def _setting(index: ProjectIndex, name: str) -> str | None:
    """Return the text of a setting, if all modules of settings that have it say the same."""
    found = {
        _text_of(module, (name,))
        for module in index.modules
        if name in module.names and module.is_settings
    }
    return found.pop() if len(found) == 1 else None


def _text_of(module: Module, name: Name) -> str | None:
    """Return the text that a module, or a class of it, gives to a name, and gives it once."""
    body = list(top_level(module.file.tree.body))
    if len(name) > 1 and name[0] in module.classes:
        body, name = list(top_level(module.classes[name[0]].body)), name[1:]
        name = name[:1] if name[1:] == ("value",) else name
    values = [value for target, value in assigned(body) if (target,) == name]
    value = values[0] if len(values) == 1 else None
    text = value.value if isinstance(value, ast.Constant) else None
    return text if isinstance(text, str) else None
