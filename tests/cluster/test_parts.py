"""The plan of a seed, and what is read from a history."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from tests.acceptance.program import Program
from tests.cluster.cluster import Cluster, Member
from tests.cluster.history import Effect, Save, check, read, recovery
from tests.cluster.plan import KINDS, PARTS, TARGETS, draw, draw_short, in_pairs
from tests.cluster.run import Run
from tests.cluster.web import order

SAVES = {
    name: Save(name, "key", invoked_at=float(at), outcome="ok", completed_at=at + 0.5)
    for at, name in enumerate(["web-1", "web-2", "web-3"])
}


def effects(*jobs: str) -> list[Effect]:
    """Return the orders and effects of jobs, as they were written."""
    return [Effect(name, 0.0) for job in jobs for name in (order(job), job)]


# --- Plans ----------------------------------------------------------------------------------------


def test_a_plan_is_a_function_of_its_seed() -> None:
    assert draw(7, 50) == draw(7, 50)
    assert draw(7, 50) != draw(8, 50)


def test_a_longer_plan_begins_as_a_shorter_one() -> None:
    assert draw(7, 50)[:13] == draw(7, 13)


def test_each_round_has_every_kind_once() -> None:
    faults = draw(7, 3 * len(KINDS))
    for begin in range(0, len(faults), len(KINDS)):
        kinds = [fault.kind for fault in faults[begin : begin + len(KINDS)]]
        assert sorted(kinds) == sorted(KINDS)


def test_a_fault_meets_who_can_have_it() -> None:
    met: dict[str, set[str]] = {kind: set() for kind in KINDS}
    for fault in draw(7, 2000):
        met[fault.kind].add(fault.target)
    assert met == {kind: set(targets) for kind, targets in TARGETS.items()}


def test_a_short_plan_has_a_fault_of_three_kinds_and_parts() -> None:
    faults = draw_short(7)
    assert len({fault.kind for fault in faults}) == 3
    assert draw_short(7) == faults


def test_two_at_once_meet_different_parts() -> None:
    faults = draw(7, 100)
    rounds = list(in_pairs(faults))
    assert [fault for each in rounds for fault in each] == faults
    pairs = [each for each in rounds if len(each) == 2]
    assert len(pairs) > 25
    for one, other in pairs:
        assert not any(one.target in part and other.target in part for part in PARTS)


# --- Histories ------------------------------------------------------------------------------------


def test_nothing_is_found_where_all_is_well() -> None:
    found = check(SAVES, effects("web-1", "web-2", "web-3"))
    assert not any(asdict(found).values())


@pytest.mark.parametrize(
    ("written", "complaint"),
    [
        (effects("web-1", "web-2"), {"lost": ["web-3"]}),
        (
            [*effects("web-1", "web-2", "web-3"), Effect("web-2", 0.0)],
            {"doubled": ["web-2"], "out_of_order": ["web-2"]},
        ),
        (
            [*effects("web-1", "web-2"), Effect(order("web-3"), 0.0)],
            {"lost": ["web-3"], "torn": ["web-3"]},
        ),
        (effects("web-2", "web-1", "web-3"), {"out_of_order": ["web-1"]}),
        ([*effects("web-1", "web-2", "web-3"), Effect("x", 0.0)], {"invented": ["x"]}),
    ],
)
def test_what_does_not_hold_is_found(
    written: list[Effect], complaint: dict[str, list[str]]
) -> None:
    found = asdict(check(SAVES, written))
    assert {name: jobs for name, jobs in found.items() if jobs} == complaint


def test_a_save_that_was_refused_has_no_effect() -> None:
    refused = {**SAVES, "web-4": Save("web-4", "key", 4.0, "fail", 5.0)}
    found = check(refused, effects("web-1", "web-2", "web-3", "web-4"))
    assert found.invented == ["web-4"]


def test_a_save_without_an_answer_may_be_there_or_not() -> None:
    unknown = {**SAVES, "web-4": Save("web-4", "key", 4.0)}
    for jobs in (["web-1", "web-2", "web-3"], ["web-1", "web-2", "web-3", "web-4"]):
        assert not any(asdict(check(unknown, effects(*jobs))).values())


def test_a_job_that_failed_once_may_run_after_others_of_its_key() -> None:
    found = check(SAVES, effects("web-2", "web-3", "web-1"), failed={"web-1"})
    assert found.out_of_order == []


def test_a_history_is_read_up_to_a_line_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    facts = {"job": "web-1", "key": "key"}
    lines = [{**facts, "type": "invoke", "at": 1.0}, {**facts, "type": "ok", "at": 2.0}]
    path.write_text("\n".join(map(json.dumps, lines)) + '\n{"type": "inv')
    assert read([path, tmp_path / "none"]) == {"web-1": Save("web-1", "key", 1.0, "ok", 2.0)}


def test_a_history_of_two_clients_of_one_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "web.jsonl"
    path.write_text(2 * '{"type": "invoke", "job": "web-1", "key": "key", "at": 1.0}\n')
    with pytest.raises(ValueError, match="web-1 was saved twice"):
        read([path])


def test_a_fault_is_felt_until_every_key_goes_on() -> None:
    # Given two keys, one of which waits longer; and saves before and after
    saves = [
        Save("before", "a", 1.0, "ok", 1.1),
        Save("first", "a", 11.0, "ok", 11.5),
        Save("second", "a", 14.0, "ok", 14.5),
        Save("late", "b", 12.0, "ok", 12.5),
        Save("refused", "b", 11.0, "fail", 11.1),
        Save("after", "c", 99.0, "ok", 99.1),
    ]
    took_effect = {"before": 50.0, "first": 12.0, "second": 21.0, "late": 16.0, "after": 120.0}
    # When a fault began at 10, and all was well at 30
    times = recovery(saves, took_effect, began=10.0, over=30.0)
    # Then the slower key counts, and the job that waited longest
    assert (times.until_whole, times.longest_wait) == (6.0, 6.5)


# --- A run ----------------------------------------------------------------------------------------


def test_a_fault_that_is_not_survived_in_time_is_a_complaint_and_ends_the_faults() -> None:
    """What was saved until then is still compared."""

    class Stuck:
        def until(self, condition: object, complaint: str, timeout: float) -> None:
            raise AssertionError(f"{complaint} within {timeout:g} s")

    stuck: Any = Stuck()
    run = Run(stuck)
    run.carry_out([draw_short(7)])
    assert run.complaints == ["Not every key goes on at first within 180 s"]
    assert run.survived == []


# --- The supervisor -------------------------------------------------------------------------------


def sleeper(log: Path) -> Callable[[], Program]:
    """Return what starts a process that only waits."""
    return lambda: Program(["timeit", "import time; time.sleep(60)"], os.environ, log)


def test_a_process_that_ended_is_started_again_and_told(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path)
    here: Any = nullcontext()  # instead of a machine of its own
    member = Member(here, sleeper(tmp_path / "log"))
    try:
        # Given a process that nobody has launched yet
        cluster.supervise_member(member)
        # Then it is not the supervisor who does
        assert member.programs == []
        # When it is launched and ends
        member.launch()
        member.program.kill()
        cluster.supervise_member(member)
        # Then it runs again, once
        assert [program.is_running for program in member.programs] == [False, True]
        assert len(cluster.ends) == 1
    finally:
        for program in member.programs:
            program.end()
