"""One worker process: what it starts, how it stops.

    main thread      signals, control of queues, the end
    kjo-poll-…       one per consumer group: owns the subscription, never runs a handler
    kjo-lane-n       run groups of jobs
    kjo-flight       coroutines outside a transaction, on one event loop; kjo-landing settles them
    kjo-relay        publishes committed jobs, where a transport needs it
    kjo-alive        sign of life, leases
    kjo-heartbeat    leases in job rows, metrics, what others want of running jobs
    kjo-rescue       one worker at a time: queued jobs whose message is gone
    kjo-lag          for each queue one worker at a time: how far behind it is

Stopping: admit nothing more, let running groups end within the grace period while the pollers keep
the membership, hand back what was not started without spending its attempt, commit, leave.
"""

from __future__ import annotations

import functools
import itertools
import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import datetime
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections
from django.db.backends.base.base import BaseDatabaseWrapper

from kjo_django import garbage_collection, registry, signals
from kjo_django.backends import close_backends, get_transport
from kjo_django.conf import QueueConf, default_worker_name, get_settings
from kjo_django.engine.announcements import tell, tell_waiters
from kjo_django.engine.attempt import Delivery, Mode, Outcome
from kjo_django.engine.group import HELD_ELSEWHERE_DELAY, Pipeline
from kjo_django.engine.handler.connections import drop_broken_connections, sever
from kjo_django.engine.handler.context import JobContext, facts_of
from kjo_django.engine.handler.timeouts import RunAbandoned, TimeoutWatch
from kjo_django.engine.key_queue import Group
from kjo_django.engine.leases import LeaseBook
from kjo_django.engine.poller import Poller
from kjo_django.engine.scheduler import Lanes
from kjo_django.exceptions import PublishError
from kjo_django.ids import uuid7
from kjo_django.models import Job
from kjo_django.operations.maintenance import topics
from kjo_django.outbox.relay import Relay
from kjo_django.running_job import worker_name
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import TopicPartition
from kjo_django.worker.controls import Controls
from kjo_django.worker.draining import waiting_records
from kjo_django.worker.heartbeat import Heartbeat
from kjo_django.worker.lagging import LagWatch
from kjo_django.worker.listening import PublishListener
from kjo_django.worker.outages import Outages
from kjo_django.worker.rescuer import Rescuer
from kjo_django.worker.scheduling import LaneScheduling
from kjo_django.worker.sessions import mark_sessions
from kjo_django.worker.statistics import Statistics
from kjo_django.worker.stopping import hear_stop_signals
from kjo_django.worker.supervisor import LEFT_RUNNING

logger = logging.getLogger("kjo_django")

ABORT_WAIT = 1.0
"""Seconds jobs have to end after the grace period, when their abort flag is set."""
LEAVE_WAIT = 10.0
"""Seconds the pollers have to leave their groups."""
HASTY_WAIT = 3.0
"""The same, and for the last words, when jobs still run: what takes longer is left to leases."""
TICK = 0.2
"""Seconds between looks of the main thread at signals and ``until``."""


class LaneRun(NamedTuple):
    """A group that a lane runs."""

    group: Group
    connections: list[BaseDatabaseWrapper]
    """Those of the lane's thread."""


class Worker:
    """Consumes queues, and relays, until told to stop.

    :param queues: names of the queues to consume; None for all that are declared or used.
    :param concurrency: lanes, threads that run handlers; the setting if not given.
    :param relay: also relay committed jobs of these queues.
    :param install_signal_handlers: stop on SIGTERM, SIGINT and SIGUSR2 (main thread only).
    :param max_messages: stop once so many have been settled; no more than that are begun.
    :param owns_process: close the process' transports and coordination at the end, and let the
        garbage collector look less often meanwhile; False where others use the process too.
    :param on_error: told of outages: what met one, and which.
    """

    def __init__(
        self,
        queues: Sequence[str] | None = None,
        *,
        concurrency: int | None = None,
        relay: bool = True,
        install_signal_handlers: bool = False,
        max_messages: int | None = None,
        heartbeat_file: str | None = None,
        name: str | None = None,
        owns_process: bool = True,
        on_error: Callable[[str, str], None] = lambda source, error: None,
    ) -> None:
        conf = get_settings()
        known = registry.queue_names()
        unknown = [queue for queue in queues or () if queue not in known]
        if unknown:
            raise ImproperlyConfigured(
                f"No queue is named {unknown[0]!r}. Known: {', '.join(known) or 'none'}."
            )
        self.id = uuid7()
        self.name = name or default_worker_name()
        self.hostname = socket.gethostname()
        self.queues: list[QueueConf] = [
            conf.queue(queue) for queue in queues or registry.consumed_queue_names()
        ]
        self.concurrency = concurrency or conf.concurrency
        self.statistics = Statistics(self.id)
        self.heartbeat_file = heartbeat_file
        self._max_messages = max_messages
        self._owns_process = owns_process
        self._outages = Outages(on_error)
        self._installs_signal_handlers = install_signal_handlers
        self._stopping = threading.Event()
        self._settled = 0
        self._counting = threading.Lock()
        self._has_topics = False
        self.controls = Controls(self)
        self._lane_threads: list[threading.Thread] = []
        self._lane_numbers = itertools.count()
        self._lanes_lock = threading.Lock()
        self.lanes = Lanes(
            self.concurrency,
            group_size=conf.group_size,
            budget=conf.group_budget.total_seconds(),
            limit_of=self.controls.limit_of,
            flights_of=self.controls.flights_of,
            most=max_messages,
        )
        alive_ttl = 3 * conf.heartbeat_interval
        self.leases = LeaseBook(self.id.hex, conf.processing_ttl, alive_ttl)
        self._watch = TimeoutWatch(self._on_hung)
        self._lane_runs: dict[int, LaneRun] = {}
        """What each lane runs, by the id of its thread. Who takes it from here ends it."""
        self.running = self._watch.running
        self._pipeline = Pipeline(
            self.leases,
            self._watch,
            worker=self.name,
            on_outcomes=self._on_outcomes,
            on_pause=self._rest,
            on_measure=self.lanes.measure,
            stopping=self._stopping,
            on_landed=functools.partial(self.lanes.land, delay=HELD_ELSEWHERE_DELAY),
            on_thread=self._enter_thread,
        )
        self.pollers = self._make_pollers()
        self._listener = PublishListener(self.pollers)
        self._relay = Relay(
            [queue.name for queue in self.queues] if queues else None,
            on_error=functools.partial(self._outages.note, "relay"),
        )
        self.is_relaying = relay and bool(self._relay.queues)
        self._heartbeat = Heartbeat(self)
        self._duties = [
            Rescuer(self.leases.token),
            LagWatch(self.leases.token, self.queues),
        ]

    def _make_pollers(self) -> list[Poller]:
        conf = get_settings()
        groups: dict[tuple[str, str], list[QueueConf]] = {}
        for queue in self.queues:
            groups.setdefault((queue.transport, queue.consumer_group), []).append(queue)
        topics = {(queue.transport, queue.consumer_group, queue.topic) for queue in self.queues}
        return [
            Poller(
                get_transport(alias),
                group,
                queues,
                self.lanes,
                max_outstanding=conf.max_outstanding,
                is_alone=len(topics) == 1,
                # With its transport: as one source, two would replace each other's word for ever.
                on_error=functools.partial(self._outages.note, f"{group} ({alias})"),
                on_skipped=self.statistics.skip,
            )
            for (alias, group), queues in groups.items()
        ]

    @property
    def slots(self) -> int:
        """Groups that may run at once: its lanes, or fewer where its queues allow no more."""
        limits = sum(self.controls.limit_of(queue.name) for queue in self.queues)
        return min(self.concurrency, limits or 1)

    def set_concurrency(self, queue: str, count: int) -> None:
        """Run up to ``count`` groups of this queue at once, with more lanes if that needs them; an
        operator's limit of the queue goes before (KJO-58)."""
        with self._lanes_lock:
            self.controls.ask_limit(queue, count)
            more = max(0, count - self.concurrency)
            self.concurrency += more
            self.lanes.add_lanes(more)
            if self._lane_threads:
                self._start_lanes(more)
        self.lanes.look_again()

    def _start_lanes(self, count: int, begin: Callable[[], None] = lambda: None) -> None:
        for _ in range(count):
            name = f"kjo-lane-{next(self._lane_numbers)}"
            thread = threading.Thread(target=self._run_lane, args=(begin,), name=name, daemon=True)
            self._lane_threads.append(thread)
            thread.start()

    # --- Life -------------------------------------------------------------------------------------

    def run(self, until: Callable[[], bool] | None = None) -> int:
        """Work until ``until()`` is true or somebody stops it; return the exit code.

        :param until: asked a few times a second, in this thread.
        """
        # Python takes signals in the main thread only; elsewhere somebody else hears them.
        is_main = threading.current_thread() is threading.main_thread()
        hears = self._installs_signal_handlers and is_main
        restore = hear_stop_signals(self._stopping) if hears else None
        with garbage_collection.seldom() if self._owns_process else nullcontext():
            self._start()
            try:
                while not self._stopping.is_set():
                    if until is not None and until():
                        break
                    self._stopping.wait(TICK)
            finally:
                is_drained = self._stop()
                if restore is not None:
                    restore()
        if is_drained:
            return 0
        return LEFT_RUNNING if self.controls.is_stopped else 1

    def stop(self) -> None:
        """Begin to stop; thread-safe, returns at once."""
        self._stopping.set()

    def _start(self) -> None:
        self.ensure_topics()
        self._heartbeat.register()
        with self._lanes_lock:
            self._start_lanes(self.concurrency)
        for poller in self.pollers:
            poller.start()
        self._threads = [
            threading.Thread(target=self._listener.run, name="kjo-listen", daemon=True),
            *(
                threading.Thread(target=duty.run, name=f"kjo-{duty.name}", daemon=True)
                for duty in self._duties
            ),
        ]
        if self.is_relaying:
            self._threads.append(
                threading.Thread(target=self._relay.run, name="kjo-relay", daemon=True)
            )
        for thread in self._threads:
            thread.start()
        self._heartbeat.start()
        signals.send(signals.worker_started, sender=self.name, worker_id=str(self.id))

    def ensure_topics(self) -> None:
        """Create missing topics; a broker that is away is asked again with the next heartbeat, and
        holds up the start of queues that do not need it for a few seconds at most.

        :raises ImproperlyConfigured: a topic is missing and its ``auto_create`` is off; only while
            nothing runs yet, later it is an error that is told.
        """
        if self._has_topics:
            return
        ensure = topics.ensure_topics if self._lane_threads else topics.ensure_topics_soon
        try:
            for line in ensure([*self.queues, *self._published_only()]):
                logger.info(line)
            self._has_topics = True
            self._outages.note("topics", None)
        except (PublishError, TimeoutError) as error:
            self._outages.note("topics", f"Topics could not be checked yet: {error}")
        except ImproperlyConfigured as error:
            if not self._lane_threads:
                raise
            # It has begun, since the broker was away: its other topics are worth going on for.
            self._outages.note("topics", str(error))

    def _published_only(self) -> list[QueueConf]:
        """Return the queues this worker relays to and nobody here consumes."""
        conf, known = get_settings(), registry.queue_names()
        names = self._relay.queues if self.is_relaying else []
        queues = [conf.queue(name) for name in names if name in known]
        return [queue for queue in queues if not queue.consume]

    def _enter_thread(self) -> None:
        """Say whose thread this is, to the database and to log records."""
        worker_name.set(self.name)
        mark_sessions(self.leases.token)

    def _on_hung(self, thread_id: int) -> bool:
        """Give up a lane's thread and start another one in its place."""
        run = self._lane_runs.get(thread_id)
        hung = self.running.of(run.group.deliveries) if run is not None else []
        if not hung or self._stopping.is_set():
            return False
        run = self._lane_runs.pop(thread_id, None)
        if run is None:  # it has just ended
            return False
        for context, seconds, delivery in hung:
            told = "%s still runs after %.0f s, its timeout has no effect: its thread is given up"
            facts = facts_of(delivery, context.attempt)
            logger.error(told, delivery.kind, seconds, extra=facts)
            self.running.leave(context)
        with self._lanes_lock:
            self._lane_threads = [t for t in self._lane_threads if t.ident != thread_id]
            self._start_lanes(1, lambda: self._end_lane_run(run, hung, thread_id))
        return True

    def _end_lane_run(
        self,
        run: LaneRun,
        hung: Sequence[tuple[JobContext, float, Delivery]],
        thread_id: int,
    ) -> None:
        """End what a thread that was given up had begun; in the one that takes its place."""
        deferred: Any = run.group.deliveries
        try:
            for connection in run.connections:
                sever(connection)
            deferred = self._pipeline.abandon(run.group.deliveries, hung, thread_id)
        except Exception:
            logger.exception("A group of %d is run again", len(run.group.deliveries))
        finally:
            self.lanes.done(run.group, deferred)

    def _run_lane(self, begin: Callable[[], None] = lambda: None) -> None:
        self._enter_thread()
        scheduling = LaneScheduling()
        thread_id, own = threading.get_ident(), [connections[alias] for alias in connections]
        try:
            begin()
            while (group := self.lanes.take()) is not None:
                scheduling.suit(len(group.deliveries))
                deferred: Any = group.deliveries
                flying: set[Delivery] = set()
                self._lane_runs[thread_id] = LaneRun(group, own)
                try:
                    if group.mode is Mode.CONCURRENT:
                        deferred = self._pipeline.launch(group.deliveries, flying)
                    else:
                        deferred = self._pipeline.run(group.deliveries, group.mode)
                except RunAbandoned:
                    return
                except BaseException:
                    # Nothing of the group was acknowledged: it is tried again, and so is seen. A
                    # lane that ended here would take its place among the living with it.
                    logger.exception("A lane failed on a group of %d", len(group.deliveries))
                finally:
                    if self._lane_runs.pop(thread_id, None) is not None:
                        self.lanes.done(group, deferred, HELD_ELSEWHERE_DELAY, flying=flying)
        finally:
            self._watch.forget(thread_id)
            connections.close_all()

    def _stop(self) -> bool:
        grace = get_settings().shutdown_grace.total_seconds()
        self._stopping.set()
        for poller in self.pollers:
            poller.drain()
        self._relay.stop()
        for duty in self._duties:
            duty.stop()
        self._listener.stop()
        self.lanes.stop()
        is_drained = self.lanes.wait_for(None, grace)
        if not is_drained:
            logger.warning("Jobs still ran after %g s; they are handed back", grace)
            self._watch.abort_all()
            is_drained = self.lanes.wait_for(None, ABORT_WAIT)
        if not is_drained:
            self._abandon_lanes()
        deadline = time.monotonic() + (LEAVE_WAIT if is_drained else HASTY_WAIT)
        for poller in self.pollers:
            poller.leave()
        for poller in self.pollers:
            poller.thread.join(max(0.0, deadline - time.monotonic()))
        deadline = time.monotonic() + 5.0
        for thread in (*self._lane_threads, *self._threads):
            thread.join(max(0.0, deadline - time.monotonic()) if is_drained else 0.05)
        self._pipeline.close(5.0 if is_drained else 0.05)
        self._watch.stop()
        if is_drained:
            self._heartbeat.stop()
        else:
            # On SQLite a handler that still runs may keep everybody from writing.
            farewell = threading.Thread(target=self._stop_heartbeat, name="kjo-end", daemon=True)
            farewell.start()
            farewell.join(HASTY_WAIT)
        signals.send(signals.worker_stopped, sender=self.name, worker_id=str(self.id))
        if is_drained and self._owns_process:
            close_backends()
        return is_drained

    def _abandon_lanes(self) -> None:
        """Undo what jobs that still run have written, so that others can run them: on SQLite nobody
        could write before. What they still do has no effect."""
        for thread_id in list(self._lane_runs):
            run = self._lane_runs.pop(thread_id, None)
            if run is not None and run.group.mode is not Mode.CONCURRENT:
                self._watch.abandon(thread_id)
                for connection in run.connections:
                    sever(connection, terminates=False)

    def _stop_heartbeat(self) -> None:
        try:
            self._heartbeat.stop()
        finally:
            connections.close_all()

    # --- What lanes and pollers tell --------------------------------------------------------------

    def _on_outcomes(self, outcomes: Sequence[Outcome]) -> None:
        tell_waiters(outcomes)
        self.statistics.add(outcomes)
        with self._counting:
            self._settled += len(outcomes)
        if self._max_messages is not None and self._settled >= self._max_messages:
            self.stop()
        tell(outcomes)

    def _rest(self, outcome: Outcome) -> None:
        record = outcome.delivery.record
        partition = TopicPartition(record.topic, record.partition)
        seconds = outcome.pause_seconds or 0.0
        facts = facts_of(outcome.delivery, outcome.attempt)
        logger.warning("Pausing %s for %g s: %s", partition, seconds, outcome.error, extra=facts)
        self.lanes.hold(partition, seconds)
        for poller in self.pollers:
            if record.topic in poller.topics:
                poller.pause_for(partition, seconds)

    @property
    def last_error(self) -> str:
        """The outage or job error met last."""
        return self._outages.error or self.statistics.last_error

    @property
    def last_error_at(self) -> datetime | None:
        """When that was first met."""
        return self._outages.began_at or self.statistics.last_error_at

    # --- Draining ---------------------------------------------------------------------------------

    def is_drained(self) -> bool:
        """Return whether nothing is left that could start now: no record waits, no job is due.

        Retries and delayed jobs that are due later do not count. During an outage nobody knows, and
        the answer is no.
        """
        if self.lanes.outstanding:
            return False
        try:
            using = jobs_database()
            names = {queue.name for queue in self.queues}
            names.update(self._relay.queues if self.is_relaying else ())
            if Job.objects.using(using).unfinished_due().filter(queue__in=names).exists():
                return False
            is_drained = not any(waiting_records(self.queues))
        except (PublishError, DatabaseError, InterfaceError) as error:
            self._outages.note("drain", f"Whether all is done cannot be seen yet: {error}")
            drop_broken_connections()
            return False
        self._outages.note("drain", None)
        return is_drained
