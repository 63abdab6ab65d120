"""Debian packages, for containers: installed only as root, and never left running."""

import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.errors import Unprovisionable
from tests.services.tools import ran

POLICY = Path("/usr/sbin/policy-rc.d")


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: Iterable[str]) -> None:
    names = list(packages)
    print(f"Installing {' '.join(names)} with apt-get", file=sys.stderr)
    with _no_service_started():
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *names)


@contextmanager
def _no_service_started() -> Iterator[None]:
    """Keep the packages from starting servers on the default ports, which may be in use."""
    if POLICY.exists():
        yield  # The image's own policy; containers come with one that forbids it.
        return
    POLICY.write_text("#!/bin/sh\nexit 101\n")
    POLICY.chmod(0o755)
    try:
        yield
    finally:
        POLICY.unlink()


def _apt_get(*arguments: str) -> None:
    done = ran(
        # Another apt (unattended-upgrades) may hold the lock for a while.
        ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-10:])
        raise Unprovisionable(f"apt-get {arguments[0]} failed:\n{tail}")
