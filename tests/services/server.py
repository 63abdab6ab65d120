"""What Kafka, Redis and PostgreSQL have in common: one process, one port, one directory."""

import shutil
import signal
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar, Self

from tests.services.errors import ServerFailed
from tests.services.ports import free_port
from tests.services.process import GuardedProcess

LOG_TAIL_LINES = 25
POLL_SECONDS = 0.02


class Server(ABC):
    """A real server on a free loopback port, with its data in a directory of its own.

    `stop`, `kill` and `restart` keep the port and the directory; `close` (and leaving the `with`
    block) removes them. Should this process die, the server and the directory go with it.
    """

    name: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    # Ends a server whose data nobody needs any more.
    last_signal: ClassVar[signal.Signals] = signal.SIGKILL
    start_timeout: ClassVar[float] = 60.0
    stop_timeout: ClassVar[float] = 20.0

    def __init__(self, *, port: int | None = None) -> None:
        self.port = port or free_port()
        self._directory: Path | None = None
        self._process: GuardedProcess | None = None
        self._log_offset = 0

    @property
    @abstractmethod
    def url(self) -> str:
        """What the server's environment variable is set to."""

    @abstractmethod
    def _prepare(self) -> None:
        """Fill the new directory, once in the server's life."""

    @abstractmethod
    def _command(self) -> Sequence[str]: ...

    @abstractmethod
    def _answers(self) -> bool:
        """Whether this process, not another on its port, serves clients; asked until it does."""

    def _run_as(self) -> tuple[int, int] | None:
        """User and group id of the server, None for our own."""
        return None

    @property
    def directory(self) -> Path:
        if self._directory is None:
            raise ServerFailed(f"{self.name} has not been started")
        return self._directory

    @property
    def log_file(self) -> Path:
        return self.directory / "server.log"

    @property
    def pid(self) -> int:
        if self._process is None:
            raise ServerFailed(f"{self.name} is not running")
        return self._process.pid

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.is_running

    def start(self) -> Self:
        """Start, unless it runs already, and wait until it answers."""
        self.launch()
        self.wait_ready()
        return self

    def launch(self) -> None:
        """Start without waiting: a cluster's members need one another to become ready."""
        if self.is_running:
            return
        if self._directory is None:
            self._directory = self._create_directory()
            self._prepare()
        if self.log_file.exists():
            self._log_offset = self.log_file.stat().st_size
        self._process = GuardedProcess(
            self._command(),
            directory=self.directory,
            log=self.log_file,
            last_signal=self.last_signal,
            user=self._run_as(),
        )

    def wait_ready(self) -> None:
        deadline = time.monotonic() + self.start_timeout
        while True:  # timed loop: its own time to start, and its log in the error
            if not self.is_running:
                code = self._process.exit_code if self._process else None
                raise ServerFailed(self._with_log(f"{self.name} exited with code {code}"))
            if self._answers():
                return
            if time.monotonic() > deadline:
                self._end(signal.SIGKILL)
                waited = f"within {self.start_timeout:g} s"
                raise ServerFailed(self._with_log(f"{self.name} did not answer {waited}"))
            time.sleep(POLL_SECONDS)  # sleep: until the next look

    def stop(self) -> None:
        """Shut down in order, as a deployment would; SIGKILL after `stop_timeout` seconds."""
        self._end(self.stop_signal)

    def kill(self) -> None:
        """SIGKILL: no goodbye to clients, nothing flushed."""
        self._end(signal.SIGKILL)

    def restart(self, *, kill: bool = False) -> None:
        """Stop (or kill) and start again on the same port and data."""
        if kill:
            self.kill()
        else:
            self.stop()
        self.start()

    def pause(self) -> None:
        """Freeze: connections stay open and nothing answers, as when a machine swaps."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the server at once and remove its data."""
        self._end(self.last_signal)
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)
            self._directory = None

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_: object) -> None:
        self.close()

    def log_since_start(self) -> str:
        """What the server wrote since its last start."""
        with self.log_file.open("rb") as log:
            log.seek(self._log_offset)
            return log.read().decode(errors="replace")

    def _create_directory(self) -> Path:
        return Path(tempfile.mkdtemp(prefix=f"kjo-{self.name}-"))

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            self._process.signal(number)

    def _end(self, number: signal.Signals) -> None:
        if self._process is None:
            return
        self._process.signal(number)
        # A paused server receives everything but SIGKILL only once it runs again.
        self._process.signal(signal.SIGCONT)
        if not self._process.wait(self.stop_timeout):
            self._process.signal(signal.SIGKILL)
            self._process.wait(self.stop_timeout)
        self._process = None

    def _with_log(self, message: str) -> str:
        tail = self.log_since_start().splitlines()[-LOG_TAIL_LINES:]
        return "\n".join([f"{message}. Its log ends:", *tail])
