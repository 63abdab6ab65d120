"""A fault in the settings is a system check, whatever is declared while modules are imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium  # each starts commands

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = """
import sys
import django
from django.conf import settings
from django.core.management import call_command
from django.core.management.base import SystemCheckError

settings.configure(
    SECRET_KEY="x",
    USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": sys.argv[1]}},
    INSTALLED_APPS=["kjo_django"],
    KJO={"MAX_ATTEMPT": 3, "CONCURRENCY": "many", "QUEUES": {"images": {"concurency": 2}}},
)
django.setup()
# As jobs.py and consumers.py of an app declare them.
from kjo_django import Queue, event_handler, kdlq_handler
DECLARED
# And as the rest of a project is used before anybody has corrected it.
call_command("migrate", verbosity=0)
try:
    call_command("check")
except SystemCheckError as error:
    print(error)
"""
DECLARATIONS = {
    "Queue": "Queue('images')",
    "event_handler": "event_handler('T', topic='images')(lambda event: None)",
    "kdlq_handler": "kdlq_handler('k', topic='images')(lambda record: None)",
}


@pytest.mark.large("event_handler", "kdlq_handler")  # declared by the same function
@pytest.mark.parametrize("declared", DECLARATIONS)
def test_every_fault_is_told_at_once_and_no_command_is_a_traceback(
    declared: str, tmp_path: Path
) -> None:
    program = PROGRAM.replace("DECLARED", DECLARATIONS[declared])
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "db.sqlite3")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for told in ("kjo.E001", "kjo.E002", "MAX_ATTEMPT", "CONCURRENCY"):
        assert told in done.stdout
