"""What jobs cost PostgreSQL: bytes of its log, row versions, index entries, processor time."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import psutil
import psycopg
from django.db import connections
from django.utils import timezone

from kjo_django.clock import Clock
from kjo_django.models import Job
from kjo_django.operations.maintenance.prune import Retention, prune
from kjo_django.outbox.relay import Relay
from kjo_django.runtime import close_backends
from kjo_django.worker.process import Worker
from tests.benchmarks.completions import measured_jobs
from tests.benchmarks.errors import BenchmarkError
from tests.benchmarks.measures.drain import Watch
from tests.benchmarks.measures.latency import PATIENCE
from tests.benchmarks.measures.prepare import CHUNK
from tests.ledger.jobs import no_op

TABLES = ("kjo_job", "processed_events", "kjo_transport_message")
FIGURES = ("wal_bytes", "page_image_bytes", "row_versions", "index_entries", "backend_us")
"""What is told of each step, for each job, under the step's name, a colon and this."""
STEPS = ("enqueue", "relay", "consume", "vacuum", "prune")
TOGETHER = "together"

_LOG = """
SELECT coalesce(sum(fpi_size), 0)::bigint, coalesce(sum(count) FILTER (
    WHERE "resource_manager/record_type" IN ('Btree/INSERT_LEAF', 'Btree/INSERT_POST')
), 0)::bigint
FROM pg_get_wal_stats(%s, %s, true)
"""
_VERSIONS = """
SELECT sum(n_tup_ins + n_tup_upd)::bigint FROM pg_stat_user_tables WHERE relname = ANY(%s)
"""
_OTHERS = """
SELECT pid FROM pg_stat_activity
WHERE datname = current_database() AND pid <> pg_backend_pid() AND backend_type = 'client backend'
"""


class Server:
    """Reads the counters of the server by a connection of its own. Nothing else may use it:
    sessions of other databases that are there before are to do nothing."""

    def __init__(self) -> None:
        wrapper = connections["default"]
        parameters = {**wrapper.get_connection_params()}
        for name in ("context", "cursor_factory"):
            parameters.pop(name, None)
        self._connection = psycopg.connect(**parameters, autocommit=True)
        # Autovacuum works when it likes; here it is a step.
        for table in TABLES:
            self._connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)")
        with suppress(psycopg.Error):
            self._connection.execute("CREATE EXTENSION IF NOT EXISTS pg_walinspect")
        self._own_pid = self._connection.info.backend_pid
        self._postmaster: psutil.Process | None = None
        with suppress(psutil.Error):
            own = psutil.Process(self._own_pid)
            self._postmaster = own.parent() if "postgres" in own.name() else None
        self._before = {process.pid for process in self._sessions()}

    def _sessions(self) -> list[psutil.Process]:
        """Return the processes of all sessions, as far as they are on this machine."""
        if self._postmaster is None:
            return []
        pids = self._connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE backend_type <> 'client backend'"
        )
        background = {pid for (pid,) in pids}
        return [one for one in self._postmaster.children() if one.pid not in background]

    def _value(self, query: str, *parameters: Any) -> Any:
        row = self._connection.execute(query, parameters).fetchone()
        assert row is not None
        return row[0]

    def _processor_seconds(self) -> float:
        """Return the processor time of all sessions, the ended ones included."""
        if self._postmaster is None:
            return 0.0
        ended = self._postmaster.cpu_times()
        seconds = ended.children_user + ended.children_system
        for process in self._sessions():
            if process.pid != self._own_pid:
                with suppress(psutil.Error):
                    times = process.cpu_times()
                    seconds += times.user + times.system
        return float(seconds)

    def measure(self, step: Callable[[], int]) -> tuple[int, dict[str, float]]:
        """Run a step; return the number of jobs that it returns, and its figures for each."""
        began, versions, seconds = self._lsn(), self._versions(), self._processor_seconds()
        count = step()
        connections.close_all()
        self._wait_for_the_end_of_sessions()
        ended = self._lsn()
        figures = {
            "wal_bytes": float(self._value("SELECT %s::pg_lsn - %s::pg_lsn", ended, began)),
            "row_versions": float(self._versions() - versions),
            "backend_us": (self._processor_seconds() - seconds) * 1e6,
        }
        # Without the extension, or where the log is gone already, there is the total alone.
        with suppress(psycopg.Error):
            read = self._connection.execute(_LOG, (began, ended)).fetchone()
            assert read is not None
            figures["page_image_bytes"], figures["index_entries"] = map(float, read)
        return count, {name: value / count for name, value in figures.items()}

    def _lsn(self) -> str:
        lsn = str(self._value("SELECT pg_current_wal_insert_lsn()"))
        # The log is read only as far as it is on the disk, and sessions may not have waited for it.
        self._connection.execute("SELECT pg_logical_emit_message(true, 'benchmark', '')")
        return lsn

    def _versions(self) -> int:
        self._connection.execute("SELECT pg_stat_clear_snapshot()")
        return int(self._value(_VERSIONS, list(TABLES)) or 0)

    def _wait_for_the_end_of_sessions(self) -> None:
        """A session adds what it did to the statistics when it ends, at the latest."""
        deadline = time.monotonic() + PATIENCE
        # Their processes end, and are added up, a moment after them.
        while others := self._other_sessions():
            if time.monotonic() > deadline:
                pids = ", ".join(map(str, sorted(others)))
                raise BenchmarkError(f"Somebody else uses PostgreSQL: sessions {pids}")
            time.sleep(0.02)

    def _other_sessions(self) -> set[int]:
        """Return who else uses the database, or has begun to use the server."""
        of_database = {pid for (pid,) in self._connection.execute(_OTHERS)}
        return of_database or {process.pid for process in self._sessions()} - self._before

    def vacuum(self) -> None:
        """Free the space of old row versions."""
        self._connection.execute(f"VACUUM {', '.join(TABLES)}")

    def close(self) -> None:
        """Leave the tables as they were."""
        for table in TABLES:
            self._connection.execute(f"ALTER TABLE {table} RESET (autovacuum_enabled)")
        self._connection.close()


def steps(count: int) -> dict[str, float]:
    """Enqueue so many no-ops, a thousand a call; publish all, then run all; vacuum; prune.

    Where messages are stored with their jobs, there is nothing to publish.
    """
    connections.close_all()
    server = Server()
    has_relay = bool(os.environ.get("KAFKA_BOOTSTRAP_SERVERS"))

    def enqueue() -> int:
        for start in range(0, count, CHUNK):
            no_op.enqueue_many([{}] * min(CHUNK, count - start))
        return count

    def relay() -> int:
        publisher = Relay(["ledger"])
        while publisher.published_count < count:
            publisher.publish_due()
        publisher.close()
        close_backends()
        return publisher.published_count

    def vacuum() -> int:
        server.vacuum()
        return count

    figures: dict[str, float] = {}
    together = dict.fromkeys(FIGURES, 0.0)
    actions: Mapping[str, Callable[[], int]] = {
        "enqueue": enqueue,
        "relay": relay,
        "consume": lambda: _consume(count),
        "vacuum": vacuum,
        "prune": lambda: _prune(count),
    }
    for name in STEPS if has_relay else (step for step in STEPS if step != "relay"):
        done, found = server.measure(actions[name])
        if name != "prune" and done != count:
            raise BenchmarkError(f"{name}: {done} jobs, not {count}")
        for figure, value in found.items():
            figures[f"{name}:{figure}"] = value
            if name in ("enqueue", "relay", "consume"):
                together[figure] += value
    server.close()
    return {**figures, **{f"{TOGETHER}:{name}": value for name, value in together.items()}}


def steady(rate: float, seconds: float) -> dict[str, float]:
    """Enqueue no-ops at an even rate while a worker publishes and runs them; all in one."""
    connections.close_all()
    server = Server()
    count = int(rate * seconds)

    def work() -> int:
        worker = Worker(["ledger"])
        watch = Watch(worker, count)
        feeder = threading.Thread(target=_feed, args=(worker, rate, count), daemon=True)
        feeder.start()
        worker.run(until=watch.is_done)
        feeder.join()
        return watch.processed

    done, found = server.measure(work)
    server.close()
    if done != count:
        raise BenchmarkError(f"{done} jobs, not {count}")
    return {f"{TOGETHER}:{name}": value for name, value in found.items()}


def _feed(worker: Worker, rate: float, count: int) -> None:
    while not any(poller.partitions for poller in worker.pollers):
        time.sleep(0.05)
    start = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, start + number / rate - time.monotonic()))
        no_op.enqueue()
    connections.close_all()


def _consume(count: int) -> int:
    worker = Worker(["ledger"], relay=False)
    watch = Watch(worker, count)
    worker.run(until=watch.is_done)
    if measured_jobs().count() != count:
        raise BenchmarkError(f"{measured_jobs().count()} jobs completed, not {count}")
    return watch.processed


def _prune(count: int) -> int:
    """Delete the oldest jobs, about so many, and their markers; return how many jobs."""
    oldest = Job.objects.order_by("pk").values_list("created_at", flat=True)
    # As it will be when the last of them, in a table of these alone, has been kept long enough.
    kept, later = timedelta(days=1), timezone.now() + timedelta(days=1)
    if Job.objects.count() > count:
        kept = later - oldest[count]
    with patch.object(Clock, "now", staticmethod(lambda: later)):
        deleted = prune(Retention(kept, kept, kept, kept))
    jobs = deleted["jobs"] + deleted["failed_jobs"]
    if not jobs:
        raise BenchmarkError("Nothing was pruned")
    return jobs
