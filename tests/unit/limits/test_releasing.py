"""Jobs that wait for a limit, released by a thread of their own as others start and end.

Tier: quick; SQLite stands for every database, since what is asked here is when statements are sent,
and which again. How their locks behave is in tests/conformance.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from django.db import OperationalError, connection, connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.clock import Clock
from kjo_django.engine.leases import LeaseBook
from kjo_django.limits import lines
from kjo_django.limits.limiter import Limiter
from kjo_django.limits.releasing import LEFT_WITHIN, Releaser
from kjo_django.limits.rules import Limit
from kjo_django.models import NEVER, HeldJob, Job
from kjo_django.runtime import current_runtime
from kjo_django.values import rate
from kjo_django.worker.duties import LineDuty
from tests.factories import JobFactory
from tests.faults.clock import Clock as Time
from tests.waiting import PATIENCE

pytestmark = pytest.mark.django_db(transaction=True)
LIMIT = Limit("RATE:job:tests.line", rate("5/s"))
SLOTS = Limit("SLOT:job:tests.line", slots=2)


@pytest.fixture
def leases() -> Iterator[LeaseBook]:
    yield LeaseBook(current_runtime(), "tests", timedelta(minutes=5), timedelta(minutes=1))


@pytest.fixture
def releaser(standing_clock: Time, leases: LeaseBook) -> Releaser:
    ignore: Any = lambda *_: None  # noqa: E731
    return Limiter(leases, ignore, ignore, ignore).releaser


def in_line(limit: Limit = LIMIT, *, is_released: bool = False) -> UUID:
    job = JobFactory(handler="tests.line", queue="emails", available_at=NEVER)
    HeldJob.objects.create(job_id=job.pk, limit=limit.name, queue="emails", is_released=is_released)
    return job.pk


def released() -> list[UUID]:
    return list(HeldJob.objects.filter(is_released=True).values_list("job_id", flat=True))


def refusing(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Let the database refuse what ``lines`` does under this name, once."""
    function, errors = getattr(lines, name), [OperationalError("refused")]

    def refuse(*arguments: Any, **options: Any) -> Any:
        if errors:
            raise errors.pop()
        return function(*arguments, **options)

    monkeypatch.setattr(lines, name, refuse)


def test_jobs_that_start_leave_the_line_together(releaser: Releaser, standing_clock: Time) -> None:
    # Given two groups in a row
    first, second = in_line(is_released=True), in_line(is_released=True)
    releaser.note({first: 1}, [], {})
    assert releaser.awake.is_set()
    with CaptureQueriesContext(connection) as queries:
        assert releaser.step() == pytest.approx(LEFT_WITHIN)
        releaser.note({second: 1}, [], {})
        assert releaser.step() == pytest.approx(LEFT_WITHIN)
        assert len(queries) == 0
        # When their time is over
        standing_clock.advance(LEFT_WITHIN)
        assert releaser.step() > 60
        # Then one statement takes both out, and nothing is left to do
        assert len(queries) == 1
    assert not HeldJob.objects.exists()
    assert not releaser.awake.is_set()


def test_a_job_that_was_held_again_since_it_started_keeps_its_place(releaser: Releaser) -> None:
    again, later = in_line(), in_line(is_released=True)
    HeldJob.objects.filter(job_id=later).update(generation=2)
    releaser.note({again: 1, later: 1}, [], {})
    releaser.settle_starts()
    assert HeldJob.objects.count() == 2


def test_jobs_are_released_a_quarter_of_their_time_after_the_last_ones(
    releaser: Releaser, standing_clock: Time
) -> None:
    # Given a line of which as many are on their way as may be
    for _ in range(40):
        in_line()
    releaser.note({}, [], {LIMIT: 0.0})
    releaser.step()
    most = lines.most_released(LIMIT)
    first = released()
    assert len(first) == most
    assert releaser.is_filling(LIMIT)
    # When two of them start
    releaser.note(dict.fromkeys(first[:2], 1), [LIMIT], {})
    standing_clock.advance(LEFT_WITHIN)
    seconds = releaser.step()
    # Then others are released later, and so many in all
    assert seconds == pytest.approx(lines.covered(LIMIT) / 4 - LEFT_WITHIN)
    assert len(released()) == most - 2
    standing_clock.advance(seconds)
    releaser.step()
    assert len(released()) == most


def test_the_first_ones_in_line_are_due_when_they_may_start(
    releaser: Releaser, standing_clock: Time
) -> None:
    in_line()
    runtime = current_runtime()
    releaser.note({}, [], {LIMIT: runtime.clock.monotonic() + 30.0})
    standing_clock.advance(10.0)
    releaser.step()
    (job,) = Job.objects.filter(pk__in=released())
    left = (job.available_at - runtime.clock.now()).total_seconds()
    assert left == pytest.approx(20.0 - lines.DUE_BEFORE, abs=0.01)


@pytest.mark.parametrize("what", ["leave", "released_count", "fill"])
def test_what_the_database_refuses_is_done_with_the_next_step(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    # Given one that has started, and two lines that are to be filled
    started = in_line(is_released=True)
    waiting, other = in_line(), in_line(SLOTS)
    releaser.note({started: 1}, [], {LIMIT: 0.0, SLOTS: 0.0})
    # When
    refusing(monkeypatch, what)
    with pytest.raises(OperationalError, match="refused"):
        releaser.step()
    releaser.step()
    # Then
    assert sorted(released()) == sorted([waiting, other])
    assert not HeldJob.objects.filter(job_id=started).exists()


def test_a_line_that_cannot_be_filled_keeps_no_other_waiting(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused, waiting = in_line(), in_line(SLOTS)
    releaser.note({}, [], {LIMIT: 0.0, SLOTS: 0.0})
    refusing(monkeypatch, "fill")
    with pytest.raises(OperationalError):
        releaser.step()
    assert released() == [waiting]
    assert releaser.awake.is_set()
    releaser.step()
    assert set(released()) == {waiting, refused}


def test_slots_that_become_free_while_lines_are_filled_do_not_wait_for_all_of_these(
    releaser: Releaser, leases: LeaseBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given several lines to be filled, and a slot that is given back during the first
    waiting, filled = in_line(SLOTS), list[tuple[str, list[UUID]]]()
    others = [Limit(f"{LIMIT.name}:{key}", LIMIT.rate) for key in "abc"]
    for other in others:
        in_line(other)
    releaser.note({}, [], dict.fromkeys(others, 0.0))
    fill = lines.fill

    def give_back(runtime: Any, name: str, *arguments: Any) -> bool:
        filled.append((name, released()))
        if len(filled) == 1:
            leases.freed[SLOTS.name] += 1
        return fill(runtime, name, *arguments)

    monkeypatch.setattr(lines, "fill", give_back)
    releaser.step()
    # Then
    assert [waiting in before for _, before in filled] == [False, True, True]


def test_a_slot_whose_next_job_could_not_be_released_is_not_forgotten(
    releaser: Releaser, leases: LeaseBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting = in_line(SLOTS)
    leases.freed[SLOTS.name] += 1
    refusing(monkeypatch, "lines_to_release")
    with pytest.raises(OperationalError):
        releaser.step()
    assert releaser.is_busy
    releaser.step()
    assert not releaser.is_busy
    assert released() == [waiting]


def test_slots_that_cannot_be_looked_for_keep_no_other_line_waiting(
    releaser: Releaser, leases: LeaseBook, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: Any) -> None:
        raise OperationalError("refused")

    leases.freed[SLOTS.name] += 1
    waiting = in_line()
    releaser.note({}, [], {LIMIT: 0.0})
    monkeypatch.setattr(lines, "lines_to_release", refuse)
    with pytest.raises(OperationalError):
        releaser.step()
    assert released() == [waiting]


def test_the_place_of_a_job_that_has_ended_keeps_nobody_waiting(releaser: Releaser) -> None:
    """It is deleted a moment later."""
    ended = [in_line(SLOTS, is_released=True) for _ in range(2)]
    Job.objects.filter(pk__in=ended).update(state="completed")
    waiting = in_line(SLOTS)
    releaser.note({}, [], {SLOTS: 0.0})
    releaser.step()
    assert waiting in released()


def test_who_gives_a_started_job_another_place_waits_for_the_one_that_deletes_the_first(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the new one would be taken for the first, and deleted."""
    releaser.note({in_line(is_released=True): 1}, [], {})
    begun, go_on, done = threading.Event(), threading.Event(), list[str]()

    def delete(*arguments: Any, **options: Any) -> None:
        if not begun.is_set():
            begun.set()
            assert go_on.wait(PATIENCE)
        done.append("deleted")

    monkeypatch.setattr(lines, "leave", delete)
    deleting = threading.Thread(target=releaser.settle_starts)
    deleting.start()
    assert begun.wait(PATIENCE)

    def give() -> None:
        releaser.settle_starts()
        done.append("given")

    giving = threading.Thread(target=give)
    giving.start()
    giving.join(0.05)
    assert done == []
    go_on.set()
    for thread in (deleting, giving):
        thread.join(PATIENCE)
    assert (done[0], done[-1]) == ("deleted", "given")


def test_a_job_that_waits_again_right_after_its_start_keeps_its_place(releaser: Releaser) -> None:
    again = in_line(is_released=True)
    releaser.note({again: 1}, [], {})
    releaser.keep([again])
    releaser.settle_starts()
    assert HeldJob.objects.filter(job_id=again).exists()


def test_a_worker_that_stops_releases_for_a_second_and_no_longer(
    releaser: Releaser, standing_clock: Time, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = [Limit(f"{LIMIT.name}:{key}", LIMIT.rate) for key in "abcdef"]
    for limit in limits:
        in_line(limit)
    releaser.note({}, [], dict.fromkeys(limits, 0.0))
    fill = lines.fill

    def fill_slowly(*arguments: Any) -> bool:
        standing_clock.advance(0.4)
        return fill(*arguments)

    monkeypatch.setattr(lines, "fill", fill_slowly)
    limiter: Any = SimpleNamespace(releaser=releaser)
    duty = LineDuty(current_runtime(), limiter)
    duty.wake()
    duty.close()
    assert len(released()) == 3


def test_a_job_that_is_released_later_is_due_no_earlier(
    releaser: Releaser, standing_clock: Time
) -> None:
    """Before the first of its key it would be sent back into line, and be released at once, again
    and again."""
    slow = Limit("RATE:job:tests.line", rate("1/s"))
    first, now = in_line(slow), releaser._runtime.clock.monotonic()
    # Given a job that may start in four seconds, and is on its way
    releaser.note({}, [], {slow: now + 4.0})
    releaser.step()
    # When another one gets in line behind it, a second later
    standing_clock.advance(1.0)
    second = in_line(slow)
    releaser.note({}, [], {slow: 0.0})
    releaser.step()
    # Then
    assert released() == [first, second]
    due = dict(Job.objects.values_list("pk", "available_at"))
    assert timezone.now() < due[first] <= due[second] < NEVER


def test_a_slot_that_is_free_again_releases_the_next(releaser: Releaser, leases: LeaseBook) -> None:
    waiting = in_line(SLOTS)
    in_line(SLOTS)
    leases.freed[SLOTS.name] += 1
    releaser.step()
    assert released() == [waiting]


def test_a_thread_that_has_nothing_to_do_keeps_no_connection(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a thread's duty, whose waits are answered here
    closed: list[float] = []
    waits: list[float] = []

    class Waiting(Clock):
        def wait(self, event: Any, seconds: float | None) -> bool:
            assert seconds is not None
            waits.append(seconds)
            return len(waits) == 2

    monkeypatch.setattr(connections, "close_all", lambda: closed.append(len(waits)))
    limiter: Any = SimpleNamespace(releaser=releaser)
    duty = LineDuty(current_runtime(), limiter)
    duty._clock = Waiting()
    # When it waits for long
    assert duty.step() == 0.0
    # Then
    assert closed == [1]
    assert waits[0] == LineDuty.KEPT_CONNECTED
    # And one that has something to do soon keeps it
    releaser.note({in_line(is_released=True): 1}, [], {})
    duty._pause = 0.1
    duty.step()
    assert closed == [1]


def test_a_duty_whose_step_was_refused_does_not_wait_for_another_reason(
    releaser: Releaser, monkeypatch: pytest.MonkeyPatch
) -> None:
    limiter: Any = SimpleNamespace(releaser=releaser)
    duty, waiting = LineDuty(current_runtime(), limiter), in_line()
    releaser.note({}, [], {LIMIT: 0.0})
    refusing(monkeypatch, "fill")
    with pytest.raises(OperationalError):
        duty.step()
    duty.step()
    assert released() == [waiting]


def test_a_worker_that_ends_lets_what_has_started_leave_the_line(releaser: Releaser) -> None:
    releaser.note({in_line(is_released=True): 1}, [], {})
    limiter: Any = SimpleNamespace(releaser=releaser)
    LineDuty(current_runtime(), limiter).close()
    assert not HeldJob.objects.exists()
