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
import time
from collections import Counter
from collections.abc import Callable, Collection, Sequence

from django.db import DatabaseError, InterfaceError, connections
from django.utils import timezone

from kjo_django import registry
from kjo_django.backends import get_coordination, get_transport
from kjo_django.conf import QueueConf, get_settings
from kjo_django.coordination.base import Listener
from kjo_django.enqueue import dispatch
from kjo_django.enqueue.wakeups import LISTEN_AGAIN, RELAY_CHANNEL
from kjo_django.exceptions import CoordinationError, KjoError, PublishError, text_of
from kjo_django.models import DeadLetterReason
from kjo_django.outbox import unpublishable
from kjo_django.outbox.publication_notes import MOST_PUT_OFF, Notes, Sent
from kjo_django.outbox.publish_backoff import Rests
from kjo_django.outbox.relay_leases import LEASE_TTL, RelayLeases
from kjo_django.outbox.sends import publish
from kjo_django.outbox.unpublishable import Unpublishable
from kjo_django.store.due_rows import Due, due_jobs, due_jobs_of, next_due
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import OutgoingRecord, Published

logger = logging.getLogger("kjo_django")

NOTED_AFTER = 0.015
"""Seconds after a few rows before it is noted where they went: their consumers come first, and by
then most of their jobs have ended and need no note."""
SOON = 0.02
"""Seconds after that in which it only listens. While one job follows the other nobody has to ask
what falls due later: every look for what is due finds it, so much late at most."""
ASK_OVERTAKEN = 0.2
"""Seconds between looks, while one queue has a backlog, for rows of others that are behind it;
ten times as long as a look takes where that is more."""
LONGEST_UNASKED = 1.0
"""Seconds between such looks, at most: so long a new job waits where the database is slow."""
STANDBY = 0.25
"""Seconds between looks at rows that are due and another relay's, in case that one died."""

OUTAGES = (PublishError, CoordinationError, DatabaseError, InterfaceError)


class Relay:
    """Publishes due rows; any number may run, for each queue one at a time works.

    :param queues: names of the queues it looks after; None for all. Those on a transactional
        transport need no relay and are left out; ``queues`` tells what remains.
    :param on_error: told of outages, and with None of their end.
    :param is_quick: whether the jobs of a handler end in a few milliseconds; where they go need not
        be noted at once.
    """

    def __init__(
        self,
        queues: Sequence[str] | None = None,
        *,
        on_error: Callable[[str | None], None] = lambda error: None,
        is_quick: Callable[[str], bool] = lambda handler: False,
    ) -> None:
        names = queues if queues is not None else registry.queue_names()
        # Records for topics of no declared queue are in nobody else's care.
        names = [*names, dispatch.OUTGOING]
        conf = get_settings()
        # On a transactional transport the message was written with the row.
        self.queues = [n for n in names if not dispatch.is_transactional(conf.queue(n))]
        self._on_error = on_error
        self._is_quick = is_quick
        self._leases = RelayLeases()
        self._stopping = threading.Event()
        self._listener: Listener | None = None
        self._listen_at = 0.0
        self._rests = Rests()
        self._resting_topics = Rests()
        self._notes = Notes()
        self._ask_overtaken_at = 0.0
        self.published_count = 0

    # --- One batch --------------------------------------------------------------------------------

    def publish_due(
        self,
        queues: Collection[str] | None = None,
        *,
        may_put_off: bool = False,
        goes_on: bool = False,
    ) -> int:
        """Publish one batch of due rows and record it; return how many rows were due.

        :param queues: only those of these; of all it looks after that do not rest if not given.
        :param may_put_off: where a few quick jobs went is noted later, by ``run``.
        :param goes_on: after a full batch the caller publishes the next at once: where the jobs of
            this one went is noted meanwhile.
        """
        using = jobs_database()
        wanted = self._awake() if queues is None else queues
        most = get_settings().relay_batch_size
        jobs = due_jobs(using, wanted, most, self._notes.missing, self._resting_topics.names())
        is_backlog = len(jobs) >= most
        if is_backlog:
            jobs = self._with_overtaken(using, jobs, wanted, most)
        has_more = goes_on and is_backlog
        if not has_more:
            self._notes.end()
        puts_off = may_put_off and len(jobs) <= MOST_PUT_OFF
        failed: Exception | None = None
        for queue_name in dict.fromkeys(job.queue for job in jobs):
            due = [job for job in jobs if job.queue == queue_name]
            try:
                self._publish(using, queue_name, due, puts_off, has_more)
            except (DatabaseError, InterfaceError):
                raise
            except Exception as error:
                # Its rows are the oldest and will come first each time: those of others must not
                # wait for whatever is wrong with its transport.
                self._rests.begin(queue_name)
                failed = failed or error
        if failed is not None:
            raise failed
        return len(jobs)

    def _with_overtaken(
        self, using: str, jobs: list[Due], queues: Collection[str], most: int
    ) -> list[Due]:
        """Return the batch with rows of queues that have few in it, or none: the backlog of one
        queue must not keep another's new job waiting until it is worked off.

        Each queue is asked for by itself, so this is done a few times a second only, as long as
        nothing is found.
        """
        began = time.monotonic()
        if began < self._ask_overtaken_at or len(queues) < 2:
            return jobs
        share = max(1, most // len(queues))
        counts = Counter(job.queue for job in jobs)
        resting = self._resting_topics.names()
        overtaken: dict[str, list[Due]] = {}
        for queue in queues:
            if counts[queue] < share:
                found = due_jobs_of(using, queue, share, self._notes.missing, resting)
                if len(found) > counts[queue]:
                    overtaken[queue] = found
        if not overtaken:
            now = time.monotonic()
            rest = min(10 * (now - began), LONGEST_UNASKED)
            self._ask_overtaken_at = now + max(rest, ASK_OVERTAKEN)
            return jobs
        first = [job for found in overtaken.values() for job in found]
        return first + [job for job in jobs if job.queue not in overtaken]

    def _publish(
        self, using: str, queue_name: str, jobs: list[Due], puts_off: bool, has_more: bool
    ) -> None:
        queue = get_settings().queue(queue_name)
        transport = get_transport(queue.transport)
        made = [_record_or_error(job, queue) for job in jobs]
        records = [one for one in made if isinstance(one, OutgoingRecord)]
        answered = iter(publish(transport, records) if records else ())
        answers = [
            next(answered) if isinstance(one, OutgoingRecord) else _refusal_of(one) for one in made
        ]
        self._record(using, queue.topic, jobs, answers, puts_off, has_more)
        unpublishable.fail(using, queue, _refused_for_good(jobs, made, answers))
        self._rest_or_not(queue_name, jobs, answers)

    def _rest_or_not(self, queue: str, jobs: Sequence[Due], answers: Sequence[Published]) -> None:
        """Let a queue rest whose records are not taken for reasons that pass; of records for many
        topics only those that take none, if others do or the topic is the reason.

        The rows stay as they are: delayed one by one, they would be overtaken by later ones of
        their keys.
        """
        of_topics = queue == dispatch.OUTGOING and (
            any(answer.error is None for answer in answers)
            or all(answer.is_topics or answer.is_final for answer in answers)
        )
        rests, what = (self._resting_topics, "topic") if of_topics else (self._rests, "queue")
        if of_topics:
            self._rests.end(queue)
        errors: dict[str, list[str]] = {}
        for job, answer in zip(jobs, answers, strict=True):
            of_it = errors.setdefault(job.destination if of_topics else queue, [])
            if answer.error is not None and not answer.is_final:
                of_it.append(answer.error)
        for name, of_it in errors.items():
            if not of_it:
                rests.end(name)
                continue
            delay = rests.begin(name)
            message = "%d messages of %s %s were not taken, trying again in %.0f s: %s"
            facts = {"queue": queue}
            logger.error(message, len(of_it), what, name, delay, of_it[0], extra=facts)

    def _awake(self) -> list[str]:
        resting = self._rests.names()
        return [queue for queue in self.queues if queue not in resting]

    def _record(
        self,
        using: str,
        topic: str,
        jobs: Sequence[Due],
        answers: Sequence[Published],
        puts_off: bool,
        has_more: bool,
    ) -> None:
        """Write down where each row went, unless its job has moved on meanwhile."""
        accepted = [(j, a) for j, a in zip(jobs, answers, strict=True) if a.error is None]
        sent = [(j, a) for j, a in accepted if not j.destination]
        records = [(j, a) for j, a in accepted if j.destination]
        refused = [answer for answer in answers if answer.error is not None]
        notes: list[Sent] = []
        later: list[Sent] = []
        for job, answer in sent:
            note = Sent(job.pk, job.generation, job.attempts, answer.partition, answer.offset)
            (later if puts_off and self._is_quick(job.handler) else notes).append(note)
        self._notes.put_off(topic, later)
        if notes:
            try:
                if has_more:
                    self._notes.begin(using, topic, notes)
                else:
                    self._notes.note(using, topic, notes)
            except (DatabaseError, InterfaceError):
                # They are out: noted when that can be, they need not go out again.
                self._notes.put_off(topic, notes)
                raise
        if records:
            self._notes.note_others(using, records)
        self.published_count += len(accepted)
        self._on_error(refused[0].error if refused else None)

    # --- Once -------------------------------------------------------------------------------------

    def publish_all(self) -> list[str]:
        """Publish everything that is due, under the leases of its queues, and give them back.

        What another relay holds is that one's to publish. It is waited for as long as the lease of
        one that died lives.

        :returns: queues of which something is due that another relay did not publish meanwhile.
        """
        using = jobs_database()
        give_up_at = time.monotonic() + LEASE_TTL.total_seconds() + STANDBY
        try:
            with self._leases.renewed():
                while True:
                    mine = self._take_queues()
                    with self._leases.busy():
                        while mine and self.publish_due(mine, goes_on=True):
                            mine = self._take_queues()
                    left = self._due_queues(using, set(self._awake()) - set(mine))
                    if not left or time.monotonic() >= give_up_at:
                        return left
                    self._stopping.wait(STANDBY)
        finally:
            self._notes.note_late(using)
            self._leases.release(self.queues)

    def _due_queues(self, using: str, queues: Collection[str]) -> list[str]:
        resting, now = self._resting_topics.names(), timezone.now()
        times = {queue: next_due(using, [queue], self._notes.missing, resting) for queue in queues}
        return sorted(queue for queue, time in times.items() if time is not None and time <= now)

    # --- The loop ---------------------------------------------------------------------------------

    def run(self) -> None:
        """Publish until ``stop``; outages are waited out."""
        self._listen()
        try:
            with self._leases.renewed():
                self._run()
        finally:
            self._close()

    def _run(self) -> None:
        delay, is_called = 1.0, False
        while not self._stopping.is_set():
            try:
                is_called = self._turn(is_called)
                delay = 1.0
            except Exception as error:
                # Whatever it is: a relay that dies of it leaves every later job unpublished.
                is_outage = isinstance(error, OUTAGES)
                message = "The relay cannot work, trying again in %.0f s: %s"
                logger.error(message, delay, error, exc_info=not is_outage)
                self._on_error(str(error))
                _drop_broken(jobs_database())
                self._stopping.wait(delay)
                delay, is_called = min(delay * 2, 30.0), False

    def _turn(self, is_called: bool) -> bool:
        """Publish a batch of what is due, or learn when something will be; then wait for a call.

        Called, it looks for the rows at once: every read before that is time somebody's job waits.
        Otherwise a read comes first: an idle relay, or one on standby, writes nothing.

        :returns: whether it was called, or has more to publish.
        """
        longest = get_settings().poll_interval.total_seconds()
        using = jobs_database()
        if not is_called:
            if self._notes.missing:
                self._notes.note_late(using)
                # As long as another relay has no reason to publish them again.
                self._take_queues()
            resting = self._resting_topics.names()
            next_at = next_due(using, self._awake(), self._notes.missing, resting)
            until_due = (next_at - timezone.now()).total_seconds() if next_at else longest
            if until_due > 0:
                return self._hears(min(until_due, longest))
        mine = self._take_queues()
        with self._leases.busy():
            count = self.publish_due(mine, may_put_off=is_called, goes_on=True) if mine else 0
            if self._notes.is_due:
                self._notes.note_late(using)
        if count >= get_settings().relay_batch_size:
            return True
        if count:
            return self._hears(NOTED_AFTER) or self._notes_and_hears(using)
        # Called for a job that is due later, or for one of another relay's.
        return self._hears(0.0 if is_called else min(STANDBY, longest))

    def _notes_and_hears(self, using: str) -> bool:
        self._notes.note_late(using)
        return self._hears(SOON)

    def _hears(self, seconds: float) -> bool:
        """Wait so long for a call; return whether one came."""
        if self._listener is None and time.monotonic() >= self._listen_at:
            self._listen()
        if self._listener is not None:
            return bool(self._listener.wait(seconds))
        self._stopping.wait(min(seconds, LISTEN_AGAIN))
        return False

    def _listen(self) -> None:
        """Listen for calls; while coordination is away, the relay polls."""
        try:
            self._listener = get_coordination().listen([RELAY_CHANNEL])
        except Exception as error:
            level = logging.DEBUG if self._listen_at else logging.WARNING
            logger.log(level, "The relay polls only, nobody can wake it: %s", error)
        self._listen_at = time.monotonic() + LISTEN_AGAIN

    def _take_queues(self) -> list[str]:
        return self._leases.take(self._awake())

    def stop(self) -> None:
        """Make ``run`` return after the batch at hand; thread-safe."""
        self._stopping.set()
        if self._listener is not None:
            self._listener.wake()

    def _close(self) -> None:
        try:
            # Before its leases are free, or another relay publishes them again.
            self._notes.note_late(jobs_database())
        except (DatabaseError, InterfaceError) as error:
            logger.warning("%d messages may be sent twice: %s", len(self._notes.missing), error)
        try:
            if self._listener is not None:
                self._listener.close()
        except KjoError as error:
            logger.warning("The relay's listener could not be closed: %s", error)
        self._leases.release(self.queues)
        connections.close_all()


def _record_or_error(job: Due, queue: QueueConf) -> OutgoingRecord | Exception:
    """One row nobody can send must not hold up the others of its batch for ever."""
    try:
        return dispatch.record_of(job, queue)
    except Exception as error:
        logger.exception("The message of job %s cannot be made", job.pk, extra=job.log_facts)
        return error


def _refusal_of(error: Exception) -> Published:
    return Published(error=f"{type(error).__name__}: {text_of(error)}", is_final=True)


def _refused_for_good(
    jobs: Sequence[Due],
    made: Sequence[OutgoingRecord | Exception],
    answers: Sequence[Published],
) -> list[Unpublishable]:
    refused = []
    for job, one, answer in zip(jobs, made, answers, strict=True):
        if not answer.is_final:
            continue
        reason = DeadLetterReason.TOO_LARGE if answer.is_too_large else DeadLetterReason.FATAL
        if isinstance(one, OutgoingRecord):
            refused.append(Unpublishable(job, one, PublishError(answer.error), reason))
        else:
            refused.append(Unpublishable(job, None, one, reason))
    return refused


def _drop_broken(using: str) -> None:
    connection = connections[using]
    if not connection.in_atomic_block and not connection.is_usable():
        connection.close()
