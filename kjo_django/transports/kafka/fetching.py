"""Taking messages from the client and handing them out as records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from confluent_kafka import Consumer, KafkaException

from kjo_django.transports.base import Record
from kjo_django.transports.kafka.callbacks import Callbacks
from kjo_django.transports.kafka.clients import error_of
from kjo_django.transports.kafka.health import Health
from kjo_django.transports.kafka.reading import Reader, Reading
from kjo_django.transports.kafka.records import record_of
from kjo_django.transports.watermark import Watermark

MOST_RECORDS = 10_000
"""Records of one fetch, whatever was asked for."""


class Fetcher:
    """One fetch at a time, in the thread that polls.

    The client's position moves with what it gives, so a fetch torn apart (by a signal, say) would
    skip it. Whatever is handed out is in the watermark before it leaves here; whatever is not, the
    next fetch goes back for.
    """

    def __init__(
        self, watermark: Watermark, reading: Reading, health: Health, callbacks: Callbacks
    ) -> None:
        self._watermark = watermark
        self._reading = reading
        self._health = health
        self._callbacks = callbacks
        self._torn = False

    def prepare(self, consumer: Consumer) -> None:
        """Bring the client to where the next fetch begins."""
        if self._torn:
            self._reading.rewind()
        if self._reading.unsteady:
            self._reading.steady(consumer)

    def fetch(self, consumer: Consumer, max_records: int, wait: float) -> list[Record]:
        """Serve callbacks and hand out what is there, waiting ``wait`` seconds for the first."""
        # From here until the records are on their way, a failure of any kind loses messages that
        # left the client. The flag makes the next round go back for them.
        self._torn = True
        messages, complete = self._take(consumer, max_records, wait)
        records, touched = self._convert(messages)
        self._callbacks.raise_interrupt()
        for reader in touched:
            self._watermark.deliver(reader.assignment, reader.hand_out())
        self._torn = not complete
        return records

    def serve(self, consumer: Consumer, wait: float) -> None:
        """Serve callbacks for up to so many seconds and hand out nothing: a message that arrives is
        put away for a later fetch, and ends the wait."""
        message = self._first(consumer, wait)
        if message is not None:
            self._reading.keep([message])
        if self._reading.unsteady:
            self._reading.steady(consumer)

    def _take(self, consumer: Consumer, max_records: int, wait: float) -> tuple[list[Any], bool]:
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
            self._health.note(error_of(error) or error)
            return None
        if message is not None and message.error() is not None:
            self._health.note(message.error())
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
            self._health.note(error_of(error) or error)
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
                self._health.note(message.error())
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
