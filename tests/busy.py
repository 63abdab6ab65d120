"""Processes that only take processor time."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

COMPUTE = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
"""They end with the process that wanted them, too."""


@contextmanager
def burning(count: int) -> Iterator[None]:
    """Have so many of them."""
    with ExitStack() as processes:
        for _ in range(count):
            process = subprocess.Popen([sys.executable, "-c", COMPUTE])
            processes.callback(process.wait)
            processes.callback(process.terminate)
        yield
