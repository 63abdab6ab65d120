"""What is imported when, and who may know the framework."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from django.core.exceptions import ImproperlyConfigured

from kjo_django.contrib.tasks import load_backends

pytestmark = pytest.mark.medium  # of real processes

ROOT = Path(__file__).parents[2]
needs_framework = pytest.mark.skipif(
    find_spec("django.tasks") is None and find_spec("django_tasks") is None,
    reason="neither Django's tasks nor the backport django-tasks is installed",
)

PROGRAM = """
import sys
import django
from django.conf import settings

settings.configure(
    SECRET_KEY="x",
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    INSTALLED_APPS=["kjo_django", "tests.ledger"],
    KJO={"QUEUES": {"ledger": {}}},
    TASKS={"default": {"BACKEND": "kjo_django.contrib.tasks.KJOBackend", "QUEUES": ["mails"]}},
)

# A task may be declared while the apps are being imported: no models yet.
from kjo_django.contrib.tasks import compat
assert compat.task_backends["default"].supports_defer
assert "kjo_django.models" not in sys.modules

django.setup()
from django.core.checks import run_checks
from django.core.management import call_command
call_command("migrate", verbosity=0)
assert any(m.id == "kjo.E009" for m in run_checks()) is False

# The worker has imported no task when its first message asks for one.
from kjo_django.models import Job
if len(sys.argv) > 2:
    assert "tests.contrib.declared_alone" not in sys.modules
    call_command("kjo_consume", drain=True)
    [job] = Job.objects.all()
    assert job.state == "completed", (job.state, job.error)
    assert "tests.contrib.declared_alone" in sys.modules
else:
    from tests.contrib.declared_alone import add
    add.enqueue(1, 2)
print("all is well")
"""


@needs_framework
def test_one_process_enqueues_another_runs(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    kept = {k: v for k, v in os.environ.items() if not k.endswith(("_URL", "_SERVERS"))}
    for role in ((), ("worker",)):
        done = subprocess.run(
            [sys.executable, str(program), str(tmp_path / "db.sqlite3"), *role],
            cwd=ROOT,
            env={**kept, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        assert done.stdout.endswith("all is well\n")


WITHOUT_THE_APP = """
import django
from django.conf import settings
from django.core.checks import run_checks

settings.configure(
    SECRET_KEY="x",
    INSTALLED_APPS=[],
    TASKS={"default": {"BACKEND": "kjo_django.contrib.tasks.KJOBackend", "QUEUES": ["mails"]}},
)
import tests.contrib.declared_alone  # as a module of models does that enqueues the task

django.setup()
print(*(message.id for message in run_checks()))
"""


@needs_framework
def test_the_frameworks_own_check_says_that_the_app_is_missing() -> None:
    assert output_of(WITHOUT_THE_APP) == "kjo.E023\n"


BESIDE_THE_BACKPORT = """
import sys
import django
from django.conf import settings
from django.core.checks import run_checks

settings.configure(
    SECRET_KEY="x",
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "db.sqlite3"}},
    INSTALLED_APPS=["kjo_django", *APPS],
    TASKS={"default": {"BACKEND": "kjo_django.contrib.tasks.KJOBackend"}},
)
django.setup()
MORE
# No worker runs beside it, so SQLite needs no options for several processes
print(*(message.id for message in run_checks() if message.id != "kjo.W020"))
"""


@pytest.mark.skipif(find_spec("django_tasks") is None, reason="without the backport django-tasks")
@pytest.mark.parametrize(
    ("apps", "more", "told"),
    [
        ([], "", ""),
        ([], "import django_tasks", "kjo.W021"),
        (["django_tasks"], "", "kjo.W021"),
    ],
    ids=["not loaded", "imported", "an app"],
)
def test_the_backport_beside_djangos_own_tasks_is_told(
    apps: list[str], more: str, told: str
) -> None:
    """Without tasks of its own Django has no second framework, and nothing is told."""
    told = told if find_spec("django.tasks") else ""
    program = BESIDE_THE_BACKPORT.replace("APPS]", f"{apps}]").replace("MORE", more)
    assert output_of(program) == f"{told}\n"


def output_of(program: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_backends_of_others_are_left_alone(settings: Any) -> None:
    settings.TASKS = {"default": {"BACKEND": "does.not.exist"}, "empty": {}}
    load_backends()
    settings.TASKS = {"default": {"BACKEND": "kjo_django.contrib.tasks.NoBackend"}}
    with pytest.raises(ImproperlyConfigured, match="default"):
        load_backends()


def test_names_that_are_not_there() -> None:
    from kjo_django.contrib import tasks

    with pytest.raises(AttributeError, match="nothing"):
        _ = tasks.nothing  # type: ignore[attr-defined]


def test_only_compat_knows_the_framework() -> None:
    framework = re.compile(r"^\s*(from|import) (django\.tasks|django_tasks)\b", re.MULTILINE)
    knowing = {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "kjo_django").rglob("*.py")
        if framework.search(path.read_text())
    }
    assert knowing == {"kjo_django/contrib/tasks/compat.py"}
