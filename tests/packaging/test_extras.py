"""Each extra may be missing: what needs it says which one, and everything else works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from django.core.exceptions import ImproperlyConfigured

from tests.absence import PACKAGES, VARIABLE

# Large: an import of everything for each extra. Medium are the extra whose absence a project
# notices first, and the absence of all.
pytestmark = pytest.mark.large

ROOT = Path(__file__).resolve().parents[2]
NEEDS = {
    "kafka": ["kjo_django.transports.kafka", "kjo_django.contrib.schema_registry"],
    "redis": ["kjo_django.coordination.redis", "kjo_django.transports.redis_streams"],
    "postgres": ["kjo_django.coordination.database.postgres_listener"],
    "api": ["kjo_django.api"],
    "msgpack": ["kjo_django.messages.msgpack"],
    "tracing": ["kjo_django.contrib.opentelemetry.tracer"],
    "registry": ["kjo_django.contrib.schema_registry"],
    "migrate": [
        f"kjo_django.contrib.celery_codemod.{name}"
        for name in (
            *("call_arguments", "canvas", "celery_settings", "edits", "import_edits", "migration"),
            *("task_calls", "task_declarations", "task_mocks"),
        )
    ],
}
"""The modules, with those in them, that cannot be imported without an extra."""
SAYS = {
    "kafka": "kjo_django.transports.kafka",
    "redis": "kjo_django.coordination.redis",
    "api": "kjo_django.api.urls",
    "msgpack": "kjo_django.messages.msgpack",
    "registry": "kjo_django.contrib.schema_registry",
}
"""Where a project's settings or URLs name an extra's part."""
IMPORT_ALL = """
import importlib, pkgutil
import django
django.setup()
import kjo_django
for module in pkgutil.walk_packages(kjo_django.__path__, "kjo_django.", onerror=str):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        print(module.name, error, sep="|")
"""
RUN_A_JOB = """
import django
django.setup()
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client
call_command("migrate", verbosity=0)
call_command("check")
from tests.ledger.jobs import write
handle = write.enqueue(job="order-7")
call_command("kjo_consume", "ledger", "--drain")
print("state:", handle.status.name)
client = Client()
client.force_login(User.objects.create_superuser("anna"))
page = client.get("/admin/kjo_django/dashboard/jobs/")
print("page:", page.status_code, "ledger.write" in page.content.decode())
"""
START_WITHOUT_LIBPQ = """
import ctypes.util, sys
import django
sys.modules["psycopg_c"] = sys.modules["psycopg_binary"] = None
ctypes.util.find_library = lambda name: None
django.setup()
"""


def run_without(extra: str, program: str, database: Path | str = ":memory:") -> str:
    servers = ("DATABASE_URL", "KAFKA_BOOTSTRAP_SERVERS", "REDIS_URL")
    environment = {
        **{name: value for name, value in os.environ.items() if name not in servers},
        "DATABASE_URL": f"sqlite:///{database}",
        VARIABLE: extra,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.medium("kafka")
@pytest.mark.parametrize("extra", PACKAGES)
def test_without_an_extra_only_its_parts_are_missing_and_they_name_it(extra: str) -> None:
    # When
    said = dict(line.split("|") for line in run_without(extra, IMPORT_ALL).splitlines())
    # Then
    needs = NEEDS.get(extra, [])
    assert [name for name in said if not f"{name}.".startswith(tuple(f"{n}." for n in needs))] == []
    assert {name for name in needs if any(f"{m}.".startswith(f"{name}.") for m in said)} == {*needs}
    if extra in SAYS:
        assert said[SAYS[extra]].endswith(f"pip install 'kjo-django[{extra}]'")


@pytest.mark.medium
def test_psycopg_without_a_libpq_says_so_as_the_page_for_operators_quotes() -> None:
    # Given a project on PostgreSQL
    environment = {
        **os.environ,
        "DATABASE_URL": "postgres://127.0.0.1:1/shop",
        "DJANGO_SETTINGS_MODULE": "tests.settings",
    }
    # When it starts where the system has no libpq
    program = [sys.executable, "-c", START_WITHOUT_LIBPQ]
    done = subprocess.run(program, cwd=ROOT, env=environment, capture_output=True, text=True)
    # Then
    page = (ROOT / "docs/how-to/production.md").read_text().partition("### Which psycopg")[2]
    quoted = page.partition("```text\n")[2].partition("```")[0].splitlines()
    assert done.returncode == 1 and quoted
    assert [line for line in quoted if line not in done.stderr.splitlines()] == []


@pytest.mark.medium
def test_psycopg_2_alone_is_answered_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django goes on with it, and with a psycopg 3 that finds no libpq too."""
    cursors = pytest.importorskip("kjo_django.store.cursors")
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ImproperlyConfigured, match=r"psycopg\[binary\] 3: import of psycopg"):
        cursors.psycopg_module.__wrapped__()


@pytest.mark.medium("all")
@pytest.mark.parametrize(
    "extra",
    ["kafka", "redis", "postgres", "api", ",".join(PACKAGES)],
    ids=["kafka", "redis", "postgres", "api", "all"],
)
def test_without_an_extra_a_job_runs_and_is_shown(extra: str, tmp_path: Path) -> None:
    said = run_without(extra, RUN_A_JOB, tmp_path / "jobs.sqlite3")
    assert "state: COMPLETED" in said
    assert "page: 200 True" in said
