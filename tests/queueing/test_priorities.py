"""Priorities: what is urgent runs first on every transport, and nothing starves for it."""

from __future__ import annotations

import math
import os
import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
from django.core.checks import run_checks

from kjo_django import PermanentError, job
from kjo_django.conf import get_settings
from kjo_django.engine import scheduler
from kjo_django.engine.poller import Poller
from kjo_django.messages import headers as names
from kjo_django.models import DeadLetter, Job, TransportMessage
from kjo_django.operations import dead_letters
from kjo_django.operations.maintenance import topics
from kjo_django.operations.monitoring import health, status
from kjo_django.outbox.relay import Relay
from kjo_django.round_trips import GroupBudget
from kjo_django.runtime import current_runtime, get_transport
from kjo_django.transports.base import OutgoingRecord
from kjo_django.worker import Worker
from tests.unit.deliveries import KJO, MEMORY
from tests.unit.workers import Configure, Noting, Turns
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.medium,  # threads and waits of a worker, in real time
    pytest.mark.usefixtures("forgotten_definitions"),
]

PROMISED = 1.0
"""Seconds until an urgent job begins, whatever others do."""


# --- Levels ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "topics_of"),
    [
        (1, {0: "mail"}),
        (2, {1: "mail-high", 0: "mail"}),
        (3, {1: "mail-high", 0: "mail", -1: "mail-low"}),
        (4, {2: "mail-urgent", 1: "mail-high", 0: "mail", -1: "mail-low"}),
    ],
)
def test_a_queue_has_a_topic_for_each_of_its_levels(settings, count, topics_of):
    settings.KJO = {**KJO, "QUEUES": {"mail": {"priorities": count}}}
    queue = get_settings().queue("mail")
    assert dict(queue.levels) == topics_of
    # And every priority is in one of them
    for priority in range(-100, 101):
        level = queue.level_of(priority)
        least, most = queue.priorities_of(level)
        assert least <= priority <= most
    assert queue.level_of(None) == 0


@pytest.mark.parametrize(
    ("priority", "levels"),
    [
        *[(100, (2, 1, 1)), (50, (2, 1, 1)), (49, (1, 1, 1)), (1, (1, 1, 1))],
        *[(0, (0, 0, 0)), (-1, (-1, -1, 0)), (-100, (-1, -1, 0))],
    ],
)
def test_a_priority_has_the_nearest_level_that_its_queue_has(settings, priority, levels):
    settings.KJO = {**KJO, "QUEUES": {f"q{n}": {"priorities": n} for n in (4, 3, 2)}}
    found = tuple(get_settings().queue(f"q{n}").level_of(priority) for n in (4, 3, 2))
    assert found == levels


@pytest.mark.parametrize("wrong", [0, 5, "high", 2.0, True, None])
def test_a_wrong_number_of_levels_is_refused_with_its_place(settings, wrong):
    settings.KJO = {**KJO, "QUEUES": {"mail": {"priorities": wrong}}}
    (error,) = run_checks(tags=["kjo"])
    assert (error.id, error.msg) == (
        "kjo.E001",
        f"KJO['QUEUES']['mail']['priorities'] must be a whole number from 1 to 4, not {wrong!r}.",
    )


def test_the_topic_of_a_level_is_no_other_queues(settings):
    settings.KJO = {**KJO, **MEMORY, "QUEUES": {"mail": {"priorities": 2}, "mail-high": {}}}
    errors = [error for error in run_checks(tags=["kjo"]) if error.id == "kjo.E018"]
    assert [error.msg for error in errors] == [
        "KJO['QUEUES']['mail']['priorities'] is 2, so the queue needs the topic 'mail-high', "
        "which is the queue 'mail-high''s."
    ]


def test_a_priority_that_changes_nothing_is_warned_of(settings):
    settings.KJO = {**KJO, **MEMORY, "QUEUES": {"mail": {}, "levelled": {"priorities": 2}}}
    job(name="tests.plain", queue="mail", priority=5)(lambda: None)
    job(name="tests.levelled", queue="levelled", priority=5)(lambda: None)
    (warning,) = [each for each in run_checks(tags=["kjo"]) if each.id == "kjo.W018"]
    assert warning.msg.startswith("The job 'tests.plain' has priority=5, and its queue 'mail' ")
    # And the database transport needs no levels
    settings.KJO = {**KJO, "QUEUES": {"mail": {}}}
    assert not [each for each in run_checks(tags=["kjo"]) if each.id == "kjo.W018"]


# --- Storing --------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [101, -101, 1.5, "high", True])
def test_a_wrong_priority_is_refused_where_it_is_written(wrong):
    says = "priority must be a whole number from -100 to 100"
    with pytest.raises(ValueError, match=says):
        job(priority=wrong)
    with pytest.raises(ValueError, match=says):
        job(name="tests.any")(lambda: None).using(priority=wrong)


@pytest.mark.django_db
def test_a_job_is_stored_with_its_priority_and_a_plain_one_without(settings):
    settings.KJO = {**KJO, "QUEUES": {"mail": {}, "levelled": {"priorities": 3}}}
    urgent = job(name="tests.urgent", queue="mail", priority=5)(lambda: None)
    urgent.enqueue()
    urgent.using(priority=-3).enqueue()
    urgent.using(priority=0).enqueue()
    urgent.using(queue="levelled", priority=0).enqueue()
    urgent.using(priority=7).enqueue_many([{}, {}])
    stored = list(Job.objects.order_by("id").values_list("priority", flat=True))
    assert stored == [5, -3, None, 0, 7, 7]
    # And so are its messages on the database transport
    assert list(TransportMessage.objects.order_by("rank", "id").values_list("rank", "topic")) == [
        *[(-7, "mail")] * 2,
        (-5, "mail"),
        (0, "mail"),
        (0, "levelled"),
        (3, "mail"),
    ]


def snippets(page: str) -> list[str]:
    text = (Path(__file__).parents[2] / "docs/how-to" / f"{page}.md").read_text()
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


@pytest.mark.django_db
def test_the_snippets_of_the_pages_run(settings):
    settings.KJO = {**KJO, "QUEUES": {"mail": {}}}
    names: dict[str, object] = {"__name__": "shop.jobs"}
    for code in [*snippets("priorities"), *snippets("retries")]:
        exec(code, names)
    names["invite"]("somebody")
    assert Job.objects.get().priority == 5
    # And the settings shown are good ones
    settings.KJO = {**KJO, **names["KJO"]}
    assert get_settings().queue("mail").topics == ["mail-high", "mail", "mail-low"]


# --- The relay ------------------------------------------------------------------------------------


@pytest.fixture
def levelled(settings, sqlite_file):
    """A job of a queue with three levels on the memory transport; relays send ten rows at once."""
    settings.KJO = {
        **KJO,
        **MEMORY,
        "QUEUES": {"mail": {"priorities": 3}},
        "RELAY_BATCH_SIZE": 10,
    }
    return job(name="tests.mail", queue="mail")(lambda number: None)


def work() -> None:
    """Let a worker run what is due."""
    worker = Worker(["mail"], owns_process=False)
    worker.run(worker.is_drained)


def published(topic: str) -> int:
    return len(get_transport().records(topic))


def test_the_relay_sends_what_is_urgent_past_a_backlog_that_was_due_before(levelled):
    # Given a backlog of low ones, of which none is published yet
    levelled.using(priority=-5).enqueue_many([{"number": n} for n in range(200)])
    levelled.enqueue(number=0)
    levelled.using(priority=60).enqueue(number=1)
    relay = Relay(["mail"])
    # When a batch is published
    relay.publish_due()
    # Then they are in it, and so are low ones
    assert (published("mail-high"), published("mail")) == (1, 1)
    assert 1 <= published("mail-low") <= 20
    # And all are published once in the end
    while relay.publish_due():
        pass
    assert [published(topic) for topic in get_settings().queue("mail").topics] == [1, 1, 200]
    places = Job.objects.values_list("topic", flat=True)
    assert sorted(set(places)) == ["mail", "mail-high", "mail-low"]


def test_low_ones_go_out_beside_a_flood_of_urgent_ones(levelled):
    # Given low ones that are due after a backlog of urgent ones
    levelled.using(priority=5).enqueue_many([{"number": n} for n in range(200)])
    levelled.using(priority=-5).enqueue(number=0)
    # When
    Relay(["mail"]).publish_due()
    # Then
    assert published("mail-low") == 1


def test_jobs_of_one_key_and_priority_keep_their_order_through_the_relay(levelled):
    levelled.using(priority=-5).enqueue_many([{"number": n} for n in range(50)])
    keyed = levelled.using(priority=5, key="k")
    for number in range(30):
        keyed.enqueue(number=number)
    relay = Relay(["mail"])
    while relay.publish_due():
        pass
    records = get_transport().records("mail-high")
    assert [record.value for record in records] == [b'{"number":%d}' % n for n in range(30)]


# --- What counts all levels -----------------------------------------------------------------------


def test_topics_lag_and_queues_know_all_levels(levelled):
    # Given one unread record in each level
    topics.create(["mail"])
    for priority in (-5, 0, 60):
        levelled.using(priority=priority).enqueue(number=0)
    Relay(["mail"]).publish_due()
    # Then
    wanted = {topic.spec.name for topic in topics.wanted(["mail"])}
    assert wanted == {"mail", "mail-high", "mail-low", "mail-dlq"}
    (row,) = [row for row in status.queue_rows()[0] if row["queue"] == "mail"]
    assert (row["topics"], row["lag"]) == (["mail-high", "mail", "mail-low"], 3)
    assert row["lag_by_partition"] == {"0": 1, "mail-high/0": 1, "mail-low/0": 1}
    assert health.lag_by_partition(5)["mail"] == row["lag_by_partition"]


def test_a_retry_has_the_level_of_its_job(levelled):
    # Given a job that fails once, and a message of others in a level
    outcomes = iter([False])

    def fail(number):
        if not next(outcomes, True):
            raise RuntimeError("not yet")

    job(name="tests.fails", queue="mail", priority=-5, backoff=0)(fail).enqueue(number=1)
    work()
    # Then both its messages were in the level's topic
    assert Job.objects.get().state == "completed"
    assert published("mail-low") == 2


def test_a_message_of_others_keeps_its_level_when_it_is_tried_again(levelled):
    outcomes = iter([False])

    def fail(number):
        if not next(outcomes, True):
            raise RuntimeError("not yet")

    job(name="tests.theirs", queue="mail", backoff=0)(fail)
    headers = {names.ID: b"theirs-1", names.TYPE: b"tests.theirs"}
    get_transport().publish([OutgoingRecord("mail-high", b'{"number": 1}', None, headers)])
    work()
    assert (Job.objects.get().state, Job.objects.get().priority) == ("completed", 1)
    assert (published("mail-high"), published("mail")) == (2, 0)


def test_a_dead_letter_is_replayed_into_the_level_it_had(levelled):
    # Given a message of others that dies in the low level
    def refuse(number):
        raise PermanentError("no")

    job(name="tests.dies", queue="mail")(refuse)
    headers = {names.ID: b"theirs-1", names.TYPE: b"tests.dies"}
    get_transport().publish([OutgoingRecord("mail-low", b'{"number": 1}', None, headers)])
    work()
    # When
    report = dead_letters.replay(DeadLetter.objects.all())
    # Then
    assert report.replayed == 1
    assert (published("mail-low"), published("mail")) == (2, 0)


# --- A worker beside a backlog --------------------------------------------------------------------


class Mail(Noting):
    """A worker whose jobs of the queue ``mail`` take some seconds."""

    def __init__(self, queues: list[str], seconds: float = 0.0, **options: Any) -> None:
        super().__init__(queues, seconds, **options)
        self.job = self.jobs["mail"]

    def wait_for(self, name: str) -> None:
        assert self.begins(lambda begun: name in begun), f"{name} is late"

    def wait_for_count(self, count: int) -> None:
        assert self.begins(lambda begun: len(begun) >= count)

    def delay_of_urgent(self, name: str) -> float:
        return self.delay_of(name, lambda: self.job.using(priority=60).enqueue(name=name))


@pytest.fixture
def configure(request, settings, sqlite_file):
    def configure(transport: str, priorities: int = 3, **options: object) -> None:
        queues = {"mail": {"priorities": priorities}, "other": {}}
        Configure(request, settings)(transport, queues, **options)

    return configure


BACKLOG = int(os.environ.get("KJO_PRIORITY_BACKLOG", "1500"))
"""Low jobs. With 100,000 of them urgent ones began after 0.06 to 0.45 s (median of five), on SQLite
and all transports, two processors shared by seven others."""


beside_a_backlog = pytest.mark.parametrize(
    ("transport", "priorities"),
    [
        ("memory", 3),
        ("database", 1),
        ("database", 3),
        pytest.param("kafka", 3, marks=pytest.mark.kafka),
        pytest.param("redis_streams", 3, marks=pytest.mark.redis),
    ],
)


@pytest.mark.promise("priority")
@beside_a_backlog
def test_an_urgent_job_is_fetched_and_begins_before_a_backlog(
    configure, transport, priorities, monkeypatch
):
    # Given a worker that is full of low jobs, for which lanes that are busy are so since just now:
    # one whose lanes are busy for long fetches nothing until one of them is free
    monkeypatch.setattr(scheduler, "AHEAD", math.inf)
    monkeypatch.setattr(scheduler, "STUCK_AFTER", math.inf)
    configure(transport, priorities, MAX_OUTSTANDING=400, GROUP_SIZE=1)
    mail = Mail(["mail", "other"], release=Turns())
    low = [{"name": f"low {n}", "waits": 3600} for n in range(BACKLOG)]
    mail.job.using(priority=-5).enqueue_many(low)
    with mail:
        mail.wait_for_count(2)  # each of its lanes has one, and so it stays: urgent ones wait, too
        for number in range(5):
            # When
            urgent = mail.job.using(priority=60).enqueue(name=f"urgent {number}", waits=3600)
            mail.wait_until_it_holds(f"urgent {number}")
            # Its relay, too, is done with it: it would be deferred where that writes meanwhile.
            wait_until(lambda id=urgent.job_id: Job.objects.get(pk=id).state != "pending")
            # Then it is the next, but for the share of the low ones, which do not starve
            assert mail.turns_until(f"urgent {number}") <= 4


def test_an_urgent_job_is_fetched_beside_low_ones_though_the_last_fetched_was_as_urgent(configure):
    """It was compared with what had been fetched last: the worker was full of low jobs, and took
    it for no more urgent than those."""
    # Given a worker of two lanes that hold low jobs, with low and urgent ones that wait
    configure("database", 1)
    mail = get_settings().queue("mail")
    lanes = scheduler.GroupScheduler(2, group_size=1, budget=GroupBudget(1))
    transport = get_transport()
    poller = Poller(
        current_runtime(), transport, mail.consumer_group, [mail], lanes, max_outstanding=400
    )

    def publish(count: int, priority: int) -> None:
        headers = {names.ID: b"1", names.TYPE: b"tests.any"}
        record = OutgoingRecord(mail.topic, b"{}", None, headers, priority=priority)
        assert all(answer.error is None for answer in transport.publish([record] * count))

    poller.step()
    publish(20, -5)
    poller.step()
    assert lanes.waiting == 4
    assert lanes.take(0)
    assert lanes.take(0)
    publish(2, 60)
    poller.step()
    assert lanes.least_priorities() == {mail.topic: -5}
    assert lanes.waiting == 4
    # When
    publish(1, 60)
    wait_until(lambda: poller.step() or lanes.waiting > 4)
    # Then
    assert lanes.waiting == 5
    poller.close()


@pytest.mark.long
@beside_a_backlog
def test_an_urgent_job_begins_at_once_beside_a_backlog_that_goes_on(
    configure, transport, priorities
):
    # Given a worker that is full of low jobs
    configure(transport, priorities, MAX_OUTSTANDING=400)
    mail = Mail(["mail", "other"], 0.005)
    mail.job.using(priority=-5).enqueue_many([{"name": f"low {n}"} for n in range(BACKLOG)])
    with mail:
        mail.wait_for_count(30)
        # When
        before = len(mail.begun)
        delays = [mail.delay_of_urgent(f"urgent {n}") for n in range(5)]
        # Then a busy machine may delay one of them; a backlog would delay all
        print(f"begun after {delays} s")
        assert statistics.median(delays) < PROMISED
        # And the low ones advance all the while, with most of them still to come
        mail.wait_for_count(before + 5 + 20)
        assert len(mail.begun) < BACKLOG


@pytest.mark.promise("no-starvation")
@pytest.mark.parametrize("transport", ["memory", "database"])
def test_low_jobs_advance_beside_a_flood_of_urgent_ones(configure, transport):
    # Given as many urgent jobs as a worker needs seconds for, and some low ones
    configure(transport)
    mail = Mail(["mail"], 0.005)
    mail.job.using(priority=60).enqueue_many([{"name": f"urgent {n}"} for n in range(600)])
    mail.job.using(priority=-5).enqueue_many([{"name": f"low {n}"} for n in range(5)])
    with mail:
        # Then the first of them begins long before the last of those
        mail.wait_for("low 0")
        assert sum(name.startswith("urgent") for name in mail.begun) < 550


@pytest.mark.promise("order-within-level")
@pytest.mark.parametrize(
    ("transport", "priorities"),
    [
        ("memory", 2),
        ("database", 1),
        ("database", 2),
        pytest.param("kafka", 2, marks=pytest.mark.kafka),
        pytest.param("redis_streams", 2, marks=pytest.mark.redis),
    ],
)
def test_jobs_of_one_key_and_level_keep_their_order_whatever_their_priorities(
    configure, transport, priorities
):
    # Given jobs of two keys in one level, among others of higher and lower priorities
    configure(transport, priorities, RELAY_BATCH_SIZE=10)
    mail = Mail(["mail"], 0.0)
    draw, wanted = random.Random(3), []
    for number in range(60):
        key, priority = f"k{number % 2}", draw.choice([50, 60, 80, 100])
        mail.job.using(key=key, priority=priority).enqueue(name=f"{key} {number}")
        mail.job.using(priority=draw.choice([60, 100, -5])).enqueue(name=f"other {number}")
        wanted.append(f"{key} {number}")
    # When
    with mail:
        mail.wait_for_count(120)
    # Then
    for key in ("k0", "k1"):
        assert [name for name in mail.begun if name.startswith(key)] == [
            name for name in wanted if name.startswith(key)
        ]


@pytest.mark.promise("order-within-level")
@pytest.mark.parametrize(
    ("levels", "stored"),
    [
        (1, {100: 50, 60: 50, 49: 1, 1: 1, 0: None, -1: -1, -100: -1}),
        (2, {100: 1, 60: 1, 49: 1, 1: 1, 0: 0, -1: 0, -100: 0}),
        (3, {100: 1, 60: 1, 49: 1, 1: 1, 0: 0, -1: -1, -100: -1}),
        (4, {100: 50, 60: 50, 49: 1, 1: 1, 0: 0, -1: -1, -100: -1}),
    ],
)
@pytest.mark.django_db
def test_a_job_with_a_key_has_the_priority_of_its_level(settings, levels, stored):
    settings.KJO = {**KJO, "QUEUES": {"mail": {"priorities": levels}}}
    declared = job(name="tests.keyed", queue="mail", key="to")(lambda to: None)
    plain = job(name="tests.plain", queue="mail")(lambda to: None)
    for priority in stored:
        declared.using(priority=priority).enqueue(to="a")
        declared.using(priority=priority).enqueue_many([{"to": "a"}])
        plain.using(priority=priority, key="k").enqueue(to="a")
    found = list(Job.objects.order_by("id").values_list("priority", flat=True))
    assert found == [priority for priority in stored.values() for _ in range(3)]
