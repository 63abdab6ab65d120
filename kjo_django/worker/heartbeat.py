"""How a worker shows that it lives, keeps its leases, and reads what operators ask of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from uuid import UUID

from django.db import DatabaseError, InterfaceError
from django.db.models import PositiveIntegerField, Value

from kjo_django.conf import QueueConf
from kjo_django.engine.handler.connections import drop_broken_connections
from kjo_django.engine.handler.running import look_after
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.scheduler import QueueLimit
from kjo_django.logs import get_logger
from kjo_django.models import LimitControl, QueueControl
from kjo_django.models import Worker as WorkerRow
from kjo_django.runtime import Runtime
from kjo_django.worker.duties import OUTAGES, ClockCheck, PeriodicDuty
from kjo_django.worker.sessions import end_sessions_of_dead_workers

logger = get_logger("kjo_django")

R = TypeVar("R")
CONTROL_INTERVAL = 1.0
"""Seconds between looks at what operators asked; a pause is obeyed within two."""
MEASURED_FIRST = 3
"""Round trips to the database that are measured before the first job, beside the one with which the
worker's row is written: the first opens a session, and a busy machine prolongs some."""


class Controls:
    """What operators asked of one worker and of its queues. The heartbeat reads it once a second
    and keeps it in memory, so that no job costs a query for it.

    :param concurrency: groups of a queue without a limit of its own that may run at once.
    """

    def __init__(
        self, runtime: Runtime, worker_id: UUID, queues: Sequence[QueueConf], concurrency: int
    ) -> None:
        self._runtime = runtime
        self._worker_id = worker_id
        self._queues = queues
        self._concurrency = concurrency
        self._rows_limits: dict[str, int] = {}
        self._requested_limits: dict[str, int] = {}
        self.limits: dict[str, QueueLimit] = {}
        """How much of each queue this worker runs at once."""
        self.paused_queues: frozenset[str] = frozenset()
        self.is_quiet = False
        """Nothing more is started; what runs ends."""
        self.is_stopped = False
        """An operator asked the worker to stop."""
        self._set_limits()

    def request_limit(self, queue: str, count: int) -> None:
        """Set the limit of a queue on which no operator has set one."""
        self._requested_limits[queue] = count
        self._set_limits()

    def set_lanes(self, count: int) -> None:
        """Let so many groups of a queue without a limit of its own run at once."""
        self._concurrency = count
        self._set_limits()

    def _set_limits(self) -> None:
        limits = {}
        for queue in self._queues:
            own = (
                self._rows_limits.get(queue.name)
                or self._requested_limits.get(queue.name)
                or queue.limit
            )
            # Without a limit of its own a queue may use every lane of this worker, however many
            # --concurrency gave it.
            limits[queue.name] = QueueLimit(
                own or self._concurrency, own or self._runtime.settings.async_concurrency
            )
        self.limits = limits

    def read(self) -> bool:
        """Read the rows; return whether anything has changed."""
        asked, queues, limits = _asked(self._runtime.database, self._worker_id)
        # How its retries are limited is read from there for every attempt that fails.
        _follow(self._runtime.queue_controls, queues)
        _follow(self._runtime.limit_controls, limits)
        rows = queues.values()
        before = self._rows_limits, self.paused_queues, self.is_quiet, self.is_stopped
        self._rows_limits = {row.queue: row.concurrency for row in rows if row.concurrency}
        self._set_limits()
        self.paused_queues = frozenset(row.queue for row in rows if row.is_paused)
        if asked == WorkerRow.Request.STOP:
            if not self.is_stopped:
                logger.info("An operator stops this worker: finishing what runs")
            self.is_stopped = True
        elif self.is_quiet != (asked == WorkerRow.Request.QUIET):
            self.is_quiet = not self.is_quiet
            state = "quiet" if self.is_quiet else "back at work"
            logger.info("An operator wants this worker %s", state)
        return before != (self._rows_limits, self.paused_queues, self.is_quiet, self.is_stopped)


def _asked(
    alias: str, worker_id: UUID
) -> tuple[str, dict[str, QueueControl], dict[str, LimitControl]]:
    """Return what operators asked of a worker, of queues and of limits: one statement."""
    none = Value(None, output_field=PositiveIntegerField())
    queues = QueueControl.objects.using(alias).order_by()
    limits = LimitControl.objects.using(alias).order_by()
    workers = WorkerRow.objects.using(alias).order_by().filter(pk=worker_id)
    found = queues.values_list(
        *(Value("queue"), "queue", Value("")),
        *("is_paused", "concurrency", "max_attempts", "backoff_base"),
    ).union(
        limits.values_list(
            *(Value("limit"), "name", "rate"), Value(False), *("concurrency", "burst", none)
        ),
        workers.values_list(
            *(Value("worker"), Value(""), "asked_to"), Value(False), *(none, none, none)
        ),
        all=True,
    )
    # Its row is gone when somebody emptied the table; the next heartbeat writes it again.
    asked = ""
    of_queues, of_limits = dict[str, QueueControl](), dict[str, LimitControl]()
    for kind, name, text, is_paused, concurrency, *more in found:
        if kind == "worker":
            asked = text
        elif kind == "queue":
            of_queues[name] = QueueControl(name, bool(is_paused), concurrency, *more)
        else:
            of_limits[name] = LimitControl(name, text, more[0], concurrency)
    return asked, of_queues, of_limits


def _follow(known: dict[str, R], rows: Mapping[str, R]) -> None:
    """Make what lanes read equal to the rows; at no moment is one missing that is there before and
    afterwards."""
    known.update(rows)
    for name in known.keys() - rows.keys():
        del known[name]


class LifeSign(PeriodicDuty):
    """Shows that the worker lives and renews its leases. It asks the database for nothing else: a
    connection that hangs must not let others run again what runs here.

    :param renewal: seconds between renewals of leases.
    :param path: a file that a liveness probe looks at.
    """

    def __init__(
        self, runtime: Runtime, leases: LeaseBook, renewal: float, path: str | None
    ) -> None:
        super().__init__(runtime, min(runtime.settings.heartbeat_interval.total_seconds(), renewal))
        self._leases = leases
        self._renewal = renewal
        self._path = path
        self._has_complained = False
        self._renew_at = 0.0

    def work(self) -> None:
        """Show life, and renew the leases if it is time for that."""
        now = self._clock.monotonic()
        self._touch()
        self._leases.show_alive()
        if now >= self._renew_at and self._leases.renew():
            self._renew_at = now + self._renewal

    def _touch(self) -> None:
        """Write the file for a liveness probe, before anything that an outage could stop: a worker
        that waits for its database is alive, and restarting it would not help.

        A disk that is full or read-only costs the probe its answer, and the worker nothing else.
        """
        if not self._path:
            return
        try:
            Path(self._path).write_text(f"{self._clock.now().isoformat()}\n")
            self._has_complained = False
        except OSError as error:
            if not self._has_complained:
                logger.error("The heartbeat file %s cannot be written: %s", self._path, error)
            self._has_complained = True


class Heartbeat(PeriodicDuty):
    """What a worker's database needs of it every second or every few: renewed leases in rows,
    what operators ask, running jobs looked after, the worker's own row.

    :param renewal: seconds between renewals of leases.
    :param describe: returns the worker's row, but for its heartbeat.
    :param on_controls_changed: called when operators have asked for something else.
    """

    def __init__(
        self,
        runtime: Runtime,
        worker_id: UUID,
        controls: Controls,
        leases: LeaseBook,
        watch: TimeoutWatch,
        *,
        renewal: float,
        describe: Callable[[], dict[str, Any]],
        on_controls_changed: Callable[[], None],
    ) -> None:
        self._beat = runtime.settings.heartbeat_interval.total_seconds()
        super().__init__(runtime, min(CONTROL_INTERVAL, self._beat, renewal))
        self._worker_id = worker_id
        self._controls = controls
        self._leases = leases
        self._watch = watch
        self._renewal = renewal
        self._describe = describe
        self._on_controls_changed = on_controls_changed
        self._beat_at = self._renew_at = 0.0
        self._clock_check = ClockCheck(runtime)

    def register(self) -> None:
        """Make the worker known and learn the controls before the first job is started."""
        try:
            for _ in range(MEASURED_FIRST):
                self._clock_check.work()
            self._write()
            self._read_controls()
        except (DatabaseError, InterfaceError) as error:
            logger.error("The worker could not register yet: %s", error)
            drop_broken_connections()
        self._leases.show_alive()  # by the clock that it goes by since it has written its row
        self._due_at = self._clock.monotonic() + self.pause

    def work(self) -> None:
        """Do what is due now."""
        now = self._clock.monotonic()
        if now >= self._renew_at:
            self._leases.renew_rows()
            self._renew_at = now + self._renewal
        self._read_controls()
        look_after(self._watch, self._runtime, self._leases.token)
        if now >= self._beat_at:
            self._beat_at = now + self._beat
            self._write()
            end_sessions_of_dead_workers(self._runtime, self._leases.alive_ttl)

    def _read_controls(self) -> None:
        if self._controls.read():
            self._on_controls_changed()
            self._write()

    def _write(self) -> None:
        self._clock_check.work()
        values = self._describe() | {
            "heartbeat_at": self._clock.now(),
            "clock_ahead": round(self._clock_check.ahead, 3),
        }
        rows = WorkerRow.objects.using(self._runtime.database)
        if not rows.filter(pk=self._worker_id).update(**values):
            rows.create(pk=self._worker_id, **values)

    def end_worker(self) -> None:
        """Give back leases of jobs that still run, and write the row's end."""
        leases = self._leases
        try:
            # What is handed back must not look as if it were processed.
            self._runtime.store.release_row_leases(leases.held_rows(), leases.token)
        except OUTAGES as error:
            logger.error("Leases of jobs that still run are left to expire: %s", error)
            drop_broken_connections()
        leases.release_all()
        try:
            self._write()
        except Exception as error:
            is_outage = isinstance(error, OUTAGES)
            logger.error("The end of the worker is not recorded: %s", error, exc_info=not is_outage)
