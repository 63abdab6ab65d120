"""One process of the app under test: started, watched, killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.waiting import PATIENCE

LOG_TAIL_LINES = 40


class Program:
    """A process in a session of its own, so that ending it ends its children too.

    :param folder: where it runs, and whose code it runs; by default this repository.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        folder: Path | None = None,
    ) -> None:
        self.arguments = list(arguments)
        self.log_file = log
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                cwd=folder,
                env={**environment, "KJO_TEST_PARENT": str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def kill(self) -> None:
        """SIGKILL, as the OOM killer would."""
        self._process.kill()
        self._process.wait()

    def terminate(self) -> None:
        """SIGTERM, as a deployment would; returns at once."""
        self._process.terminate()

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def freeze(self) -> None:
        """Stop it as a swapping machine would: it comes back and knows nothing of the time gone.

        Returns once every thread of it has stopped. On a busy machine some run on for a while
        after the signal was sent, and may take a lock of the database meanwhile.
        """
        self._process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

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
        try:
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass  # it and its children have ended
        self._process.wait()

    def log_tail(self) -> str:
        return "\n".join(self.log.splitlines()[-LOG_TAIL_LINES:])

    def __str__(self) -> str:
        return f"{' '.join(self.arguments)} (pid {self.pid})"
