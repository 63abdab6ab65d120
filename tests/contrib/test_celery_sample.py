"""A project that uses Celery moves: the codemod rewrites it, and its own tests pass on kjo_django.

The sample's tests pass on Celery as they stand; they were run there. Celery is not installed here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import call_command

pytest.importorskip("libcst", reason="the extra migrate is not installed")

from kjo_django.contrib.celery_codemod.migration import Migration
from kjo_django.contrib.celery_codemod.migration_report import Report

ROOT = Path(__file__).resolve().parents[2]
SAMPLE = ROOT / "tests/samples/celery_project"
TESTS = 46

DRAIN = ("from django.test import", "from kjo_django.testing import drain\nfrom django.test import")
BY_HAND: dict[str, list[tuple[str, str]]] = {
    # What the report names, written by a person.
    "accounts/tasks.py": [
        ("from celery import Task\n", ""),
        ("from bazaar.celery import app\n", ""),
        (
            "@app.task(bind=True)\ndef export_account(self,",
            "@job(takes_context=True)\ndef export_account(context,",
        ),
        ('self.update_state(state="PROGRESS", meta={"done": done})', "context.progress(done)"),
        ("class LegacySync(Task):", "class LegacySync:"),
    ],
    "accounts/services.py": [
        ("from celery.result import AsyncResult\n", "from kjo_django import JobHandle\n"),
        ("export_account.delay(user.pk)", "export_account.enqueue(user_id=user.pk)"),
        ("AsyncResult(task_id).state", "JobHandle.of(task_id).status"),
    ],
    "reports/tasks.py": [
        ("from celery import chord, signature\n", ""),
        ("from kjo_django import Retry, job", "from kjo_django import Retry, group, job"),
        ("from bazaar.celery import app\n", ""),
        ("collect.s(report_id, part)", "collect.step(report_id=report_id, part=part)"),
        (
            "chord(header)(summarize.s(report_id))",
            "group(header).then(summarize.step(report_id=report_id)).enqueue()",
        ),
        (
            '@job(queue="reports")\ndef summarize(totals, report_id):\n',
            '@job(queue="reports", takes_context=True)\ndef summarize(context, report_id):\n'
            "    totals = context.workflow.results(collect)\n",
        ),
        ('    app.send_task("archive.store", args=[report_id], queue="archive")', "    ..."),
        ("    return signature(name, args=args)", "    ..."),
    ],
    "reports/tests.py": [
        DRAIN,
        (
            "tasks.summarize([1, 2], self.report.pk)",
            "tasks.build_report(self.report.pk, parts=3)\n        drain()",
        ),
        ("self.report.state), (3,", "self.report.state), (3 * self.report.pk,"),
    ],
    "notifications/tasks.py": [
        ("from celery import shared_task\n", ""),
        ("@shared_task\ndef fan_out(*users)", "@job\ndef fan_out(users)"),
    ],
    "notifications/services.py": [
        ("fan_out.delay(*users)", "fan_out.enqueue(users=users)"),
        ("push.delay(*arguments)", "push.enqueue(user_id=arguments[0], text=arguments[1])"),
    ],
    "notifications/tests.py": [
        DRAIN,
        ("delay.call_args[0][1]", 'delay.call_args.kwargs["body"]'),
        ('"text": "hi"})', '"text": "hi"})\n        drain()'),
    ],
    "media/tests/test_media.py": [
        DRAIN,
        ("        make_thumbnails(7)\n", "        make_thumbnails(7)\n        drain()\n"),
    ],
    "shop/tests/test_tasks.py": [
        DRAIN,
        ('"ups")\n', '"ups")\n        drain()\n'),
        ('"abc", 4)\n', '"abc", 4)\n        drain()\n'),
        ('"count": 2}])\n', '"count": 2}])\n        drain()\n'),
        ("together=True)\n", "together=True)\n        drain()\n"),
    ],
}


PAGE = ROOT / "docs/how-to/move-from-celery.md"
OF_THE_PAGE = ROOT / "tests/samples/celery_page_project"


def migrated(folder: Path, *, write: bool = False) -> Report:
    migration = Migration([folder])
    migration.rewrite()
    if write:
        migration.write()
    return migration.report


@pytest.fixture
def project(tmp_path: Path) -> Iterator[Path]:
    copy = tmp_path / "bazaar_project"
    ignored = shutil.ignore_patterns("__pycache__")
    yield Path(shutil.copytree(SAMPLE, copy, ignore=ignored))


def test_nine_of_ten_declarations_and_calls_are_rewritten(project: Path) -> None:
    # When
    report = migrated(project)
    # Then
    assert sum(report.counts["declarations", end] for end in ("changed", "left")) >= 30
    assert report.unreadable == {}
    assert report.share("declarations") >= 0.9
    assert report.share("calls") >= 0.9


def test_what_is_left_is_named_with_its_reason(project: Path) -> None:
    # When
    found = {
        (each.file.rpartition("bazaar_project/")[2], each.what): each.why
        for each in migrated(project).findings
    }
    # Then
    assert "self.update_state" in found["accounts/tasks.py", "task export_account"]
    assert "class" in found["accounts/tasks.py", "class LegacySync"]
    assert "*users" in found["notifications/tasks.py", "task fan_out"]
    assert "results" in found["reports/tasks.py", "chord(header)(summarize.s(report_id))"]


def test_a_second_run_changes_nothing(project: Path) -> None:
    # Given
    migrated(project, write=True)
    # When
    report = migrated(project)
    # Then
    assert report.changed_files == []
    assert report.diffs == []


@pytest.mark.timeout(300)
def test_the_samples_own_tests_pass_afterwards(project: Path) -> None:
    # Given
    assert migrated(project, write=True).is_written
    (project / "bazaar/celery.py").unlink()
    (project / "bazaar/__init__.py").write_text("")
    for name, changes in BY_HAND.items():
        text = (project / name).read_text()
        for before, after in changes:
            assert text.count(before) == 1, f"{name}: {before!r}"
            text = text.replace(before, after)
        (project / name).write_text(text)
    # When
    servers = ("DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL", "DJANGO_SETTINGS_MODULE")
    environment = {name: value for name, value in os.environ.items() if name not in servers}
    done = subprocess.run(
        [sys.executable, "manage.py", "test"],
        cwd=project,
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    # Then
    assert done.returncode == 0, done.stderr
    assert f"Ran {TESTS} tests" in done.stderr
    assert not [path for path in project.rglob("*.py") if "celery import" in path.read_text()]


def test_the_page_shows_what_the_command_prints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Given
    shown = re.search(r"```diff\n(.*?)```\n\n```text\n(.*?)```\n", PAGE.read_text(), re.DOTALL)
    assert shown is not None
    monkeypatch.chdir(shutil.copytree(OF_THE_PAGE, tmp_path / "project"))
    # When
    with pytest.raises(SystemExit):
        call_command("kjo_migrate_celery", ".")
    # Then
    assert capsys.readouterr().out == shown[1] + shown[2]
