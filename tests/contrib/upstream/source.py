"""Fetching the framework's tests from PyPI, and pointing them at a backend of ours.

Nothing of them is kept in the repository: they are in the source distributions, not in the wheels,
so these are downloaded when the tests run, into the cache of the test servers.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
from pathlib import Path

FOLDER = "tests/tasks/"


def download(requirement: str, into: Path) -> Path:
    """Return the source distribution of a requirement such as ``Django==6.0.10``."""
    name, _, version = requirement.partition("==")
    pattern = f"{name.lower().replace('-', '_')}-{version}.tar.gz"
    if not (found := list(into.glob(pattern))):
        into.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--no-binary", ":all:", "--ignore-requires-python", "--dest", str(into)]
        subprocess.run([*command, requirement], check=True)
        found = list(into.glob(pattern))
    return found[0]


def read_tests(archive: Path) -> dict[str, str]:
    """Return the modules of Django's tests of tasks, by name."""
    sources = {}
    with tarfile.open(archive) as packed:
        for member in packed.getmembers():
            path = member.name.partition("/")[2]
            content = packed.extractfile(member) if path.startswith(FOLDER) else None
            if content is not None and path.endswith(".py"):
                sources[path.removeprefix(FOLDER)] = content.read().decode()
    return sources


def count_tests(archive: Path) -> int:
    """Return how many modules of tests a source distribution carries."""
    with tarfile.open(archive) as packed:
        return sum(bool(re.search(r"/test_\w+\.py$", name)) for name in packed.getnames())


def adapt(source: str, place: str, *, backport: bool) -> str:
    """Return a module of tests that examines the backends of ``place``.

    The backends' paths are exchanged; the tests may use the database; what the backport names
    otherwise is named so.
    """
    source = re.sub(r"django\.tasks\.backends\.(dummy|immediate)\b(?=\.| import)", place, source)
    source = re.sub(r"\bSimpleTestCase\b", "TestCase", source)
    source = source.replace("available_apps = []", "available_apps = None")
    if backport:
        source = re.sub(r"\bdjango\.tasks\b", "django_tasks", source)
        source = re.sub(r"\b(InvalidTask|InvalidTaskBackend)\b", r"\1Error", source)
        source = source.replace("does not support async Tasks", "does not support async tasks")
    return source
