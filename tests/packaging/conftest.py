"""What takes long to build is built once, also by a run in several processes."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


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
