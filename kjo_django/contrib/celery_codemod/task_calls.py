"""Calls of tasks: ``delay``, ``apply_async``, on commit, at once, and what is asked of results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import libcst as cst

from kjo_django.contrib.celery_codemod.call_arguments import (
    Call,
    awaited,
    enqueue_call,
    listed,
    named,
    of_apply_async,
)
from kjo_django.contrib.celery_codemod.edits import (
    CannotRewriteError,
    FileEdits,
    Planner,
    code_of,
    dotted_name,
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
RESULT_TO_DO = {
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
REVOKE_TO_DO = (
    "operations.jobs.cancel_one(id, abort=True) for terminate=True; of a list: "
    "operations.jobs.cancel(Job.objects.filter(pk__in=ids))"
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

    def visit_Call(self, node: cst.Call) -> bool | None:
        """Plan a call."""
        self._functions.add(node.func)
        if isinstance(node.func, cst.Call):
            self.bases.add(node.func)
        if node in self.file.done:
            return None
        if self._is_on_commit(node):
            return self._plan_on_commit(node)
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
        elif method in LEFT:
            why = f"jobs have no {method}()"
            self.file.leave(node, "calls", code_of(node), why, LEFT[method])

    def _plan_enqueue(self, node: cst.Call, task: Task, method: str) -> None:
        if not self._check_task(node, task):
            return
        if not self._check(node, lambda: self._arguments(node.args, task, method)):
            return
        is_async, is_base = self.scope.is_async, node in self.bases
        own = self._own_name(node.func, task)

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

    def _check(self, node: cst.CSTNode, attempt: Any) -> bool:
        """Return whether a rewrite succeeds; report it if not."""
        before = set(self.file.imports)
        try:
            attempt()
        except CannotRewriteError as error:
            self.file.leave(node, "calls", code_of(node), error.why, error.to_do)
            return False
        finally:
            self.file.imports = before
        return True

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
        for part in (node.func, *(arg.value for arg in node.args)):
            part.visit(self)
        made = self._edited_function(function)
        if made is None:
            return False
        if len(node.args) > 1 or (isinstance(function, cst.Lambda) and _has_parameters(function)):
            why = "an enqueue is part of the transaction, and takes effect at its commit"
            to_do = "call enqueue itself, without on_commit"
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
        if self._check_task(node, found) and self._check(node, lambda: named(node.args[1:], found)):

            def edit(updated: Any) -> cst.Call:
                first, *others = updated.args
                enqueue = first.value.with_changes(attr=cst.Name("enqueue"))
                args = [first.with_changes(value=enqueue), *named(others, found)]
                made = updated.with_changes(args=args)
                assert isinstance(made, cst.Call)
                return made

            self.file.change(node, edit, "calls")
        return True

    def _plan_threaded(self, node: cst.Call) -> bool:
        """Plan ``sync_to_async(task.delay)(…)``."""
        inner = node.func
        if not isinstance(inner, cst.Call) or not inner.args:
            return False
        task = self._delayed(inner.args[0].value)
        if self.origin_of(inner.func)[-1:] != ("sync_to_async",) or task is None:
            return False
        self._functions.add(inner.args[0].value)
        if self._check_task(node, task) and self._check(node, lambda: named(node.args, task)):

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
        if not self._check(node, lambda: named(node.args, task)):
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
            why = f"what {code_of(func.value)} is was not found in the files that were read"
            to_do = "give the path of its declaration, too; a job has enqueue(…)"
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
        elif method == "get" and self._is_handle(func.value):
            self._plan_get(node)

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
        target = node.targets[0].target
        if isinstance(target, cst.Name) and self._is_enqueue(node.value):
            self._handles.add((self.scope.node, target.value))

    def _is_enqueue(self, node: cst.BaseExpression) -> bool:
        if not isinstance(node, cst.Call) or not isinstance(node.func, cst.Attribute):
            return False
        is_call = node.func.attr.value in TASK_CALLS
        return is_call and self.file.plans.is_possible(self.task_of(node.func.value))

    def _is_handle(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.Name):
            return (self.scope.node, node.value) in self._handles
        return self._is_enqueue(node)

    def _plan_get(self, node: cst.Call) -> None:
        names = {arg.keyword.value if arg.keyword is not None else "timeout" for arg in node.args}
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
            elif name in RESULT_TO_DO:
                why = f"a handle has no {name} as Celery's result has"
                self.file.leave(node, "calls", code_of(node), why, RESULT_TO_DO[name])
        task = self._delayed(node)
        if task is not None and node not in self._functions and node not in self.file.done:
            self._plan_reference(node, task)
        return None

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


def _has_parameters(function: cst.Lambda) -> bool:
    parameters = function.params
    return bool(parameters.params or parameters.kwonly_params or parameters.posonly_params)
