"""What the repository promises about itself, and what no tool checks."""

from __future__ import annotations

import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from django.core.management import call_command

import kjo_django

ROOT = Path(__file__).resolve().parents[2]

TOP_LEVEL = {
    ".ci",
    ".github",
    ".gitignore",
    "LICENSE",
    "README.md",
    "docs",
    "example_project",
    "hatch_build.py",
    "kjo_django",
    "manage.py",
    "pyproject.toml",
    "tests",
    "tox.ini",
}
VAGUE_NAMES = {"common.py", "helper.py", "helpers.py", "misc.py", "util.py", "utils.py"}
MACHINE_PATHS = re.compile(
    rb"(?<![\w.<>-])/(?:work|root|opt|home)/\w|localhost:\d{4}/simple|index-url"
)


@cache
def files() -> list[Path]:
    """The files of this repository, committed or about to be."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout")
    paths = (ROOT / name for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if path.is_file()]


def set_up_lines(ending: str) -> list[str]:
    """The README's lines that begin with a fresh environment and end like this."""
    lines = (ROOT / "README.md").read_text().splitlines()
    return [line for line in lines if line.startswith("python3 -m venv") and line.endswith(ending)]


def test_the_top_level_is_what_it_should_be() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in files()} <= TOP_LEVEL


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert not [str(path) for path in files() if path.name in VAGUE_NAMES]


def test_no_file_names_a_place_of_one_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {match[0]!r}"
        for path in files()
        if path != Path(__file__)
        for match in [MACHINE_PATHS.search(path.read_bytes())]
        if match
    ]
    assert not found


def test_nothing_is_left_to_do_later() -> None:
    words = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
    assert not [
        str(path)
        for path in files()
        if path.suffix in {".py", ".md", ".toml", ".ini"} and path != Path(__file__)
        if words.search(path.read_text())
    ]


def test_no_test_changes_by_itself_what_is_declared() -> None:
    """``registry.isolated()`` undoes declarations."""
    stores = re.compile(r"\b(registry|conf)(\._|, \"_)(handlers|own|routes|declared|queue_cache)\b")
    assert not [
        str(path)
        for path in files()
        if path.is_relative_to(ROOT / "tests") and path.suffix == ".py"
        if stores.search(path.read_text())
    ]


def test_the_readme_has_the_two_lines() -> None:
    assert len(set_up_lines(" manage.py demo")) == 1
    assert len(set_up_lines(" -m tests")) == 1


def test_continuous_integration_runs_the_readmes_line() -> None:
    script = ROOT / ".ci" / "run"
    assert "grep -m1 '^python3 -m venv .* -m tests$' README.md" in script.read_text()
    assert script.stat().st_mode & 0o111


def test_the_version_is_said_once() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == kjo_django.__version__
    assert f"## {kjo_django.__version__}" in (ROOT / "docs" / "changelog.md").read_text()


@pytest.mark.django_db
def test_the_migrations_are_complete() -> None:
    call_command("makemigrations", check=True, dry_run=True, verbosity=0)
