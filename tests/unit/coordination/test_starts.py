"""The rules of a rate, without a server: how often something may start, and how it is used.

Tier: the quick one. Nothing but arithmetic runs here; the conformance suite of coordination runs
the same rules on each server.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kjo_django.coordination.starts import Ask, Pace, Starts, Used, permit
from kjo_django.values import rate

NOW = 1_000_000_000
SECOND = 1_000_000


def pace_of(text: str, burst: int = 1) -> Pace:
    each = replace(rate(text), burst=burst)
    return Pace("rate", each.count + burst - 1, each.seconds, each.interval, each.ahead)


@dataclass
class World:
    """Workers that start what they may, in virtual time, each permit as late as they like."""

    pace: Pace
    starts: Starts = field(default_factory=Starts)
    used: list[Used] = field(default_factory=list)
    moments: list[int] = field(default_factory=list)

    def ask(self, now: int, *asks: Ask) -> list[tuple[float, int]]:
        # Through its text, as each server keeps it.
        known = {self.pace.name: Starts(self.starts.text)}
        used = [one._replace(ago=(now - one.ago) / SECOND) for one in self.used]
        self.used = []
        answers = permit(asks, known, now, used)
        self.starts = known[self.pace.name]
        return [(answer.wait, answer.stamp) for answer in answers]

    def start(self, stamp: int, at: int) -> None:
        self.moments.append(at)
        self.used.append(Used([self.pace], stamp, at))

    def most_within(self, seconds: float) -> int:
        moments, first, most = sorted(self.moments), 0, 0
        for last, moment in enumerate(moments):
            while moments[first] <= moment - seconds * SECOND:
                first += 1
            most = max(most, last - first + 1)
        return most


def run(
    pace: Pace,
    seconds: float,
    *,
    seed: int,
    lasts: float,
    within: float,
    late: float,
    stalls: float = 0.0,
    workers: int = 3,
) -> World:
    """Let workers start all they may for so many seconds, with work for each moment.

    :param lasts: and ``within``, what is asked for.
    :param late: seconds by which a start is late, in the mean.
    :param stalls: the part of the starts that are late by up to 0.3 s more.
    """
    draw = random.Random(seed)
    world, end = World(pace), NOW + int(seconds * SECOND)
    # When each worker asks next, and the permit that it could not use in time.
    turns = [(NOW, number, 0) for number in range(workers)]
    while turns and turns[0][0] < end:
        now, number, replaces = heapq.heappop(turns)
        ((wait, stamp),) = world.ask(now, Ask([pace], lasts, within, replaces))
        moment = now + int(wait * SECOND)
        if not stamp:
            heapq.heappush(turns, (max(now + 1000, moment - 20_000), number, 0))
            continue
        start = moment + int(draw.expovariate(1 / late) * SECOND)
        if draw.random() < stalls:
            start += int(draw.uniform(0, 0.3) * SECOND)
        if start > moment + lasts * SECOND:
            heapq.heappush(turns, (start, number, stamp))
            continue
        world.start(stamp, start)
        heapq.heappush(turns, (start + 2000, number, 0))
    return world


@pytest.mark.parametrize("text", ["5/s", "30/s", "100/m", "7/3s"])
@pytest.mark.parametrize("stalls", [0.0, 0.02], ids=["", "stalls"])
def test_of_what_is_permitted_nearly_all_starts_and_never_more(text: str, stalls: float) -> None:
    """Where there is work all the time, and starts are late by a little, two of a hundred by up to
    0.3 s."""
    pace = pace_of(text)
    seconds = max(60.0, 5 * pace.seconds)
    world = run(pace, seconds, seed=1, lasts=0.1, within=0.1, late=0.002, stalls=stalls)
    permitted = seconds * pace.most / pace.seconds
    assert len(world.moments) >= (0.95 if not stalls else 0.94) * permitted
    assert world.most_within(pace.seconds) <= pace.most


@pytest.mark.promise("limit")
@settings(deadline=None, max_examples=50)
@given(
    seed=st.integers(0, 2**32),
    text=st.sampled_from(["1/s", "5/s", "30/s", "10/m", "60/s"]),
    burst=st.sampled_from([1, 1, 2, 10]),
    workers=st.integers(1, 5),
    lasts=st.sampled_from([0.0, 0.05, 0.5, 2.0]),
    within=st.sampled_from([0.0, 0.1, 1.0]),
    late=st.sampled_from([0.0001, 0.01, 0.2, 1.0]),
)
def test_no_window_has_more_starts_than_its_number(
    seed: int, text: str, burst: int, workers: int, lasts: float, within: float, late: float
) -> None:
    pace = pace_of(text, burst)
    world = run(
        pace,
        6 * pace.seconds,
        seed=seed,
        workers=workers,
        lasts=lasts,
        within=within,
        late=late,
        stalls=0.1,
    )
    assert world.most_within(pace.seconds) <= pace.most


def test_what_is_given_nothing_comes_before_what_is_asked_for_later() -> None:
    world = World(pace_of("1/s"))
    ask = Ask([world.pace], 0.0)
    # Two at once, since what was late is caught up.
    waits = [wait for wait, _ in world.ask(NOW, *[ask] * 4)]
    assert waits == pytest.approx([0, 1.01, 2.02, 3.03], abs=0.06)
    assert [wait for wait, _ in world.ask(NOW, ask)] == [waits[1]]


def test_a_permit_that_was_not_used_is_there_for_another() -> None:
    world = World(pace_of("1/m"))
    ((_, stamp),) = world.ask(NOW, Ask([world.pace], 0.0))
    world.used.append(Used([world.pace], stamp, None))
    known = {"rate": world.starts}
    assert permit([Ask([world.pace], 0.0)], known, NOW + SECOND, world.used)[0].stamp


def test_a_permit_of_long_ago_is_not_replaced() -> None:
    """Others may have been told a moment at which it did not count any more."""
    world = World(pace_of("2/s"))
    ((_, stamp),) = world.ask(NOW, Ask([world.pace], 0.0))
    world.ask(NOW + 500_000, Ask([world.pace], 0.0))
    ((ahead, other),) = world.ask(NOW + 600_000, Ask([world.pace], 0.0, 0.5))
    assert other
    assert ahead == pytest.approx(0.41, abs=0.02)
    ((wait, _),) = world.ask(NOW + 700_000, Ask([world.pace], 0.0, 0.0, stamp))
    assert wait > 0.7


def test_a_late_start_of_two_rates_counts_once_in_each() -> None:
    fast, slow = pace_of("5/s"), pace_of("100/d")
    fast, slow = fast._replace(name="fast"), slow._replace(name="slow")
    known = {"fast": Starts(), "slow": Starts()}
    ((_, stamp),) = permit([Ask([fast, slow], 0.1)], known, NOW)
    # Too late for the fast one, not for the slow one
    permit([Ask([fast, slow], 0.1, 0.0, stamp)], known, NOW + SECOND)
    assert sum(known["slow"]._counts.values()) == 1


def test_what_is_told_of_an_old_rate_changes_nothing_of_the_new_one() -> None:
    old, new = pace_of("10/s"), pace_of("10/m", burst=10)
    known = {"rate": Starts()}
    ((_, stamp),) = permit([Ask([old], 0.1)], known, NOW)
    given = permit([Ask([new], 0.0)] * 9, known, NOW + 1000)
    assert all(answer.stamp for answer in given)
    later = NOW + 3 * SECOND
    permit([], known, later, [Used([old], stamp, 2.9)])
    permit([Ask([new], 0.0)], known, later, [Used([old], stamp, 2.9)])
    assert sum(known["rate"]._counts.values()) >= 10


def test_a_clock_that_was_set_back_keeps_nobody_waiting_for_long() -> None:
    world = World(pace_of("5/s"))
    world.ask(NOW, *[Ask([world.pace], 0.0)] * 5)
    earlier = NOW - 3600 * SECOND
    ((wait, _),) = world.ask(earlier, Ask([world.pace], 0.0))
    assert wait <= 1.0
