"""Declarations of tasks, and the bodies of bound ones, as jobs."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import libcst as cst

from kjo_django.contrib.celery_codemod.edits import Planner, dotted_name, keyword
from kjo_django.contrib.celery_codemod.project_index import Task, uses_celery
from kjo_django.contrib.celery_codemod.task_bases import OBSERVERS, listed, not_called
from kjo_django.contrib.celery_codemod.task_options import CONTEXT, JobPlan

FROM_MODULE = re.compile(r"\{from ([\w.]+) import (\w+)\}")
MODULE = re.compile(r"\{import (\w+)\}")
"""What stands for names that the file has to import, in the source of an option."""
CLASS_TO_DO = (
    "write run() as a function with @job; what the class keeps between runs belongs into the module"
)


class DeclarationPlanner(Planner):
    """Plans the edits of decorators and of what bound tasks do with ``self``."""

    def enter_function(self, node: cst.FunctionDef) -> None:
        """Plan the edits of a task's decorator and first parameter."""
        is_top = len(self.scopes) == 2
        task = self.file.module.tasks.get(node.name.value) if is_top else None
        decorator = next((each for each in node.decorators if self._declares(each)), None)
        if decorator is None:
            self._report_unknown(node)
            return
        what = f"task {node.name.value}"
        if task is None or self.file.line(node) not in _lines(task):
            why = "it is declared within a class or a function, or twice"
            self.file.leave(decorator, "declarations", what, why, "declare it in the module")
            return
        plan = self.file.plans[task]
        if plan.reasons:
            why = "; ".join(reason.why for reason in plan.reasons)
            to_do = "; ".join(dict.fromkeys(reason.to_do for reason in plan.reasons))
            self.file.leave(decorator, "declarations", what, why, to_do)
            return
        for remark in plan.remarks:
            self.file.remark(remark.line, what, remark.why, remark.to_do)
        self.file.change(decorator, lambda updated: self._job(updated, plan), "declarations")
        if task.is_bound:
            first = (*node.params.posonly_params, *node.params.params)[0]
            self.file.change(first.name, lambda updated: updated.with_changes(value=plan.context))

    def _report_unknown(self, node: cst.FunctionDef) -> None:
        """Report a decorator that may be one of an application of Celery."""
        for decorator in node.decorators:
            name = dotted_name(_expression(decorator.decorator))
            if len(name) > 1 and name[-1] == "task" and uses_celery(self.file.module):
                why = f"what {'.'.join(name[:-1])} is was not found in the files that were read"
                to_do = "give the path of the application, too, or write @job"
                what = f"task {node.name.value}"
                self.file.leave(decorator, "declarations", what, why, to_do)

    def _declares(self, decorator: cst.Decorator) -> bool:
        called = decorator.decorator
        name = dotted_name(called.func if isinstance(called, cst.Call) else called)
        if self.is_celery(_expression(called), "shared_task", "task"):
            return True
        is_attribute = len(name) > 1 and name[-1] == "task"
        return is_attribute and self.file.index.is_app(self.file.module, name[:-1])

    def _job(self, decorator: cst.Decorator, plan: JobPlan) -> cst.Decorator:
        """Return the decorator of the job."""
        called = decorator.decorator
        args = list(called.args) if isinstance(called, cst.Call) else []
        added = dict(plan.added)
        kept: list[cst.Arg] = []
        for arg in args:
            if (change := self._option(arg, plan)) is not None:
                kept.append(change)
            elif arg.keyword is not None and arg.keyword.value == "retry_kwargs" and added:
                code = added.pop(name := next(iter(added)))
                kept.append(_renamed(arg, name, self._value(code)))
        last = args[-1].comma if args else cst.MaybeSentinel.DEFAULT
        for name, code in added.items():
            if kept and len(args) > 1:
                kept[-1] = kept[-1].with_changes(comma=_plain(args[0].comma))
            kept.append(keyword(name, self._value(code)))
        if kept:
            kept[-1] = kept[-1].with_changes(comma=last)
        job = cst.Name(self.file.use("kjo_django", "job"))
        if not kept:
            return decorator.with_changes(decorator=job)
        call = called if isinstance(called, cst.Call) else cst.Call(job)
        return decorator.with_changes(decorator=call.with_changes(func=job, args=kept))

    def _option(self, arg: cst.Arg, plan: JobPlan) -> cst.Arg | None:
        change = plan.options.get(arg.keyword.value) if arg.keyword is not None else None
        if change is None:
            return None
        name, code = change
        value = arg.value if code is None else self._value(code)
        return _renamed(arg, name, value)

    def _value(self, code: str) -> cst.BaseExpression:
        code = FROM_MODULE.sub(lambda found: self.file.use(found[1], found[2]), code)
        return cst.parse_expression(MODULE.sub(lambda found: self.file.use(found[1]), code))

    def visit_ClassDef(self, node: cst.ClassDef) -> bool | None:
        """Report tasks that are classes, and what base classes of tasks do."""
        bases, name = self.file.plans.bases, node.name.value
        is_top = len(self.scopes) == 1
        users = bases.users(self.file.module, name) if is_top else ()
        if users:
            self._report_base(node, users)
        elif (is_top and bases.is_task(self.file.module, name)) or any(
            map(self._is_task, node.bases)
        ):
            why = "a task that is a class, or a base class of tasks"
            self.file.leave(node, "declarations", f"class {name}", why, CLASS_TO_DO)
        for base in filter(self._is_task, node.bases):
            self.file.kept_names.add(dotted_name(base.value)[0])
        return super().visit_ClassDef(node)

    def _is_task(self, base: cst.Arg) -> bool:
        """Return whether a base of a class is Celery's ``Task``."""
        name = dotted_name(base.value)
        of_app = name[-1:] == ("Task",) and self.file.index.is_app(self.file.module, name[:-1])
        return of_app or self.is_celery(base.value, "Task")

    def _report_base(self, node: cst.ClassDef, users: Sequence[Task]) -> None:
        """Report the methods of a base class that nothing calls for jobs, each by its line."""
        name = node.name.value
        methods = [each for each in node.body.body if isinstance(each, cst.FunctionDef)]
        for method in methods:
            if method.name.value in OBSERVERS:
                what = f"{name}.{method.name.value}"
                why = not_called(users)
                self.file.leave(method, "", what, why, OBSERVERS[method.name.value])
        if not methods and all(map(self.file.plans.is_possible, users)):
            why = f"its options are those of {listed(users)} now"
            self.file.remark(self.file.line(node), f"class {name}", why, "delete it")

    # --- The body of a bound task -----------------------------------------------------------------

    @property
    def _bound(self) -> JobPlan | None:
        task = self.scope.bound_task
        if task is None or not self.file.plans.is_possible(task):
            return None
        return self.file.plans[task]

    def _of_self(self, node: cst.CSTNode) -> tuple[str, ...]:
        """Return which attribute of ``self`` an expression is, or none."""
        name, task = dotted_name(node), self.scope.bound_task
        return name[1:] if task is not None and name[:1] == (task.self_name,) else ()

    def visit_Attribute(self, node: cst.Attribute) -> bool | None:
        """Plan the edit of an attribute of ``self``."""
        super().visit_Attribute(node)
        plan, code = self._bound, CONTEXT.get(self._of_self(node))
        if plan is None or code is None:
            return None
        expression = cst.parse_expression(code.format(context=plan.context))
        self.file.change(node, lambda updated: expression.deep_clone())
        return False

    def visit_Raise(self, node: cst.Raise) -> None:
        """Plan the edit of ``raise self.retry(…)``."""
        self._plan_retry(node, node.exc)

    def visit_Expr(self, node: cst.Expr) -> None:
        """Plan the edit of a statement ``self.retry(…)``, which raises in Celery."""
        self._plan_retry(node, node.value)

    def visit_Return(self, node: cst.Return) -> None:
        """Plan the edit of ``return self.retry(…)``, which raises in Celery."""
        self._plan_retry(node, node.value)

    def _plan_retry(self, node: cst.CSTNode, call: cst.BaseExpression | None) -> None:
        if isinstance(call, cst.Call) and self._of_self(call.func) == ("retry",):
            if self._bound is None:
                why = "its task is left as it is"
                self.file.leave(node, "calls", "self.retry()", why, "raise Retry(delay=…)")
                return
            self.file.change(node, self._raised, "calls")

    def _raised(self, updated: Any) -> cst.Raise:
        """Return the statement that raises ``Retry`` instead of calling ``self.retry``."""
        call: Any = updated.exc if isinstance(updated, cst.Raise) else updated.value
        given = {arg.keyword.value: arg.value for arg in call.args if arg.keyword is not None}
        args: list[cst.Arg] = []
        cause = updated.cause if isinstance(updated, cst.Raise) else None
        if "exc" in given:
            args.append(cst.Arg(cst.Call(cst.Name("str"), [cst.Arg(given["exc"])])))
            if cause is None and isinstance(given["exc"], cst.Name):
                cause = cst.From(given["exc"])
        if "countdown" in given:
            args.append(keyword("delay", given["countdown"]))
        name = cst.Name(self.file.use("kjo_django", "Retry"))
        return cst.Raise(exc=cst.Call(name, args), cause=cause)


def _expression(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.func if isinstance(node, cst.Call) else node


def _renamed(arg: cst.Arg, name: str, value: cst.BaseExpression) -> cst.Arg:
    return arg.with_changes(keyword=cst.Name(name), value=value)


def _plain(comma: Any) -> Any:
    """Return a comma with the line break behind it, if there is one, and without a comment."""
    space = comma.whitespace_after if isinstance(comma, cst.Comma) else None
    if not isinstance(space, cst.ParenthesizedWhitespace):
        return cst.MaybeSentinel.DEFAULT
    plain = space.with_changes(first_line=cst.TrailingWhitespace(), empty_lines=())
    return cst.Comma(whitespace_after=plain)


def _lines(task: Task) -> range:
    """Return the lines in which a function may be said to begin: from its first decorator."""
    first = min((each.lineno for each in task.node.decorator_list), default=task.node.lineno)
    return range(first, task.node.lineno + 1)
