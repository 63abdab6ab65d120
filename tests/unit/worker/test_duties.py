"""A worker's duties, whatever goes wrong, step by step and on a thread: lags, listening, any."""

from __future__ import annotations

import threading
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.db import OperationalError

from kjo_django import registry
from kjo_django.conf import get_settings
from kjo_django.enqueue.storing import topic_channel, wake
from kjo_django.exceptions import CoordinationError, PublishError
from kjo_django.models import MetricBucket, MetricRollup
from kjo_django.operations.maintenance import topics
from kjo_django.operations.monitoring import metrics
from kjo_django.runtime import current_runtime, get_coordination, get_transport
from kjo_django.transports.database import DatabaseTransport
from kjo_django.transports.memory import MemoryTransport
from kjo_django.values import LONGEST
from kjo_django.worker import duties
from kjo_django.worker.duties import (
    DutyThread,
    LagRecorder,
    LeasedDuty,
    PublishListener,
    TopicCheck,
    record_lag,
)
from tests.ledger.jobs import write
from tests.unit.deliveries import KJO, Bench, SetClock
from tests.waiting import PATIENCE, wait_until

pytestmark = pytest.mark.medium  # threads and waits of a worker, in real time


class Sweep(LeasedDuty):
    """Fails as often as it is told to."""

    leases = ("SWEEP",)

    def __init__(self, runtime=None, token="me", errors=(), pause=timedelta(seconds=0.02)) -> None:
        self._errors = list(errors)
        self.rounds = 0
        self.has_worked = threading.Event()
        super().__init__(runtime or current_runtime(), token, pause.total_seconds())

    def work_on(self, held: list[str]) -> None:
        if self._errors:
            raise self._errors.pop()
        self.rounds += 1
        self.has_worked.set()


@pytest.fixture(autouse=True)
def _configured(sqlite_file, settings, monkeypatch):
    # Whatever other tests of this process have registered.
    monkeypatch.setattr(registry, "consumed_queue_names", lambda: ["ledger", "other"])
    settings.KJO = {**KJO, "QUEUES": {"ledger": {}, "other": {}}}


def test_its_steps_do_what_is_due_and_say_when_to_come_back():
    clock = SetClock()
    sweep = Sweep(replace(current_runtime(), clock=clock), pause=timedelta(minutes=1))
    assert (sweep.step(), sweep.rounds) == (60, 0)
    clock.seconds += 59
    assert (sweep.step(), sweep.rounds) == (1, 0)
    clock.seconds += 1
    assert (sweep.step(), sweep.rounds) == (60, 1)


def test_of_two_workers_one_does_it_until_it_leaves():
    clock = SetClock()
    runtime = replace(current_runtime(), clock=clock)
    first, second = (Sweep(runtime, name, pause=timedelta(minutes=1)) for name in "ab")
    for _ in range(2):
        clock.seconds += 60
        first.step()
        second.step()
    assert (first.rounds, second.rounds) == (2, 0)
    first.close()
    clock.seconds += 60
    second.step()
    assert second.rounds == 1


def run_until_it_has_worked(sweep):
    thread = DutyThread(current_runtime(), "sweep", [sweep])
    thread.start()
    try:
        assert sweep.has_worked.wait(PATIENCE)
    finally:
        thread.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.parametrize(
    "error",
    [OperationalError("away"), ValueError("a bug")],
    ids=lambda error: type(error).__name__,
)
def test_it_goes_on_after_whatever_goes_wrong(error, caplog):
    """Promise 3: nobody else would notice that nothing is rescued any more."""
    # Given
    sweep = Sweep(errors=[error])
    # When, then
    run_until_it_has_worked(sweep)
    assert f"Sweep failed, trying again: {error}" in caplog.text
    assert get_coordination().holders(["SWEEP"]) == {}


def test_an_outage_is_logged_once_a_minute_however_often_a_duty_is_tried(caplog):
    # Given a duty that meets the same outage at each step, and then another one
    errors = [OperationalError("away")] * 3 + [OperationalError("locked")]
    sweep = Sweep(errors=errors)
    # When
    run_until_it_has_worked(sweep)
    # Then
    assert caplog.text.count("Sweep failed, trying again: away") == 1
    assert caplog.text.count("Sweep failed, trying again: locked") == 1


def test_one_that_fails_keeps_no_other_of_its_thread_from_its_work():
    failing, other = Sweep(errors=[ValueError("a bug")] * 1000), Sweep(token="other")
    other.leases = ("OTHER",)
    thread = DutyThread(current_runtime(), "both", [failing, other])
    thread.start()
    try:
        assert other.has_worked.wait(PATIENCE)
    finally:
        thread.stop()
        thread.join(PATIENCE)
        assert not thread.is_alive()


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("pause", [3 * LONGEST, timedelta.max])
def test_a_rest_without_end_ends_no_duty(pause):
    """Three heartbeats of a century are longer than a thread can wait."""
    thread = DutyThread(current_runtime(), "sweep", [Sweep(pause=pause)])
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()
    thread.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


# --- The lag of queues, as one worker for all writes it down --------------------------------------


HOUR = timedelta(hours=1)


def watch(token: str = "me") -> LagRecorder:
    conf = get_settings()
    return LagRecorder(current_runtime(), token, [conf.queue("ledger"), conf.queue("other")])


def lags() -> dict[str, int]:
    return dict(MetricBucket.objects.values_list("queue", "lag"))


def test_what_waits_is_written_down_and_shown():
    # Given
    Bench().poll()
    write.enqueue_many({"job": str(number)} for number in range(3))
    # When
    watch().work_on(["LAG:ledger", "LAG:other"])
    # Then
    assert lags() == {"ledger": 3, "other": 0}
    assert metrics.totals(HOUR).lag == 3
    assert metrics.series(timedelta(days=7)).points[-1].lag == 3


def test_whoever_writes_writes_the_same_rows():
    """Or screens, which add rows up, would show the lag of every worker there ever was."""
    record_lag(current_runtime(), "ledger", 5)
    record_lag(current_runtime(), "ledger", 4)
    assert lags() == {"ledger": 4}
    assert MetricRollup.objects.count() == 2


def test_one_worker_asks_for_each_queue():
    # Given another worker that has one of them
    get_coordination().claim(["LAG:ledger"], "another", HOUR)
    # Then
    assert watch()._take_leases() == ["LAG:other"]


def test_a_broker_that_was_away_is_asked_again_as_soon_as_ever(standing_clock, monkeypatch):
    """It lets an answer wait for half a minute: the charts would stay empty for ten more."""

    def away(topics, group):
        standing_clock.advance(30)
        raise PublishError("no broker")

    monkeypatch.setattr(get_transport(), "lag", away)
    asking = watch()
    asking.work_on(["LAG:ledger", "LAG:other"])
    assert asking.pause == 15


def test_a_transport_that_is_away_is_asked_once_and_nothing_breaks(monkeypatch):
    # Given
    asked = []

    def away(topics, group):
        asked.append(topics)
        raise PublishError("no broker")

    monkeypatch.setattr(get_transport(), "lag", away)
    # When
    watch().work_on(["LAG:ledger", "LAG:other"])
    # Then
    assert len(asked) == 1
    assert lags() == {}


def test_a_slow_answer_is_asked_for_less_often(standing_clock, monkeypatch, settings):
    settings.KJO = {**KJO, "HEARTBEAT_INTERVAL": 5}
    slow = watch()
    assert slow.pause == 15
    monkeypatch.setattr(LagRecorder, "ASKING_SHARE", 1000)

    def answer_slowly(topics, group):
        standing_clock.advance(0.06)
        return {}

    monkeypatch.setattr(get_transport(), "lag", answer_slowly)
    slow.work_on(["LAG:ledger"])
    assert slow.pause == pytest.approx(60)


# --- Who listens for publishing, and for how long -------------------------------------------------


class Polling:
    """As much of a poller as listening needs."""

    def __init__(self, topic: str, needs_wakeup: bool = True) -> None:
        self.topics = [topic]
        self.needs_wakeup = needs_wakeup
        self.woken = threading.Event()
        self.wake = self.woken.set
        self.relies_on_wake_ups = False

    def rely_on_wake_ups(self, is_reliable: bool) -> None:
        self.relies_on_wake_ups = is_reliable


def listening(poller: Polling) -> DutyThread:
    runtime = current_runtime()
    return DutyThread(runtime, "listening", [PublishListener(runtime, [poller])])


def test_a_call_wakes_the_pollers_and_stopping_waits_for_nothing():
    # Given
    poller = Polling("a")
    thread = listening(poller)
    thread.start()
    # When
    # ... again and again: it may not have listened yet
    wait_until(lambda: wake(current_runtime(), topic_channel("a")) or poller.woken.wait(0.02))
    # Then
    assert poller.woken.is_set()
    thread.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()


def test_coordination_that_is_away_at_the_start_is_listened_to_once_it_is_back(
    monkeypatch, failing, caplog
):
    """Or a worker started during an outage of Redis would poll for the rest of its life."""
    # Given
    poller = Polling("a")
    failing(get_coordination(), "listen", *[CoordinationError("away")] * 2)
    monkeypatch.setattr(duties, "LISTEN_AGAIN", 0.05)
    thread = listening(poller)
    # When
    thread.start()
    wait_until(lambda: wake(current_runtime(), topic_channel("a")) or poller.woken.wait(0.02))
    # Then
    assert poller.woken.is_set()
    thread.stop()
    thread.join(PATIENCE)
    assert not thread.is_alive()
    assert caplog.text.count("This worker cannot be notified") == 1


@pytest.mark.parametrize("reaches_others", [True, False])
def test_pollers_rely_on_calls_once_those_of_other_processes_are_heard(monkeypatch, reaches_others):
    """Without them a poller that looks seldom would find another process's jobs late."""
    # Given
    poller = Polling("a")
    coordination = SimpleNamespace(
        listen=get_coordination().listen, supports_wake_ups=reaches_others
    )
    monkeypatch.setattr(PublishListener, "LONGEST_WAIT", 0.0)
    listener = PublishListener(replace(current_runtime(), coordination=coordination), [poller])
    # When
    listener.step()
    # Then
    assert poller.relies_on_wake_ups is reaches_others
    listener.close()


def test_nobody_listens_for_a_broker_that_answers_the_poll_itself():
    assert not PublishListener(current_runtime(), [Polling("a", needs_wakeup=False)]).is_needed


def test_those_who_publish_within_a_transaction_call():
    assert DatabaseTransport.capabilities.transactional
    assert not MemoryTransport.capabilities.transactional


# --- Topics ---------------------------------------------------------------------------------------


def test_topics_that_were_there_are_looked_at_again_each_minute(monkeypatch):
    """FINDINGS 2.11: one that is deleted under a worker is made again."""
    clock, answers, told = SetClock(), [], []

    def look(queues):
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(topics, "ensure_topics", look)
    runtime = replace(current_runtime(), clock=clock)
    check = TopicCheck(runtime, [get_settings().queue("ledger")], told.append)
    answers.append([])
    check.start()
    # Nothing is asked twice at the start, nor before a minute has passed
    check.start()
    assert check.step() == TopicCheck.LOOK_AGAIN
    # When: it is gone, then the broker is
    clock.advance(TopicCheck.LOOK_AGAIN)
    answers += [["created ledger with 1 partitions"], PublishError("away"), []]
    assert check.step() == TopicCheck.LOOK_AGAIN
    clock.advance(TopicCheck.LOOK_AGAIN)
    soon = check.step()
    # Then: it is asked for again with each heartbeat until the broker answers
    assert soon == runtime.settings.heartbeat_interval.total_seconds()
    clock.advance(soon)
    assert check.step() == TopicCheck.LOOK_AGAIN
    assert told == [None, None, "Topics could not be checked yet: away", None]
    assert answers == []
