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
"""The thresholds of Python's versions. Where a project has set others, they stay."""
THRESHOLDS = (20_000, 20, 50)
"""How many new objects start a collection of the youngest generation, and how many collections that
of the next one. Garbage in cycles, which handlers may make, is freed after some megabytes of it."""


@contextmanager
def seldom() -> Iterator[None]:
    """Within the block, collect less often, and leave alone what is loaded already.

    Changes nothing where collection is switched off or has thresholds of the project's own. What
    was set apart before the block stays so.
    """
    before = gc.get_threshold()
    if not gc.isenabled() or before not in PYTHONS_OWN:
        yield
        return
    sets_apart = not gc.get_freeze_count()
    if sets_apart:
        set_apart()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if sets_apart:
            gc.unfreeze()


def set_apart() -> None:
    """Collect once, then keep the collector from visiting what is left.

    Called before a fork, too: a collection writes to each object it visits, and a page that is
    written to is no longer shared with the child.
    """
    gc.collect()
    gc.freeze()


@contextmanager
def paused() -> Iterator[None]:
    """Within the block, do not collect: for code that makes many objects to be kept, and no cycles.

    New objects that stay make Python collect, among all objects in the end: at every third
    ``enqueue_many`` of ten thousand, which then took twice as long. The garbage of other threads is
    collected when the block has ended.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
