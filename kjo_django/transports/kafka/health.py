"""What is wrong with a consumer, and whether it still is."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import Consumer, KafkaError, KafkaException

from kjo_django.transports.kafka.clients import describe, logger
from kjo_django.transports.kafka.options import KafkaOptions
from kjo_django.transports.kafka.refusals import Refusals, is_refusal

CHECK_INTERVAL = 1.0
CHECK_TIMEOUT = 0.25

AWAY = frozenset({KafkaError._TRANSPORT, KafkaError._ALL_BROKERS_DOWN, KafkaError._RESOLVE})
"""Of one outage: the client tells of each broker, and of each try with the milliseconds it took."""


class Health:
    """The latest error of a group's client. Belongs to the thread that polls.

    The client tells of errors and never that they are over, since it heals itself; so while there
    is one, the cluster is asked now and then.

    :param topics: those that must exist; patterns (``^...``) need not.
    """

    def __init__(self, options: KafkaOptions, group: str, topics: Sequence[str]) -> None:
        self._refusals = Refusals(options)
        self._group = group
        self._topics = [topic for topic in topics if not topic.startswith("^")]
        self._due = 0.0
        self.last_error: str | None = None
        """See `Subscription.last_error`."""
        self._is_away = False
        self.is_fatal = False
        """Whether the client failed for good: it answers nothing any more, and must be replaced."""

    def note(self, error: KafkaError | BaseException | None) -> None:
        """Remember an error the client gave us, in whatever way."""
        if isinstance(error, KafkaError):
            if error.code() == KafkaError._PARTITION_EOF:
                return
            self.is_fatal = self.is_fatal or error.fatal() or error.code() == KafkaError._FATAL
        is_away = isinstance(error, KafkaError) and error.code() in AWAY
        if is_away and self._refusals.reason is not None:
            return  # what follows from a refusal is no reason of its own
        if isinstance(error, KafkaError) and is_refusal(error):
            self._refusals.note(error)
            self.report(self._refusals.explain(error))
            return
        if is_away and self._is_away and self.last_error is not None:
            return  # an outage has one text, or everybody who is told would tell of it every second
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

    def check(self, consumer: Consumer, now: float) -> None:
        """Clear ``last_error`` once the cluster answers and has our topics, asking once a second.

        Asking for all topics also makes the client look at its subscription again, so a topic
        created late is found within a second and not at the next refresh.
        """
        if self.last_error is None or now < self._due:
            return
        self._due = now + CHECK_INTERVAL
        try:
            topics = consumer.list_topics(timeout=CHECK_TIMEOUT).topics
        except KafkaException:
            return
        self._refusals.forget()
        missing = [
            topic
            for topic in self._topics
            if topic not in topics or topics[topic].error is not None
        ]
        self.last_error = f"topic {missing[0]!r} does not exist" if missing else None
