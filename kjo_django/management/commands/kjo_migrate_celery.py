"""``kjo_migrate_celery``: rewrite a project's use of Celery as jobs."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from kjo_django.management.commands._shared import KjoCommand, plain
from kjo_django.operations.translations import grouped, translated


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

        add(
            "--packages",
            action="append",
            type=Path,
            default=[],
            metavar="FOLDER",
            help="A folder of installed packages, as .venv/lib/python3.12/site-packages: base "
            "classes of tasks are looked for there. It is read, never changed. Repeatable.",
        )

    def run(self, options: dict[str, Any]) -> tuple[Any, bool]:
        """Rewrite the files."""
        try:
            from kjo_django.contrib.celery_codemod.migration import Migration
        except ModuleNotFoundError as error:
            raise ImproperlyConfigured(
                _("%s: to rewrite code, pip install 'kjo-django[migrate]'") % error
            ) from error
        migration = Migration(
            [Path(path) for path in options["paths"]], options["exclude"], options["packages"]
        )
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
                plain(_("{file}:{line}: {what}: {why}. To do: {to_do}.").format(**finding))
            )
        for path, why in answer["unreadable"].items():
            text = _("%(path)s: not read: %(reason)s.")
            self.stdout.write(plain(text % {"path": path, "reason": why}))
        self.stdout.write(_state(answer))
        for kind, ends in answer["counts"].items():
            if any(ends.values()):
                text = _("%(kind)s: %(changed)s changed, %(left)s left")
                numbers = {name: grouped(ends[name]) for name in ("changed", "left")}
                self.stdout.write(text % {"kind": translated(kind), **numbers})


def _state(answer: dict[str, Any]) -> str:
    """Return what has become of the files, in a sentence."""
    files, changed = answer["files"], grouped(len(answer["changed_files"]))
    text = ngettext(
        "No use of Celery in %(files)s files.", "No use of Celery in %(files)s files.", files
    )
    if answer["has_celery"]:
        text = _(
            "%(changed)s of %(files)s files would change; nothing was written: add --write to "
            "write them."
        )
        if answer["written"]:
            text = _("%(changed)s of %(files)s files written.")
        elif answer["unreadable"]:
            text = _(
                "%(changed)s of %(files)s files would change; nothing was written: some could not "
                "be read."
            )
    return text % {"files": grouped(files), "changed": changed}
