"""The state machine, drawn as a table, and the vocabularies it is mapped to."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db.models import Q
from django.utils import timezone

from kjo_django import states
from kjo_django.models import Job, transition
from kjo_django.states import JobState, JobStatus
from tests.factories import JobFactory

#            waiting pending queued failing completed failed cancelled
TABLE = {
    "publish":   ".       x      .      x       .         .      .",
    "complete":  ".       x      x      x       .         .      .",
    "retry":     ".       x      x      x       .         .      .",
    "fail":      ".       x      x      x       .         .      .",
    "cancel":    "x       x      x      x       .         .      .",
    "requeue":   ".       x      x      x       x         x      x",
    "republish": ".       .      x      .       .         .      .",
    "hold":      ".       .      x      .       .         .      .",
    "release":   "x       .      .      .       .         .      .",
    "await":     ".       .      .      .       .         .      x",
}  # fmt: skip
ENDS_IN = {
    "publish": "queued",
    "complete": "completed",
    "retry": "failing",
    "fail": "failed",
    "cancel": "cancelled",
    "requeue": "pending",
    "republish": "pending",
    "hold": "pending",
    "release": "pending",
    "await": "waiting",
}
CELLS = [
    (action, state, mark == "x")
    for action, row in TABLE.items()
    for state, mark in zip(JobState.values, row.split(), strict=True)
]
NAMES = [f"{action}-{state}" for action, state, _ in CELLS]


def test_the_table_knows_every_action():
    assert set(TABLE) == set(states.TRANSITIONS) == set(states.RESULT_OF)


@pytest.mark.parametrize(("action", "state", "is_legal"), CELLS, ids=NAMES)
def test_an_action_is_legal_where_the_table_says_so(action, state, is_legal):
    assert (state in states.TRANSITIONS[action]) is is_legal


@pytest.mark.django_db
@pytest.mark.parametrize(("action", "state", "is_legal"), CELLS, ids=NAMES)
def test_a_transition_changes_the_row_where_the_table_allows_it_and_nothing_elsewhere(
    action, state, is_legal
):
    # Given
    job = JobFactory(state=state)
    # When
    changed = transition(action, Job.objects.at(job.pk, 1), error="changed")
    # Then
    job.refresh_from_db()
    assert changed == is_legal
    assert job.state == (ENDS_IN[action] if is_legal else state)
    assert job.error == ("changed" if is_legal else "")
    assert job.generation == (2 if is_legal and action == "requeue" else 1)


@pytest.mark.django_db
@pytest.mark.parametrize("action", sorted(TABLE))
def test_an_actor_of_an_earlier_generation_loses(action):
    # Given: a state the action may start from, of a job that was requeued meanwhile
    job = JobFactory(state=states.TRANSITIONS[action][0], generation=2)
    # When, then
    assert transition(action, Job.objects.at(job.pk, 1)) == 0


def test_open_and_final_states_are_all_states_and_share_none():
    assert {*states.UNFINISHED, *states.FINAL} == set(JobState)
    assert not {*states.UNFINISHED} & {*states.FINAL}
    assert {*states.UNFINISHED} - {*states.OPEN} == {JobState.WAITING}


@pytest.mark.parametrize("state", states.FINAL)
def test_only_a_requeue_leaves_a_final_state_and_what_lets_a_cancelled_step_wait_again(state):
    leaving = [action for action in TABLE if state in states.TRANSITIONS[action]]
    assert leaving == ["requeue", *(["await"] if state == "cancelled" else [])]


# --- What is shown --------------------------------------------------------------------------------

SOON, PAST = timedelta(minutes=1), -timedelta(minutes=1)


def shown(state: str, *, leased: bool = False, due: timedelta = PAST, **columns) -> str:
    job = JobFactory.build(state=state, available_at=timezone.now() + due, **columns)
    return job.status_with(leased=leased)


def test_a_pending_job_due_later_is_scheduled():
    assert shown("pending", due=SOON) == "scheduled"
    assert shown("pending") == "pending"


def test_a_queued_job_due_later_is_scheduled_unless_it_waits_for_a_retry():
    assert shown("queued", due=SOON) == "scheduled"
    assert shown("queued", due=SOON, attempts=1) == "queued"


@pytest.mark.parametrize("state", states.OPEN)
def test_an_open_job_under_a_live_lease_is_processing(state):
    """X-4: processing is derived from the lease, never stored."""
    assert shown(state, leased=True) == "processing"
    assert shown(state, lease_expires_at=timezone.now() + SOON) == "processing"
    assert shown(state, lease_expires_at=timezone.now() + PAST) == state


@pytest.mark.parametrize("state", states.FINAL)
def test_a_finished_job_is_never_processing(state):
    assert shown(state, leased=True, lease_expires_at=timezone.now() + SOON) == state


# --- X-2 ------------------------------------------------------------------------------------------

VOCABULARIES = [
    # status       seed 1 and 4  seed 2        Django Tasks
    ("waiting",    "PENDING",    "queued",     "READY"),
    ("pending",    "PENDING",    "queued",     "READY"),
    ("scheduled",  "PENDING",    "queued",     "READY"),
    ("queued",     "PENDING",    "queued",     "READY"),
    ("processing", "PROCESSING", "processing", "RUNNING"),
    ("failing",    "PENDING",    "failing",    "READY"),
    ("completed",  "COMPLETED",  "completed",  "SUCCESSFUL"),
    ("failed",     "FAILED",     "failed",     "FAILED"),
    ("cancelled",  "FAILED",     "cancelled",  "FAILED"),
]  # fmt: skip


@pytest.mark.parametrize("name", ["processing", "scheduled"])
@pytest.mark.parametrize("method", ["filter", "exclude"])
def test_a_state_that_no_row_has_is_refused_with_what_to_ask_for(method, name):
    """FINDINGS 2.11: it found nothing without a word."""
    with pytest.raises(ValueError, match=f"state '{name}': it is shown of"):
        getattr(Job.objects, method)(state=name)
    with pytest.raises(ValueError, match="it is shown of"):
        getattr(Job.objects, method)(state__in=["queued", name])
    with pytest.raises(ValueError, match="it is shown of"):
        getattr(Job.objects, method)(Q(queue="q") | ~Q(state=name))


def test_every_status_is_in_the_table_of_vocabularies():
    assert [row[0] for row in VOCABULARIES] == JobStatus.values


@pytest.mark.parametrize(("status", "kjo", "queue", "django"), VOCABULARIES)
def test_a_status_has_one_name_in_each_vocabulary(status, kjo, queue, django):
    assert states.to_kjo(status) == kjo
    assert states.to_queue(status) == queue
    assert states.to_django_tasks(status) == django


@pytest.mark.parametrize("mapping", [states.to_kjo, states.to_queue, states.to_django_tasks])
def test_an_unknown_status_is_refused(mapping):
    with pytest.raises(ValueError, match="sleeping"):
        mapping("sleeping")


def test_seed_1s_numbers_are_kept():
    """KJO-68."""
    assert states.KJO_NUMBERS == {"pending": 1, "completed": 2, "failed": 3}
