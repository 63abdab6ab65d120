"""A consumer group's view, on one librdkafka consumer.

Everything runs in the thread that polls, but for ``acknowledge`` and ``wake``. A callback that
raises inside ``consume`` would destroy a batch whose position has already moved on; so none of ours
raises, and a poll torn apart all the same (a signal, say) makes the next one go back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from operator import methodcaller
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.transports.base import (
    AssignedCallback,
    Record,
    RevokedCallback,
    Subscription,
    TopicPartition,
)
from kjo_django.transports.kafka.clients import (
    after_fork,
    close_behind,
    describe,
    error_of,
    keep_for_ever,
    logger,
    make,
    quiet,
)
from kjo_django.transports.kafka.committing import Committer
from kjo_django.transports.kafka.options import KafkaOptions, guarded
from kjo_django.transports.kafka.queries import edges_of, known_end_of, starts_of
from kjo_django.transports.kafka.reading import Reader, Reading
from kjo_django.transports.watermark import Watermark

SLICE = 0.1
"""Seconds of one wait inside ``poll``, which a record ends at once; `wake` is noticed between two.
"""

MOST_RECORDS = 10_000
"""Records of one poll, whatever was asked for."""

UNREADABLE_HEADERS = "kjo-unreadable-headers"
"""The only header of a record whose headers cannot be read; its value says why."""

read_headers = methodcaller("headers")
"""The client fails by returning a list of null pointers beside an error. Calls that the interpreter
has specialized do not look for such an error, and to iterate that list kills the process; a call by
way of C always looks."""

FLUSH_TIMEOUT = 5.0
LEAVE_TIMEOUT = 10.0
LEAVE_SLICE = 0.01
HEALTH_INTERVAL = 1.0
HEALTH_TIMEOUT = 0.25
REOPEN_INTERVAL = 1.0


class KafkaSubscription(Subscription):
    """A member of a consumer group. See the contract."""

    def __init__(
        self,
        options: KafkaOptions,
        topics: Sequence[str],
        group: str,
        on_revoked: RevokedCallback | None = None,
        on_assigned: AssignedCallback | None = None,
    ) -> None:
        self._options = options
        self._topics = list(topics)
        self._group = group
        self._user_on_revoked = on_revoked
        self._user_on_assigned = on_assigned
        self._watermark = Watermark()
        self._reading = Reading(starts_at_the_end=options.starts_at_the_end)
        self._committer = Committer(group, options.commit_interval, self._report)
        self._torn = False
        self._woken = False
        self._closed = False
        self._fatal = False
        self._in_callback = False
        self._interrupt: BaseException | None = None
        self._health_due = 0.0
        self._reopen_at = 0.0
        self._consumer: Consumer | None = self._open()
        after_fork(self)

    # --- The contract -----------------------------------------------------------------------------

    def poll(self, max_records: int, timeout: float) -> list[Record]:
        deadline = time.monotonic() + timeout
        while not self._closed:
            records = self._round(max_records, min(SLICE, max(0, deadline - time.monotonic())))
            if records or self._woken or time.monotonic() >= deadline:
                self._woken = False
                return records
        return []

    def acknowledge(self, records: Iterable[Record]) -> None:
        """Settle ``records`` in memory; ``poll`` commits the watermark they move."""
        self._watermark.settle(records)

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.pause(partitions)

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._reading.resume(partitions)

    def assignment(self) -> list[TopicPartition]:
        return self._watermark.assigned()

    def wake(self) -> None:
        self._woken = True

    def flush(self) -> None:
        """Commit and wait a few seconds. A failure is logged, shown by ``last_error``, and ``poll``
        tries again."""
        if self._consumer is None:
            return
        if self._in_callback:
            self._committer.now(self._consumer, self._watermark.positions())
            return
        deadline = time.monotonic() + FLUSH_TIMEOUT
        self._await_commits(self._consumer, deadline)
        self._committer.soon(self._consumer, self._watermark.positions())
        self._await_commits(self._consumer, deadline)
        if self._committer.is_waiting:
            self._committer.is_silent = True
            self._report("commit not answered")

    def _await_commits(self, consumer: Consumer, deadline: float) -> None:
        """Serve callbacks until all commits are answered. What else arrives is put away."""
        while self._committer.is_waiting and time.monotonic() < deadline:
            message = self._first(consumer, LEAVE_SLICE)
            if message is not None:
                self._reading.keep([message])
            if self._reading.unsteady:
                self._reading.steady(consumer)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        consumer = self._consumer
        if consumer is None:
            return
        try:
            self._leave(consumer)
        finally:
            self._consumer = None
            self._retire(list(self._reading.readers.values()))
        self._raise_interrupt()

    def __del__(self) -> None:
        # The client's own destructor would wait for a revocation that nobody serves any more,
        # with the interpreter locked.
        if not getattr(self, "_closed", True):
            logger.warning("A subscription of group %s was never closed", self._group)
            self.close()

    def forget_the_parents(self) -> None:
        """In the child of a fork: be closed, since the membership is the parent's."""
        self._closed = True
        if self._consumer is not None:
            keep_for_ever(self._consumer)  # its threads did not survive
            self._consumer = None

    def lag(self) -> dict[TopicPartition, int] | None:
        """Return end minus watermark. Paused partitions cost a query: the client knows only the end
        it saw at its latest fetch."""
        if self._consumer is None:
            return None
        positions = self._watermark.positions()
        unread = [each for each in self.assignment() if each not in positions]
        at_the_end = self._options.starts_at_the_end
        positions.update(starts_of(self._consumer, unread, at_the_end=at_the_end))
        lags = {}
        for reader in list(self._reading.readers.values()):
            end = self._end_of(self._consumer, reader)
            if end is not None and reader.partition in positions:
                lags[reader.partition] = max(0, end - positions[reader.partition])
        return lags

    def _leave(self, consumer: Consumer) -> None:
        """Leave the group, then close.

        ``close`` alone ends the membership first and then serves a revocation that was already
        waiting: its commit is refused, and the client can end up waiting for itself, with the
        interpreter locked (librdkafka#4884). So what waits is served while we are a member.
        """
        self.flush()
        try:
            consumer.pause([KafkaPartition(*each) for each in self.assignment()])
            consumer.poll(0)
            consumer.unsubscribe()
            deadline = time.monotonic() + LEAVE_TIMEOUT
            while consumer.poll(0) is not None or self._reading.readers:
                if time.monotonic() > deadline:
                    break
                consumer.poll(LEAVE_SLICE)
            if self._committer.is_silent:
                close_behind(consumer)
            else:
                consumer.close()
        except (KafkaException, RuntimeError) as error:
            logger.warning("Closing the consumer of %s failed: %s", self._group, describe(error))

    # --- One round of polling ---------------------------------------------------------------------

    def _round(self, max_records: int, wait: float) -> list[Record]:
        """Serve callbacks and hand out what is there, waiting ``wait`` seconds for the first."""
        consumer = self._ready()
        if consumer is None:
            time.sleep(wait)
            return []
        if self._torn:
            self._reading.rewind()
        if self._reading.unsteady:
            self._reading.steady(consumer)
        self._maintain(consumer)
        # From here until the records are on their way, a failure of any kind loses messages that
        # left the client. The flag makes the next round go back for them.
        self._torn = True
        messages, complete = self._fetch(consumer, max_records, wait)
        records, touched = self._convert(messages)
        self._raise_interrupt()
        for reader in touched:
            self._watermark.deliver(reader.assignment, reader.hand_out())
        self._torn = not complete
        return records

    def _fetch(self, consumer: Consumer, max_records: int, wait: float) -> tuple[list[Any], bool]:
        """Return messages, and whether the client gave all it took."""
        reading = self._reading
        reading.fresh.clear()
        messages = reading.take(max_records)
        first = self._first(consumer, 0.0 if messages else wait)
        if reading.fresh:
            # Put away under an earlier assignment, which may have begun elsewhere.
            messages = [each for each in messages if reading.of(each) not in reading.fresh]
        if first is None:
            return messages, True
        if len(messages) >= max_records:
            reading.keep([first])
            return messages, True
        messages.append(first)
        return self._more(consumer, messages, min(max_records, MOST_RECORDS) - len(messages))

    def _first(self, consumer: Consumer, wait: float) -> Any:
        try:
            message = consumer.poll(wait)
        except KafkaException as error:
            self._note(error_of(error) or error)
            return None
        if message is not None and message.error() is not None:
            self._note(message.error())
            return None
        return message

    def _more(self, consumer: Consumer, messages: list[Any], wanted: int) -> tuple[list[Any], bool]:
        """Add what is there already; waiting for more would cost latency."""
        if wanted <= 0:
            return messages, True
        self._reading.fresh.clear()
        try:
            messages += consumer.consume(wanted, 0)
        except KafkaException as error:
            self._note(error_of(error) or error)
            return messages, False
        if self._reading.fresh:
            # Assigned during this very call: what the batch holds of them may have been fetched
            # under an earlier assignment, and handing it out would skip what lies before.
            self._reading.distrust(self._reading.fresh)
        return messages, True

    def _convert(self, messages: Sequence[Any]) -> tuple[list[Record], list[Reader]]:
        """Return the records to hand out, and the readers they come from."""
        readers = self._reading.readers
        records: list[Record] = []
        touched: list[Reader] = []
        for message in messages:
            if message.error() is not None:
                self._note(message.error())
                continue
            reader = readers.get((message.topic(), message.partition()))
            if reader is None:
                continue  # revoked since it was fetched
            offset = message.offset()
            if reader.muted:
                reader.meet(offset)
                self._reading.unsteady = True
                continue
            if offset < reader.position:
                continue  # fetched twice, around a seek
            reader.position = offset + 1
            if not reader.batch:
                touched.append(reader)
            reader.batch.append(offset)
            records.append(record_of(message, offset, reader))
        return records, touched

    def _maintain(self, consumer: Consumer) -> None:
        """Whatever has to happen now and then."""
        now = time.monotonic()
        if self._committer.is_due(now):
            self._committer.soon(consumer, self._watermark.positions())
        self._reading.verify(consumer)
        if self.last_error is not None and now >= self._health_due:
            self._health_due = now + HEALTH_INTERVAL
            self._check_health(consumer)

    # --- Rebalancing: called by the client inside poll, consume and close -------------------------

    def _on_assign(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        assigned = [TopicPartition(each.topic, each.partition) for each in partitions]
        self._committer.forget(assigned)
        for partition in assigned:
            self._reading.assign(self._watermark.assign(partition))
        self._reading.unsteady = True
        self._health_due = 0.0
        if assigned and self._user_on_assigned is not None:
            self._user_on_assigned(assigned)

    def _on_revoke(self, consumer: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        readers = self._reading.find(partitions)
        try:
            self._tell_revoked(readers, lost=False)
        finally:
            revoked = [reader.partition for reader in readers]
            self._committer.now(consumer, self._watermark.positions(revoked))
            # The client remembers a pause beyond the assignment; we remember it ourselves.
            paused = [reader.at_position() for reader in readers if reader.client_paused]
            self._retire(readers)
            if paused:
                consumer.resume(paused)

    def _on_lost(self, _: Consumer, partitions: Sequence[KafkaPartition]) -> None:
        readers = self._reading.find(partitions)
        # Another consumer may own them: nothing that still arrives may move a watermark.
        self._retire(readers)
        self._tell_revoked(readers, lost=True)

    def _tell_revoked(self, readers: Sequence[Reader], *, lost: bool) -> None:
        if readers and self._user_on_revoked is not None:
            self._user_on_revoked([reader.partition for reader in readers], lost)

    def _retire(self, readers: Sequence[Reader]) -> None:
        """End the epoch of these partitions: results that still come are dropped."""
        partitions = [reader.partition for reader in readers]
        self._watermark.revoke(partitions)
        self._committer.forget(partitions)
        self._reading.retire(readers)

    def _guard(self, callback: Callable[..., None]) -> Callable[..., None]:
        """Wrap a callback of ours: log what it raises; interrupts wait for the client's return."""

        def call(*arguments: Any) -> None:
            outer, self._in_callback = self._in_callback, True
            try:
                callback(*arguments)
            except Exception:
                logger.exception("A callback of consumer group %s failed", self._group)
            except BaseException as interrupt:
                self._interrupt = interrupt
            finally:
                self._in_callback = outer

        return call

    def _raise_interrupt(self) -> None:
        interrupt, self._interrupt = self._interrupt, None
        if interrupt is not None:
            raise interrupt

    # --- Outages ----------------------------------------------------------------------------------

    def _note(self, error: KafkaError | BaseException | None) -> None:
        """Remember an error of the client. It heals itself, unless the error is fatal."""
        if isinstance(error, KafkaError):
            if error.code() == KafkaError._PARTITION_EOF:
                return
            self._fatal = self._fatal or error.fatal() or error.code() == KafkaError._FATAL
        text = describe(error)
        if text != self.last_error:
            logger.warning("Consumer group %s: %s", self._group, text)
        self._report(text)

    def _report(self, text: str) -> None:
        if self.last_error is None:
            self._health_due = time.monotonic() + HEALTH_INTERVAL
        self.last_error = text

    def _check_health(self, consumer: Consumer) -> None:
        """Clear ``last_error`` once the cluster answers and has our topics.

        Asking for all topics also makes the client look at its subscription again, so a topic
        created late is found within a second and not at the next refresh.
        """
        try:
            topics = consumer.list_topics(timeout=HEALTH_TIMEOUT).topics
        except KafkaException:
            return
        missing = [
            topic
            for topic in self._topics
            if not topic.startswith("^")
            and (topic not in topics or topics[topic].error is not None)
        ]
        self.last_error = f"topic {missing[0]!r} does not exist" if missing else None

    def _ready(self) -> Consumer | None:
        """Return the consumer, replacing one that failed for good."""
        if self._fatal and self._consumer is not None:
            self._abandon(self._consumer)
        if self._consumer is None and time.monotonic() >= self._reopen_at:
            self._consumer = self._open()
        return self._consumer

    def _abandon(self, consumer: Consumer) -> None:
        logger.error("The consumer of group %s failed for good and is replaced", self._group)
        held = [KafkaPartition(*partition) for partition in self.assignment()]
        self._guard(self._on_lost)(consumer, held)
        self._leave(consumer)
        self._consumer = None
        self._fatal = self._torn = False
        self._committer.reset()
        self._reopen_at = time.monotonic() + REOPEN_INTERVAL

    def _open(self) -> Consumer:
        config = guarded(self._options.consumer(self._group), quiet)
        theirs = config.get("error_cb")

        def on_error(error: KafkaError) -> None:
            self._note(error)
            if theirs is not None:
                theirs(error)

        config["error_cb"] = self._guard(on_error)
        config["on_commit"] = self._guard(self._committer.answered)
        consumer: Consumer = make(Consumer, config, self._options)
        consumer.subscribe(
            self._topics,
            on_assign=self._guard(self._on_assign),
            on_revoke=self._guard(self._on_revoke),
            on_lost=self._guard(self._on_lost),
        )
        return consumer

    def _end_of(self, consumer: Consumer, reader: Reader) -> int | None:
        end = None if reader.client_paused else known_end_of(consumer, reader.partition)
        if end is None:
            edges = edges_of(consumer, reader.partition)
            end = edges[1] if edges else None
        return end


def record_of(message: Any, offset: int, reader: Reader) -> Record:
    """Return a message as ours."""
    kind, milliseconds = message.timestamp()
    return Record(
        reader.partition.topic,
        reader.partition.partition,
        offset,
        message.key(),
        message.value(),
        headers_of(message),
        None if kind == TIMESTAMP_NOT_AVAILABLE else moment(milliseconds),
        reader.assignment.epoch,
        reader.assignment,
    )


def headers_of(message: Any) -> dict[str, bytes]:
    """Return the headers; the last one of a name wins.

    A name that is not UTF-8 makes the client raise, at every try. The record is handed out all the
    same, with `UNREADABLE_HEADERS` alone: it must not hold up its partition for ever.
    """
    try:
        headers = read_headers(message)
    except Exception as error:
        return {UNREADABLE_HEADERS: describe(error.__cause__ or error).encode()}
    found = dict(headers) if headers else {}
    if None in found.values():
        return {name: value or b"" for name, value in found.items()}
    return found


def moment(milliseconds: int) -> datetime | None:
    """Return a record's timestamp, None for one no calendar holds: producers may send anything."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None
