"""Reading the assigned partitions: positions, pauses, the stash, fetches, messages as records.

Two facts of the client shape this module:

- ``pause`` throws away what is prefetched; a pause between an assignment and its first fetch can
  lose the start; a resume followed by another operation can be dropped as outdated. So a partition
  is paused only at a known position; resuming seeks there first and resumes last; and a partition
  that stays silent afterwards is looked at again.
- There is no way to serve callbacks without taking a message. So a poll for nothing keeps what it
  takes in a stash, and holds all partitions back while that is full.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from operator import methodcaller
from typing import Any

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, Consumer, KafkaError, KafkaException
from confluent_kafka import TopicPartition as KafkaPartition

from kjo_django.messages.headers import HEADER_LIST, folded
from kjo_django.transports.base import Record, TopicPartition, timestamp_of
from kjo_django.transports.kafka.clients import describe, error_of, logger
from kjo_django.transports.watermark import Assignment, Watermark
from kjo_django.values import count_within

UNKNOWN = -1
"""The position of a partition from which nothing came yet."""

MOST_RECORDS = 10_000
"""Records of one fetch, whatever was asked for."""
STASH_RECORDS = 1_000
STASH_BYTES = 8 * 1024 * 1024

VERIFY_AFTER = 5.0
"""Seconds after a resume until silence is suspicious."""


class Reader:
    """How far one assigned partition is read, under one epoch."""

    __slots__ = (
        "alive",
        "assignment",
        "batch",
        "client_paused",
        "confirmed",
        "muted",
        "partition",
        "position",
        "restart",
        "sought_at",
    )

    def __init__(self, assignment: Assignment, muted: bool) -> None:
        self.assignment = assignment
        self.partition = assignment.partition
        self.alive = True
        self.position = UNKNOWN
        """The next offset to hand out."""
        self.confirmed = UNKNOWN
        """``position`` when the last poll returned; an interrupted poll goes back to it."""
        self.muted = muted
        """What arrives is dropped, and the client is sent back to ``position`` before it ends."""
        self.restart = False
        """What was dropped may not have been the beginning: ask where that is."""
        self.client_paused = False
        self.sought_at = 0.0
        """When the client was last sent elsewhere; what it had fetched may come after that."""
        self.batch: list[int] = []

    def at_position(self) -> KafkaPartition:
        return KafkaPartition(*self.partition, self.position)

    def meet(self, offset: int) -> None:
        """Note that a message arrived which is not handed out now."""
        if self.position == UNKNOWN and not self.restart:
            self.position = self.confirmed = offset

    def delivered(self) -> list[int]:
        """Return the offsets of the batch, which are delivered now, and begin another."""
        self.confirmed = self.position
        batch, self.batch = self.batch, []
        return batch

    def go_back(self) -> None:
        """Read again what was not handed out."""
        self.batch = []
        self.position = self.confirmed
        self.muted = True
        self.restart = self.restart or self.position == UNKNOWN

    def is_log_new(self) -> bool:
        """Whether an offset below ``position`` says that the log is another than it was: truncated,
        or deleted and made again, so that the client went back by itself."""
        return time.monotonic() - self.sought_at > VERIFY_AFTER

    def begin_anew(self, assignment: Assignment, offset: int) -> None:
        """Read on at an offset of another log, under an epoch of its own: what is still in work of
        the former one moves nothing here."""
        logger.warning(
            "%s is read from offset %d: its log was truncated or recreated", self.partition, offset
        )
        self.assignment = assignment
        self.position = self.confirmed = offset
        self.batch = []


class Reading:
    """All readers of a subscription, and its fetches. Belongs to the thread that polls.

    The client's position moves with what it gives, so a fetch torn apart (by a signal, say) would
    skip it. Whatever is handed out is in the watermark before it leaves here; whatever is not, the
    next fetch goes back for.

    :param note: is called with each error that the client gives in place of a message.
    :param raise_interrupt: raises what has interrupted a callback.
    :param starts_at_the_end: where a group without a committed offset begins.
    """

    def __init__(
        self,
        watermark: Watermark,
        note: Callable[[KafkaError | KafkaException | None], object],
        raise_interrupt: Callable[[], None],
        *,
        starts_at_the_end: bool,
    ) -> None:
        self.readers: dict[tuple[str, int], Reader] = {}
        self.unsteady = False
        """Whether ``_steady`` has something to do."""
        self._watermark = watermark
        self._note = note
        self._raise_interrupt = raise_interrupt
        self._starts_at_the_end = starts_at_the_end
        self._fresh: set[Reader] = set()
        """Assigned since the client was called."""
        self._paused: set[TopicPartition] = set()
        self._stash: deque[Any] = deque()
        self._stash_bytes = 0
        self._mean_bytes = 0
        """Of the values that the client gave last."""
        self._all_paused = False
        """Whether all partitions are paused, since the stash is full."""
        self._torn = False
        """Whether messages have left the client that were not handed out."""
        self._resumed: list[tuple[float, Reader, int]] = []
        """When to look whether a resumed partition was silent, and its position then."""

    # --- Assignments ------------------------------------------------------------------------------

    def assign(self, partition: TopicPartition) -> None:
        """Begin an epoch of a partition, which is read from its committed offset."""
        reader = Reader(self._watermark.assign(partition), muted=partition in self._paused)
        self.readers[partition] = reader
        self._fresh.add(reader)
        self.unsteady = True

    def _of(self, message: Any) -> Reader | None:
        return self.readers.get((message.topic(), message.partition()))

    def retire(self, readers: Iterable[Reader]) -> None:
        for reader in readers:
            reader.alive = False
            self.readers.pop(reader.partition, None)
            self._fresh.discard(reader)
        self._drop_from_stash()

    # --- Stash ------------------------------------------------------------------------------------

    def _keep(self, message: Any) -> None:
        """Put a message away for a later fetch."""
        reader = self._of(message)
        if reader is None:
            return
        reader.meet(message.offset())
        if reader.muted:
            self.unsteady = True
            return
        self._stash.append(message)
        self._stash_bytes += len(message)
        if len(self._stash) >= STASH_RECORDS or self._stash_bytes >= STASH_BYTES:
            self._all_paused = self.unsteady = True

    def _set_stash(self, messages: Iterable[Any]) -> None:
        """Keep these messages put away and no others. Positions stand before what is forgotten."""
        self._stash = deque(messages)
        self._stash_bytes = sum(map(len, self._stash))
        if self._all_paused and not self._stash:
            self._all_paused, self.unsteady = False, True

    def _drop_from_stash(self) -> None:
        """Forget what is put away of partitions that are paused or gone."""
        of = self._of
        kept = [m for m in self._stash if (reader := of(m)) is not None and not reader.muted]
        self._set_stash(kept)

    # --- Pausing and going back -------------------------------------------------------------------

    def pause(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.update(partitions)
        for reader in self.readers.values():
            if reader.partition in self._paused:
                reader.muted = True
        self._drop_from_stash()
        self.unsteady = True

    def resume(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused.difference_update(partitions)
        self.unsteady = True

    def _steady(self, consumer: Consumer) -> None:
        """Bring the client's pauses and positions to what they should be, as far as it allows."""
        self.unsteady = False
        for reader in list(self.readers.values()):
            try:
                if reader.partition in self._paused:
                    self._pause_client(consumer, reader)
                elif reader.muted or (reader.client_paused and not self._all_paused):
                    self._resume_client(consumer, reader)
                elif self._all_paused:
                    self._pause_client(consumer, reader)
            except KafkaException as error:
                # Not fetching yet, or on its way out: the next round tries again.
                logger.debug("Could not pause or resume %s: %s", reader.partition, describe(error))
                self.unsteady = True

    def _pause_client(self, consumer: Consumer, reader: Reader) -> None:
        # At an unknown position the first message is awaited first.
        if not reader.client_paused and reader.position != UNKNOWN:
            consumer.pause([reader.at_position()])
            reader.client_paused = True

    def _resume_client(self, consumer: Consumer, reader: Reader) -> None:
        if reader.restart and reader.position == UNKNOWN:
            self._find_start(consumer, reader)
            if reader.position == UNKNOWN:
                self.unsteady = True
                return
        if reader.position != UNKNOWN:
            consumer.seek(reader.at_position())
            reader.sought_at = time.monotonic()
        # Last: an operation after it would outdate a resume not yet carried out.
        if reader.client_paused:
            consumer.resume([reader.at_position()])
        reader.muted = reader.client_paused = reader.restart = False
        self._resumed.append((time.monotonic() + VERIFY_AFTER, reader, reader.position))

    def _find_start(self, consumer: Consumer, reader: Reader) -> None:
        """Ask for the committed offset, else for the first one or the one after the last."""
        try:
            (found,) = consumer.committed([reader.at_position()], timeout=QUERY_TIMEOUT)
        except KafkaException:
            return
        if found.error is None and found.offset >= 0:
            reader.position = reader.confirmed = found.offset
        elif found.error is None and (edges := edges_of(consumer, reader)):
            reader.position = reader.confirmed = edges[self._starts_at_the_end]

    def _verify(self, consumer: Consumer) -> None:
        """Read again a partition that stays silent after a resume though it holds more."""
        now = time.monotonic()
        due = [entry for entry in self._resumed if entry[0] <= now]
        if not due:
            return
        self._resumed = [entry for entry in self._resumed if entry[0] > now]
        for _, reader, position in due:
            silent = reader.alive and not reader.muted and reader.position == position
            if silent and not reader.client_paused and self._has_more(consumer, reader):
                logger.warning(
                    "%s delivers nothing after a resume; it is paused and resumed again",
                    reader.partition,
                )
                # Paused again first: the client ignores a resume of what it believes is running.
                consumer.pause([reader.at_position()])
                reader.muted = reader.client_paused = True
                self.unsteady = True

    def _has_more(self, consumer: Consumer, reader: Reader) -> bool:
        if self._stash:
            return False
        edges = edges_of(consumer, reader)
        return edges is not None and edges[1] > max(reader.position, edges[0])

    # --- Fetching ---------------------------------------------------------------------------------

    def prepare(self, consumer: Consumer) -> None:
        """Bring the client to where the next fetch begins."""
        if self._torn:
            self._set_stash(())
            for reader in self.readers.values():
                reader.go_back()
            self.unsteady = True
        if self.unsteady:
            self._steady(consumer)
        if self._resumed:
            self._verify(consumer)

    def fetch(
        self, consumer: Consumer, max_records: int, max_bytes: int, wait: float
    ) -> list[Record]:
        """Serve callbacks and hand out what is there, waiting ``wait`` seconds for the first."""
        # From here until the records are on their way, a failure of any kind loses messages that
        # left the client. The flag makes the next round go back for them.
        self._torn = True
        messages, is_complete = self._take(consumer, max_records, max_bytes, wait)
        records, touched = self._convert(messages)
        self._raise_interrupt()
        for reader in touched:
            self._watermark.deliver(reader.assignment, reader.delivered())
        self._torn = not is_complete
        return records

    def serve(self, consumer: Consumer, wait: float) -> None:
        """Serve callbacks for up to so many seconds and hand out nothing: a message that arrives is
        put away for a later fetch, and ends the wait."""
        message = self._first(consumer, wait)
        if message is not None:
            self._keep(message)
        if self.unsteady:
            self._steady(consumer)

    def _take(
        self, consumer: Consumer, max_records: int, max_bytes: int, wait: float
    ) -> tuple[list[Any], bool]:
        """Return messages, and whether the client gave all it took."""
        self._fresh.clear()
        count = min(max_records, count_within(map(len, self._stash), max_bytes))
        messages = [self._stash.popleft() for _ in range(count)]
        if messages:
            self._set_stash(self._stash)
        first = self._first(consumer, 0.0 if messages else wait)
        if self._fresh:
            # Put away under an earlier assignment, which may have begun elsewhere.
            messages = [each for each in messages if self._of(each) not in self._fresh]
        if first is None:
            return messages, True
        bytes_left = max_bytes - sum(map(len, messages))
        if len(messages) >= max_records or bytes_left <= 0:
            self._keep(first)
            return messages, True
        messages.append(first)
        bytes_left -= len(first)
        # The client knows no limit of bytes. As many as it would be if they were as large as the
        # last ones were; what is too much is put away.
        fitting = bytes_left // max(1, len(first), self._mean_bytes)
        wanted = min(min(max_records, MOST_RECORDS) - len(messages), fitting)
        if wanted <= 0:
            return messages, True
        taken = self._consume(consumer, wanted)
        if taken is None:
            return messages, False
        count = count_within(map(len, taken), bytes_left)
        self._put_away(taken[count:])
        return messages + taken[:count], True

    def _put_away(self, messages: Iterable[Any]) -> None:
        for message in messages:
            if message.error() is not None:
                self._note(message.error())
            else:
                self._keep(message)

    def _consume(self, consumer: Consumer, wanted: int) -> list[Any] | None:
        """Return as many of the messages that the client has already; None: it gave none of them.
        Waiting for more would cost latency."""
        self._fresh.clear()
        try:
            taken = consumer.consume(wanted, 0)
        except KafkaException as error:
            self._note(error_of(error) or error)
            return None
        for reader in self._fresh:
            # Assigned during this very call: what the batch holds of them may have been fetched
            # under an earlier assignment, and handing it out would skip what lies before.
            reader.confirmed = UNKNOWN
            reader.go_back()
            self.unsteady = True
        if taken:
            self._mean_bytes = sum(map(len, taken)) // len(taken)
        return taken

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

    def _convert(self, messages: Sequence[Any]) -> tuple[list[Record], list[Reader]]:
        """Return the records to hand out, and the readers they come from."""
        readers = self.readers
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
                self.unsteady = True
                continue
            if offset < reader.position:
                if not reader.is_log_new():
                    continue  # fetched twice, around a seek
                # Skipped, they would be lost: these are not the records that had been here before.
                reader.begin_anew(self._watermark.assign(reader.partition), offset)
            reader.position = offset + 1
            if not reader.batch:
                touched.append(reader)
            reader.batch.append(offset)
            records.append(record_of(message, offset, reader.assignment))
        return records, touched


# --- Records -------------------------------------------------------------------------------------

UNREADABLE_HEADERS = "kjo-unreadable-headers"
"""The only header of a record whose headers cannot be read; its value says why."""

read_headers = methodcaller("headers")
"""The client fails by returning a list of null pointers beside an error. Calls that the interpreter
has specialized do not look for such an error, and to iterate that list kills the process; a call by
way of C always looks."""


def record_of(message: Any, offset: int, assignment: Assignment) -> Record:
    """Return a message as ours, handed out under ``assignment``."""
    kind, milliseconds = message.timestamp()
    topic, partition = assignment.partition
    return Record(
        topic,
        partition,
        offset,
        message.key(),
        message.value(),
        headers_of(message),
        None if kind == TIMESTAMP_NOT_AVAILABLE else timestamp_of(milliseconds),
        assignment.epoch,
        assignment,
    )


def headers_of(message: Any) -> dict[str, bytes]:
    """Return the headers; of a name given twice the last counts, and none is forgotten, see
    ``messages.headers.folded``.

    A name that is not UTF-8 makes the client raise, at every try. The record is handed out all the
    same, with `UNREADABLE_HEADERS` alone: it must not hold up its partition for ever.
    """
    try:
        headers = read_headers(message)
    except Exception as error:
        return {UNREADABLE_HEADERS: describe(error.__cause__ or error).encode()}
    if not headers:
        return {}
    found: dict[str, bytes] = dict(headers)
    is_all = len(found) == len(headers) and None not in found.values()
    return found if is_all and HEADER_LIST not in found else folded(headers)


QUERY_TIMEOUT = 1.0
"""Seconds. The thread that asks is the one that polls."""


def edges_of(consumer: Consumer, reader: Reader) -> tuple[int, int] | None:
    """Return the first offset of a partition and the one after its last, None without an answer."""
    try:
        return consumer.get_watermark_offsets(reader.at_position(), timeout=QUERY_TIMEOUT)
    except KafkaException:
        return None
