"""How often the garbage collector looks at a worker process, and that it does not while many jobs
are stored.

Jobs make thousands of objects a second that reference counting frees, and wait in thousands beside
all that Django and the project have loaded. At its default pace the collector walked them over and
over and took a quarter of a worker's processor time, to find nothing.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

PYTHONS_OWN = {(700, 10, 10), (2000, 10, 10), (2000, 10, 0)}
"""What one version of Python or another begins with. A project that has set something else knows
why."""
THRESHOLDS = (20_000, 20, 50)
"""New objects before a look at them, and the same of looks: garbage in cycles, which handlers may
well make, is freed after at most some megabytes of it."""


@contextmanager
def seldom() -> Iterator[None]:
    """Within the block, collect less often, and leave alone what is loaded already.

    Changes nothing where collection is switched off or has thresholds of the project's own.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or before not in PYTHONS_OWN:
        yield
        return
    if not gc.get_freeze_count():
        set_apart()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()


def set_apart() -> None:
    """Let the collector leave alone what is there now, having looked at it once more.

    To be done before a fork, too: each look writes to what it looks at, and what is written to is
    shared no longer.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def paused() -> Iterator[None]:
    """Within the block, do not collect: for code that makes many objects to be kept, and no cycles.

    New objects that stay are what makes Python look through everything there is. It did so at every
    third ``enqueue_many`` of ten thousand, which then took twice as long. Other threads' garbage
    waits until the block ends.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
