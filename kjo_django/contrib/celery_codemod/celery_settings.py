"""Settings of Celery as the setting ``KJO``: queues, attempts, time limit and schedules."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import libcst as cst

from kjo_django.contrib.celery_codemod.edits import CannotRewriteError, FileEdits, Planner
from kjo_django.contrib.celery_codemod.project_index import Module, ProjectIndex, dotted
from kjo_django.contrib.celery_codemod.queue_names import queue_uses

SCHEDULES = frozenset({"CELERY_BEAT_SCHEDULE", "CELERYBEAT_SCHEDULE"})
TIME_LIMITS = ("CELERY_TASK_TIME_LIMIT", "CELERY_TASK_SOFT_TIME_LIMIT", "CELERYD_TASK_TIME_LIMIT")
GONE = {
    "CELERY_TASK_DEFAULT_QUEUE": "give each job its queue: @job(queue=…)",
    "CELERY_TASK_ROUTES": "give each job its queue: @job(queue=…)",
    "CELERY_TASK_ALWAYS_EAGER": "run tests under immediate() of kjo_django.testing, or drain()",
}
"""Settings that need more than to be deleted."""
CRON_FIELDS = ("minute", "hour", "day_of_month", "month_of_year", "day_of_week")


@dataclass(slots=True)
class NewSettings:
    """The setting ``KJO`` that a project is given."""

    queues: list[str] = field(default_factory=list)
    timeout: str = ""
    schedules: list[tuple[str, list[tuple[str, str]]]] = field(default_factory=list)
    """The names of schedules, as source, with their options."""

    def lines(self) -> Iterator[str]:
        """Yield the source of the setting."""
        yield "KJO = {"
        yield '    "QUEUES": {' + ", ".join(f'"{name}": {{}}' for name in self.queues) + "},"
        yield '    "MAX_ATTEMPTS": 1,  # as in Celery: no retries unless a job asks for them'
        if self.timeout:
            yield f'    "TIMEOUT": {self.timeout},'
        if self.schedules:
            yield '    "SCHEDULES": {'
            for name, options in self.schedules:
                yield f"        {name}: {{"
                yield from (f'            "{key}": {value},' for key, value in options)
                yield "        },"
            yield "    },"
        yield "}"


def settings_module(index: ProjectIndex) -> Module | None:
    """Return the module with the most settings of Celery, in which ``KJO`` belongs."""
    found = [(_count(module), module) for module in index.modules]
    most = max((count for count, _ in found), default=0)
    return next((module for count, module in found if count == most and count), None)


def _count(module: Module) -> int:
    names = module.names if module.is_settings else ()
    return sum(name.startswith("CELERY") for name in names)


class SettingsPlanner(Planner):
    """Plans ``KJO`` in a file with settings of Celery.

    :param is_place: whether this is the module that ``KJO`` belongs in.
    """

    def __init__(self, file: FileEdits, tree: cst.Module, *, is_place: bool) -> None:
        super().__init__(file, tree)
        self._tree = tree
        self._is_place = is_place
        self._new = NewSettings()
        self._moved: list[cst.SimpleStatementLine] = []

    def visit_SimpleStatementLine(self, node: cst.SimpleStatementLine) -> None:
        """Look at a setting."""
        if len(self.scopes) > 1 or len(node.body) != 1 or not isinstance(node.body[0], cst.Assign):
            return
        target = node.body[0].targets[0].target
        name = target.value if isinstance(target, cst.Name) else ""
        if name in SCHEDULES:
            self._plan_schedules(node, name)
        elif name in TIME_LIMITS and not self._new.timeout and self._is_place:
            self._new.timeout = self._code(node.body[0].value)
        elif name in GONE:
            why = "it is no setting of jobs"
            self.file.leave(node, "settings", name, why, GONE[name])

    def finish(self) -> None:
        """Plan the setting itself at the end of the file."""
        if not self._is_place or not any(True for _ in self.file.plans.possible):
            return
        uses = queue_uses(self.file.plans, self.file.index)
        found = {use.name for use in uses if use.name}
        self._new.queues = sorted(found | set(self._scheduled_queues()))
        first = min(
            (node.lineno for node in self.file.module.file.tree.body if _is_setting(node)),
            default=1,
        )
        why = "Celery's workers need it until the last task and message are gone"
        self.file.remark(first, "settings of Celery", why, "delete CELERY_… then")
        if "KJO" in self.file.module.names:
            text = " ".join("".join(self._new.lines()).split())
            why = "there is a setting KJO already"
            self.file.remark(first, "KJO", why, f"merge into it: {text}")
            return
        code = "\n".join(self._new.lines()) + "\n"
        for node in self._moved:
            self.file.change(node, lambda updated: cst.RemoveFromParent())
        self.file.change(self._tree, lambda updated: _appended(updated, code), "settings")

    def _scheduled_queues(self) -> Iterator[str]:
        """Yield the names of queues that only schedules use, as literals."""
        for _, options in self._new.schedules:
            if code := dict(options).get("queue"):
                yield ast.literal_eval(code)

    def _plan_schedules(self, node: cst.SimpleStatementLine, name: str) -> None:
        assign = node.body[0]
        assert isinstance(assign, cst.Assign)
        if not isinstance(assign.value, cst.Dict) or not self._is_place:
            why = "it is not a literal, or not in the file of Celery's other settings"
            self.file.leave(node, "settings", name, why, "write KJO['SCHEDULES']")
            return
        is_whole = True
        for element in assign.value.elements:
            try:
                self._new.schedules.append(self._schedule(element))
                self.file.counts["settings", "changed"] += 1
            except CannotRewriteError as error:
                is_whole = False
                what = (
                    f"{name}[{self._code(element.key)}]"
                    if isinstance(element, cst.DictElement)
                    else name
                )
                self.file.leave(element, "settings", what, error.why, error.to_do)
        if is_whole:
            self._moved.append(node)

    def _schedule(self, element: cst.BaseDictElement) -> tuple[str, list[tuple[str, str]]]:
        """Return the name and the options of one schedule, as source."""
        entry = element.value if isinstance(element, cst.DictElement) else None
        if not isinstance(entry, cst.Dict) or not isinstance(element, cst.DictElement):
            raise CannotRewriteError("it is not a literal", "write it into KJO['SCHEDULES']")
        given = _items(entry)
        task = given.pop("task", None)
        name = task.evaluated_value if isinstance(task, cst.SimpleString) else None
        found = self.file.index.task_called(name) if isinstance(name, str) else None
        if found is None or not self.file.plans.is_possible(found):
            why = f"no task that becomes a job is called {task and self._code(task)}"
            raise CannotRewriteError(why, "write it into KJO['SCHEDULES'] when its job is there")
        options = [("job", f'"{self.file.plans.job_name(found)}"')]
        options += self._when(given.pop("schedule", None))
        payload = self._payload(given, [each.name for each in found.parameters])
        if payload:
            options.append(("payload", payload))
        options += self._others(given.pop("options", None))
        if given:
            raise CannotRewriteError(f"it has {', '.join(given)}", "see the page on schedules")
        return self._code(element.key), options

    def _payload(self, given: dict[str, cst.BaseExpression], names: list[str]) -> str:
        args, kwargs = given.pop("args", None), given.pop("kwargs", None)
        parts: list[str] = []
        if isinstance(args, (cst.Tuple, cst.List)):
            values = [self._code(each.value) for each in args.elements]
            if len(values) > len(names):
                raise CannotRewriteError("it has too many arguments", "name them in payload")
            pairs = zip(names, values, strict=False)
            parts += [f'"{name}": {value}' for name, value in pairs]
        elif args is not None:
            raise CannotRewriteError("its args are not a literal", "name them in payload")
        if isinstance(kwargs, cst.Dict):
            parts += [f'"{name}": {self._code(value)}' for name, value in _items(kwargs).items()]
        elif kwargs is not None:
            parts.append(f"**{self._code(kwargs)}")
        return "{" + ", ".join(parts) + "}" if parts else ""

    def _others(self, value: cst.BaseExpression | None) -> Iterator[tuple[str, str]]:
        if value is None:
            return
        if not isinstance(value, cst.Dict):
            raise CannotRewriteError("its options are not a literal", "see the page on schedules")
        for name, each in _items(value).items():
            if name == "queue" and not isinstance(each, cst.SimpleString):
                why = "its queue is no text, and KJO['QUEUES'] has to name it"
                raise CannotRewriteError(why, "name the queue in KJO['QUEUES'] and in the schedule")
            if name == "queue":
                yield "queue", self._code(each)
            elif name == "expires" and isinstance(each, (cst.Integer, cst.Call)):
                yield "expires_after", self._code(each)
            else:
                raise CannotRewriteError(f"it has the option {name}", "give it to @job")

    def _when(self, value: cst.BaseExpression | None) -> list[tuple[str, str]]:
        """Return the options that say when."""
        if isinstance(value, (cst.Integer, cst.Float)):
            seconds = float(value.evaluated_value)
            if seconds >= 1 and seconds == int(seconds):
                return [("every", str(int(seconds)))]
        if isinstance(value, cst.Call) and self.origin_of(value.func) == ("datetime", "timedelta"):
            return [("every", self._code(value))]
        if isinstance(value, cst.Call) and self.is_celery(value.func, "crontab"):
            return [("cron", _cron(value)), *self._zone()]
        why = "when it is due is no number of seconds, timedelta or crontab"
        raise CannotRewriteError(why, "give cron, every or at")

    def _zone(self) -> Iterator[tuple[str, str]]:
        """Yield the time zone of cron expressions: Celery's is UTC if it is not set."""
        for node in self.file.module.file.tree.body:
            if isinstance(node, ast.Assign) and dotted(node.targets[0]) == ("CELERY_TIMEZONE",):
                if dotted(node.value) != ("TIME_ZONE",):
                    yield "timezone", self.file.module.source(node.value)
                return
        yield "timezone", '"UTC"'

    @staticmethod
    def _code(node: cst.CSTNode) -> str:
        return cst.Module([]).code_for_node(node)


def _items(node: cst.Dict) -> dict[str, cst.BaseExpression]:
    found: dict[str, cst.BaseExpression] = {}
    for element in node.elements:
        key = element.key if isinstance(element, cst.DictElement) else None
        if not isinstance(key, cst.SimpleString) or not isinstance(key.evaluated_value, str):
            raise CannotRewriteError("a key is not text", "write it into KJO['SCHEDULES']")
        found[key.evaluated_value] = element.value
    return found


def _cron(call: cst.Call) -> str:
    """Return the cron expression of a ``crontab``, as source."""
    fields = dict.fromkeys(CRON_FIELDS, "*")
    places = ("minute", "hour", "day_of_week", "day_of_month", "month_of_year")
    for place, arg in enumerate(call.args):
        name = arg.keyword.value if arg.keyword is not None else places[place]
        value = arg.value
        if name not in fields or not isinstance(value, (cst.Integer, cst.SimpleString)):
            raise CannotRewriteError("its crontab is not a literal", "write the cron expression")
        fields[name] = str(value.evaluated_value).replace(" ", "")
    days = {fields["day_of_month"][0], fields["day_of_week"][0]}
    if "*" not in days:
        why = "Celery wants both of day_of_month and day_of_week, and cron one of them"
        raise CannotRewriteError(why, "check the day of the month in the job")
    return f'"{" ".join(_short(fields[name]) for name in CRON_FIELDS)}"'


def _short(text: str) -> str:
    """Return a field with names of days and months as cron has them."""
    return ",".join(
        "-".join(part[:3] if part.isalpha() else part for part in each.split("-"))
        for each in text.split(",")
    )


def _is_setting(node: ast.stmt) -> bool:
    targets: Iterable[ast.expr] = node.targets if isinstance(node, ast.Assign) else ()
    return any("".join(dotted(target)).startswith("CELERY") for target in targets)


def _appended(tree: cst.Module, code: str) -> cst.Module:
    made = cst.parse_module(code).body[0]
    line = made.with_changes(leading_lines=[cst.EmptyLine(indent=False)])
    return tree.with_changes(body=[*tree.body, line])
