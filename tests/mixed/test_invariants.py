"""The checks of the mixed load find what they are there for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.acceptance.moments import Moment
from tests.mixed.invariants import Begin, Evidence, Lease, Letter, Row, complaints
from tests.mixed.plan import BUSY, ENGINES, RATE, SLOTS, Work, draw

pytestmark = pytest.mark.medium  # quick, of a folder that is not

WORKS = [
    Work("mx0x", "write", 0, 1),
    Work("mx1x", "keyed", 0, 2, key="k"),
    Work("mx2x", "keyed", 0, 3, key="k"),
    Work("mx3x", "write", 0, 4, end="refuse"),
    Work("mx4x", "task", 0, 5, end="cancel"),
    Work("mx5x", "other", 0, 6),
    Work("mx6x", "write", 0, 7, commits=False),
    Work("mx7x", "probe", 0, 8),
    Work("mx8x", "write_outside", 0, 9),
    Work("mx20x", "uneven", 0, 10),
    Work("mx21x", "uneven", 0, 10, ms=8000),
]
STATES = {3: "failed", 4: "cancelled"}
RATED = [Work(f"mx{100 + at}x", "rated", 0, 11, key="rate-a") for at in range(60)]
SLOTTED = [Work(f"mx{200 + at}x", "slotted", 0, 12, ms=1000) for at in range(8)]
FLOW = [
    Work(f"mx{300 + at}x", kind, 0, 13, key="flow")
    for at, kind in enumerate(("first_step", "step", "step", "last_step"))
]
BEGAN = 120.0
"""When what has limits was committed, and began."""


def limited(found: Evidence) -> Evidence:
    """Add what jobs with limits and a workflow leave behind: four start each second, two run."""
    for work in [*RATED, *SLOTTED, *FLOW]:
        found.works[work.name] = work
        found.committed[work.name] = BEGAN
        found.entries.append(("", work.name))
        found.rows.append(Row(f"id-{work.name}", work.name, "completed"))
        found.signals[work.name] = ["completed"]
        found.begins[work.name] = [Begin(BEGAN + 0.2, 7)]
    start_each(found, 1 / RATE)
    for at in range(len(SLOTTED)):
        run_in_slot(found, at, BEGAN + at // SLOTS)
    return found


def start_each(found: Evidence, seconds: float) -> None:
    """Let a job with a rate start each so many seconds."""
    found.starts["rate-a"] = []
    for number, work in enumerate(RATED):
        at = BEGAN + number * seconds
        found.begins[work.name] = [Begin(at, 7)]
        found.starts["rate-a"].append(Moment(at, 7, at, at, work.name))


def run_in_slot(found: Evidence, number: int, at: float, pid: int = 7) -> None:
    """Let a job with slots run for a second."""
    name = SLOTTED[number].name
    found.begins[name], found.ends[name] = [Begin(at, pid)], [Begin(at + 1.0, pid)]


def evidence() -> Evidence:
    """Return what a run in which all went well leaves behind."""
    done = [work for work in WORKS if work.name not in ("mx3x", "mx4x", "mx5x", "mx6x")]
    found = Evidence(
        ENGINES["kafka"],
        {work.name: work for work in WORKS},
        committed={work.name: 100.0 + at for at, work in enumerate(WORKS) if work.commits},
        entries=[(work.key, work.name) for work in done],
        rows=[
            Row(f"id-{at}", work.name, STATES.get(at, "completed"), is_record=work.kind == "other")
            for at, work in enumerate(WORKS)
            if work.commits
        ],
        letters=[Letter("letter", "mx3x", "fatal", 104.0)],
        begins={work.name: [Begin(108.5, 7)] for work in done},
        signals={"mx3x": ["failed"]} | {work.name: ["completed"] for work in done},
        records={"mx5x": [105.2]},
        dead_records={"mx3x": [104.0]},
        has_dead_records=True,
        leases=[],
    )
    return limited(found)


def test_nothing_is_complained_of_where_all_is_well() -> None:
    assert complaints(evidence()) == []


def lose(it: Evidence) -> None:
    it.entries = [entry for entry in it.entries if entry[1] != "mx0x"]


def leave_open(it: Evidence) -> None:
    it.left = ["a job"]


def double(it: Evidence) -> None:
    it.entries.append(("", "mx0x"))


def double_outside_undisturbed(it: Evidence) -> None:
    it.entries.append(("", "mx8x"))


def commit_what_was_rolled_back(it: Evidence) -> None:
    it.entries.append(("", "mx6x"))


def forget_letter(it: Evidence) -> None:
    it.letters = []


def bury_twice(it: Evidence) -> None:
    it.letters.append(Letter("second", "mx3x", "fatal", 104.0))


def bury_what_completed(it: Evidence) -> None:
    it.letters.append(Letter("second", "mx0x", "fatal", 104.0))


def say_two_ends(it: Evidence) -> None:
    it.rows = [Row("id-0", "mx0x", "failed") if r.name == "mx0x" else r for r in it.rows]


def tell_nobody(it: Evidence) -> None:
    del it.signals["mx0x"]


def invert(it: Evidence) -> None:
    it.entries.reverse()


def publish_twice(it: Evidence) -> None:
    it.records["mx5x"] = [105.2, 106.0]


def publish_death_twice(it: Evidence) -> None:
    it.dead_records["mx3x"] = [104.0, 104.1]


def starve(it: Evidence) -> None:
    it.begins["mx7x"] = [Begin(110.0, 7)]


def keep_behind_a_long_run(it: Evidence) -> None:
    it.begins["mx20x"] = [Begin(109.0 + 8.0, 7)]


def start_too_often(it: Evidence) -> None:
    start_each(it, 0.24)


def start_too_seldom(it: Evidence) -> None:
    start_each(it, 0.3)


def run_three_at_once(it: Evidence) -> None:
    run_in_slot(it, 2, BEGAN + 0.5)


def leave_a_slot_free(it: Evidence) -> None:
    run_in_slot(it, 7, BEGAN + 6.5)


def overtake_a_step(it: Evidence) -> None:
    it.entries.remove(("", "mx302x"))
    it.entries.append(("", "mx302x"))


def hold_for_ever(it: Evidence) -> None:
    it.leases = [Lease("CONS:a", expires=False)]


def hold_although_nobody_died(it: Evidence) -> None:
    it.leases = [Lease("CONS:a", expires=True)]


def end_badly(it: Evidence) -> None:
    it.workers_that_failed = ["a worker ended with 1"]


@pytest.mark.parametrize(
    ("change", "invariant"),
    [
        (lose, "everything_ends"),
        (leave_open, "everything_ends"),
        (forget_letter, "everything_ends"),
        (double, "each_effect_is_there_once"),
        (double_outside_undisturbed, "each_effect_is_there_once"),
        (commit_what_was_rolled_back, "each_effect_is_there_once"),
        (bury_twice, "each_end_has_one_row"),
        (bury_what_completed, "each_end_has_one_row"),
        (say_two_ends, "each_end_has_one_row"),
        (tell_nobody, "each_end_is_told"),
        (invert, "each_key_keeps_its_order"),
        (publish_twice, "records_for_others_are_published_once"),
        (publish_death_twice, "dead_letters_are_published_once"),
        (starve, "what_a_lane_could_start_starts_soon"),
        (keep_behind_a_long_run, "what_a_lane_could_start_starts_soon"),
        (start_too_often, "no_more_starts_than_a_rate_permits"),
        (start_too_seldom, "what_a_rate_permits_starts"),
        (run_three_at_once, "no_more_run_at_once_than_have_slots"),
        (leave_a_slot_free, "a_free_slot_is_taken_soon"),
        (overtake_a_step, "steps_follow_one_another"),
        (hold_for_ever, "leases_are_gone_or_expire"),
        (hold_although_nobody_died, "leases_are_gone_or_expire"),
        (end_badly, "workers_end_in_order"),
    ],
)
def test_each_violation_is_found(change: Callable[[Evidence], None], invariant: str) -> None:
    found = evidence()
    change(found)
    assert any(complaint.startswith(f"{invariant}:") for complaint in complaints(found))


def test_a_crash_excuses_what_it_may_repeat_and_nothing_else() -> None:
    # Given a worker that was killed right after a handler outside a transaction ran
    found = evidence()
    found.disturbances = [(110.0, 110.0, "kill")]
    found.killed = {7: 110.0}
    # When that handler's entry is there twice
    double_outside_undisturbed(found)
    # Then it is excused, and that of one within its transaction is not
    assert complaints(found) == []
    double(found)
    assert [text.partition(":")[0] for text in complaints(found)] == ["each_effect_is_there_once"]


def test_a_relay_that_dies_while_others_have_its_rows_locked_may_publish_again() -> None:
    # Given a record that was published twice, and a relay that was killed well after the first time
    found = evidence()
    publish_twice(found)
    found.records["mx5x"] = [120.0, 131.0]
    found.disturbances = [(130.0, 130.0, "relay")]
    assert [text.partition(":")[0] for text in complaints(found)] == [
        "records_for_others_are_published_once"
    ]
    # When it could not note the first one until then, as others had the rows
    found.disturbances.append((119.0, 129.5, "hold_rows"))
    # Then
    assert complaints(found) == []


def test_an_idle_queue_may_wait_as_long_right_after_a_disturbance_as_during_one() -> None:
    # Given a job of an idle queue that waited for three seconds
    found = evidence()
    starve(found)
    # Then it is excused if a worker left shortly before it was enqueued, and not long before
    found.disturbances = [(106.5, 106.9, "leave")]
    assert complaints(found) == []
    found.disturbances = [(103.0, 103.5, "leave")]
    names = {text.partition(":")[0] for text in complaints(found)}
    assert names == {"what_a_lane_could_start_starts_soon"}


def test_two_relays_may_publish_a_record_until_the_first_asks_for_its_forgotten_leases() -> None:
    # Given a record that was published twice, and coordination that was emptied before
    found = evidence()
    publish_twice(found)
    found.records["mx5x"] = [120.0, 120.2]
    found.disturbances = [(118.0, 118.1, "flush")]
    # Then it is excused for as long as a relay does not ask for its leases, and no longer
    assert [text.partition(":")[0] for text in complaints(found)] == [
        "records_for_others_are_published_once"
    ]
    found.disturbances = [(118.4, 118.5, "flush")]
    assert complaints(found) == []


def test_on_sqlite_a_run_may_outlive_its_lease_while_others_write() -> None:
    # Given a run outside a transaction whose worker said that its lease was over by the end
    found = evidence()
    double_outside_undisturbed(found)
    found.outlived = {"mx8x"}
    # Then it is excused where a worker may wait long for others to have written, only there
    assert any("2 times: mx8x" in complaint for complaint in complaints(found))
    found.engine = ENGINES["sqlite"]
    assert complaints(found) == []
    # And one within its transaction is not
    double(found)
    found.outlived = {"mx0x", "mx8x"}
    assert any("2 times: mx0x" in complaint for complaint in complaints(found))


def test_a_job_whose_handler_lost_its_database_loses_its_place_and_no_other_does() -> None:
    # Given three jobs of a key, the first of which ran last
    found = evidence()
    found.works["mx9x"] = Work("mx9x", "keyed", 0, 10, key="k")
    found.committed["mx9x"] = 109.0
    found.rows.append(Row("id-9", "mx9x", "completed"))
    found.signals["mx9x"] = ["completed"]
    found.entries = [entry for entry in found.entries if not entry[0]]
    found.entries += [("k", "mx2x"), ("k", "mx9x"), ("k", "mx1x")]
    # When its session was ended while its handler ran
    found.failed = {"mx1x"}
    # Then it is excused, as a failed attempt has lost its place
    assert complaints(found) == []
    # And the others are not: they keep their order
    found.entries = [*found.entries[:-3], ("k", "mx9x"), ("k", "mx2x"), ("k", "mx1x")]
    (complaint,) = complaints(found)
    assert complaint.startswith("each_key_keeps_its_order: k: ['mx9x', 'mx2x']")


def test_a_task_may_complete_that_was_saved_and_never_cancelled() -> None:
    # Given a task that was to be cancelled once its transaction was committed, and completed
    found = evidence()
    found.rows = [r for r in found.rows if r.name != "mx4x"] + [Row("id-4", "mx4x", "completed")]
    found.entries.append(("", "mx4x"))
    found.signals["mx4x"] = ["completed"]
    assert any("of what did not complete: mx4x" in complaint for complaint in complaints(found))
    # When the application lost its connection with the commit, so that it never got to cancelling
    del found.committed["mx4x"]
    found.unsure = {"mx4x"}
    # Then it is excused
    assert complaints(found) == []


def test_on_a_slow_machine_one_of_many_may_wait_for_longer_than_the_only_one_of_its_queue() -> None:
    # Given a machine that is three times slower, and one of many that waited for six seconds
    found = evidence()
    found.paces = [(107.0 + at, 3.0) for at in range(10)]
    found.begins["mx20x"] = [Begin(109.0 + 6.0, 7)]
    # Then it is excused, as it waits for the work of those before it
    assert complaints(found) == []
    # And the only one of its queue is not
    found.begins["mx7x"] = [Begin(107.0 + 6.0, 7)]
    (complaint,) = complaints(found)
    assert "mx7x" in complaint


def test_a_rate_may_stay_unused_only_where_something_was_done_or_the_machine_lost_time() -> None:
    # Given a rate of which a sixth was not used
    found = evidence()
    start_too_seldom(found)
    names = [text.partition(":")[0] for text in complaints(found)]
    assert names == ["what_a_rate_permits_starts"]
    # Then the plan's own busy processes do not excuse it
    slowness = 1 + BUSY / found.processor_count
    found.paces = [(BEGAN + at, slowness) for at in range(20)]
    assert names == [text.partition(":")[0] for text in complaints(found)]
    # And somebody else's do, as does a worker that left
    found.paces = [(BEGAN + at, slowness + 0.5) for at in range(20)]
    assert complaints(found) == []
    found.paces, found.disturbances = [], [(BEGAN, BEGAN + 10.0, "leave")]
    assert complaints(found) == []


def test_what_is_permitted_may_stay_unused_on_sqlite_and_is_not_exceeded() -> None:
    # Given a rate of which a sixth was not used, on SQLite
    found = evidence()
    found.engine = ENGINES["sqlite"]
    start_too_seldom(found)
    assert complaints(found) == []
    # When more jobs start than are permitted
    start_too_often(found)
    # Then it is found there, too
    names = [text.partition(":")[0] for text in complaints(found)]
    assert names == ["no_more_starts_than_a_rate_permits"]


def test_what_a_worker_calls_again_in_an_attempt_is_no_other_start() -> None:
    # Given four jobs that start within a second, as many as may
    found = evidence()
    starts = found.starts["rate-a"]
    started, at = starts[0], starts[0].counted_by + 0.5
    # When one of them is called again by its worker
    found.note_repeat(started.what, at, started.pid, at)
    # Then that is no start
    assert complaints(found) == []
    # When another worker calls it, which has counted nothing
    found.note_repeat(started.what, at, started.pid + 1, at)
    # Then it is one
    names = [text.partition(":")[0] for text in complaints(found)]
    assert names == ["no_more_starts_than_a_rate_permits"]


def test_a_frozen_worker_has_lost_its_slots_and_no_other_has() -> None:
    # Given a job that runs beside two, in a worker that was frozen before these began
    found = evidence()
    run_in_slot(found, 1, BEGAN, pid=8)
    found.ends["mx201x"] = [Begin(BEGAN + 1.5, 8)]
    found.frozen = [(8, BEGAN + 0.5, BEGAN + 1.5)]
    # Then it is excused, and would not be in another one
    assert complaints(found) == []
    found.frozen = [(7, BEGAN + 2.5, BEGAN + 3.5)]
    assert [text.partition(":")[0] for text in complaints(found)] == [
        "no_more_run_at_once_than_have_slots"
    ]


def test_a_job_with_slots_that_was_killed_ran_until_then() -> None:
    # Given a run that never noted its end
    found = evidence()
    run_in_slot(found, 1, BEGAN, pid=8)
    del found.ends["mx201x"]
    # When its worker was killed at once, or later
    found.killed = {8: BEGAN + 0.5}
    assert complaints(found) == []
    found.killed = {8: BEGAN + 1.5}
    # Then the slot was taken until that moment
    assert [text.partition(":")[0] for text in complaints(found)] == [
        "no_more_run_at_once_than_have_slots"
    ]


@pytest.mark.parametrize("engine", ENGINES)
def test_a_seed_draws_the_same_plan_each_time(engine: str) -> None:
    assert draw(5, engine) == draw(5, engine)
    assert draw(5, engine).works != draw(6, engine).works


def test_the_processing_of_a_record_that_kdlq_kills_completes_with_the_kill() -> None:
    # Given a record whose first transaction failed: a row has brought it back, and it was killed
    found = evidence()
    found.works["mx9x"] = Work("mx9x", "kdlq", 0, 10, end="refuse")
    found.committed["mx9x"] = 109.0
    found.rows.append(Row("id-9", "mx9x", "completed"))
    found.letters.append(Letter("kill", "mx9x", "fatal", 110.0))
    found.signals["mx9x"] = ["processed", "processed", "completed"]
    found.dead_records["mx9x"] = [110.0]
    # Then all is well
    assert complaints(found) == []
    # And without its dead letter it is lost
    found.letters.pop()
    assert any("no end: mx9x" in complaint for complaint in complaints(found))
