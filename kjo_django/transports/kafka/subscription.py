"""A consumer group's view, on one librdkafka consumer: joining, polling, committing, leaving.

Everything runs in the thread that polls, callbacks of the client included, but for ``acknowledge``
and ``wake``. These two touch the `Watermark`, which has a lock, and a flag; nothing else here is
locked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
)
from kjo_django.transports.kafka.clients import (
    KafkaOptions,
    Refusals,
    close_behind,
    describe,
    error_of,
    forkable,
    keep_for_ever,
    logger,
    make,
    watched,
)
from kjo_django.transports.kafka.reading import Reader, Reading
from kjo_django.transports.watermark import Watermark
from kjo_django.values import ANY_SIZE

# --- Is the client well? --------------------------------------------------------------------------

CHECK_INTERVAL = 1.0
CHECK_TIMEOUT = 0.25
IDLE_CHECK_INTERVAL = 10.0
"""Seconds between checks of a member that has no partitions and met no error."""
LOST_AFTER = 10.0
"""Seconds without partitions and without an answer until another client is asked for the cluster.
"""
OTHER_TIMEOUT = 2.0
"""Seconds that client has for an answer."""

AWAY = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE})
"""Errors of one outage: the client reports each broker, and each try with its milliseconds."""


class Health:
    """The latest error of a group's client. Belongs to the thread that polls.

    The client reports errors and never that they are over, since it recovers itself; so while there
    is one, the cluster is asked now and then.

    A client can forget every broker, and then it connects to none any more and reports nothing: a
    broker that has just started answers with topics and without brokers (librdkafka#5301). So a
    member without partitions asks as well. When it gets no answer and another client does, it is
    to be replaced.

    :param topics: those that must exist; patterns (``^...``) need not.
    """

    def __init__(self, options: KafkaOptions, group: str, topics: Sequence[str]) -> None:
        self._options = options
        self._refusals = Refusals(options)
        self._group = group
        self._topics = [topic for topic in topics if not topic.startswith("^")]
        self._due = time.monotonic() + IDLE_CHECK_INTERVAL
        self._unanswered_since: float | None = None
        self.last_error: str | None = None
        """See `Subscription.last_error`."""
        self._is_away = False
        self.is_fatal = False
        """Whether the client failed for good: it answers nothing any more, and must be replaced."""
        self.is_unanswered = False
        """Whether it failed so that no broker answers it: to close it would wait for one."""

    def note(self, error: KafkaError | BaseException | None) -> None:
        """Remember an error the client gave us, in whatever way."""
        is_away = False
        if isinstance(error, KafkaError):
            code = error.code()
            if code == KafkaError._PARTITION_EOF:
                return
            self.is_fatal = self.is_fatal or error.fatal() or code == KafkaError._FATAL
            is_away = code in AWAY
            if is_away and self._refusals.reason is not None:
                return  # what follows from a refusal is no reason of its own
            if self._refusals.note(error):
                self.report(self._refusals.reason or "")
                return
        if is_away and self._is_away and self.last_error is not None:
            return  # an outage has one text, or it would be logged every second
        self._is_away = is_away
        text = describe(error)
        if text != self.last_error:
            logger.warning("Consumer group %s: %s", self._group, text)
        self.report(text)

    def report(self, text: str) -> None:
        """Show ``text`` until a check finds all well."""
        if self.last_error is None:
            self._due = time.monotonic() + CHECK_INTERVAL
        self.last_error = text

    def check_soon(self) -> None:
        """Ask at the next `check`: something has just gone well."""
        self._due = 0.0

    def check(self, consumer: Consumer, now: float, *, is_idle: bool) -> None:
        """Clear ``last_error`` once the cluster answers and has our topics, asking once a second.

        Asking for all topics also makes the client look at its subscription again, so a topic
        created late is found within a second and not at the next refresh.

        :param is_idle: whether the client has no partitions.
        """
        if self.last_error is None and not is_idle:
            self._due, self._unanswered_since = now + IDLE_CHECK_INTERVAL, None
            return
        if now < self._due:
            return
        self._due = now + (IDLE_CHECK_INTERVAL if self.last_error is None else CHECK_INTERVAL)
        cluster = _cluster_of(consumer, CHECK_TIMEOUT)
        if cluster is None:
            self._note_no_answer(now, is_idle)
            return
        self._unanswered_since = None
        self._refusals.forget()
        found = cluster.topics
        missing = [n for n in self._topics if n not in found or found[n].error is not None]
        self.last_error = f"topic {missing[0]!r} does not exist" if missing else None

    def _note_no_answer(self, now: float, is_idle: bool) -> None:
        self._due = now + CHECK_INTERVAL
        if self._unanswered_since is None:
            self._unanswered_since = now
        elif is_idle and now >= self._unanswered_since + LOST_AFTER:
            self._unanswered_since = None
            if self._is_answered_to_another():
                text = "Consumer group %s: the cluster answers another client and not this one"
                logger.warning(text, self._group)
                self.is_fatal = self.is_unanswered = True

    def _is_answered_to_another(self) -> bool:
        config = watched(self._options.consumer(self._group), lambda error: None)
        other = make(Consumer, config, self._options)
        try:
            return _cluster_of(other, OTHER_TIMEOUT) is not None
        finally:
            other.close()


def _cluster_of(consumer: Consumer, timeout: float) -> Any:
    """Return the cluster's metadata; None if no broker answers, or one that names no broker."""
    try:
        cluster = consumer.list_topics(timeout=timeout)
    except KafkaException:
        return None
    return cluster if cluster.brokers else None


# --- Commits --------------------------------------------------------------------------------------

PATIENCE = 10.0
"""Seconds after which an unanswered commit no longer holds back the next one."""

TOO_LATE = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError._STATE,
        KafkaError._NO_OFFSET,
        KafkaError._ASSIGNMENT_LOST,
    }
)
"""Expected after a rebalance: the records are another consumer's, which gets them again."""


class Committer:
    """Commits the watermarks of a group: now and then without waiting, and at once where it must
    be. Knows what was sent, so that nothing is committed twice or forgotten.

    :param on_failure: called with the text of an error that is not merely too late.
    """

    def __init__(self, group: str, interval: float, on_failure: Callable[[str], None]) -> None:
        self._group = group
        self._interval = interval
        self._on_failure = on_failure
        self._due = 0.0
        self.reset()

    def reset(self) -> None:
        """Start anew with a new consumer."""
        self._sent: dict[TopicPartition, int] = {}
        self._unanswered = 0
        self._sent_at = 0.0
        self.is_silent = False
        """The broker stopped answering: waiting for it again would only cost time."""

    @property
    def is_waiting(self) -> bool:
        """Whether a commit of ``soon`` is not answered yet."""
        return self._unanswered > 0

    def is_due(self, now: float) -> bool:
        """Whether ``soon`` should be called; true once per interval."""
        if now >= self._sent_at + PATIENCE:
            self._unanswered = 0
        if now < self._due or self.is_waiting:
            return False
        self._due = now + self._interval
        return True

    def soon(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Commit what changed, without waiting for the answer."""
        changed = {tp: offset for tp, offset in positions.items() if self._sent.get(tp) != offset}
        if not changed:
            return
        offsets = [KafkaPartition(*partition, offset) for partition, offset in changed.items()]
        try:
            consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._note_refusal(error_of(error), offsets)
        else:
            self._unanswered += 1
            self._sent_at = time.monotonic()
            self._sent.update(changed)

    def now(self, consumer: Consumer, positions: Mapping[TopicPartition, int]) -> None:
        """Commit, and wait for the answer: up to ``session.timeout.ms`` while no broker answers."""
        offsets = [KafkaPartition(*partition, offset) for partition, offset in positions.items()]
        if not offsets or self.is_silent:
            return
        try:
            results = consumer.commit(offsets=offsets, asynchronous=False)
        except KafkaException as error:
            self._note_refusal(error_of(error), offsets)
        else:
            self._note_answer(results or [])

    def on_commit(self, error: KafkaError | None, offsets: Sequence[KafkaPartition]) -> None:
        """The client's report on a commit of ``soon``."""
        self._unanswered = max(0, self._unanswered - 1)
        self.is_silent = False
        if error is not None:
            self._note_refusal(error, offsets)
        else:
            self._note_answer(offsets)

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """Assume nothing about these any more."""
        for partition in partitions:
            self._sent.pop(partition, None)

    def _note_answer(self, results: Iterable[KafkaPartition]) -> None:
        for result in results:
            if result.error is not None:
                self._note_refusal(result.error, [result])

    def _note_refusal(self, error: KafkaError | None, offsets: Iterable[KafkaPartition]) -> None:
        self.forget(TopicPartition(each.topic, each.partition) for each in offsets)
        text = describe(error)
        if error is not None and error.code() in TOO_LATE:
            logger.info("Consumer group %s: an offset commit came too late: %s", self._group, text)
            return
        logger.warning("Consumer group %s: an offset commit failed: %s", self._group, text)
        self._on_failure(f"commit failed: {text}")


# --- The subscription -----------------------------------------------------------------------------

SLICE = 0.1
"""Seconds of one wait inside ``poll``, which a record ends at once; `wake` is noticed between two.
"""

FLUSH_TIMEOUT = 5.0
LEAVE_TIMEOUT = 10.0
LEAVE_SLICE = 0.01
REOPEN_INTERVAL = 1.0


class KafkaSubscription(Watermark, Subscription):
    """A member of a consumer group. See the contract.

    It owns the client, and replaces one that failed for good. As a `Watermark` it knows what it has
    handed out and may commit; where reading continues is in `Reading`, which moves both, and
    `Committer` commits. A rebalance begins and ends the epochs of partitions in both.
    """

    def __init__(
        self,
        options: KafkaOptions,
        topics: Sequence[str],
        group: str,
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> None:
        super().__init__()
        self._options = options
        self._topics = list(topics)
        self._group = group
        self._health = Health(options, group, self._topics)
        self._committer = Committer(group, options.commit_interval, self._health.report)
        self._reading = Reading(
            self,
            self._health.note,
            self._raise_interrupt,
            starts_at_the_end=options.starts_at_the_end,
        )
        self._on_revoked = on_revoked
        self._on_assigned = on_assigned
        self._is_inside_callback = False
        """Whether the client calls just now: it must not be polled before the call returns."""
        self._interrupt: BaseException | None = None
        self._woken = False
        self._reopen_at = 0.0
        self._closed = True  # so far: the client may refuse its configuration
        self._consumer: Consumer | None = self._open()
        self._closed = False
        forkable.add(self)

    # --- The contract -----------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float, max_bytes: int = ANY_SIZE) -> list[Record]:
        deadline = time.monotonic() + timeout
        while not self._closed:
            wait = min(SLICE, max(0, deadline - time.monotonic()))
            records = self._round(max_records, max_bytes, wait)
            if records or self._woken or time.monotonic() >= deadline:
                self._woken = False
                return records
        return []

    def _round(self, max_records: int, max_bytes: int, wait: float) -> list[Record]:
        if self._health.is_fatal and self._consumer is not None:
            self._replace(self._consumer)
        if self._consumer is None and time.monotonic() >= self._reopen_at:
            self._consumer = self._open()
        consumer = self._consumer
        if consumer is None:
            time.sleep(wait)
            return []
        self._reading.prepare(consumer)
        now = time.monotonic()
        if self._committer.is_due(now):
            self._committer.soon(consumer, self.positions())
        self._health.check(consumer, now, is_idle=not self._reading.readers)
        return self._reading.fetch(consumer, max_records, max_bytes, wait)

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Settle ``records`` in memory; ``poll`` commits the watermark they move."""
        self.settle(records)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.resume(partitions)

    def wake(self) -> None:
        self._woken = True

    @property
    def last_error(self) -> str | None:  # type: ignore[override]  # only we set it
        return self._health.last_error

    def flush(self) -> None:
        """Commit and wait a few seconds. A failure is logged, shown by ``last_error``, and ``poll``
        tries again. A callback may call it, as ``on_revoked`` does."""
        if self._consumer is None:
            return
        if self._is_inside_callback:
            self._committer.now(self._consumer, self.positions())
            return
        deadline = time.monotonic() + FLUSH_TIMEOUT
        self._await_commits(self._consumer, deadline)
        self._committer.soon(self._consumer, self.positions())
        self._await_commits(self._consumer, deadline)
        if self._committer.is_waiting:
            self._committer.is_silent = True
            self._health.report("no answer to an offset commit")

    def _await_commits(self, consumer: Consumer, deadline: float) -> None:
        while self._committer.is_waiting and time.monotonic() < deadline:
            self._reading.serve(consumer, LEAVE_SLICE)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._consumer is None:
            return
        try:
            self._leave(self._consumer)
        finally:
            self._consumer = None
            self._end_epochs(list(self._reading.readers.values()))
        self._raise_interrupt()

    def __del__(self) -> None:
        # The client's own destructor would wait for a revocation that nobody serves any more,
        # with the interpreter locked.
        if not getattr(self, "_closed", True):
            logger.warning("Consumer group %s: a subscription was never closed", self._group)
            self.close()

    # --- Rebalances: the client calls back inside ``poll``, ``consume`` and ``close`` -------------

    def _guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback: what it raises is logged, an interrupt waits for ``_raise_interrupt``.
        Raised into ``consume``, it would destroy a batch whose position has already moved on."""

        def call(*arguments: Any) -> None:
            outer, self._is_inside_callback = self._is_inside_callback, True
            try:
                callback(*arguments)
            except Exception:
                logger.exception("Consumer group %s: a callback failed", self._group)
            except BaseException as interrupt:
                self._interrupt = interrupt
            finally:
                self._is_inside_callback = outer

        return call

    def _raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    def _assign(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """Begin an epoch of each; reading starts at the committed offset, where the client is.

        Under the cooperative protocol each call names only the partitions that move, under an eager
        one all.
        """
        assigned = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._committer.forget(assigned)
        for partition in assigned:
            self._reading.assign(partition)
        self._health.check_soon()
        if assigned and self._on_assigned is not None:
            self._on_assigned(assigned)

    def _revoke(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """Commit what is settled once ``on_revoked`` has waited for it, then end the epochs.

        The partitions are still ours until this returns, so the commit is accepted.
        """
        readers = self._readers_of(partitions)
        revoked = [reader.partition for reader in readers]
        try:
            if revoked and self._on_revoked is not None:
                self._on_revoked(revoked, False)
        finally:
            try:
                self._committer.now(consumer, self.positions(revoked))
            finally:
                self._end_epochs(readers, consumer)

    def _lose(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        """End the epochs and commit nothing."""
        readers = self._readers_of(partitions)
        # Another consumer may own them: nothing that still arrives may move a watermark.
        self._end_epochs(readers, consumer)
        if readers and self._on_revoked is not None:
            self._on_revoked([reader.partition for reader in readers], True)

    def _readers_of(self, partitions: Sequence[KafkaPartition]) -> list[Reader]:
        found = (self._reading.readers.get((each.topic, each.partition)) for each in partitions)
        return [reader for reader in found if reader is not None]

    def _end_epochs(self, readers: Sequence[Reader], consumer: Consumer | None = None) -> None:
        """End the epoch of these partitions: results that still come are dropped.

        :param consumer: may get them again.
        """
        partitions = [reader.partition for reader in readers]
        self.revoke(partitions)
        self._committer.forget(partitions)
        self._reading.retire(readers)
        # The client remembers a pause beyond the assignment; we remember it ourselves.
        paused = [reader.at_position() for reader in readers if reader.client_paused]
        if paused and consumer is not None:
            try:
                consumer.resume(paused)
            except KafkaException as error:
                logger.warning("Could not resume %s: %s", partitions, describe(error))

    # --- The client, from joining the group to leaving it -----------------------------------------

    def _open(self) -> Consumer:
        config = watched(self._options.consumer(self._group), self._health.note, self._guard)
        config["on_commit"] = self._guard(self._committer.on_commit)
        consumer: Consumer = make(Consumer, config, self._options)
        consumer.subscribe(
            self._topics,
            on_assign=self._guard(self._assign),
            on_revoke=self._guard(self._revoke),
            on_lost=self._guard(self._lose),
        )
        return consumer

    def _replace(self, consumer: Consumer) -> None:
        """Give up a client that failed for good; the next round opens another one."""
        logger.error(
            "Consumer group %s: the client failed permanently and is replaced", self._group
        )
        assigned = [KafkaPartition(*partition) for partition in self.assignment()]
        self._guard(self._lose)(None, assigned)
        self._committer.is_silent = self._committer.is_silent or self._health.is_unanswered
        self._leave(consumer)
        self._consumer = None
        self._health.is_fatal = self._health.is_unanswered = False
        self._committer.reset()
        self._reopen_at = time.monotonic() + REOPEN_INTERVAL

    def _leave(self, consumer: Consumer) -> None:
        """Leave the group, then close.

        ``close`` alone ends the membership first and then serves a revocation that was already
        waiting: its commit is refused, and the client can end up waiting for itself, with the
        interpreter locked (librdkafka#4884): no thread of the process goes on. So what waits is
        served while we are a member, and a client that still has partitions then is not closed.
        """
        self.flush()
        try:
            consumer.pause([KafkaPartition(*each) for each in self.assignment()])
            consumer.poll(0)
            consumer.unsubscribe()
            if not self._has_given_back(consumer):
                keep_for_ever(consumer)
                text = "Consumer group %s: the client did not give its partitions back in time"
                logger.warning(text, self._group)
            elif self._committer.is_silent:
                close_behind(consumer)
            else:
                consumer.close()
        except (KafkaException, RuntimeError) as error:
            logger.warning(
                "Consumer group %s: closing the client failed: %s", self._group, describe(error)
            )

    def _has_given_back(self, consumer: Consumer) -> bool:
        """Serve revocations until the client has no partition. We may know of none: a client that
        is replaced has lost them for us and not for itself."""
        deadline = time.monotonic() + LEAVE_TIMEOUT
        while consumer.poll(0) is not None or consumer.assignment():
            if time.monotonic() > deadline:
                return False
            consumer.poll(LEAVE_SLICE)
        return True

    def forget_the_parents(self) -> None:
        """In the child of a fork: be closed, since the membership is the parent's."""
        self._closed = True
        if self._consumer is not None:
            keep_for_ever(self._consumer)
            self._consumer = None
