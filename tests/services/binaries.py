"""Where this machine keeps the servers, if it has them."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.services.cache import cache_directory
from tests.services.errors import Unprovisionable

OLDEST_JAVA = 17  # Kafka 4 refuses to run on less.


def needed(what: str, path: Path | None) -> Path:
    """The path, or an error for a server started without `provision()`."""
    if path is None:
        raise Unprovisionable(f"{what} is missing; run `python -m tests.services provision`")
    return path


def find_redis() -> Path | None:
    return _named("KJO_TEST_REDIS_SERVER") or _on_path("redis-server") or _on_path("valkey-server")


def find_valkey() -> Path | None:
    unpacked = _existing(f"{valkey_directory()}/usr/bin/valkey-server")
    return _named("KJO_TEST_VALKEY_SERVER") or _on_path("valkey-server") or unpacked


def valkey_directory() -> Path:
    """Where Valkey is unpacked, on a Debian that has it among its backports only."""
    return cache_directory() / "valkey"


def find_postgres() -> Path | None:
    """The newest `postgres`; initdb stands beside it."""
    # Debian keeps the server's programs off the PATH, by major version.
    versions = sorted(
        Path("/usr/lib/postgresql").glob("*/bin/postgres"), key=lambda p: int(p.parts[-3])
    )
    if versions:
        return versions[-1]
    found = _on_path("postgres")
    return found.resolve() if found else None


def find_mariadb() -> Path | None:
    # Debian has it where only root looks.
    return _on_path("mariadbd") or _existing("/usr/sbin/mariadbd")


def find_mysql() -> Path | None:
    """MySQL's `mysqld`. MariaDB has a link of that name to a program of another."""
    found = _on_path("mysqld") or _existing("/usr/sbin/mysqld")
    if found and found.resolve().name == found.name:
        return found
    return _existing(f"{mysql_directory()}/usr/sbin/mysqld")


def mysql_directory() -> Path:
    """Where MySQL is unpacked, with the libraries it needs: no release of Debian has it."""
    return cache_directory() / "mysql"


def find_pgbouncer() -> Path | None:
    # Debian has it where only root looks.
    return _on_path("pgbouncer") or _existing("/usr/sbin/pgbouncer")


def find_nft() -> Path | None:
    return _on_path("nft") or _existing("/usr/sbin/nft")


def find_ip() -> Path | None:
    return _on_path("ip") or _existing("/usr/sbin/ip")


def find_faketime() -> Path | None:
    """The library that gives a program another time."""
    return next(Path("/usr/lib").glob("*/faketime/libfaketime.so.1"), None)


def find_chromium() -> Path | None:
    return _named("CHROMIUM") or _on_path("chromium")


def find_chromedriver() -> Path | None:
    return _named("CHROMEDRIVER") or _on_path("chromedriver")


def _existing(path: str) -> Path | None:
    return found if (found := Path(path)).exists() else None


def _named(variable: str) -> Path | None:
    return Path(value) if (value := os.environ.get(variable)) else None


def find_maven() -> Path | None:
    return _on_path("mvn")


def find_node() -> Path | None:
    return _on_path("node")


def find_npm() -> Path | None:
    return _on_path("npm")


def find_go() -> Path | None:
    return _on_path("go") or _existing("/usr/local/go/bin/go")


def find_javac() -> Path | None:
    """The compiler beside `java`; a runtime alone has none."""
    java = find_java()
    return _existing(str(java.resolve().with_name("javac"))) if java else None


@cache
def find_java() -> Path | None:
    return next((java for java in _javas() if _java_version(java) >= OLDEST_JAVA), None)


def _javas() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home, "bin", "java")
    if found := _on_path("java"):
        yield found
    yield from sorted(Path("/usr/lib/jvm").glob("*/bin/java"), reverse=True)


def _java_version(java: Path) -> int:
    try:
        answer = subprocess.run([str(java), "-version"], capture_output=True, text=True).stderr
    except OSError:
        return 0
    version = re.search(r'version "(\d+)', answer)
    return int(version[1]) if version else 0


def _on_path(name: str) -> Path | None:
    found = shutil.which(name)
    return Path(found) if found else None
