"""Seed 5's six checks of idempotency, on the real database and broker."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from kjo_django.backends import get_transport
from kjo_django.conf import get_settings
from kjo_django.enqueue.dispatch import publish
from kjo_django.exceptions import KjoError, MessageError
from kjo_django.ids import uuid7
from kjo_django.models import ProcessedEvent
from kjo_django.patterns.events.event import BaseEvent, read_event, validated
from kjo_django.patterns.events.idempotency import EventIdempotencyService
from kjo_django.store.transactions import jobs_database
from kjo_django.transports.base import OutgoingRecord, Record, TopicSpec

TOPIC = "kjo-idempotency-check"
TYPE = "KJO_IDEMPOTENCY_CHECK"


@dataclass(frozen=True, slots=True)
class CheckResult:
    """One line of the answer."""

    name: str
    error: str = ""

    @property
    def is_ok(self) -> bool:
        """Whether it passed."""
        return not self.error


class CheckFailed(Exception):
    """What was observed is not what is promised."""


def check_idempotency(
    *, transport: str = "default", timeout: float = 30.0
) -> Iterator[CheckResult]:
    """Yield the result of each check as it is known. Leaves nothing behind but the topic
    ``kjo-idempotency-check``.

    :param timeout: seconds to wait for the broker.
    """
    check = _Check(transport, timeout)
    try:
        for name, run in check.all:
            try:
                run()
                yield CheckResult(name)
            except (CheckFailed, KjoError) as error:
                yield CheckResult(name, str(error))
            except Exception as error:
                yield CheckResult(name, f"{type(error).__name__}: {error}")
    finally:
        check.clean_up()


class _Check:
    def __init__(self, transport: str, timeout: float) -> None:
        self._transport = transport
        self._timeout = timeout
        run = uuid7().hex
        self._services = [EventIdempotencyService(f"kjo-check-{n}-{run}") for n in (1, 2)]
        self._event, self._other = (BaseEvent(type=TYPE, data={"userId": run}) for _ in range(2))
        self._calls = 0

    @property
    def all(self) -> list[tuple[str, Callable[[], None]]]:
        """The names are the seed's."""
        return [
            ("First event processing", self._first),
            ("Duplicate event skipping", self._duplicate),
            ("Different service processing", self._different_service),
            ("Different event processing", self._different_event),
            ("Database verification", self._database),
            ("Kafka idempotency", self._broker),
        ]

    def clean_up(self) -> None:
        names = [service.service_name for service in self._services]
        ProcessedEvent.objects.using(jobs_database()).filter(service_name__in=names).delete()

    def _process(self, event: BaseEvent, service: int = 0) -> bool:
        def count() -> None:
            self._calls += 1

        before = self._calls
        idempotency = self._services[service]
        outcome = idempotency.process_event_safely(event.id, event.type, count, event.to_wire())
        if outcome.processed != (self._calls == before + 1):
            raise CheckFailed(f"processed={outcome.processed}, but it was called otherwise")
        return outcome.processed

    def _expect(self, wanted: bool, event: BaseEvent, service: int = 0) -> None:
        if self._process(event, service) is not wanted:
            raise CheckFailed("it was skipped" if wanted else "it was processed again")

    def _first(self) -> None:
        self._expect(True, self._event)

    def _duplicate(self) -> None:
        self._expect(False, self._event)

    def _different_service(self) -> None:
        self._expect(True, self._event, service=1)

    def _different_event(self) -> None:
        self._expect(True, self._other)

    def _database(self) -> None:
        names = [service.service_name for service in self._services]
        rows = ProcessedEvent.objects.using(jobs_database()).filter(service_name__in=names)
        found = sorted(row.event_key for row in rows)
        wanted = sorted(
            (event.id, names[service], TYPE)
            for event, service in ((self._event, 0), (self._event, 1), (self._other, 0))
        )
        if found != wanted:
            raise CheckFailed(f"processed_events holds {len(found)} rows, not the {len(wanted)}")
        if any(row.event_data is None for row in rows):
            raise CheckFailed("event_data was not stored")

    def _broker(self) -> None:
        """Publish one event twice, keyed by its user; act once; a second consumer finds nothing."""
        transport = get_transport(self._transport)
        transport.ensure_topics([TopicSpec(TOPIC, 1)])
        event = BaseEvent(type=TYPE, data={"userId": self._event.user_id})
        copy = OutgoingRecord(TOPIC, event.to_bytes(), event.key.encode())
        group = f"{get_settings().service_name}-idempotency-check"
        if transport.capabilities.transactional:
            # There a record is for those who have subscribed.
            transport.subscribe([TOPIC], group).close()
        for answer in publish(transport, [copy, copy]):
            if answer.error is not None:
                raise CheckFailed(f"it was not published: {answer.error}")
        answers = [self._process(event) for _ in self._consume(group, event, 2)]
        if answers != [True, False]:
            raise CheckFailed(f"two deliveries were answered with processed={answers}")
        again = list(self._consume(group, event, 1, patience=2.0))
        if again:
            raise CheckFailed("a record that was acknowledged came again")

    def _consume(
        self, group: str, event: BaseEvent, count: int, patience: float | None = None
    ) -> Iterator[Record]:
        """Yield the event's records; each is acknowledged once it was dealt with, and what another
        run left behind as well."""
        deadline = time.monotonic() + (patience or self._timeout)
        subscription = get_transport(self._transport).subscribe([TOPIC], group)
        found = 0
        try:
            while found < count and time.monotonic() < deadline:
                for record in subscription.poll(100, 0.5):
                    if _id_of(record) == event.id:
                        found += 1
                        if record.key != event.key.encode():
                            raise CheckFailed("the key is not the user")
                        yield record
                    subscription.acknowledge([record])
            subscription.flush()
        finally:
            subscription.close()
        if found < count and patience is None:
            raise CheckFailed(f"{found} of {count} records came within {self._timeout:g} s")


def _id_of(record: Record) -> Any:
    try:
        return validated(read_event(record.value or b"")).id
    except MessageError:
        return None
