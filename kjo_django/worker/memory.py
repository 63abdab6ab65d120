"""How much memory this process may have (KJO-85)."""

from __future__ import annotations

import os
from pathlib import Path

_CGROUP_V2 = Path("/sys/fs/cgroup/memory.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory_limit(places: tuple[Path, ...] = (_CGROUP_V2, _CGROUP_V1)) -> int | None:
    """Return the container's limit in bytes, else the machine's memory, None if neither is told."""
    total = _machine_memory()
    for place in places:
        try:
            found = place.read_text().strip()
        except OSError:
            continue
        # Without a limit one says "max", the other a number beyond every machine.
        if found.isdigit() and (total is None or int(found) < total):
            return int(found)
    return total


def _machine_memory() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None
