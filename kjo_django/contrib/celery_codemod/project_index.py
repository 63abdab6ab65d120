"""What a project declares and imports: its Celery tasks and applications, found by name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kjo_django.contrib.celery_codemod import source_files
from kjo_django.contrib.celery_codemod.source_files import SourceFile, UnreadableFileError

Name = tuple[str, ...]
"""A dotted name in its parts."""
DEEPEST = 12
"""Modules that one name is followed through, from import to import."""
TASK_CALLS = frozenset({"delay", "apply_async", "delay_on_commit", "apply_async_on_commit"})


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a task's function that can be given by name."""

    name: str
    is_required: bool


@dataclass(slots=True, eq=False)
class Task:
    """A function that Celery's decorator declares as a task."""

    module: Module
    node: ast.FunctionDef | ast.AsyncFunctionDef
    decorator: ast.expr
    is_bound: bool
    parameters: list[Parameter]
    """Without ``self`` of a bound one."""
    options: dict[str, ast.expr]
    """The options of the decorator; the options of a base class are added to them."""
    fault: str = ""
    """Why it cannot be a job, whatever its options; empty: it can."""
    inherited: dict[ast.expr, str] = field(default_factory=dict)
    """Values that a base class gives, and parts of them, with their source for this file.

    ``{from module import name}`` stands for a name that the file has to import.
    """

    @property
    def name(self) -> str:
        """The function's name."""
        return self.node.name

    @property
    def celery_name(self) -> str:
        """The name by which messages and schedules of Celery call it."""
        given = self.options.get("name")
        if isinstance(given, ast.Constant) and isinstance(given.value, str):
            return given.value
        return ".".join((*self.module.parts, self.name))

    @property
    def self_name(self) -> str:
        """The name of a bound task's first parameter, or empty."""
        arguments = [*self.node.args.posonlyargs, *self.node.args.args]
        return arguments[0].arg if self.is_bound and arguments else ""

    def source(self, value: ast.expr) -> str:
        """Return the text of an option's value, or of a part of it."""
        inherited = self.inherited.get(value)
        return self.module.source(value) if inherited is None else inherited

    def line(self, value: ast.expr) -> int:
        """Return the line of an option's value, of the decorator if a base class gives it."""
        return self.decorator.lineno if value in self.inherited else value.lineno

    @property
    def takes_any(self) -> bool:
        """Whether it takes arguments of any name."""
        return self.node.args.kwarg is not None


@dataclass(slots=True, eq=False)
class Module:
    """What one file declares and imports."""

    file: SourceFile
    imports: dict[str, Name] = field(default_factory=dict)
    """Absolute dotted names by the names they have here."""
    doubtful: set[str] = field(default_factory=set)
    """Names that are imported from two places."""
    stars: list[Name] = field(default_factory=list)
    names: set[str] = field(default_factory=set)
    """What is bound at the module's top, imports included."""
    tasks: dict[str, Task] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    apps: set[str] = field(default_factory=set)
    """Names of Celery applications that are made here."""
    is_installed: bool = False
    """Whether it is of an installed package: it is read, and never changed."""

    @property
    def parts(self) -> Name:
        """The module's own dotted name."""
        return self.file.parts

    @property
    def is_settings(self) -> bool:
        """Whether it seems to be a module of Django's settings."""
        return "INSTALLED_APPS" in self.names or any("settings" in part for part in self.parts)

    def origin(self, name: Name) -> Name:
        """Return the absolute dotted name that is meant by one that is used here."""
        if not name:
            return ()
        imported = self.imports.get(name[0])
        return (*imported, *name[1:]) if imported is not None else name

    def source(self, node: ast.AST) -> str:
        """Return the text of a node."""
        return ast.get_source_segment(self.file.text, node) or ast.unparse(node)


Finder = Callable[[Name], Module | None]
"""Returns the module of a dotted name."""


def dotted(node: ast.AST) -> Name:
    """Return the parts of a dotted name, or none for any other expression."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    return (node.id, *reversed(parts))


class ProjectIndex:
    """The modules of a project, with what their names mean.

    A module is found by the end of its dotted name: where ``src/shop/tasks.py`` is read from the
    project's folder, ``shop.tasks`` means it if no other file could be meant.

    :param packages: folders of installed packages, whose modules are read when a class is looked
        for that no file of the project has.
    """

    def __init__(self, files: Iterable[SourceFile], packages: Sequence[Path] = ()) -> None:
        self._packages = packages
        self._installed: dict[Name, Module | None] = {}
        self.modules = [_module_of(file) for file in files]
        self._by_last: dict[str, list[Module]] = defaultdict(list)
        for module in self.modules:
            if module.parts:
                self._by_last[module.parts[-1]].append(module)
        for module in self.modules:
            for task in self._declared(module):
                if task.name in module.tasks:
                    task.fault = "another task of this module has its name"
                module.tasks[task.name] = task
        self.async_forms = self._forms_of_apply_async()

    @property
    def tasks(self) -> Iterator[Task]:
        """Every task, module by module."""
        for module in self.modules:
            yield from module.tasks.values()

    @property
    def uses_celery(self) -> bool:
        """Whether a file imports Celery or one of its packages, or has settings for it."""
        return any(uses_celery(module) for module in self.modules)

    def find(self, name: Name) -> Module | None:
        """Return the module of this dotted name, or None if none or several could be meant."""
        if not name:
            return None
        size = len(name)
        near = [each for each in self._by_last.get(name[-1], ()) if each.parts[-size:] == name]
        shortest = min((len(each.parts) for each in near), default=0)
        best = [each for each in near if len(each.parts) == shortest]
        return best[0] if len(best) == 1 else None

    def defined(self, module: Module, name: Name) -> tuple[Module, Name] | None:
        """Return the module that defines what a name means, and what it is called there."""
        return self._defined(module, name, 0, self.find)

    def defined_anywhere(self, module: Module, name: Name) -> tuple[Module, Name] | None:
        """Return what ``defined`` does, and look into installed packages, too."""
        return self._defined(module, name, 0, self._find_anywhere)

    def _defined(
        self, module: Module, name: Name, depth: int, find: Finder
    ) -> tuple[Module, Name] | None:
        if not name or depth > DEEPEST or name[0] in module.doubtful:
            return None
        if name[0] in module.imports:
            return self._looked_up(module.origin(name), depth + 1, find)
        if name[0] in module.names:
            return module, name
        for star in module.stars:
            found = self._looked_up((*star, *name), depth + 1, find)
            if found is not None:
                return found
        return None

    def _looked_up(self, name: Name, depth: int, find: Finder) -> tuple[Module, Name] | None:
        for size in range(len(name) - 1, 0, -1):
            module = find(name[:size])
            if module is not None:
                found = self._defined(module, name[size:], depth, find)
                if found is not None:
                    return found
        return None

    def _find_anywhere(self, name: Name) -> Module | None:
        found = self.find(name)
        if found is not None:
            return found
        if name not in self._installed:
            self._installed[name] = self._read_installed(name)
        return self._installed[name]

    def _read_installed(self, name: Name) -> Module | None:
        for folder in self._packages:
            place = folder.joinpath(*name)
            for path in (place / "__init__.py", place.with_name(f"{name[-1]}.py")):
                if path.is_file():
                    try:
                        module = _module_of(source_files.read(path, folder))
                    except UnreadableFileError:
                        return None
                    module.is_installed = True
                    return module
        return None

    def task(self, module: Module, name: Name) -> Task | None:
        """Return the task that a dotted name means in a module."""
        return _task_in(self.defined(module, name))

    def task_at(self, path: Name) -> Task | None:
        """Return the task at an absolute dotted path, as ``patch`` takes it."""
        return _task_in(self._looked_up(path, 0, self.find))

    def task_called(self, celery_name: str) -> Task | None:
        """Return the task that Celery knows by a name."""
        found = [task for task in self.tasks if task.celery_name == celery_name]
        return found[0] if len(found) == 1 else None

    def is_app(self, module: Module, name: Name) -> bool:
        """Return whether a dotted name means a Celery application."""
        found = self.defined(module, name)
        if found is not None:
            return len(found[1]) == 1 and found[1][0] in found[0].apps
        origin = module.origin(name)
        return len(origin) > 1 and origin[-2].startswith("celery") and origin[0] != "celery"

    def _declared(self, module: Module) -> Iterator[Task]:
        for node in top_level(module.file.tree.body):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for decorator in node.decorator_list:
                    if self.is_task_decorator(module, decorator):
                        yield _task_of(module, node, decorator)
                        break

    def is_task_decorator(self, module: Module, decorator: ast.expr) -> bool:
        """Return whether a decorator declares a task."""
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        name = dotted(called)
        if not name:
            return False
        if module.origin(name) in {("celery", "shared_task"), ("celery", "task")}:
            return True
        return len(name) > 1 and name[-1] == "task" and self.is_app(module, name[:-1])

    def _forms_of_apply_async(self) -> dict[Task, set[str]]:
        """Return by which methods here the calls of ``apply_async`` of each task are written."""
        forms: dict[Task, set[str]] = defaultdict(set)
        for module in self.modules:
            for node, name in _calls_of(module.file.tree, "apply_async"):
                task = self.task(module, name[:-1])
                if task is not None:
                    forms[task].add(_form_of(node))
        for task in self.tasks:
            for node, name in _calls_of(task.node, "apply_async"):
                if name[:-1] == (task.self_name,):
                    forms[task].add(_form_of(node))
        return forms


def _calls_of(tree: ast.AST, method: str) -> Iterator[tuple[ast.Call, Name]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and dotted(node.func)[-1:] == (method,):
            yield node, dotted(node.func)


def _form_of(node: ast.Call) -> str:
    given = {keyword.arg for keyword in node.keywords} - {"args", "kwargs"}
    return "using" if given else "enqueue"


def uses_celery(module: Module) -> bool:
    """Return whether a module imports Celery or one of its packages, or has settings for it."""
    imported = {name[0] for name in (*module.imports.values(), *module.stars) if name}
    return any(
        name.partition("_")[0] == "celery" or name.startswith("django_celery") for name in imported
    ) or any(name.startswith("CELERY_") for name in module.names)


def top_level(body: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that are carried out at a module's import, but none within classes."""
    for node in body:
        yield node
        for name in ("body", "orelse", "finalbody"):
            if isinstance(node, (ast.If, ast.Try, ast.With)):
                yield from top_level(getattr(node, name, []))
        for handler in getattr(node, "handlers", []):
            yield from top_level(handler.body)


def _module_of(file: SourceFile) -> Module:
    module = Module(file)
    package = file.parts if file.is_package else file.parts[:-1]
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                _add_module(module, alias)
        elif isinstance(node, ast.ImportFrom):
            _add_import(module, node, package)
    for statement in top_level(file.tree.body):
        names = set(_bound(statement))
        module.names |= names
        if not isinstance(statement, (ast.Import, ast.ImportFrom)):
            # Which of both is meant depends on where it is asked.
            module.doubtful |= names & module.imports.keys()
        if isinstance(statement, ast.ClassDef):
            module.classes[statement.name] = statement
        if _is_application(module, statement):
            module.apps.update(_bound(statement))
    return module


def _add_import(module: Module, node: ast.ImportFrom, package: Name) -> None:
    base = tuple(node.module.split(".")) if node.module else ()
    if node.level:
        base = (*package[: len(package) - node.level + 1], *base)
    for alias in node.names:
        if alias.name == "*":
            module.stars.append(base)
        else:
            _import(module, alias.asname or alias.name, (*base, alias.name))


def _add_module(module: Module, alias: ast.alias) -> None:
    path = tuple(alias.name.split("."))
    _import(module, alias.asname or path[0], path if alias.asname else path[:1])


def _import(module: Module, local: str, path: Name) -> None:
    if module.imports.setdefault(local, path) != path:
        module.doubtful.add(local)
        module.imports[local] = path


def _bound(node: ast.stmt) -> Iterator[str]:
    """Yield the names that a statement binds."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        yield node.name
    elif isinstance(node, (ast.Import, ast.ImportFrom)):
        for alias in node.names:
            yield (alias.asname or alias.name).split(".")[0]
    elif isinstance(node, (ast.Assign, ast.AnnAssign, ast.For, ast.Match, ast.With)):
        for each in ast.walk(node):
            if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
                yield each.id
            elif isinstance(each, (ast.MatchAs, ast.MatchStar)) and each.name:
                yield each.name
            elif isinstance(each, ast.MatchMapping) and each.rest:
                yield each.rest


def _is_application(module: Module, node: ast.stmt) -> bool:
    value = node.value if isinstance(node, (ast.Assign, ast.AnnAssign)) else None
    if not isinstance(value, ast.Call):
        return False
    return module.origin(dotted(value.func)) in {("celery", "Celery"), ("celery", "app", "Celery")}


def _task_in(found: tuple[Module, Name] | None) -> Task | None:
    if found is None or len(found[1]) != 1:
        return None
    return found[0].tasks.get(found[1][0])


def _task_of(
    module: Module, node: ast.FunctionDef | ast.AsyncFunctionDef, decorator: ast.expr
) -> Task:
    keywords = decorator.keywords if isinstance(decorator, ast.Call) else []
    options = {keyword.arg: keyword.value for keyword in keywords if keyword.arg}
    bind = options.get("bind")
    is_bound = isinstance(bind, ast.Constant) and bind.value is True
    fault = _fault_of(node.args, is_bound=is_bound)
    if len(options) < len(keywords) or (isinstance(decorator, ast.Call) and decorator.args):
        fault = "its options are given by * or **, or by place"
    parameters = list(_parameters(node.args))[1 if is_bound else 0 :]
    return Task(module, node, decorator, is_bound, parameters, options, fault)


def _fault_of(given: ast.arguments, *, is_bound: bool) -> str:
    """Return why a function's arguments cannot be those of a job."""
    if given.posonlyargs:
        return "arguments before '/' have no names for callers"
    if given.vararg is not None:
        return f"it takes *{given.vararg.arg}, and a job's arguments have names"
    return "it is bound and has no first argument" if is_bound and not given.args else ""


def _parameters(given: ast.arguments) -> Iterator[Parameter]:
    """Yield the parameters that have names, those that are given by place first."""
    by_place = [*given.posonlyargs, *given.args]
    required = len(by_place) - len(given.defaults)
    for number, argument in enumerate(by_place):
        yield Parameter(argument.arg, number < required)
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        yield Parameter(argument.arg, default is None)
