"""Run Django's own tests of task backends against ours: ``python -m tests.contrib.upstream``.

On Django 6 the tests are those of the installed version. The backport's source distribution
carries none, so on Django 5.2 it is Django 6.0's that run, with the backport's names.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import unittest
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tests.contrib.upstream import applies, source
from tests.services.cache import cache_directory

TESTS_FOR_THE_BACKPORT = "Django==6.0.10"
ROOT = Path(__file__).parents[3]


def main() -> int:
    """Run every subject in a process of its own, and print what came of it."""
    cache = cache_directory() / "upstream"
    is_backport = find_spec("django.tasks") is None
    if is_backport:
        backport = source.download(f"django-tasks=={version('django-tasks')}", cache)
        print(f"{backport.name}: {source.count_tests(backport)} modules of tests")
    wanted = TESTS_FOR_THE_BACKPORT if is_backport else f"Django=={version('django')}"
    modules = source.read_tests(source.download(wanted, cache))
    print(f"Tests of {wanted} on Django {version('django')}, Python {sys.version.split()[0]}")
    codes = []
    for subject in applies.MODULES:
        with tempfile.TemporaryDirectory() as folder:
            place = _place(subject)
            for name, text in modules.items():
                path = Path(folder, "tasks", name)
                path.parent.mkdir(exist_ok=True)
                path.write_text(source.adapt(text, place, backport=is_backport))
            codes.append(_run_in_process(subject, folder))
    return max(codes)


def _place(subject: str) -> str:
    return "tests.contrib.upstream.backends" if subject == "kjo" else "kjo_django.contrib.tasks"


def _run_in_process(subject: str, folder: str) -> int:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.contrib.upstream.settings",
        "KJO_UPSTREAM_SUBJECT": subject,
        "PYTHONPATH": os.pathsep.join([str(ROOT), folder]),
    }
    command = [sys.executable, "-m", "tests.contrib.upstream", subject]
    return subprocess.run(command, env=environment, cwd=ROOT, check=False).returncode


def run(subject: str) -> int:
    """Run what applies to a subject, in this process."""
    import django
    from django.test.runner import DiscoverRunner

    django.setup()
    excluded = dict(applies.NOT_APPLICABLE[subject])
    suite = unittest.TestSuite()
    for module in applies.MODULES[subject]:
        for test in _tests_of(unittest.defaultTestLoader.loadTestsFromName(f"tasks.{module}")):
            name = f"{type(test).__name__}.{test._testMethodName}"
            if excluded.pop(name, None) is None:
                suite.addTest(test)
    runner = DiscoverRunner(verbosity=0, interactive=False)
    runner.setup_test_environment()
    databases = runner.setup_databases()
    result: Any = runner.run_suite(suite)
    runner.teardown_databases(databases)
    runner.teardown_test_environment()
    for name in excluded:
        print(f"no such test here: {name}")
    for name, why in applies.NOT_APPLICABLE[subject].items():
        print(f"not applicable: {name}: {why}")
    failed = len(result.failures) + len(result.errors)
    counts = {"run": result.testsRun, "failed": failed, "skipped": len(result.skipped)}
    print(subject, json.dumps({**counts, "not_applicable": len(applies.NOT_APPLICABLE[subject])}))
    return int(bool(failed))


def _tests_of(suite: Any) -> list[Any]:
    if isinstance(suite, unittest.TestSuite):
        return [test for part in suite for test in _tests_of(part)]
    return [suite]


if __name__ == "__main__":
    sys.exit(run(sys.argv[1]) if len(sys.argv) > 1 else main())
