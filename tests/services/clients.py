"""The programs of docs/clients, built with the libraries they name, in the cache."""

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.services.binaries import find_go, find_java, find_javac, find_node, find_npm, needed
from tests.services.cache import cache_directory
from tests.services.errors import Unprovisionable
from tests.services.maven import copy_dependencies
from tests.services.tools import ran

SOURCES = Path(__file__).parents[2] / "docs" / "clients"
NOT_SOURCES = {"node_modules", "target"}
"""What npm and Maven leave behind where somebody runs them in the sources."""


@dataclass(frozen=True)
class Client:
    """How to build the programs of one language, and how to start one of them."""

    build: Callable[[Path], None]
    """Called in a copy of the sources."""
    command: Callable[[Path, str], Sequence[str]]


def is_built(language: str) -> bool:
    # The directory appears by one rename, with everything in it.
    return _directory(language).is_dir()


def build(language: str) -> None:
    """Build the programs in a copy of their sources, and keep it under their digest."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix=".client-") as scratch:
        copied = Path(scratch, "client")
        for path in _sources(language):
            target = copied / path.relative_to(SOURCES / language)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        CLIENTS[language].build(copied)
        copied.rename(_directory(language))


def command_of(language: str, program: str, *arguments: str) -> list[str]:
    """Return the command that starts a program that has been built."""
    return [*CLIENTS[language].command(_directory(language), program), *arguments]


def java_source(source: Path, *arguments: str) -> list[str]:
    """Return the command that runs one file of Java with the libraries of the programs."""
    libraries = str(_directory("java") / "libs" / "*")
    return [*_jvm(), "-cp", libraries, str(source), *arguments]


def _directory(language: str) -> Path:
    digest = hashlib.sha256()
    for path in _sources(language):
        digest.update(f"{path.relative_to(SOURCES)}\0".encode() + path.read_bytes())
    return cache_directory() / f"client-{language}-{digest.hexdigest()[:16]}"


def _sources(language: str) -> Iterator[Path]:
    for path in sorted((SOURCES / language).rglob("*")):
        if path.is_file() and not NOT_SOURCES & set(path.relative_to(SOURCES).parts):
            yield path


def _run(what: str, command: Sequence[str], directory: Path, **variables: str) -> None:
    done = ran(command, cwd=directory, env={**os.environ, **variables})
    if done.returncode:
        tail = "\n".join(done.stdout.splitlines()[-15:])
        raise Unprovisionable(f"{what} of {SOURCES.name} failed:\n{tail}")


# --- The languages --------------------------------------------------------------------------------


def _build_node(directory: Path) -> None:
    npm = str(needed("npm", find_npm()))
    options = ["--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock"]
    _run("npm install", [npm, "install", *options], directory)


def _node(directory: Path, program: str) -> Sequence[str]:
    return [str(needed("node", find_node())), str(directory / f"{program}.js")]


def _build_java(directory: Path) -> None:
    copy_dependencies(directory / "pom.xml", directory / "libs")
    sources = [path.name for path in sorted(directory.glob("*.java"))]
    options = ["--release", "17", "-cp", "libs/*", "-d", "classes"]
    _run("javac", [str(needed("javac", find_javac())), *options, *sources], directory)


def _java(directory: Path, program: str) -> Sequence[str]:
    path = os.pathsep.join((str(directory / "classes"), str(directory / "libs" / "*")))
    return [*_jvm(), "-cp", path, program.capitalize()]


def _jvm() -> Sequence[str]:
    # Quick to start rather than fast: each program has a handful of records.
    options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData"]
    return [str(needed("java", find_java())), *options]


def _build_go(directory: Path) -> None:
    go = str(needed("go", find_go()))
    # The toolchain that is there: another one would be downloaded.
    _run("go build", [go, "build", "-o", "bin/", "./..."], directory, GOTOOLCHAIN="local")


def _go(directory: Path, program: str) -> Sequence[str]:
    return [str(directory / "bin" / program)]


CLIENTS = {
    "node": Client(_build_node, _node),
    "java": Client(_build_java, _java),
    "go": Client(_build_go, _go),
}
LANGUAGES = tuple(CLIENTS)
