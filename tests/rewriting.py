"""A pytest plugin: the processes of a parallel run share the work of rewriting assertions.

That takes longer than all other collecting, and each process collects everything. So each imports a
share of the modules first. pytest keeps what it has rewritten in ``__pycache__``, where the others
find it when they collect.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest


def pytest_sessionstart(session: pytest.Session) -> None:
    worker = getattr(session.config, "workerinput", None)
    if worker is None or sys.dont_write_bytecode:
        return
    number, count = int(worker["workerid"].removeprefix("gw")), worker["workercount"]
    for path in sorted(modules(session.config))[number::count]:
        name = ".".join(path.relative_to(session.config.rootpath).with_suffix("").parts)
        # What is wrong with it, or missing for it, is told when it is collected.
        with suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def modules(config: pytest.Config) -> Iterator[Path]:
    """Yield the modules of the folders that are collected."""
    # Not imported above: pytest rewrites the assertions of a plugin that nobody has imported.
    from tests.selection import has_none_wanted

    for name in config.args:
        folder = config.rootpath / name
        if folder.is_dir() and folder.is_relative_to(config.rootpath):
            found = folder.rglob("test_*.py")
            yield from (path for path in found if not has_none_wanted(path, config))
