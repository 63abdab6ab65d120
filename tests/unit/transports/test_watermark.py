"""The watermark never passes an unsettled record, whatever the order of settling."""

import threading
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kjo_django.transports.base import Record, TopicPartition
from kjo_django.transports.watermark import Assignment, Watermark

PARTITION = TopicPartition("orders", 0)


def record(assignment: Assignment, offset: int) -> Record:
    topic, partition = assignment.partition
    return Record(
        topic, partition, offset, None, None, {}, epoch=assignment.epoch, token=assignment
    )


def settle(watermark: Watermark, assignment: Assignment, *offsets: int) -> None:
    watermark.settle(record(assignment, offset) for offset in offsets)


@st.composite
def deliveries(draw: st.DrawFn) -> tuple[list[list[int]], list[int]]:
    """Ascending offsets with gaps, cut into polls, and an order of settling some of them."""
    offsets = sorted(draw(st.sets(st.integers(0, 500), min_size=1, max_size=60)))
    cuts = sorted(draw(st.sets(st.integers(1, len(offsets)), max_size=5)) | {0, len(offsets)})
    polls = [offsets[start:end] for start, end in pairwise(cuts)]
    settled = draw(st.permutations(offsets))[: draw(st.integers(0, len(offsets)))]
    return polls, settled


@given(deliveries())
def test_the_position_is_the_lowest_unsettled_offset_or_the_end(case):
    polls, settled = case
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    for offsets in polls:
        watermark.deliver(assignment, offsets)
    delivered = [offset for offsets in polls for offset in offsets]

    for done, offset in enumerate(settled, start=1):
        settle(watermark, assignment, offset)

        left = set(delivered) - set(settled[:done])
        assert watermark.positions() == {PARTITION: min(left, default=max(delivered) + 1)}


@given(deliveries(), st.data())
def test_settling_between_polls_never_passes_an_unsettled_record(case, data):
    polls, _ = case
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    unsettled: set[int] = set()
    for offsets in polls:
        watermark.deliver(assignment, offsets)
        unsettled.update(offsets)
        for offset in data.draw(st.sets(st.sampled_from(sorted(unsettled)))):
            settle(watermark, assignment, offset)
            unsettled.discard(offset)

        expected = min(unsettled, default=offsets[-1] + 1)
        assert watermark.positions()[PARTITION] == expected
        if not unsettled:
            break


def test_nothing_is_committed_before_something_is_handed_out():
    watermark = Watermark()
    watermark.assign(PARTITION)

    assert watermark.positions() == {}
    assert watermark.uncommitted() == {PARTITION: 0}


def test_settling_twice_or_what_was_never_handed_out_changes_nothing():
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    watermark.deliver(assignment, [3, 4])

    settle(watermark, assignment, 3, 3, 99)

    assert watermark.positions() == {PARTITION: 4}
    assert watermark.uncommitted() == {PARTITION: 1}


def test_a_record_handed_out_again_below_the_rest_holds_the_position():
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    watermark.deliver(assignment, [5, 6, 7])
    settle(watermark, assignment, 5)

    watermark.deliver(assignment, [5, 6])

    assert watermark.positions() == {PARTITION: 5}
    settle(watermark, assignment, 5, 6, 7)
    assert watermark.positions() == {PARTITION: 8}


def test_results_of_a_stale_epoch_are_dropped():
    watermark = Watermark()
    old = watermark.assign(PARTITION)
    watermark.deliver(old, [0, 1])
    watermark.revoke([PARTITION])
    new = watermark.assign(PARTITION)
    watermark.deliver(new, [0, 1])

    settle(watermark, old, 0, 1)

    assert new.epoch > old.epoch
    assert watermark.positions() == {PARTITION: 0}
    assert watermark.uncommitted() == {PARTITION: 2}


def test_a_record_that_claims_another_epoch_is_dropped():
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    watermark.deliver(assignment, [0])
    forged = record(assignment, 0)
    forged.epoch += 1

    watermark.settle([forged])

    assert watermark.uncommitted() == {PARTITION: 1}


def test_revoked_partitions_are_forgotten():
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    watermark.deliver(assignment, [0])

    watermark.revoke([PARTITION])

    assert watermark.assignment() == []
    assert watermark.positions() == watermark.positions([PARTITION]) == {}
    assert watermark.uncommitted() == {}


def test_partitions_are_independent():
    watermark = Watermark()
    other = TopicPartition("orders", 1)
    first, second = watermark.assign(PARTITION), watermark.assign(other)
    watermark.deliver(first, [0, 1])
    watermark.deliver(second, [10, 11])

    settle(watermark, second, 10, 11)

    assert watermark.positions() == {PARTITION: 0, other: 12}
    assert watermark.positions([other]) == {other: 12}
    assert watermark.uncommitted() == {PARTITION: 2, other: 0}


def test_threads_settle_while_others_deliver():
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    watermark.deliver(assignment, list(range(2000)))

    def work(start: int) -> None:
        for offset in range(start, 2000, 4):
            settle(watermark, assignment, offset)

    threads = [threading.Thread(target=work, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    seen = []
    while any(thread.is_alive() for thread in threads):
        seen.append(watermark.positions()[PARTITION])

    assert seen == sorted(seen)
    assert watermark.positions() == {PARTITION: 2000}


@given(deliveries())
def test_a_crash_repeats_what_was_handed_out_from_the_lowest_unsettled_offset_on(case):
    polls, settled = case
    watermark = Watermark()
    assignment = watermark.assign(PARTITION)
    for offsets in polls:
        watermark.deliver(assignment, offsets)
    delivered = [offset for offsets in polls for offset in offsets]

    settle(watermark, assignment, *settled)

    position = watermark.positions()[PARTITION]
    repeated = [offset for offset in delivered if offset >= position]
    assert watermark.uncommitted() == {PARTITION: len(repeated)}
