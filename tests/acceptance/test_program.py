"""The harness: a process that was frozen does nothing until it thaws."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.acceptance.program import Program

TIMES = 20
BUSY = "while True: pass"
THREADS = '''"""Six threads that work all the time."""
import threading, time

def work():
    while True:
        sum(range(2000))
        time.sleep(0.0001)

for _ in range(6):
    threading.Thread(target=work).start()
print("ready", flush=True)
'''


@pytest.fixture
def busy_machine() -> Iterator[None]:
    with ExitStack() as stack:
        for _ in range(2 * (os.cpu_count() or 1)):
            stack.enter_context(busy())
        yield


@contextmanager
def busy() -> Iterator[None]:
    process = subprocess.Popen([sys.executable, "-c", BUSY])
    try:
        yield
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    (tmp_path / "threads.py").write_text(THREADS)
    program = Program(["threads"], os.environ, tmp_path / "log", tmp_path)
    yield program
    program.end()


def has_stopped(pid: int) -> bool:
    """Whether every thread of a child of this process has stopped; the kernel tells no sooner."""
    return os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None


@pytest.mark.usefixtures("busy_machine")
def test_a_frozen_process_has_stopped_in_every_thread(program: Program) -> None:
    """Where it had not, it went on to take a lock of SQLite, which nobody got until the thaw."""
    while "ready" not in program.log:
        assert program.is_running, program.log
    for _ in range(TIMES):
        # When
        program.freeze()
        # Then
        assert has_stopped(program.pid)
        program.thaw()
