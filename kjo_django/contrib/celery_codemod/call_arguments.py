"""Arguments of Celery's calls as those of ``using`` and ``enqueue``: by name, in seconds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import libcst as cst

from kjo_django.contrib.celery_codemod.edits import (
    TIGHT,
    CannotRewriteError,
    FileEdits,
    code_of,
    keyword,
)
from kjo_django.contrib.celery_codemod.project_index import Task

BY_PLACE = (*("args", "kwargs", "task_id", "producer", "link", "link_error", "shadow"),)
"""The parameters of ``apply_async`` in their order."""
DIRECT = {"queue": "queue", "priority": "priority", "task_id": "id", "headers": "headers"}
"""Options of ``apply_async`` whose value stays as it is."""
DROPPED = frozenset(
    {"add_to_parent", "compression", "ignore_result", "retry", "retry_policy", "reply_to"}
)
"""Options of ``apply_async`` that mean nothing here."""
NEITHER = {
    "exchange": "queues are named by queue=…",
    "routing_key": "queues are named by queue=…",
    "link": "make a chain of both: chain(job.step(…), other.step(…)).enqueue()",
    "link_error": "make a workflow, whose second step has on_failure='run'; or receive job_failed",
    "time_limit": "declare @job(timeout=…)",
    "soft_time_limit": "declare @job(timeout=…)",
}
"""Options of ``apply_async`` that ``using`` has not, and what to do."""


@dataclass(slots=True)
class Call:
    """The arguments of one call of a task."""

    payload: list[cst.Arg]
    options: list[cst.Arg] = field(default_factory=list)
    """For ``using``."""


def named(args: Sequence[cst.Arg], task: Task, skipped: int = 0) -> list[cst.Arg]:
    """Return arguments by name.

    :param skipped: how many of the task's first parameters are given by nobody here.
    :raises CannotRewriteError: one has no name, or the task has no such parameter.
    """
    names = [each.name for each in task.parameters][skipped:]
    found: list[cst.Arg] = []
    for place, arg in enumerate(args):
        if arg.star == "*":
            why = f"{code_of(arg.value)} is given by *, and arguments have names"
            raise CannotRewriteError(why, f"name the arguments: {task.name} takes {listed(task)}")
        if arg.star == "**":
            found.append(arg)
        elif arg.keyword is not None:
            _check_known(arg.keyword.value, task)
            found.append(arg)
        elif place < len(names):
            found.append(arg.with_changes(keyword=cst.Name(names[place]), equal=TIGHT))
        else:
            why = f"it is given more arguments than {task.name} takes"
            raise CannotRewriteError(why, f"{task.name} takes {listed(task)}")
    return found


def _check_known(name: str, task: Task) -> None:
    if name not in {each.name for each in task.parameters} and not task.takes_any:
        why = f"{task.name} takes no argument {name}"
        raise CannotRewriteError(why, f"{task.name} takes {listed(task)}")


def listed(task: Task) -> str:
    """Return the names of a task's parameters."""
    return ", ".join(each.name for each in task.parameters) or "no arguments"


def missing(task: Task, given: Sequence[cst.Arg]) -> list[str]:
    """Return the parameters that are required and that nothing gives."""
    if any(arg.star for arg in given):
        return []
    names = {arg.keyword.value for arg in given if arg.keyword is not None}
    return [each.name for each in task.parameters if each.is_required and each.name not in names]


def of_apply_async(args: Sequence[cst.Arg], task: Task, file: FileEdits) -> Call:
    """Return what the arguments of ``apply_async`` mean.

    :raises CannotRewriteError: one means nothing here, or is no literal where it has to be.
    """
    given: dict[str, cst.BaseExpression] = {}
    for place, arg in enumerate(args):
        if arg.star or (arg.keyword is None and place >= len(BY_PLACE)):
            why = f"its options are given by {arg.star or 'place'}"
            raise CannotRewriteError(why, "give the options by name to using(…)")
        given[arg.keyword.value if arg.keyword is not None else BY_PLACE[place]] = arg.value
    payload = [*_of_args(given.pop("args", None)), *_of_kwargs(given.pop("kwargs", None))]
    options = [
        keyword(*_option(name, value, file))
        for name, value in given.items()
        if name not in DROPPED and not is_name(value, "None")
    ]
    return Call(named(payload, task), options)


def is_name(node: cst.CSTNode | None, name: str) -> bool:
    """Return whether a node is this name alone."""
    return isinstance(node, cst.Name) and node.value == name


def _of_args(value: cst.BaseExpression | None) -> Iterator[cst.Arg]:
    if value is None or is_name(value, "None"):
        return
    if not isinstance(value, (cst.Tuple, cst.List)):
        why = f"args={code_of(value)} is not a literal, so its arguments have no names"
        raise CannotRewriteError(why, "name the arguments in enqueue(…)")
    for element in value.elements:
        is_starred = isinstance(element, cst.StarredElement)
        yield cst.Arg(element.value, star="*" if is_starred else "")


def _of_kwargs(value: cst.BaseExpression | None) -> Iterator[cst.Arg]:
    if value is None or is_name(value, "None"):
        return
    if _is_dict_by_name(value):
        yield from (arg.with_changes(comma=cst.MaybeSentinel.DEFAULT) for arg in value.args)
        return
    if not isinstance(value, cst.Dict) or not all(map(_is_named, value.elements)):
        why = f"kwargs={code_of(value)} is not a literal, so its names are unknown"
        raise CannotRewriteError(why, "name the arguments in enqueue(…)")
    for element in value.elements:
        if isinstance(element, cst.DictElement) and isinstance(element.key, cst.SimpleString):
            yield keyword(str(element.key.evaluated_value), element.value)


def _is_dict_by_name(value: cst.BaseExpression) -> TypeGuard[cst.Call]:
    """Return whether an expression is ``dict(name=…)``."""
    return (
        isinstance(value, cst.Call)
        and is_name(value.func, "dict")
        and all(arg.keyword is not None for arg in value.args)
    )


def _is_named(element: cst.BaseDictElement) -> bool:
    key = element.key if isinstance(element, cst.DictElement) else None
    return isinstance(key, cst.SimpleString) and str(key.evaluated_value).isidentifier()


def _option(
    name: str, value: cst.BaseExpression, file: FileEdits
) -> tuple[str, cst.BaseExpression]:
    """Return an option of ``using`` for one of ``apply_async``."""
    if name in DIRECT:
        return DIRECT[name], value
    if name == "countdown":
        return "delay", value
    if name == "eta":
        return "run_at", _moment(value, name)
    if name == "expires":
        return "expires_at", _expiry(value, file)
    if name == "serializer" and code_of(value).strip("'\"") == "json":
        raise CannotRewriteError("serializer is given", "leave it out: payloads are JSON")
    to_do = NEITHER.get(name, f"using() has no {name}; see the page on moving from Celery")
    raise CannotRewriteError(f"{name}=… has no equal in using()", to_do)


def _moment(value: cst.BaseExpression, name: str) -> cst.BaseExpression:
    """Return a moment, if it is not seen to be without a time zone."""
    text = code_of(value, 10_000)
    if "utcnow()" in text or "datetime.now()" in text or "datetime.today()" in text:
        why = f"{name}={code_of(value)} has no time zone"
        raise CannotRewriteError(why, "give an aware moment, as timezone.now() of Django makes it")
    return value


def _expiry(value: cst.BaseExpression, file: FileEdits) -> cst.BaseExpression:
    """Return the moment of an expiry, which may be given in seconds."""
    if not is_number(value):
        if "now(" not in code_of(value, 10_000):
            why = f"expires={code_of(value)} may be seconds or a moment"
            to_do = "give expires_at a moment: timezone.now() + timedelta(seconds=…)"
            raise CannotRewriteError(why, to_do)
        return _moment(value, "expires")
    now = file.use("django.utils", "timezone")
    span = cst.Call(cst.Name(file.use("datetime", "timedelta")), [keyword("seconds", value)])
    moment = cst.Call(cst.Attribute(cst.Name(now), cst.Name("now")))
    return cst.BinaryOperation(moment, cst.Add(), span)


def is_number(value: cst.BaseExpression) -> bool:
    """Return whether an expression is a number, or computed from numbers alone."""
    if isinstance(value, cst.BinaryOperation):
        return is_number(value.left) and is_number(value.right)
    return isinstance(value, (cst.Integer, cst.Float))


def enqueue_call(
    base: cst.BaseExpression, call: Call, method: str = "enqueue", spaced: cst.Call | None = None
) -> cst.Call:
    """Return ``base.using(…).enqueue(…)``, without ``using`` where there are no options.

    :param spaced: the call whose white space stays.
    """
    if call.options:
        base = cst.Call(cst.Attribute(base, cst.Name("using")), call.options)
    func = cst.Attribute(base, cst.Name(method))
    if spaced is not None:
        return spaced.with_changes(func=func, args=call.payload)
    return cst.Call(func, call.payload)


def awaited(call: cst.BaseExpression, *, has_brackets: bool) -> cst.Await:
    """Return the await of a call, in brackets where something is asked of its result."""
    brackets = ([cst.LeftParen()], [cst.RightParen()]) if has_brackets else ([], [])
    return cst.Await(call, lpar=brackets[0], rpar=brackets[1])
