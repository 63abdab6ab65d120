"""A server process that cannot outlive this one, kill -9 included."""

import json
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.services.errors import ServerFailed

GUARD = Path(__file__).with_name("guard.py")


class GuardedProcess:
    """A command running under `guard.py`; signals go through the guard, the server's real parent.

    The guard has not reaped a process it still relays signals to, so a signal never reaches an
    unrelated process that inherited the pid.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        directory: Path,
        log: Path,
        last_signal: signal.Signals,
        user: tuple[int, int] | None = None,
    ) -> None:
        instructions = {
            "command": list(command),
            "directory": str(directory),
            "log": str(log),
            "last_signal": int(last_signal),
            "user": user,
        }
        with log.open("ab") as errors:
            self._guard = subprocess.Popen(
                [sys.executable, "-I", "-S", str(GUARD)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                bufsize=0,
                # Ctrl-C is for the command under test; the servers stop after it, not with it.
                start_new_session=True,
            )
        self._tell(json.dumps(instructions))
        assert self._guard.stdout is not None
        answer = self._guard.stdout.readline().decode().strip()
        if not answer.isdigit():
            self._guard.wait()
            raise ServerFailed(f"{command[0]} did not start: {answer.removeprefix('error ')}")
        self.pid = int(answer)

    @property
    def is_running(self) -> bool:
        return self._guard.poll() is None

    @property
    def exit_code(self) -> int | None:
        """The server's exit code, 128+n if signal n ended it, None while it runs."""
        return self._guard.poll()

    def signal(self, number: signal.Signals) -> None:
        self._tell(str(int(number)))

    def wait(self, timeout: float) -> bool:
        """Wait for the server's end; False if it is still running after `timeout` seconds."""
        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        for stream in (self._guard.stdin, self._guard.stdout):
            if stream is not None:
                stream.close()
        return True

    def _tell(self, line: str) -> None:
        assert self._guard.stdin is not None
        try:
            self._guard.stdin.write(f"{line}\n".encode())
        except (BrokenPipeError, ValueError):
            pass  # It ended on its own; wait() and exit_code tell.
