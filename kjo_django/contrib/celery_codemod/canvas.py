"""Signatures, chains, groups and chords of Celery as steps, chains and groups here.

What one function makes of them is rewritten as a whole or not at all, since parts of both kinds do
not fit together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import libcst as cst
import libcst.matchers as m

from kjo_django.contrib.celery_codemod.call_arguments import (
    awaited,
    enqueue_call,
    missing,
    named,
    of_apply_async,
)
from kjo_django.contrib.celery_codemod.edits import (
    CannotRewriteError,
    Edit,
    FileEdits,
    Planner,
    code_of,
)
from kjo_django.contrib.celery_codemod.project_index import Task

SIGNATURES = frozenset({"s", "si"})
CANVAS = frozenset({"chain", "group", "chord"})
LINKS = frozenset({"link", "link_error"})
ENDS = frozenset({"delay", "apply_async"})
Received = Literal["nothing", "result", "results"]
"""What the step before gives to a signature as its first argument."""
Kind = Literal["step", "steps", "chain", "group", "chord"]
CALLBACK_TO_DO = (
    "write the callback with takes_context=True and read context.workflow.results(), then "
    "group(…).then(callback.step(…)).enqueue()"
)
RESULT_TO_DO = (
    "see what callers ask of it: a handle has id, status, result and wait(timeout=…); or read "
    "results in a step that comes after"
)
RETURNED_WHY = "what is returned is a handle of kjo_django now, and no result of Celery"


@dataclass(slots=True, eq=False)
class _Part:
    """One expression that is rewritten as a whole."""

    node: cst.CSTNode
    size: int
    """Signatures, chains, groups and chords in it."""
    edits: list[tuple[cst.CSTNode, Edit]] = field(default_factory=list)
    error: CannotRewriteError | None = None
    is_returned: bool = False
    """Whether it is enqueued, and what that answers is returned by the function around it."""


class CanvasPlanner(Planner):
    """Plans the edits of signatures and of what is composed of them."""

    def __init__(self, file: FileEdits, tree: cst.Module) -> None:
        super().__init__(file, tree)
        self._parts: dict[cst.CSTNode, list[_Part]] = defaultdict(list)
        self._names: dict[tuple[cst.CSTNode, str], Kind] = {}
        self._part: _Part | None = None
        self._unused: set[cst.CSTNode] = set()
        """Expressions whose value nothing reads."""
        self._returned: set[cst.CSTNode] = set()

    def finish(self) -> None:
        """Make edits of what was planned; of all parts in a function, or of none."""
        for parts in self._parts.values():
            has_failed = any(part.error is not None for part in parts)
            for part in parts:
                if has_failed:
                    self._leave(part)
                else:
                    self._change(part)

    def _change(self, part: _Part) -> None:
        for node, edit in part.edits:
            self.file.change(node, edit)
        self.file.counts["calls", "changed"] += part.size
        if part.is_returned:
            line, what = self.file.line(part.node), code_of(part.node)
            self.file.remark(line, what, RETURNED_WHY, RESULT_TO_DO)

    def _leave(self, part: _Part) -> None:
        error = part.error or CannotRewriteError(
            "what it is used with is left as it is", "rewrite the function as a whole"
        )
        self.file.leave(part.node, "calls", code_of(part.node), error.why, error.to_do)
        self.file.counts["calls", "left"] += part.size - 1
        self.file.kept_names |= CANVAS

    # --- Where a part begins ----------------------------------------------------------------------

    def visit_Assign(self, node: cst.Assign) -> bool | None:
        """Plan what is assigned, and remember what the name stands for."""
        target = node.targets[0].target
        name = target.value if isinstance(target, cst.Name) and len(node.targets) == 1 else ""
        if isinstance(node.value, cst.List) and not node.value.elements and name:
            self._names[self.scope.node, name] = "steps"
        if not self._is_canvas(node.value):
            return None
        kind = self._plan(node.value)
        if name and kind is not None:
            self._names[self.scope.node, name] = kind
        return False

    def visit_Expr(self, node: cst.Expr) -> None:
        """Note an expression that is a whole statement."""
        self._unused.add(node.value)

    def visit_Return(self, node: cst.Return) -> None:
        """Note an expression that is returned."""
        if node.value is not None:
            self._returned.add(node.value)

    def visit_Call(self, node: cst.Call) -> bool | None:
        """Plan a call that enqueues a canvas, or that makes one."""
        first = node.args[0].value if node.args else None
        if self.origin_of(node.func)[-1:] == ("on_commit",) and isinstance(first, cst.Lambda):
            self._unused.add(first.body)
        if any(arg.keyword is not None and arg.keyword.value in LINKS for arg in node.args):
            return False  # what is linked is left with the call
        if isinstance(node.func, cst.Attribute) and node.func.attr.value == "add_periodic_task":
            self._leave_with(node)
            return False
        started = self._started(node)
        if started is not None or self._is_canvas(node):
            self._plan(node)
            return False
        return None

    def _leave_with(self, node: cst.Call) -> None:
        """Leave the signatures that a call is given with the call, which is reported alone."""
        for arg in node.args:
            for each in m.findall(arg, m.Call() | m.Attribute()):
                self.file.done.add(each)

    def visit_BinaryOperation(self, node: cst.BinaryOperation) -> bool | None:
        """Plan a chain that is written with ``|``."""
        if self._is_canvas(node):
            self._plan(node)
            return False
        return None

    def _plan(self, node: cst.BaseExpression) -> Kind | None:
        """Plan a whole expression; return what it makes, None for what is enqueued or left."""
        part = self._part = _Part(node, 0)
        self._parts[self.scope.node].append(part)
        kind: Kind | None = None
        found = m.findall(node, m.Call() | m.BinaryOperation(operator=m.BitOr()))
        self.file.done.update(filter(self._is_of_canvas, found))
        part.size = sum(map(self._counts, found)) or 1
        part.size += any(isinstance(each, cst.BinaryOperation) for each in found)
        try:
            if isinstance(node, cst.Call) and self._started(node) is not None:
                part.is_returned = node in self._returned
                self._plan_start(node)
            else:
                kind = self._analysed(node, "nothing")
        except CannotRewriteError as error:
            part.error = error
        self._part = None
        return kind

    def _edit(self, node: cst.CSTNode, edit: Edit) -> None:
        assert self._part is not None
        self._part.edits.append((node, edit))

    def _counts(self, node: cst.CSTNode) -> bool:
        """Return whether a node is a signature, a chain, a group or a chord."""
        return isinstance(node, cst.Call) and (
            self._signature_of(node) is not None or self._canvas_name(node) != ""
        )

    def _is_of_canvas(self, node: cst.CSTNode) -> bool:
        """Return whether a node is one that this planner sees to; others may be in arguments."""
        if not isinstance(node, cst.Call):
            return True
        return self._is_part(node) or self._started(node) is not None

    # --- What an expression is --------------------------------------------------------------------

    def _canvas_name(self, node: cst.BaseExpression) -> str:
        if isinstance(node, cst.Call) and self.is_celery(node.func, *CANVAS):
            return self.origin_of(node.func)[-1]
        return ""

    def _signature_of(self, node: cst.BaseExpression) -> tuple[Task, str] | None:
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            task = self.task_of(node.func.value)
            if task is not None and node.func.attr.value in SIGNATURES:
                return task, node.func.attr.value
        return None

    def _set_of(self, node: cst.BaseExpression) -> cst.Call | None:
        """Return the signature whose options ``.set(…)`` gives."""
        if isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute):
            inner = node.func.value
            if node.func.attr.value == "set" and self._signature_of(inner) is not None:
                assert isinstance(inner, cst.Call)
                return inner
        return None

    def _kind_of_name(self, node: cst.CSTNode) -> Kind | None:
        if not isinstance(node, cst.Name):
            return None
        return self._names.get((self.scope.node, node.value))

    def _is_canvas(self, node: cst.BaseExpression) -> bool:
        if isinstance(node, cst.BinaryOperation):
            return isinstance(node.operator, cst.BitOr) and any(map(self._is_part, _leaves(node)))
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            return self._is_canvas(node.elt)
        if isinstance(node, (cst.List, cst.Tuple)):
            return any(self._is_canvas(element.value) for element in node.elements)
        return self._is_part(node)

    def _is_part(self, node: cst.BaseExpression) -> bool:
        return bool(self._signature_of(node) or self._canvas_name(node) or self._set_of(node)) or (
            isinstance(node, cst.Call) and self._canvas_name(node.func) == "chord"
        )

    def _started(self, node: cst.Call) -> cst.BaseExpression | None:
        """Return the canvas that a call enqueues."""
        func = node.func
        if isinstance(func, cst.Attribute) and func.attr.value in ENDS:
            func = func.value
        elif self._signature_of(func) is not None:
            return None  # which runs here and now
        kind = self._kind_of_name(func)
        if self._is_canvas(func) or (kind is not None and kind != "steps"):
            return func
        return None

    # --- Starts -----------------------------------------------------------------------------------

    def _plan_start(self, node: cst.Call) -> None:
        canvas = self._started(node)
        assert canvas is not None
        if node not in self._unused | self._returned:
            why = "its result is used, and enqueue() here returns no result of Celery"
            raise CannotRewriteError(why, RESULT_TO_DO)
        if self.generators and self.scope.is_async:
            raise CannotRewriteError("it is awaited in a generator expression", "write a loop")
        signature = self._signature_of(canvas)
        if isinstance(canvas, cst.Call) and signature is not None:
            self._plan_start_of_signature(node, canvas, signature[0])
            return
        is_called = node.func is canvas
        if is_called and self._canvas_name(canvas) == "chord" and isinstance(canvas, cst.Call):
            self._plan_chord(node, canvas, node.args)
        else:
            kind = self._kind_of_name(canvas) or self._analysed(canvas, "nothing")
            if kind == "step":
                why = "a signature that is kept in a name is enqueued"
                raise CannotRewriteError(why, "enqueue the job itself: job.enqueue(…)")
            if node.args:
                why = f"it is enqueued with options: {code_of(node.args[0])}"
                raise CannotRewriteError(why, "give options to the steps: job.using(…).step(…)")
        self._edit(node, self._start(node, is_called=is_called))

    def _start(self, node: cst.Call, *, is_called: bool) -> Edit:
        is_async, is_base = self.scope.is_async, node in self.bases

        def edit(updated: Any) -> cst.BaseExpression:
            base: Any = updated.func if is_called else updated.func.value
            method = "aenqueue" if is_async else "enqueue"
            call = cst.Call(cst.Attribute(base, cst.Name(method)))
            return awaited(call, has_brackets=is_base) if is_async else call

        return edit

    def _plan_start_of_signature(self, node: cst.Call, inner: cst.Call, task: Task) -> None:
        """Plan ``task.s(…).delay()``, which is an enqueue as any other."""
        self._check_possible(task)
        before = set(self.file.imports)
        named(inner.args, task)
        options = of_apply_async(node.args, task, self.file)
        self.file.imports = before
        if options.payload:
            raise CannotRewriteError("arguments are added at the end", "give all to enqueue(…)")
        is_async, is_base = self.scope.is_async, node in self.bases

        def edit(updated: Any) -> cst.BaseExpression:
            call = of_apply_async(updated.args, task, self.file)
            call.payload = named(updated.func.value.args, task)
            method = "aenqueue" if is_async else "enqueue"
            made = enqueue_call(updated.func.value.func.value, call, method)
            return awaited(made, has_brackets=is_base) if is_async else made

        self._edit(node, edit)

    # --- Parts ------------------------------------------------------------------------------------

    def _check_possible(self, task: Task) -> None:
        if not self.file.plans.is_possible(task):
            why = f"the task {task.name} is left as it is"
            raise CannotRewriteError(why, "rewrite it together with its task")

    def _analysed(self, node: cst.BaseExpression, received: Received) -> Kind:
        """Plan an expression; return what it makes.

        :raises CannotRewriteError: a part of it is nothing that can be written here.
        """
        if (kind := self._kind_of_name(node)) is not None:
            return kind
        if isinstance(node, cst.BinaryOperation):
            return self._plan_chain_of(node, received)
        if isinstance(node, (cst.ListComp, cst.GeneratorExp)):
            self._analysed(node.elt, received)
            return "steps"
        if isinstance(node, (cst.List, cst.Tuple)):
            for element in node.elements:
                self._analysed(element.value, received)
            return "steps"
        if isinstance(node, cst.Call):
            return self._plan_made(node, received)
        why = f"what {code_of(node)} holds is not known here"
        raise CannotRewriteError(why, "make it of job.step(…), chain(…) and group(…)")

    def _plan_made(self, node: cst.Call, received: Received) -> Kind:
        inner = self._set_of(node)
        if inner is not None:
            self._plan_options(node)
            return self._plan_step(inner, received)
        if self._signature_of(node) is not None:
            return self._plan_step(node, received)
        name = self._canvas_name(node)
        if name == "chain":
            return self._plan_chain(node, received)
        if name == "group":
            self._plan_members(node.args, received)
            self._edit(node, self._renamed("group"))
            return "group"
        if name == "chord":
            if len(node.args) != 2:
                raise CannotRewriteError("its callback is given elsewhere", CALLBACK_TO_DO)
            self._plan_chord(node, node, node.args[1:])
            return "chord"
        why = f"what {code_of(node)} returns is not known here"
        raise CannotRewriteError(why, "make it of job.step(…), chain(…) and group(…)")

    def _renamed(self, name: str) -> Edit:
        return lambda updated: updated.with_changes(
            func=cst.Name(self.file.use("kjo_django", name))
        )

    def _plan_step(self, node: cst.Call, received: Received) -> Kind:
        found = self._signature_of(node)
        assert found is not None
        task, method = found
        self._check_possible(task)
        is_given = method == "s" and received != "nothing"
        if is_given and received == "results":
            why = f"{task.name} is given the results of all members as its first argument"
            raise CannotRewriteError(why, CALLBACK_TO_DO)
        skipped = 1 if is_given else 0
        self._check_given(task, missing(task, named(node.args, task, skipped)), skipped)
        self._edit(
            node,
            lambda updated: updated.with_changes(
                func=updated.func.with_changes(attr=cst.Name("step")),
                args=named(updated.args, task, skipped),
            ),
        )
        return "step"

    @staticmethod
    def _check_given(task: Task, lacking: Sequence[str], skipped: int) -> None:
        if not skipped:
            if lacking:
                why = f"nothing here gives {task.name} its {', '.join(lacking)}"
                raise CannotRewriteError(why, "give the step all that it requires")
            return
        first = [each.name for each in task.parameters[:1]]
        if list(lacking) != first:
            why = (
                "the result of the step before goes to the one required argument that a step "
                f"lacks; {task.name} lacks {', '.join(lacking) or 'none'}"
            )
            raise CannotRewriteError(why, "let its first argument have no default")

    def _plan_options(self, node: cst.Call) -> None:
        """Plan ``.set(…)`` of a signature as ``using(…)``."""
        found = (
            self._signature_of(node.func.value) if isinstance(node.func, cst.Attribute) else None
        )
        assert found is not None
        task = found[0]
        before = set(self.file.imports)
        options = of_apply_async(node.args, task, self.file).options
        self.file.imports = before
        names = {arg.keyword.value for arg in options if arg.keyword is not None}
        if names & {"delay", "run_at"}:
            why = "a step begins when those before it have ended, not at a time"
            raise CannotRewriteError(why, "let the step before raise Retry, or enqueue at its end")

        def edit(updated: Any) -> cst.Call:
            step = updated.func.value
            call = of_apply_async(updated.args, task, self.file)
            call.payload = list(step.args)
            return enqueue_call(step.func.value, call, "step")

        self._edit(node, edit)

    def _plan_sequence(self, parts: Sequence[cst.BaseExpression], received: Received) -> None:
        for part in parts:
            kind = self._analysed(part, received)
            received = "result" if kind in ("step", "chain") else "results"

    def _plan_chain_of(self, node: cst.BinaryOperation, received: Received) -> Kind:
        leaves = list(_leaves(node))
        self._plan_sequence(leaves, received)
        self._edit(
            node,
            lambda updated: cst.Call(
                cst.Name(self.file.use("kjo_django", "chain")),
                [cst.Arg(leaf) for leaf in _leaves(updated)],
            ),
        )
        return "chain"

    def _plan_chain(self, node: cst.Call, received: Received) -> Kind:
        values = [arg.value for arg in node.args]
        is_one = len(values) == 1 and not node.args[0].star
        is_list = is_one and (
            isinstance(values[0], (cst.List, cst.Tuple, cst.ListComp, cst.GeneratorExp))
            or self._kind_of_name(values[0]) == "steps"
        )
        if is_list and isinstance(values[0], (cst.List, cst.Tuple)):
            values = [element.value for element in values[0].elements]
        elif is_list or any(arg.star for arg in node.args):
            why = "which of its parts are first is not seen here"
            raise CannotRewriteError(why, "name its parts: chain(first.step(…), second.step(…))")
        if any(arg.keyword is not None for arg in node.args):
            raise CannotRewriteError("it has options", "give options to the steps")
        self._plan_sequence(values, received)

        def edit(updated: Any) -> cst.Call:
            made = self._renamed("chain")(updated)
            if is_list:
                made = made.with_changes(args=[made.args[0].with_changes(star="*")])
            assert isinstance(made, cst.Call)
            return made

        self._edit(node, edit)
        return "chain"

    def _plan_members(self, args: Sequence[cst.Arg], received: Received) -> None:
        for arg in args:
            if arg.keyword is not None:
                raise CannotRewriteError("a group has options", "give options to the steps")
            self._analysed(arg.value, received)

    def _plan_chord(self, node: cst.Call, chord: cst.Call, bodies: Sequence[cst.Arg]) -> None:
        """Plan a chord.

        :param node: the call that has the callback: ``chord(header)(callback)`` or the chord.
        """
        if len(bodies) != 1 or bodies[0].keyword is not None:
            raise CannotRewriteError("it has options", CALLBACK_TO_DO)
        self._plan_members(chord.args[:1], "nothing")
        self._analysed(bodies[0].value, "results")
        is_inner = node is not chord

        def edit(updated: Any) -> cst.Call:
            header = updated.func.args[0] if is_inner else updated.args[0]
            body = updated.args[0] if is_inner else updated.args[1]
            plain = [each.with_changes(comma=cst.MaybeSentinel.DEFAULT) for each in (header, body)]
            group = cst.Call(cst.Name(self.file.use("kjo_django", "group")), plain[:1])
            made = cst.Call(cst.Attribute(group, cst.Name("then")), plain[1:])
            # Where the chord is called with its callback, the call stands for what is enqueued.
            return updated.with_changes(func=made, args=[]) if is_inner else made

        self._edit(node, edit)


def _leaves(node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yield what ``|`` joins, from left to right."""
    if isinstance(node, cst.BinaryOperation) and isinstance(node.operator, cst.BitOr):
        yield from _leaves(node.left)
        yield from _leaves(node.right)
    else:
        yield node
