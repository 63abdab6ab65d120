"""The relay: hands committed jobs to transports that cannot join their transaction.

It reads the set of due rows (never from a position, so rows that are committed late are not passed
over), publishes a batch with every delivery report checked, and records where each went. Of a
backlog a batch holds rows of every queue that has any. No transaction is open while it sends. A
crash anywhere publishes again; the consumer absorbs duplicates. Rows of one key go out in the order
they are due, and since every relay publishes a prefix of them in that order, the first occurrences
keep it even when two relays overlap. A lease only keeps standby relays from doing the work twice.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from django.db import DatabaseError, InterfaceError, connections

from kjo_django import registry
from kjo_django.clock import Clock
from kjo_django.conf import QueueConf
from kjo_django.coordination.base import Listener
from kjo_django.enqueue import storing
from kjo_django.enqueue.storing import LISTEN_AGAIN, RELAY_CHANNEL
from kjo_django.exceptions import CoordinationError, KjoError, PublishError
from kjo_django.outbox import unpublishable
from kjo_django.outbox.publications import Publications
from kjo_django.outbox.relay_leases import LEASE_TTL, RelayLeases
from kjo_django.runtime import Runtime, current_runtime, get_transport
from kjo_django.store.rows import DueJob, Publication
from kjo_django.transports.base import OutgoingRecord, Published

logger = logging.getLogger("kjo_django")

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
"""Seconds, at most, until what failed is tried again. The first time it is one second, each time
after that twice as long."""

OUTAGES = (PublishError, CoordinationError, DatabaseError, InterfaceError)


class PublishBackoff:
    """Queues, or topics, that take no records for a while, and until when they are left alone.

    A name that has not been tried for long is forgotten: there may be any number of topics.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._until: dict[str, tuple[float, float]] = {}

    def fail(self, name: str) -> float:
        """Leave it alone for twice as long as the last time; return the seconds."""
        delay = min(2 * self._until[name][1], LONGEST_BACKOFF) if name in self._until else 1.0
        self._until[name] = (self._clock.monotonic() + delay, delay)
        return delay

    def succeed(self, name: str) -> None:
        """Forget that it ever failed: its records are taken."""
        self._until.pop(name, None)

    def names(self) -> list[str]:
        """Return what is to be left alone now."""
        if not self._until:
            return []
        now = self._clock.monotonic()
        self._until = {
            name: (until, delay)
            for name, (until, delay) in self._until.items()
            if until + LONGEST_BACKOFF >= now
        }
        return [name for name, (until, _) in self._until.items() if until > now]


class Relay:
    """Publishes due rows; any number may run, for each queue one at a time works.

    ``run`` calls ``step`` again and again; a test may call it in its place, at any time of a clock
    of its own.

    :param queues: names of the queues it looks after; None for all. Those on a transactional
        transport need no relay and are left out; ``queues`` tells what remains.
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
        self._runtime = runtime or current_runtime()
        self._settings, self._clock = self._runtime.settings, self._runtime.clock
        names = queues if queues is not None else registry.queue_names()
        # Records for topics of no declared queue are in nobody else's care.
        names = [*names, storing.OUTGOING]
        # On a transactional transport the message was written with the row.
        self.queues = [n for n in names if not storing.is_transactional(self._settings.queue(n))]
        self._on_error = on_error
        self._leases = RelayLeases(self._runtime)
        self._publications = Publications(self._runtime)
        self._queue_backoff = PublishBackoff(self._clock)
        self._topic_backoff = PublishBackoff(self._clock)
        self._stopping = threading.Event()
        self._listener: Listener | None = None
        self._listen_at = 0.0
        self._is_called = False
        self._failed_until, self._failure_delay = 0.0, 1.0
        self._ask_overtaken_at = 0.0
        self.published_count = 0

    # --- One batch --------------------------------------------------------------------------------

    def publish_due(self, queues: Collection[str] | None = None) -> int:
        """Publish one batch of due rows and record it; return how many rows were due.

        After a full batch the caller publishes the next at once; on PostgreSQL the full one is
        recorded meanwhile.

        :param queues: only those of these; of all it looks after that take records if not given.
        """
        wanted = self._awake() if queues is None else queues
        most = self._settings.relay_batch_size
        unrecorded, topics = self._publications.unrecorded, self._topic_backoff.names()
        jobs = self._runtime.store.due_jobs(wanted, most, unrecorded, topics)
        is_full = len(jobs) >= most
        if is_full:
            jobs = self._with_overtaken(jobs, wanted, most)
        record = self._publications.begin if is_full else self._publications.record
        if not is_full and self._publications.unrecorded:
            self._publications.finish()
        failed: Exception | None = None
        for name in dict.fromkeys(job.queue for job in jobs):
            try:
                due = [job for job in jobs if job.queue == name]
                self._publish(self._settings.queue(name), due, record)
            except (DatabaseError, InterfaceError):
                raise
            except Exception as error:
                # Its rows are the oldest and will come first each time: those of others must not
                # wait for whatever is wrong with its transport.
                self._queue_backoff.fail(name)
                failed = failed or error
        if failed is not None:
            raise failed
        return len(jobs)

    def _awake(self) -> list[str]:
        failing = self._queue_backoff.names()
        return [queue for queue in self.queues if queue not in failing]

    def _with_overtaken(
        self, jobs: list[DueJob], queues: Collection[str], most: int
    ) -> list[DueJob]:
        """Return the batch with rows of queues that have few in it, or none: the backlog of one
        queue must not keep another's new job waiting until it is worked off.

        Each queue is asked for by itself, so this is done a few times a second only, as long as
        nothing is found.
        """
        began = self._clock.monotonic()
        if began < self._ask_overtaken_at or len(queues) < 2:
            return jobs
        share = max(1, most // len(queues))
        counts = Counter(job.queue for job in jobs)
        unrecorded, topics = self._publications.unrecorded, self._topic_backoff.names()
        overtaken: dict[str, list[DueJob]] = {}
        for queue in queues:
            if counts[queue] < share:
                found = self._runtime.store.due_jobs_of(queue, share, unrecorded, topics)
                if len(found) > counts[queue]:
                    overtaken[queue] = found
        if not overtaken:
            now = self._clock.monotonic()
            pause = min(10 * (now - began), LONGEST_UNASKED)
            self._ask_overtaken_at = now + max(pause, ASK_OVERTAKEN)
            return jobs
        first = [job for found in overtaken.values() for job in found]
        return first + [job for job in jobs if job.queue not in overtaken]

    def _publish(
        self,
        queue: QueueConf,
        jobs: Sequence[DueJob],
        record: Callable[[Sequence[Publication]], None],
    ) -> None:
        """Publish rows of one queue, record where they went, and what was refused for good."""
        made = [self._record_or_error(job, queue) for job in jobs]
        records = [one for one in made if isinstance(one, OutgoingRecord)]
        answered = iter(storing.publish(get_transport(queue.transport), records) if records else ())
        answers = [
            next(answered) if isinstance(one, OutgoingRecord) else unpublishable.refusal_of(one)
            for one in made
        ]
        accepted = [
            Publication(job, queue.topic, answer.partition, answer.offset)
            for job, answer in zip(jobs, answers, strict=True)
            if answer.error is None
        ]
        record(accepted)
        self.published_count += len(accepted)
        self._on_error(next((each.error for each in answers if each.error is not None), None))
        if len(accepted) < len(jobs):
            unpublishable.fail(self._runtime, queue, jobs, made, answers)
        self._back_off(queue.name, jobs, answers)

    def _record_or_error(self, job: DueJob, queue: QueueConf) -> OutgoingRecord | Exception:
        """One row nobody can send must not hold up the others of its batch for ever."""
        try:
            return storing.record_of(job, queue, service=self._runtime.service)
        except Exception as error:
            logger.exception("The message of job %s cannot be made", job.id, extra=job.log_facts)
            return error

    def _back_off(self, queue: str, jobs: Sequence[DueJob], answers: Sequence[Published]) -> None:
        """Leave a queue alone whose records are not taken for reasons that pass; of records for
        many topics only those that take none, if others do or the topic is the reason.

        The rows stay as they are: delayed one by one, they would be overtaken by later ones of
        their keys.
        """
        of_topics = queue == storing.OUTGOING and (
            any(answer.error is None for answer in answers)
            or all(answer.is_topics or answer.is_final for answer in answers)
        )
        backoff, what = (
            (self._topic_backoff, "topic") if of_topics else (self._queue_backoff, "queue")
        )
        if of_topics:
            self._queue_backoff.succeed(queue)
        errors: dict[str, list[str]] = {}
        for job, answer in zip(jobs, answers, strict=True):
            of_it = errors.setdefault(job.destination if of_topics else queue, [])
            if answer.error is not None and not answer.is_final:
                of_it.append(answer.error)
        for name, of_it in errors.items():
            if not of_it:
                backoff.succeed(name)
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
                    with self._leases.busy():
                        while mine and self.publish_due(mine):
                            mine = self._leases.take(self._awake())
                    left = sorted(
                        queue for queue in set(self._awake()) - set(mine) if self._is_due([queue])
                    )
                    if not left or self._clock.monotonic() >= give_up_at:
                        return left
                    self._clock.wait(self._stopping, STANDBY)
        finally:
            self._publications.record_missing()
            self._leases.release(self.queues)

    def _is_due(self, queues: Collection[str]) -> bool:
        return self._seconds_until_due(queues, 1.0) <= 0

    def _seconds_until_due(self, queues: Collection[str], longest: float) -> float:
        unrecorded, topics = self._publications.unrecorded, self._topic_backoff.names()
        next_at = self._runtime.store.next_due(queues, unrecorded, topics)
        return min((next_at - self._clock.now()).total_seconds(), longest) if next_at else longest

    # --- The loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Publish until ``stop``; outages are waited out."""
        self._listen()
        try:
            with self._leases.renewed():
                while not self._stopping.is_set():
                    delay = self.step()
                    if delay > 0 and self._is_called_within(delay):
                        self.call()
        finally:
            self.close()

    def call(self) -> None:
        """Let the next ``step`` look for due rows at once: a transaction that stored some has
        committed."""
        self._is_called = True

    def step(self) -> float:
        """Do one round; raises nothing.

        :returns: seconds until the next one is wanted, or until ``call``; 0 if it is at once.
        """
        failed_for = self._failed_until - self._clock.monotonic()
        if failed_for > 0:
            return failed_for
        try:
            delay = self._round()
        except Exception as error:
            # Whatever it is: a relay that dies of it leaves every later job unpublished.
            delay = self._failure_delay
            message = "The relay cannot work, trying again in %.0f s: %s"
            logger.error(message, delay, error, exc_info=not isinstance(error, OUTAGES))
            self._on_error(str(error))
            drop_broken(self._runtime.database)
            self._failed_until = self._clock.monotonic() + delay
            self._failure_delay, self._is_called = min(delay * 2, LONGEST_BACKOFF), False
            return delay
        self._failure_delay = 1.0
        return delay

    def _round(self) -> float:
        """Publish a batch of what is due, or learn when something will be.

        Called, it looks for the rows at once: every read before that is time somebody's job waits.
        Otherwise a read comes first: an idle relay, or one on standby, writes nothing.
        """
        longest = self._settings.poll_interval.total_seconds()
        was_called, self._is_called = self._is_called, False
        if not was_called:
            if self._publications.unrecorded:
                self._publications.record_missing()
                # As long as another relay has no reason to publish them again.
                self._leases.take(self._awake())
            until_due = self._seconds_until_due(self._awake(), longest)
            if until_due > 0:
                return until_due
        mine = self._leases.take(self._awake())
        with self._leases.busy():
            count = self.publish_due(mine) if mine else 0
            if self._publications.unrecorded and self._publications.are_overdue:
                self._publications.record_missing()
        if count >= self._settings.relay_batch_size:
            self._is_called = True
            return 0.0
        if count:
            return SOON
        # Called for a job that is due later, or for one of another relay's.
        return 0.0 if was_called else min(STANDBY, longest)

    def _is_called_within(self, seconds: float) -> bool:
        if self._listener is None and self._clock.monotonic() >= self._listen_at:
            self._listen()
        if self._listener is not None:
            return bool(self._listener.wait(seconds))
        self._clock.wait(self._stopping, min(seconds, LISTEN_AGAIN))
        return False

    def _listen(self) -> None:
        """Listen for calls; while coordination is away, the relay polls."""
        try:
            self._listener = self._runtime.coordination.listen([RELAY_CHANNEL])
        except Exception as error:
            level = logging.DEBUG if self._listen_at else logging.WARNING
            logger.log(level, "The relay polls only, nobody can wake it: %s", error)
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


def drop_broken(using: str) -> None:
    """Close a connection that does not work any more; Django opens another when it is used."""
    connection = connections[using]
    if not connection.in_atomic_block and not connection.is_usable():
        connection.close()
