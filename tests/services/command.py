"""Run one command to its end, passing signals on to it."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
NOT_EXECUTABLE, NOT_FOUND = 126, 127  # What a shell exits with.


class Foreground:
    """The command in front, if one runs, and what becomes of signals meanwhile.

    The first signal goes to the command's process, the second kills its process group. Without a
    command (servers are starting or stopping) a signal ends us with 128+n, and so the servers.
    """

    def __init__(self) -> None:
        self._command: subprocess.Popen[bytes] | None = None
        self._is_launching = False
        self._received: list[int] = []

    @contextlib.contextmanager
    def taking_signals(self) -> Iterator[None]:
        previous = {number: signal.signal(number, self._receive) for number in FORWARDED}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def run(self, command: Sequence[str], environment: Mapping[str, str]) -> int:
        """The command's exit code, 128+n if signal n ended it."""
        self._is_launching = True
        try:
            # Its own session: a terminal's Ctrl-C then comes once, from us, and not twice, which
            # commands take for "force".
            self._command = subprocess.Popen(command, env=environment, start_new_session=True)
        except OSError as error:
            print(f"{command[0]}: {error.strerror}", file=sys.stderr)
            return NOT_FOUND if isinstance(error, FileNotFoundError) else NOT_EXECUTABLE
        finally:
            self._is_launching = False
        if self._received:
            self._command.send_signal(self._received[0])
        code = self._command.wait()
        self._command = None
        return code if code >= 0 else 128 - code

    def _receive(self, number: int, _: FrameType | None) -> None:
        if self._is_launching:
            self._received.append(number)
        elif self._command is None:
            raise SystemExit(128 + number)
        elif self._received:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._command.pid, signal.SIGKILL)
        else:
            self._received.append(number)
            self._command.send_signal(number)
