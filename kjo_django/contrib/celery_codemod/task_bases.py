"""Base classes of tasks: which options of ``@job`` their attributes are, and which methods a person
moves."""

from __future__ import annotations

import ast
import builtins
import copy
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from kjo_django.contrib.celery_codemod.migration_report import Finding
from kjo_django.contrib.celery_codemod.project_index import (
    DEEPEST,
    Module,
    Name,
    ProjectIndex,
    Task,
    dotted,
    top_level,
)

OPTIONS = frozenset(
    {
        *("acks_late", "acks_on_failure_or_timeout", "autoretry_for", "default_retry_delay"),
        *("dont_autoretry_for", "expires", "ignore_result", "max_retries", "priority", "queue"),
        *("rate_limit", "reject_on_worker_lost", "retry_backoff", "retry_backoff_max"),
        *("retry_jitter", "retry_kwargs", "send_events", "serializer", "soft_time_limit"),
        *("store_errors_even_if_ignored", "throws", "time_limit", "track_started", "trail"),
        *("typing", "Request", "Strategy", "backend", "compression", "exchange", "routing_key"),
    }
)
"""Attributes of a class that Celery reads as options of its tasks."""
OBSERVERS = {
    "on_failure": "connect a receiver to signals.job_failed, whose sender is the job's name",
    "on_retry": "connect a receiver to signals.job_retried, whose sender is the job's name",
    "on_success": "connect a receiver to signals.job_completed, whose sender is the job's name",
    "after_return": "connect a receiver to signals.job_completed and signals.job_failed, whose "
    "sender is the job's name",
    "before_start": "write it as middleware, before the call of the handler",
}
"""Methods that Celery calls beside a task's function, and what is written here."""
OVERRIDES = {
    "__call__": "write it as middleware, which wraps each call of a handler; or call it in the "
    "function, if it changes the arguments",
    "__init__": "write what it prepares into the module",
    "__new__": "write what it prepares into the module",
    "apply": "call the function itself where that was meant",
    "apply_async": "write a function that enqueues the job, and call it instead",
    "apply_async_on_commit": "nothing: an enqueue is committed with the transaction",
    "delay": "write a function that enqueues the job, and call it instead",
    "delay_on_commit": "nothing: an enqueue is committed with the transaction",
    "on_bound": "write what it prepares into the module",
    "retry": "raise Retry(delay=…) in the function",
    "s": "use job.step(…) where the workflow is made",
    "si": "use job.step(…) where the workflow is made",
    "signature": "use job.step(…) where the workflow is made",
    "subtask": "use job.step(…) where the workflow is made",
}
"""Methods that change how a task is called, and what is written here."""
TASK_CLASS = ("celery", "Task")
MOST_LISTED = 3
"""Names of tasks in one finding."""
PLAIN = frozenset({("object",), ("abc", "ABC"), ("typing", "Generic")})
"""Bases of classes that give a task nothing."""


@dataclass(frozen=True, slots=True, eq=False)
class BaseClass:
    """A class of the project that tasks derive from."""

    module: Module
    node: ast.ClassDef

    @property
    def methods(self) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
        """The methods that the class itself defines."""
        found = top_level(self.node.body)
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
        return {each.name: each for each in found if isinstance(each, kinds)}

    @property
    def values(self) -> dict[str, ast.expr]:
        """The values of the attributes that the class itself sets, without a condition."""
        return dict(assigned(self.node.body))

    @property
    def unsure(self) -> set[str]:
        """Attributes that a condition sets, or that are set twice."""
        counts = Counter(name for name, _ in assigned(top_level(self.node.body)))
        return {name for name in counts if counts[name] > 1 or name not in self.values}


class UnknownBaseError(Exception):
    """A base class that was not found in the files that were read.

    :param code: as the file that derives from it has it.
    :param origin: its absolute dotted name.
    """

    def __init__(self, code: str, origin: Name) -> None:
        super().__init__(code)
        self.origin = origin


class TaskBases:
    """The base classes of a project's tasks; the tasks are given the options of theirs."""

    def __init__(self, index: ProjectIndex) -> None:
        self._index = index
        self._users: dict[ast.ClassDef, list[Task]] = defaultdict(list)
        self._installed: dict[ast.ClassDef, BaseClass] = {}
        self.faults: dict[Task, list[tuple[str, str]]] = defaultdict(list)
        """Why a task cannot be a job because of its base class, each with what to do."""
        self.queues: list[tuple[Module, ast.expr]] = []
        """The queues that base classes give, with the modules of the classes."""
        for task in index.tasks:
            if "base" in task.options:
                self._inherit(task, task.options.pop("base"))

    def users(self, module: Module, name: str) -> Sequence[Task]:
        """Return the tasks that have this class of a module among their bases."""
        node = module.classes.get(name)
        return self._users.get(node, ()) if node is not None else ()

    def has_users(self, module: Module) -> bool:
        """Return whether a class of this module is a base class of a task."""
        return any(self.users(module, name) for name in module.classes)

    def of_packages(self) -> Iterator[Finding]:
        """Yield what the methods of base classes of installed packages do that nothing calls."""
        for node, base in self._installed.items():
            for name, method in base.methods.items():
                if name in OBSERVERS:
                    path, why = base.module.file.shown_path, not_called(self._users[node])
                    yield Finding(path, method.lineno, f"{node.name}.{name}", why, OBSERVERS[name])

    def is_task(self, module: Module, name: str) -> bool:
        """Return whether a class of a module derives from Celery's ``Task``."""
        node = module.classes.get(name)
        return node is not None and any(self._leads_to_task(module, base, 0) for base in node.bases)

    def _leads_to_task(self, module: Module, node: ast.expr, depth: int) -> bool:
        if self._is_celerys(module, node):
            return True
        found = self._class(module, node)
        return (
            found is not None
            and depth < DEEPEST
            and any(self._leads_to_task(found.module, each, depth + 1) for each in found.node.bases)
        )

    def _is_celerys(self, module: Module, node: ast.expr) -> bool:
        name = dotted(node)
        origin = module.origin(name)
        if origin[:1] == TASK_CLASS[:1] and origin[-1:] == TASK_CLASS[-1:]:
            return True
        return name[-1:] == ("Task",) and self._index.is_app(module, name[:-1])

    def _class(self, module: Module, node: ast.expr) -> BaseClass | None:
        found = self._index.defined_anywhere(module, dotted(node))
        if found is None or len(found[1]) != 1:
            return None
        definition = found[0].classes.get(found[1][0])
        return BaseClass(found[0], definition) if definition is not None else None

    def _lineage(self, module: Module, node: ast.expr, depth: int = 0) -> Iterator[BaseClass]:
        """Yield the classes that an expression stands for, bases after what derives from them.

        :raises UnknownBaseError: one of them was not found.
        """
        if self._is_celerys(module, node) or module.origin(dotted(node)) in PLAIN:
            return
        found = None if _is_of_once(module.origin(dotted(node))) else self._class(module, node)
        if found is None or depth > DEEPEST:
            raise UnknownBaseError(ast.unparse(node), module.origin(dotted(node)))
        yield found
        for base in found.node.bases:
            yield from self._lineage(found.module, base, depth + 1)

    def _inherit(self, task: Task, base: ast.expr) -> None:
        faults = self.faults[task]
        try:
            every = list(self._lineage(task.module, base))
        except UnknownBaseError as error:
            faults.append(_unknown(error.origin, str(error)))
            return
        # A class that several derive from comes after all of them, as in Python's own order.
        last = {each.node: place for place, each in enumerate(every)}
        classes = [each for place, each in enumerate(every) if last[each.node] == place]
        for each in classes:
            self._users[each.node].append(task)
            if each.module.is_installed:
                self._installed[each.node] = each
            faults += _overrides(each)
            faults += self._add_options(task, each)
            doubtful = sorted(each.unsure & OPTIONS)
            faults += [(f"{_at(each)} sets {name} by a condition", _GIVE) for name in doubtful]

    def _add_options(self, task: Task, base: BaseClass) -> Iterator[tuple[str, str]]:
        """Give a task the options of one class that nothing before has given; yield the faults."""
        for name, value in base.values.items():
            if name not in OPTIONS or name in task.options:
                continue
            task.options[name] = value
            if name == "queue":
                self.queues.append((base.module, value))
            yield from self._texts(task, base, name, value)

    def _texts(
        self, task: Task, base: BaseClass, name: str, value: ast.expr
    ) -> Iterator[tuple[str, str]]:
        """Note the source of an inherited value as the task's file writes it; yield what keeps the
        file from it."""
        task.inherited[value] = ast.unparse(value)
        for part in ast.walk(value):
            if not isinstance(part, ast.expr):
                continue
            renamed = _Renamed(self._index, task.module, base)
            task.inherited[part] = _source(renamed.visit(copy.deepcopy(part)), renamed.imported)
            if part is value and renamed.missing:
                yield (
                    f"{_at(base)} has {name} = {ast.unparse(value)}, and {renamed.missing[0]} has "
                    "no name in the task's file",
                    _GIVE,
                )


_GIVE = "give the option to the task's decorator"


class _Renamed(ast.NodeTransformer):
    """Replaces the names of an expression by those that another file can use."""

    def __init__(self, index: ProjectIndex, module: Module, base: BaseClass) -> None:
        self._index = index
        self._module = module
        self._base = base
        self.missing: list[str] = []
        self.imported: dict[str, str] = {}
        """The imports that names stand for, by the name that takes their place."""

    def visit_Name(self, node: ast.Name) -> ast.Name:
        owner = self._base.module
        if node.id in self._base.values or node.id in owner.doubtful:
            self.missing.append(node.id)
        elif owner is self._module or self._has_it(node.id):
            pass
        elif (place := self._importable(node.id)) is not None:
            stand_in = f"kjo_imported_{len(self.imported)}"
            self.imported[stand_in] = place
            return ast.Name(stand_in)
        else:
            self.missing.append(node.id)
        return node

    def _has_it(self, name: str) -> bool:
        """Return whether a name means the same in both files."""
        owner, here = self._base.module, self._module
        if name in owner.names or name in owner.imports:
            found = self._index.defined(here, (name,))
            if found is not None:
                return found == self._index.defined(owner, (name,))
            return name in here.imports and here.origin((name,)) == owner.origin((name,))
        return hasattr(builtins, name) and name not in here.names

    def _importable(self, name: str) -> str | None:
        """Return how the task's file imports a name, None if that is not known."""
        owner = self._base.module
        path = owner.imports.get(name)
        if path is not None and (owner.is_installed or _is_absolute(owner, name)):
            if len(path) == 1:
                return f"{{import {path[0]}}}"
            return f"{{from {'.'.join(path[:-1])} import {path[-1]}}}"
        if path is None and name in owner.names and owner.is_installed:
            return f"{{from {'.'.join(owner.parts)} import {name}}}"
        if path is None and name in owner.names:
            for local, origin in self._module.imports.items():
                if self._index.find(origin[:-1]) is owner and _is_absolute(self._module, local):
                    return f"{{from {'.'.join(origin[:-1])} import {name}}}"
        return None


def _source(node: ast.expr, imported: dict[str, str]) -> str:
    text = ast.unparse(node)
    for stand_in, place in imported.items():
        text = text.replace(stand_in, place)
    return text


def _is_absolute(module: Module, name: str) -> bool:
    """Return whether a module imports a name by a path that any other module can write."""
    for node in ast.walk(module.file.tree):
        names = {each.asname or each.name for each in getattr(node, "names", []) if _is_alias(each)}
        if name in names:
            return isinstance(node, ast.Import) or getattr(node, "level", 1) == 0
    return False


def _is_alias(node: object) -> bool:
    return isinstance(node, ast.alias)


def assigned(body: Iterable[ast.stmt]) -> Iterator[tuple[str, ast.expr]]:
    """Yield what statements assign, by each name."""
    for node in body:
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, ast.AnnAssign):
            targets = [node.target]
        value = getattr(node, "value", None)
        for target in targets:
            if isinstance(target, ast.Name) and isinstance(value, ast.expr):
                yield target.id, value


def _overrides(base: BaseClass) -> Iterator[tuple[str, str]]:
    for name, method in base.methods.items():
        if name in OVERRIDES:
            yield f"{_at(base, method.lineno)} has {name}()", OVERRIDES[name]


def _at(base: BaseClass, line: int = 0) -> str:
    place = f"{base.module.file.shown_path}:{line or base.node.lineno}"
    return f"its base class {base.node.name} ({place})"


def not_called(users: Sequence[Task]) -> str:
    """Return what is said of a method of a base class that Celery called beside these tasks."""
    return f"it is not called for a job; it is the base class of {listed(users)}"


def listed(tasks: Sequence[Task]) -> str:
    """Return the names of tasks, of many only the first ones."""
    names = ", ".join(task.name for task in tasks[:MOST_LISTED])
    more = len(tasks) - MOST_LISTED
    return f"{names} and {more} more" if more > 0 else names


def _is_of_once(origin: Name) -> bool:
    return origin[:1] in {("celery_once",), ("celery_singleton",)}


def _unknown(origin: Name, text: str) -> tuple[str, str]:
    """Return what is said of a base class that no file has."""
    if _is_of_once(origin):
        return f"base={text} has no equal in @job", "use @job(unique_for=…, unique_by=…)"
    to_do = (
        "if it is a class of the project, give its file to the command, too; if it is of an "
        "installed package, give the folder of packages with --packages; else write its "
        "attributes as options of @job, its on_failure or after_return as a receiver of job_failed "
        "or job_completed, its __call__ as middleware"
    )
    return f"its base class {text} is in no file that was read", to_do
