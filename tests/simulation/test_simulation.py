"""A sample of schedules, and what the simulation itself promises.

``-m long`` runs a million steps; `python -m tests.simulation --seed 7` runs and shrinks one.
"""

from __future__ import annotations

import os
from itertools import count
from typing import Any

import pytest

from kjo_django.coordination.starts import Permit
from kjo_django.engine.direct_steps import DirectSteps
from kjo_django.engine.group import Pipeline
from kjo_django.engine.leases import LeaseBook
from kjo_django.limits.limiter import Limiter
from kjo_django.models import NEVER, Job, JobFailure
from kjo_django.store.base import Store
from kjo_django.workflows import countdown
from kjo_django.workflows.countdown import _Advance
from tests.simulation import running
from tests.simulation.__main__ import STEPS, TRANSPORTS, problems_of, really_now
from tests.simulation.fibers import CallFault
from tests.simulation.running import Simulation
from tests.simulation.schedule import CALM, Step, drawn, dumped, loaded, shrunk

SEED = int(os.environ.get("KJO_SIMULATION_SEED", "1"))
SAMPLE_SECONDS = 5.0
"""Of each transport, in the test command; fewer schedules on a slower machine."""
MOST = 60
MANY = 1_000_000
"""Steps of `-m long`."""

every_transport = pytest.mark.parametrize("simulation", TRANSPORTS, indirect=True)
in_memory = pytest.mark.parametrize("simulation", ["memory"], indirect=True)


def check(simulation: Simulation, seed: int) -> None:
    steps = drawn(seed, STEPS)
    problems = problems_of(simulation, steps)
    told = f"python -m tests.simulation --seed {seed} --steps {STEPS}"
    assert not problems, "\n".join([told, *problems, dumped(steps)])


@pytest.mark.promise("one-transaction", "no-stuck-state")
@pytest.mark.large("database")
@every_transport
def test_a_sample_of_schedules(simulation: Simulation) -> None:
    end = really_now() + SAMPLE_SECONDS
    for seed in range(SEED, SEED + MOST):
        check(simulation, seed)
        if really_now() >= end:
            break
    print(f"{seed - SEED + 1} schedules of {STEPS} steps from seed {SEED}")


@pytest.mark.long
@pytest.mark.timeout(6 * 3600)
@every_transport
def test_a_million_steps(simulation: Simulation) -> None:
    for seed in range(SEED, SEED + MANY // STEPS // len(TRANSPORTS) + 1):
        check(simulation, seed)


@pytest.mark.large
@every_transport
def test_a_seed_repeats_exactly(simulation: Simulation) -> None:
    struck = 0
    for seed in range(SEED, SEED + 4):
        steps = drawn(seed, STEPS)
        runs = [(simulation.run(steps), simulation.trace) for _ in range(2)]
        assert runs[0] == runs[1]
        struck += simulation.struck_count
    assert struck, "nothing befell any call"


def seen_after(simulation: Simulation, steps: list[Step]) -> list[int]:
    """Run a schedule in which nothing may break; return how many jobs were completed after each of
    its steps."""
    completed: list[int] = []
    take = simulation.take

    def seeing(step: Step) -> None:
        take(step)
        completed.append(Job.objects.filter(state="completed").count())

    simulation.take = seeing  # type: ignore[method-assign]
    assert simulation.run(steps) == []
    return completed


@in_memory
def test_a_thread_pauses_within_a_step_while_others_work(simulation: Simulation) -> None:
    # Given a relay that has published a job and not recorded that yet
    steps = [
        Step("start", 0),
        Step("start", 1),
        Step("enqueue", 0, ("atomic", "k1", "completed")),
        Step("relay", 0, fault="pauses-after", at="transport.publish"),
    ]
    # When another process runs it, before the relay goes on
    steps += [Step("poll", 1), Step("poll", 0), Step("poll", 1), Step("lane", 0), Step("lane", 1)]
    steps += [Step("go", 0, ("relay",)), Step("relay", 0)]
    # Then the job is completed before the relay's next call, and is not published again
    assert seen_after(simulation, steps)[-3:] == [1, 1, 1]
    calls = simulation.trace
    published = calls.index("process-0-1 relay transport.publish")
    went_on = next(
        n for n, call in enumerate(calls) if n > published and "process-0-1 relay" in call
    )
    assert any("INSERT ledger_entry" in call for call in calls[published:went_on])
    assert "process-0-1 relay transport.publish" not in calls[went_on:]


@in_memory
def test_a_statement_waits_for_the_lock_of_a_paused_transaction(simulation: Simulation) -> None:
    # Given a request that has written and not committed
    steps = [
        Step("start", 0),
        Step("start", 1),
        Step("enqueue", 0, ("atomic", "f1", "completed")),
        Step("relay", 0),
        Step("enqueue", 0, ("atomic", "f2", "completed"), fault="pauses-before", at="commit"),
        # When a relay records what it publishes
        Step("enqueue", 1, ("atomic", "f3", "completed")),
        Step("go", 1, ("web",)),
        Step("go", 0, ("web",)),
        Step("go", 1, ("web",)),
    ]
    # Then it does so after the commit
    seen_after(simulation, steps)
    commits = [c for c in simulation.trace if c.endswith("web commit")]
    assert commits[1:3] == ["process-0-1 web commit", "process-1-2 web commit"]


@in_memory
def test_coroutines_outside_a_transaction_are_stepped(simulation: Simulation) -> None:
    steps = [
        Step("start", 0),
        Step("enqueue", 0, ("coroutine", "f1", "completed")),
        Step("relay", 0),
        Step("poll", 0),
        Step("poll", 0),
        Step("lane", 0),
        Step("loop", 0),
        Step("record", 0),
    ]
    assert seen_after(simulation, steps)[-2:] == [0, 1]


@in_memory
def test_a_thread_that_waits_gives_up_in_virtual_time(simulation: Simulation) -> None:
    # Given a poller that loses its subscription while a coroutine runs
    steps = [
        Step("start", 0),
        Step("enqueue", 0, ("coroutine", "f1", "completed")),
        *(Step(action, 0) for action in ("relay", "poll", "poll", "lane")),
        Step("poll", 0, fault="raises-before"),
    ]
    # Then it waits for the coroutine as long as it may, and no longer
    assert seen_after(simulation, steps)[-1] == 0


@pytest.mark.large
@in_memory
def test_what_breaks_a_promise_is_found_and_shrunk(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that leaves the markers of failed attempts behind
    monkeypatch.setattr(Store, "delete_markers", lambda self, keys: None)
    short = (s for s in count(1) if len(drawn(s, STEPS)) < 1.3 * STEPS)
    seed = next(s for s in short if problems_of(simulation, drawn(s, STEPS)))
    # When
    whole = drawn(seed, STEPS)
    part = shrunk(whole, lambda steps: bool(problems_of(simulation, steps)))
    # Then
    assert problems_of(simulation, part)
    assert len(part) <= len(whole) / 3
    for at in range(len(part)):
        assert not problems_of(simulation, part[:at] + part[at + 1 :])


@pytest.mark.large
@in_memory
def test_a_countdown_that_is_wrong_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that releases what waits for several stages when the first of them has ended
    follow = _Advance._follow

    def following(advance: _Advance, rows: Any) -> set[Any]:
        for row in rows:
            row.followers = [each._replace(unmet_count=1) for each in row.followers]
        return follow(advance, rows)

    monkeypatch.setattr(_Advance, "_follow", following)
    # Then
    seeds = (seed for seed in count(1) if drawn_flows(seed))
    problems = (problem for s in seeds for problem in problems_of(simulation, drawn(s, STEPS)))
    assert next(problem for problem in problems if "ran before" in problem)


STEP = "atomic completed cancel"
RELEASED = [
    Step("start", 0),
    Step("flow", 0, ("w0", "chain", "cancel", STEP, STEP, STEP)),
    *(Step(action, 0) for action in ("relay", "poll", "poll")),
]
"""A chain whose first step a worker has read."""
RELEASING = {
    "before it is handed over": [Step("lane", 0, fault="dies-after", at="commit", nth=1)],
    "before it runs": [Step("lane", 0), Step("die", 0)],
    "while it runs": [Step("lane", 0), Step("lane", 0, fault="dies-after", at="INSERT ledger")],
    "before it stops": [Step("lane", 0), Step("stop", 0)],
}
"""The steps in which it releases the next one, and ends."""


@in_memory
@pytest.mark.parametrize("end", RELEASING)
def test_a_step_that_its_worker_runs_itself_survives_the_worker(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    # Given a worker that ends when it has released a step
    leased: list[str] = []
    put = DirectSteps.put

    def putting(direct: DirectSteps, steps: Any) -> None:
        leased.extend(str(step.id) for step in steps)
        put(direct, steps)

    monkeypatch.setattr(DirectSteps, "put", putting)
    steps = [*RELEASED, *RELEASING[end]]
    # Then another one runs the step, whatever befell the first
    assert problems_of(simulation, steps) == []
    assert leased
    # And a lease that never expires, or that is not given back, would be found
    monkeypatch.setattr(DirectSteps, "lease", lambda direct, seconds=0.0: (direct._token, NEVER))
    monkeypatch.setattr(DirectSteps, "close", lambda direct: None)
    assert any("reaches no end" in problem for problem in problems_of(simulation, steps))


@in_memory
def test_a_workflow_is_announced_unless_the_process_that_has_ended_it_dies(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a request that has cancelled a workflow, and has not announced that yet
    steps = [
        Step("start", 0),
        Step("flow", 0, ("w0", "chain", "cancel", STEP, STEP)),
        Step("cancel-flow", 0, fault="pauses-after", at="commit"),
    ]
    # Then nothing is missing where its process dies
    assert problems_of(simulation, [*steps, Step("die", 0)]) == []
    assert problems_of(simulation, steps) == []
    # And one that lives and does not announce it is found
    monkeypatch.setattr(countdown, "send_end", lambda *arguments: None)
    assert any("was not announced by" in each for each in problems_of(simulation, steps))


@pytest.mark.long
@pytest.mark.timeout(900)
@in_memory
def test_drawn_schedules_end_workers_that_have_steps_of_their_own(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given drawn schedules with workflows, and an engine that never gives up such a lease
    monkeypatch.setattr(DirectSteps, "lease", lambda direct, seconds=0.0: (direct._token, NEVER))
    seeds = (seed for seed in count(1) if drawn_flows(seed))
    problems = (problem for s in seeds for problem in problems_of(simulation, drawn(s, STEPS)))
    # Then one of them finds it
    assert next(problem for problem in problems if "reaches no end" in problem)


def drawn_flows(seed: int) -> int:
    return sum(step.action == "flow" for step in drawn(seed, STEPS))


def test_one_schedule_in_two_has_workflows() -> None:
    seeds = range(100)
    assert 30 <= sum(drawn_flows(seed) > 0 for seed in seeds) <= 70
    steps = [step for seed in seeds for step in drawn(seed, STEPS) if step.action == "flow"]
    assert {step.what[1] for step in steps} == {"chain", "group", "graph"}
    assert {step.what[2] for step in steps} == {"cancel", "run", "hold"}


def test_a_schedule_is_written_and_read_back() -> None:
    steps = drawn(3, 200)
    assert loaded(dumped(steps)) == steps
    assert drawn(3, 200) == steps != drawn(4, 200)


def test_some_seeds_meet_pauses_only() -> None:
    worse = {fault.value for fault in CallFault if fault not in CALM}
    calm = [
        seed
        for seed in range(100)
        if not any(step.fault in worse or step.action == "die" for step in drawn(seed, 200))
    ]
    assert 20 <= len(calm) <= 60


@in_memory
@pytest.mark.parametrize("limit", ["rate", "slots"])
def test_a_limit_that_is_not_obeyed_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    # Given two jobs, of which one is paused in its handler
    kind = {"rate": "rated-outside", "slots": "slots-outside"}[limit]
    steps = [Step("start", 0)]
    for number, lane in enumerate(("lane", "lane-2")):
        steps += [Step("enqueue", 0, (kind, f"f{2 * number}", "completed")), Step("relay", 0)]
        steps += [Step("poll", 0), Step("poll", 0)]
        steps += [Step(lane, 0, fault="pauses-before", at="INSERT ledger")]
    steps += [Step("go", 0, ("lane",)), Step("go", 0, ("lane-2",))]
    assert problems_of(simulation, steps) == []
    # When the limiter does not heed what it is answered
    if limit == "rate":
        given = Permit(0.0, 1)
        monkeypatch.setattr(LeaseBook, "permit", lambda self, asks, used: [given] * len(asks))
    else:
        monkeypatch.setattr(Limiter, "_ask_slots", lambda self, *asked: None)
    # Then
    assert any("2 jobs of" in problem for problem in problems_of(simulation, steps))


@in_memory
def test_a_late_start_of_a_coroutine_that_is_not_refused_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given two coroutines that were permitted to start one after the other, and come together
    steps = [Step("start", 0)]
    for number in range(2):
        steps += [Step("enqueue", 0, ("rated-coroutine", f"f{number}", "completed"))]
        steps += [Step(action, 0) for action in ("relay", "poll", "poll", "lane")]
        steps += [Step("time", seconds=2.0)] * (1 - number)
    steps += [Step("loop", 0), Step("loop", 0), Step("record", 0)]
    assert problems_of(simulation, steps) == []
    # When the late one starts all the same
    monkeypatch.setattr(Limiter, "use_permits", lambda self, deliveries: deliveries)
    # Then
    assert "2 jobs of rated-coroutine start" in " ".join(problems_of(simulation, steps))


@in_memory
def test_a_coroutine_that_is_refused_and_keeps_its_row_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a coroutine whose permit has become old when it comes to start
    steps = [Step("start", 0), Step("enqueue", 0, ("rated-coroutine", "f0", "completed"))]
    steps += [Step(action, 0) for action in ("relay", "poll", "poll", "lane")]
    steps += [Step("time", seconds=2.0), Step("loop", 0), Step("record", 0)]
    assert problems_of(simulation, steps) == []
    # When leases of rows are not given back
    monkeypatch.setattr(LeaseBook, "_give_back_rows", lambda self, left: None)
    monkeypatch.setattr(running, "MOST_ROUNDS", 100)
    # Then
    assert problems_of(simulation, steps) == ["1 jobs are put off for ever"]


HANGING = [
    Step("start", 0),
    Step("enqueue", 0, ("outside", "f0", "retried", "outside", "f1", "completed")),
    *(Step(action, 0) for action in ("relay", "poll", "poll")),
    Step("lane", 0, fault="pauses-before", at="INSERT ledger", nth=1),
    Step("hang", 0, ("lane",)),
    Step("lane", 0),
    Step("go", 0, ("hung-lane",)),
]
"""The second handler of a group hangs, and goes on when its thread is given up."""


@in_memory
def test_a_thread_whose_handler_hangs_is_given_up(simulation: Simulation) -> None:
    assert problems_of(simulation, HANGING) == []
    calls = [call.partition(" ")[2] for call in simulation.trace]
    # What ran before it is settled by the thread that takes its place
    assert "lane INSERT kjo_job_failure" in calls
    # And it has no effect when it goes on
    assert not any(call.startswith("hung-lane commit") for call in calls)
    (failure,) = JobFailure.objects.filter(error__contains="its thread was given up")
    assert failure.job.arguments["job"] == "f1"


@in_memory
def test_what_a_thread_that_is_given_up_keeps_for_ever_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an engine that settles what ran before a handler that hangs, and keeps its row
    abandon = Pipeline.abandon

    def abandoning(pipeline: Pipeline, *arguments: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(LeaseBook, "let_rows_go", lambda self, ids: None)
            return abandon(pipeline, *arguments)

    monkeypatch.setattr(Pipeline, "abandon", abandoning)
    monkeypatch.setattr(running, "MOST_ROUNDS", 100)
    # Then
    assert problems_of(simulation, HANGING) == ["2 jobs are put off for ever"]


@in_memory
def test_a_job_that_was_undone_with_one_that_hung_keeps_its_place_in_line(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a job with a slot, one that hangs in its transaction, and the next job of its key
    jobs = ("slots", "k0", "completed", "atomic", "f1", "completed", "slots", "k2", "completed")
    steps = [*HANGING[:-2], Step("lane", 0, fault="pauses-after", at="coordination.release")]
    steps[1] = Step("enqueue", 0, jobs)
    # When its worker dies, and the line has gone on before
    steps += [Step(action, 0) for action in ("line", "relay", "die")]
    # Then another one keeps the order
    assert problems_of(simulation, steps) == []
    # And would not, had nobody noted that the first job has started
    monkeypatch.setattr(Limiter, "keep_places", lambda self, deliveries: None)
    assert any("ran in the order" in problem for problem in problems_of(simulation, steps))


@in_memory
def test_a_lease_that_is_released_under_who_has_taken_it_is_found(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a lease that was not released when its job failed, and is while its retry takes it
    steps = [
        Step("start", 0),
        Step("enqueue", 0, ("outside", "f0", "retried")),
        *(Step(action, 0) for action in ("relay", "poll", "poll")),
        Step("lane", 0, fault="raises-before", at="coordination.release"),
        Step("time", seconds=5.0),
        *(Step(action, 0) for action in ("relay", "poll", "poll")),
        Step("beat", 0, fault="pauses-before", at="coordination.release"),
        Step("lane", 0, fault="pauses-before", at="INSERT ledger"),
        Step("go", 0, ("beat",)),
        Step("beat", 0),
    ]
    assert problems_of(simulation, steps) == []
    # When nobody heeds that
    claim = LeaseBook.claim

    def claiming(book: LeaseBook, *arguments: Any) -> Any:
        leaving, book._leaving = book._leaving, set()
        try:
            return claim(book, *arguments)
        finally:
            book._leaving = leaving

    monkeypatch.setattr(LeaseBook, "claim", claiming)
    # Then
    assert any("was lost" in problem for problem in problems_of(simulation, steps))


@in_memory
def test_what_a_group_calls_once_more_has_started_once(simulation: Simulation) -> None:
    # Given two jobs of one rate, which start together
    steps = [Step("start", 0)]
    steps += [Step("enqueue", 0, ("rated", name, "completed")) for name in ("f82.2", "f88.1")]
    steps += [Step("relay", 0), Step("poll", 0), Step("poll", 0)]
    # When their transaction is refused, and they run one by one
    steps += [Step("lane", 0, fault="raises-before", at="UPDATE kjo_job")]
    # Then
    assert problems_of(simulation, steps) == []
    assert [len(starts) for starts in simulation.limited.starts.values()] == [2]


@pytest.mark.long
@in_memory
def test_slots_that_are_not_obeyed_are_found_by_drawn_schedules(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LeaseBook, "claim_slots", lambda self, asks, ttl: [True] * len(asks))
    problems = (
        problem for s in range(1, 300) for problem in problems_of(simulation, drawn(s, STEPS))
    )
    assert any("run at once, not" in problem for problem in problems)


@every_transport
def test_a_job_with_a_slot_that_is_paused_stays_before_those_in_line(
    simulation: Simulation,
) -> None:
    jobs = [("fw6.0", "completed"), ("kw6.1", "paused"), ("kw6.2", "completed")]
    what = tuple(part for job in jobs for part in ("slots", *job))
    assert problems_of(simulation, [Step("start"), Step("enqueue", what=what)]) == []


@every_transport
def test_paused_jobs_with_slots_keep_their_places_when_they_come_to_another_worker(
    simulation: Simulation,
) -> None:
    names = ("f16.0", "f16.1", "k16.2", "k16.3")
    paused = tuple(part for name in names for part in ("slots", name, "paused"))
    steps = [
        Step("start", 0),
        Step("start", 1),
        Step("enqueue", 0, paused),
        Step("enqueue", 1, ("slots", "klane1.0", "completed")),
        *(Step(action, who) for action, who in (("relay", 1), ("poll", 0), ("lane-2", 0))),
        Step("time", seconds=2.5),
        Step("lane", 0),
        Step("time", seconds=2.5),
        # When the second worker takes its share of what is read
        Step("poll", 1),
    ]
    assert problems_of(simulation, steps) == []
