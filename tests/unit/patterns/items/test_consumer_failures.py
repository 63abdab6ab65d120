"""Items that fail, for now and for good, and messages nobody understands."""

from __future__ import annotations

import pytest
from django.db import transaction

from kjo_django.exceptions import PermanentError
from kjo_django.models import DeadLetter, Job, ProcessedEvent
from kjo_django.operations import dead_letters
from kjo_django.runtime import get_transport
from kjo_django.states import JobState
from kjo_django.transports.base import OutgoingRecord
from tests.items.models import Item, Run
from tests.unit.deliveries import Bench
from tests.unit.patterns.items.made import Producer, always, consumer, send, settled, work

pytestmark = [
    pytest.mark.medium,
    pytest.mark.usefixtures("forgotten_definitions"),
]  # threads and waits of a worker, in real time


@pytest.mark.parametrize("atomic", [True, False])
def test_an_item_fails_once_its_attempts_are_spent(quick, atomic):
    """KJO-40, KJO-44, KJO-46, KJO-F15: PENDING until then."""
    states = []

    def process(self, message):
        states.append(Item.objects.get().state)
        raise RuntimeError("no")

    made = consumer(process, failed_at_field="failed_at", atomic=atomic)
    item = Item.objects.create()
    send(item)
    work(until=settled)
    item.refresh_from_db()
    assert states == [1, 1, 1]
    assert (item.state, item.failed_at is not None) == (3, True)
    assert made.told == [("failed", str(item.pk), "no")]
    letter = DeadLetter.objects.get()
    assert (letter.attempts, letter.error) == (3, "no")
    assert Run.objects.count() == (0 if atomic else 3)


def test_a_permanent_error_fails_at_once(quick):
    """KJO-46: the item is failed before its hook is called."""
    seen = []
    made = consumer(
        always(PermanentError("never")),
        on_failed=lambda self, item_id, error: seen.append(Item.objects.get().state),
    )
    send(Item.objects.create())
    work()
    assert (made.calls.__len__(), seen) == (1, [3])


def test_an_item_that_fails_beside_one_that_runs_again_leaves_no_marker(quick):
    """Its dead letter would be refused a replay, for having taken effect."""
    # Given: one whose content has taken effect and which was set back
    again, bad = Item.objects.create(), Item.objects.create()

    def process(self, message):
        if message["id"] == str(bad.pk):
            raise PermanentError("no")

    made = consumer(process)
    send(again)
    work()
    Item.objects.filter(pk=again.pk).update(state=1)
    send(again, bad)
    # When they run in one group
    bench = Bench("made")
    bench.run()
    bench.close()
    # Then
    assert made.calls == [str(again.pk), str(again.pk), str(bad.pk)]
    letter = DeadLetter.objects.get()
    assert not ProcessedEvent.objects.filter(event_id=letter.message_id).exists()
    assert dead_letters.replay(dead_letters.DeadLetterFilter()).replayed == 1


def test_failed_items_can_be_sent_again(quick):
    """KJO-70: --criteria state=FAILED --type retry, with the very same content."""
    answers = iter([PermanentError("no"), RuntimeError("not yet"), None])

    def process(self, message):
        if error := next(answers):
            raise error

    made = consumer(process)
    item = Item.objects.create()
    send(item)
    work(until=settled)
    assert Item.objects.get().state == 3
    assert Producer().produce_messages({"state": "FAILED"}, 10, "retry").sent == 1
    work(until=settled)
    assert Item.objects.get().state == 2
    assert len(made.calls) == 3
    # And once more, after its retries have completed.
    Item.objects.update(state=1)
    answers = iter([None])
    send(Item.objects.get())
    work(until=settled)
    assert Item.objects.get().state == 2
    assert len(made.calls) == 4


def test_exhausted_items_can_be_sent_again(quick):
    """KJO-70: the job of its retries is no obstacle."""
    fails = [True]

    def process(self, message):
        if fails:
            raise RuntimeError("no")

    made = consumer(process, max_attempts=2)
    item = Item.objects.create()
    send(item)
    work(until=settled)
    assert (Item.objects.get().state, len(made.calls)) == (3, 2)
    fails.clear()
    send(item, kind="retry")
    work(until=settled)
    assert (Item.objects.get().state, len(made.calls)) == (2, 3)
    assert list(Job.objects.values_list("state", flat=True)) == [JobState.FAILED]


def test_a_failure_that_cannot_be_marked_is_a_dead_letter_all_the_same(quick, caplog):
    """KJO-40."""

    def clumsy(self, item_id):
        raise RuntimeError("clumsy")

    consumer(always(PermanentError("never")), mark_item_as_failed=clumsy)
    send(Item.objects.create())
    work()
    assert DeadLetter.objects.count() == 1
    assert "could not be marked" in caplog.text


@pytest.mark.parametrize(
    "value", [None, b"", b"{", b"[]", b'{"no": "id"}', b'{"id": ""}', b'{"id": "a\\u0000"}']
)
def test_poison_is_a_dead_letter(quick, value):
    """KJO-F14: and what comes after it is processed."""
    made = consumer()
    with transaction.atomic():
        get_transport().publish([OutgoingRecord("made", value, key=b"new-1")])
    item = Item.objects.create()
    send(item)
    work()
    assert made.calls == [str(item.pk)]
    assert DeadLetter.objects.get().value == value


def test_messages_of_producers_that_set_no_headers_are_understood(quick):
    """KJO-36: anything with an id."""
    made = consumer()
    item = Item.objects.create()
    with transaction.atomic():
        get_transport().publish([OutgoingRecord("made", b'{"id": %d}' % item.pk)] * 2)
    work()
    assert made.calls == [item.pk]


def test_signals_tell_the_same(quick, hear):
    """KJO-43, KJO-44."""
    heard = hear("job_completed", "job_failed")
    consumer(name="made")
    send(Item.objects.create(), Item.objects.create(state=2))
    work()
    consumer(always(PermanentError("no")), name="made")
    send(Item.objects.create())
    work()
    completed, failed = heard
    assert (completed["signal"], completed["sender"]) == ("job_completed", "made")
    assert (failed["signal"], str(failed["error"])) == ("job_failed", "no")
