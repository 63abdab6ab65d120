"""Events between services on real engines: crashes, restarts, a replay that is killed (issue 5)."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, ProcessedEvent
from kjo_django.patterns.events.event import BaseEvent, publish_event
from tests.acceptance.conftest import REAL
from tests.acceptance.engine import ALIAS, Engine
from tests.acceptance.program import Program

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(params=["embedded", REAL])
def service(request: pytest.FixtureRequest, monkeypatch) -> Engine:
    """An engine whose workers handle RECORD on a topic of the test's own."""
    engine: Engine = request.getfixturevalue(request.param)
    topic = engine.topic.replace("ledger-", "events-")
    monkeypatch.setenv("KJO_TEST_EVENTS", topic)
    engine.event_topic = topic  # type: ignore[attr-defined]
    return engine


def worker_of(service: Engine, *arguments: str) -> Program:
    topic = service.event_topic  # type: ignore[attr-defined]
    return service.manage(
        "kjo_consume", topic, f"{topic}-retry", "--status-interval", "0", *arguments
    )


def drain(service: Engine) -> None:
    worker = worker_of(service, "--drain")
    assert worker.wait() == 0, worker.log_tail()


def event(**data: object) -> BaseEvent:
    return BaseEvent(type="RECORD", data={"userId": "u1", **data})


def tell(service: Engine, *events: BaseEvent) -> list[str]:
    topic = service.event_topic  # type: ignore[attr-defined]
    for told in events:
        publish_event(topic, told)
    return [told.id for told in events]


@pytest.mark.promise("one-transaction")
@pytest.mark.medium("real")
def test_killed_between_handler_and_commit(service: Engine, tmp_path: Path) -> None:
    """Issue 5, item 2: after the restart the database effects exist exactly once."""
    drain(service)  # topics and groups exist
    path = tmp_path / "handler"
    (id,) = tell(service, event(path=str(path)))
    worker = worker_of(service)
    # Given the handler has written and its transaction is still open
    service.wait_until(lambda: path.with_name(f"handler.{worker.pid}").exists(), "It never started")
    # When
    worker.kill()
    assert service.entries.count() == 0
    path.with_name("handler.go").touch()
    drain(service)
    # Then
    assert service.ledger() == {id: 1}
    assert ProcessedEvent.objects.using(ALIAS).filter(event_id=id).count() == 1


def test_a_crash_in_the_middle_of_a_batch(service: Engine, tmp_path: Path) -> None:
    """Issue 5, item 3, with a crash: 3, 4 and 5 come again, nothing of 1 and 2 is repeated."""
    drain(service)
    ids = tell(service, *(event(note=n) for n in (1, 2)))
    ids += tell(service, event(note=3, kill=str(tmp_path / "once")))
    ids += tell(service, *(event(note=n) for n in (4, 5)))
    first = worker_of(service)
    assert first.wait() == -signal.SIGKILL, first.log_tail()
    drain(service)
    assert service.ledger() == dict.fromkeys(ids, 1)
    notes = service.entries.order_by("pk").values_list("note", flat=True)
    assert list(notes) == ["1", "2", "3", "4", "5"]


def test_a_failing_third_message_keeps_the_others_going(service: Engine) -> None:
    """KII-27: it is retried apart and ends as one dead letter, its entry undone each time."""
    ids = tell(service, event(note=1), event(note=2), event(fail=True), event(note=4))
    drain(service)
    drain_retries(service)
    assert service.ledger() == {id: 1 for n, id in enumerate(ids) if n != 2}
    letter = service.dead_letters.get()
    assert (letter.attempts, letter.reason) == (3, "exhausted")


def drain_retries(service: Engine) -> None:
    """Drain until the retries, which fall due later, have come to their end."""
    for _ in range(10):
        if service.dead_letters.exists():
            return
        service.wait_for_moment(0.5)
        drain(service)


# --- A replay that is killed ----------------------------------------------------------------------


def kill_a_replay(service: Engine, count: int) -> None:
    drain(service)
    letters = [letter(service, number) for number in range(count)]
    DeadLetter.objects.using(ALIAS).bulk_create(letters, batch_size=500)
    # Many are replayed together; at a rate they are replayed one by one.
    pace = ["--rate", "100"] if count < 10_000 else []
    replay = service.manage("kjo_replay_dlq", *pace)
    service.wait_until(
        lambda: service.dead_letters.filter(state="replayed").count() >= count // 2,
        "The replay did not get half-way",
        patience=900,
    )
    replay.kill()
    done = service.dead_letters.filter(state="replayed").count()
    assert count // 2 <= done < count
    # When it is run again
    again = service.manage("kjo_replay_dlq")
    assert again.wait(900) == 0, again.log_tail()
    drain(service)
    # Then each was republished, effects exist once, and progress was shown
    assert not service.dead_letters.exclude(state="replayed").exists()
    assert service.ledger() == {f"dead-{number}": 1 for number in range(count)}
    if count >= 10_000:  # a few hundred may be done before the first word of progress is due
        assert "Looked at: " in replay.log
    assert f"{count - done:,} replayed" in again.log


def letter(service: Engine, number: int) -> DeadLetter:
    topic = service.event_topic  # type: ignore[attr-defined]
    told = BaseEvent(id=f"dead-{number}", type="RECORD", data={"userId": f"u{number % 50}"})
    return DeadLetter(
        reason="fatal",
        source_id=f"dead-{number}",
        message_id=told.id,
        queue=topic,
        handler="RECORD",
        key=told.key.encode(),
        value=told.to_bytes(),
        headers=names.to_json({names.CONTENT_TYPE: b"application/json"}),
        topic=topic,
        partition=0,
        offset=number,
    )


def test_a_replay_killed_half_way(service: Engine) -> None:
    """Issue 5, item 6, smaller."""
    kill_a_replay(service, 250)


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_replay_of_ten_thousand_killed_half_way(service: Engine) -> None:
    """Issue 5, item 6."""
    kill_a_replay(service, int(os.environ.get("KJO_REPLAYS", "10000")))
