"""The site of every version: each has a folder, links the others, and is made of its own pages."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INDEX = """# Shop {0}

## All pages

**Pages**

- [Tutorial](tutorial.md)
- [Deeper](how-to/deeper.md)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A repository with two pages, released as 0.1.0 and 0.2.0, and worked on since."""
    if importlib.util.find_spec("sphinx") is None and not os.environ.get("CI"):
        pytest.skip("sphinx is not installed: pip install --group docs")
    folder = tmp_path / "project"
    for name in ("_templates", "_static"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name)
    for name in ("conf.py", "all_versions.py"):
        shutil.copy(ROOT / "docs" / name, folder / "docs" / name)
    git(folder, "init", "--quiet")
    (folder / "README").write_text("There are no pages yet.")
    save(folder, "v0.0.9", only="README")
    (folder / "docs" / "tutorial.md").write_text("# Tutorial\n\nRead on.\n")
    (folder / "docs" / "how-to").mkdir()
    (folder / "docs" / "how-to" / "deeper.md").write_text("# Deeper\n\nRead on.\n")
    for version in ("0.1.0", "0.2.0", "0.3.0"):
        (folder / "pyproject.toml").write_text(f'[project]\nversion = "{version}"\n')
        (folder / "docs" / "index.md").write_text(INDEX.format(version))
        save(folder, "" if version == "0.3.0" else f"v{version}")
    git(folder, "tag", "verylate")
    return folder


def save(folder: Path, tag: str, only: str = ".") -> None:
    git(folder, "add", only)
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    git(folder, *who, "commit", "--quiet", "--message", "Pages")
    if tag:
        git(folder, "tag", tag)


def git(folder: Path, *arguments: str) -> None:
    subprocess.run(["git", *arguments], cwd=folder, check=True, stdout=subprocess.DEVNULL)


@pytest.mark.large  # builds four sites, which matters when a release is tagged
def test_each_version_has_a_folder_and_links_the_others(project: Path, tmp_path: Path) -> None:
    # When
    site = tmp_path / "site"
    command = [sys.executable, "docs/all_versions.py", str(site)]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    # Then each release with pages is there, and what is worked on, each made of its own pages
    assert done.stdout.endswith("site: main, 0.2.0, 0.1.0\n")
    for name, version in (("main", "0.3.0"), ("0.2.0", "0.2.0"), ("0.1.0", "0.1.0")):
        for page in ("index.html", "tutorial.html", "how-to/deeper.html"):
            text = (site / name / page).read_text()
            assert f"project {version}" in text or f"kjo_django {version}" in text
            for other in ("main", "0.2.0", "0.1.0"):
                (link,) = [
                    part for part in text.split('"') if part.endswith(f"../{other}/index.html")
                ]
                assert (site / name / page).parent.joinpath(
                    link
                ).resolve() == site / other / "index.html"
            here = text.partition('aria-current="true">')[2].partition("<")[0]
            assert here == name
    # And the first page leads to the newest release
    assert 'url=0.2.0/"' in (site / "index.html").read_text()
    # And nothing of it is left in the repository
    left = subprocess.run(["git", "worktree", "list"], cwd=project, capture_output=True, text=True)
    assert len(left.stdout.splitlines()) == 1


def test_a_site_of_one_version_names_no_others(project: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [sys.executable, "-m", "sphinx", "--quiet", "docs", str(site)]
    subprocess.run(command, cwd=project, check=True)
    assert "Versions" not in (site / "index.html").read_text()


def test_a_folder_is_needed(project: Path) -> None:
    done = subprocess.run(
        [sys.executable, "docs/all_versions.py"], cwd=project, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (2, "usage: python docs/all_versions.py FOLDER\n")
