"""Processes that are forked from a server which has imported Django and the drivers already.

A new interpreter imports them anew: half of the processor time of a start. The server is that of
`multiprocessing`, one for each process that starts others. It ends with that one, kill -9 included,
and what it has forked ends with it, where `tests.acceptance.manage.die_with_parent` is called.

What an interpreter draws by lot when it starts, the seed of its hashes, is the server's.
"""

from __future__ import annotations

import atexit
import ctypes
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import connection
from pathlib import Path
from types import ModuleType

PRELOADED = "tests.acceptance.preloaded"
READ_ONCE = ("GLIBC_", "LANG", "LC_", "LD_", "MALLOC_", "PYTHON")
"""How variables begin that a process reads when it is executed: what is forked has the server's."""
READ_BEFORE_IMPORTS = ("KJO_TEST_CLOCK_AHEAD", "KJO_TEST_WITHOUT")
"""Variables that change what is imported after them."""

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload([PRELOADED])
_lock = threading.Lock()
"""Held while the state of a process is read, which `multiprocessing` can do once only."""


def suits(environment: Mapping[str, str]) -> bool:
    """Return whether a forked process would do with this environment what a new one does."""
    if any(environment.get(name) for name in READ_BEFORE_IMPORTS):
        return False
    differing = {name for name, _ in environment.items() ^ os.environ.items()}
    return not any(name.startswith(READ_ONCE) for name in differing - {"PYTHONUNBUFFERED"})


class Forked:
    """A process as ``python -m`` with these arguments would be, with the methods of a
    `subprocess.Popen` that a `Program` needs."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self._arguments = list(arguments)
        log.touch()
        given = self._arguments, dict(environment), str(log.absolute())
        with _lock, _no_main_module():
            self._process = _context.Process(target=run, args=given)
            self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        with _lock:
            return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        connection.wait([self._process.sentinel], timeout)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired(self._arguments, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


@contextmanager
def _no_main_module() -> Iterator[None]:
    """Keep `multiprocessing` from importing the main module, pytest say, in what it starts."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


@atexit.register
def _kill_what_is_left() -> None:
    """`multiprocessing` would wait until it ends by itself."""
    for process in multiprocessing.active_children():
        process.kill()


# --- In the forked process ------------------------------------------------------------------------


def run(arguments: list[str], environment: dict[str, str], log: str) -> None:
    """Do what ``python -m`` with these arguments does; does not return."""
    os.setsid()
    _open_streams(log)
    from tests.acceptance.preloaded import SERVER

    assert os.getpid() != SERVER, f"the fork server cannot import {PRELOADED}"
    os.environ.clear()
    os.environ.update(environment, KJO_TEST_PARENT=str(SERVER))
    sys.argv = arguments
    code = _exit_code(arguments[0])
    gc.freeze()  # what is left when a process ends need not be looked at: that takes 0.1 s
    # As an interpreter ends, atexit handlers included, which multiprocessing leaves out.
    ctypes.pythonapi.Py_Exit(code)


def _open_streams(log: str) -> None:
    """Read nothing, write to the log, and have no other file open.

    One of those is by which the server sees that somebody still needs it.
    """
    for number, path, flags in (
        (0, os.devnull, os.O_RDONLY),
        (1, log, os.O_WRONLY | os.O_APPEND),
        (2, log, os.O_WRONLY | os.O_APPEND),
    ):
        os.dup2(os.open(path, flags), number)
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout.reconfigure(line_buffering=True)


def _exit_code(module: str) -> int:
    """Run a module as the main one, and return what its process should exit with."""
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        if isinstance(end.code, int | None):
            return end.code or 0
        print(end.code, file=sys.stderr)
        return 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            signal.raise_signal(signal.SIGINT)
        return 1
    return 0
