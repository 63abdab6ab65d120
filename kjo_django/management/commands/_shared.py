"""What the commands share: reading durations and instants, JSON or text, progress on stderr."""

from __future__ import annotations

import json
import re
import sys
import time
from argparse import SUPPRESS, Action, ArgumentParser, ArgumentTypeError
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from django.core.exceptions import ImproperlyConfigured
from django.core.management.base import (
    BaseCommand,
    CommandError,
    CommandParser,
    DjangoHelpFormatter,
)
from django.db import DatabaseError, InterfaceError
from django.utils import timezone, translation
from django.utils.dateparse import parse_datetime
from django.utils.translation import gettext as _
from django.utils.translation import gettext_noop

from kjo_django.exceptions import KjoError
from kjo_django.management.console_log import logged_to_stderr
from kjo_django.operations.monitoring.health import missing_tables
from kjo_django.operations.rows import RATE_MAX, RATE_MIN, checked_rate
from kjo_django.operations.translations import grouped
from kjo_django.refusals import shown
from kjo_django.runtime import UnknownDatabaseError, databases, use_database
from kjo_django.values import LONGEST, number

_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}
PROGRESS_INTERVAL = 0.5


def duration(text: str) -> timedelta:
    """Read ``90s``, ``15m``, ``2h``, ``7d``, ``1w``; a bare number counts seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhdw]?)", text.strip().lower())
    if match is None:
        raise ArgumentTypeError(_("%r is not a duration; write 90s, 15m, 2h, 7d or 1w") % text)
    try:
        return timedelta(**{_UNITS[match[2] or "s"]: float(match[1])})
    except OverflowError:
        raise ArgumentTypeError(_("%r is too long a time") % text) from None


def instant(text: str) -> datetime:
    """Read an ISO date or time, or a duration before now; without a zone it is local time."""
    try:
        found = parse_datetime(text) or parse_datetime(f"{text}T00:00:00")
        if found is None:
            found = timezone.now() - duration(text)
        elif timezone.is_naive(found):
            found = timezone.make_aware(found)
        found.astimezone(UTC)  # as the database is asked; it must be able to be
        return found
    except (ArgumentTypeError, OverflowError, ValueError):
        raise ArgumentTypeError(
            _("%r is not a time; write 2026-01-31T12:00, 2026-01-31 or 2h (that long ago)") % text
        ) from None


def positive(text: str) -> int:
    """Read a whole number above 0."""
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(_("%r is not a whole number above 0") % text)
    return int(text)


def _number(check: Callable[[Any], Any], fault: str, **limits: float) -> Callable[[str], float]:
    def read(text: str) -> float:
        try:
            return float(check(float(text)))
        except ValueError:
            shown = {name: grouped(value) for name, value in limits.items()}
            raise ArgumentTypeError(_(fault) % {"text": text, **shown}) from None

    return read


rate = _number(
    checked_rate,
    gettext_noop("%(text)r is no number from %(least)s to %(most)s a second"),
    least=RATE_MIN,
    most=RATE_MAX,
)
share = _number(number(0, 1), gettext_noop("%(text)r is no number from 0 to 1"))
seconds = _number(
    number(1e-9, LONGEST.total_seconds()),
    gettext_noop("%(text)r is no number of seconds above 0 and up to %(most)s days"),
    most=LONGEST.days,
)
"""A century at most: no thread can wait longer."""


def plain(text: object) -> str:
    """Make text from messages safe for a terminal: no control sequences, no line breaks."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in str(text))


@contextmanager
def command_errors() -> Iterator[None]:
    """Turn errors within the block into an exit code: 1 for those of servers, 2 for wrong usage.

    :raises CommandError: with the text that is printed.
    """
    try:
        yield
    except (DatabaseError, InterfaceError) as error:
        text = f"{type(error).__name__}: {error}".rstrip()
        raise CommandError(f"{text}\n{missing_tables()}".rstrip()) from error
    except (KjoError, ImproperlyConfigured) as error:
        raise CommandError(f"{type(error).__name__}: {shown(error)}") from error
    except ValueError as error:
        raise CommandError(shown(error), returncode=2) from error


class _HelpFormatter(DjangoHelpFormatter):
    """Adds the default to each option that has one."""

    def _get_help_string(self, action: Action) -> str | None:
        has_default = action.default not in (None, False, SUPPRESS, [])
        return f"{action.help} (default: %(default)s)" if has_default else action.help


class ParsedCommand(BaseCommand):
    """A command whose help names defaults, and whose options may be given to ``call_command`` as
    keywords that are text, which Django does not parse."""

    # This app's settings alone: for the checks of others Django imports every view of the project,
    # which a worker never calls.
    requires_system_checks: tuple[str, ...] = ("kjo",)
    has_database: ClassVar[bool] = True
    """Whether the command works with a database, so that ``--database`` names one."""
    without_database: ClassVar[str] = "the first of them if not given"
    """What ``--help`` says of a command without ``--database``."""
    writes_log: ClassVar[bool] = False
    """Whether it runs on and on, and so writes what is logged with its time."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Return the parser of the command line."""
        kwargs.setdefault("formatter_class", _HelpFormatter)
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        if self.has_database:
            parser.add_argument(
                "--database",
                metavar="ALIAS",
                help="Where queues have databases of their own: the one to work with; "
                f"{self.without_database}.",
            )
        return parser

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Parse the options that are text still, then run."""
        name = type(self).__module__.rpartition(".")[2]
        for action in self.create_parser("manage.py", name)._actions:
            given = options.get(action.dest)
            if isinstance(given, str) and callable(action.type):
                try:
                    options[action.dest] = action.type(given)
                except (ArgumentTypeError, TypeError, ValueError) as error:
                    raise CommandError(f"{action.dest}: {error}", returncode=2) from error
        log = nullcontext() if not self.writes_log else _log_of(options)
        try:
            with using(options.get("database")), log:
                return super().execute(*args, **options)
        except UnknownDatabaseError as error:
            raise CommandError(str(error), returncode=2) from error


def _log_of(options: dict[str, Any]) -> AbstractContextManager[object]:
    return logged_to_stderr(int(options.get("verbosity") or 0), as_json=bool(options.get("json")))


def using(database: str | None) -> AbstractContextManager[object]:
    """Return a block that works with a database; with the one that is worked with, for None."""
    return nullcontext() if database is None else use_database(database)


def chosen_databases(options: dict[str, Any]) -> list[str]:
    """Return the database that ``--database`` names, else all that hold jobs."""
    return [options["database"]] if options.get("database") else databases()


class KjoCommand(ParsedCommand):
    """A command that delegates: ``run`` answers, ``show`` prints it in the active language,
    ``--json`` prints it raw, in English.

    Exit codes: 0 done, 1 something is not well or was refused by a server, 2 wrong usage.
    """

    # The settings are checked by what is called; a broken database must not hide the answer.
    requires_system_checks = ()

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Add ``--json``."""
        parser.add_argument("--json", action="store_true", help="Print one JSON object.")

    def handle(self, *args: Any, **options: Any) -> None:
        """Run, print, and exit with 1 when it is not well."""
        with translation.override(None) if options["json"] else nullcontext():
            self._handle(options)

    def _handle(self, options: dict[str, Any]) -> None:
        self._has_open_line = False
        try:
            with command_errors():
                answer, is_ok = self.run(options)
        finally:
            if self._has_open_line:
                self.stderr.write("\n", ending="")
        if options["json"]:
            text = json.dumps(answer, ensure_ascii=False, default=str)
            if not text.isprintable():
                # Terminals obey more characters than JSON escapes, and no stream takes them all.
                text = json.dumps(answer, default=str)
            self.stdout.write(text)
        else:
            self.show(answer)
        if not is_ok:
            sys.exit(1)

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Run the command; return its answer, ready for JSON, and whether all is well."""
        raise NotImplementedError

    def show(self, answer: Any) -> None:
        """Print the answer for people."""
        raise NotImplementedError

    def table(self, rows: Iterable[Sequence[object]]) -> None:
        """Print rows in columns; the first is the heading."""
        texts = [[plain(cell) for cell in row] for row in rows]
        widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
        for row in texts:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            self.stdout.write("  ".join(cells).rstrip())

    def progress(self, what: str) -> Callable[[int, int | None], None]:
        """Return a callback that shows progress on stderr, a few times a second at most."""
        last = [time.monotonic()]

        def show(done: int, total: int | None) -> None:
            if time.monotonic() - last[0] < PROGRESS_INTERVAL and done != total:
                return
            last[0] = time.monotonic()
            is_terminal = self.stderr.isatty()
            of = _(" of %s") % grouped(total) if total is not None else ""
            start = "\r" if is_terminal else ""
            text = f"{start}{what}: {grouped(done)}{of}"
            self.stderr.write(text, self.style.NOTICE, ending="" if is_terminal else "\n")
            self._has_open_line = is_terminal

        return show
