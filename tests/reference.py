"""What docs/reference says is read from the code: `python -m tests.reference` writes it anew.

A page holds blocks between `<!-- from the code: NAME -->` and `<!-- end -->`; what stands between
them comes from the function of that name here, everything around them is written by people.
`tests/docs/test_docs.py` fails when a block is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from tests import docstrings, promises, public_classes

REFERENCE = Path(__file__).resolve().parent.parent / "docs" / "reference"
BLOCK = re.compile(r"(<!-- from the code: ([\w ]+) -->\n).*?(<!-- end -->)", re.DOTALL)

BLOCKS: dict[str, Callable[[], Iterator[str]]] = {}
UNITS = (("day", timedelta(days=1)), ("hour", timedelta(hours=1)), ("minute", timedelta(minutes=1)))


def block(function: Callable[[], Iterator[str]]) -> Callable[[], Iterator[str]]:
    """Register a block under the function's name."""
    BLOCKS[function.__name__.replace("_", " ")] = function
    return function


def pages() -> list[Path]:
    """Return the pages of the reference."""
    return sorted(REFERENCE.glob("*.md"))


def rewritten(text: str) -> str:
    """Return a page with every block as the code has it now."""

    def anew(match: re.Match[str]) -> str:
        lines = BLOCKS[match[2]]()
        return match[1] + "\n" + "\n".join(lines).strip() + "\n\n" + match[3]

    return BLOCK.sub(anew, text)


# --- Writing tables -------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    yield f"| {' | '.join(head)} |"
    yield f"| {' | '.join('---' for _ in head)} |"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |"


def code(value: object) -> str:
    """Return a value as code."""
    return f"`{value}`"


def plain(duration: timedelta) -> str:
    """Return a duration in the largest unit that divides it."""
    for name, unit in UNITS:
        if duration % unit == timedelta(0):
            count = duration // unit
            return f"{count} {name}{'s' * (count != 1)}"
    if duration >= timedelta(seconds=1):
        seconds = duration.total_seconds()
        return f"{seconds:g} second{'s' * (seconds != 1)}"
    return f"{duration / timedelta(milliseconds=1):g} ms"


def shown(value: object) -> str:
    """Return a default as the reference shows it."""
    return plain(value) if isinstance(value, timedelta) else code(value)


def tabled(docstring: str | None) -> list[tuple[str, str]]:
    """Return the rows of the simple two-column table in a docstring."""
    rows, rules = [], 0
    for line in (docstring or "").splitlines():
        if re.fullmatch(r"=+ +=+", line.strip()):
            rules += 1
        elif rules and (match := re.fullmatch(r"(\w+) +(\S.*)", line.strip())):
            rows.append((match[1], match[2]))
    return [row for row in rows if row[0] != "signal"]


# --- Settings -------------------------------------------------------------------------------------


def _wanted(field: Any) -> str:
    """Return what a setting accepts, in the words of its refusal."""
    try:
        field.metadata["convert"](object())
    except ValueError as error:
        wanted = str(error).replace("a positive timedelta or number of seconds", "duration")
    return wanted + (", or `None`" if "None" in field.type else "")


def _default(field: Any) -> str:
    value = field.default_factory() if callable(field.default_factory) else field.default
    return shown(value)


def _settings(kind: type[Any], spelled: Callable[[str], str]) -> Iterator[str]:
    return table(
        ("Key", "Value", "Default", "Meaning"),
        (
            (code(spelled(field.name)), _wanted(field), _default(field), field.metadata["help"])
            for field in fields(kind)
        ),
    )


@block
def settings() -> Iterator[str]:
    from kjo_django.conf import Settings

    return _settings(Settings, str.upper)


@block
def queue_options() -> Iterator[str]:
    from kjo_django.conf import QueueOptions

    return _settings(QueueOptions, str)


@block
def schedule_options() -> Iterator[str]:
    from kjo_django.conf import ScheduleOptions

    return _settings(ScheduleOptions, str)


@block
def producer_options() -> Iterator[str]:
    from kjo_django.patterns.items.options import ProducerOptions

    return _settings(ProducerOptions, str)


@block
def consumer_options() -> Iterator[str]:
    from kjo_django.patterns.items.consumer import ConsumerOptions

    return _settings(ConsumerOptions, str)


@block
def kafka_defaults() -> Iterator[str]:
    from kjo_django.transports.kafka import clients

    kinds = {
        "every client": clients.GENERAL_DEFAULTS,
        "producer": clients.PRODUCER_DEFAULTS,
        "consumer": clients.CONSUMER_DEFAULTS,
    }
    return table(
        ("librdkafka's key", "Value", "Client"),
        (
            (code(key), code(str(value).lower() if isinstance(value, bool) else value), kind)
            for kind, defaults in kinds.items()
            for key, value in defaults.items()
        ),
    )


@block
def kafka_owned() -> Iterator[str]:
    from kjo_django.transports.kafka import clients

    return table(
        ("librdkafka's key", "Only value", "Because"),
        (
            (code(key), "none" if value is None else code(str(value).lower()), reason)
            for key, (value, reason) in clients.OWNED.items()
        ),
    )


# --- Jobs -----------------------------------------------------------------------------------------

JOB_OPTIONS = {
    "Name and queue": ("name queue", "handlers"),
    "Attempts and time": (
        "max_attempts backoff retry_on give_up_on timeout result_ttl",
        "retries",
    ),
    "How the function is called": (
        "takes_context batch atomic database_only serializer",
        "handlers side-effects serializers",
    ),
    "Order and priority": ("key priority", "ordering priorities"),
    "Limits": ("rate burst rate_key concurrency concurrency_key", "limits"),
    "Of many enqueues one job": (
        "unique_for debounce debounce_max unique_by on_conflict",
        "unique-jobs",
    ),
    "Schedule": ("schedule timezone", "schedules"),
    "What screens show": ("redact", "handlers#hide-fields"),
}
"""The options of ``@job`` by what they are about, and the pages that explain these."""
USING_OPTIONS = {
    "When": ("delay run_at expires_at", "delays"),
    "Once": ("id unique_for debounce debounce_max unique_by on_conflict", "unique-jobs"),
    "Where, in what order": ("queue key priority", "ordering priorities"),
    "Attempts and results": ("max_attempts result_ttl", "retries queue"),
    "What goes along": ("headers", "tracing logging"),
}


def _job_option(name: str) -> tuple[str, str, str]:
    """Return the type of an option of ``@job``, what it accepts, and its default."""
    from kjo_django.enqueue.definition import _CHECKS, JobOptions
    from kjo_django.registry import HandlerOptions
    from kjo_django.values import Rate

    options = {each.name: each for each in fields(HandlerOptions)}
    declared = JobOptions.__annotations__.get(name)
    kind = options[name].type if declared is None else declared.__forward_arg__
    if name in ("name", "timezone"):
        default: Any = None
    else:
        default = Rate(1, 1).burst if name == "burst" else options[name].default
        default = f'"{default}"' if isinstance(default, str) else default
    accepted = "text of 1 to 100 characters" if name == "name" else _refusal(_CHECKS[name])
    return kind, accepted, "`JSON`" if name == "serializer" else shown(default)


def _refusal(check: Callable[[Any], Any] | None) -> str:
    """Return what an option accepts, in the words of its refusal."""
    try:
        if check is not None:
            check(object())
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def _using_option(name: str) -> tuple[str, str, str]:
    """Return the type of an option of ``using()``, what it accepts, and its default."""
    from kjo_django.enqueue import unique
    from kjo_django.enqueue.definition import _CONVERSIONS, UsingOptions

    check = {**_CONVERSIONS, **unique.CHECKS}.get(name)
    return UsingOptions.__annotations__[name].__forward_arg__, _refusal(check), shown(None)


def _setting_behind(text: str) -> str:
    """Return the default of the setting that an option falls back to, as its text says."""
    from kjo_django.conf import Settings

    match = re.search(r'else `KJO\["(\w+)"\]`', text)
    defaults = {field.name.upper(): field for field in fields(Settings)}
    if match is None:
        return ""
    return f", which means as the queue says, {match[0]} ({_default(defaults[match[1]])})"


def _options(
    groups: dict[str, tuple[str, str]],
    docstring: str | None,
    facts: Callable[[str], tuple[str, str, str]],
    written: str,
) -> Iterator[str]:
    """Yield the options of a function, by groups.

    :param written: an example, with the option in place of ``%s``.
    """
    texts = docstrings.read(docstring).params
    for heading, (names, pages) in groups.items():
        yield f"## {heading}"
        yield ""
        yield f"More: {', '.join(map(_link, pages.split()))}."
        yield ""
        for name in names.split():
            text, example = docstrings.split_example(texts.pop(name))
            kind, accepted, default = facts(name)
            yield f"### {name}"
            yield ""
            values = f"`{kind}`: {accepted}" if accepted else f"`{kind}`"
            yield f"{values}. Default: {default}{_setting_behind(text)}."
            yield ""
            yield text
            yield ""
            yield f"Example: {code(written % example)}"
            yield ""
    assert not texts, f"in no group: {', '.join(texts)}"


def _link(place: str) -> str:
    """Return a link to a how-to page, or to a heading of it, by its text there."""
    page, _, anchor = place.partition("#")
    text = (REFERENCE.parent / "how-to" / f"{page}.md").read_text()
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    wanted = anchor.replace("-", " ")
    title = next(each for each in headings if not anchor or each.lower() == wanted)
    return f"[{title}](../how-to/{page}.md{'#' * bool(anchor)}{anchor})"


@block
def job_options() -> Iterator[str]:
    from kjo_django import job

    return _options(JOB_OPTIONS, job.__doc__, _job_option, "@job(%s)")


@block
def using_options() -> Iterator[str]:
    from kjo_django import JobDefinition

    return _options(USING_OPTIONS, JobDefinition.using.__doc__, _using_option, "remind.using(%s)")


def _functions(*functions: Callable[..., Any]) -> Iterator[str]:
    for function in functions:
        yield f"## {function.__name__}()"
        yield ""
        yield from docstrings.function_lines(function.__name__, function)


@block
def exponential_backoff() -> Iterator[str]:
    from kjo_django import exponential

    return _functions(exponential)


def job_classes_described() -> list[tuple[type[Any], type[Any] | None]]:
    """Return the classes of the page about jobs, each with the base described before."""
    from kjo_django import BatchItem, JobContext, JobDefinition, JobHandle
    from kjo_django.enqueue.handle import JobSnapshot
    from kjo_django.enqueue.job_status import Progress

    return [
        (JobDefinition, None),
        (JobHandle, None),
        (JobSnapshot, None),
        (Progress, None),
        (JobContext, None),
        (BatchItem, JobContext),
    ]


@block
def job_classes() -> Iterator[str]:
    from kjo_django import enqueue_on_save

    options = {"using": "Its options are described in [Options of using()](using.md)."}
    for kind, base in job_classes_described():
        yield from docstrings.class_lines(kind, table, base, options)
    yield from _functions(enqueue_on_save)


def workflow_classes_described() -> list[tuple[type[Any], type[Any] | None]]:
    """Return the classes of the page about workflows, each with the base described before."""
    from kjo_django import Workflow
    from kjo_django.enqueue.definition import Step
    from kjo_django.workflows.definition import Chain, Group, WorkflowStep
    from kjo_django.workflows.snapshots import StepNumbers, WorkflowSnapshot
    from kjo_django.workflows.step_context import StepOutcome, WorkflowContext
    from kjo_django.workflows.workflow_handle import WorkflowHandle

    return [
        (Step, None),
        (Chain, None),
        (Group, Chain),
        (Workflow, None),
        (WorkflowStep, None),
        (WorkflowHandle, None),
        (WorkflowSnapshot, None),
        (StepNumbers, None),
        (WorkflowContext, None),
        (StepOutcome, None),
    ]


@block
def workflow_classes() -> Iterator[str]:
    from kjo_django import chain, group

    yield from _functions(chain, group)
    for kind, base in workflow_classes_described():
        yield from docstrings.class_lines(kind, table, base)


for _name in public_classes.BLOCKS:
    BLOCKS[_name] = partial(public_classes.lines, _name, table)


BLOCKS["promises"] = promises.lines


# --- Commands -------------------------------------------------------------------------------------


def commands() -> dict[str, argparse.ArgumentParser]:
    """Return the parser of each command of the app."""
    from django.core.management import find_commands, load_command_class

    import kjo_django.management

    (folder,) = kjo_django.management.__path__
    return {
        name: load_command_class("kjo_django", name).create_parser("manage.py", name)
        for name in sorted(find_commands(folder))
    }


def own_actions(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the arguments a command has beyond those of every Django command."""
    from django.core.management.base import BaseCommand, CommandParser

    known = set(BaseCommand().create_parser("manage.py", "any")._option_string_actions)
    return [
        action
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction)
        and not (action.option_strings and set(action.option_strings) <= known)
        and isinstance(parser, CommandParser)
    ]


def subcommands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """Return the parsers of a command's actions, if it has some."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        name = action.metavar or "|".join(action.choices or [action.dest])
        return code(f"{name} …" if action.nargs in ("*", "+") else name)
    value = action.metavar or action.dest.upper()
    if action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    takes_none = action.nargs == 0
    return ", ".join(code(o if takes_none else f"{o} {value}") for o in action.option_strings)


def _arguments(parser: argparse.ArgumentParser) -> Iterator[str]:
    rows = []
    for action in own_actions(parser):
        text = (action.help or "") % {**vars(action), "prog": parser.prog} if action.help else ""
        default = action.default
        if default not in (None, False, argparse.SUPPRESS, []) and "efault" not in text:
            text += f" Default: {code(default)}."
        rows.append((_spelled(action), text.strip()))
    return table(("Argument", "Meaning"), rows)


@block
def command_options() -> Iterator[str]:
    for name, parser in commands().items():
        yield f"## {name}"
        yield ""
        yield " ".join((parser.description or "").split())
        yield ""
        actions = subcommands(parser)
        if own_actions(parser):
            yield from _arguments(parser)
            yield ""
        for action, subparser in actions.items():
            yield f"`{name} {action}`: {' '.join((subparser.description or '').split())}"
            yield ""
            yield from _arguments(subparser)
            yield ""


# --- Signals, checks, errors, states --------------------------------------------------------------


@block
def signal_arguments() -> Iterator[str]:
    from kjo_django import signals as module

    return table(
        ("Signal", "Keyword arguments"),
        (
            (code(name), ", ".join(map(code, arguments.split(", "))))
            for name, arguments in tabled(module.__doc__)
        ),
    )


@block
def check_ids() -> Iterator[str]:
    from kjo_django import checks as module

    return table(
        ("Id", "Finds"), ((code(f"kjo.{id}"), text) for id, text in tabled(module.__doc__))
    )


@block
def error_tree() -> Iterator[str]:
    from kjo_django import exceptions

    lines = (exceptions.__doc__ or "").splitlines()
    start = lines.index("KjoError")
    yield "```text"
    yield from lines[start : lines.index("", start)]
    yield "```"


@block
def error_classes() -> Iterator[str]:
    from kjo_django import exceptions

    for name in tree_names(exceptions.__doc__ or ""):
        yield f"## {name}"
        yield ""
        yield from docstrings.text_lines(docstrings.read(getattr(exceptions, name).__doc__))


def tree_names(text: str) -> list[str]:
    """Return the names of the classes in a drawn tree, in its order."""
    return re.findall(r"^[│├└─ ]*([A-Z]\w+)(?= {2,}|$)", text, re.MULTILINE)


@block
def states() -> Iterator[str]:
    from kjo_django.states import FINAL, JobState, JobStatus

    virtual = {"scheduled", "processing"}
    return table(
        ("State", "Stored", "Final"),
        (
            (
                code(status.value),
                "no" if status.value in virtual else "yes",
                "yes" if status.value in {str(state) for state in FINAL} else "no",
            )
            for status in JobStatus
            if status.value in virtual or JobState(status.value)
        ),
    )


@block
def transitions() -> Iterator[str]:
    from kjo_django.states import RESULT_OF, TRANSITIONS, JobState

    def start(states: list[JobState]) -> str:
        if set(states) == set(JobState) - {JobState.WAITING}:
            return "any but `waiting`"
        return ", ".join(code(state.value) for state in JobState if state in states)

    return table(
        ("Action", "From", "To"),
        (
            (code(action), start(states), code(RESULT_OF[action].value))
            for action, states in TRANSITIONS.items()
        ),
    )


@block
def state_names() -> Iterator[str]:
    from kjo_django.states import KJO_NUMBERS, JobStatus, to_django_tasks, to_kjo, to_queue

    return table(
        ("Here", "Orchestrator", "Number", "Queue", "Django Tasks"),
        (
            (
                code(status.value),
                code(to_kjo(status)),
                str(KJO_NUMBERS.get(status.value, "")),
                code(to_queue(status)),
                code(to_django_tasks(status)),
            )
            for status in JobStatus
        ),
    )


@block
def dead_letter_reasons() -> Iterator[str]:
    from kjo_django.models import DeadLetterReason

    return table(
        ("Reason", "Shown as"),
        ((code(value), str(label)) for value, label in DeadLetterReason.choices),
    )


# --- Models ---------------------------------------------------------------------------------------


def _models() -> list[Any]:
    from django.apps import apps

    return sorted(apps.get_app_config("kjo_django").get_models(), key=lambda m: m.__name__)


@block
def model_fields() -> Iterator[str]:
    for model in _models():
        yield f"## {model.__name__}"
        yield ""
        yield f"Table `{model._meta.db_table}`. {' '.join((model.__doc__ or '').split())}"
        yield ""
        rows = (
            (code(field.name), field.get_internal_type(), str(getattr(field, "help_text", "")))
            for field in model._meta.concrete_fields
        )
        yield from table(("Field", "Type", ""), rows)
        yield ""


@block
def permissions() -> Iterator[str]:
    rows = []
    for model in _models():
        name = model._meta.model_name
        for action in model._meta.default_permissions:
            rows.append((code(f"kjo_django.{action}_{name}"), model.__name__, ""))
        for codename, label in model._meta.permissions:
            rows.append((code(f"kjo_django.{codename}"), model.__name__, str(label)))
    return table(("Permission", "On", "Says"), rows)


def main() -> None:
    """Write every block of every page anew."""
    for page in pages():
        before = page.read_text()
        after = rewritten(before)
        if after != before:
            page.write_text(after)
            print(f"rewrote {page.name}")


if __name__ == "__main__":
    import os

    import django

    os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
    django.setup()
    main()
