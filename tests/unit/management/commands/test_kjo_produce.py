"""``kjo_produce`` with a producer: KJO-07, KJO-32, KJO-70."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading

import django
import pytest
from django.core.management import CommandError, call_command

from kjo_django.exceptions import CoordinationError
from kjo_django.management.commands import kjo_produce
from kjo_django.management.commands.kjo_produce import _run, read_criteria
from kjo_django.models import Job
from kjo_django.outbox.relay import Relay
from kjo_django.patterns.items.producer import ProduceResult, produce_every
from kjo_django.runtime import close_backends, get_transport
from kjo_django.worker.duties import ClockCheck
from kjo_django.worker.supervisor import THREAD_DIED
from tests.items.models import Item
from tests.items.producers import ItemProducer
from tests.ledger.jobs import write

pytestmark = pytest.mark.django_db(transaction=True)
PRODUCER = "tests.items.producers.ItemProducer"


@pytest.fixture(autouse=True)
def memory(settings):
    settings.KJO = {
        "TRANSPORTS": {"default": {"BACKEND": "kjo_django.transports.memory.MemoryTransport"}}
    }
    yield
    close_backends()


def run(*arguments):
    out = io.StringIO()
    call_command("kjo_produce", *arguments, stdout=out, stderr=out)
    return out.getvalue()


def test_a_producer_that_is_not_there_is_answered_with_those_of_the_project():
    """`ModelProducer`, from which they derive, was among them."""
    hint = kjo_produce.producer_hint("Nope")
    assert hint.startswith("Producers: ")
    assert PRODUCER in hint
    assert "kjo_django." not in hint


def test_one_run():
    Item.objects.bulk_create(Item() for _ in range(3))
    criteria = ["--criteria", '{"state": 1}', "--type", "new"]
    assert run(PRODUCER, *criteria, "--limit", "2") == (
        "ItemProducer -> items: 2 sent, 0 skipped, 0 failed of 2\n"
    )
    assert run(PRODUCER, *criteria, "--once") == (
        "ItemProducer -> items: 1 sent, 2 skipped, 0 failed of 3 "
        "(2 skipped: this content was sent less than 20 s ago)\n"
    )
    assert run(PRODUCER, "--criteria", "state=COMPLETED") == (
        "ItemProducer -> items: 0 sent, 0 skipped, 0 failed of 0 (no items)\n"
    )


def test_json():
    item = Item.objects.create()
    answer = json.loads(run(PRODUCER, "--json"))
    assert answer.pop("batch_id")
    assert answer == {
        "total": 1,
        "sent": 1,
        "skipped": 0,
        "failed": 0,
        "item_ids": [str(item.pk)],
        "reason": None,
    }


@pytest.mark.parametrize(
    ("given", "criteria"),
    [
        ([], {}),
        (['{"state": 1, "priority": "high"}'], {"state": 1, "priority": "high"}),
        (["state=1", "priority=high"], {"state": 1, "priority": "high"}),
        (["state=FAILED"], {"state": "FAILED"}),
        (["email=a=b"], {"email": "a=b"}),
        (["pk__in=[1,2]"], {"pk__in": [1, 2]}),
        (["done=true"], {"done": True}),
    ],
)
def test_both_forms_of_criteria(given, criteria):
    assert read_criteria(given) == criteria


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ((PRODUCER, "--criteria", "state"), "neither name=value"),
        ((PRODUCER, "--criteria", "{state: 1}"), "not JSON"),
        ((PRODUCER, "--criteria", "colour=red"), "colour"),
        ((PRODUCER, "--once", "--interval", "60"), "exclude each other"),
        ((PRODUCER, "--limit", "0"), "above 0"),
        (("tests.items.producers.Nothing",), "cannot be imported"),
        (
            ("tests.items.producers.ItmProducer",),
            "Did you mean the producer 'tests.items.producers.ItemProducer'",
        ),
        (("shop.producers.ItemProducer",), "Did you mean the producer 'tests.items.producers.Item"),
        (("shop.producers.Zzz",), r"Producers: .*tests\.items\.producers\.ItemProducer"),
        (("ItemProducer",), "Did you mean the producer 'tests.items.producers.ItemProducer'"),
        (("tests.items.models.Item",), "not an AbstractProducer"),
        (("kjo_django.AbstractProducer",), "abstract"),
        (("ledger", "--criteria", "state=1"), "go with a producer"),
    ],
)
def test_wrong_usage_exits_with_2(arguments, complaint):
    with pytest.raises(CommandError, match=complaint) as raised:
        run(*arguments)
    assert raised.value.returncode in (1, 2)


def test_without_redis_it_ends_with_an_error(monkeypatch):
    """KJO-F8."""

    def refuse(self):
        raise CoordinationError("Redis cannot be reached")

    monkeypatch.setattr(ItemProducer, "get_processing_ids", refuse)
    with pytest.raises(CommandError, match="Redis cannot be reached"):
        run(PRODUCER)


def test_what_could_not_be_sent_ends_with_1(monkeypatch):
    Item.objects.create()

    def refuse(self, *args):
        raise RuntimeError("no")

    monkeypatch.setattr(ItemProducer, "build_message", refuse)
    with pytest.raises(SystemExit) as raised:
        run(PRODUCER)
    assert raised.value.code == 1


def test_every_interval_until_stopped(monkeypatch):
    """KJO-32: an outage ends one run, not the producer."""
    stopping, told = threading.Event(), []

    class Flaky:
        def produce_messages(self, criteria, limit, message_type):
            told.append((criteria, limit, message_type))
            if len(told) == 2:
                raise CoordinationError("down")
            if len(told) == 4:
                stopping.set()
            return ProduceResult("00", 0, 0, 0, 0)

    results, errors = [], []
    produce_every(
        0.01,
        Flaky(),
        {"state": 1},
        100,
        "new",
        stopping=stopping,
        on_result=results.append,
        on_error=errors.append,
    )
    assert told == [({"state": 1}, 100, "new")] * 4
    assert (len(results), len(errors)) == (3, 1)


def test_sigterm_ends_the_interval(monkeypatch):
    """KJO-32."""
    Item.objects.create()
    before = {number: signal.getsignal(number) for number in (15, 2, signal.SIGUSR2)}
    original = ItemProducer.on_success
    monkeypatch.setattr(
        ItemProducer, "on_success", lambda self, id: signal.raise_signal(15) or original(self, id)
    )
    try:
        lines = run(PRODUCER, "--interval", "60").splitlines()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert "1 sent" in lines[3]
    # And what is sent where was said before.
    assert lines[0] == f"Sending items of {PRODUCER} to items every 60 s. Stop with Ctrl-C."
    assert "transport default: MemoryTransport; coordination: " in lines[1]


@pytest.fixture
def stopped_at_once(monkeypatch):
    """A relay that is stopped as soon as it runs; handlers of signals are as before."""
    before = {number: signal.getsignal(number) for number in (15, 2, signal.SIGUSR2)}
    monkeypatch.setattr(Relay, "run", lambda self: signal.raise_signal(15))
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_the_relay_says_what_it_serves_with_which_versions(stopped_at_once, settings):
    """Given queues of which one publishes with the job's transaction."""
    settings.KJO = {
        "SERVICE_NAME": "shop",
        "RELEASE": "v7",
        "QUEUES": {"ledger": {}, "mails": {"transport": "tables"}},
        "TRANSPORTS": {
            **settings.KJO["TRANSPORTS"],
            "tables": {"BACKEND": "kjo_django.transports.database.DatabaseTransport"},
        },
    }
    # When the relay of two is started
    first, second, third, last = run("ledger", "mails").splitlines()
    # Then it names the one that it relays, beside that of messages, and what it works with.
    assert first == "Relaying ledger, outgoing. Stop with Ctrl-C."
    assert second.startswith("  Service shop, release v7; database: django.db.backends.")
    assert "; transport default: MemoryTransport; coordination: " in second
    assert "tables" not in second
    assert f"Django {django.get_version()}" in third
    assert last == "Stopped after 0 messages."


def test_the_start_of_the_relay_is_json_where_that_is_asked_for(stopped_at_once):
    started = json.loads(run("ledger", "--json").splitlines()[0])
    assert (started["event"], started["queues"]) == ("started", ["ledger", "outgoing"])
    assert started["transports"] == {"default": "MemoryTransport"}
    assert started["versions"]["Django"] == django.get_version()


def test_a_relay_that_runs_once_fails_when_the_broker_is_away():
    """Started by cron, its exit code is all that is seen."""
    # Given
    job_id = write.enqueue(job="a").job_id
    get_transport().fail("the broker is away")
    # When, then
    with pytest.raises(CommandError, match="the broker is away"):
        run("--once")
    assert Job.objects.get(pk=job_id).state == "pending"
    # And when it is back
    get_transport().fail(None)
    assert run("--once") == "Published 1.\n"


def test_the_relay_of_a_misspelt_queue_is_wrong_usage_and_not_a_relay_of_nothing():
    with pytest.raises(
        CommandError, match=r"No queue is named 'ledgr'.* Did you mean 'ledger'"
    ) as told:
        run("ledgr")
    assert told.value.returncode == 2


# --- A relay that dies ----------------------------------------------------------------------------


@pytest.mark.parametrize("number", [0, 1])
def test_a_relay_that_dies_stops_those_of_other_databases(number, monkeypatch, caplog):
    """Nobody would publish the jobs of its database, and the process would look alive."""
    relays = [Relay(), Relay()]

    def step(relay):
        if relay is relays[number]:
            raise SystemExit("a bug")
        return 60.0

    monkeypatch.setattr(Relay, "step", step)
    assert not _run(relays)
    assert "The relay of the database 'default' has died" in caplog.text


def test_a_relay_that_hangs_keeps_no_process_whose_other_one_has_died(monkeypatch):
    monkeypatch.setattr(kjo_produce, "LEFT_AFTER", 0.01)
    relays, may_end = [Relay(), Relay()], threading.Event()

    def step(relay):
        if relay is relays[0]:
            raise SystemExit("a bug")
        may_end.wait()
        return 60.0

    monkeypatch.setattr(Relay, "step", step)
    assert not _run(relays)
    may_end.set()


def test_a_thread_that_compares_the_clocks_and_dies_stops_the_relays(monkeypatch, caplog):
    """Their rows would be due by a clock that nobody corrects any more."""
    monkeypatch.setattr(Relay, "step", lambda relay: 60.0)
    monkeypatch.setattr(ClockCheck, "step", lambda check: sys.exit("a bug"))
    assert not _run([Relay()])
    assert "The thread kjo-clock has died" in caplog.text


def test_a_relay_that_dies_ends_the_command(monkeypatch):
    monkeypatch.setattr(Relay, "step", lambda relay: sys.exit("a bug"))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    with pytest.raises(SystemExit) as ended:
        run()
    assert ended.value.code == THREAD_DIED
