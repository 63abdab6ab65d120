"""Make the site of every version: ``python docs/all_versions.py site``.

``site/main`` is made of this checkout, and ``site/0.1.0`` of the tag ``v0.1.0``. Each page links
the other versions in its sidebar. ``site/index.html`` leads to the newest release, or to ``main``
before there is one. Tags from before there were these pages are left out.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MAIN = "main"
RELEASE = re.compile(r"v(\d+(?:\.\d+)*)")
LEAD = '<!doctype html><meta charset="utf-8"><meta http-equiv="refresh" content="0; url={0}/">\n'


def main() -> int:
    if len(sys.argv) != 2:
        sys.stderr.write("usage: python docs/all_versions.py FOLDER\n")
        return 2
    site, tags = Path(sys.argv[1]).resolve(), releases()
    names = [MAIN, *tags]
    build(ROOT, site / MAIN, MAIN, names)
    for name, tag in tags.items():
        with tempfile.TemporaryDirectory() as folder:
            git("worktree", "add", "--detach", folder, tag)
            try:
                build(Path(folder), site / name, name, names)
            finally:
                git("worktree", "remove", "--force", folder)
    newest = next(iter(tags), MAIN)
    (site / "index.html").write_text(LEAD.format(newest) + f'<a href="{newest}/">{newest}</a>\n')
    sys.stdout.write(f"{site}: {', '.join(names)}\n")
    return 0


def releases() -> dict[str, str]:
    """Return the tag of each released version that has these pages, the newest first."""
    tags = git("tag", "--list", "v*", "--sort=-version:refname").split()
    found = {match[1]: tag for tag in tags if (match := RELEASE.fullmatch(tag))}
    return {
        name: tag
        for name, tag in found.items()
        if "docs/conf.py" in git("ls-tree", "--name-only", tag, "docs/").split()
    }


def build(source: Path, to: Path, name: str, names: list[str]) -> None:
    """Build the pages of a version, with warnings as errors."""
    variables = {"DOCS_VERSION": name, "DOCS_VERSIONS": " ".join(names)}
    command = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    subprocess.run(
        [sys.executable, *command, str(source / "docs"), str(to)],
        check=True,
        env={**os.environ, **variables},
    )


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    return done.stdout.decode()


if __name__ == "__main__":
    sys.exit(main())
