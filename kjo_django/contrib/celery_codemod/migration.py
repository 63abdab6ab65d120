"""A run of the codemod over a project."""

from __future__ import annotations

import difflib
import keyword
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TypeGuard

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, PositionProvider

from kjo_django.contrib.celery_codemod import source_files
from kjo_django.contrib.celery_codemod.canvas import CanvasPlanner
from kjo_django.contrib.celery_codemod.celery_settings import SettingsPlanner, settings_module
from kjo_django.contrib.celery_codemod.edits import FileEdits, Planner, code_of
from kjo_django.contrib.celery_codemod.import_edits import (
    LEFT_TO_DO,
    NamePlanner,
    left_import,
    with_imports,
)
from kjo_django.contrib.celery_codemod.migration_report import Finding, Report
from kjo_django.contrib.celery_codemod.project_index import Module, ProjectIndex, uses_celery
from kjo_django.contrib.celery_codemod.queue_names import unknown_queues
from kjo_django.contrib.celery_codemod.source_files import SourceFile, UnreadableFileError
from kjo_django.contrib.celery_codemod.task_calls import CallPlanner
from kjo_django.contrib.celery_codemod.task_declarations import DeclarationPlanner
from kjo_django.contrib.celery_codemod.task_mocks import MockPlanner
from kjo_django.contrib.celery_codemod.task_options import Plans

FOUND_BY_ITSELF = frozenset({"jobs", "consumers", "producers"})
"""Modules of apps that are imported when Django starts, so that their jobs are known."""
PROJECT_FILES = ("asgi", "celery", "settings", "urls", "wsgi")
"""Modules of a project's own package, which is no app if it has no models."""
SIGNS = ("celery", "CELERY", ".delay", ".apply_async", ".retry(", ".run(", ".s(", ".si(")
"""Texts of which a file has one if there is anything in it to rewrite, but for direct calls of
tasks that are bound."""


class Migration:
    """The codemod's run over some files, in three steps: read, rewrite, write."""

    def __init__(
        self, paths: Iterable[Path], exclude: Sequence[str] = (), packages: Iterable[Path] = ()
    ) -> None:
        self.report = Report()
        self._packages = [source_files.folder(path) for path in packages]
        self._files: list[SourceFile] = []
        self._new: dict[Path, bytes] = {}
        for path, root in source_files.find(paths, exclude):
            self.report.file_count += 1
            try:
                self._files.append(source_files.read(path, root))
            except UnreadableFileError as error:
                name = os.fsencode(path).decode("utf-8", "backslashreplace")
                self.report.unreadable[name] = str(error)

    def rewrite(self) -> None:
        """Rewrite what can be; nothing is written."""
        index = ProjectIndex(self._files, self._packages)
        self.report.has_celery = index.uses_celery
        if not self.report.has_celery:
            return
        plans = Plans(index)
        place = settings_module(index)
        declaring: dict[Path, list[Module]] = defaultdict(list)
        for module in _with_signs(index, plans):
            file = self._rewritten(module, index, plans, is_place=module is place)
            has_jobs = file is not None and file.counts["declarations", "changed"] > 0
            if has_jobs and module.parts[-1] not in FOUND_BY_ITSELF:
                declaring[_app_folder(module)].append(module)
        for folder, modules in sorted(declaring.items()):
            self._import_jobs(folder, modules)
        self.report.findings += unknown_queues(plans, index)
        self.report.findings += plans.bases.of_packages()
        if place is None or str(place.file.shown_path) in self.report.unreadable:
            self._ask_for_attempts(plans)

    def write(self) -> None:
        """Write the new files, if each one could be read and rewritten; none otherwise.

        :raises OSError: one cannot be written.
        """
        if not self.report.unreadable:
            source_files.write(self._new)
            self.report.is_written = True

    def _rewritten(
        self, module: Module, index: ProjectIndex, plans: Plans, *, is_place: bool
    ) -> FileEdits | None:
        """Rewrite one file; return what became of it, None if it cannot be rewritten."""
        try:
            file, code = _edited(module, index, plans, is_place=is_place)
            source_files.parsed(code)
            data = code.encode(module.file.encoding)
            if data.decode(module.file.encoding) != code:
                raise ValueError(f"{module.file.encoding} does not hold its new text")
        except (RecursionError, UnreadableFileError):
            self.report.unreadable[module.file.shown_path] = "it is nested too deeply"
            return None
        except Exception as error:
            # Whatever it is, the other files are rewritten, and nothing is written.
            text = f"{type(error).__name__}: {error}".partition("\n")[0]
            self.report.unreadable[module.file.shown_path] = f"it cannot be rewritten: {text}"
            return None
        self.report.findings += file.findings
        self.report.counts += file.counts
        if code != module.file.text:
            self._new[module.file.path] = data
            self._add_diff(module.file.shown_path, module.file.text, code)
        return file

    def _ask_for_attempts(self, plans: Plans) -> None:
        """Report that no setting limits the attempts of jobs that did not ask for retries."""
        first = next(plans.possible, None)
        if first is not None:
            why = "no settings of Celery were found to write KJO into, so each job has 5 attempts"
            to_do = "set KJO['MAX_ATTEMPTS'] to 1, as in Celery, and name its QUEUES"
            self.report.findings.append(
                Finding(first.module.file.shown_path, 1, "KJO", why, to_do, False)
            )

    def _import_jobs(self, folder: Path, modules: Sequence[Module]) -> None:
        """Plan a ``jobs.py`` that imports the modules with an app's jobs, for Django to find."""
        path = folder / "jobs.py"
        shown = modules[0].file.shown_path
        lines = [_relative_import(folder, module) for module in modules]
        why = _why_not_imported(folder, modules)
        if why:
            to_do = "import the module where Django starts, as in ready() of the app's AppConfig"
            self.report.findings.append(Finding(shown, 1, "jobs", why, to_do))
            return
        if path.exists():
            to_do = f"add to {path.name}: {'; '.join(lines)}"
            why = "jobs are found in jobs.py of each app, which is there already"
            self.report.findings.append(Finding(shown, 1, "jobs", why, to_do, False))
            return
        text = '"""Where kjo_django looks for the jobs of this app."""\n\n'
        text += "".join(f"{line}  # noqa: F401\n" for line in lines)
        source_files.parsed(text)
        self._new[path] = text.encode()
        self._add_diff(source_files.shown(path), "", text)

    def _add_diff(self, shown: str, before: str, after: str) -> None:
        self.report.changed_files.append(shown)
        lines = difflib.unified_diff(
            before.splitlines(keepends=True),
            after.splitlines(keepends=True),
            f"a/{shown}" if before else "/dev/null",
            f"b/{shown}",
        )
        self.report.diffs.append("".join(_ended(lines)))


def _ended(lines: Iterable[str]) -> Iterator[str]:
    """Yield lines of a diff, the last one of a file without an end of line as ``diff`` has it."""
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def _with_signs(index: ProjectIndex, plans: Plans) -> Iterator[Module]:
    """Yield the modules in which there may be anything to rewrite or to report."""
    signs = (*SIGNS, *(task.name for task in index.tasks if task.is_bound))
    asked = _asked_of(task.name for task in index.tasks)
    for module in index.modules:
        text = module.file.text
        has_sign = any(sign in text for sign in signs) or asked.search(text) is not None
        if has_sign or plans.bases.has_users(module):
            yield module


def _edited(
    module: Module, index: ProjectIndex, plans: Plans, *, is_place: bool
) -> tuple[FileEdits, str]:
    """Return what becomes of a file, and its new source."""
    tree = cst.parse_module(module.file.text)
    wrapper = MetadataWrapper(tree, unsafe_skip_copy=True)
    positions = wrapper.resolve(PositionProvider)
    file = FileEdits(module, index, plans, positions, _is_test(module))
    canvas, settings = CanvasPlanner(file, tree), SettingsPlanner(file, tree, is_place=is_place)
    planners: list[Planner] = [DeclarationPlanner(file, tree), canvas, NamePlanner(file, tree)]
    for planner in planners:
        tree.visit(planner)
    canvas.finish()
    if file.is_test:
        tree.visit(MockPlanner(file, tree))
    tree.visit(CallPlanner(file, tree))
    if uses_celery(module) or is_place:
        tree.visit(settings)
        settings.finish()
    edited = file.applied(tree)
    if edited is not tree or file.imports:
        edited = with_imports(edited, tree, file)
        _report_comments(file, tree, edited)
    if left_import(edited):
        why = "it imports Celery, which is still used here"
        line = next(iter(_import_lines(module)), 1)
        file.remark(line, "import of celery", why, LEFT_TO_DO)
    return file, edited.code


def _report_comments(file: FileEdits, before: cst.Module, after: cst.Module) -> None:
    """Report comments that a rewrite has lost, but those that tell linters of an import."""
    imports = m.SimpleStatementLine(body=[m.Import() | m.ImportFrom()])
    of_imports = {
        each for line in m.findall(before, imports) for each in m.findall(line, m.Comment())
    }
    kept = Counter(each.value for each in m.findall(after, m.Comment()) if _is_comment(each))
    for each in m.findall(before, m.Comment()):
        if not _is_comment(each) or ("noqa" in each.value and each in of_imports):
            continue
        kept[each.value] -= 1
        if kept[each.value] < 0:
            why = "it was within what was rewritten, and is gone"
            file.remark(file.line(each), code_of(each), why, "write it again, if it still holds")


def _is_comment(node: cst.CSTNode) -> TypeGuard[cst.Comment]:
    return isinstance(node, cst.Comment)


def _import_lines(module: Module) -> Iterator[int]:
    for number, line in enumerate(module.file.text.splitlines(), start=1):
        if line.lstrip().startswith(("from celery", "import celery")):
            yield number


def _is_test(module: Module) -> bool:
    """Return whether a module holds tests, by its name or that of a package around it."""
    last = module.parts[-1] if module.parts else ""
    is_named = last.startswith("test") or last.endswith("_test") or last == "conftest"
    return is_named or any(part in {"test", "tests"} for part in module.parts)


def _app_folder(module: Module) -> Path:
    """Return the folder of the app that a module belongs to."""
    folder = module.file.path.parent
    for candidate in (folder, *list(folder.parents)[: max(len(module.parts) - 1, 0)]):
        if any((candidate / name).exists() for name in ("apps.py", "models.py", "migrations")):
            return candidate
    is_inner = module.parts[-2:-1] == ("tasks",) or module.file.is_package
    return folder.parent if is_inner else folder


def _asked_of(names: Iterable[str]) -> re.Pattern[str]:
    """Return a pattern for text in which something may be asked of one of these tasks."""
    return re.compile(rf"\b(?:{'|'.join(sorted(names))})(?:\.|\s+as\b)|\b[a-z]{{3}}attr\(")


def _why_not_imported(folder: Path, modules: Sequence[Module]) -> str:
    """Return why a ``jobs.py`` in a folder would import nothing, or empty."""
    is_app = any((folder / name).exists() for name in ("apps.py", "models.py", "migrations"))
    if not is_app and not (folder / "__init__.py").exists():
        return "jobs are found in jobs.py of each app, and its folder is no package"
    if not is_app and any((folder / f"{name}.py").exists() for name in PROJECT_FILES):
        return "jobs are found in jobs.py of each app, and its folder holds the project's settings"
    for module in modules:
        for part in module.file.path.relative_to(folder).with_suffix("").parts:
            if not part.isidentifier() or keyword.iskeyword(part):
                return f"jobs are found in jobs.py of each app, and {part} is no name to import"
    return ""


def _relative_import(folder: Path, module: Module) -> str:
    inside = module.file.path.relative_to(folder).with_suffix("").parts
    if module.file.is_package:
        inside = inside[:-1]
    return f"from .{'.'.join(inside[:-1])} import {inside[-1]}"
