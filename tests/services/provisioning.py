"""Make sure the servers are installed, or say how to get them."""

import fcntl
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services import apt
from tests.services.binaries import (
    find_chromedriver,
    find_chromium,
    find_java,
    find_mariadb,
    find_maven,
    find_pgbouncer,
    find_postgres,
    find_redis,
)
from tests.services.class_data import archive_classes
from tests.services.errors import ServiceError, Unprovisionable
from tests.services.maven import cache_directory, install_kafka, is_kafka_installed


@dataclass(frozen=True)
class Program:
    """Something a server needs, where to find it, and the Debian package that has it."""

    name: str
    find: Callable[[], Path | None]
    package: str
    variable: str


REDIS = Program("Redis 7 (`redis-server`)", find_redis, "redis-server", "REDIS_URL")
POSTGRES = Program("PostgreSQL (`postgres`)", find_postgres, "postgresql", "DATABASE_URL")
JAVA = Program("Java 17 (`java`)", find_java, "openjdk-17-jre-headless", "KAFKA_BOOTSTRAP_SERVERS")
MAVEN = Program("Maven (`mvn`)", find_maven, "maven", "KAFKA_BOOTSTRAP_SERVERS")
MARIADB = Program("MariaDB (`mariadbd`)", find_mariadb, "mariadb-server-core", "MARIADB_URL")
PGBOUNCER = Program("PgBouncer (`pgbouncer`)", find_pgbouncer, "pgbouncer", "DATABASE_URL")

CHROMIUM = Program("Chromium (`chromium`)", find_chromium, "chromium", "CHROMIUM")
DRIVER = Program(
    "ChromeDriver (`chromedriver`)", find_chromedriver, "chromium-driver", "CHROMEDRIVER"
)


def provision(
    *,
    kafka: bool = True,
    redis: bool = True,
    postgres: bool = True,
    browser: bool = False,
    pgbouncer: bool = False,
    mariadb: bool = False,
) -> None:
    """Install what is missing of the servers asked for; quick when nothing is.

    Raises `Unprovisionable`, naming what is missing and how to get it. Processes that provision at
    the same time wait for one another.
    """
    wanted = _wanted_programs(
        (REDIS, redis),
        (POSTGRES, postgres),
        (CHROMIUM, browser),
        (DRIVER, browser),
        (PGBOUNCER, pgbouncer),
        (MARIADB, mariadb),
        (JAVA, kafka),
        (MAVEN, kafka and not is_kafka_installed()),
    )
    missing = _missing(wanted)
    if missing and not apt.can_install():
        raise Unprovisionable(_how_to_get(missing))
    if not missing and (not kafka or is_kafka_installed()):
        return
    with _one_at_a_time():
        # Asked again: another process may have installed them while this one waited.
        _install_programs(_missing(wanted))
        if kafka and not is_kafka_installed():
            print(f"Fetching Kafka into {cache_directory()}", file=sys.stderr)
            install_kafka()
            archive_classes()


def _wanted_programs(*programs: tuple[Program, bool]) -> list[Program]:
    return [program for program, is_wanted in programs if is_wanted]


def _missing(programs: list[Program]) -> list[Program]:
    return [program for program in programs if program.find() is None]


def _install_programs(missing: list[Program]) -> None:
    if not missing:
        return
    try:
        apt.install(program.package for program in missing)
    except ServiceError as error:
        raise Unprovisionable(f"{_how_to_get(missing)}\n{error}") from error
    find_java.cache_clear()
    if still_missing := [program for program in missing if program.find() is None]:
        raise Unprovisionable(_how_to_get(still_missing))


def _how_to_get(missing: list[Program]) -> str:
    names = ", ".join(program.name for program in missing)
    packages = " ".join(program.package for program in missing)
    variables = ", ".join(sorted({program.variable for program in missing}))
    return (
        f"Not installed here: {names}. On Debian: `apt-get install {packages}` (as root, "
        f"`python -m tests.services provision` does it). Or name a server of yours in {variables}."
    )


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    try:
        cache_directory().mkdir(parents=True, exist_ok=True)
        lock = (cache_directory() / "provision.lock").open("w")
    except OSError as error:
        raise Unprovisionable(f"KJO_TEST_CACHE must name a writable directory: {error}") from error
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
