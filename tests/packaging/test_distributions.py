"""Wheel and sdist: what is in them, what they say of themselves, and that the wheel works where
nothing else is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
import zipfile
from collections.abc import Callable, Iterator
from email.message import Message
from email.parser import Parser
from pathlib import Path
from typing import NamedTuple

import django
import pytest
import yaml

import kjo_django
from tests.acceptance.test_tutorial import BLOCK, Reader, follow_the_tutorial

ROOT = Path(__file__).resolve().parents[2]
LOOKS_RIGHT = """
import re
from django.contrib.auth.models import User
from django.contrib.staticfiles import finders
from django.test import Client
client = Client(SERVER_NAME="localhost")
client.force_login(User.objects.get())
page = client.get("/admin/kjo_django/dashboard/").content.decode()
paths = re.findall(r"href=\\S+static/(\\S+[.]css)", page)
sheets = "".join(open(finders.find(path)).read() for path in paths)
(tag,) = re.findall(r"<(\\w+) class=.breadcrumbs", page)
assert re.search(rf"(?m)^{tag}[.]breadcrumbs {{[^}}]*background", sheets), (tag, paths)
"""
"""Asks whether a sheet of the dashboard styles its breadcrumbs, which Django 6.1 marks up anew."""
OLDEST_PYTHON = {"5.2": (3, 10), "6.0": (3, 12), "6.1": (3, 12)}
"""What each Django that the classifiers name needs."""
NEWER_PYTHONS = (14, 13, 12)
VENDOR = ROOT / "kjo_django" / "static" / "kjo_django" / "vendor"

pytestmark = pytest.mark.timeout(900)


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(build_once: Callable[..., Path]) -> dict[str, Path]:
    missing = [name for name in ("hatchling", "twine") if importlib.util.find_spec(name) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{', '.join(missing)} is not installed: pip install --group dev")
    folder = build_once(
        "dist", lambda folder: run(sys.executable, "-m", "hatchling", "build", "-d", folder)
    )
    return {path.suffix: path for path in folder.iterdir()}


@pytest.fixture(scope="module")
def metadata(built: dict[str, Path]) -> Message:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(wheel.read(name).decode())


def test_the_package_index_would_take_them(built: dict[str, Path]) -> None:
    run(sys.executable, "-m", "twine", "check", "--strict", *built.values())


def test_they_say_what_they_are(metadata: Message) -> None:
    assert metadata["Name"] == "kjo-django"
    assert metadata["Version"] == kjo_django.__version__
    assert metadata["License-Expression"] == "MIT AND 0BSD"
    assert metadata["Requires-Python"] == ">=3.11"
    required = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {re.split(r"[<>=]", line)[0] for line in required} == {"django", "cronsim"}
    # The two commands of the README, and every extra by itself, are the users'.
    everything = {
        "kafka",
        "redis",
        "postgres",
        "mysql",
        "api",
        "msgpack",
        "metrics",
        "tracing",
        "registry",
        "fast",
    }
    # Nothing that runs needs the one for moving code.
    assert set(metadata.get_all("Provides-Extra", [])) == everything | {"all", "migrate"}


RELATIVE = re.compile(r'\]\((?![a-z]+:|#)|\bsrc(?:set)?="(?![a-z]+:)')
AT_THE_TAG = re.compile(
    r"https://forge[.]example/shop/kjo_django/(?:blob|raw)/v[\d.]+/([^)\s\"#]+)"
)


def test_a_releases_description_links_to_files_of_its_tag(tmp_path: Path) -> None:
    # Given the address of the repository, as where a release is built
    environment = {**os.environ, "KJO_REPOSITORY_URL": "https://forge.example/shop/kjo_django/"}
    # When
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    # Then
    (built,) = tmp_path.iterdir()
    with zipfile.ZipFile(built) as wheel:
        (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
        said = Parser().parsestr(wheel.read(name).decode())
    text = said.get_payload()
    linked = AT_THE_TAG.findall(text)
    assert len(linked) > 10 and not RELATIVE.search(text)
    assert {"docs/images/overview-light.png", "docs/tutorial.md", "LICENSE"} <= {*linked}
    urls = dict(line.split(", ") for line in said.get_all("Project-URL"))
    assert urls["Repository"] == "https://forge.example/shop/kjo_django"
    linked += AT_THE_TAG.findall(" ".join(urls.values()))
    assert [path for path in linked if not (ROOT / path).is_file()] == []
    run(sys.executable, "-m", "twine", "check", "--strict", built)


def test_without_an_address_none_is_named(metadata: Message) -> None:
    assert "Project-URL" not in metadata
    assert metadata.get_payload() == (ROOT / "README.md").read_text()


def test_the_wheel_holds_the_package_and_nothing_else(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built[".whl"]) as wheel:
        names = wheel.namelist()
    folders = {name.partition("/")[0] for name in names}
    assert folders == {"kjo_django", f"kjo_django-{kjo_django.__version__}.dist-info"}
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", "kjo_django")
    assert {name for name in names if name.startswith("kjo_django/")} == set(listed.splitlines())


def test_the_sdist_has_what_the_wheel_is_built_of(built: dict[str, Path]) -> None:
    with tarfile.open(built[".gz"]) as sdist:
        names = {name.partition("/")[2] for name in sdist.getnames()}
    assert {
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "LICENSE",
        "docs/index.md",
        "kjo_django/py.typed",
        *(f"kjo_django/locale/{each}/LC_MESSAGES/django.mo" for each in ("de", "es")),
    } <= names
    # A pattern without a slash would also take README.md of other folders.
    assert {name.partition("/")[0] for name in names if "/" in name} == {"kjo_django", "docs"}


@pytest.mark.parametrize("folder", sorted(VENDOR.iterdir()), ids=lambda folder: folder.name)
def test_what_is_vendored_has_licence_version_and_checksum(folder: Path, metadata: Message) -> None:
    licence = folder / "LICENSE"
    assert licence.read_text().strip()
    assert str(licence.relative_to(ROOT)) in metadata.get_all("License-File", [])
    said = (folder / "README.md").read_text()
    assert re.search(rf"{folder.name} \d+\.\d+\.\d+", said)
    for path in folder.glob("*.js"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in said


class Environment(NamedTuple):
    """An empty environment with the wheel and one Django."""

    django: str
    python: Path
    seconds: float
    """What it took to make it."""


def interpreter(django: str) -> Path:
    """Return a Python of this machine on which this Django runs, this one if it can be.

    A machine has the Pythons it has: where none will do, the test is skipped, also with CI set.
    """
    least = OLDEST_PYTHON[django]
    if sys.version_info >= least:
        return Path(sys.executable)
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for minor in NEWER_PYTHONS:
        found = shutil.which(f"python3.{minor}")
        for path in [*([Path(found)] if found else []), *pyenv.glob(f"3.{minor}.*/bin/python")]:
            has_parts = [str(path), "-c", "import ssl, sqlite3, ensurepip, venv"]
            if subprocess.run(has_parts, capture_output=True).returncode == 0:
                return path
    pytest.skip(f"Django {django} needs Python {'.'.join(map(str, least))}, which is not here")


@pytest.fixture(
    scope="module",
    params=[
        # The first and the last in every run.
        pytest.param(django, marks=pytest.mark.long) if django == "6.0" else django
        for django in OLDEST_PYTHON
    ],
)
def environment(
    request: pytest.FixtureRequest,
    built: dict[str, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Environment:
    python, begun = interpreter(request.param), time.monotonic()
    folder = tmp_path_factory.mktemp("environment")
    run(python, "-m", "venv", folder)
    python = folder / "bin" / "python"
    django = f"django~={request.param}.0"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", built[".whl"], django)
    run(python, "-m", "pip", "check")
    return Environment(request.param, python, time.monotonic() - begun)


@pytest.fixture
def reader(environment: Environment, tmp_path: Path) -> Iterator[Reader]:
    reader = Reader(tmp_path, str(environment.python), None)
    yield reader
    reader.end()


@pytest.mark.large
def test_the_wheel_runs_the_five_minutes_where_nothing_else_is(
    environment: Environment, reader: Reader, record_property: Callable[[str, object], None]
) -> None:
    begun = time.monotonic()
    text = (ROOT / "docs" / "index.md").read_text()
    text = text.partition("## Five minutes")[2].partition("\n## ")[0]
    for before, language, code in BLOCK.findall(text):
        if "INSTALLED_APPS" in before:
            reader.write("mysite/settings.py", 'INSTALLED_APPS += ["kjo_django", "shop"]\n')
        if language == "sh":
            reader.run(code)
        else:
            reader.write(re.findall(r"`([\w/]+\.py)`", before)[-1], code)
    reader.run(
        "python manage.py shell -c '\n"
        "from shop.models import Receipt\n"
        'assert Receipt.objects.filter(text="ada@example.com paid 12.50").exists()\n'
        'assert Receipt.objects.filter(text="bob@example.com paid 7.00").exists()\''
    )
    seconds = time.monotonic() - begun + environment.seconds
    version = run(environment.python, "-m", "django", "--version").strip()
    told = f"Django {version}: from a wheel to a replayed dead letter in {seconds:.0f} s"
    record_property("told", told)
    reader.run(f"python manage.py shell -c '{LOOKS_RIGHT}'")


@pytest.mark.large
def test_the_tutorial_works_on_every_django(environment: Environment, reader: Reader) -> None:
    if environment.django == ".".join(map(str, django.VERSION[:2])):
        pytest.skip("tests/acceptance/test_tutorial.py follows it on this Django")
    follow_the_tutorial(reader)


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").iterdir()), ids=str)
def test_workflows_of_the_forge_run_what_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) == {"name", True, "permissions", "jobs"}  # YAML reads "on" as True
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    for command in (step["run"] for step in steps if "run" in step):
        for name in re.findall(r"(?:bash|docs) (\S+)", command):
            assert name == "site" or (ROOT / name).exists()
