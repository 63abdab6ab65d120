"""Versions and the machine: what a figure depends on, without saying whose machine it is."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("Django", "confluent-kafka", "psycopg", "redis", "django-redis", "hiredis", "orjson")


def machine() -> dict[str, Any]:
    """Return processors, memory and load; no names."""
    return {
        "cpu_model": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
        "system": platform.system(),
        "architecture": platform.machine(),
        "load_average": [round(load, 2) for load in psutil.getloadavg()],
    }


def _cpu_model() -> str:
    try:
        found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def versions(environment: Mapping[str, str] | None) -> dict[str, str]:
    """Return the versions of what is measured and of what it stands on.

    :param environment: names the servers that take part; None when none does.
    """
    import sqlite3

    import kjo_django

    found = {
        "kjo_django": getattr(kjo_django, "__version__", "unknown"),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found | (_servers(environment) if environment is not None else {})


def _servers(environment: Mapping[str, str]) -> dict[str, str]:
    import psycopg

    with psycopg.connect(environment["DATABASE_URL"]) as connection:
        row = connection.execute("SHOW server_version").fetchone()
    found = {"postgresql_server": str(row[0]).split()[0] if row else "unknown"}
    return found | (_brokers(environment) if "REDIS_URL" in environment else {})


def _brokers(environment: Mapping[str, str]) -> dict[str, str]:
    import confluent_kafka
    import redis

    from tests.services.maven import kafka_version

    info = redis.Redis.from_url(environment["REDIS_URL"]).info("server")
    is_given = bool(os.environ.get("KAFKA_BOOTSTRAP_SERVERS"))
    return {
        "librdkafka": confluent_kafka.libversion()[0],
        "redis_server": str(info.get("redis_version", "unknown")),
        "kafka_server": "given, unknown" if is_given else kafka_version(),
    }
