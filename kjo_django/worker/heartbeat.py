"""The background duties of a worker: leases, signs of life, controls, metrics."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from django.db import DatabaseError, InterfaceError, connections
from django.utils import timezone

from kjo_django.conf import get_settings
from kjo_django.engine.handler.connections import drop_broken_connections
from kjo_django.exceptions import KjoError
from kjo_django.models import Worker as WorkerRow
from kjo_django.store import store_for
from kjo_django.store.transactions import jobs_database
from kjo_django.worker.sessions import end_sessions_of_the_dead
from kjo_django.worker.worker_snapshot import held

if TYPE_CHECKING:
    from kjo_django.worker.process import Worker

logger = logging.getLogger("kjo_django")

CONTROL_INTERVAL = 1.0
"""Seconds between looks at what operators asked; a pause is obeyed within two."""
OUTAGES = (DatabaseError, InterfaceError, OSError, KjoError)


class Heartbeat:
    """Two threads: one gives signs of life, one does what needs the database. An outage delays
    their duties and never ends them."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=self._show_life, name="kjo-alive", daemon=True),
            threading.Thread(target=self._run, name="kjo-heartbeat", daemon=True),
        ]
        self._is_touching = True

    def register(self) -> None:
        """Make the worker known and learn the controls before the first job is started."""
        self._worker.leases.show_alive()
        self._worker.controls.open()
        try:
            self._write()
            self._read_controls()
        except (DatabaseError, InterfaceError) as error:
            logger.error("The worker could not register yet: %s", error)
            drop_broken_connections()

    def start(self) -> None:
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        threading.Thread(target=self._make_topics, name="kjo-topics", daemon=True).start()

    def stop(self) -> None:
        """Give back leases of jobs that still run, write the last metrics, say goodbye."""
        self._worker.controls.close()
        self._stopping.set()
        deadline = time.monotonic() + 5.0
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        leases = self._worker.leases
        try:
            # What is handed back is not to say that it is processed.
            store_for(jobs_database()).release_row_leases(leases.held_rows(), leases.token)
        except OUTAGES as error:
            logger.error("Leases of jobs that still run are left to expire: %s", error)
            drop_broken_connections()
        leases.say_goodbye()
        try:
            self._worker.statistics.flush()
            self._write(WorkerRow.State.STOPPED)
        except Exception as error:
            is_outage = isinstance(error, OUTAGES)
            logger.error("The worker could not say goodbye: %s", error, exc_info=not is_outage)

    def _run(self) -> None:
        beat = get_settings().heartbeat_interval.total_seconds()
        renewal = self._renewal_interval
        next_beat = next_renewal = 0.0
        try:
            while not self._stopping.wait(min(CONTROL_INTERVAL, beat, renewal)):
                now = time.monotonic()
                try:
                    if now >= next_renewal:
                        next_renewal = now + renewal
                        self._worker.leases.renew_rows()
                    self._read_controls()
                    self._worker.running.look_after(self._worker.leases.token)
                    if now >= next_beat:
                        next_beat = now + beat
                        self._beat()
                except Exception as error:
                    # Whatever it is: a worker without heartbeat hears nobody.
                    self._complain("The heartbeat is late: %s", error)
        finally:
            connections.close_all()

    def _show_life(self) -> None:
        """Give signs of life and renew leases, in a thread that asks the database for nothing else:
        a connection that hangs must not let others run again what runs here."""
        beat = get_settings().heartbeat_interval.total_seconds()
        renewal = self._renewal_interval
        next_renewal = 0.0
        try:
            while not self._stopping.wait(min(beat, renewal)):
                now = time.monotonic()
                try:
                    self._touch()
                    self._worker.leases.show_alive()
                    if now >= next_renewal:
                        next_renewal = now + renewal
                        self._worker.leases.renew()
                except Exception as error:
                    self._complain("The sign of life is late: %s", error)
        finally:
            connections.close_all()

    @property
    def _renewal_interval(self) -> float:
        """Seconds between renewals of leases: a third of what the shortest of them lasts."""
        queues = (queue.processing_ttl for queue in self._worker.queues)
        return min([get_settings().processing_ttl, *queues]).total_seconds() / 3

    @staticmethod
    def _complain(complaint: str, error: Exception) -> None:
        logger.error(complaint, error, exc_info=not isinstance(error, OUTAGES))
        drop_broken_connections()

    def _touch(self) -> None:
        """Tell a liveness probe, before anything that an outage could stop: a worker that waits for
        its database is alive, and restarting it would not help.

        A disk that is full or read-only costs the probe its answer, and the worker nothing else.
        """
        path = self._worker.heartbeat_file
        if not path:
            return
        try:
            Path(path).write_text(f"{timezone.now().isoformat()}\n")
            self._is_touching = True
        except OSError as error:
            if self._is_touching:
                logger.error("The heartbeat file %s cannot be written: %s", path, error)
            self._is_touching = False

    def _make_topics(self) -> None:
        """Ask again for the topics of a broker that was away at the start, until they are there.

        In a thread of its own: it lets an answer wait for half a minute, in which this worker would
        lose its leases, and hear no operator.
        """
        try:
            while not self._worker._has_topics:
                try:
                    self._worker.ensure_topics()
                except Exception as error:
                    is_outage = isinstance(error, OUTAGES)
                    logger.error("Topics have to wait: %s", error, exc_info=not is_outage)
                if self._stopping.wait(get_settings().heartbeat_interval.total_seconds()):
                    return
        finally:
            connections.close_all()

    def _beat(self) -> None:
        self._write()
        self._worker.statistics.flush()
        end_sessions_of_the_dead(self._worker.leases.alive_ttl)

    def _write(self, state: WorkerRow.State | None = None) -> None:
        worker = self._worker
        values = {
            "name": worker.name,
            "hostname": worker.hostname,
            "pid": _pid(),
            "queues": [queue.name for queue in worker.queues],
            "state": state or self._state(),
            "release": get_settings().release,
            "concurrency": worker.concurrency,
            "is_relaying": worker.is_relaying,
            "processed_count": worker.statistics.processed,
            "failed_count": worker.statistics.failed,
            "in_flight_count": worker.lanes.outstanding,
            "partitions": [each.stored() for each in held(worker)],
            "rss_bytes": memory_bytes(),
            "last_error": worker.last_error[:500],
            "started_at": worker.statistics.started_at,
            "heartbeat_at": timezone.now(),
        }
        rows = WorkerRow.objects.using(jobs_database())
        if not rows.filter(pk=worker.id).update(**values):
            rows.create(pk=worker.id, **values)

    def _state(self) -> WorkerRow.State:
        if self._worker.lanes.is_stopped or self._worker.controls.is_stopped:
            return WorkerRow.State.STOPPING
        return WorkerRow.State.QUIET if self._worker.controls.is_quiet else WorkerRow.State.RUNNING

    def _read_controls(self) -> None:
        if self._worker.controls.read():
            self._write()


def _pid() -> int:
    import os

    return os.getpid()


def memory_bytes() -> int | None:
    """Return this process' resident memory, None where the system does not tell."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    import resource

    return pages * resource.getpagesize()
