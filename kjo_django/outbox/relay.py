"""The relay: hands committed jobs to transports that cannot join their transaction.

It reads the set of due rows (never from a position, so rows that are committed late are not passed
over), publishes a batch with every delivery report checked, and records where each went. Of a
backlog a batch holds rows of every queue that has any. No transaction is open while it sends. A
crash anywhere publishes again; the consumer absorbs duplicates. Rows of one key go out in the order
they are due, and since every relay publishes a prefix of them in that order, the first occurrences
keep it even when two relays overlap. A lease only keeps standby relays from doing the work twice.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from datetime import timedelta
from queue import SimpleQueue
from uuid import UUID

from django.db import DatabaseError, InterfaceError, connections

from kjo_django import registry
from kjo_django.clock import Clock
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import CircuitBreaker, Listener
from kjo_django.enqueue import storing
from kjo_django.enqueue.storing import LISTEN_AGAIN, RELAY_CHANNEL
from kjo_django.exceptions import CoordinationError, KjoError, PublishError
from kjo_django.ids import uuid7
from kjo_django.logs import get_logger
from kjo_django.models import NEVER
from kjo_django.outbox import unpublishable
from kjo_django.outbox.unpublishable import Refusal
from kjo_django.runtime import Runtime, current_runtime, get_transport, use_database
from kjo_django.store.rows import DueJob, Publication
from kjo_django.store.servers import mend_connection, watch_server
from kjo_django.transports.base import OutgoingRecord

logger = get_logger("kjo_django")

SOON = 0.035
"""Seconds after a batch in which the relay only listens. While one job follows the other nobody has
to ask what falls due later: every look for what is due finds it, so much late at most."""
ASK_OVERTAKEN = 0.2
"""Seconds between looks, while one queue has a backlog, for rows of others that are behind it;
ten times as long as a look takes where that is more."""
LONGEST_UNASKED = 1.0
"""Seconds between such looks, at most: so long a new job waits where the database is slow."""
STANDBY = 0.25
"""Seconds between looks at rows that are due and another relay's, in case that one died."""
LONGEST_BACKOFF = 30.0
"""Seconds, at most, until what was refused is sent again. The first time it is one second, each
time after that twice as long."""
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 5.0
"""Seconds until a relay that could not work tries again, and the most this grows to by doubling:
once the database is back, jobs wait no longer than that."""

LARGE = 1024
"""Bytes of a payload that is not kept until it is recorded that it was published."""
RECORD_AGAIN = 0.1
"""Seconds until a row that was locked is looked at again, though one batch follows the other: its
job's next attempt, or generation, waits for that."""
LEASE_TTL = timedelta(seconds=5)
"""So long the queues of a relay that was killed wait for another one."""
LONGEST_BATCH = timedelta(minutes=2)
"""A relay that is busy with one batch for longer, or that has not been able to record one for so
long, hangs: its leases are renewed no more."""

OUTAGES = (PublishError, CoordinationError, DatabaseError, InterfaceError)


class PublishBackoff(dict[str, tuple[float, float]]):
    """Queues, or topics, that take no records for a while: until when, and for how many seconds.

    A name that has not been tried for long is forgotten: there may be any number of topics.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def fail(self, name: str) -> float:
        """Leave it alone for twice as long as the last time; return the seconds."""
        delay = min(2 * self[name][1], LONGEST_BACKOFF) if name in self else 1.0
        self[name] = (self._clock.monotonic() + delay, delay)
        return delay

    def names(self) -> list[str]:
        """Return what is to be left alone now."""
        now = self._clock.monotonic()
        for name, (until, _) in list(self.items()):
            if until + LONGEST_BACKOFF < now:
                del self[name]
        return [name for name, (until, _) in self.items() if until > now]

    def seconds(self) -> float:
        """Return how long nothing is to be tried again; infinite, if nothing is left alone."""
        now = self._clock.monotonic()
        return min((until - now for until, _ in self.values() if until > now), default=math.inf)


def _urgency(job: DueJob) -> int:
    return job.priority or 0


class Relay:
    """Publishes due rows; any number may run, for each queue one at a time works.

    ``run`` calls ``step`` again and again; a test may call it in its place, at any time of a clock
    of its own.

    :param queues: names of the queues it looks after; None for all. Those on a transactional
        transport need no relay and are left out, as are those of other databases; ``queues`` tells
        what remains.
    :param runtime: what it works with; by default the process's.
    :param on_error: called with each outage, and with None at its end.
    """

    def __init__(
        self,
        queues: Sequence[str] | None = None,
        *,
        runtime: Runtime | None = None,
        on_error: Callable[[str | None], None] = lambda error: None,
    ) -> None:
        self.runtime = runtime or current_runtime()
        self._settings, self._clock = self.runtime.settings, self.runtime.clock
        names = queues if queues is not None else registry.queue_names()
        names = [name for name in names if self.runtime.holds(name)]
        # Records for topics of no declared queue are in nobody else's care.
        names = [*names, storing.OUTGOING]
        # On a transactional transport the message was written with the row.
        declared = [
            queue
            for queue in map(self._settings.queue, names)
            if not storing.is_transactional(queue, self.runtime.database)
        ]
        self._confs = {queue.name: queue for queue in declared}
        self.queues = [queue.name for queue in declared]
        self._levelled = {queue.name: queue for queue in declared if len(queue.levels) > 1}
        """The queues with levels of priority."""
        self._on_error = on_error
        self._leases = RelayLeases(self.runtime)
        self._publications = Publications(self.runtime)
        self._queue_backoff = PublishBackoff(self._clock)
        self._topic_backoff = PublishBackoff(self._clock)
        self._stopping = threading.Event()
        self._listener: Listener | None = None
        self._listen_at = 0.0
        self._is_called = False
        self._failing_since: float | None = None
        self._failed_until, self._failure_delay = 0.0, FIRST_PAUSE
        self._has_told_of_outage = False
        self._ask_overtaken_at = 0.0
        self._has_backlog = False
        """Whether the last batch was full."""
        self.published_count = 0

    # --- One batch --------------------------------------------------------------------------------

    def publish_due(self, queues: Collection[str] | None = None) -> int:
        """Publish one batch of due rows and record it; return how many rows were due.

        After a full batch the caller publishes the next at once; on PostgreSQL the full one is
        recorded meanwhile.

        :param queues: some of those it looks after; all that take records if not given.
        """
        wanted = self._awake() if queues is None else queues
        most, most_bytes = self._settings.relay_batch_size, self._settings.relay_batch_bytes
        unrecorded = self._publications.unrecorded
        topics = self._topic_backoff.names() if self._topic_backoff else []
        jobs = self.runtime.store.due_jobs(wanted, most, unrecorded, topics, most_bytes)
        is_full = len(jobs) >= most or sum(len(job.payload) for job in jobs) >= most_bytes
        self._has_backlog, record = is_full, self._publications.record
        if is_full:
            jobs, record = self._with_overtaken(jobs, wanted), self._publications.begin
        elif unrecorded:
            self._publications.finish()
        by_queue: dict[str, list[DueJob]] = {}
        for job in jobs:
            by_queue.setdefault(job.queue, []).append(job)
        errors: list[Exception] = []
        left = deque(by_queue.items())
        # It may have been delayed since it read them, and another relay publish them by then.
        while left and self._clock.monotonic() < self._leases.valid_until:
            name, due = left.popleft()
            if name in self._levelled:
                due.sort(key=_urgency, reverse=True)
            try:
                self._publish(self._confs[name], due, record)
            except (DatabaseError, InterfaceError):
                raise
            except Exception as error:
                # Its rows are the oldest and will come first each time: those of others must not
                # wait for whatever is wrong with its transport.
                self._queue_backoff.fail(name)
                errors.append(error)
        if errors:
            raise errors[0]
        return len(jobs)

    def _awake(self) -> list[str]:
        failing = self._queue_backoff.names()
        return [queue for queue in self.queues if queue not in failing]

    def _with_overtaken(self, jobs: list[DueJob], queues: Collection[str]) -> list[DueJob]:
        """Return the batch with rows of queues, and of levels of priority, that have few in it, or
        none: the backlog of one must not keep another's new job waiting until it is worked off.

        Each is asked for by itself, so this is done a few times a second only, as long as nothing
        is found.
        """
        began = self._clock.monotonic()
        if began < self._ask_overtaken_at:
            return jobs
        parts = [(name, level) for name in queues for level in self._confs[name].levels]
        if len(parts) < 2:
            return jobs
        overtaken = self._overtaken(jobs, parts)
        if not overtaken:
            now = self._clock.monotonic()
            pause = min(10 * (now - began), LONGEST_UNASKED)
            self._ask_overtaken_at = now + max(pause, ASK_OVERTAKEN)
            return jobs
        first = [job for found in overtaken.values() for job in found]
        return first + [job for job in jobs if self._part_of(job) not in overtaken]

    def _overtaken(
        self, jobs: Sequence[DueJob], parts: Sequence[tuple[str, int]]
    ) -> dict[tuple[str, int], list[DueJob]]:
        """Return the rows of those parts that have less than their share in a batch, and more that
        are due.

        :param parts: queues, each with a level of priority.
        """
        share = max(1, self._settings.relay_batch_size // len(parts))
        share_bytes = max(1, self._settings.relay_batch_bytes // len(parts))
        counts = Counter(map(self._part_of, jobs))
        sizes: Counter[tuple[str, int]] = Counter()
        for job in jobs:
            sizes[self._part_of(job)] += len(job.payload)
        unrecorded, topics = self._publications.unrecorded, self._topic_backoff.names()
        overtaken = {}
        for part in parts:
            if counts[part] >= share or sizes[part] >= share_bytes:
                continue
            queue = self._levelled.get(part[0])
            of_level = queue.priorities_of(part[1]) if queue is not None else None
            found = self.runtime.store.due_jobs_of(
                part[0], share, unrecorded, topics, share_bytes, of_level
            )
            if len(found) > counts[part]:
                overtaken[part] = found
        return overtaken

    def _part_of(self, job: DueJob) -> tuple[str, int]:
        """Return a job's queue and its level of priority there."""
        queue = self._levelled.get(job.queue)
        return job.queue, 0 if queue is None else queue.level_of(job.priority)

    def _publish(
        self,
        queue: QueueConf,
        jobs: Sequence[DueJob],
        record: Callable[[Sequence[Publication]], None],
    ) -> None:
        """Publish rows of one queue, record where they went, and what was refused for good."""
        made: list[tuple[DueJob, OutgoingRecord]] = []
        refused: list[Refusal] = []
        for job in jobs:
            try:
                made.append((job, storing.record_of(job, queue, service=self.runtime.service)))
            except Exception as error:
                # One row nobody can send must not hold up the others of its batch for ever.
                message = "The message of job %s cannot be made"
                logger.exception(message, job.id, extra=job.log_facts)
                refused.append(Refusal.of(job, error))
        records = [record for _, record in made]
        transport = get_transport(queue.transport)
        answers = storing.publish(transport, records) if made else []
        if transport.capabilities.transactional:
            storing.wake_consumers(transport, records)
        accepted: list[Publication] = []
        for (job, sent), answer in zip(made, answers, strict=True):
            if answer.error is None:
                kept = job if len(job.payload) <= LARGE else job._replace(payload=b"")
                accepted.append(Publication(kept, sent.topic, answer.partition, answer.offset))
            else:
                refused.append(Refusal(job, sent, answer))
        record(accepted)
        self.published_count += len(accepted)
        if refused or self._has_told_of_outage or self._queue_backoff or self._topic_backoff:
            self._note_refusals(queue, accepted, refused)

    def _note_refusals(
        self, queue: QueueConf, accepted: Sequence[Publication], refused: Sequence[Refusal]
    ) -> None:
        """Tell of refusals, once, and of their end; fail what is refused for good, and leave alone
        for a while what takes nothing."""
        if refused:
            self._report(refused[0].answer.error)
            unpublishable.fail(self.runtime, queue, refused)
        if refused or self._queue_backoff or self._topic_backoff:
            self._back_off(queue.name, accepted, refused)
        if not refused:
            self._report(None)

    def _report(self, error: str | None) -> None:
        """Tell of an outage, or of its end: what one queue is refused does not end because another
        one's records are taken."""
        is_over = error is None and not self._queue_backoff and not self._topic_backoff
        if error is not None or (is_over and self._has_told_of_outage):
            self._has_told_of_outage = error is not None
            self._on_error(error)

    def _back_off(
        self, queue: str, accepted: Sequence[Publication], refused: Sequence[Refusal]
    ) -> None:
        """Leave a queue alone whose records are not taken for reasons that pass; of records for
        many topics only those that take none, if others do or the topic is the reason.

        The rows stay as they are: delayed one by one, they would be overtaken by later ones of
        their keys.
        """
        backoff, what, of_topics = self._queue_backoff, "queue", False
        if queue == storing.OUTGOING:
            of_topics = bool(accepted) or all(each.is_of_topic for each in refused)
        if of_topics:
            self._queue_backoff.pop(queue, None)
            backoff, what = self._topic_backoff, "topic"
        errors: dict[str, list[str | None]] = {}
        for one in accepted:
            errors.setdefault(one.job.destination if of_topics else queue, [])
        for each in refused:
            of_it = errors.setdefault(each.job.destination if of_topics else queue, [])
            of_it += [] if each.answer.is_final else [each.answer.error]
        for name, of_it in errors.items():
            if not of_it:
                backoff.pop(name, None)
                continue
            delay = backoff.fail(name)
            message = "%d messages of %s %s were not taken, trying again in %.0f s: %s"
            facts = {"queue": queue}
            logger.error(message, len(of_it), what, name, delay, of_it[0], extra=facts)

    # --- Once -------------------------------------------------------------------------------------

    def publish_all(self) -> list[str]:
        """Publish everything that is due, under the leases of its queues, and give them back.

        What another relay holds is that one's to publish. It is waited for as long as the lease of
        one that died lives.

        :returns: queues of which something is due that another relay did not publish meanwhile.
        """
        give_up_at = self._clock.monotonic() + LEASE_TTL.total_seconds() + STANDBY
        try:
            with self._leases.renewed():
                while True:
                    mine = self._leases.take(self._awake())
                    self._leases.busy_since = self._clock.monotonic()
                    if mine and self.publish_due(mine):
                        continue
                    self._leases.busy_since = None
                    unrecorded, topics = self._publications.unrecorded, self._topic_backoff.names()
                    left = [
                        queue
                        for queue in sorted(set(self._awake()) - set(mine))
                        if self.runtime.store.due_jobs_of(queue, 1, unrecorded, topics)
                    ]
                    if not left or self._clock.monotonic() >= give_up_at:
                        return left
                    self._clock.wait(self._stopping, STANDBY)
        finally:
            self._publications.record_missing()
            self._leases.release(self.queues)

    # --- The loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Publish until ``stop``; outages are waited out. While coordination is away, and nobody
        can wake it, the relay polls."""
        with use_database(self.runtime.database):
            watch_server(self.runtime.database)
            try:
                with self._leases.renewed():
                    self._publish_until_stopped()
            finally:
                self.close()

    def _publish_until_stopped(self) -> None:
        while not self._stopping.is_set():
            if self._listener is None and self._clock.monotonic() >= self._listen_at:
                self._listen()
            delay = self.step()
            if delay <= 0:
                continue
            if self._listener is None:
                self._clock.wait(self._stopping, min(delay, LISTEN_AGAIN))
            elif self._listener.wait(delay):
                self._is_called = True

    def call(self) -> None:
        """Let the next ``step`` look for due rows at once: a transaction that stored some has
        committed."""
        self._is_called = True

    def step(self) -> float:
        """Publish a batch of what is due, or learn when something will be; raises nothing.

        Called, it looks for the rows at once: every read before that is time somebody's job waits.
        Otherwise a read comes first: an idle relay, or one on standby, writes nothing.

        :returns: seconds until the next step is wanted, or until ``call``; 0 if it is at once.
        """
        began = self._clock.monotonic()
        if began < self._failed_until:
            return self._failed_until - began
        try:
            was_called, self._is_called = self._is_called, False
            longest, delay = self._settings.poll_interval.total_seconds(), 0.0
            awake, topics = self.queues, list[str]()
            if self._queue_backoff or self._topic_backoff:
                awake, topics = self._awake(), self._topic_backoff.names()
                longest = min(longest, self._queue_backoff.seconds(), self._topic_backoff.seconds())
            if not was_called:
                if self._publications.unrecorded:
                    self._publications.record_missing()
                    # As long as another relay has no reason to publish them again.
                    self._leases.take(awake)
                unrecorded = self._publications.unrecorded
                next_at = self.runtime.store.next_due(awake, unrecorded, topics) or NEVER
                delay = min((next_at - self._clock.now()).total_seconds(), longest)
            if delay <= 0:
                mine = self._leases.take(awake)
                self._leases.busy_since = self._clock.monotonic()
                count = self.publish_due(mine) if mine else 0
                delay = SOON
                if not count or self._has_backlog or self._publications.unrecorded:
                    delay = self._record_and_delay(count, was_called)
        except Exception as error:
            return self._pause_after(error, began)
        if self._failing_since is not None:
            self._report(None)
        self._failure_delay, self._failing_since = FIRST_PAUSE, None
        self._leases.busy_since = None
        return delay

    def _record_and_delay(self, count: int, was_called: bool) -> float:
        """Record what a step has left unrecorded; return the seconds until the next step.

        :param count: how many rows were due.
        :param was_called: the step has looked for them without asking when the first is due.
        """
        if self._publications.unrecorded:
            self._publications.record_missing(after=RECORD_AGAIN)
        if count and self._has_backlog:
            self._is_called = True
            return 0.0
        if count:
            return SOON
        # Called for a job that is due later, or for one of another relay's.
        return 0.0 if was_called else min(STANDBY, self._settings.poll_interval.total_seconds())

    def _pause_after(self, error: Exception, began: float) -> float:
        """Let no step do anything for a while after an error, whatever it is: a relay that dies of
        it leaves every later job unpublished. Returns the seconds.

        :param began: when the step that met it began (monotonic).
        """
        delay = self._failure_delay
        message = "The relay cannot work, trying again in %.1f s: %s"
        logger.error(message, delay, error, exc_info=not isinstance(error, OUTAGES))
        self._report(str(error))
        mend_connection(self.runtime.database)
        self._failed_until = self._clock.monotonic() + delay
        self._failure_delay, self._is_called = min(delay * 2, LONGEST_PAUSE), False
        if self._failing_since is None:
            self._failing_since = began
        # Another relay would publish again what this one has yet to record.
        has_unrecorded = bool(self._publications.unrecorded)
        self._leases.busy_since = self._failing_since if has_unrecorded else None
        return delay

    def _listen(self) -> None:
        try:
            self._listener = self.runtime.coordination.listen([RELAY_CHANNEL])
            if self._stopping.is_set():  # since it began to connect: stop() had nothing to wake
                self._listener.wake()
        except Exception as error:
            level = logging.DEBUG if self._listen_at else logging.WARNING
            logger.log(level, "The relay cannot be notified and polls: %s", error)
        self._listen_at = self._clock.monotonic() + LISTEN_AGAIN

    def stop(self) -> None:
        """Make ``run`` return after the batch at hand; thread-safe."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.wake()

    def close(self) -> None:
        """Record what is left to record, give the leases back and close the connections."""
        try:
            # Before its leases are free, or another relay publishes them again.
            self._publications.record_missing()
        except (DatabaseError, InterfaceError) as error:
            count = len(self._publications.unrecorded)
            logger.warning("%d messages may be sent twice: %s", count, error)
        try:
            if self._listener is not None:
                self._listener.close()
        except KjoError as error:
            logger.warning("The relay's listener could not be closed: %s", error)
        self._leases.release(self.queues)
        connections.close_all()


# --- Recording where messages went ----------------------------------------------------------------


_Call = tuple[Future[set[UUID]], Callable[[], set[UUID]]]


class Publications:
    """What one relay has published, until the database knows of it.

    A consumer that was quicker has the row locked for as long as its job runs, and the relay waits
    for no handler; or the database is away. What could not be recorded must not be published again
    meanwhile: who reads records for others may not know a second copy for one.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self.unrecorded: dict[UUID, Publication] = {}
        """By its job: what has been published though the job's row does not say so."""
        self._tried_at = 0.0
        self._calls: SimpleQueue[_Call | None] | None = None
        """What a thread of its own, which there is only in a backlog, does one after the other."""
        self._begun: tuple[Sequence[Publication], Future[set[UUID]]] | None = None

    def record(self, published: Sequence[Publication]) -> None:
        """Record where messages went, as far as their rows are free.

        :raises DatabaseError: nothing, or not all, could be recorded; ``record_missing`` tries it
            again.
        """
        store, now = self._runtime.store, self._runtime.clock.now()
        if not self.unrecorded:
            self._tried_at = self._runtime.clock.monotonic()
        self.unrecorded.update((one.job.id, one) for one in published)
        jobs = [one for one in published if not one.job.destination]
        locked = store.record_published(jobs, now) if jobs else set()
        if len(jobs) < len(published):
            records = [one for one in published if one.job.destination]
            storing.record_forwarded(store, records, now)
        for one in published:
            if one.job.id not in locked:
                del self.unrecorded[one.job.id]

    def begin(self, published: Sequence[Publication]) -> None:
        """Record where the messages of a batch went while the caller sends the next; ``finish``
        waits for it. One batch at a time is recorded so.

        Only PostgreSQL has two writers that do not stand in each other's way; elsewhere it is done
        at once. So are records for others, since who reads them may not know a second copy.

        :raises DatabaseError: as ``record``; also for the batch begun before.
        """
        self.unrecorded.update((one.job.id, one) for one in published)
        self._wait()
        store = self._runtime.store
        jobs = [one for one in published if not one.job.destination]
        is_beside = store.has_independent_writers and not connections[store.alias].in_atomic_block
        if not is_beside or not jobs:
            self.record(published)
            return
        if self._calls is None:
            self._calls = SimpleQueue()
            # A daemon: one that hangs in a database that is frozen must not keep the process from
            # ending.
            threading.Thread(
                target=_run_calls, args=(self._calls,), name="kjo-relay-records", daemon=True
            ).start()
        write = functools.partial(store.record_published, jobs, self._runtime.clock.now())
        self._begun = jobs, Future()
        self._calls.put((self._begun[1], write))
        self.record([one for one in published if one.job.destination])

    def finish(self) -> None:
        """Wait for what was begun, and end the thread.

        :raises DatabaseError: it could not be recorded; ``record_missing`` tries it again.
        """
        calls, self._calls = self._calls, None
        if calls is not None:
            calls.put(None)
        self._wait()

    def record_missing(self, after: float | None = None) -> None:
        """Record what is not recorded and still has to be, as far as its rows are free.

        :param after: only if the last try was so many seconds ago, and not for a batch that is
            being recorded.
        """
        if after is not None:
            begun = len(self._begun[0]) if self._begun is not None else 0
            waited = self._runtime.clock.monotonic() - self._tried_at
            if len(self.unrecorded) <= begun or waited <= after:
                return
        if self._calls is not None or self._begun is not None:
            self.finish()
        if not self.unrecorded:
            return
        # A job that waited for a limit meanwhile is due at another moment: what was published
        # before is not the message that it waits for now.
        waiting = self._runtime.store.awaiting_publish(self.unrecorded)
        due = [
            one
            for one in self.unrecorded.values()
            if (one.job.id, one.job.generation, one.job.attempts, one.job.available_at) in waiting
        ]
        # All others have moved on, or are gone.
        self.unrecorded = {one.job.id: one for one in due}
        self._tried_at = self._runtime.clock.monotonic()
        if due:
            self.record(due)

    def _wait(self) -> None:
        begun, self._begun = self._begun, None
        if begun is not None:
            jobs, locked = begun[0], begun[1].result()
            for one in jobs:
                if one.job.id not in locked:
                    del self.unrecorded[one.job.id]


def _run_calls(calls: SimpleQueue[_Call | None]) -> None:
    """Run calls, in a thread with a database connection of its own, until None comes."""
    while (task := calls.get()) is not None:
        future, call = task
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
            # Whatever is wrong with its connection, the next call has a new one.
            _close_connections()
    _close_connections()


def _close_connections() -> None:
    # One that cannot even be closed is not worth a thread that others wait for.
    with suppress(DatabaseError, InterfaceError):
        connections.close_all()


# --- Leases: for each queue one relay publishes, the others stand by ------------------------------


def lease_of(queue: str) -> str:
    """Return the lease a relay holds while it publishes a queue's jobs."""
    return f"RELAY:{queue}"


class RelayLeases:
    """The leases of one relay, one for each queue: relays that look after different queues must not
    wait for one another.

    They only keep relays from doing the work twice. Without coordination every relay works.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._clock, self._coordination = runtime.clock, runtime.coordination
        self._token = uuid7().hex
        self._owned: frozenset[str] = frozenset()
        self._sure_until = 0.0
        self._breaker = CircuitBreaker(self._clock)
        self.valid_until = math.inf
        """When the leases lapse unless they are renewed; never, where there is no coordination."""
        self.busy_since: float | None = None
        """Since when the relay does something between two calls of ``take``, if it does: what it
        holds is renewed meanwhile."""

    def _name(self, queue: str) -> str:
        # Each database has records for topics of no declared queue, and a relay for them.
        suffix = self._runtime.lease_suffix if queue == storing.OUTGOING else ""
        return f"{lease_of(queue)}{suffix}"

    def take(self, queues: Sequence[str]) -> list[str]:
        """Take or renew the leases of these queues; return the queues the relay may publish now.

        One it has just taken is not asked for again for a third of its life.
        """
        began = self._clock.monotonic()
        if began < self._sure_until and self._owned.issuperset(queues):
            return list(queues)
        names = {self._name(queue): queue for queue in queues}
        self._owned, self.valid_until = frozenset(), math.inf
        if self._breaker.is_open():
            return list(queues)
        try:
            claims = self._coordination.claim(list(names), self._token, LEASE_TTL)
        except CoordinationError as error:
            self._breaker.record_failure(began)
            logger.warning("Relaying without a lease: %s", error)
            return list(queues)
        self._breaker.record_success()
        mine = [names[name] for name, claim in zip(names, claims, strict=True) if claim.acquired]
        self._owned = frozenset(mine)
        self._sure_until = began + LEASE_TTL.total_seconds() / 3
        self.valid_until = began + LEASE_TTL.total_seconds()
        return mine

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew what is owned, by a thread of its own, whenever the relay is busy.

        A broker that is slow keeps a batch for longer than a lease lives. Every other relay would
        take the queue then, and send the broker the same rows once more.
        """
        ended = threading.Event()
        thread = threading.Thread(
            target=self._renew_until, args=(ended,), name="kjo-relay-leases", daemon=True
        )
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(1.0)

    def _renew_until(self, ended: threading.Event) -> None:
        try:
            while not ended.wait(LEASE_TTL.total_seconds() / 3):
                self.renew()
        finally:
            connections.close_all()

    def renew(self) -> None:
        """Renew what is owned, if the relay is busy and does not hang. What is lost meanwhile
        lapses."""
        began, since, owned = self._clock.monotonic(), self.busy_since, self._owned
        if since is None or not owned or began - since > LONGEST_BATCH.total_seconds():
            return
        try:
            names = [self._name(queue) for queue in owned]
            is_renewed = all(self._coordination.renew(names, self._token, LEASE_TTL))
        except Exception as error:
            # Another relay may take them, and send what is sent here once more.
            logger.warning("The relay's leases could not be renewed: %s", error)
            return
        if owned is self._owned:
            if is_renewed:
                self.valid_until = began + LEASE_TTL.total_seconds()
            else:
                self.valid_until = self._sure_until = began

    def release(self, queues: Collection[str]) -> None:
        """Give the leases of these queues back."""
        self._owned, self._sure_until, self.valid_until = frozenset(), 0.0, math.inf
        try:
            self._coordination.release([self._name(queue) for queue in queues], self._token)
        except KjoError as error:
            logger.warning("The relay's leases expire by themselves: %s", error)
