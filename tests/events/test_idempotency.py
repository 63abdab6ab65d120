"""``EventIdempotencyService`` and ``kjo_check_idempotency`` (KII-20 … 23, KII-09, F2, F8)."""

from __future__ import annotations

import io
import math
import threading
import time

import pytest
from asgiref.sync import async_to_sync
from django.core.management import call_command
from django.db import connections

from kjo_django import EventIdempotencyService
from kjo_django.models import ProcessedEvent
from kjo_django.patterns.events.idempotency import ProcessOutcome
from tests.events.bench import EVENTS, MEMORY
from tests.ledger.models import Entry
from tests.unit.deliveries import kafka_at

pytestmark = pytest.mark.medium

SIX = """\
✅ First event processing: PASSED
✅ Duplicate event skipping: PASSED
✅ Different service processing: PASSED
✅ Different event processing: PASSED
✅ Database verification: PASSED
✅ Kafka idempotency: PASSED
"""


@pytest.mark.django_db(transaction=True)
class TestService:
    @pytest.fixture(autouse=True)
    def _settings(self, settings) -> None:
        settings.KJO = EVENTS

    def test_asked_and_marked(self) -> None:
        """KII-20, KII-21: False when it was marked before, no exception."""
        service = EventIdempotencyService()
        assert not service.is_event_processed("e", "T")
        assert service.mark_event_processed("e", "T", {"userId": "u"})
        assert not service.mark_event_processed("e", "T", {"other": 1})
        assert service.is_event_processed("e", "T")
        assert ProcessedEvent.objects.get().event_data == {"userId": "u"}

    @pytest.mark.postgres
    @pytest.mark.usefixtures("postgres")  # SQLite takes any text
    def test_data_that_no_database_keeps_stops_no_event(self) -> None:
        """It came with an event of others; what it marks must take effect all the same."""
        told = {"a\0": ["\0", {"b": "\ud800"}], "n": 1}
        assert EventIdempotencyService().process_event_safely("e", "T", lambda: 1, told).processed
        replaced = {"a\ufffd": ["\ufffd", {"b": "?"}], "n": 1}
        assert ProcessedEvent.objects.get().event_data == replaced

    def test_data_that_json_has_no_word_for_stops_no_event(self) -> None:
        """1e400 is JSON, and no number of ours; databases refuse infinity, some deep nesting, and
        MySQL rounds numbers of more than 64 bits."""
        deep: object = 1
        for _ in range(2000):
            deep = [deep]
        told = {"inf": math.inf, "n": [math.nan, 1.5, 2**64], "deep": deep}
        assert EventIdempotencyService().process_event_safely("e", "T", lambda: 1, told).processed
        kept = ProcessedEvent.objects.get().event_data
        assert (kept["inf"], kept["n"]) == ("inf", ["nan", 1.5, str(2**64)])
        assert "<too deep>" in str(kept["deep"])

    def test_what_is_another_event(self) -> None:
        """KII-23, KII-F8: another id, another type, another service; all of the triple counts."""
        one, other = EventIdempotencyService("one"), EventIdempotencyService("other")
        assert one.process_event_safely("e", "T", lambda: 1) == ProcessOutcome(True, 1)
        assert one.process_event_safely("e", "T", lambda: 2) == ProcessOutcome(False, None)
        for service, event, type in ((other, "e", "T"), (one, "e2", "T"), (one, "e", "T2")):
            assert not service.is_event_processed(event, type)
            assert service.process_event_safely(event, type, lambda: 3).processed

    def test_a_processor_that_raises_leaves_nothing(self) -> None:
        """KII-F2: marker and effects are one transaction."""

        def fail() -> None:
            Entry.objects.create(job="must go")
            raise RuntimeError("no")

        service = EventIdempotencyService()
        with pytest.raises(RuntimeError):
            service.process_event_safely("e", "T", fail)
        assert (Entry.objects.count(), service.is_event_processed("e", "T")) == (0, False)
        assert service.process_event_safely("e", "T", lambda: "now").result == "now"

    @pytest.mark.parametrize(
        ("event", "type"),
        [("", "T"), ("e" * 256, "T"), ("e", "t" * 101), ("a\0b", "T"), ("e", "\ud800")],
    )
    def test_names_that_do_not_fit_are_refused(self, event, type) -> None:
        with pytest.raises(ValueError, match="text of 1 to"):
            EventIdempotencyService().mark_event_processed(event, type)


@pytest.mark.django_db(transaction=True)
def test_the_async_twins(settings) -> None:
    settings.KJO = EVENTS
    service = EventIdempotencyService("async")

    async def write() -> str:
        await Entry.objects.acreate(job="once")
        return "written"

    async def fail() -> None:
        await Entry.objects.acreate(job="must go")
        raise RuntimeError("no")

    async def everything() -> list[object]:
        found: list[object] = [await service.ais_event_processed("e", "T")]
        for _ in range(2):
            found.append(await service.aprocess_event_safely("e", "T", write))
        found.append(await service.amark_event_processed("e", "T"))
        with pytest.raises(RuntimeError):
            await service.aprocess_event_safely("e2", "T", fail)
        found.append(await service.ais_event_processed("e2", "T"))
        return found

    assert async_to_sync(everything)() == [
        False,
        ProcessOutcome(True, "written"),
        ProcessOutcome(False, None),
        False,
        False,
    ]
    assert list(Entry.objects.values_list("job", flat=True)) == ["once"]


def test_ten_threads_with_one_event(real_database: str) -> None:
    """Issue 5, item 2: effects once, nine times processed=False, no exception."""
    service = EventIdempotencyService("threads")
    start = threading.Barrier(10)
    answers: list[ProcessOutcome[str]] = []
    errors: list[BaseException] = []

    def process() -> str:
        Entry.objects.create(job="once")
        time.sleep(0.2)  # sleep: so that the others come meanwhile
        return "done"

    def run() -> None:
        try:
            start.wait()
            answers.append(service.process_event_safely("e", "T", process))
        except BaseException as error:
            errors.append(error)
        finally:
            connections.close_all()

    threads = [threading.Thread(target=run) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(answer.processed for answer in answers) == [False] * 9 + [True]
    assert Entry.objects.count() == 1


@pytest.mark.large("memory")
@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("kjo", [{}, MEMORY], ids=["database", "memory"])
def test_the_command_prints_the_seeds_six_lines(settings, kjo) -> None:
    """KII-09; nothing is left behind, and it can be run again."""
    settings.KJO = {**EVENTS, **kjo}
    for _ in range(2):
        out = io.StringIO()
        call_command("kjo_check_idempotency", stdout=out)
        assert out.getvalue() == SIX
    assert not ProcessedEvent.objects.exists()


@pytest.mark.kafka
@pytest.mark.postgres
@pytest.mark.usefixtures("postgres")
def test_the_command_on_kafka_and_postgresql(settings, kafka_server) -> None:
    """KII-09, KII-32, KII-F5: an explicit commit, and a second consumer that finds nothing."""
    settings.KJO = kafka_at(kafka_server.bootstrap_servers)
    out = io.StringIO()
    call_command("kjo_check_idempotency", stdout=out)
    assert out.getvalue() == SIX


@pytest.mark.django_db(transaction=True)
def test_the_command_says_what_failed(settings, monkeypatch) -> None:
    from kjo_django.transports.base import Published
    from kjo_django.transports.memory import MemoryTransport

    settings.KJO = {**EVENTS, **MEMORY}
    monkeypatch.setattr(MemoryTransport, "publish", lambda self, r: [Published("away")] * len(r))
    out = io.StringIO()
    with pytest.raises(SystemExit):
        call_command("kjo_check_idempotency", stdout=out)
    assert "❌ Kafka idempotency: FAILED (it was not published: away)" in out.getvalue()
