"""Planned edits of one file: planners look at its tree, and all edits are made in one pass.

An edit is a function of a node whose children have been edited already; it returns what takes the
node's place.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import libcst as cst
from libcst.metadata import CodeRange

from kjo_django.contrib.celery_codemod.migration_report import Finding
from kjo_django.contrib.celery_codemod.project_index import Module, Name, ProjectIndex, Task
from kjo_django.contrib.celery_codemod.task_options import Plans

Edit = Callable[[Any], Any]
REPLACED = frozenset({"celery", "django_celery_beat", "django_celery_results"})
"""Packages whose imports go, so that names that they bind are free."""


class CannotRewriteError(Exception):
    """A use of Celery that is left as it is.

    :param why: what stands against it.
    :param to_do: what a person writes instead.
    """

    def __init__(self, why: str, to_do: str) -> None:
        super().__init__(why)
        self.why = why
        self.to_do = to_do


@dataclass(slots=True, eq=False)
class FileEdits:
    """What is known of one file and what becomes of it."""

    module: Module
    index: ProjectIndex
    plans: Plans
    positions: Mapping[cst.CSTNode, CodeRange]
    is_test: bool
    edits: dict[cst.CSTNode, list[Edit]] = field(default_factory=lambda: defaultdict(list))
    findings: list[Finding] = field(default_factory=list)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    imports: set[tuple[str, str, str]] = field(default_factory=set)
    """Module, name and local name of what edits use; no name: the module itself."""
    kept_names: set[str] = field(default_factory=set)
    """Names of Celery that code which is left goes on to use."""
    bound: dict[cst.CSTNode, frozenset[str]] = field(default_factory=dict)
    """Names that are bound in functions, imports apart."""
    done: set[cst.CSTNode] = field(default_factory=set)
    """Nodes that a planner has dealt with, for those that come after it."""

    def line(self, node: cst.CSTNode) -> int:
        """Return the line that a node begins in."""
        return self.positions[node].start.line

    def change(self, node: cst.CSTNode, edit: Edit, kind: str = "") -> None:
        """Plan an edit, and count it as one of ``kind``."""
        self.edits[node].append(edit)
        if kind:
            self.counts[kind, "changed"] += 1

    def leave(self, node: cst.CSTNode, kind: str, what: str, why: str, to_do: str) -> None:
        """Report code that is left as it is, and count it as one of ``kind``, if that is given."""
        if kind:
            self.counts[kind, "left"] += 1
        self.findings.append(
            Finding(self.module.file.shown_path, self.line(node), what, why, to_do, True)
        )

    def remark(self, line: int, what: str, why: str, to_do: str) -> None:
        """Report what is to be known of code that was changed, or need not change."""
        self.findings.append(Finding(self.module.file.shown_path, line, what, why, to_do, False))

    def use(self, module: str, name: str = "") -> str:
        """Return the name by which the file has ``name`` of a module, imported if need be.

        :param name: none: the module itself, which has no dots then.
        """
        wanted = name or module
        origin = (*module.split("."), name) if name else (module,)
        for local, path in self.module.imports.items():
            if path == origin and local not in self.kept_names:
                return local
        bound = self.module.imports.get(wanted)
        is_free = wanted not in self.module.names and bound is None
        if bound is not None and bound[0] in REPLACED:
            is_free = wanted not in self.kept_names
        local = wanted if is_free else f"{module.split('.')[0]}_{wanted}"
        self.imports.add((module, name, local))
        return local

    def applied(self, tree: cst.Module) -> cst.Module:
        """Return the tree with all edits made."""
        edited = tree.visit(_Editor(self.edits))
        assert isinstance(edited, cst.Module)
        return edited


class _Editor(cst.CSTTransformer):
    def __init__(self, edits: Mapping[cst.CSTNode, Sequence[Edit]]) -> None:
        super().__init__()
        self._edits = edits

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        updated: Any = super().on_leave(original_node, updated_node)
        for edit in self._edits.get(original_node, ()):
            updated = edit(updated)
        return updated


@dataclass(slots=True, eq=False)
class Scope:
    """A function, a lambda or the module around a node."""

    node: cst.CSTNode
    parameters: frozenset[str] = frozenset()
    is_async: bool = False
    bound_task: Task | None = None
    """The task whose ``self`` is known within."""


class Planner(cst.CSTVisitor):
    """Looks at a tree, knowing which function it is in, and plans edits."""

    def __init__(self, file: FileEdits, tree: cst.Module) -> None:
        super().__init__()
        self.file = file
        self.scopes = [Scope(tree)]
        self.bases: set[cst.CSTNode] = set()
        """Calls of which an attribute is asked or that are called: an await there has brackets."""
        self.generators = 0
        """Generator expressions around a node: an await there makes an asynchronous one."""

    @property
    def scope(self) -> Scope:
        """The innermost function."""
        return self.scopes[-1]

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool | None:
        """Enter a function; its decorators and defaults belong to what is around it."""
        for part in (*node.decorators, node.params, *([node.returns] if node.returns else [])):
            part.visit(self)
        task = self.file.module.tasks.get(node.name.value) if len(self.scopes) == 1 else None
        bound = task if task is not None and task.is_bound else self.scope.bound_task
        if node not in self.file.bound:
            self.file.bound[node] = frozenset(_bound_in(node.body))
        parameters = names_of(node.params) | self.file.bound[node]
        if task is None and bound is not None and bound.self_name in parameters:
            bound = None
        self.scopes.append(Scope(node, parameters, node.asynchronous is not None, bound))
        self.enter_function(node)
        node.body.visit(self)
        self.scopes.pop()
        return False

    def visit_ClassDef(self, node: cst.ClassDef) -> bool | None:
        """Enter a class, whose methods are no tasks."""
        self.scopes.append(Scope(node))
        return None

    def leave_ClassDef(self, original_node: cst.ClassDef) -> None:
        """Leave a class."""
        self.scopes.pop()

    def enter_function(self, node: cst.FunctionDef) -> None:
        """Called when the scope of a function has begun."""

    def visit_Lambda(self, node: cst.Lambda) -> None:
        """Enter a lambda."""
        bound = self.scope.bound_task
        self.scopes.append(Scope(node, names_of(node.params), False, bound))

    def leave_Lambda(self, original_node: cst.Lambda) -> None:
        """Leave a lambda."""
        self.scopes.pop()

    def visit_GeneratorExp(self, node: cst.GeneratorExp) -> None:
        """Enter a generator expression."""
        self.generators += 1

    def leave_GeneratorExp(self, original_node: cst.GeneratorExp) -> None:
        """Leave a generator expression."""
        self.generators -= 1

    def can_rewrite(self, node: cst.CSTNode, kind: str, attempt: Callable[[], object]) -> bool:
        """Return whether an attempt to rewrite a node succeeds, of which nothing is kept; report
        what raises ``CannotRewriteError`` as left, and count it as one of ``kind``."""
        before = set(self.file.imports)
        try:
            attempt()
        except CannotRewriteError as error:
            self.file.leave(node, kind, code_of(node), error.why, error.to_do)
            return False
        finally:
            self.file.imports = before
        return True

    def visit_Attribute(self, node: cst.Attribute) -> bool | None:
        """Note what is asked for an attribute."""
        self.bases.add(node.value)
        return None

    def name_of(self, node: cst.CSTNode) -> Name:
        """Return the parts of a dotted name that is no local variable, or none."""
        parts = dotted_name(node)
        if parts and any(parts[0] in scope.parameters for scope in self.scopes):
            return ()
        return parts

    def task_of(self, node: cst.CSTNode) -> Task | None:
        """Return the task that an expression means."""
        parts = dotted_name(node)
        bound = self.scope.bound_task
        if bound is not None and parts == (bound.self_name,):
            return bound
        return self.file.index.task(self.file.module, self.name_of(node))

    def origin_of(self, node: cst.CSTNode) -> Name:
        """Return the absolute dotted name that an expression means, or none."""
        return self.file.module.origin(self.name_of(node))

    def is_celery(self, node: cst.CSTNode, *names: str) -> bool:
        """Return whether an expression means one of these names of Celery's package."""
        origin = self.origin_of(node)
        return len(origin) > 1 and origin[0] == "celery" and origin[-1] in names


def dotted_name(node: cst.CSTNode) -> Name:
    """Return the parts of a dotted name, or none for any other expression."""
    parts: list[str] = []
    while isinstance(node, cst.Attribute):
        parts.append(node.attr.value)
        node = node.value
    return (node.value, *reversed(parts)) if isinstance(node, cst.Name) else ()


def names_of(parameters: cst.Parameters) -> frozenset[str]:
    """Return the names of parameters."""
    plain = (*parameters.posonly_params, *parameters.params, *parameters.kwonly_params)
    rest = (parameters.star_arg, parameters.star_kwarg)
    return frozenset(each.name.value for each in (*plain, *rest) if isinstance(each, cst.Param))


def _bound_in(node: cst.CSTNode) -> Iterator[str]:
    """Yield the names that a function binds itself, but for those that it imports."""
    if isinstance(node, (cst.FunctionDef, cst.ClassDef)):
        yield node.name.value
    elif not isinstance(node, cst.Lambda):
        if isinstance(node, (cst.Import, cst.ImportFrom)):
            return
        if (target := target_of(node)) is not None:
            yield from _names_of_target(target)
        for child in node.children:
            yield from _bound_in(child)


def target_of(node: cst.CSTNode) -> cst.CSTNode | None:
    """Return what a node itself assigns to or binds, None if nothing."""
    if isinstance(node, (cst.AsName, cst.MatchAs, cst.MatchStar)):
        return node.name
    target = node.rest if isinstance(node, cst.MatchMapping) else getattr(node, "target", None)
    return target if isinstance(target, cst.CSTNode) else None


def _names_of_target(node: cst.CSTNode) -> Iterator[str]:
    if isinstance(node, cst.Name):
        yield node.value
    elif isinstance(node, (cst.Tuple, cst.List)):
        for element in node.elements:
            yield from _names_of_target(element.value)


def keyword(name: str, value: cst.BaseExpression) -> cst.Arg:
    """Return an argument that is given by name."""
    return cst.Arg(value, keyword=cst.Name(name), equal=TIGHT)


TIGHT = cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace(""))


def code_of(node: cst.CSTNode, most: int = 60) -> str:
    """Return the source of a node in one line, cut off where it is long."""
    text = " ".join(cst.Module([]).code_for_node(node).split())
    return text if len(text) <= most else f"{text[: most - 1]}…"
