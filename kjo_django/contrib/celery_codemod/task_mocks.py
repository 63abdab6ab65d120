"""Mocks of tasks in tests: what is patched, and what is asserted of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
import libcst.matchers as m

from kjo_django.contrib.celery_codemod.call_arguments import (
    Call,
    is_name,
    named,
    of_apply_async,
)
from kjo_django.contrib.celery_codemod.edits import (
    FileEdits,
    Planner,
    code_of,
)
from kjo_django.contrib.celery_codemod.project_index import TASK_CALLS, Task

ASSERTIONS = frozenset(
    {"assert_called_with", "assert_called_once_with", "assert_any_call", "assert_awaited_with"}
)
NOTED = frozenset({"call_args", "call_args_list"})
"""What a mock has noted of the arguments of its calls."""
AT_ONCE = frozenset({"CELERY_TASK_ALWAYS_EAGER", "CELERY_ALWAYS_EAGER"})
EAGER = AT_ONCE | {"CELERY_TASK_EAGER_PROPAGATES", "CELERY_EAGER_PROPAGATES_EXCEPTIONS"}
RAISED_WHY = "enqueue() raises the errors of handlers, as Celery did with EAGER_PROPAGATES alone"
RAISED_TO_DO = "immediate(raise_errors=False), if the settings have no EAGER_PROPAGATES"
EAGER_TO_DO = "self.enterContext(immediate()) in setUp, or drain(), both of kjo_django.testing"


@dataclass(frozen=True, slots=True)
class _Mock:
    """What a name in a test stands for."""

    task: Task
    method: str
    """The method that is mocked, as Celery names it; empty for the whole task."""


class MockPlanner(Planner):
    """Plans the edits of patches and assertions, and reports what runs tasks at once."""

    def __init__(self, file: FileEdits, tree: cst.Module) -> None:
        super().__init__(file, tree)
        self._mocks: list[dict[str, _Mock]] = [{}]
        self._blocks: set[cst.CSTNode] = set()
        """Expressions that surround a function or a block."""

    # --- Patches ----------------------------------------------------------------------------------

    def visit_FunctionDef(self, node: cst.FunctionDef) -> bool | None:
        """Find out which parameters are mocks."""
        self._mocks.append(dict(self._mocks[-1]))
        self._blocks.update(decorator.decorator for decorator in node.decorators)
        parameters = [each.name.value for each in node.params.params]
        if parameters[:1] in (["self"], ["cls"]):
            parameters = parameters[1:]
        place = 0
        for decorator in reversed(node.decorators):
            if self._injects(decorator.decorator) and place < len(parameters):
                mock = self._patched(decorator.decorator)
                if mock is not None:
                    self._mocks[-1][parameters[place]] = mock
                place += 1
        result = super().visit_FunctionDef(node)
        self._mocks.pop()
        return result

    def visit_With(self, node: cst.With) -> None:
        """Find out which names of a with statement are mocks."""
        for item in node.items:
            self._blocks.add(item.item)
            mock = self._patched(item.item)
            if mock is not None and item.asname is not None:
                name = item.asname.name
                if isinstance(name, cst.Name):
                    self._mocks[-1][name.value] = mock

    def visit_Assign(self, node: cst.Assign) -> bool | None:
        """Find out which name a patch is given; plan ``task.delay = …``."""
        target, value = node.targets[0].target, node.value
        started = value.func if isinstance(value, cst.Call) else None
        if isinstance(started, cst.Attribute) and started.attr.value == "start":
            value = started.value
        mock = self._patched(value)
        if isinstance(target, cst.Name) and mock is not None:
            self._mocks[-1][target.value] = mock
        if isinstance(target, cst.Attribute) and target.attr.value in EAGER:
            why = "jobs are not run by the call that enqueues them"
            to_do = "use the fixture immediate_jobs of kjo_django.testing.pytest_plugin"
            self.file.leave(node, "mocks", code_of(node), why, to_do)
        if (
            isinstance(target, cst.Attribute)
            and target.attr.value == "side_effect"
            and self._mocked(target.value) is not None
        ):
            self._report_function(node, node.value)
        if isinstance(target, cst.Attribute) and target.attr.value in TASK_CALLS:
            task = self.task_of(target.value)
            if task is not None:
                self._plan_attribute(target, _Mock(task, target.attr.value))
        return None

    def _is_patch(self, func: cst.BaseExpression, *ends: str) -> bool:
        """Return whether a function is ``patch`` of unittest or pytest-mock, or one of its own."""
        code = code_of(func)
        meant = ".".join(self.origin_of(func))
        roots = ("patch", "mock.patch", "mocker.patch", "unittest.mock.patch")
        return any(root + end in (code, meant) for root in roots for end in ends)

    def _injects(self, node: cst.BaseExpression) -> bool:
        """Return whether a decorator gives its mock to the function."""
        if not isinstance(node, cst.Call):
            return False
        is_object = self._is_patch(node.func, ".object")
        if not is_object and not self._is_patch(node.func, ""):
            return False
        by_place = [arg for arg in node.args if arg.keyword is None]
        has_new = any(arg.keyword is not None and arg.keyword.value == "new" for arg in node.args)
        return not has_new and len(by_place) <= (2 if is_object else 1)

    def _patched(self, node: cst.BaseExpression) -> _Mock | None:
        """Return what a call of ``patch`` replaces, if that is of a task."""
        if not isinstance(node, cst.Call) or not node.args:
            return None
        first = node.args[0].value
        if self._is_patch(node.func, "") and isinstance(first, cst.SimpleString):
            return self._at(str(first.evaluated_value))
        if self._is_patch(node.func, ".object") and len(node.args) > 1:
            return self._of_object(first, node.args[1].value)
        return None

    def _at(self, path: str) -> _Mock | None:
        parts = tuple(path.split("."))
        if parts[-1] in TASK_CALLS:
            task = self.file.index.task_at(parts[:-1])
            return _Mock(task, parts[-1]) if task is not None else None
        task = self.file.index.task_at(parts)
        return _Mock(task, "") if task is not None else None

    def _of_object(self, target: cst.BaseExpression, name: cst.BaseExpression) -> _Mock | None:
        task = self.task_of(target)
        if task is None or not isinstance(name, cst.SimpleString):
            return None
        method = str(name.evaluated_value)
        return _Mock(task, method) if method in TASK_CALLS else None

    def visit_Call(self, node: cst.Call) -> None:
        """Plan the target of a patch, and an assertion."""
        self._plan_target(node)
        self._report_spy(node)
        self._plan_settings(node)
        if not isinstance(node.func, cst.Attribute):
            return
        mock = self._mocked(node.func.value)
        if mock is not None and node.func.attr.value in ASSERTIONS and not self._is_using(mock):
            self._plan_named(node, mock)
        called = self._mocked(node.func)
        base = node.func.value
        if called is not None and isinstance(base, cst.Name) and base.value in self._mocks[-1]:
            self._plan_named(node, called)  # the mock of a task is called as the task would be

    def _report_spy(self, node: cst.Call) -> None:
        if code_of(node.func) != "mocker.spy" or len(node.args) < 2:
            return
        if self._of_object(node.args[0].value, node.args[1].value) is not None:
            why = "it spies on a method of a task, which a job has not"
            self.file.leave(node, "mocks", code_of(node), why, "spy on enqueue, or using")

    def _plan_target(self, node: cst.Call) -> None:
        place = 0
        if self._is_patch(node.func, ".object") or code_of(node.func) == "monkeypatch.setattr":
            place = 1 if len(node.args) > 1 else 0
        elif not self._is_patch(node.func, ""):
            return
        text = node.args[place].value if len(node.args) > place else None
        if code_of(node.func) == "monkeypatch.setattr" and isinstance(
            node.args[0].value, cst.SimpleString
        ):
            text, place = node.args[0].value, 0
        if not isinstance(text, cst.SimpleString):
            return
        path = str(text.evaluated_value)
        mock = self._at(path) if place == 0 else self._of_object(node.args[0].value, text)
        old = path.rpartition(".")[2]
        if mock is None:
            if old in {"delay", "apply_async"}:
                why = "the task was not found in the files that were read"
                to_do = "give the path of its declaration, too; patch enqueue, or using"
                self.file.leave(node, "mocks", code_of(node), why, to_do)
            return
        for arg in node.args[place + 1 :]:
            self._report_function(node, arg.value)
        new = self._method(node, mock)
        if new == "":
            return
        value = f"{text.value[: len(text.value) - len(text.quote) - len(old)]}{new}{text.quote}"
        self.file.change(text, lambda updated: updated.with_changes(value=value), "mocks")

    def _report_function(self, node: cst.CSTNode, value: cst.BaseExpression) -> None:
        """Report a function that stands for a method of a task."""
        if isinstance(value, cst.Lambda) or (
            isinstance(value, cst.Name) and value.value[:1].islower()
        ):
            why = "it is called with arguments by name now, those of options by using(…)"
            to_do = "let the function take what enqueue(…), or using(…), is given"
            self.file.leave(node, "mocks", code_of(node), why, to_do)

    def _method(self, node: cst.CSTNode, mock: _Mock) -> str:
        """Return the method to mock instead, none where the whole task is, or nothing can be."""
        if mock.method == "":
            return ""
        if not self.file.plans.is_possible(mock.task):
            why = f"the task {mock.task.name} is left as it is"
            to_do = "rewrite it together with its task"
            self.file.leave(node, "mocks", code_of(node), why, to_do)
            return ""
        if mock.method.startswith("delay"):
            return "enqueue"
        forms = self.file.index.async_forms.get(mock.task, set())
        if len(forms) == 1:
            return next(iter(forms))
        why = "its calls of apply_async become using(…).enqueue(…) here and enqueue(…) there"
        to_do = "patch using or enqueue, whichever is meant"
        self.file.leave(node, "mocks", code_of(node), why, to_do)
        return ""

    def _is_using(self, mock: _Mock) -> bool:
        forms = self.file.index.async_forms.get(mock.task, set())
        return mock.method.startswith("apply_async") and "using" in forms

    def _has_one_form(self, mock: _Mock) -> bool:
        return len(self.file.index.async_forms.get(mock.task, ())) == 1

    def visit_Del(self, node: cst.Del) -> None:
        """Plan ``del task.delay``, which ends a mock."""
        mock = self._mocked(node.target)
        if mock is not None and isinstance(node.target, cst.Attribute):
            self._plan_attribute(node.target, mock)

    # --- Assertions -------------------------------------------------------------------------------

    def _mocked(self, node: cst.BaseExpression) -> _Mock | None:
        """Return the mocked method that an expression is."""
        if isinstance(node, cst.Name):
            mock = self._mocks[-1].get(node.value)
            return mock if mock is not None and mock.method else None
        if not isinstance(node, cst.Attribute) or node.attr.value not in TASK_CALLS:
            return None
        if isinstance(node.value, cst.Name):
            mock = self._mocks[-1].get(node.value.value)
            if mock is not None and not mock.method:
                return _Mock(mock.task, node.attr.value)
        task = self.task_of(node.value)
        return _Mock(task, node.attr.value) if task is not None else None

    def visit_Attribute(self, node: cst.Attribute) -> bool | None:
        """Plan ``mock.delay`` of a mocked task, and ``task.delay.called`` of a mocked method."""
        super().visit_Attribute(node)
        inner = node.value
        if isinstance(inner, cst.Attribute) and (mock := self._mocked(inner)) is not None:
            self._plan_attribute(inner, mock)
        elif isinstance(inner, cst.Name) and not self._is_known_task(inner):
            mock = self._mocked(node)
            if mock is not None:
                self._plan_attribute(node, mock)
        return None

    def _is_known_task(self, node: cst.Name) -> bool:
        return node.value not in self._mocks[-1]

    def _plan_attribute(self, node: cst.Attribute, mock: _Mock) -> None:
        if node in self.file.done:
            return
        self.file.done.update((node, node.value))
        new = self._method(node, mock)
        if new:
            self.file.change(
                node, lambda updated: updated.with_changes(attr=cst.Name(new)), "mocks"
            )

    def _plan_named(self, node: cst.Call, mock: _Mock) -> None:
        """Plan an assertion of arguments, or a ``call(…)`` of a list of them."""
        is_open = mock.method.startswith("apply_async") and not self._has_one_form(mock)
        if not self.file.plans.is_possible(mock.task) or node in self.file.done or is_open:
            return
        self.file.done.add(node)

        def arguments(args: Sequence[cst.Arg]) -> list[cst.Arg]:
            if mock.method.startswith("delay"):
                return named(args, mock.task)
            return of_apply_async(args, mock.task, self.file).payload

        if self.can_rewrite(node, "mocks", lambda: arguments(node.args)):
            self.file.change(
                node, lambda updated: updated.with_changes(args=arguments(updated.args)), "mocks"
            )

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Plan what a statement does with the calls that a mock has noted."""
        found = list(self._noted(node))
        if not found:
            return
        calls = [each for each in m.findall(node, m.Call()) if self._is_call_of_mock(each)]
        self._plan_calls(node, found, calls)
        self._plan_split(node)
        for each in m.findall(node, m.Attribute(attr=m.Name())) if not calls else ():
            assert isinstance(each, cst.Attribute)
            is_item = f"{code_of(each)}[" in code_of(node, 10_000)
            is_noted = each.attr.value in NOTED or (each.attr.value == "mock_calls" and is_item)
            is_read = is_noted and self._mocked(each.value) is not None
            if is_read and not self._reads_named(node, each):
                self._leave_noted(each, "arguments are read by place, and are given by name now")

    def visit_For(self, node: cst.For) -> None:
        """Report a loop over what a mock has noted."""
        self._report_loop(node.iter)

    def visit_While(self, node: cst.While) -> None:
        """Report a loop while a mock has noted something."""
        self._report_loop(node.test)

    def visit_Match(self, node: cst.Match) -> None:
        """Report a comparison of what a mock has noted with patterns."""
        self._report_loop(node.subject)

    def visit_If(self, node: cst.If) -> None:
        """Report a condition of what a mock has noted."""
        self._report_loop(node.test)

    def _report_loop(self, node: cst.BaseExpression) -> None:
        for each in m.findall(node, m.Attribute()):
            assert isinstance(each, cst.Attribute)
            is_noted = each.attr.value in {*NOTED, "mock_calls"}
            if is_noted and self._mocked(each.value) is not None:
                self._leave_noted(each, "arguments may be read by place, and are given by name now")

    def _plan_calls(
        self, node: cst.CSTNode, found: Sequence[_Mock], calls: Sequence[cst.CSTNode]
    ) -> None:
        """Plan each ``call(…)`` that a statement compares with what a mock has noted."""
        is_one = len({(mock.task, mock.method) for mock in found}) == 1
        if calls and not is_one:
            self._leave_noted(node, "which mock the calls belong to is not seen")
        for each in calls if is_one else ():
            assert isinstance(each, cst.Call)
            if self._is_using(found[0]):
                self._leave_noted(each, "calls of apply_async are noted by using and enqueue")
            else:
                self._plan_named(each, found[0])

    def _noted(self, node: cst.CSTNode) -> Iterator[_Mock]:
        """Yield the mocked methods that a statement asks something of."""
        for each in m.findall(node, m.Attribute()):
            assert isinstance(each, cst.Attribute)
            mock = self._mocked(each.value)
            if mock is not None:
                yield mock

    def _is_call_of_mock(self, node: cst.CSTNode) -> bool:
        assert isinstance(node, cst.Call)
        known = {"call", "mock.call", "mocker.call", "unittest.mock.call"}
        return code_of(node.func) in known or ".".join(self.origin_of(node.func)) in known

    def _reads_named(self, statement: cst.CSTNode, attribute: cst.Attribute) -> bool:
        """Return whether arguments are read from the dict of those that were given by name."""
        around = m.findall(statement, m.Attribute(attr=m.Name("kwargs")))
        return any(attribute in m.findall(each, m.Attribute()) for each in around)

    def _leave_noted(self, node: cst.CSTNode, why: str) -> None:
        to_do = "read call_args.kwargs['name'], or assert_called_with(name=…)"
        self.file.leave(node, "mocks", code_of(node), why, to_do)

    def _plan_split(self, node: cst.SimpleStatementLine) -> None:
        """Plan an assertion of ``apply_async`` as one of ``using`` and one of ``enqueue``."""
        statement = node.body[0]
        call = statement.value if isinstance(statement, cst.Expr) else None
        if not isinstance(call, cst.Call) or not isinstance(call.func, cst.Attribute):
            return
        mock = self._mocked(call.func.value)
        if mock is None or call.func.attr.value not in ASSERTIONS or not self._is_using(mock):
            return
        possible = self.file.plans.is_possible(mock.task) and call not in self.file.done
        self.file.done.add(call)
        if not possible or not self.can_rewrite(
            call, "mocks", lambda: of_apply_async(call.args, mock.task, self.file)
        ):
            return

        def edit(updated: Any) -> cst.FlattenSentinel[Any]:
            made = updated.body[0].value
            found: Call = of_apply_async(made.args, mock.task, self.file)
            enqueue = cst.Attribute(
                cst.Attribute(made.func.value, cst.Name("return_value")), cst.Name("enqueue")
            )
            second = cst.Call(cst.Attribute(enqueue, made.func.attr), found.payload)
            first = made.with_changes(args=found.options)
            return cst.FlattenSentinel(
                [
                    updated.with_changes(body=[cst.Expr(first)]),
                    cst.SimpleStatementLine([cst.Expr(second)]),
                ]
            )

        self.file.change(node, edit, "mocks")

    # --- Tasks that run at once -------------------------------------------------------------------

    def _plan_settings(self, node: cst.Call) -> None:
        """Plan ``override_settings(CELERY_TASK_ALWAYS_EAGER=True)`` as ``immediate()``."""
        given = {arg.keyword.value: arg.value for arg in node.args if arg.keyword is not None}
        if not given.keys() & EAGER:
            return
        is_on = all(is_name(value, "True") for value in given.values())
        if given.keys() <= EAGER and given.keys() & AT_ONCE and is_on and node in self._blocks:
            self.file.change(node, self._immediate, "mocks")
            if given.keys() <= AT_ONCE:
                self.file.remark(self.file.line(node), code_of(node), RAISED_WHY, RAISED_TO_DO)
            return
        why = "jobs are not run by the call that enqueues them"
        self.file.leave(node, "mocks", code_of(node), why, EAGER_TO_DO)

    def _immediate(self, updated: Any) -> cst.Call:
        return cst.Call(cst.Name(self.file.use("kjo_django.testing", "immediate")))
