"""Imports: those of Celery that nothing uses any more go, those of ``kjo_django`` come."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from kjo_django.contrib.celery_codemod.edits import FileEdits, Planner, dotted_name
from kjo_django.contrib.celery_codemod.project_index import Name

RENAMED = {
    "SoftTimeLimitExceeded": ("kjo_django.exceptions", "HandlerTimeout"),
    "Retry": ("kjo_django", "Retry"),
}
"""Exceptions of Celery, and those that stand for them."""
LEFT_TO_DO = "delete it when the last task has moved, with celery.py and what imports it"
NEEDED_NO_MORE = {
    ("functools", "partial"),
    ("django", "db", "transaction"),
    ("django", "db", "transaction", "on_commit"),
    ("asgiref", "sync", "sync_to_async"),
    ("django", "test", "override_settings"),
    ("django", "test", "utils", "override_settings"),
}
"""What calls of tasks were written with: its import goes if the rewrite leaves no use of it."""


class NamePlanner(Planner):
    """Plans the edits of Celery's exceptions and of its logger."""

    def visit_Call(self, node: cst.Call) -> None:
        """Plan ``get_task_logger(…)`` as ``logging.getLogger(…)``."""
        if self.is_celery(node.func, "get_task_logger"):
            self.file.change(node.func, self._get_logger)

    def _get_logger(self, updated: Any) -> cst.Attribute:
        return cst.Attribute(cst.Name(self.file.use("logging")), cst.Name("getLogger"))

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        """Leave imports to ``with_imports``."""
        return False

    def visit_Name(self, node: cst.Name) -> None:
        """Plan the name of an exception."""
        origin = self.origin_of(node)
        if origin[:1] == ("celery",) and origin[-1] in RENAMED and len(origin) == 3:
            module, name = RENAMED[origin[-1]]
            self.file.change(
                node, lambda updated: updated.with_changes(value=self.file.use(module, name))
            )

    def visit_Attribute(self, node: cst.Attribute) -> bool | None:
        """Plan ``celery.exceptions.…``; the name after a dot is no name of its own."""
        super().visit_Attribute(node)
        origin = self.origin_of(node)
        if origin[:2] == ("celery", "exceptions") and origin[-1] in RENAMED:
            module, name = RENAMED[origin[-1]]
            self.file.change(node, lambda updated: cst.Name(self.file.use(module, name)))
            return False
        node.value.visit(self)
        return False


def with_imports(edited: cst.Module, before: cst.Module, file: FileEdits) -> cst.Module:
    """Return an edited tree with the imports that it needs, and without those of Celery that it
    does not use.

    :param before: the tree as it was.
    """
    new = {local for _, _, local in file.imports}
    used, used_before = names_in(edited), names_in(before)
    goes = {
        local
        for local, origin in file.module.imports.items()
        if (local not in used or (local in new and origin[0] == "celery"))
        and (origin[0] == "celery" or (local in used_before and _may_go(local, origin, file)))
    }
    body: list[Any] = list(edited.body)
    for module, names in _merged(file.imports):
        _insert(body, module, names, file)
    made = edited.with_changes(body=body).visit(_ImportRemover(goes))
    assert isinstance(made, cst.Module)
    return _from_the_top(made, before)


def _from_the_top(tree: cst.Module, before: cst.Module) -> cst.Module:
    """Return a tree that does not begin with a blank line because its first import has gone."""
    first: Any = tree.body[0] if tree.body else None
    lines = list(getattr(first, "leading_lines", []))
    if not lines or lines[0].comment is not None or getattr(before.body[0], "leading_lines", []):
        return tree
    return tree.with_changes(body=[first.with_changes(leading_lines=lines[1:]), *tree.body[1:]])


def _may_go(local: str, origin: Name, file: FileEdits) -> bool:
    if origin in NEEDED_NO_MORE or file.index.is_app(file.module, (local,)):
        return True
    found = file.index.defined_anywhere(file.module, (local,))
    return found is not None and bool(file.plans.bases.users(found[0], found[1][-1]))


def left_import(tree: cst.Module) -> bool:
    """Return whether a module imports Celery."""
    return any(_is_of_celery(each) for each in m.findall(tree, m.Import() | m.ImportFrom()))


def _is_of_celery(node: cst.CSTNode) -> bool:
    if isinstance(node, cst.ImportFrom):
        name = dotted_name(node.module) if node.module is not None and not node.relative else ()
        return name[:1] == ("celery",)
    return isinstance(node, cst.Import) and any(
        dotted_name(alias.name)[0] == "celery" for alias in node.names
    )


# --- What goes ------------------------------------------------------------------------------------


def names_in(tree: cst.Module) -> set[str]:
    """Return the names that are used outside of imports."""
    collector = _NameCollector()
    tree.visit(collector)
    return collector.found


class _NameCollector(cst.CSTVisitor):
    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def visit_Import(self, node: cst.Import) -> bool:
        return False

    def visit_ImportFrom(self, node: cst.ImportFrom) -> bool:
        return False

    def visit_Attribute(self, node: cst.Attribute) -> bool:
        node.value.visit(self)
        return False

    def visit_Arg(self, node: cst.Arg) -> bool:
        node.value.visit(self)
        return False

    def visit_Name(self, node: cst.Name) -> None:
        self.found.add(node.value)


class _ImportRemover(cst.CSTTransformer):
    """Removes what imports bind names that are not used any more."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self._names = names
        self._lines: Sequence[cst.EmptyLine] = ()

    def leave_ImportFrom(self, original_node: cst.ImportFrom, updated_node: cst.ImportFrom) -> Any:
        names = updated_node.names
        is_own = dotted_name(updated_node.module or cst.Name("_"))[:1] == ("kjo_django",)
        if isinstance(names, cst.ImportStar) or (is_own and not updated_node.relative):
            return updated_node
        return self._without(updated_node, [a for a in names if _local(a) not in self._names])

    def leave_Import(self, original_node: cst.Import, updated_node: cst.Import) -> Any:
        kept = [each for each in updated_node.names if _local(each) not in self._names]
        return self._without(updated_node, kept)

    @staticmethod
    def _without(node: Any, kept: list[cst.ImportAlias]) -> Any:
        if len(kept) == len(node.names):
            return node
        if not kept:
            return cst.RemoveFromParent()
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
        return node.with_changes(names=kept)

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> Any:
        """Give blank lines and comments above a statement that goes to the one that follows."""
        if not updated_node.body:
            self._lines = self._lines or original_node.leading_lines
            return cst.RemoveFromParent()
        lines, self._lines = self._lines, ()
        if lines and not updated_node.leading_lines:
            return updated_node.with_changes(leading_lines=lines)
        return updated_node


def _local(alias: cst.ImportAlias) -> str:
    if alias.asname is not None and isinstance(alias.asname.name, cst.Name):
        return alias.asname.name.value
    return dotted_name(alias.name)[0]


# --- What comes -----------------------------------------------------------------------------------


def _merged(imports: Iterable[tuple[str, str, str]]) -> list[tuple[str, list[str]]]:
    """Return the modules to import from, each with its names as an import lists them."""
    found: dict[str, list[str]] = {}
    for module, name, local in sorted(imports):
        names = found.setdefault(module, [])
        if name:
            names.append(name if name == local else f"{name} as {local}")
    return list(found.items())


def _insert(body: list[Any], module: str, names: list[str], file: FileEdits) -> None:
    """Insert an import where a formatter would have it: among those of its kind, by its name."""
    code = f"from {module} import {', '.join(names)}\n" if names else f"import {module}\n"
    line: Any = cst.parse_module(code).body[0]
    kind, key = _kind(module, file), (bool(names), module)
    kinds = {
        place: _kind(_module_of(each), file) for place, each in enumerate(body) if _is_import(each)
    }
    same = [place for place in kinds if kinds[place] == kind]
    after = [place for place in same if _key(body[place]) < key]
    if after:
        body.insert(after[-1] + 1, line)
    elif same:
        first = body[same[0]]
        body[same[0]] = first.with_changes(leading_lines=())
        body.insert(same[0], line.with_changes(leading_lines=first.leading_lines))
    else:
        earlier = [place for place in kinds if kinds[place] < kind]
        place = earlier[-1] + 1 if earlier else next(iter(kinds), _after_docstring(body))
        _insert_apart(body, place, line)


def _insert_apart(body: list[Any], place: int, line: Any) -> None:
    """Insert a line as a section of its own."""
    blank = [cst.EmptyLine(indent=False)]
    if place < len(body) and not body[place].leading_lines:
        body[place] = body[place].with_changes(leading_lines=blank)
    body.insert(place, line.with_changes(leading_lines=blank) if place else line)


def _is_import(node: Any) -> bool:
    is_line = isinstance(node, cst.SimpleStatementLine) and bool(node.body)
    return is_line and isinstance(node.body[0], (cst.Import, cst.ImportFrom))


def _module_of(node: Any) -> str:
    """Return the module that a line imports; ``.`` for one of its own package."""
    statement = node.body[0]
    if isinstance(statement, cst.Import):
        return ".".join(dotted_name(statement.names[0].name))
    if statement.relative or statement.module is None:
        return "."
    return ".".join(dotted_name(statement.module))


def _key(node: Any) -> tuple[bool, str]:
    return isinstance(node.body[0], cst.ImportFrom), _module_of(node)


def _kind(module: str, file: FileEdits) -> int:
    """Return the section of an import: of the future, Python's own, others', the project's."""
    root = module.partition(".")[0]
    if root == "__future__":
        return 0
    if not root or any(each.parts[:1] == (root,) for each in file.index.modules):
        return 3
    return 1 if root in sys.stdlib_module_names else 2


def _after_docstring(body: Sequence[Any]) -> int:
    first = body[0] if body else None
    if not isinstance(first, cst.SimpleStatementLine):
        return 0
    return 1 if isinstance(first.body[0], cst.Expr) else 0
