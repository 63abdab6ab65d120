"""Chains, groups and workflows: what runs when, and what becomes of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any
from unittest.mock import Mock

import pytest
from django.utils import timezone

from kjo_django import Workflow, chain, group, job
from kjo_django.exceptions import PermanentError
from kjo_django.models import DeadLetter, Job, WorkflowCount, WorkflowEdge, WorkflowStage
from kjo_django.models import Workflow as Row
from kjo_django.operations import dead_letters, jobs, workflows
from kjo_django.operations.maintenance.prune import Retention, prune
from kjo_django.states import JobState
from kjo_django.workflows.snapshots import graph
from kjo_django.workflows.workflow_handle import WorkflowHandle
from tests.unit.steps import Steps

pytestmark = pytest.mark.usefixtures("engine")


def states_of(handle: WorkflowHandle) -> dict[str, str]:
    """Return the state of each step by its name."""
    rows = Job.objects.filter(stage__workflow=handle.workflow_id)
    return {job.arguments["name"]: job.state for job in rows}


def of_counts(handle: WorkflowHandle) -> tuple[int, int, int, int]:
    steps = handle.snapshot().steps
    return steps.completed, steps.open, steps.failed, steps.cancelled


# --- What runs when -------------------------------------------------------------------------------


def test_each_step_of_a_chain_is_given_the_result_of_the_one_before(steps: Steps) -> None:
    # When
    handle = chain(steps.double.step(value=1), steps.double.step(), steps.double.step()).enqueue()
    # Then: the others wait
    assert [job.state for job in Job.objects.order_by("id")][1:] == ["waiting", "waiting"]
    assert (handle.status, handle.snapshot().steps.percent) == ("running", 0.0)
    # When
    assert steps.run() == ["double 1", "double 2", "double 4"]
    # Then
    assert (handle.status, of_counts(handle)) == ("completed", (3, 0, 0, 0))


def test_a_group_is_followed_once_by_what_waits_for_all_of_it(steps: Steps) -> None:
    # When
    members = group(steps.note.step(name=f"m{n}") for n in range(7))
    handle = members.then(steps.look.step(name="end")).enqueue(name="seven")
    # Then: equal members are one stage
    assert sorted(WorkflowStage.objects.values_list("step_count", flat=True)) == [1, 7]
    assert WorkflowEdge.objects.count() == 1
    called = steps.run()
    assert sorted(called[:-1]) == [f"m{n}" for n in range(7)]
    assert called[-1] == "end"
    assert steps.seen == [f"m{n}" for n in range(7)]
    assert handle.status == "completed"


def test_what_follows_a_group_without_members_runs(steps: Steps) -> None:
    """FINDINGS 2.11: as the page says, since all of its members have completed."""
    handle = group([]).then(steps.note.step(name="end")).enqueue()
    assert steps.run() == ["end"]
    assert handle.status == "completed"


def test_a_large_group_has_several_counts_and_one_follower(steps: Steps) -> None:
    handle = (
        group(steps.note.step(name=f"m{n}") for n in range(250))
        .then(steps.note.step(name="end"))
        .enqueue()
    )
    assert WorkflowCount.objects.filter(stage__step_count=250).count() == 2
    assert of_counts(handle) == (0, 251, 0, 0)
    called = steps.run()
    assert len(called) == 251
    assert called[-1] == "end"
    assert of_counts(handle) == (251, 0, 0, 0)
    assert handle.status == "completed"


@pytest.mark.parametrize("kind", ["note", "outside", "coroutine"])
def test_a_workflow_runs_each_step_after_all_that_it_waits_for(steps: Steps, kind: str) -> None:
    # Given
    job = getattr(steps, kind)
    with Workflow("import", id="import-42") as w:
        first = w.add(job, name="first")
        loads = [w.add(job, name=f"load {n}", after=first) for n in range(3)]
        w.add(job, name="check", after=loads[1])
        w.add(steps.other, name="report", after=loads)
    assert w.handle is not None
    # When
    called = steps.run()
    # Then
    assert called[0] == "first"
    assert called.index("report") > max(called.index(f"load {n}") for n in range(3))
    assert called.index("check") > called.index("load 1")
    assert sorted(called) == ["check", "first", "load 0", "load 1", "load 2", "report"]
    assert w.handle.status == "completed"


def test_chains_stand_in_groups_and_groups_in_chains(steps: Steps) -> None:
    handle = chain(
        steps.note.step(name="a"),
        group(
            [
                chain(steps.note.step(name="b1"), steps.note.step(name="b2")),
                steps.note.step(name="c"),
            ]
        ),
        steps.note.step(name="d"),
    ).enqueue()
    called = steps.run()
    assert (called[0], called[-1], len(called)) == ("a", "d", 5)
    assert called.index("b2") > called.index("b1")
    assert [stage.layer for stage in graph(handle.id)] == [0, 1, 1, 2, 3]


def test_of_two_with_one_id_one_is_stored(steps: Steps) -> None:
    handles = []
    for _ in range(2):
        with Workflow("import", id="42") as w:
            w.add(steps.note, name="a")
        handles.append(w.handle)
    assert handles[0] == handles[1]
    assert [handle.is_new for handle in handles] == [True, False]
    assert Job.objects.count() == 1


def test_nothing_is_stored_when_the_block_raises(steps: Steps) -> None:
    with pytest.raises(KeyError), Workflow("import") as w:
        w.add(steps.note, name="a")
        raise KeyError
    assert not Row.objects.exists()


# --- What a running step asks and adds ------------------------------------------------------------


def test_a_step_reads_the_results_of_steps_before_it_or_of_a_job(steps: Steps) -> None:
    with Workflow("reading") as w:
        a = w.add(steps.note, name="a")
        b = w.add(steps.other, name="b", after=a)
        w.add(steps.look, name="end", of="note", after=b)
    steps.run()
    assert steps.seen == ["a"]
    with Workflow("reading") as w:
        w.add(steps.look, after=[w.add(steps.note, name="a"), w.add(steps.other, name="b")])
    steps.run()
    assert steps.seen == ["a", "b"]


def test_steps_that_a_step_adds_run_before_what_waited_for_it(steps: Steps) -> None:
    # Given
    steps.adding = ["new 1", "new 2", "then new 2"]
    handle = chain(steps.add.step(name="split"), steps.note.step(name="end")).enqueue()
    # When
    called = steps.run()
    # Then
    assert (called[0], called[-1]) == ("split", "end")
    assert sorted(called[1:-1]) == ["new 1", "new 2", "then new 2"]
    assert called.index("then new 2") > called.index("new 2")
    assert (handle.status, of_counts(handle)) == ("completed", (5, 0, 0, 0))


def test_what_a_failed_attempt_has_added_is_not_stored(steps: Steps) -> None:
    steps.adding, steps.failing = ["new"], {"split"}
    handle = chain(steps.add.step(name="split"), steps.note.step(name="end")).enqueue()
    assert steps.run() == []
    assert (handle.status, of_counts(handle)) == ("failed", (0, 0, 1, 1))


# --- Failures -------------------------------------------------------------------------------------


def failing_graph(steps: Steps, **options: Any) -> WorkflowHandle:
    """Enqueue a → bad → end, and a → aside; ``bad`` fails."""
    steps.failing = {"bad"}
    with Workflow("failing") as w:
        a = w.add(steps.note, name="a")
        bad = w.add(steps.note, name="bad", after=a)
        w.add(steps.look, name="end", after=bad, **options)
        w.add(steps.note, name="aside", after=a)
    assert w.handle is not None
    return w.handle


def test_what_waits_for_a_failed_step_is_cancelled_and_says_why(steps: Steps, hear: Any) -> None:
    # Given
    heard = hear("workflow_failed", "job_cancelled")
    handle = failing_graph(steps)
    # When
    assert sorted(steps.run()) == ["a", "aside"]
    # Then
    found = states_of(handle)
    assert found == {"a": "completed", "bad": "failed", "end": "cancelled", "aside": "completed"}
    assert "flows.note, which has failed" in Job.objects.get(handler="flows.look").error
    assert (handle.status, of_counts(handle)) == ("failed", (2, 0, 1, 1))
    assert [each["signal"] for each in heard] == ["job_cancelled", "workflow_failed"]
    assert (heard[1]["name"], heard[1]["state"]) == ("failing", "failed")


def test_a_step_that_runs_all_the_same_sees_what_failed(steps: Steps, hear: Any) -> None:
    heard = hear("workflow_completed")
    handle = failing_graph(steps, on_failure="run")
    assert sorted(steps.run()) == ["a", "aside", "end"]
    assert steps.seen == []
    assert steps.failures == ["bad fails"]
    assert (handle.status, of_counts(handle)) == ("completed", (3, 0, 1, 0))
    assert [each["workflow_id"] for each in heard] == [handle.id]


def test_a_held_step_goes_on_once_the_dead_letter_is_replayed(steps: Steps) -> None:
    # Given
    handle = failing_graph(steps, on_failure="hold")
    assert sorted(steps.run()) == ["a", "aside"]
    assert (handle.status, states_of(handle)["end"]) == ("held", "waiting")
    # When
    steps.failing = set()
    dead_letters.replay(dead_letters.DeadLetterFilter())
    assert handle.status == "running"
    # Then
    assert steps.run() == ["bad", "end"]
    assert (handle.status, of_counts(handle)) == ("completed", (4, 0, 0, 0))


def test_discarding_a_held_dead_letter_gives_up_what_waits_for_it(steps: Steps) -> None:
    handle = failing_graph(steps, on_failure="hold")
    steps.run()
    dead_letters.discard(dead_letters.DeadLetterFilter(), note="never mind")
    assert states_of(handle)["end"] == "cancelled"
    assert handle.status == "failed"
    assert steps.run() == []


def test_the_first_failure_of_many_siblings_cancels_what_waits_for_all(steps: Steps) -> None:
    steps.failing = {"m3", "m5"}
    members = group(steps.note.step(name=f"m{n}") for n in range(7))
    handle = members.then(steps.note.step(name="end")).enqueue()
    assert len(steps.run()) == 5
    assert of_counts(handle) == (5, 0, 2, 1)
    assert handle.status == "failed"


def test_an_expired_step_has_failed(steps: Steps) -> None:
    soon = steps.note.using(expires_at=timezone.now() + timedelta(milliseconds=1))
    handle = chain(steps.note.step(name="a"), soon.step(name="late")).enqueue()
    assert steps.run() == ["a"]
    assert states_of(handle) == {"a": "completed", "late": "failed"}
    assert handle.status == "failed"


# --- What people do -------------------------------------------------------------------------------


def test_cancelling_a_waiting_step_by_hand_cancels_what_waits_for_it(steps: Steps) -> None:
    handle = chain(*(steps.note.step(name=name) for name in "abc")).enqueue()
    second = Job.objects.order_by("id")[1]
    assert jobs.cancel_one(second.pk) == "cancelled"
    assert states_of(handle) | {"a": ""} == {"a": "", "b": "cancelled", "c": "cancelled"}
    assert steps.run() == ["a"]
    assert (handle.status, of_counts(handle)) == ("failed", (1, 0, 0, 2))


def test_a_step_that_was_cancelled_while_it_waited_waits_again_when_requeued(steps: Steps) -> None:
    handle = chain(*(steps.note.step(name=name) for name in "ab")).enqueue()
    jobs.cancel(Job.objects.filter(state="waiting"))
    jobs.requeue(Job.objects.filter(state="cancelled"))
    assert states_of(handle)["b"] == "waiting"
    assert steps.run() == ["a", "b"]
    assert handle.status == "completed"


@pytest.mark.parametrize("change", [jobs.requeue])
def test_nothing_but_the_end_of_other_steps_releases_a_waiting_one(
    steps: Steps, change: Any
) -> None:
    chain(*(steps.note.step(name=name) for name in "ab")).enqueue()
    outcomes = change(Job.objects.filter(state="waiting"))
    assert outcomes.counts == {"waiting": 1}
    assert Job.objects.filter(state="waiting").count() == 1


def test_cancelling_all_jobs_of_a_workflow_at_once(steps: Steps) -> None:
    handle = chain(*(steps.note.step(name=name) for name in "abc")).enqueue()
    jobs.cancel(Job.objects.filter(stage__workflow=handle.workflow_id))
    assert set(states_of(handle).values()) == {"cancelled"}
    assert (handle.status, of_counts(handle)) == ("failed", (0, 0, 0, 3))


def test_a_cancelled_workflow_runs_nothing_more(steps: Steps, hear: Any) -> None:
    heard = hear("workflow_failed")
    handle = failing_graph(steps)
    outcomes = workflows.cancel([handle.id], actor="somebody")
    assert outcomes.counts == {"cancelled": 1}
    assert steps.run() == []
    assert set(states_of(handle).values()) == {"cancelled"}
    assert (handle.status, handle.snapshot().reason) == ("cancelled", "Cancelled by somebody")
    assert [each["state"] for each in heard] == ["cancelled"]
    assert workflows.cancel([handle.id]).counts == {"cancelled": 1}


def test_a_workflow_whose_cancelling_was_interrupted_is_cancelled_again(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its queued steps ran to their ends, and nothing but a cancel of each could keep them."""
    # Given a process that dies when it has ended a workflow, and before it cancels queued steps
    handle = failing_graph(steps)
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(jobs, "cancel", Mock(side_effect=SystemExit))
        workflows.cancel([handle.id])
    assert handle.status == "cancelled"
    # When
    outcomes = workflows.cancel([handle.id])
    # Then
    assert (outcomes.counts, outcomes.changed_count) == ({"cancelled": 1}, 0)
    assert set(states_of(handle).values()) == {"cancelled"}
    assert steps.run() == []


def test_a_failed_workflow_is_retried_from_its_failed_steps(steps: Steps) -> None:
    handle = failing_graph(steps)
    steps.run()
    steps.failing = set()
    assert workflows.retry([handle.id]).counts == {"retried": 1}
    assert states_of(handle)["end"] == "waiting"
    assert handle.status == "running"
    assert steps.run() == ["bad", "end"]
    assert (handle.status, of_counts(handle)) == ("completed", (4, 0, 0, 0))
    assert not DeadLetter.objects.filter(state="open").exists()
    assert workflows.retry([handle.id]).counts == {"unchanged": 1}


def test_a_cancelled_workflow_goes_on_when_it_is_retried(steps: Steps) -> None:
    handle = failing_graph(steps)
    steps.failing = set()
    workflows.cancel([handle.id])
    workflows.retry([handle.id])
    assert sorted(steps.run()) == ["a", "aside", "bad", "end"]
    assert (handle.status, of_counts(handle)) == ("completed", (4, 0, 0, 0))


def test_a_workflow_that_has_not_ended_by_its_deadline_fails(steps: Steps) -> None:
    with Workflow("slow", deadline=timedelta(minutes=1)) as w:
        w.add(steps.note, name="b", after=w.add(steps.note, name="a"))
    assert w.handle is not None
    assert workflows.set_deadline([w.handle.id], 3600).counts == {"changed": 1}
    assert workflows.end_overdue() == 0
    assert workflows.end_overdue(timezone.now() + timedelta(minutes=30)) == 0
    assert workflows.end_overdue(timezone.now() + timedelta(hours=2)) == 1
    assert (w.handle.status, set(states_of(w.handle).values())) == ("failed", {"cancelled"})
    assert "deadline" in w.handle.snapshot().reason
    assert steps.run() == []


@pytest.mark.promise("generation")
def test_a_completed_step_that_is_requeued_runs_once_more_by_itself(steps: Steps) -> None:
    handle = chain(*(steps.note.step(name=name) for name in "ab")).enqueue()
    steps.run()
    jobs.requeue([Job.objects.order_by("id").first()])
    assert handle.status == "running"
    assert steps.run() == ["a"]
    assert (handle.status, of_counts(handle)) == ("completed", (2, 0, 0, 0))


def test_a_step_whose_code_is_gone_stops_the_workflow_visibly(steps: Steps) -> None:
    from kjo_django import registry

    handle = chain(*(steps.note.step(name=name) for name in "ab")).enqueue()
    registry.unregister("flows.note")
    steps.run()
    assert handle.status == "failed"
    assert DeadLetter.objects.get().reason == "unknown_type"


def test_pruning_keeps_what_an_open_workflow_may_read(steps: Steps) -> None:
    now = Retention(*[timedelta(microseconds=1)] * 4)
    handle = failing_graph(steps, on_failure="hold")
    steps.run()
    Job.objects.update(result_expires_at=None)
    assert prune(now)["jobs"] == 0
    steps.failing = set()
    dead_letters.replay(dead_letters.DeadLetterFilter())
    steps.run()
    Job.objects.update(result_expires_at=None)
    counts = prune(now)
    assert (counts["jobs"], counts["workflows"]) == (4, 1)
    assert handle.status is None
    assert not WorkflowStage.objects.exists()
    assert not WorkflowEdge.objects.exists()
    assert not WorkflowCount.objects.exists()


# --- Refusals -------------------------------------------------------------------------------------


def refused(error: type[Exception], *words: str) -> Any:
    return pytest.raises(error, match=".*".join(words))


def test_what_cannot_run_is_refused_before_anything_is_stored(steps: Steps) -> None:
    note, double = steps.note, steps.double
    with refused(TypeError, "step 2", "flows.note", "name"):
        group([note.step(name="a"), note.step()]).enqueue()
    with refused(ValueError, "step 2", "flows.note"):
        chain(note.step(name="a"), note.step(name=object())).enqueue()
    with refused(TypeError, "step 2", "flows.double", "value", "only a step of a chain"):
        group([double.step(value=1)]).then(double.step()).enqueue()
    pair = job(name="flows.pair", queue="flows")(lambda left, right: left)
    with refused(TypeError, "step 2", "requires 'left' and 'right'", "step 1", "one result"):
        chain(double.step(value=1), pair.step()).enqueue()
    for after in ("flows.note", 3, [None]):
        with refused(TypeError, "step 1", "steps that add.. returned"):
            Workflow("typo").add(note, name="a", after=after)
    with refused(TypeError, "step 2", "flows.note", "unexpected"):
        chain(note.step(name="a"), note.step(name="b", more=1)).enqueue()
    with refused(ValueError, "on_failure", "Did you mean .hold"):
        chain(note.step(name="a")).enqueue(on_failure="holt")
    with refused(ValueError, "step 1", "id", "not for steps"):
        chain(note.using(id="u").step(name="a")).enqueue()
    with refused(ValueError, "step 1", "debounce", "not for steps"):
        chain(note.using(debounce=timedelta(seconds=1)).step(name="a")).enqueue()
    with refused(ValueError, "no steps"):
        Workflow("empty").enqueue()
    with refused(TypeError, "chain"):
        chain(note)
    w = Workflow("circle")
    a = w.add(note, name="a")
    b = w.add(note, name="b", after=a)
    a.after(b)
    with refused(ValueError, "circle", "step 1", "step 2"):
        w.enqueue()
    with refused(ValueError, "step 1", "another workflow"):
        Workflow("other").add(note, name="c", after=a)
    assert not Row.objects.exists()
    assert not Job.objects.exists()


def test_a_step_that_comes_after_the_enqueue_is_refused(steps: Steps) -> None:
    with Workflow("done") as w:
        first = w.add(steps.note, name="a")
        second = w.add(steps.note, name="b")
    with refused(ValueError, "has been enqueued", "context.workflow.add"):
        w.add(steps.note, name="late", after=first)
    with refused(ValueError, "has been enqueued"):
        second.after(first)
    assert sorted(steps.run()) == ["a", "b"]


def test_a_result_that_cannot_be_stored_fails_its_step_and_names_it(steps: Steps) -> None:
    @job(name="flows.odd", queue="flows", max_attempts=1)
    def odd() -> object:
        return object()

    handle = chain(odd.step(), steps.double.step()).enqueue()
    steps.run()
    assert handle.status == "failed"
    assert "flows.odd" in handle.snapshot().reason
    letter = DeadLetter.objects.get()
    assert letter.handler == "flows.odd"
    assert "result" in letter.error
    assert "not JSON serializable" in letter.error


def test_a_step_whose_arguments_have_changed_stops_the_workflow_visibly(steps: Steps) -> None:
    from kjo_django import registry

    handle = chain(steps.double.step(value=1), steps.double.step()).enqueue()
    registry.unregister("flows.double")
    job(name="flows.double", queue="flows", max_attempts=1)(lambda number: number)
    steps.run()
    assert handle.status == "failed"
    assert "flows.double does not take this payload" in DeadLetter.objects.get().error


def test_a_result_that_is_gone_fails_the_step_that_needs_it(steps: Steps) -> None:
    chain(steps.double.step(value=1), steps.double.step()).enqueue()
    first, second = Job.objects.order_by("id")
    from kjo_django.testing import run_job

    run_job(first)
    Job.objects.filter(pk=first.pk).delete()
    with pytest.raises(PermanentError, match="gone"):
        run_job(second)


def test_a_waiting_step_is_not_run_by_a_message_that_names_it(steps: Steps) -> None:
    from kjo_django.exceptions import JobFailedError as NotRun
    from kjo_django.testing import run_job

    chain(steps.note.step(name="a"), steps.note.step(name="b")).enqueue()
    with pytest.raises(NotRun, match="skipped"):
        run_job(Job.objects.get(state=JobState.WAITING))
    assert steps.calls == []
