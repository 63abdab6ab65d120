"""Counting what a measured process asks of its database and its Redis."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
from django.db.backends.signals import connection_created
from django.utils import timezone


class Queries:
    """Counts queries of every connection this process opens from now on."""

    def __init__(self) -> None:
        self.count = 0
        connection_created.connect(self._watch, weak=False)

    def _watch(self, connection: Any, **kwargs: Any) -> None:
        connection.execute_wrappers.append(self._pass)

    def _pass(
        self, execute: Callable[..., Any], sql: str, params: Any, many: bool, context: Any
    ) -> Any:
        # A lost increment of a race between lanes is one in a million here.
        self.count += 1
        return execute(sql, params, many, context)


class Redis:
    """Counts round trips of this process, and commands of the server (those of scripts included;
    and those of others, if a given server has other clients)."""

    def __init__(self) -> None:
        self.round_trips = 0
        self.url = os.environ.get("REDIS_URL", "")
        if not self.url:
            return
        import redis
        from redis.connection import AbstractConnection

        self._client = redis.Redis.from_url(self.url)
        self._before = self._commands()
        send = AbstractConnection.send_packed_command

        def count(connection: Any, *arguments: Any, **options: Any) -> Any:
            self.round_trips += 1
            return send(connection, *arguments, **options)

        AbstractConnection.send_packed_command = count

    def _commands(self) -> int:
        stats = self._client.info("commandstats")
        return sum(stat["calls"] for name, stat in stats.items() if name != "cmdstat_info")

    def figures(self, jobs: int) -> dict[str, float]:
        """Return both per job, and nothing where there is no Redis."""
        if not self.url:
            return {}
        round_trips = self.round_trips  # before our own question
        return {
            "redis_round_trips_per_job": round_trips / jobs,
            "redis_commands_per_job": (self._commands() - self._before) / jobs,
        }


def resident_megabytes() -> float:
    """Return this process' resident memory."""
    return float(psutil.Process().memory_info().rss) / 2**20


class Clock:
    """What has passed, on the wall and on this process' processors."""

    def __init__(self) -> None:
        self.started_at = timezone.now()
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    @property
    def seconds(self) -> float:
        """Seconds since it was made."""
        return time.perf_counter() - self._wall

    @property
    def cpu_seconds(self) -> float:
        """Processor seconds of all threads since it was made."""
        return time.process_time() - self._cpu
