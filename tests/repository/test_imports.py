"""Promise 5, show 9: everything works where no client of any server can even be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.medium

ROOT = Path(__file__).parents[2]
PROGRAM = '''
import importlib, pkgutil, sys, threading, time

BLOCKED = ("confluent_kafka", "redis", "django_redis", "rest_framework", "drf_spectacular",
           "psycopg", "psycopg2", "prometheus_client", "opentelemetry", "msgpack", "orjson",
           "django_tasks", "fastavro", "google", "httpx2")

class Blocker:
    """These packages are not installed here."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r} (blocked)", name=name)

sys.meta_path.insert(0, Blocker())
assert not [name for name in sys.modules if name.partition(".")[0] in BLOCKED]

import django
from django.conf import settings

settings.configure(
    SECRET_KEY="x",
    DEBUG=False,
    ALLOWED_HOSTS=["*"],
    USE_TZ=True,
    ROOT_URLCONF="tests.urls",
    STATIC_URL="/static/",
    DATABASES={
        "default": {
            "ENGINE": "django.db.backends.sqlite3",
            "NAME": sys.argv[1],
            "OPTIONS": {
                "init_command": "PRAGMA journal_mode=WAL",
                "transaction_mode": "IMMEDIATE",
                "timeout": 30,
            },
        }
    },
    INSTALLED_APPS=tests_settings.INSTALLED_APPS,
    MIDDLEWARE=tests_settings.MIDDLEWARE,
    TEMPLATES=tests_settings.TEMPLATES,
    DEFAULT_AUTO_FIELD="django.db.models.BigAutoField",
    PASSWORD_HASHERS=["django.contrib.auth.hashers.MD5PasswordHasher"],
)
django.setup()

# Everything public can be had.
import kjo_django
for name in kjo_django.__all__:
    getattr(kjo_django, name)
ADAPT = ("kjo_django.transports.", "kjo_django.coordination.", "kjo_django.messages.",
         "kjo_django.api", "kjo_django.contrib")
for module in pkgutil.walk_packages(kjo_django.__path__, "kjo_django.", onerror=lambda name: None):
    try:
        importlib.import_module(module.name)
    except ImportError as error:
        # Only what adapts another package may want it, and says so.
        assert module.name.startswith(ADAPT), (module.name, error)

# Check, migrate, and nothing left to migrate.
from django.core.management import call_command
call_command("check", fail_level="WARNING")
call_command("migrate", verbosity=0)
call_command("makemigrations", "kjo_django", check=True, dry_run=True, verbosity=0)

# A job runs, with no KJO setting at all.
from kjo_django.models import DeadLetter, Job
from kjo_django.worker import Worker
from tests.ledger.jobs import refuse, write
from tests.ledger.models import Entry

worker = Worker(["ledger"])
thread = threading.Thread(target=worker.run)
thread.start()
write.enqueue(job="a")
refuse.enqueue(job="b")
end = time.monotonic() + 120
while not (Entry.objects.count() == 1 and DeadLetter.objects.count() == 1):
    assert time.monotonic() < end, list(Job.objects.values())
    time.sleep(0.05)
worker.stop()
thread.join(120)
assert not thread.is_alive()
assert sorted(Job.objects.values_list("state", flat=True)) == ["completed", "failed"]

# Every list and every page of the admin.
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

User.objects.create_superuser("root", password="root")
client = Client()
assert client.login(username="root", password="root")
shown = 0
for model in admin.site._registry:
    if model._meta.app_label != "kjo_django":
        continue
    base = f"admin:kjo_django_{model._meta.model_name}"
    answer = client.get(reverse(f"{base}_changelist"))
    assert answer.status_code == 200, (model, answer.status_code)
    for row in model.objects.all()[:1] if model._meta.managed else ():
        answer = client.get(reverse(f"{base}_change", args=[row.pk]))
        assert answer.status_code == 200, (model, answer.status_code)
    shown += 1
assert shown >= 5, shown

loaded = [name for name in sys.modules if name.partition(".")[0] in BLOCKED]
assert not loaded, loaded
print("all is well")
'''


def run(code, tmp_path, *arguments):
    """Run a program in a fresh interpreter, with no server named, and return how it ended."""
    program = tmp_path / "program.py"
    program.write_text("import tests.settings as tests_settings\n" + code)
    kept = {
        key: value for key, value in os.environ.items() if not key.endswith(("_URL", "_SERVERS"))
    }
    return subprocess.run(
        [sys.executable, str(program), str(tmp_path / "db.sqlite3"), *arguments],
        cwd=ROOT,
        env={**kept, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_without_any_client_the_embedded_default_does_everything(tmp_path):
    done = run(PROGRAM, tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("all is well\n")


KAFKA_IS_NAMED = (
    PROGRAM[: PROGRAM.index("# Everything public")].replace(
        'ROOT_URLCONF="tests.urls",',
        """ROOT_URLCONF="tests.urls",
    KJO={"TRANSPORTS": {"default": {
        "BACKEND": "kjo_django.transports.kafka.KafkaTransport",
        "OPTIONS": {"bootstrap.servers": "127.0.0.1:1"},
    }}},""",
    )
    + """
from django.core.management import call_command
from tests.ledger.jobs import write

def said(*command):
    try:
        call_command(*command)
    except Exception as error:
        return str(error)
    raise AssertionError(f"{command} went well")

call_command("migrate", verbosity=0)
answers = [said(*command.split()) for command in ("check", "kjo_consume", "kjo_topics plan")]
try:
    write.enqueue(job="a")
except Exception as error:
    answers.append(str(error))
try:
    from kjo_django.transports.kafka import KafkaTransport
except ImportError as error:
    answers.append(str(error))
for answer in answers:
    lines = [line for line in answer.splitlines() if "confluent_kafka" in line]
    assert len(lines) == 1 and "pip install 'kjo-django[kafka]'" in lines[0], answer
assert len(answers) == 5
call_command("kjo_health")
"""
)


def test_where_kafka_is_named_and_not_installed_one_line_names_the_extra(tmp_path):
    done = run(KAFKA_IS_NAMED, tmp_path)
    assert done.returncode == 1, done.stderr[-3000:]  # the health is not well
    assert "pip install 'kjo-django[kafka]'" in done.stdout, done.stdout + done.stderr[-3000:]
    assert "Traceback" not in done.stderr


ONE_IS_NAMED = (
    PROGRAM[: PROGRAM.index("# Everything public")]
    + """
try:
    importlib.import_module(sys.argv[2])
except (ImportError, django.core.exceptions.ImproperlyConfigured) as error:
    print(error)
else:
    raise AssertionError("It can be imported")
"""
)


# The others say it by the same function.
@pytest.mark.large("api.urls", "messages.msgpack", "contrib.schema_registry", "coordination.redis")
@pytest.mark.parametrize(
    ("module", "extra"),
    [
        ("transports.kafka", "kafka"),
        ("transports.redis_streams", "redis"),
        ("coordination.redis", "redis"),
        ("api.urls", "api"),
        ("messages.msgpack", "msgpack"),
        ("contrib.schema_registry", "registry"),
    ],
)
def test_what_needs_an_extra_names_it_in_one_line(tmp_path, module, extra):
    done = run(ONE_IS_NAMED, tmp_path, f"kjo_django.{module}")
    assert done.returncode == 0, done.stderr[-3000:]
    (line,) = done.stdout.splitlines()
    assert line.startswith("No module named")
    assert line.endswith(f"pip install 'kjo-django[{extra}]'")


def test_the_clients_it_does_without_are_installed_here():
    """Or the test above would prove nothing."""
    import confluent_kafka  # noqa: F401
    import django_redis  # noqa: F401
    import psycopg  # noqa: F401
