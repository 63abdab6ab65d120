"""A progress bar on stderr: redrawn on a terminal, a line now and then anywhere else."""

from __future__ import annotations

import time
from typing import TextIO

REDRAW = 0.1
"""Least seconds between two pictures on a terminal."""
LINE = 5.0
"""Least seconds between two lines elsewhere, such as a log of CI."""
WIDTH = 30


class Progress:
    """One task of known size; a context manager that leaves its last picture standing."""

    def __init__(self, label: str, total: int, stream: TextIO) -> None:
        self.label, self.total, self.stream = label, total, stream
        self.done = 0
        self._is_terminal = stream.isatty()
        self._pause = REDRAW if self._is_terminal else LINE
        self._began = self._shown = time.monotonic()
        self._length = 0

    def __enter__(self) -> Progress:
        if self._is_terminal:
            self._show()
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is None:
            self._show()
        if self._is_terminal:
            self.stream.write("\n")
            self.stream.flush()

    def update(self, done: int, total: int | None = None) -> None:
        """Take note of what is done, and show it if it is time to."""
        self.done, self.total = done, total or self.total
        if time.monotonic() - self._shown >= self._pause:
            self._show()

    def _show(self) -> None:
        self._shown = time.monotonic()
        share = min(self.done / self.total, 1.0) if self.total else 1.0
        seconds = self._shown - self._began
        # Rounded down: what is not all done is not shown as 100 %.
        text = (
            f"{self.label} {self.done:,} of {self.total:,} ({int(share * 100)}%), {seconds:.0f} s"
        )
        if self._is_terminal:
            bar = "█" * int(share * WIDTH)
            text = f"{bar:░<{WIDTH}} {text}"
            # A shorter text must cover the longer one before it.
            self.stream.write("\r" + text.ljust(self._length))
            self._length = len(text)
        else:
            self.stream.write(f"{text}\n")
        self.stream.flush()
