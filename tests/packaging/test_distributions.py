"""Wheel and sdist: what is in them, what they say of themselves, and that the wheel works where
nothing else is installed."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import time
import venv
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
import yaml

import kjo_django
from tests.acceptance.test_tutorial import BLOCK, Reader

ROOT = Path(__file__).resolve().parents[2]
VENDOR = ROOT / "kjo_django" / "static" / "kjo_django" / "vendor"

pytestmark = pytest.mark.timeout(900)


def run(*command: str | Path) -> str:
    done = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    missing = [name for name in ("hatchling", "twine") if importlib.util.find_spec(name) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{', '.join(missing)} is not installed: pip install --group dev")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-d", folder)
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
        "fast",
    }
    assert set(metadata.get_all("Provides-Extra", [])) == everything | {"all"}


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
        "README.md",
        "LICENSE",
        "docs/index.md",
        "kjo_django/py.typed",
    } <= names


@pytest.mark.parametrize("folder", sorted(VENDOR.iterdir()), ids=lambda folder: folder.name)
def test_what_is_vendored_has_licence_version_and_checksum(folder: Path, metadata: Message) -> None:
    licence = folder / "LICENSE"
    assert licence.read_text().strip()
    assert str(licence.relative_to(ROOT)) in metadata.get_all("License-File", [])
    said = (folder / "README.md").read_text()
    assert re.search(rf"{folder.name} \d+\.\d+\.\d+", said)
    for path in folder.glob("*.js"):
        assert hashlib.sha256(path.read_bytes()).hexdigest() in said


def test_the_wheel_runs_the_five_minutes_where_nothing_else_is(
    built: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun = time.monotonic()
    environment, folder = tmp_path / "environment", tmp_path / "project"
    folder.mkdir()
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    run(python, "-m", "pip", "install", "--quiet", "--no-compile", built[".whl"])
    run(python, "-m", "pip", "check")
    text = (ROOT / "docs" / "index.md").read_text()
    text = text.partition("## Five minutes")[2].partition("\n## ")[0]
    reader = Reader(folder, str(python), None)
    try:
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
    finally:
        reader.end()
    with capsys.disabled():
        print(f"\nFrom a wheel to a replayed dead letter in {time.monotonic() - begun:.0f} s")


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").iterdir()), ids=str)
def test_workflows_of_the_forge_run_what_is_there(path: Path) -> None:
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) == {"name", True, "permissions", "jobs"}  # YAML reads "on" as True
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    assert all(("run" in step) != ("uses" in step) for step in steps)
    for command in (step["run"] for step in steps if "run" in step):
        for name in re.findall(r"(?:bash|docs) (\S+)", command):
            assert name == "site" or (ROOT / name).exists()
