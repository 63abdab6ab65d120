"""A command of ``manage.py`` in a process whose address space may grow by so many megabytes once
everything is imported.

    python -m tests.acceptance.in_little_memory 256 kjo_consume ledger --drain

Threads reserve addresses for their stacks and heaps which they never use. These reservations are
made small, so that what is limited comes near to what is used.
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import django
from django.core.management import call_command

from tests.acceptance.manage import die_with_parent

STACK = 1024**2
ONE_HEAP = {"MALLOC_ARENA_MAX": "1"}


def status(name: str) -> int:
    """Return a figure of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def main() -> None:
    if not ONE_HEAP.items() <= os.environ.items():
        resource.setrlimit(resource.RLIMIT_STACK, (STACK, resource.RLIM_INFINITY))
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ONE_HEAP})
    die_with_parent()
    django.setup()
    # What a worker imports when it is made, before the limit
    from kjo_django.runtime import get_coordination, get_transport
    from kjo_django.worker import Worker

    assert Worker is not None
    get_coordination()
    transport = get_transport()
    transport.publish([])
    before = status("VmSize")
    most = before + int(sys.argv[1]) * 1024**2
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    try:
        call_command(*sys.argv[2:])
    finally:
        grown = (status("VmPeak") - before) / 1024**2
        print(f"address space grown by {grown:.0f} MB, {status('VmHWM') / 1024**2:.0f} MB resident")


if __name__ == "__main__":
    main()
