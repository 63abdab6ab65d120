"""How a task is declared as a job: which options of ``@job`` stand for those of Celery.

Durations of both are seconds. What Celery does without being asked is not written: that a task
which retries does so three times is, since the number is another one here.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TypeGuard

from kjo_django.contrib.celery_codemod.project_index import (
    Module,
    ProjectIndex,
    Task,
    dotted,
    top_level,
)
from kjo_django.contrib.celery_codemod.task_bases import TaskBases

DEFAULT_RETRIES = 3
"""Celery's ``max_retries`` of a task that does not say."""
DEFAULT_LONGEST_BACKOFF = "600"
"""Celery's ``retry_backoff_max``, in seconds."""
HIGHEST_PRIORITY = 100
ASKS_NOTHING = frozenset({("contextlib",), ("django",), ("functools",)})
"""Packages whose decorators pass the first argument on."""
RENAMED = {
    "name": "name",
    "queue": "queue",
    "autoretry_for": "retry_on",
    "dont_autoretry_for": "give_up_on",
}
"""Options whose value stays as it is."""
DROPPED = frozenset(
    {
        *("acks_late", "acks_on_failure_or_timeout", "reject_on_worker_lost", "ignore_result"),
        *("retry_backoff_max", "retry_jitter", "send_events", "store_errors_even_if_ignored"),
        *("track_started", "trail", "typing"),
    }
)
"""Options that mean nothing here, or something that is always so."""
TOGETHER = frozenset(
    {
        *("max_retries", "retry_kwargs", "retry_backoff", "default_retry_delay", "bind"),
        *("time_limit", "soft_time_limit", "rate_limit", "priority", "serializer"),
    }
)
"""Options that are read by functions of their own, below."""
TO_DO = {
    "expires": "give expires_at with each enqueue: job.using(expires_at=…).enqueue(…)",
    "once": "use @job(unique_for=…, unique_by=…)",
    "serializer": "use a serializer of kjo_django, or pass ids instead of objects",
    "throws": "name them in give_up_on, if no other attempt can help",
}
CONTEXT = {
    ("request", "id"): "{context}.job_id",
    ("request", "retries"): "({context}.attempt - 1)",
    ("request", "headers"): "{context}.headers",
    ("max_retries",): "({context}.max_attempts - 1)",
    ("name",): "{context}.handler",
}
"""What stands for the attributes of a bound task's ``self``."""
CONTEXT_TO_DO = (
    "write it with takes_context=True; context has job_id, attempt, max_attempts, headers, "
    "progress(percent, text)"
)
CALLED = frozenset({"delay", "apply_async", "delay_on_commit"})
"""Methods of ``self`` that the codemod rewrites where they are called with plain arguments."""
PLAIN_OPTIONS = frozenset({"countdown", "headers", "priority", "queue", "task_id"})
"""Options of ``self.apply_async`` whose rewrite depends on no value."""
CELERYS_OWN = frozenset({"Ignore", "MaxRetriesExceededError", "Reject", "current_task"})
"""Names of Celery whose meaning nothing here has."""
RETRY_ARGUMENTS = frozenset({"exc", "countdown"})


@dataclass(frozen=True, slots=True)
class Reason:
    """Why something is left, and what to do about it."""

    line: int
    why: str
    to_do: str


@dataclass(slots=True)
class JobPlan:
    """How one task becomes a job."""

    options: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """By Celery's option: the option of ``@job``, and its value where that is another one."""
    added: dict[str, str] = field(default_factory=dict)
    """Options that stand for several, or for none, of Celery's."""
    context: str = "context"
    """The name of the first parameter that stands for ``self``."""
    reasons: list[Reason] = field(default_factory=list)
    """Why the task is left as it is; none: it is rewritten."""
    remarks: list[Reason] = field(default_factory=list)

    @property
    def is_possible(self) -> bool:
        """Whether the task is rewritten."""
        return not self.reasons


class Plans:
    """The plans of all tasks of a project, and the names of their jobs."""

    def __init__(self, index: ProjectIndex) -> None:
        self.bases = TaskBases(index)
        self._plans = {task: plan_of(task, self.bases) for task in index.tasks}
        self._labels = {task: label_of(task.module, index) for task in self._plans}
        self._name_apart()

    def __getitem__(self, task: Task) -> JobPlan:
        return self._plans[task]

    def is_possible(self, task: Task | None) -> bool:
        """Return whether this is a task that becomes a job."""
        return task is not None and self._plans[task].is_possible

    def job_name(self, task: Task) -> str:
        """Return the name that the job of a task has."""
        if "name" in task.options or "name" in self._plans[task].added:
            return task.celery_name
        return f"{self._labels[task]}.{task.name}"

    @property
    def possible(self) -> Iterator[Task]:
        """The tasks that become jobs."""
        return (task for task, plan in self._plans.items() if plan.is_possible)

    def _name_apart(self) -> None:
        """Keep the names of Celery where two functions of one app have one name."""
        tasks: dict[str, list[Task]] = defaultdict(list)
        for task in self.possible:
            tasks[self.job_name(task)].append(task)
        for same in tasks.values():
            for task in same if len(same) > 1 else ():
                if "name" not in task.options:
                    self._plans[task].added["name"] = f'"{task.celery_name}"'


def label_of(module: Module, index: ProjectIndex) -> str:
    """Return the label of the app that a module belongs to, else the module's own dotted name, as
    the names of jobs begin."""
    package = module.parts if module.file.is_package else module.parts[:-1]
    for size in range(len(package), 0, -1):
        app = package[:size]
        config = index.find((*app, "apps"))
        if config is not None:
            return _declared_label(config) or app[-1]
        if index.find((*app, "models")) is not None:
            return app[-1]
    return ".".join(module.parts)


def _declared_label(config: Module) -> str:
    classes = (node for node in top_level(config.file.tree.body) if isinstance(node, ast.ClassDef))
    for node in (each for found in classes for each in found.body):
        value = node.value if isinstance(node, ast.Assign) else None
        if isinstance(node, ast.Assign) and dotted(node.targets[0]) == ("label",):
            return str(value.value) if isinstance(value, ast.Constant) else ""
    return ""


def plan_of(task: Task, bases: TaskBases) -> JobPlan:
    """Return how a task becomes a job."""
    plan = JobPlan()
    if task.fault:
        plan.reasons.append(
            Reason(task.node.lineno, task.fault, "write the function with plain named arguments")
        )
    if (below := _given_self(task)) is not None:
        why = f"@{ast.unparse(below)} below it is given what the function is, a context then"
        to_do = "let that decorator do with a JobContext: raise Retry(delay=…) for self.retry()"
        plan.reasons.append(Reason(below.lineno, why, to_do))
    for why, to_do in bases.faults.get(task, ()):
        plan.reasons.append(Reason(task.node.lineno, why, to_do))
    for option, value in task.options.items():
        if option in RENAMED:
            plan.options[option] = RENAMED[option], None
        elif option not in DROPPED | TOGETHER:
            to_do = TO_DO.get(option, f"@job has no {option}; see the page on moving from Celery")
            plan.reasons.append(Reason(value.lineno, f"{option}=… has no equal in @job", to_do))
    for read in (_read_bind, _read_times, _read_rate, _read_priority, _read_serializer):
        read(task, plan)
    _read_retries(task, plan)
    _read_jitter(task, plan)
    if task.is_bound:
        _read_self(task, plan)
    _read_names(task, plan)
    _read_returns(task, plan)
    _add_inherited(task, plan)
    return plan


def _add_inherited(task: Task, plan: JobPlan) -> None:
    """Add the options that stand for those of a base class to those of the decorator."""
    for option, (name, code) in list(plan.options.items()):
        value = task.options[option]
        if value in task.inherited:
            del plan.options[option]
            plan.added[name] = task.source(value) if code is None else code


def _given_self(task: Task) -> ast.expr | None:
    """Return a decorator of the project's between the task's and a bound function, which may ask
    the task for what a context has not; None if there is none."""
    every = task.node.decorator_list
    for decorator in every[every.index(task.decorator) + 1 :] if task.is_bound else ():
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        if task.module.origin(dotted(called))[:1] not in ASKS_NOTHING:
            return decorator
    return None


def _read_names(task: Task, plan: JobPlan) -> None:
    """Find uses of what Celery alone has."""
    for node in ast.walk(task.node):
        origin = task.module.origin(dotted(node))
        if origin[:1] == ("celery",) and origin[-1] in CELERYS_OWN:
            why = f"the function uses Celery's {origin[-1]}"
            to_do = "see the page on moving from Celery: PermanentError, Retry, the context"
            plan.reasons.append(Reason(getattr(node, "lineno", 1), why, to_do))
            return


def _read_returns(task: Task, plan: JobPlan) -> None:
    """Find results that Celery did not keep."""
    if not _is(task.options.get("ignore_result"), True):
        return
    for node in ast.walk(task.node):
        if isinstance(node, ast.Return) and not (node.value is None or _is(node.value, None)):
            why = "ignore_result=True is given and the function returns a value, which is kept here"
            plan.remarks.append(Reason(node.lineno, why, "return nothing, if nobody reads it"))
            return


def _number(value: ast.expr | None) -> int | float | None:
    """Return the number that an expression is, or None for any other one."""
    if isinstance(value, ast.Constant) and type(value.value) in (int, float):
        return value.value  # type: ignore[return-value] # which has just been seen
    return None


def _is(value: ast.expr | None, wanted: object) -> bool:
    return isinstance(value, ast.Constant) and value.value is wanted


def _read_bind(task: Task, plan: JobPlan) -> None:
    value = task.options.get("bind")
    if value is None or _is(value, False):
        return
    if not task.is_bound:
        plan.reasons.append(Reason(value.lineno, "bind is not a literal", "write True or False"))
        return
    plan.options["bind"] = "takes_context", None
    if "context" in {name.id for name in ast.walk(task.node) if isinstance(name, ast.Name)} | {
        each.name for each in task.parameters
    }:
        plan.context = "job_context"


def _read_times(task: Task, plan: JobPlan) -> None:
    for option in ("time_limit", "soft_time_limit"):
        value = task.options.get(option)
        if value is not None and not _is(value, None):
            plan.options[option] = "timeout", None
            return


def _read_rate(task: Task, plan: JobPlan) -> None:
    value = task.options.get("rate_limit")
    if value is None or _is(value, None):
        return
    if isinstance(value, ast.Constant) and isinstance(value.value, str) and "/" in value.value:
        plan.options["rate_limit"] = "rate", None
    elif ast.unparse(value).strip("'\"").isdigit():
        number = ast.unparse(value).strip("'\"")
        plan.options["rate_limit"] = "rate", f'"{number}/s"'
    else:
        why = "rate_limit is not text such as '10/m'"
        plan.reasons.append(Reason(value.lineno, why, "give rate='10/m'"))
        return
    why = "rate_limit held for each worker, and rate holds for all workers together"
    plan.remarks.append(Reason(task.line(value), why, "see whether the number is still right"))


def _read_priority(task: Task, plan: JobPlan) -> None:
    value = task.options.get("priority")
    if value is None or _is(value, None):
        return
    number = _number(value)
    if number is None or -HIGHEST_PRIORITY <= number <= HIGHEST_PRIORITY:
        plan.options["priority"] = "priority", None
    else:
        why = f"priorities are from -{HIGHEST_PRIORITY} to {HIGHEST_PRIORITY}"
        plan.reasons.append(Reason(value.lineno, why, "choose one; the highest runs first"))


def _read_serializer(task: Task, plan: JobPlan) -> None:
    value = task.options.get("serializer")
    if value is not None and not (isinstance(value, ast.Constant) and value.value == "json"):
        plan.reasons.append(
            Reason(value.lineno, "payloads here are JSON by default", TO_DO["serializer"])
        )


# --- Retries --------------------------------------------------------------------------------------


def _read_retries(task: Task, plan: JobPlan) -> None:
    given = task.options.get("retry_kwargs")
    more = _items(given)
    if given is not None and (more is None or more.keys() - {"max_retries", "countdown"}):
        why = "retry_kwargs is more than a literal with max_retries and countdown"
        plan.reasons.append(Reason(given.lineno, why, "use max_attempts and backoff of @job"))
        return
    more = more or {}
    _read_backoff(task, plan, more.get("countdown"))
    retries = _retries_of(task)
    count = more.get("max_retries", task.options.get("max_retries"))
    _read_count(task, plan, count, is_retried=retries or "autoretry_for" in task.options)
    if "autoretry_for" not in task.options and (retries or count is not None):
        # Other exceptions than its own Retry were not tried again.
        plan.added["retry_on"] = "({from kjo_django import Retry},)"


def _items(node: ast.expr | None) -> dict[str, ast.expr] | None:
    """Return the items of a literal dict whose keys are text, None for any other expression."""
    if not isinstance(node, ast.Dict):
        return None
    keys = [each.value if isinstance(each, ast.Constant) else None for each in node.keys]
    return {str(key): value for key, value in zip(keys, node.values, strict=True)}


def _read_count(task: Task, plan: JobPlan, count: ast.expr | None, *, is_retried: bool) -> None:
    """Plan the number of executions."""
    if count is None:
        if is_retried:
            plan.added["max_attempts"] = str(DEFAULT_RETRIES + 1)
    elif _is(count, None):
        why = "max_retries=None tries for ever, and a job has at most so many attempts"
        plan.reasons.append(Reason(count.lineno, why, "give max_attempts=…"))
    elif count is task.options.get("max_retries"):
        plan.options["max_retries"] = "max_attempts", _one_more(task, count)
    else:
        plan.added["max_attempts"] = _one_more(task, count)


def _one_more(task: Task, count: ast.expr) -> str:
    """Return the number of executions for a number of retries, as source."""
    number = _number(count)
    if number is not None:
        return str(int(number) + 1)
    text = task.source(count)
    return f"{text} + 1" if dotted(count) else f"({text}) + 1"


def _read_backoff(task: Task, plan: JobPlan, countdown: ast.expr | None) -> None:
    factor = task.options.get("retry_backoff")
    if factor is not None and not _is(factor, False):
        base = "1" if _is(factor, True) else task.source(factor)
        given = task.options.get("retry_backoff_max")
        longest = DEFAULT_LONGEST_BACKOFF if given is None else task.source(given)
        made = f"{{from kjo_django import exponential}}({base}, max={longest})"
        plan.options["retry_backoff"] = "backoff", made
    elif countdown is not None:
        plan.added["backoff"] = task.source(countdown)
    elif "default_retry_delay" in task.options:
        plan.options["default_retry_delay"] = "backoff", None


def _read_jitter(task: Task, plan: JobPlan) -> None:
    value = task.options.get("retry_jitter")
    change = plan.options.get("retry_backoff")
    if _is(value, False) and change is not None and change[1] is not None:
        plan.options["retry_backoff"] = "backoff", f"{change[1][:-1]}, jitter=0)"


def _retries_of(task: Task) -> bool:
    """Return whether a bound task calls ``self.retry``."""
    name = task.self_name
    return bool(name) and any(
        isinstance(each, ast.Call) and dotted(each.func) == (name, "retry")
        for each in ast.walk(task.node)
    )


# --- The body of a bound task ---------------------------------------------------------------------


def _read_self(task: Task, plan: JobPlan) -> None:
    """Find uses of ``self`` that nothing here stands for."""
    nodes = list(ast.walk(task.node))
    for node in nodes:
        if isinstance(node, ast.Call) and dotted(node.func) == (task.self_name, "retry"):
            _check_retry(node, plan)
    known = {id(each) for node in _known_nodes(nodes, task) for each in ast.walk(node)}
    uses = [node for node in nodes if isinstance(node, ast.Name) and node.id == task.self_name]
    unknown = next((each for each in uses if id(each) not in known), None)
    if unknown is not None:
        why = f"the function uses {_used(task, unknown)}, which the context has not"
        if _used(task, unknown) == f"{task.self_name}.retry":
            why = "self.retry() is more than a whole statement, a raise or a return"
        plan.reasons.append(Reason(unknown.lineno, why, CONTEXT_TO_DO))


def _known_nodes(nodes: Sequence[ast.AST], task: Task) -> Iterator[ast.AST]:
    """Yield the uses of ``self`` that are surely rewritten."""
    for node in nodes:
        if _is_known(node, task):
            yield node
        elif _is_rewritten_call(node, task):
            yield node.func
        yield from _retry_of_statement(node)


def _is_known(node: ast.AST, task: Task) -> bool:
    """Return whether a node is an attribute of ``self`` that something here stands for."""
    name = dotted(node)
    is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    return is_read and name[:1] == (task.self_name,) and name[1:] in CONTEXT


def _retry_of_statement(node: ast.AST) -> Iterator[ast.expr]:
    """Yield the function that a statement, a raise or a return of one call calls."""
    value = node.exc if isinstance(node, ast.Raise) else None
    if isinstance(node, (ast.Expr, ast.Return)):
        value = node.value
    if isinstance(value, ast.Call) and dotted(value.func)[1:] == ("retry",):
        yield value.func


def _is_rewritten_call(node: ast.AST, task: Task) -> TypeGuard[ast.Call]:
    """Return whether a node is a call of a method of ``self`` that is surely rewritten."""
    name = dotted(node.func) if isinstance(node, ast.Call) else ()
    if not isinstance(node, ast.Call) or name[:1] != (task.self_name,) or len(name) != 2:
        return False
    if name[1] not in CALLED or any(isinstance(each, ast.Starred) for each in node.args):
        return False
    given = {each.arg for each in node.keywords}
    if name[1] != "apply_async":
        return _are_parameters(task, len(node.args), given)
    options = {each.arg: each.value for each in node.keywords}
    options.update(zip(("args", "kwargs"), node.args[:2], strict=False))
    by_place = options.pop("args", ast.Tuple(elts=[]))
    by_name = _items(options.pop("kwargs", ast.Dict(keys=[], values=[])))
    if len(node.args) > 2 or not options.keys() <= PLAIN_OPTIONS or by_name is None:
        return False
    if not isinstance(by_place, (ast.Tuple, ast.List)) or "None" in by_name:
        return False
    has_star = any(isinstance(each, ast.Starred) for each in by_place.elts)
    return not has_star and _are_parameters(task, len(by_place.elts), set(by_name))


def _are_parameters(task: Task, count: int, names: Set[str | None]) -> bool:
    """Return whether a task takes so many arguments by place, and these by name."""
    known = [each.name for each in task.parameters]
    return count <= len(known) and names <= set(known)


def _used(task: Task, wanted: ast.Name) -> str:
    chains = [node for node in ast.walk(task.node) if isinstance(node, ast.Attribute)]
    around = [each for each in chains if any(part is wanted for part in ast.walk(each))]
    longest = max((dotted(each) for each in around), key=len, default=())
    return ".".join(longest) or f"{wanted.id} as a value"


def _check_retry(node: ast.Call, plan: JobPlan) -> None:
    given = {keyword.arg for keyword in node.keywords}
    if node.args or not given <= RETRY_ARGUMENTS:
        others = ", ".join(sorted(str(each) for each in given - RETRY_ARGUMENTS)) or "by place"
        plan.reasons.append(
            Reason(
                node.lineno,
                f"self.retry() is given more than exc and countdown: {others}",
                "raise Retry(delay=…); the payload of an attempt does not change",
            )
        )
