"""One process of the app under test: started, watched, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.acceptance.forking import Forked
from tests.waiting import PATIENCE, wait_until

LOG_TAIL_LINES = 40


class Program:
    """A process in a session of its own, so that ending it ends its children too.

    :param folder: where it runs, and whose code it runs; by default this repository.
    :param forked: it comes of a fork, without a folder of its own: see `tests.acceptance.forking`.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
        *,
        forked: bool = False,
    ) -> None:
        self.arguments = list(arguments)
        self.log_file = log
        self._process: subprocess.Popen[bytes] | Forked
        if forked:
            assert folder is None, "a forked process runs where this one does"
            self._process = Forked(arguments, environment, log)
        else:
            self._process = execute(arguments, environment, log, folder)
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, as the OOM killer would."""
        self._process.send_signal(signal.SIGKILL)
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, as a deployment would; returns at once."""
        self._process.send_signal(signal.SIGTERM)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it as a swapping machine would: it comes back and knows nothing of the time gone.

        Returns once every thread of it has stopped. On a busy machine some run on for a while
        after the signal was sent, and may take a lock of the database meanwhile.
        """
        self._process.send_signal(signal.SIGSTOP)
        # Twice: a thread that was seen to run may have started another one before it stopped.
        wait_until(
            lambda: has_stopped(self.pid) and has_stopped(self.pid),
            f"{self} stops in every thread",
            unless=(FileNotFoundError, ProcessLookupError),  # a thread has ended meanwhile
        )

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def wait(self, timeout: float = PATIENCE) -> int:
        """Return the exit code, negative for a signal."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self} still runs after {timeout:g} s") from None

    def stop(self, timeout: float = PATIENCE) -> int:
        """Terminate it and return the exit code."""
        self.terminate()
        return self.wait(timeout)

    def end(self) -> None:
        """Leave nothing behind, whatever state it is in."""
        self._process.send_signal(signal.SIGKILL)  # it may not lead a session yet
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it and its children have ended
        self._process.wait()

    def log_tail(self) -> str:
        return "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])

    def __str__(self) -> str:
        return f"{' '.join(self.arguments)} (pid {self.pid})"


def execute(
    arguments: Sequence[str], environment: Mapping[str, str], log: Path, folder: Path | None
) -> subprocess.Popen[bytes]:
    """Start a new interpreter."""
    with log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *arguments],
            cwd=folder,
            env={**environment, "KJO_TEST_PARENT": str(os.getpid())},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def has_stopped(pid: int) -> bool:
    """Return whether each thread of a process has stopped; also true where it has ended."""
    tasks = Path(f"/proc/{pid}/task").glob("*/stat")
    return all(task.read_text().rpartition(")")[2].split()[0] in "TXZ" for task in tasks)
