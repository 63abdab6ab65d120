"""Running side by side, or alone: a suspect of having killed its worker runs by itself."""

from __future__ import annotations

import threading


class Gate:
    """Lets groups run side by side, or one suspect by itself."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running = 0
        self._waiting = 0

    def shared(self) -> _Share:
        """Run beside others; waits while a suspect wants to be alone."""
        return _Share(self, alone=False, timeout=None)

    def exclusive(self, timeout: float) -> _Share:
        """Run alone. After ``timeout`` seconds of others not ending, run beside them all the same:
        a handler that takes hours must not stop everything else."""
        return _Share(self, alone=True, timeout=timeout)


class _Share:
    def __init__(self, gate: Gate, *, alone: bool, timeout: float | None) -> None:
        self._gate = gate
        self._alone = alone
        self._timeout = timeout

    def __enter__(self) -> None:
        gate = self._gate
        with gate._changed:
            if self._alone:
                gate._waiting += 1
                gate._changed.wait_for(lambda: gate._running == 0, self._timeout)
            else:
                gate._changed.wait_for(lambda: gate._waiting == 0)
            gate._running += 1

    def __exit__(self, *error: object) -> None:
        gate = self._gate
        with gate._changed:
            gate._running -= 1
            if self._alone:
                gate._waiting -= 1
            gate._changed.notify_all()
