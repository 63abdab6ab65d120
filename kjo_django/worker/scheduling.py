"""How the operating system is to share out the processors among a worker's threads."""

from __future__ import annotations

import os
import sys


def prefer_throughput() -> bool:
    """Tell the system that the calling thread is to get much done rather than to answer at once.

    The lanes of a worker share one interpreter. Whenever one of them waits for a server, another
    takes it; the first, once it is answered, wakes up on another processor to find it taken, and
    while they hand it to and fro both do nothing else. Linux knows such threads as ``SCHED_BATCH``:
    they have their share of the processors as before, but do not cut in when they wake up.

    What a handler starts inherits it, as it does a nice value.

    :returns: whether that is so now. It is not where the system knows nothing of the kind, does
        not allow it, or where somebody has chosen another policy for the process.
    """
    if sys.platform != "linux":
        return False
    try:
        if os.sched_getscheduler(0) != os.SCHED_OTHER:
            return False
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    except OSError:  # the rule of some containers; musl knows of no policies at all
        return False
    return True
