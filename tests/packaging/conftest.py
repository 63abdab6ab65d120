"""What takes long to build is built once, also by a run in several processes."""

from __future__ import annotations

import fcntl
import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOOLS = ("sphinx", "myst_parser", "furo")


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a directory of this name, which the first process of the run to ask for it fills."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def build_once(name: str, build: Callable[[Path], None]) -> Path:
        folder, is_built = shared / name, shared / f"{name}.built"
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not is_built.exists():
                folder.mkdir(exist_ok=True)
                build(folder)
                is_built.touch()
        return folder

    return build_once


@pytest.fixture(scope="session")
def site(build_once: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site of the documentation, made of this checkout; a warning of Sphinx is an error."""
    missing = [name for name in TOOLS if importlib.util.find_spec(name) is None]
    if missing and not os.environ.get("CI"):
        pytest.skip(f"{', '.join(missing)} is not installed: pip install --group docs")

    def build(made: Path) -> None:
        command = ["-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
        trees = tmp_path_factory.mktemp("trees")
        done = subprocess.run(
            [sys.executable, *command, "-d", str(trees), str(ROOT / "docs"), str(made)],
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr

    return build_once("site", build)
