"""Publishing: one call has a producer for itself, and waits for every delivery report.

A broker takes or refuses a batch as a whole, and librdkafka sends the next batch of a partition
without waiting for the answer to the one before. What was in a refused batch would come
behind what was sent after it. So records that are on their way together, a *portion*, are cut such
that the records of a key are in one batch: those of a key behind what fills a batch wait for the
next portion, and behind a record that was not accepted they are not sent at all.

Three facts of librdkafka make batches predictable. The client is this call's alone, and nothing is
on its way when a portion begins. ``linger.ms`` is longer than handing a portion over takes, so no
batch leaves before it is full or ``flush`` is called. Nothing expires in the client by itself, one
record now and the next of its key later: when the time is up, all that is left is purged at once.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from kjo_django.messages.headers import HEADER_LIST, listed
from kjo_django.transports.base import OutgoingRecord, Published
from kjo_django.transports.kafka.clients import (
    KafkaOptions,
    Refusals,
    describe,
    error_of,
    logger,
    make,
    merge,
    watched,
)

LINGER_MS = 10_000
TIMEOUT_MARGIN_MS = 60_000
"""Beyond the delivery timeout, until librdkafka would expire records one by one."""

GRACE = 5.0
"""Seconds in which what was purged is reported."""

SLICE = 0.01
"""Seconds of one wait."""

REFUSED_WAIT = 3.0
"""Seconds of refusals after which a publish is given up, where no record of it was taken."""

RECORD_OVERHEAD = 80
HEADER_OVERHEAD = 16
REQUEST_OVERHEAD = 1_024
"""Bytes, rather too many: what a batch holds beside keys, values and headers."""

TOO_LARGE = KafkaError.MSG_SIZE_TOO_LARGE
FINAL = frozenset({TOO_LARGE, KafkaError.INVALID_RECORD})
"""Refusals that say something about the record, not about the moment."""

OF_THE_TOPIC = frozenset(
    {
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
    }
)
PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})

_Key = tuple[str, bytes]
"""Topic and key: what has an order."""


class Client(NamedTuple):
    """A producer, and what certainly fits into one of its batches."""

    producer: Producer
    topics: set[str]
    """Those it has sent to. Of others it knows no partitions yet: what waits for these gets into
    batches of any size."""
    batch_bytes: int
    batch_records: int


class OrderedSend:
    """One call of ``publish``. ``outcomes`` says what became of each record."""

    def __init__(
        self,
        client: Client,
        records: Sequence[OutgoingRecord],
        timeout: float,
        refusals: Refusals,
    ) -> None:
        self.outcomes = [Published(error="not sent within delivery.timeout.ms") for _ in records]
        self.errors: list[KafkaError] = []
        """Whatever was reported or raised."""
        self._client = client
        self._records = records
        self._refusals = refusals
        self._began = time.monotonic()
        self._deadline = self._began + timeout
        self._failed: dict[_Key, str] = {}
        """Keys of records that may be accepted another time, with the reason: nothing of theirs
        may be accepted before."""
        self._is_taken = False
        """Whether a record of an earlier portion was accepted."""

    @property
    def is_unanswered(self) -> bool:
        """Whether the time was up and no record had been taken."""
        return not self._is_taken and any(error.code() in PURGED for error in self.errors)

    def send(self, indices: Sequence[int]) -> None:
        """Send these of the records."""
        while indices and time.monotonic() < self._deadline:
            portion, later = self._cut(indices)
            sent, unsent = self._deliver(portion)
            suspects = [index for index in sent if self.outcomes[index].is_final]
            if len(suspects) > 1:
                self._send_in_halves(suspects)
            for index in sent:
                self._note(index)
            indices = sorted([*unsent, *later])

    def _send_in_halves(self, suspects: Sequence[int]) -> None:
        """Send again what was in batches the broker refused for what is in them.

        One record the topic never takes would keep all others of its batch from ever going out, and
        so would a backlog that fills batches larger than it takes.
        """
        for index in suspects:
            # Of a record that was not alone, this says nothing.
            self.outcomes[index].is_final = self.outcomes[index].is_too_large = False
        middle = len(suspects) // 2
        for half in (suspects[:middle], suspects[middle:]):
            self.send(half)

    # --- Cutting ----------------------------------------------------------------------------------

    def _cut(self, indices: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return the next portion, and what waits for the one after it."""
        if self._fits_one_batch(indices):
            return list(indices), []
        portion: list[int] = []
        later: list[int] = []
        seen: set[_Key] = set()
        waiting: set[_Key] = set()
        sizes: dict[str, int] = {}
        counts: dict[str, int] = {}
        for index in indices:
            record = self._records[index]
            topic, key = record.topic, key_of(record)
            size = sizes.get(topic, 0) + size_of(record)
            count = counts.get(topic, 0) + 1
            is_one_batch = (
                topic in self._client.topics
                and size <= self._client.batch_bytes
                and count <= self._client.batch_records
            )
            if key is not None and (key in waiting or (key in seen and not is_one_batch)):
                waiting.add(key)
                later.append(index)
                continue
            if key is not None:
                seen.add(key)
            sizes[topic], counts[topic] = size, count
            portion.append(index)
        return portion, later

    def _fits_one_batch(self, indices: Sequence[int]) -> bool:
        """Return whether all of these certainly go into one batch: the common case, in which their
        keys need not be looked at."""
        topic = self._records[indices[0]].topic
        if topic not in self._client.topics or len(indices) > self._client.batch_records:
            return False
        size, most = 0, self._client.batch_bytes
        for index in indices:
            record = self._records[index]
            size += size_of(record)
            if size > most or record.topic != topic:
                return False
        return True

    # --- One portion ------------------------------------------------------------------------------

    def _deliver(self, portion: Sequence[int]) -> tuple[list[int], list[int]]:
        """Send a portion and wait for its reports; return what was sent, and what the client had no
        room for."""
        reports: list[KafkaError | None] = []
        sent: list[int] = []
        unsent: list[int] = []
        for position, index in enumerate(portion):
            try:
                if self._produce(index, reports):
                    sent.append(index)
            except BufferError:
                unsent = list(portion[position:])
                break
        self._wait_for(len(sent), reports)
        self._judge(sent, [error for error in reports if error is not None])
        return sent, unsent

    def _wait_for(self, count: int, reports: Sequence[KafkaError | None]) -> None:
        """Wait until so many reports are there. When the time is up, what the client still has is
        purged, which is reported, too."""
        producer = self._client.producer
        purged_at = None
        while len(reports) < count:
            producer.flush(SLICE)
            now = time.monotonic()
            if purged_at is None and self._is_hopeless(now, reports):
                producer.purge()
                purged_at = now
            elif purged_at is not None and now > purged_at + GRACE:
                break

    def _judge(self, sent: Sequence[int], errors: Sequence[KafkaError]) -> None:
        """Note what the reports of records that were sent say of brokers and topics."""
        self.errors += errors
        purged = {describe(error) for error in errors if error.code() in PURGED}
        for index in sent:
            outcome = self.outcomes[index]
            if outcome.error is None:
                self._is_taken = True
                self._client.topics.add(self._records[index].topic)
            elif outcome.error in purged:
                outcome.error = self._why_purged()

    def _is_hopeless(self, now: float, reports: Sequence[KafkaError | None]) -> bool:
        """Whether the time is up; or no broker lets us in, and has not for a while: one that starts
        may refuse the first."""
        if now >= self._deadline:
            return True
        if self._refusals.reason is None or now < self._began + REFUSED_WAIT:
            return False
        # With "in", a KafkaError would be compared with None, which leaves an exception behind.
        return all(error is not None for error in reports) and not self._is_taken

    def _produce(self, index: int, reports: list[KafkaError | None]) -> bool:
        """Hand one record to librdkafka; False when it is not sent, and the outcome says why.

        :raises BufferError: its queue is full.
        """
        record, outcome = self._records[index], self.outcomes[index]
        if self._failed and (key := key_of(record)) is not None and key in self._failed:
            outcome.error = f"held back behind an earlier record of its key: {self._failed[key]}"
            return False
        arguments: dict[str, Any] = {"value": record.value, "key": record.key}
        if record.headers:
            is_list = HEADER_LIST in record.headers
            arguments["headers"] = listed(record.headers) if is_list else dict(record.headers)
        if record.partition is not None:
            arguments["partition"] = record.partition
        on_delivery = partial(report, outcome, reports)
        try:
            self._client.producer.produce(record.topic, on_delivery=on_delivery, **arguments)
        except KafkaException as exception:
            error = error_of(exception)
            if error is not None:
                self.errors.append(error)
            refuse(outcome, error, describe(exception))
            if error is not None and error.code() == TOO_LARGE:
                # librdkafka's own text blames a broker that has not been asked.
                outcome.error = f"{error.name()}: larger than the client's own message.max.bytes"
            self._note(index)
            return False
        outcome.error = "no delivery report arrived in time"
        return True

    # --- What became of it ------------------------------------------------------------------------

    def _why_purged(self) -> str:
        refusal = self._refusals.reason
        if refusal is not None and not self._is_taken:
            return refusal
        timed_out = describe(KafkaError(KafkaError._MSG_TIMED_OUT))
        reason = refusal or self._refusals.last_error
        return f"{timed_out} (last broker error: {reason})" if reason else timed_out

    def _note(self, index: int) -> None:
        """Hold back the key of a record that was not taken and may be another time."""
        outcome = self.outcomes[index]
        if outcome.error is None or outcome.is_final:
            return
        key = key_of(self._records[index])
        if key is not None:
            self._failed.setdefault(key, outcome.error)


def key_of(record: OutgoingRecord) -> _Key | None:
    """Return what a record is ordered by, None where it is not."""
    return None if record.key is None else (record.topic, record.key)


def size_of(record: OutgoingRecord) -> int:
    """Return what a record takes of a batch, in bytes; rather too much."""
    headers = record.headers
    names, values = len("".join(headers)), len(b"".join(headers.values()))
    inside = names * 4 + values + HEADER_OVERHEAD * len(headers)
    return len(record.value or b"") + len(record.key or b"") + inside + RECORD_OVERHEAD


def report(
    outcome: Published, reports: list[KafkaError | None], error: KafkaError | None, message: Any
) -> None:
    """Note one delivery report. Runs in whichever thread polls; a list's append is atomic."""
    if error is None:
        outcome.error = None
        outcome.partition = message.partition()
        outcome.offset = message.offset()
    else:
        refuse(outcome, error, describe(error))
    reports.append(error)


def refuse(outcome: Published, error: KafkaError | None, text: str) -> None:
    """Note why a record was not taken."""
    outcome.error = text
    outcome.is_final = error is not None and error.code() in FINAL
    outcome.is_too_large = error is not None and error.code() == TOO_LARGE
    outcome.is_topics = error is not None and error.code() in OF_THE_TOPIC


MOST_PRODUCERS = 4
"""Calls that publish at a time. Each producer beyond the first is made when it is needed."""

MOST_MS = 2_147_483_647
"""What librdkafka takes for a time."""


class Publisher:
    """The producers of a process, each of them one call's at a time. Thread-safe."""

    def __init__(self, options: KafkaOptions) -> None:
        self._options = options
        # The last in is the first out: one that is connected is used again.
        self._free: queue.LifoQueue[Client | None] = queue.LifoQueue()
        for _ in range(MOST_PRODUCERS):
            self._free.put(None)  # made when it is needed
        self._refusals = Refusals(options)

    def publish(self, records: Sequence[OutgoingRecord]) -> list[Published]:
        """Return the outcome of each record, when all are known."""
        if not records:
            return []
        timeout = self._options.delivery_timeout
        try:
            client = self._free.get(timeout=timeout)
        except queue.Empty:
            text = "all producers were busy for delivery.timeout.ms"
            return [Published(error=text) for _ in records]
        try:
            client = client or self._make()
            send = OrderedSend(client, records, timeout, self._refusals)
            send.send(range(len(records)))
            if not send.errors:
                self._refusals.forget()
            fatal = [e for e in send.errors if e.fatal() or e.code() == KafkaError._FATAL]
            if fatal:
                # After it an idempotent producer refuses everything for ever.
                text = "The Kafka producer failed permanently and is replaced: %s"
                logger.error(text, describe(fatal[0]))
            if fatal or send.is_unanswered:
                # One that forgot every broker connects to none any more (librdkafka#5301).
                client = None
        finally:
            self._free.put(client)
        return send.outcomes

    def close(self) -> None:
        """Forget the producers that are not in use; they are made anew when needed.

        ``publish`` waits for its own reports, so nothing of these is on its way. What others are
        sending belongs to callers that have been given up: the rows of their jobs stay pending.
        """
        count = 0
        with suppress(queue.Empty):
            while True:
                self._free.get_nowait()
                count += 1
        for _ in range(count):
            self._free.put(None)

    def _make(self) -> Client:
        timeout_ms = int(self._options.delivery_timeout * 1000) + TIMEOUT_MARGIN_MS
        own = {"linger.ms": LINGER_MS, "delivery.timeout.ms": min(timeout_ms, MOST_MS)}
        config = merge(self._options.producer(), own)
        # First, since it refuses by name what is no number.
        producer = make(Producer, watched(config, self._refusals.note), self._options)
        size, largest, count = (
            int(str(config.get(key) or default), 0)
            for key, default in (
                ("batch.size", 1_000_000),
                ("message.max.bytes", 1_000_000),
                ("batch.num.messages", 10_000),
            )
        )
        return Client(producer, set(), min(size, largest) - REQUEST_OVERHEAD, count)
