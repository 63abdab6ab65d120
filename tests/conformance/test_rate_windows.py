"""The starts of rates in rows, as several processes count them.

Tier: medium, each real engine once: what is promised depends on what an UPDATE says it has changed.
"""

from __future__ import annotations

import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from kjo_django.coordination.database import windows
from kjo_django.coordination.database.windows import RateWindows, stored_name
from kjo_django.coordination.starts import Ask, Pace, Used, part_of
from kjo_django.models import RateWindow
from kjo_django.store import store_for
from tests.clocks import SetClock, set_now

MOST = 10


@pytest.fixture(
    params=[
        "sqlite",
        pytest.param("postgres", marks=pytest.mark.postgres),
        pytest.param("mariadb", marks=pytest.mark.mariadb),
    ],
)
def alias(request: pytest.FixtureRequest) -> str:
    found: str = request.getfixturevalue(f"{request.param}_alias")
    return found


@pytest.fixture
def ask() -> Ask:
    """A rate of which ten may start at once, and no other within an hour."""
    pace = Pace(f"RATE:{uuid.uuid4()}", MOST, 3600.0, 360.0, 3600.0)
    return Ask([pace], 1.0)


def given(process: RateWindows, ask: Ask, used: Any = ()) -> int:
    """Return the stamp of the permit that a process is given; 0: none."""
    return process.permit([ask], used)[0].stamp


def test_a_process_that_is_alone_writes_without_reading_before(alias: str, ask: Ask) -> None:
    process = RateWindows(store_for(alias))
    for _ in range(2):  # the second call reads that nobody else has written
        assert given(process, ask)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert given(process, ask)
    (query,) = queries
    assert "UPDATE" in query["sql"]


def test_what_others_have_started_meanwhile_counts(alias: str, ask: Ask) -> None:
    mine, theirs = RateWindows(store_for(alias)), RateWindows(store_for(alias))
    stamps = [given(mine, ask) for _ in range(3)]
    stamps += [given(theirs, ask) for _ in range(3)]
    stamps += [given(mine, ask) for _ in range(MOST)]
    stamps += [given(theirs, ask) for _ in range(MOST)]
    assert len([stamp for stamp in stamps if stamp]) == MOST


def test_a_permit_that_another_one_gives_back_is_found_at_once(alias: str, ask: Ask) -> None:
    # Given a process that has had all but one permit, and another one that has got the last
    mine, theirs = RateWindows(store_for(alias)), RateWindows(store_for(alias))
    for _ in range(MOST - 1):
        assert given(mine, ask)
    last = given(theirs, ask)
    assert not given(mine, ask)
    # When that one gives it back
    theirs.permit([], [Used(ask.paces, last, None)])
    # Then
    assert given(mine, ask)


def test_a_row_that_is_gone_is_made_anew(alias: str, ask: Ask) -> None:
    process = RateWindows(store_for(alias))
    for _ in range(3):
        assert given(process, ask)
    RateWindow.objects.using(alias).all().delete()
    assert given(process, ask)
    (text,) = RateWindow.objects.using(alias).values_list("starts", flat=True)
    assert text.endswith(":1")


def test_the_servers_time_is_read_again_after_some_seconds(alias: str, ask: Ask) -> None:
    clock = SetClock()
    process = RateWindows(store_for(alias), clock)
    for _ in range(2):
        assert given(process, ask)
    clock.advance(windows._KNOWN_FOR + 0.1)
    with CaptureQueriesContext(connections[alias]) as queries:
        assert given(process, ask)
    assert len(queries) > 1


@pytest.mark.parametrize("minutes", [30, -30, 600, -600])
def test_a_host_whose_clock_is_set_starts_no_more_and_no_fewer_than_may(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch, minutes: int
) -> None:
    """What a process remembers of the server's time goes by the monotonic clock."""
    store = store_for(alias)
    if abs(minutes) > 60 and not store.has_clock:
        pytest.skip("the host's clock is the only one, and the hour is over by it or to come")
    # Given a process that has read the server's time lately
    process = RateWindows(store)
    for _ in range(3):
        assert given(process, ask)
    # When the clock of its host is set
    now = timezone.now
    set_now(monkeypatch, lambda: now() + timedelta(minutes=minutes))
    # Then it goes on counting, and so does one that reads the time only then
    starts = [bool(given(process, ask)) for _ in range(MOST)]
    assert starts == [True] * (MOST - 3) + [False] * 3
    assert not given(RateWindows(store), ask)


@pytest.mark.parametrize(("took", "is_recalled"), [(0.4, True), (0.6, False)])
def test_a_time_that_took_long_to_tell_is_not_gone_by(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch, took: float, is_recalled: bool
) -> None:
    """It may be wrong by so long, and more would start than may."""
    paces = {stored_name(pace.name): pace._replace(seconds=10.0) for pace in ask.paces}
    store, clock = store_for(alias), SetClock()
    read = store.read_windows

    def read_slowly(names: Any) -> Any:
        clock.advance(took)
        return read(names)

    process = RateWindows(store, clock)
    monkeypatch.setattr(store, "read_windows", read_slowly)
    monkeypatch.setattr(type(store), "has_clock", True)
    for _ in range(3):
        process._read(paces)
    assert (process._recall(paces) is not None) == is_recalled


def test_what_is_known_is_as_old_as_what_is_read(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, clock = store_for(alias), SetClock()
    told = datetime(2026, 1, 1, tzinfo=UTC)

    def read(names: Any) -> tuple[datetime, dict[str, str]]:
        clock.advance(0.02)
        return told, dict.fromkeys(names, "0")

    process = RateWindows(store, clock)
    monkeypatch.setattr(store, "read_windows", read)
    monkeypatch.setattr(store, "write_windows", lambda changes: None)
    monkeypatch.setattr(type(store), "has_clock", True)
    paces = {stored_name(pace.name): pace for pace in ask.paces}
    for _ in range(2):
        process._read(paces)
    clock.advance(1.0)
    recalled = process._recall(paces)
    assert recalled is not None
    # The server's time is this at least, and at most later by what the answer took.
    assert recalled.now == told + timedelta(seconds=1.0)
    assert recalled.at - recalled.latest_at == pytest.approx(0.02)


def test_what_is_known_of_the_quickest_readings_makes_the_time_more_certain(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 ms away, half of what a call takes was lost of each window of a rate, twice."""
    # Given a server that is 10 ms away each way, and now and then takes 4 ms to tell its time
    store, clock = store_for(alias), SetClock()
    slow = [0.0]

    def read(names: Any) -> tuple[datetime, dict[str, str]]:
        clock.advance(0.01 + slow[0])
        told = clock.now()
        clock.advance(0.01)
        return told, dict.fromkeys(names, "0")

    monkeypatch.setattr(store, "read_windows", read)
    monkeypatch.setattr(type(store), "has_clock", True)
    process, paces = RateWindows(store, clock), {stored_name(p.name): p for p in ask.paces}
    # When it is asked again and again
    first = process._read(paces)
    for _ in range(windows._ENOUGH):
        process._read(paces)
    slow[0] = 0.004
    last = process._read(paces)
    # Then at first its time is known to within the whole of a call, later to what is out of turn
    assert first.at - first.latest_at == pytest.approx(0.02)
    assert clock.now() - last.now == timedelta(
        seconds=0
    ) and last.at - last.latest_at == pytest.approx(0.004)


def test_so_many_rates_are_remembered_and_no_more(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "_MOST_KNOWN", 5)
    process = RateWindows(store_for(alias))
    (pace,) = ask.paces
    for number in range(20):
        other = ask._replace(paces=[pace._replace(name=f"{pace.name}:{number}")])
        assert [bool(given(process, other)) for _ in range(MOST + 1)] == [True] * MOST + [False]
        assert len(process._known) <= 5


def test_several_rates_of_one_start_are_written_all_or_none(alias: str, ask: Ask) -> None:
    # Given a process that knows two rates, of which another one has used the second
    (pace,) = ask.paces
    other = pace._replace(name=f"{pace.name}:other")
    mine, theirs = RateWindows(store_for(alias)), RateWindows(store_for(alias))
    both = ask._replace(paces=[pace, other])
    for _ in range(2):
        assert given(mine, both)
    for _ in range(MOST - 2):
        assert given(theirs, ask._replace(paces=[other]))
    # When it asks for both, then neither counts
    assert not given(mine, both)
    assert [bool(given(mine, ask)) for _ in range(MOST)] == [True] * (MOST - 2) + [False] * 2


def test_what_was_told_of_a_start_is_counted_once(alias: str, ask: Ask) -> None:
    """Also where the first writing was refused, since another one was first."""
    mine, theirs = RateWindows(store_for(alias)), RateWindows(store_for(alias))
    first, _ = given(mine, ask), given(mine, ask)
    assert given(theirs, ask)
    # The start came at once, so its permit is as old as the call.
    assert given(mine, ask, [Used(ask.paces, first, 0.0)])
    assert [bool(given(mine, ask)) for _ in range(MOST)] == [True] * (MOST - 4) + [False] * 4


def test_a_refused_write_says_what_the_rows_say_now(alias: str) -> None:
    """On PostgreSQL it costs as much as a reading, however many rates it is about."""
    # Given a process that knows two rates, of which another one has used the second since
    asks = [Ask([Pace(f"RATE:{uuid.uuid4()}", 3, 3600.0, 0.001, 3600.0)], 1.0) for _ in range(2)]
    mine, theirs = RateWindows(store_for(alias)), RateWindows(store_for(alias))
    for _ in range(2):
        mine.permit(asks, ())
    assert given(theirs, asks[1])
    # When
    with CaptureQueriesContext(connections[alias]) as queries:
        answers = mine.permit(asks, ())
    # Then nothing of the first try is left, and nobody's start is forgotten
    assert [bool(answer.stamp) for answer in answers] == [True, False]
    if connections[alias].vendor == "postgresql":
        assert len(queries) == 2


def test_a_start_counts_no_later_for_a_call_that_is_made_again(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given clocks that are set, and a permit
    store, began = store_for(alias), datetime(2026, 1, 1, tzinfo=UTC)
    clock, read, write = SetClock(), store.read_windows, store.write_windows
    process, first = RateWindows(store, clock), clock.monotonic()

    def read_then(names: Any) -> Any:
        return began + timedelta(seconds=clock.monotonic() - first), read(names)[1]

    def refuse(changes: Any) -> Any:
        if clock.monotonic() > first:
            monkeypatch.setattr(store, "write_windows", write)
        clock.seconds = first + 1800
        return read_then([name for name, _, _, _ in changes])

    monkeypatch.setattr(store, "read_windows", read_then)
    monkeypatch.setattr(type(store), "has_clock", True)
    stamp = given(process, ask)
    # When its start is told in a call whose writes are refused twice, the first after half an hour
    monkeypatch.setattr(store, "write_windows", refuse)
    process.permit([], [Used(ask.paces, stamp, 0.0)])
    # Then it counts as of the moment at which the call was made
    rows = RateWindow.objects.using(alias).filter(name=stored_name(ask.paces[0].name))
    (text,) = rows.values_list("starts", flat=True)
    pairs = [pair.partition(":") for pair in text.split()[1:]]
    (counted,) = (moment for moment, _, count in pairs if count == "1")
    assert abs(int(counted) / 1e6 - began.timestamp()) <= part_of(ask.paces[0]) / 1e6


def test_who_was_refused_thrice_reads_again_after_its_pause(
    alias: str, ask: Ask, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Among many that write a rate, one that paused between its reading and its write was refused
    again each time, up to an error."""
    store = store_for(alias)
    read, write, done = store.read_windows, store.write_windows, list[str]()

    def note_read(names: Any) -> Any:
        done.append("read")
        return read(names)

    def refuse(changes: Any) -> Any:
        done.append("write")
        return write(changes) if len(done) > 7 else read([name for name, _, _, _ in changes])

    clock = SetClock()
    process = RateWindows(store, clock)
    given(process, ask)
    monkeypatch.setattr(store, "read_windows", note_read)
    monkeypatch.setattr(store, "write_windows", refuse)
    monkeypatch.setattr(clock, "wait", lambda event, seconds: done.append("pause"))
    assert given(process, ask)
    tried = ["read", "write", "write", "write", "pause", "read", "write", "pause", "read", "write"]
    assert done == tried


def test_who_is_told_to_wait_is_told_so_by_what_others_have_left(alias: str) -> None:
    """Also where the write for another rate of the call was refused."""
    # Given a process that knows two rates, the second of which is used up
    asks = [Ask([Pace(f"RATE:{uuid.uuid4()}", 1, 3600.0, 0.001, 3600.0)], 1.0) for _ in range(2)]
    mine, theirs = RateWindows(store_for(alias)), RateWindows(store_for(alias))
    given(mine, asks[0]._replace(paces=[asks[0].paces[0]._replace(most=9)]))
    stamp = given(mine, asks[1])
    wide = asks[0]._replace(paces=[asks[0].paces[0]._replace(most=9)])
    mine.permit([wide, asks[1]], ())
    # When another one gives that back, and uses the first
    theirs.permit([], [Used(asks[1].paces, stamp, None)])
    assert given(theirs, wide)
    # Then both start
    assert all(answer.stamp for answer in mine.permit([wide, asks[1]], ()))
