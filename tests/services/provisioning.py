"""Make sure the servers are installed, or say how to get them."""

import fcntl
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.services import apt
from tests.services.binaries import (
    find_chromedriver,
    find_chromium,
    find_faketime,
    find_go,
    find_ip,
    find_java,
    find_javac,
    find_mariadb,
    find_maven,
    find_mysql,
    find_nft,
    find_node,
    find_npm,
    find_pgbouncer,
    find_postgres,
    find_redis,
    find_valkey,
    mysql_directory,
    valkey_directory,
)
from tests.services.cache import cache_directory
from tests.services.class_data import archive_classes
from tests.services.clients import build, is_built
from tests.services.errors import ServiceError, Unprovisionable
from tests.services.maven import install_kafka, is_kafka_installed


@dataclass(frozen=True)
class Program:
    """Something a server needs, where to find it, and the Debian package that has it."""

    name: str
    find: Callable[[], Path | None]
    package: str
    variable: str = ""
    """The variable that names a server to use instead; none for a tool."""


REDIS = Program("Redis 7 (`redis-server`)", find_redis, "redis-server", "REDIS_URL")
VALKEY = Program("Valkey 8 (`valkey-server`)", find_valkey, "valkey-server")
POSTGRES = Program("PostgreSQL (`postgres`)", find_postgres, "postgresql", "DATABASE_URL")
JAVA = Program("Java 17 (`java`)", find_java, "openjdk-17-jre-headless", "KAFKA_BOOTSTRAP_SERVERS")
MAVEN = Program("Maven (`mvn`)", find_maven, "maven", "KAFKA_BOOTSTRAP_SERVERS")
MARIADB = Program("MariaDB (`mariadbd`)", find_mariadb, "mariadb-server-core", "MARIADB_URL")
MYSQL = Program("MySQL (`mysqld`)", find_mysql, "mysql-server-core", "MYSQL_URL")
PGBOUNCER = Program("PgBouncer (`pgbouncer`)", find_pgbouncer, "pgbouncer", "DATABASE_URL")

CHROMIUM = Program("Chromium (`chromium`)", find_chromium, "chromium", "CHROMIUM")
DRIVER = Program(
    "ChromeDriver (`chromedriver`)", find_chromedriver, "chromium-driver", "CHROMEDRIVER"
)

NODE = Program("Node.js (`node`)", find_node, "nodejs")
NPM = Program("npm (`npm`)", find_npm, "npm")
JAVAC = Program("Java's compiler (`javac`)", find_javac, "openjdk-17-jdk-headless")
GO = Program("Go (`go`)", find_go, "golang-go")

NFT = Program("nftables (`nft`)", find_nft, "nftables")
IP = Program("iproute2 (`ip`)", find_ip, "iproute2")
FAKETIME = Program("libfaketime", find_faketime, "libfaketime")


def provision(
    *,
    kafka: bool = True,
    redis: bool = True,
    postgres: bool = True,
    browser: bool = False,
    pgbouncer: bool = False,
    mariadb: bool = False,
    mysql: bool = False,
    valkey: bool = False,
    network: bool = False,
    clients: Collection[str] = (),
) -> None:
    """Install what is missing of the servers asked for; quick when nothing is.

    `network` is what disturbs networks and clocks. `clients` are languages of docs/clients whose
    programs are to be built.

    Raises `Unprovisionable`, naming what is missing and how to get it. Processes that provision at
    the same time wait for one another.
    """
    unbuilt = [language for language in clients if not is_built(language)]
    wanted = _wanted_programs(
        # Valkey's libraries are those of Redis.
        (REDIS, redis or valkey),
        (VALKEY, valkey),
        (POSTGRES, postgres),
        (CHROMIUM, browser),
        (DRIVER, browser),
        (PGBOUNCER, pgbouncer),
        (MARIADB, mariadb),
        (MYSQL, mysql),
        (IP, network),
        (NFT, network),
        (FAKETIME, network),
        (NODE, "node" in clients),
        (NPM, "node" in unbuilt),
        (GO, "go" in unbuilt),
        (JAVA, kafka or "java" in clients),
        (JAVAC, "java" in unbuilt),
        (MAVEN, (kafka and not is_kafka_installed()) or "java" in unbuilt),
    )
    missing = _missing(wanted)
    if missing and not apt.can_install():
        raise Unprovisionable(_how_to_get(missing))
    if not missing and not unbuilt and (not kafka or is_kafka_installed()):
        return
    with _one_at_a_time():
        # Asked again: another process may have installed them while this one waited.
        _install_programs(_missing(wanted))
        if kafka and not is_kafka_installed():
            print(f"Fetching Kafka into {cache_directory()}", file=sys.stderr)
            install_kafka()
            archive_classes()
        for language in unbuilt:
            if not is_built(language):
                print(f"Building docs/clients/{language} in {cache_directory()}", file=sys.stderr)
                build(language)


def _wanted_programs(*programs: tuple[Program, bool]) -> list[Program]:
    return [program for program, is_wanted in programs if is_wanted]


def _missing(programs: list[Program]) -> list[Program]:
    return [program for program in programs if program.find() is None]


def _install_programs(missing: list[Program]) -> None:
    if not missing:
        return
    try:
        packages = [p.package for p in missing if p not in (VALKEY, MYSQL)]
        if VALKEY in missing or MYSQL in missing:
            apt.fetch_lists()
        if VALKEY in missing:
            if apt.has(VALKEY.package):
                packages.append(VALKEY.package)
            else:
                of_valkey = ["valkey-server", "valkey-tools"]
                apt.unpack(apt.BACKPORTS, of_valkey, valkey_directory())
        if MYSQL in missing:
            # Never installed, where it could be: its package and MariaDB's exclude one another.
            print(f"Unpacking MySQL into {mysql_directory()}", file=sys.stderr)
            apt.unpack(apt.UNSTABLE, [MYSQL.package], mysql_directory(), with_dependencies=True)
        if packages:
            apt.install(packages)
    except ServiceError as error:
        raise Unprovisionable(f"{_how_to_get(missing)}\n{error}") from error
    find_java.cache_clear()
    if still_missing := [program for program in missing if program.find() is None]:
        raise Unprovisionable(_how_to_get(still_missing))


def _how_to_get(missing: list[Program]) -> str:
    names = ", ".join(program.name for program in missing)
    packages = " ".join(program.package for program in missing)
    variables = ", ".join(sorted({program.variable for program in missing} - {""}))
    return (
        f"Not installed here: {names}. On Debian: `apt-get install {packages}` (as root, "
        "the tests do it themselves)."
    ) + (f" Or name a server of yours in {variables}." if variables else "")


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
