"""An environment for each peer, made on first use and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

from tests.benchmarks.errors import BenchmarkError
from tests.services.cache import cache_directory

Version = tuple[int, int]
NEWEST: Version = (3, 14)


def python_of(name: str, requirements: Sequence[str], least: Version = (3, 0)) -> Path:
    """Return the Python of an environment that has these packages.

    :param least: the oldest Python they run on; ours if it is no older, else one of this machine.
    :raises BenchmarkError: they cannot be installed; says why.
    """
    interpreter = interpreter_for(least)
    about = "\n".join(requirements)
    if interpreter != sys.executable:
        about += f"\n{least}"
    wanted = hashlib.sha256(about.encode()).hexdigest()[:8]
    folder = cache_directory() / "peers" / f"{name}-{wanted}"
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        install = ["-m", "pip", "install", "--quiet", *requirements]
        for command in ([interpreter, "-m", "venv", str(folder)], [str(python), *install]):
            finished = subprocess.run(command, capture_output=True, text=True)
            if finished.returncode:
                why = finished.stderr.strip()[-500:]
                raise BenchmarkError(f"{name} cannot be installed: {why}")
        done.touch()
    return python


@cache
def interpreter_for(least: Version) -> str:
    """Return a Python that is new enough: this one, or the oldest other one that is found.

    :raises BenchmarkError: there is none.
    """
    if sys.version_info[:2] >= least:
        return sys.executable
    for version in range(least[1], NEWEST[1] + 1):
        for candidate in _candidates(f"3.{version}"):
            if _runs(candidate, (3, version)):
                return candidate
    raise BenchmarkError(f"there is no Python {least[0]}.{least[1]} or newer on this machine")


def _candidates(version: str) -> Iterator[str]:
    if on_path := shutil.which(f"python{version}"):
        yield on_path
    if shutil.which("pyenv"):
        root = subprocess.run(["pyenv", "root"], capture_output=True, text=True).stdout.strip()
        yield from map(str, sorted(Path(root, "versions").glob(f"{version}.*/bin/python")))


def _runs(candidate: str, version: Version) -> bool:
    command = [candidate, "-c", "import sys, venv; print(*sys.version_info[:2])"]
    try:
        told = subprocess.run(command, capture_output=True, text=True)
    except OSError:
        return False
    return told.stdout.split() == [*map(str, version)]


def versions_of(python: Path, requirements: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that were asked for."""
    command = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {package["name"].lower(): package["version"] for package in json.loads(listed)}
    names = [re.split(r"[\[<>=~!]", requirement)[0].lower() for requirement in requirements]
    return {name: found[name] for name in names if name in found}
