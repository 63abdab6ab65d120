"""An environment for each peer, made on first use and kept in the cache."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import venv
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks.errors import BenchmarkError
from tests.services.cache import cache_directory


def python_of(name: str, requirements: Sequence[str]) -> Path:
    """Return the Python of an environment that has these packages.

    :raises BenchmarkError: they cannot be installed; says why.
    """
    wanted = hashlib.sha256("\n".join(requirements).encode()).hexdigest()[:8]
    folder = cache_directory() / "peers" / f"{name}-{wanted}"
    python, done = folder / "bin" / "python", folder / "installed"
    if not done.exists():
        shutil.rmtree(folder, ignore_errors=True)
        folder.parent.mkdir(parents=True, exist_ok=True)
        venv.create(folder, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", *requirements]
        finished = subprocess.run(install, capture_output=True, text=True)
        if finished.returncode:
            raise BenchmarkError(f"{name} cannot be installed: {finished.stderr.strip()[-500:]}")
        done.touch()
    return python


def versions_of(python: Path, requirements: Sequence[str]) -> dict[str, str]:
    """Return the versions of the packages that were asked for."""
    command = [str(python), "-m", "pip", "list", "--format", "json", "--disable-pip-version-check"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {package["name"].lower(): package["version"] for package in json.loads(listed)}
    names = [re.split(r"[\[<>=~!]", requirement)[0].lower() for requirement in requirements]
    return {name: found[name] for name in names if name in found}
