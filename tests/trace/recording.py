"""Recording which functions of the app a job's threads call."""

from __future__ import annotations

import itertools
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import kjo_django

Calls = Sequence[Sequence[CodeType]]
"""The functions that each thread has called, in order."""
PACKAGE = str(Path(kjo_django.__file__).parent)


@dataclass(frozen=True, slots=True)
class Walk:
    """What was called between two moments, over all threads.

    :param files: modules of the app whose functions were called.
    :param functions: functions called, each counted once.
    :param calls: calls of these functions.
    :param changes: calls of a function that is in another file than the one called before it, each
        thread by itself.
    """

    files: int
    functions: int
    calls: int
    changes: int


@dataclass(slots=True)
class Recorder:
    """Counts calls of the app's functions while it is switched on.

    Threads started before ``install`` are not seen, so call it before a worker starts.
    """

    is_on: bool = False
    _calls: dict[int, list[CodeType]] = field(default_factory=dict)

    def install(self) -> None:
        """Look at this thread and at every thread that starts from now on."""
        threading.setprofile(self._on_event)
        sys.setprofile(self._on_event)

    def remove(self) -> None:
        """Stop looking."""
        threading.setprofile(None)
        sys.setprofile(None)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Count from here, from nothing, to the end of the block."""
        self._calls = {}
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def calls(self, but: int | None) -> Calls:
        """Return what the last recording has seen.

        :param but: the thread whose calls do not count.
        """
        return [calls for thread, calls in self._calls.items() if thread != but]

    def by_file(self) -> dict[str, int]:
        """Return the calls of each file in the last recording, most first."""
        counts: dict[str, int] = {}
        for calls in self._calls.values():
            for code in calls:
                name = code.co_filename.removeprefix(PACKAGE + "/")
                counts[name] = counts.get(name, 0) + 1
        return dict(sorted(counts.items(), key=lambda item: -item[1]))

    def _on_event(self, frame: FrameType, event: str, _argument: Any) -> None:
        if self.is_on and event == "call":
            code = frame.f_code
            if code.co_filename.startswith(PACKAGE) and not code.co_name.startswith("<"):
                self._calls.setdefault(threading.get_ident(), []).append(code)


def walk_of(rounds: Sequence[Calls]) -> Walk:
    """Return what each of several recordings of the same has called. What only some of them have
    called was called by a loop that was idle, or by one that the machine has held up."""
    codes = set.intersection(*({code for calls in each for code in calls} for each in rounds))
    kept = [[[c for c in calls if c in codes] for calls in each] for each in rounds]
    return Walk(
        files=len({code.co_filename for code in codes}),
        functions=len(codes),
        calls=min(sum(map(len, each)) for each in kept),
        changes=min(sum(map(_changes, each)) for each in kept),
    )


def _changes(calls: Sequence[CodeType]) -> int:
    files = [code.co_filename for code in calls]
    return sum(before != after for before, after in itertools.pairwise(files))
