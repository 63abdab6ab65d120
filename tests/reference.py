"""What docs/reference says is read from the code: `python -m tests.reference` writes it anew.

A page holds blocks between `<!-- from the code: NAME -->` and `<!-- end -->`; what stands between
them comes from the function of that name here, everything around them is written by people.
`tests/unit/test_docs.py` fails when a block is out of date.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import timedelta
from pathlib import Path
from typing import Any

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
