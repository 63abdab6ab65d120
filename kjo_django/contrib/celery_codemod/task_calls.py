"""Calls of tasks: ``delay``, ``apply_async``, on commit, at once, and what is asked of results."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from kjo_django.contrib.celery_codemod.call_arguments import (
    Call,
    awaited,
    enqueue_call,
    is_number,
    listed,
    missing,
    named,
    of_apply_async,
)
from kjo_django.contrib.celery_codemod.canvas import RESULT_TO_DO, RETURNED_WHY
from kjo_django.contrib.celery_codemod.edits import (
    CannotRewriteError,
    FileEdits,
    Planner,
    code_of,
    dotted_name,
    target_of,
)
from kjo_django.contrib.celery_codemod.project_index import (
    TASK_CALLS,
    Name,
    Task,
    uses_celery,
)

LEFT = {
    "signature": "use job.step(…) within chain(…), group(…) or Workflow",
    "subtask": "use job.step(…) within chain(…), group(…) or Workflow",
    "map": "enqueue one job for each: job.enqueue_many([{…}, …])",
    "starmap": "enqueue one job for each: job.enqueue_many([{…}, …])",
    "chunks": "enqueue one job for each: job.enqueue_many([{…}, …])",
    "AsyncResult": "JobHandle.of(id), with the id of a handle",
}
"""Methods of tasks that have no equal."""
ASKED_TO_DO = {
    "status": "handle.status is a JobStatus, whose values are other ones",
    "ready": "ask handle.status",
    "successful": "ask handle.status",
    "failed": "ask handle.status",
    "state": "ask handle.status, a JobStatus",
    "result": "ask handle.result, which is NO_RESULT until there is one",
    "revoke": "operations.jobs.cancel_one(handle.id)",
    "forget": "leave it out: results are kept for result_ttl",
    "collect": "read handle.wait() of each",
}
"""What is asked of a result in Celery, and what to ask here."""
OF_HANDLES = frozenset({"get", "id", "task_id"})
"""Attributes of a result that the codemod rewrites, or that are the same here."""
OF_FUNCTIONS = frozenset({"__doc__", "__module__", "__name__"})
"""Attributes of a task that its job has, too."""
USED_WHY = "what is kept or passed on is a handle of kjo_django now, and no result of Celery"
PURE = frozenset({"bool", "dict", "float", "int", "len", "list", "repr", "str", "tuple"})
"""Functions that may be called before a commit as well as after it."""
REVOKE_TO_DO = (
    "operations.jobs.cancel_one(id, abort=True) for terminate=True; of a list: "
    "operations.jobs.cancel(Job.objects.filter(pk__in=ids))"
)
REFERENCE_TO_DO = (
    "pass lambda …: job.enqueue(…), or job.step(…) within chain(…) and group(…); the page on "
    "moving from Celery has the others"
)
SEND_TO_DO = {
    True: "import the job and call its enqueue(…)",
    False: "publish an event for the other service, or ask its REST API",
}


class CallPlanner(Planner):
    """Plans the edits of calls that enqueue one task, and reports others."""

    def __init__(self, file: FileEdits, tree: cst.Module) -> None:
        super().__init__(file, tree)
        self._handles: set[tuple[cst.CSTNode, str]] = set()
        self._functions: set[cst.CSTNode] = set()
        """Attributes that are called, or dealt with."""
        self._assigned: set[cst.CSTNode] | None = None
        self._changed_in: dict[cst.CSTNode, list[tuple[tuple[int, int], str]]] = {}
        self._loops_in: dict[cst.CSTNode, Sequence[cst.CSTNode]] = {}
        self._placed: set[cst.CSTNode] = set()
        """Expressions whose value is read by nothing, or by what this planner sees."""

    def visit_Call(self, node: cst.Call) -> bool | None:
        """Plan a call."""
        self._functions.add(node.func)
        if isinstance(node.func, cst.Call):
            self.bases.add(node.func)
        if node in self.file.done:
            return None
        if self._is_on_commit(node):
            return self._plan_on_commit(node)
        self._plan_by_name(node)
        if self._plan_partial(node) or self._plan_threaded(node):
            return None
        if (called := self.task_of(node.func)) is not None:
            self._plan_direct(node, called)
        elif isinstance(node.func, cst.Attribute):
            task = self.task_of(node.func.value)
            if task is not None:
                self._plan_method(node, task, node.func.attr.value)
            else:
                self._plan_other(node, node.func)
        elif self.is_celery(node.func, "AsyncResult", "GroupResult", "signature", "subtask"):
            why = "it finds what Celery knows by its id or name"
            to_do = "JobHandle.of(id) for a result, job.step(…) for a signature"
            self.file.leave(node, "calls", code_of(node), why, to_do)
        return None

    # --- Enqueues ---------------------------------------------------------------------------------

    def _plan_method(self, node: cst.Call, task: Task, method: str) -> None:
        if method in TASK_CALLS:
            self._plan_enqueue(node, task, method)
        elif method == "run":
            self._plan_direct(node, task)
        elif method == "apply":
            self._plan_apply(node, task)
        elif method in LEFT or self._is_of_job(node.func):
            why = f"jobs have no {method}()"
            to_do = LEFT.get(method, "see the page on moving from Celery")
            self.file.leave(node, "calls", code_of(node), why, to_do)

    def _plan_by_name(self, node: cst.Call) -> None:
        """Report what is asked of a task or a result by a function."""
        name = node.func.value if isinstance(node.func, cst.Name) else ""
        first = node.args[0].value if node.args else None
        if first is None:
            return
        if name in {"delattr", "getattr", "hasattr", "setattr"}:
            if self.file.plans.is_possible(self.task_of(first)):
                why = "it names an attribute of a task by text"
                self.file.leave(node, "calls", code_of(node), why, "name what the job has")
        elif name in {"repr", "str"} and self._is_handle(first):
            self._report_text(node)

    def _report_text(self, node: cst.CSTNode) -> None:
        why = "the text of a result was its id, and that of a handle is another one"
        self.file.leave(node, "calls", code_of(node), why, "write str(handle.id)")

    def visit_FormattedStringExpression(self, node: cst.FormattedStringExpression) -> None:
        """Report a result that is made text."""
        if self._is_handle(node.expression):
            self._report_text(node.expression)

    def _plan_enqueue(self, node: cst.Call, task: Task, method: str) -> None:
        if not self._check_task(node, task):
            return
        if not self.can_rewrite(node, "calls", lambda: self._arguments(node.args, task, method)):
            return
        is_async, is_base = self.scope.is_async, node in self.bases
        if is_async and self.generators:
            why = "it would be awaited in a generator expression, which makes it another one"
            self.file.leave(node, "calls", code_of(node), why, "write a loop with aenqueue(…)")
            return
        own = self._own_name(node.func, task)
        if node not in self._placed | self.bases:
            self.file.remark(self.file.line(node), code_of(node), USED_WHY, RESULT_TO_DO)

        def edit(updated: Any) -> cst.BaseExpression:
            call = self._arguments(updated.args, task, method)
            base = own or updated.func.value
            name = "aenqueue" if is_async else "enqueue"
            spaced = updated if method.startswith("delay") else None
            made = enqueue_call(base, call, name, spaced)
            return awaited(made, has_brackets=is_base) if is_async else made

        self.file.change(node, edit, "calls")

    def _arguments(self, args: Sequence[cst.Arg], task: Task, method: str) -> Call:
        if method.startswith("delay"):
            return Call(named(args, task))
        return of_apply_async(args, task, self.file)

    def _own_name(self, func: cst.BaseExpression, task: Task) -> cst.Name | None:
        """Return the task's name where it is called as ``self``."""
        is_self = bool(task.self_name) and dotted_name(func)[:-1] == (task.self_name,)
        return cst.Name(task.name) if is_self else None

    def _check_task(self, node: cst.Call, task: Task) -> bool:
        if self.file.plans.is_possible(task):
            return True
        why = f"the task {task.name} is left as it is"
        self.file.leave(node, "calls", code_of(node), why, "rewrite it together with its task")
        return False

    # --- At commit, in another thread, later ------------------------------------------------------

    def _is_on_commit(self, node: cst.Call) -> bool:
        origin = self.origin_of(node.func)
        return origin in {
            ("django", "db", "transaction", "on_commit"),
            ("transaction", "on_commit"),
        } and bool(node.args)

    def _plan_on_commit(self, node: cst.Call) -> bool:
        """Plan ``on_commit(lambda: task.delay(…))`` as the enqueue, which the transaction holds."""
        function = node.args[0].value
        if isinstance(function, cst.Lambda):
            self._placed.add(function.body)
        for part in (node.func, *(arg.value for arg in node.args)):
            part.visit(self)
        made = self._edited_function(function)
        if made is None:
            return False
        why = ""
        if len(node.args) > 1 or (isinstance(function, cst.Lambda) and _has_parameters(function)):
            why = "an enqueue is part of the transaction, and takes effect at its commit"
        elif self.scope.is_async:
            why = "it is in a coroutine, where on_commit cannot be called"
        elif isinstance(function, cst.Lambda):
            why = self._later_value(node, function)
        if why:
            to_do = "call enqueue itself, without on_commit, where its arguments have their values"
            self.file.remark(self.file.line(node), code_of(node), why, to_do)
            return False

        def edit(updated: Any) -> cst.BaseExpression:
            value = updated.args[0].value
            if isinstance(value, cst.Lambda):
                return value.body
            if isinstance(value, cst.Attribute):
                return cst.Call(value)
            assert isinstance(value, cst.Call)
            return cst.Call(value.args[0].value, value.args[1:])

        self.file.change(node, edit)
        return False

    def _later_value(self, node: cst.Call, function: cst.Lambda) -> str:
        """Return why a lambda may be given other values at the commit than now, or empty."""
        for call in m.findall(function, m.Call()):
            assert isinstance(call, cst.Call)
            is_known = call in self.file.edits or call in self.file.done
            if not is_known and dotted_name(call.func) not in {(name,) for name in PURE}:
                return f"{code_of(call)} is called at the commit, and would be called before it"
        names = {each.value for each in m.findall(function, m.Name()) if isinstance(each, cst.Name)}
        names -= self.file.module.imports.keys() | self.file.module.tasks.keys()
        start, end = self._start_of_change(node), self.file.positions[node].end
        begin = self.file.positions[node].start
        own = ((begin.line, begin.column), (end.line, end.column))
        for place, changed in self._changes():
            if place > start and changed in names and not own[0] <= place <= own[1]:
                return f"{changed} may have changed at the commit"
        return ""

    def _changes(self) -> list[tuple[tuple[int, int], str]]:
        """Return where the function changes which names, or what they mean."""
        around = self.scope.node
        if around not in self._changed_in:
            nodes = m.findall(around, m.Call() | m.Name() | m.Attribute() | m.Subscript())
            begins = [(self.file.positions[each].start, self._changed(each)) for each in nodes]
            self._changed_in[around] = [
                ((begin.line, begin.column), name) for begin, name in begins if name
            ]
        return self._changed_in[around]

    def _loops(self) -> Sequence[cst.CSTNode]:
        around = self.scope.node
        if around not in self._loops_in:
            self._loops_in[around] = m.findall(around, m.For() | m.While() | m.CompFor())
        return self._loops_in[around]

    def _start_of_change(self, node: cst.Call) -> tuple[int, int]:
        """Return from which line and column on a change comes after a call: of the loop around."""
        wanted = self.file.positions[node]
        first = wanted.end
        for loop in self._loops():
            around = self.file.positions[loop]
            if around.start.line <= wanted.start.line and wanted.end.line <= around.end.line:
                first = min(first, around.start, key=lambda each: (each.line, each.column))
        return first.line, first.column - 1

    def _changed(self, node: cst.CSTNode) -> str:
        """Return the name that a node binds, or on which it calls a method or sets a part."""
        if isinstance(node, cst.Name):
            return node.value if node in self._targets() else ""
        value = node.func if isinstance(node, cst.Call) else node
        if not isinstance(node, cst.Call) and node not in self._targets():
            return ""
        while isinstance(value, (cst.Attribute, cst.Subscript)):
            value = value.value
            if isinstance(value, cst.Name):
                return value.value
        return ""

    def _targets(self) -> set[cst.CSTNode]:
        """Return what is assigned to, bound or deleted in the file."""
        if self._assigned is None:
            self._assigned = set(_targets_in(self.scopes[0].node))
        return self._assigned

    def _edited_function(self, function: cst.BaseExpression) -> cst.CSTNode | None:
        """Return the node that will be edited in a function of one call to a task."""
        if isinstance(function, cst.Lambda):
            return function.body if function.body in self.file.edits else None
        if isinstance(function, cst.Call):
            is_partial = self.origin_of(function.func) == ("functools", "partial")
            return function if is_partial and function in self.file.edits else None
        if isinstance(function, cst.Attribute) and function in self.file.edits:
            return function
        return None

    def _plan_partial(self, node: cst.Call) -> bool:
        """Plan ``partial(task.delay, …)``."""
        if self.origin_of(node.func) != ("functools", "partial") or not node.args:
            return False
        found = self._delayed(node.args[0].value)
        if found is None:
            return False
        self._functions.add(node.args[0].value)
        if self._check_task(node, found) and self.can_rewrite(
            node, "calls", lambda: self._whole(node, found)
        ):

            def edit(updated: Any) -> cst.Call:
                first, *others = updated.args
                enqueue = first.value.with_changes(attr=cst.Name("enqueue"))
                args = [first.with_changes(value=enqueue), *named(others, found)]
                made = updated.with_changes(args=args)
                assert isinstance(made, cst.Call)
                return made

            self.file.change(node, edit, "calls")
        return True

    @staticmethod
    def _whole(node: cst.Call, task: Task) -> None:
        """Raise if a partial lacks arguments, which callers may then give by place."""
        if lacking := missing(task, named(node.args[1:], task)):
            why = f"whoever calls it gives {', '.join(lacking)}, and enqueue takes it by name"
            raise CannotRewriteError(why, f"pass lambda …: {task.name}.enqueue({listed(task)})")

    def _plan_threaded(self, node: cst.Call) -> bool:
        """Plan ``sync_to_async(task.delay)(…)``."""
        inner = node.func
        if not isinstance(inner, cst.Call) or not inner.args:
            return False
        task = self._delayed(inner.args[0].value)
        if self.origin_of(inner.func)[-1:] != ("sync_to_async",) or task is None:
            return False
        self._functions.add(inner.args[0].value)
        if self._check_task(node, task) and self.can_rewrite(
            node, "calls", lambda: named(node.args, task)
        ):

            def edit(updated: Any) -> cst.Call:
                base = updated.func.args[0].value.value
                return enqueue_call(base, Call(named(updated.args, task)), "aenqueue", updated)

            self.file.change(node, edit, "calls")
        return True

    def _delayed(self, node: cst.BaseExpression) -> Task | None:
        """Return the task whose ``delay`` an expression is."""
        if isinstance(node, cst.Attribute) and node.attr.value in ("delay", "delay_on_commit"):
            return self.task_of(node.value)
        return None

    # --- Here and now -----------------------------------------------------------------------------

    def _plan_direct(self, node: cst.Call, task: Task) -> None:
        """Plan a call of the function itself; a job that takes a context has to be given one."""
        is_run = isinstance(node.func, cst.Attribute) and node.func.attr.value == "run"
        if not self.file.plans.is_possible(task) or not (task.is_bound or is_run):
            return
        if task.is_bound and not self.file.is_test:
            why = f"{task.name} takes a context, which a direct call has to give"
            to_do = "move what the function does into one without context, and call that"
            self.file.leave(node, "calls", code_of(node), why, to_do)
            return
        if not self.can_rewrite(node, "calls", lambda: named(node.args, task)):
            return

        def edit(updated: Any) -> cst.Call:
            base = updated.func.value if is_run else updated.func
            return self._direct(base, named(updated.args, task), task)

        self.file.change(node, edit, "calls")

    def _direct(self, base: cst.BaseExpression, args: list[cst.Arg], task: Task) -> cst.Call:
        if not task.is_bound:
            return cst.Call(base, args)
        perform = cst.Name(self.file.use("kjo_django.testing", "perform"))
        return cst.Call(perform, [cst.Arg(base), *args])

    def _plan_apply(self, node: cst.Call, task: Task) -> None:
        why = "its result is Celery's EagerResult"
        to_do = f"call the job, {task.name}(…), or perform({task.name}, …) in a test"
        self.file.leave(node, "calls", code_of(node), why, to_do)

    # --- What belongs to no task that was read ----------------------------------------------------

    def _plan_other(self, node: cst.Call, func: cst.Attribute) -> None:
        method = func.attr.value
        base: Name = dotted_name(func.value)
        if method in {"delay", "apply_async"} and self._may_be_task(func.value):
            why = f"a task {code_of(func.value)} was not found in the files that were read"
            to_do = (
                "give the path of its declaration, too; if it has moved it is a job by now, and "
                "has enqueue(…)"
            )
            self.file.leave(node, "calls", code_of(node), why, to_do)
        elif method == "send_task" and uses_celery(self.file.module):
            self._report_sent(node)
        elif method == "revoke" and base[-1:] == ("control",):
            why = "the control of Celery's workers does not know jobs"
            self.file.leave(node, "calls", code_of(node), why, REVOKE_TO_DO)
        elif method == "add_periodic_task":
            why = "periodic tasks are declared"
            to_do = "@job(schedule=…), or KJO['SCHEDULES']"
            self.file.leave(node, "calls", code_of(node), why, to_do)
        elif method == "update" and base[-1:] == ("conf",):
            self._report_settings(node, base, code_of(node))
        elif method == "get" and self._is_handle(func.value):
            self._plan_get(node)

    def _report_settings(self, node: cst.CSTNode, name: Name, what: str) -> None:
        app = name[: name.index("conf")]
        if uses_celery(self.file.module) or self.file.index.is_app(self.file.module, app):
            why = "settings of Celery's application are not read"
            to_do = "write those that jobs need into KJO: queues, SCHEDULES, TIMEOUT, time zones"
            self.file.leave(node, "settings", what, why, to_do)

    def _may_be_task(self, value: cst.BaseExpression) -> bool:
        """Return whether a value may be a task: in a test it may be a mock, which others see to."""
        name = dotted_name(value)
        return not (self.file.is_test and name and value in self.file.done)

    def _report_sent(self, node: cst.Call) -> None:
        first = node.args[0].value if node.args else None
        name = first.evaluated_value if isinstance(first, cst.SimpleString) else None
        task = self.file.index.task_called(name) if isinstance(name, str) else None
        why = "it names a task by text"
        if task is not None:
            where = f"{task.module.file.shown_path}:{task.node.lineno}"
            why = f"it names the task of {where} by text, which takes {listed(task)}"
        self.file.leave(node, "calls", code_of(node), why, SEND_TO_DO[task is not None])

    # --- Results ----------------------------------------------------------------------------------

    def visit_Assign(self, node: cst.Assign) -> None:
        """Remember names of what an enqueue answers."""
        for each in node.targets:
            name = dotted_name(
                each.target.value if isinstance(each.target, cst.Subscript) else each.target
            )
            if "conf" in name[1:]:
                self._report_settings(node, name, code_of(each.target))
            self._keep(each.target, node.value)

    def visit_Expr(self, node: cst.Expr) -> None:
        """Note an expression that is a whole statement."""
        self._placed.add(node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        """Remember a name of what an enqueue answers."""
        if node.value is not None:
            self._keep(node.target, node.value)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        """Remember a name of what an enqueue answers."""
        self._keep(node.target, node.value)

    def _keep(self, target: cst.BaseExpression, value: cst.BaseExpression) -> None:
        """Remember a name of what an enqueue answers; report one that is kept elsewhere."""
        if not self._is_enqueue(value):
            return
        self._placed.add(value)
        if isinstance(target, cst.Name):
            self._handles.add((self.scope.node, target.value))
        else:
            self.file.remark(self.file.line(value), code_of(value), USED_WHY, RESULT_TO_DO)

    def visit_Return(self, node: cst.Return) -> None:
        """Report that a result is returned."""
        if node.value is not None:
            self._placed.add(node.value)
        if node.value is not None and self._is_enqueue(node.value):
            self.file.remark(self.file.line(node), code_of(node), RETURNED_WHY, RESULT_TO_DO)

    def _is_enqueue(self, node: cst.BaseExpression) -> bool:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return False
        is_call = node.func.attr.value in TASK_CALLS
        return is_call and self.file.plans.is_possible(self.task_of(node.func.value))

    def _is_handle(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Name):
            return any((scope.node, node.value) in self._handles for scope in self.scopes)
        return self._is_enqueue(node)

    def _plan_get(self, node: cst.Call) -> None:
        names = {arg.keyword.value if arg.keyword is not None else "timeout" for arg in node.args}
        is_finite = len(node.args) == 1 and is_number(node.args[0].value)
        if names <= {"timeout"} and not is_finite:
            why = "it waits for ever or as long as a value says; wait() has 30 s unless it is given"
            to_do = "handle.wait(timeout=…) with a number of seconds"
            self.file.leave(node, "calls", code_of(node), why, to_do)
            return
        if not names <= {"timeout"} or self.scope.is_async:
            why = "a result is awaited with more than a timeout, or in a coroutine"
            to_do = "handle.wait(timeout=…), or await handle.await_(timeout=…)"
            self.file.leave(node, "calls", code_of(node), why, to_do)
            return
        self.file.change(
            node,
            lambda updated: updated.with_changes(
                func=updated.func.with_changes(attr=cst.Name("wait"))
            ),
        )

    def visit_Attribute(self, node: cst.Attribute) -> bool | None:
        """Plan what is asked of results, and report methods of tasks that are passed on."""
        super().visit_Attribute(node)
        name = node.attr.value
        if self._is_handle(node.value):
            if name == "task_id":
                self.file.change(node, lambda updated: updated.with_changes(attr=cst.Name("id")))
            elif name not in OF_HANDLES or (name == "get" and node not in self._functions):
                why = f"a handle has no {name} as Celery's result has"
                to_do = ASKED_TO_DO.get(name, "ask handle.status, handle.result, handle.wait()")
                self.file.leave(node, "calls", code_of(node), why, to_do)
        if name == "connect" and self.origin_of(node.value)[:2] == ("celery", "signals"):
            why = "Celery's signals are not sent for jobs"
            to_do = "signals.job_completed, job_failed and job_retried of kjo_django, or middleware"
            self.file.leave(node, "", code_of(node), why, to_do)
        if node in self._functions or node in self.file.done or node in self.file.edits:
            return None
        if (task := self._delayed(node)) is not None:
            self._plan_reference(node, task)
        elif name not in OF_FUNCTIONS and self._is_of_job(node):
            why = f"a job has no {name} as a task has"
            self.file.leave(node, "calls", code_of(node), why, REFERENCE_TO_DO)
        return None

    def _is_of_job(self, node: cst.BaseExpression) -> bool:
        """Return whether an attribute is one of a task that becomes a job, but not of ``self``."""
        bound = self.scope.bound_task
        if not isinstance(node, cst.Attribute):
            return False
        is_self = bound is not None and dotted_name(node.value) == (bound.self_name,)
        return not is_self and self.file.plans.is_possible(self.task_of(node.value))

    def _plan_reference(self, node: cst.Attribute, task: Task) -> None:
        """Plan ``task.delay`` that is not called here."""
        if not task.parameters and self.file.plans.is_possible(task):
            self.file.change(
                node, lambda updated: updated.with_changes(attr=cst.Name("enqueue")), "calls"
            )
            return
        why = "it is passed on, and enqueue takes its arguments by name"
        to_do = f"pass lambda …: {task.name}.enqueue({listed(task)})"
        self.file.leave(node, "calls", code_of(node), why, to_do)


def _targets_in(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yield what is assigned to, bound or deleted in a tree."""
    if (target := target_of(node)) is not None:
        yield from _parts_of_target(target)
    for child in node.children:
        yield from _targets_in(child)


def _parts_of_target(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    yield node
    if isinstance(node, (cst.Tuple, cst.List)):
        for element in node.elements:
            yield from _parts_of_target(element.value)


def _has_parameters(function: cst.Lambda) -> bool:
    parameters = function.params
    return bool(parameters.params or parameters.kwonly_params or parameters.posonly_params)
