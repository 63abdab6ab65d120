"""Kafka from the published artifacts, by Maven, into a cache."""

import os
import re
import shutil
import tempfile
from functools import cache
from pathlib import Path

from tests.services.binaries import find_maven, needed
from tests.services.cache import cache_directory
from tests.services.errors import Unprovisionable
from tests.services.tools import ran

POM = Path(__file__).with_name("pom.xml")


@cache
def kafka_version() -> str:
    version = re.search(r"<kafka\.version>(.+?)</kafka\.version>", POM.read_text())
    assert version, f"{POM} names no kafka.version"
    return version[1]


def kafka_directory() -> Path:
    return cache_directory() / f"kafka-{kafka_version()}"


def is_kafka_installed() -> bool:
    # The directory appears by one rename, with everything in it.
    return kafka_directory().is_dir()


def class_path() -> str:
    libraries = sorted(needed("Kafka", _libraries()).glob("*.jar"))
    return os.pathsep.join(map(str, libraries))


def class_data_archive() -> Path | None:
    """The JVM's snapshot of Kafka's loaded classes, if one could be made: it halves start-up."""
    archive = kafka_directory() / "classes.jsa"
    return archive if archive.exists() else None


def install_kafka() -> None:
    """Resolve the pom's dependencies and copy them into the cache."""
    cache_directory().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache_directory(), prefix=".kafka-") as scratch:
        copied = Path(scratch, "kafka", "libs")
        copy_dependencies(POM, copied)
        shutil.move(copied.parent, kafka_directory())


def copy_dependencies(pom: Path, libraries: Path) -> None:
    """Fetch what a pom depends on and copy it into a directory."""
    arguments = ["dependency:copy-dependencies", f"-DoutputDirectory={libraries}"]
    command = [str(needed("mvn", find_maven())), "--batch-mode", "--file", str(pom), *arguments]
    with tempfile.TemporaryDirectory() as elsewhere:
        done = ran(command, cwd=elsewhere)
    if done.returncode:
        errors = [line for line in done.stdout.splitlines() if "ERROR" in line]
        raise Unprovisionable(
            f"Maven could not fetch what {pom} names. Give it a repository it can reach "
            "(settings.xml), or for Kafka set KAFKA_BOOTSTRAP_SERVERS to a broker of yours:\n"
            + "\n".join(errors[:10] or done.stdout.splitlines()[-10:])
        )


def _libraries() -> Path | None:
    libraries = kafka_directory() / "libs"
    return libraries if libraries.is_dir() else None
