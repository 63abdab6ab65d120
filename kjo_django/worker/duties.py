"""What a worker does beside running jobs: its duties, and the threads that take their steps.

A duty is an object with a ``step``. A worker's threads call the steps again and again; a test calls
them itself, in any order, on one thread and in virtual time. So a duty keeps no time of its own and
starts no thread.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

from django.core.exceptions import ImproperlyConfigured
from django.db import DatabaseError, InterfaceError, connections
from django.db.models import QuerySet

from kjo_django.clock import TOLERANCE
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import Listener
from kjo_django.engine.handler.connections import drop_broken_connections
from kjo_django.engine.poller import Poller
from kjo_django.enqueue.storing import LISTEN_AGAIN, topic_channel
from kjo_django.exceptions import CoordinationError, KjoError, PublishError
from kjo_django.limits.limiter import Limiter
from kjo_django.logs import get_logger
from kjo_django.models import MetricBucket, MetricRollup
from kjo_django.operations.maintenance import topics
from kjo_django.operations.maintenance.prune import prune_in_steps
from kjo_django.operations.maintenance.rescue import rescue
from kjo_django.operations.workflows import end_overdue
from kjo_django.runtime import Runtime, get_transport, set_database
from kjo_django.store.servers import leave_retired, watch_server
from kjo_django.values import LONGEST

logger = get_logger("kjo_django")

OUTAGES = (KjoError, DatabaseError, InterfaceError, OSError)
RETRY_AFTER = 1.0
"""Seconds until a duty whose step raised is asked again; its own times still hold."""


class Duty(Protocol):
    """Something a worker does again and again."""

    def step(self) -> float:
        """Do what is due now; return the seconds until something will be. A duty that has an event
        to wait for may wait for it within its step, until ``wake``."""
        ...

    def wake(self) -> None:
        """End a wait within ``step``; thread-safe. Nothing, for a duty that does not wait."""
        return

    def close(self) -> None:
        """Give back what it holds; called once, after the last step, by the thread of the steps."""
        return


class DutyThread(threading.Thread):
    """Takes the steps of some duties, until it is stopped.

    :param on_death: is called where it ends before, by what is no ``Exception``.
    :param on_thread: is called first in it.
    """

    def __init__(
        self,
        runtime: Runtime,
        name: str,
        duties: Sequence[Duty],
        on_death: Callable[[], None] = lambda: None,
        on_thread: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._on_death, self._on_thread = on_death, on_thread
        self._clock, self._database = runtime.clock, runtime.database
        self._duties, self._logged = duties, dict[Duty, tuple[str, float]]()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Let the thread end after the step it takes; thread-safe, returns at once."""
        self._stopping.set()
        for duty in self._duties:
            duty.wake()

    def run(self) -> None:
        """Take the steps."""
        set_database(self._database)
        watch_server(self._database)
        try:
            self._on_thread()
            while not self._stopping.is_set():
                pause = LONGEST.total_seconds()
                for duty in self._duties:
                    try:
                        pause = min(pause, duty.step())
                    except Exception as error:
                        # Whatever it is: nobody else would do this duty, or notice that it waits.
                        self._log(duty, error)
                        pause = min(pause, RETRY_AFTER)
                if pause > 0:
                    leave_retired(self._database)
                    self._clock.wait(self._stopping, pause)
            for duty in self._duties:
                try:
                    duty.close()
                except Exception as error:
                    self._log(duty, error)
        except BaseException:
            logger.exception("The thread %s has died", self.name)
            self._on_death()
        finally:
            connections.close_all()

    def _log(self, duty: Duty, error: Exception) -> None:
        """Log an error of a duty; of the same outage, which each step may meet, once a minute."""
        is_outage, now = isinstance(error, OUTAGES), self._clock.monotonic()
        what = f"{type(duty).__name__} failed, trying again: {error}"
        last, until = self._logged.get(duty, ("", now))
        if not is_outage or what != last or now >= until:
            self._logged[duty] = what, now + 60.0
            logger.error("%s", what, exc_info=not is_outage)
        drop_broken_connections()


class PeriodicDuty(Duty):
    """A duty that does its work in rounds.

    :param pause: seconds from the end of a round to the next one; a round may change it.
    :param first_after: seconds until the first round.
    """

    def __init__(self, runtime: Runtime, pause: float, *, first_after: float = 0.0) -> None:
        self._runtime = runtime
        self._clock = runtime.clock
        self.pause = pause
        self._due_at = self._clock.monotonic() + first_after

    def work(self) -> None:
        """Do a round. What an error keeps from being done is left to the next round."""
        raise NotImplementedError

    def step(self) -> float:
        """Do a round if one is due."""
        if self._clock.monotonic() >= self._due_at:
            try:
                self.work()
            finally:
                self._due_at = self._clock.monotonic() + self.pause
        return self._due_at - self._clock.monotonic()


class ClockCheck(PeriodicDuty):
    """Lets a process go by its database's clock where its host's is wrong, and tells so."""

    ahead = 0.0
    """Seconds by which the host's clock was ahead of the database's when it was compared last."""

    def __init__(self, runtime: Runtime) -> None:
        super().__init__(runtime, runtime.settings.heartbeat_interval.total_seconds())
        self._told: float | None = 0.0

    def work(self) -> None:
        """Compare the clocks, and log when the host's turns out to be wrong, or right again. Note
        how far away the database is."""
        ahead, took = self._clock.compare(self._runtime.store.server_time)
        self._runtime.group_budget.note_round_trip(took)
        if ahead is not None:
            self.ahead = ahead
            self._clock.follow(ahead)
        self._log(ahead)

    def _log(self, ahead: float | None) -> None:
        """Log what differs from what was logged last, which a clock that drifts does slowly."""
        told, database = self._told, self._runtime.database
        if ahead is None and told is not None:
            text = "Database %r takes over %.0f s to tell its time: this host's is not compared"
            logger.warning(text, database, TOLERANCE)
        elif ahead is None or (told is not None and abs(ahead - told) <= TOLERANCE):
            return
        elif abs(ahead) > TOLERANCE:
            logger.warning(
                "The clock of this host is %.1f s %s that of database %r. This process goes by the "
                "database's; what handlers and other programs read here is wrong.",
                abs(ahead),
                "ahead of" if ahead > 0 else "behind",
                database,
            )
        else:
            logger.info("The clock of this host agrees with that of database %r again", database)
        self._told = ahead


class LeasedDuty(PeriodicDuty):
    """A duty of every worker that a lease keeps all but one of them from. Should two of them do it
    all the same, nothing breaks.

    :param token: the worker's.
    """

    leases: Collection[str] = ()

    def __init__(self, runtime: Runtime, token: str, pause: float) -> None:
        super().__init__(runtime, pause, first_after=pause)
        self._token = token
        self._is_stopping = False

    @property
    def _names(self) -> dict[str, str]:
        """The leases by the names that they have for the workers of this database."""
        return {f"{name}{self._runtime.lease_suffix}": name for name in self.leases}

    @property
    def lease_seconds(self) -> float:
        """How long its leases live unless they are taken again."""
        return 3 * min(self.pause, LONGEST.total_seconds())

    def work_on(self, leases: list[str]) -> None:
        """Do a round for the leases that this worker has; without coordination, for all."""
        raise NotImplementedError

    def work(self) -> None:
        """Do a round if a lease is free."""
        if leases := self._take_leases():
            self.work_on(leases)

    def wake(self) -> None:
        """Let a round that is under way end early."""
        self._is_stopping = True

    def close(self) -> None:
        """Free the leases for the next worker."""
        try:
            self._runtime.coordination.release(list(self._names), self._token)
        except CoordinationError as error:
            logger.warning("Leases of %s expire by themselves: %s", type(self).__name__, error)

    def _take_leases(self) -> list[str]:
        names, ttl = list(self._names), timedelta(seconds=self.lease_seconds)
        try:
            claims = self._runtime.coordination.claim(names, self._token, ttl)
        except CoordinationError as error:
            logger.warning("%s works without a lease: %s", type(self).__name__, error)
            return list(self.leases)
        return [self._names[n] for n, each in zip(names, claims, strict=True) if each.acquired]


class Rescuer(LeasedDuty):
    """Hands over again queued jobs whose message is gone. Should two workers do so at once,
    conditional updates let one of them win."""

    leases = ("RESCUE",)

    def __init__(self, runtime: Runtime, token: str) -> None:
        # A third of what a job has to wait for a rescue.
        super().__init__(
            runtime, token, min(60.0, runtime.settings.rescue_after.total_seconds() / 3)
        )

    def work_on(self, leases: list[str]) -> None:
        """Rescue."""
        rescue()


class Pruner(LeasedDuty):
    """Deletes rows that are older than their retention, a chunk with each step, as often as
    ``KJO["PRUNE_INTERVAL"]`` says.

    Its lease lives as long as that interval, and so keeps other workers from a round of their own
    until the next one is due. Should two workers have one at once, each row is deleted by one.
    """

    leases = ("PRUNE",)
    FIRST_AFTER = 60.0
    """Seconds from the start of a worker, and from an error, to the next round: where workers are
    replaced every few minutes, rows are deleted, too."""
    LOOK = 300.0
    """Seconds between two looks whether the worker that has the lease has gone."""

    def __init__(self, runtime: Runtime, token: str, interval: timedelta) -> None:
        self._interval = interval.total_seconds()
        super().__init__(runtime, token, min(self.LOOK, self._interval))
        self._due_at = self._round_at = self._clock.monotonic() + min(self.FIRST_AFTER, self.pause)
        self._steps: Iterator[object] | None = None
        """Those left of the round that is under way."""

    @property
    def lease_seconds(self) -> float:
        """Until the next round is due."""
        return self._interval

    def work(self) -> None:
        """Begin a round if one is due, or keep the lease of the one that is under way."""
        if self._steps is not None:
            self._take_leases()
        elif self._clock.monotonic() >= self._round_at:
            super().work()
        ahead, most = self._round_at - self._clock.monotonic(), min(self.LOOK, self._interval)
        self.pause = ahead if 0 < ahead < most else most

    def work_on(self, leases: list[str]) -> None:
        """Begin a round."""
        self._round_at = self._clock.monotonic() + self._interval
        self._steps = prune_in_steps()

    def step(self) -> float:
        """Take the next step of a round, or begin one that is due. Until the next step as much time
        passes as this one took, unless another duty of the thread is due before."""
        pause = super().step()
        if self._steps is None:
            return pause
        steps, self._steps, began = self._steps, None, self._clock.monotonic()
        try:
            is_over = self._is_stopping or next(steps, None) is None
        except Exception:
            self._round_at = self._due_at = began + min(self.FIRST_AFTER, self._interval)
            raise
        if is_over:
            return pause
        self._steps = steps
        return self._clock.monotonic() - began


class WorkflowDeadlines(LeasedDuty):
    """Fails workflows that have not ended by their deadlines. Should two workers do so at once, the
    workflow's lock lets one of them win."""

    leases = ("WORKFLOW-DEADLINES",)
    PAUSE = 15.0
    """Seconds between two looks: a workflow is failed that much after its deadline at most."""

    def __init__(self, runtime: Runtime, token: str) -> None:
        super().__init__(runtime, token, self.PAUSE)

    def work_on(self, leases: list[str]) -> None:
        """End what is overdue."""
        end_overdue(self._clock.now())


class LimitDuty(LeasedDuty):
    """Releases jobs that wait for a limit and that no other job has released. While none waits, it
    looks seldom."""

    leases = ("LIMITS",)
    SOON, SELDOM = 1.0, 5.0

    def __init__(self, runtime: Runtime, token: str, limiter: Limiter) -> None:
        super().__init__(runtime, token, self.SOON)
        self._limiter = limiter

    def work(self) -> None:
        """Look, if any job waits; and tell of permits that no later call has told of."""
        self._limiter.report_permits()
        has_waiting = self._limiter.releaser.has_waiting()
        self.pause = self.SOON if has_waiting else self.SELDOM
        if has_waiting:
            super().work()

    def work_on(self, leases: list[str]) -> None:
        """Look at the heads of the lines."""
        self._limiter.releaser.look_after()


class LineDuty(Duty):
    """Releases jobs that wait for a limit, as those before them start and end in this worker."""

    KEPT_CONNECTED = 5.0
    """Seconds without anything to do after which its connection is closed: it would be one more for
    each worker."""

    def __init__(self, runtime: Runtime, limiter: Limiter) -> None:
        self._clock, self._database = runtime.clock, runtime.database
        self._releaser = limiter.releaser
        self._pause = LONGEST.total_seconds()

    def step(self) -> float:
        """Wait until there is something to do, and do it."""
        awake, pause = self._releaser.awake, self._pause
        self._pause = 0.0  # should this be refused
        kept = min(pause, self.KEPT_CONNECTED)
        if not self._clock.wait(awake, kept) and pause > kept:
            connections.close_all()
            self._clock.wait(awake, pause - kept)
        leave_retired(self._database)
        self._pause = self._releaser.step()
        return 0.0

    def wake(self) -> None:
        """End the wait, and soon the step."""
        self._releaser.stop()

    def close(self) -> None:
        """Do what is due."""
        self._releaser.close()


class LagRecorder(LeasedDuty):
    """Writes each queue's lag, group-wide, into the aggregates of now, every three heartbeats.

    For each queue one worker asks, and every worker writes the same row, so that screens may add
    rows up.
    """

    ASKING_SHARE = 20
    """Asking takes at most one part of so many of the time, however long the answers take. A
    question without an answer does not count: the lag after an outage is what everybody looks
    for."""

    def __init__(self, runtime: Runtime, token: str, queues: Sequence[QueueConf]) -> None:
        self._queues = {f"LAG:{queue.name}": queue for queue in queues}
        self.leases = self._queues.keys()
        self._shortest_pause = 3 * runtime.settings.heartbeat_interval.total_seconds()
        super().__init__(runtime, token, self._shortest_pause)

    def work_on(self, leases: list[str]) -> None:
        """Ask for the lag of each queue and write it down."""
        asked_for = 0.0
        unreachable: set[str] = set()
        for name in leases:
            queue = self._queues[name]
            if queue.transport in unreachable or self._is_stopping:
                continue
            began = self._clock.monotonic()
            try:
                lag = get_transport(queue.transport).lag(queue.topics, queue.consumer_group)
            except PublishError as error:
                unreachable.add(queue.transport)
                logger.debug("The lag of %s is not known: %s", queue.name, error)
                continue
            record_lag(self._runtime, queue.name, sum(lag.values()))
            asked_for += self._clock.monotonic() - began
        self.pause = max(self._shortest_pause, self.ASKING_SHARE * asked_for)


_LAG_NAMESPACE = uuid.UUID("5a0b0a52-6b1f-4b8e-9e55-2f1f3a8b9c11")


def record_lag(runtime: Runtime, queue: str, lag: int) -> None:
    """Write a queue's lag into its minute, and into the longer spans the minute is part of."""

    def write(rows: QuerySet[Any], **which: Any) -> None:
        which |= {"queue": queue, "handler": "", "worker_id": uuid.uuid5(_LAG_NAMESPACE, queue)}
        if not rows.filter(**which).update(lag=lag):
            # Of two who find no row one makes it, the other's figure is as good.
            runtime.store.insert_missing([rows.model(**which, lag=lag)])

    using = runtime.database
    minute = runtime.clock.now().replace(second=0, microsecond=0)
    write(MetricBucket.objects.using(using), minute=minute)
    for minutes in MetricRollup.LENGTHS:
        start = minute.replace(minute=minute.minute // minutes * minutes)
        write(MetricRollup.objects.using(using), minutes=minutes, minute=start)


class TopicCheck(PeriodicDuty):
    """Creates the missing topics of a worker's queues, also those that are deleted while it runs. A
    broker that is away is asked again with every heartbeat.

    :param on_error: called with what is wrong, and with None once it is not any more.
    """

    LOOK_AGAIN = 60.0
    """Seconds between two looks at topics that were there."""

    def __init__(
        self, runtime: Runtime, queues: Sequence[QueueConf], on_error: Callable[[str | None], None]
    ) -> None:
        self._soon = runtime.settings.heartbeat_interval.total_seconds()
        super().__init__(runtime, self._soon)
        self._queues = queues
        self._on_error = on_error
        self.are_there = False
        """Whether the topics were there, or were made, when the broker answered last."""

    def start(self) -> None:
        """Look before the worker begins, which a broker that is away holds up for a few seconds at
        most where other queues do not need it.

        :raises ImproperlyConfigured: a topic is missing and its ``auto_create`` is off.
        """
        if not self.are_there:
            self._ensure(topics.ensure_topics_soon)
            self._due_at = self._clock.monotonic() + self.pause

    def work(self) -> None:
        """Look again."""
        try:
            self._ensure(topics.ensure_topics)
        except ImproperlyConfigured as error:
            # The worker has begun; its other topics are worth going on for.
            self._on_error(str(error))

    def _ensure(self, ensure: Callable[[Sequence[QueueConf]], list[str]]) -> None:
        try:
            for line in ensure(self._queues):
                logger.info(line)
        except (PublishError, TimeoutError) as error:
            self.are_there, self.pause = False, self._soon
            self._on_error(f"Topics could not be checked yet: {error}")
        else:
            self.are_there, self.pause = True, self.LOOK_AGAIN
            self._on_error(None)


class PublishListener:
    """Wakes the pollers of transports that share the database when something was published."""

    LONGEST_WAIT = 60.0
    """Seconds of one wait; a notification and ``wake`` end it at once."""

    def __init__(self, runtime: Runtime, pollers: Sequence[Poller]) -> None:
        self._runtime = runtime
        self._pollers = [poller for poller in pollers if poller.needs_wakeup]
        self._channels = [topic_channel(topic) for p in self._pollers for topic in p.topics]
        self._listener: Listener | None = None
        self._has_complained = False

    @property
    def is_needed(self) -> bool:
        """Whether there is a poller to wake."""
        return bool(self._channels)

    def step(self) -> float:
        """Wait for one notification; while coordination is away, the pollers poll."""
        if self._listener is None:
            try:
                self._listener = self._runtime.coordination.listen(self._channels)
            except Exception as error:
                level = logging.DEBUG if self._has_complained else logging.WARNING
                logger.log(level, "This worker cannot be notified and polls: %s", error)
                self._has_complained = True
                return LISTEN_AGAIN
            if self._runtime.coordination.supports_wake_ups:
                self._listener.on_connection = self._let_pollers_rely
                self._let_pollers_rely(True)
        if self._listener.wait(self.LONGEST_WAIT):
            for poller in self._pollers:
                poller.wake()
        return 0.0

    def _let_pollers_rely(self, is_connected: bool) -> None:
        for poller in self._pollers:
            poller.rely_on_wake_ups(is_connected)

    def wake(self) -> None:
        """End the wait."""
        if self._listener is not None:
            self._listener.wake()

    def close(self) -> None:
        """Listen no longer."""
        if self._listener is not None:
            self._listener.close()
