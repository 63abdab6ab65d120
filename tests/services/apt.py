"""Debian packages, for containers: installed only as root, and never left running."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.services.errors import Unprovisionable
from tests.services.tools import ran

POLICY = Path("/usr/sbin/policy-rc.d")
KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")
BACKPORTS = "{release}-backports"
"""The suite of newer packages for the release of this machine."""
UNSTABLE = "sid"
"""The suite whose packages need newer libraries than any release has."""


def can_install() -> bool:
    return os.geteuid() == 0 and shutil.which("apt-get") is not None


def install(packages: Iterable[str]) -> None:
    names = list(packages)
    print(f"Installing {' '.join(names)} with apt-get", file=sys.stderr)
    with _no_service_started():
        _apt_get("update")
        _apt_get("install", "--yes", "--no-install-recommends", *names)


def has(package: str) -> bool:
    """Whether this machine's package lists offer a package."""
    return bool(
        ran(["apt-cache", "show", "--no-all-versions", package]).stdout.startswith("Package:")
    )


def fetch_lists() -> None:
    """Fetch the package lists where there are none, as in a container's image."""
    if not _mirrors():
        _apt_get("update")


def _mirrors(*filters: str) -> list[list[str]]:
    """Return the site and the release of each package list that this machine has."""
    command = ["apt-get", "indextargets", "--format", "$(SITE) $(RELEASE)", "Created-By: Packages"]
    return [line.split() for line in ran([*command, *filters]).stdout.splitlines()]


def unpack(
    suite: str, packages: Iterable[str], directory: Path, *, with_dependencies: bool = False
) -> None:
    """Unpack packages of another suite of Debian's into a new directory. The machine's own package
    lists, and what is installed on it, stay as they are.

    :param with_dependencies: unpack all that they depend on as well, the C library included, so
        that they run with nothing of this machine's.
    """
    mirrors = _mirrors("Label: Debian")
    if not mirrors:
        raise Unprovisionable("apt-get has no package lists of Debian; run `apt-get update`")
    site, release = mirrors[0]
    directory.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory.parent, prefix=".packages-") as name:
        scratch = Path(name)
        for part in ("lists/partial", "archives/partial", "unpacked"):
            (scratch / part).mkdir(parents=True)
        sources, nothing = scratch / "sources.list", scratch / "status"
        named = suite.format(release=release)
        sources.write_text(f"deb [signed-by={KEYRING}] {site} {named} main\n")
        nothing.touch()
        options = [
            *("-o", f"Dir::Etc::SourceList={sources}", "-o", "Dir::Etc::SourceParts=-"),
            *("-o", f"Dir::State::Lists={scratch / 'lists'}", "-o", f"Dir::Cache={scratch}"),
            *("-o", "APT::Sandbox::User=root"),
        ]
        _apt_get(*options, "update")
        if with_dependencies:
            # To apt, which is to download what is not installed, nothing is.
            options += ["-o", f"Dir::State::status={nothing}", "-o", "Debug::NoLocking=true"]
            options += ["--yes", "--no-install-recommends", "--download-only"]
            _apt_get(*options, "install", *packages)
        else:
            _apt_get(*options, "download", *packages, cwd=scratch)
        for package in scratch.rglob("*.deb"):
            done = ran(["dpkg-deb", "--extract", str(package), str(scratch / "unpacked")])
            if done.returncode:
                raise Unprovisionable(f"{package.name} cannot be unpacked:\n{done.stdout}")
        shutil.move(scratch / "unpacked", directory)


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


def _apt_get(*arguments: str, cwd: Path | None = None) -> None:
    done = ran(
        # Another apt (unattended-upgrades) may hold the lock for a while.
        ["apt-get", "--quiet", "-o", "DPkg::Lock::Timeout=300", *arguments],
        env={**os.environ, "DEBIAN_FRONTEND": "noninteractive"},
        cwd=cwd,
    )
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-10:])
        raise Unprovisionable(f"apt-get {' '.join(arguments)} failed:\n{tail}")
