"""A file every process of a run appends lines to: what began, what signals told, who came and went.

A line survives the process that wrote it, whatever becomes of its transactions.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FILE = "KJO_MIXED_TRACE"
"""Environment variable: the file's path."""
IDENTITY = re.compile(rb"mx\d+x")
"""How the name of a piece of work is found in payloads, keys and records of any format."""


def identity_in(data: bytes | str | None) -> str:
    """Return the first identity of a piece of work in the data, or ""."""
    found = IDENTITY.search(data.encode() if isinstance(data, str) else bytes(data or b""))
    return found[0].decode() if found else ""


def note(word: str, *values: object) -> None:
    """Append a line to the file of this process's run."""
    note_in(Path(os.environ[FILE]), word, *values)


def note_in(path: Path, word: str, *values: object) -> None:
    """Append a line; in one write, so that lines of several processes do not mix."""
    fields = (f"{time.time():.4f}", os.getpid(), word, *values)
    line = " ".join(str(field).replace(" ", "_") or "-" for field in fields) + "\n"
    append(path, line.encode())


def append(path: Path, data: bytes) -> int:
    """Append to a file and return its size then."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(descriptor, data)
        return os.fstat(descriptor).st_size
    finally:
        os.close(descriptor)


def begun(identity: str) -> int:
    """Note that a handler begins, and return how often it has begun, this time included."""
    count = append(Path(f"{os.environ[FILE]}.begun") / identity, b".")
    note("begin", identity, count)
    return count


@dataclass(frozen=True, slots=True)
class Line:
    """What was noted, when, and by which process."""

    at: float
    pid: int
    word: str
    values: tuple[str, ...]


def read(path: Path) -> Iterator[Line]:
    for line in path.read_text().splitlines():
        at, pid, word, *values = line.split(" ")
        yield Line(float(at), int(pid), word, tuple(values))
