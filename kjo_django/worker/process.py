"""One worker process: what it starts, how it stops.

    main thread      signals, ``until``, the end
    kjo-poll-…       one per consumer group: owns the subscription, never runs a handler
    kjo-lane-n       run groups of jobs
    kjo-relay        publishes committed jobs, where a transport needs it
    kjo-listen       wakes pollers when something was published, where a transport needs it
    kjo-alive        sign of life, leases
    kjo-heartbeat    leases in job rows, what operators ask, running jobs, metrics
    kjo-schedules    stores the jobs of periodic schedules
    kjo-line         jobs that wait for a limit, released as others start and end
    kjo-duties       one worker at a time: jobs whose message is gone, how far behind queues are

Handlers bring threads of their own with them: ``kjo-timeouts`` for time limits, ``kjo-loop`` for
coroutines outside a transaction, and ``kjo-recorder``, which settles what has ended outside a
transaction while its lane is busy.

Stopping: admit nothing more, let running groups end within the grace period while the pollers keep
the membership, hand back what was not started without spending its attempt, commit, leave.

A worker that is made and not run has no threads: a test opens it with ``open``, takes the steps of
its ``duties`` and runs its groups with ``lanes.run_group(0)``, all on one thread.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Any

from django.core.cache import caches
from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections

from kjo_django import garbage_collection, registry, signals
from kjo_django.conf import LEVELS, QueueConf, default_worker_name
from kjo_django.engine.attempt import Attempt
from kjo_django.engine.direct_steps import DirectSteps
from kjo_django.engine.group import (
    HELD_ELSEWHERE_DELAY,
    Pipeline,
    send_signals,
)
from kjo_django.engine.handler import job_log
from kjo_django.engine.handler.connections import drop_broken_connections
from kjo_django.engine.handler.context import facts_of
from kjo_django.engine.handler.running import SETTLED_AFTER
from kjo_django.engine.handler.timeouts import TimeoutWatch
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.poller import Poller
from kjo_django.engine.scheduler import GroupScheduler
from kjo_django.exceptions import PublishError
from kjo_django.ids import uuid7
from kjo_django.logs import get_logger
from kjo_django.models import Job
from kjo_django.models import Worker as WorkerRow
from kjo_django.operations.workers import THREADS_DIED, Assignment, RunningJob
from kjo_django.outbox.relay import Relay
from kjo_django.round_trips import NEAR_LANES, lanes_for
from kjo_django.running_job import worker_name
from kjo_django.runtime import (
    Runtime,
    close_backends,
    current_runtime,
    get_transport,
    runtime_for,
    runtime_of,
    set_database,
    use_database,
)
from kjo_django.schedules.ticker import Ticker
from kjo_django.transports.base import TopicPartition
from kjo_django.worker.duties import (
    Duty,
    DutyThread,
    LagRecorder,
    LimitDuty,
    LineDuty,
    Pruner,
    PublishListener,
    Rescuer,
    TopicCheck,
    WorkflowDeadlines,
)
from kjo_django.worker.heartbeat import Controls, Heartbeat, LifeSign
from kjo_django.worker.lanes import Lanes
from kjo_django.worker.sessions import mark_sessions
from kjo_django.worker.statistics import OutageLog, RollupMerger, Statistics, memory_bytes
from kjo_django.worker.supervisor import LEFT_RUNNING, THREAD_DIED, stop_on_signals

logger = get_logger("kjo_django")

ABORT_WAIT = 1.0
"""Seconds jobs have to end after the grace period, when their abort flag is set."""
LEAVE_WAIT = 10.0
"""Seconds the pollers have to leave their groups."""
HASTY_WAIT = 3.0
"""Seconds the pollers and the last heartbeat have when jobs still run: what takes longer is left to
leases."""
TICK = 0.2
"""Seconds between looks of the main thread at signals and ``until``."""
LISTED_RUNS = 5
"""Running jobs that the worker's row names, those that have run longest."""


class Worker:
    """Consumes queues of one database, and relays, until told to stop.

    :param queues: names of the queues to consume, of one database; None for all of the runtime's
        database that are declared or used.
    :param weights: how many groups of a queue start for one of a queue that is not named here.
    :param concurrency: lanes, threads that run handlers; the setting if not given. Where that gives
        no number either, there are as many as ``lanes_for`` says.
    :param relay: also relay committed jobs of these queues.
    :param schedules: also store the jobs of schedules that are due.
    :param install_signal_handlers: stop on SIGTERM, SIGINT and SIGUSR2 (main thread only).
    :param max_messages: stop once so many have been settled; no more than that are begun.
    :param owns_process: close the process' transports and coordination at the end, and let the
        garbage collector look less often meanwhile; False where others use the process too.
    :param on_error: called with outages: what met one, and which.
    :param runtime: what it runs with; that of the process if not given.
    """

    def __init__(
        self,
        queues: Sequence[str] | None = None,
        *,
        weights: Mapping[str, float] | None = None,
        concurrency: int | None = None,
        relay: bool = True,
        schedules: bool = False,
        install_signal_handlers: bool = False,
        max_messages: int | None = None,
        heartbeat_file: str | None = None,
        name: str | None = None,
        owns_process: bool = True,
        on_error: Callable[[str, str], None] = lambda source, error: None,
        runtime: Runtime | None = None,
    ) -> None:
        self.runtime = runtime = _own_runtime(queues or (), runtime)
        conf = runtime.settings
        self.id = uuid7()
        self.name = name or default_worker_name()
        self.queues: list[QueueConf] = [
            conf.queue(queue)
            for queue in queues or registry.consumed_queue_names()
            if runtime.holds(queue)
        ]
        self.statistics = Statistics(runtime, self.id)
        self._owns_process = owns_process
        self._outages = OutageLog(on_error)
        self._installs_signal_handlers = install_signal_handlers
        self._stopping = threading.Event()
        self._has_ended = False
        self._dead_threads: list[str] = []
        self.was_signalled = False
        """Whether a signal has stopped it."""
        self._left = max_messages or 0
        """Messages until it stops, where there is a limit."""
        self._counting = threading.Lock()
        lanes = concurrency or conf.concurrency or NEAR_LANES
        self.follows_distance = not any((concurrency, conf.concurrency))
        """Whether it has as many lanes as suit how far away its database is: nothing gives their
        number."""
        self.controls = Controls(runtime, self.id, self.queues, lanes)
        self.scheduler = GroupScheduler(
            lanes,
            group_size=conf.group_size,
            budget=runtime.group_budget,
            most=max_messages,
            record_bytes=conf.max_outstanding_bytes / conf.max_outstanding,
            ramp_up=conf.async_ramp_up,
            clock=runtime.clock,
        )
        self.scheduler.set_limits(self.controls.limits)
        if weights:
            self.scheduler.set_weights(weights)
        self.leases = LeaseBook(runtime, self.id.hex)
        self._watch = TimeoutWatch(
            self._replace_lane,
            runtime.clock,
            frozen_after=self.leases.alive_ttl.total_seconds(),
            has_slot=self.leases.has_slot,
            has_lost_slot=self.leases.has_lost_slot,
        )
        self._watch.on_long = self.scheduler.note_long
        self._direct_steps = DirectSteps(self.leases, self.scheduler)
        listeners = [self.statistics.add, send_signals]
        if max_messages is not None:
            listeners.append(self._stop_after_most)
        self._pipeline = Pipeline(
            self.leases,
            self._watch,
            worker=self.name,
            listeners=listeners,
            on_pause=self._pause_partition,
            on_measure=self.scheduler.measure,
            on_share=self.scheduler.measure_share,
            on_earlier=self.scheduler.hasten,
            on_put_off=self.scheduler.put_off,
            on_unused_permit=self.statistics.note_unused_permit,
            stopping=self._stopping,
            on_settled=functools.partial(
                self.scheduler.finish_departed, delay=HELD_ELSEWHERE_DELAY
            ),
            receiver=self._direct_steps,
            on_thread=self._enter_thread,
        )
        self.limiter = self._pipeline.limiter
        self.scheduler.on_discarded = self.limiter.forget
        self.lanes = Lanes(self.scheduler, self._pipeline, self._watch, self._enter_thread)
        self.pollers = self._make_pollers()
        for poller in self.pollers:
            self._direct_steps.serve(poller)
        self._relay = Relay(
            [queue.name for queue in self.queues] if queues else None,
            runtime=runtime_for(runtime.database),
            on_error=functools.partial(self._outages.note, "relay"),
        )
        self.is_relaying = relay and bool(self._relay.queues)
        self._relay_thread = threading.Thread(target=self._relay.run, name="kjo-relay", daemon=True)
        self.ticker = Ticker(runtime) if schedules else None
        self._make_duties(heartbeat_file)

    def _make_pollers(self) -> list[Poller]:
        groups: dict[tuple[str, str, int], list[QueueConf]] = {}
        topics = set()
        for queue in self.queues:
            for level, topic in queue.levels.items():
                groups.setdefault((queue.transport, queue.consumer_group, level), []).append(queue)
                topics.add((queue.transport, queue.consumer_group, topic))
        return [
            Poller(
                self.runtime,
                get_transport(alias),
                group,
                queues,
                self.scheduler,
                max_outstanding=self.runtime.settings.max_outstanding,
                is_alone=len(topics) == 1,
                level=level,
                # With all that tells it from others: as one source, two would replace each other's
                # error for ever.
                on_error=functools.partial(
                    self._outages.note, f"{group} ({alias}{LEVELS[level][1]})"
                ),
                on_skipped=self.statistics.skip,
                died=self.leases.died_among,
                token=self.leases.token,
            )
            for (alias, group, level), queues in groups.items()
        ]

    def _make_duties(self, heartbeat_file: str | None) -> None:
        runtime, token = self.runtime, self.leases.token
        lifetimes = [runtime.settings.processing_ttl, *(q.processing_ttl for q in self.queues)]
        renewal = min(lifetimes).total_seconds() / 3
        life_sign = LifeSign(runtime, self.leases, renewal, heartbeat_file)
        self._heartbeat = Heartbeat(
            runtime,
            self.id,
            self.controls,
            self.leases,
            self._watch,
            renewal=renewal,
            describe=self._row,
            on_controls_changed=self._apply_controls,
        )
        # Also those of the queues that it relays to, and that nobody here consumes.
        known, names = registry.queue_names(), self._relay.queues if self.is_relaying else []
        relayed = [runtime.settings.queue(name) for name in names if name in known]
        self._topics = TopicCheck(
            runtime,
            [*self.queues, *(queue for queue in relayed if not queue.consume)],
            functools.partial(self._outages.note, "topics"),
        )
        listener = PublishListener(runtime, self.pollers)
        # A broker that is away keeps an answer waiting for half a minute, in which a worker must
        # not lose its leases: so the questions to brokers have a thread of their own.
        asking: list[Duty] = [
            self._topics,
            Rescuer(runtime, token),
            LimitDuty(runtime, token, self.limiter),
            LagRecorder(runtime, token, self.queues),
            RollupMerger(runtime, token),
            WorkflowDeadlines(runtime, token),
        ]
        if (prune_interval := runtime.settings.prune_interval) is not None:
            asking.append(Pruner(runtime, token, prune_interval))
        self._alive_threads = [
            DutyThread(runtime, "kjo-alive", [life_sign]),
            DutyThread(runtime, "kjo-heartbeat", [self._heartbeat, self.statistics]),
        ]
        self._poller_threads = [
            DutyThread(runtime, f"kjo-poll-{poller.group}", [poller]) for poller in self.pollers
        ]
        # It locks rows: should this worker freeze, its session is ended as those of lanes are.
        line = DutyThread(
            runtime,
            "kjo-line",
            [LineDuty(runtime, self.limiter)],
            on_thread=self._enter_thread,
        )
        self._serving_threads = [*self._poller_threads, line]
        """What lanes need as long as they run groups."""
        self._duty_threads = [DutyThread(runtime, "kjo-duties", asking)]
        if listener.is_needed:
            self._duty_threads.append(DutyThread(runtime, "kjo-listen", [listener]))
        beating: list[Duty] = [life_sign, self._heartbeat, self.statistics]
        ticking: list[Duty] = [] if self.ticker is None else [self.ticker]
        if ticking:
            self._duty_threads.append(DutyThread(runtime, "kjo-schedules", ticking))
        self.duties = [*beating, *ticking, *asking, *self.pollers]
        """Those that a test steps: all but the listener, which only wakes pollers."""

    # --- Life -------------------------------------------------------------------------------------

    def run(
        self, until: Callable[[], bool] | None = None, begin: Callable[[], object] | None = None
    ) -> int:
        """Work until ``until()`` is true or somebody stops it; return the exit code.

        :param until: asked a few times a second, in this thread.
        :param begin: called before anything is started, once a stop signal is heard.
        """
        # Python takes signals in the main thread only; elsewhere somebody else hears them.
        is_main = threading.current_thread() is threading.main_thread()
        hears = self._installs_signal_handlers and is_main
        restore = stop_on_signals(self._stopping) if hears else None
        if begin is not None:
            begin()
        with (
            garbage_collection.seldom() if self._owns_process else nullcontext(),
            use_database(self.runtime.database),
            job_log.kept(self.runtime.settings.job_log_lines),
        ):
            self._start()
            try:
                while not self._stopping.is_set():
                    if self._note_dead_threads() or (until is not None and until()):
                        break
                    self._stopping.wait(TICK)
            finally:
                is_drained = self._stop()
                if restore is not None:
                    self.was_signalled = restore()
        if self._dead_threads:
            return THREAD_DIED
        if is_drained:
            return 0
        return LEFT_RUNNING if self.controls.is_stopped else 1

    def _note_dead_threads(self) -> bool:
        """Return whether a thread has died: nobody would do its work, and the worker would show
        signs of life all the same."""
        threads = [*self.lanes.threads, *self._serving_threads, *self._duty_threads]
        threads += [*self._alive_threads, *self._pipeline.threads]
        threads += [self._relay_thread] if self.is_relaying else []
        threads += [] if self._watch.thread is None else [self._watch.thread]
        self._dead_threads = [thread.name for thread in threads if not thread.is_alive()]
        if self._dead_threads:
            why = f"{THREADS_DIED}, so the worker ends: {', '.join(self._dead_threads)}"
            self._outages.note("threads", why, is_first=True)
        return bool(self._dead_threads)

    def stop(self) -> None:
        """Begin to stop; thread-safe, returns at once."""
        self._stopping.set()

    def open(self) -> None:
        """Make topics, make the worker known and learn its controls: what comes before its first
        step.

        :raises ImproperlyConfigured: a topic is missing and its ``auto_create`` is off.
        """
        self.ensure_topics()
        self._heartbeat.register()
        if self.follows_distance:
            self._add_lanes()

    def ensure_topics(self) -> None:
        """Make missing topics, unless that was done.

        :raises ImproperlyConfigured: a topic is missing and its ``auto_create`` is off.
        """
        self._topics.start()

    def _start(self) -> None:
        self.open()
        self.lanes.start(self.scheduler.lanes)
        if self.is_relaying:
            self._relay_thread.start()
        for thread in (*self._serving_threads, *self._duty_threads, *self._alive_threads):
            thread.start()
        signals.worker_started.send_robust(sender=self.name, worker_id=str(self.id))

    def _enter_thread(self) -> None:
        """Let this thread work with the worker's database, and its log records and database
        sessions name the worker. All its jobs share the clients of caches: Django keeps these in
        variables of the context, and each job has a copy."""
        set_database(self.runtime.database)
        worker_name.set(self.name)
        mark_sessions(self.leases.token)
        for alias in caches:
            with suppress(Exception):  # who uses a cache that cannot be made is told why
                caches[alias]

    def _stop(self) -> bool:
        # Who would settle what still runs may be who has died.
        is_settling = all(thread.is_alive() for thread in self._pipeline.threads)
        grace = self.runtime.settings.shutdown_grace.total_seconds() if is_settling else 0.0
        self._stopping.set()
        for poller in self.pollers:
            poller.drain()
        self._relay.stop()
        for thread in self._duty_threads:
            thread.stop()
        self.scheduler.stop()
        is_drained = self.scheduler.wait_for(None, grace)
        if not is_drained:
            logger.warning("Jobs still ran after %g s; they are handed back", grace)
            self._watch.abort_all()
            is_drained = self.scheduler.wait_for(None, ABORT_WAIT)
        if not is_drained:
            self.lanes.abandon_all()
        for thread in self._serving_threads:
            thread.stop()
        _join(self._serving_threads, LEAVE_WAIT if is_drained else HASTY_WAIT)
        others: list[threading.Thread] = [*self.lanes.threads, *self._duty_threads]
        if self.is_relaying:
            others.append(self._relay_thread)
        _join(others, 5.0 if is_drained else 0.05 * len(others))
        self._pipeline.close(5.0 if is_drained else 0.05)
        self._watch.stop()
        if is_drained:
            self._end()
        else:
            # On SQLite a handler that still runs may keep everybody from writing.
            ending = threading.Thread(target=self._end_in_thread, name="kjo-end", daemon=True)
            ending.start()
            ending.join(HASTY_WAIT)
        signals.worker_stopped.send_robust(sender=self.name, worker_id=str(self.id))
        if is_drained and self._owns_process:
            close_backends()
        return is_drained

    def _end(self) -> None:
        for thread in self._alive_threads:
            thread.stop()
        _join(self._alive_threads, 5.0)
        self._has_ended = True
        self.limiter.close()
        self._direct_steps.close()
        self._heartbeat.end_worker()

    def _end_in_thread(self) -> None:
        try:
            self._end()
        finally:
            connections.close_all()

    # --- Lanes ------------------------------------------------------------------------------------

    @property
    def concurrency(self) -> int:
        """How many lanes it has."""
        return self.scheduler.lanes

    @property
    def slots(self) -> int:
        """Groups that may run at once: its lanes, or fewer where its queues allow no more."""
        limits = sum(limit.groups for limit in self.controls.limits.values())
        return min(self.concurrency, limits or 1)

    def set_concurrency(self, queue: str, count: int) -> None:
        """Run up to ``count`` groups of this queue at once, with more lanes if that needs them; a
        limit that an operator has set for the queue goes before."""
        self.controls.request_limit(queue, count)
        self._raise_lanes(count)

    def _add_lanes(self) -> None:
        """Have as many lanes as suit how far away the database is.

        Measured once, before the first job: handlers that take the processor prolong the answers
        that a thread beside them gets, and more lanes would prolong them more.
        """
        round_trip = self.runtime.group_budget.round_trip
        count = lanes_for(round_trip)
        # With a pool more threads would wait for one of its connections.
        if count > self.concurrency and not any(map(_has_pool, connections)):
            self._raise_lanes(count)
            away = round_trip * 1000
            logger.info("The database is %.1f ms away: %d lanes", away, self.concurrency)

    def _raise_lanes(self, count: int) -> None:
        """Have at least so many lanes."""
        more = self.scheduler.raise_lanes(count)
        self.controls.set_lanes(self.concurrency)
        if self.lanes.threads:
            self.lanes.start(more)
        self.scheduler.set_limits(self.controls.limits)

    def _replace_lane(self, thread_id: int) -> bool:
        return not self._stopping.is_set() and self.lanes.replace(thread_id)

    # --- What its parts report --------------------------------------------------------------------

    def _stop_after_most(self, attempts: Sequence[Attempt]) -> None:
        with self._counting:
            self._left -= len(attempts)
        if self._left <= 0:
            self.stop()

    def _pause_partition(self, attempt: Attempt) -> None:
        partition = attempt.delivery.place
        seconds = attempt.pause_seconds or 0.0
        facts = facts_of(attempt.delivery, attempt.number)
        logger.warning("Pausing %s for %g s: %s", partition, seconds, attempt.error, extra=facts)
        self.scheduler.pause_partition(partition, seconds)
        self._direct_steps.keep(attempt.delivery, seconds)

    def _apply_controls(self) -> None:
        controls = self.controls
        if controls.is_stopped:
            self.stop()
        self.scheduler.set_limits(controls.limits)
        every = frozenset(queue.name for queue in self.queues)
        self.scheduler.set_paused(every if controls.is_quiet else controls.paused_queues)
        for poller in self.pollers:
            poller.set_paused(controls.paused_queues)
            if poller.is_quiet != controls.is_quiet:
                poller.set_quiet(controls.is_quiet)

    @property
    def last_error(self) -> str:
        """The outage or job error met last."""
        return self._outages.error or self.statistics.last_error

    @property
    def last_error_at(self) -> datetime | None:
        """When that error was first met."""
        return self._outages.began_at or self.statistics.last_error_at

    # --- Its row ----------------------------------------------------------------------------------

    def _row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "hostname": socket.gethostname(),
            "pid": os.getpid(),
            "queues": [queue.name for queue in self.queues],
            "state": self._state(),
            "release": self.runtime.settings.release,
            "concurrency": self.concurrency,
            "is_relaying": self.is_relaying,
            "processed_count": self.statistics.processed,
            "failed_count": self.statistics.failed,
            "in_flight_count": self.scheduler.outstanding,
            "partitions": [each.stored() for each in self._assignments()],
            "rss_bytes": memory_bytes(),
            "last_error": self.last_error[:500],
            "started_at": self.statistics.started_at,
        }

    def _state(self) -> WorkerRow.State:
        if self._has_ended:
            return WorkerRow.State.STOPPED
        if self.scheduler.is_stopped or self.controls.is_stopped:
            return WorkerRow.State.STOPPING
        return WorkerRow.State.QUIET if self.controls.is_quiet else WorkerRow.State.RUNNING

    def _assignments(self) -> list[Assignment]:
        """Return its partitions in order, with what runs of them."""
        now = self.runtime.clock.now()
        running: dict[TopicPartition, list[RunningJob]] = {}
        jobs = [job for job in self._watch.jobs() if job.seconds >= SETTLED_AFTER]
        for context, seconds, delivery in sorted(jobs, key=lambda job: -job.seconds)[:LISTED_RUNS]:
            running.setdefault(delivery.place, []).append(
                RunningJob(context.job_id, delivery.kind, now - timedelta(seconds=seconds))
            )
        found, paused = [], self.scheduler.paused_partitions()
        waits = self.scheduler.waits_for_lanes()
        for poller in self.pollers:
            for partition in poller.partitions:
                rest, waited = paused.get(partition), waits.get(partition, 0.0)
                found.append(
                    Assignment(
                        partition.topic,
                        partition.partition,
                        poller.group,
                        rebalanced_at=poller.rebalanced_at,
                        resting_until=None if rest is None else now + timedelta(seconds=rest),
                        waiting_since=now - timedelta(seconds=waited)
                        if rest is None and waited >= SETTLED_AFTER
                        else None,
                        running=tuple(running.get(partition, ())),
                    )
                )
        return sorted(found, key=lambda each: (each.group or "", each.topic, each.partition))

    # --- Draining ---------------------------------------------------------------------------------

    def is_drained(self) -> bool:
        """Return whether nothing is left that could start now: no record waits, no job is due.

        Retries and delayed jobs that are due later do not count. During an outage nobody knows, and
        the answer is no.
        """
        if self.scheduler.outstanding or self.limiter.releaser.is_busy:
            return False
        try:
            names = {queue.name for queue in self.queues}
            names.update(self._relay.queues if self.is_relaying else ())
            jobs = Job.objects.using(self.runtime.database)
            if jobs.unfinished_due().filter(queue__in=names).exists():
                return False
            is_drained = not any(map(self._waiting_records, self.queues))
        except (PublishError, DatabaseError, InterfaceError) as error:
            self._outages.note("drain", f"Whether all is done cannot be seen yet: {error}")
            drop_broken_connections()
            return False
        self._outages.note("drain", None)
        return is_drained

    def _waiting_records(self, queue: QueueConf) -> int:
        """Return how many records wait for a queue that no due job stands for."""
        transport = get_transport(queue.transport)
        records = sum(transport.lag(queue.topics, queue.consumer_group).values())
        if not (records and transport.capabilities.transactional):
            return records
        jobs = Job.objects.using(self.runtime.database).open()
        now = self.runtime.clock.now()
        return max(0, records - jobs.filter(queue=queue.name, available_at__lte=now).count())


def _has_pool(using: str) -> bool:
    """Return whether Django keeps a pool of connections to a database."""
    return bool(connections[using].settings_dict.get("OPTIONS", {}).get("pool"))


def _own_runtime(queues: Sequence[str], given: Runtime | None) -> Runtime:
    """Return the runtime of a worker of these queues, with controls of its own.

    :raises ImproperlyConfigured: a queue is not known, or its jobs are in another database.
    """
    known = registry.queue_names()
    for name in queues:
        if name not in known:
            raise ImproperlyConfigured(
                f"No queue is named {name!r}. Known: {', '.join(known) or 'none'}."
            )
    runtime = given or (runtime_of(queues[0]) if queues else current_runtime())
    for name in queues:
        if not runtime.holds(name):
            raise ImproperlyConfigured(
                f"The jobs of the queue {name!r} are not in {runtime.database!r}, the database of "
                "this worker. kjo_consume starts a worker for each KJO['QUEUES'][…]['database']."
            )
    return replace(runtime, queue_controls={}, limit_controls={})


def _join(threads: Iterable[threading.Thread], seconds: float) -> None:
    """Wait for the ends of threads, so many seconds for all of them."""
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
