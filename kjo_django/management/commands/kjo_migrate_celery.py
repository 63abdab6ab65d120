"""``kjo_migrate_celery``: rewrite a project's use of Celery as jobs."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured

from kjo_django.management.commands._shared import KjoCommand, plain


class Command(KjoCommand):
    """Parse the files of a project, print a diff of what is mechanical, and list the rest."""

    has_database = False
    help = (
        "Rewrite declarations, calls and mocks of Celery's tasks as jobs: print a unified diff, or "
        "write the files, and list by file and line what a person has to decide. Files are parsed, "
        "never imported. Exit code 1: something is left to do, or a file could not be read."
    )

    def add_arguments(self, parser: ArgumentParser) -> None:
        """Declare the paths and what becomes of them."""
        super().add_arguments(parser)
        add = parser.add_argument
        add("paths", nargs="+", type=Path, metavar="path", help="Files, or folders of them.")
        add(
            "--write",
            action="store_true",
            help="Write the files. None is written if one of them could not be read or rewritten.",
        )
        add(
            "--exclude",
            action="append",
            default=[],
            metavar="PATTERN",
            help="Leave out files whose path in a folder matches, as legacy/*. Repeatable.",
        )

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Rewrite the files."""
        try:
            from kjo_django.contrib.celery_codemod.migration import Migration
        except ModuleNotFoundError as error:
            raise ImproperlyConfigured(
                f"{error}: to rewrite code, pip install 'kjo-django[migrate]'"
            ) from error
        migration = Migration([Path(path) for path in options["paths"]], options["exclude"])
        migration.rewrite()
        if options["write"]:
            migration.write()
        report = migration.report
        return report.as_dict(), report.is_complete

    def show(self, answer: Any) -> None:
        """Print the diff, then what is left, then the counts."""
        if not answer["written"]:
            self.stdout.write(answer["diff"], ending="")
        for finding in answer["findings"]:
            self.stdout.write(
                plain("{file}:{line}: {what}: {why}. To do: {to_do}.".format(**finding))
            )
        for path, why in answer["unreadable"].items():
            self.stdout.write(plain(f"{path}: not read: {why}."))
        self.stdout.write(_state(answer))
        for kind, ends in answer["counts"].items():
            if any(ends.values()):
                self.stdout.write(f"{kind}: {ends['changed']:,} changed, {ends['left']:,} left")


def _state(answer: dict[str, Any]) -> str:
    """Return what has become of the files, in a sentence."""
    count = f"{answer['files']:,} files"
    if not answer["has_celery"]:
        return f"No use of Celery in {count}."
    changed = len(answer["changed_files"])
    if answer["written"]:
        return f"{changed:,} of {count} written."
    why = "some could not be read" if answer["unreadable"] else "add --write to write them"
    return f"{changed:,} of {count} would change; nothing was written: {why}."
