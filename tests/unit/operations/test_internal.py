"""Internal jobs: whose permissions count when they run, and who may have one run again."""

from __future__ import annotations

import json
import uuid

import pytest
from django.contrib.auth.models import Permission, User
from django.test import Client
from django.urls import reverse

from kjo_django.models import DeadLetter, Job, source_of_job
from kjo_django.operations import bulk, dead_letters, jobs, rescheduling
from kjo_django.operations.actions import TABLE, Subject
from kjo_django.operations.bulk import start_bulk
from kjo_django.operations.dead_letters import DeadLetterFilter
from kjo_django.operations.internal import UserActor
from kjo_django.operations.search import parse
from tests.factories import DeadLetterFactory, JobFactory
from tests.unit.deliveries import KJO, Bench

pytestmark = pytest.mark.usefixtures("real_database")


@pytest.fixture(autouse=True)
def _configured(settings, real_database, forgotten_definitions):
    settings.KJO = {**KJO, "OPERATIONS_QUEUE": "ledger"}


def user_with(*codenames: str, **facts) -> User:
    user = User.objects.create_user(f"u-{uuid.uuid4().hex[:8]}", is_staff=True, **facts)
    wanted = Permission.objects.filter(content_type__app_label="kjo_django", codename__in=codenames)
    user.user_permissions.set(wanted)
    return user


def client_of(user: User) -> Client:
    client = Client()
    client.force_login(user)
    return client


def asked_by(user: User | None) -> Job:
    """A job that discards every open letter."""
    actor = UserActor(user) if user is not None else "cron"
    return start_bulk("discard_letters", DeadLetterFilter(), actor=actor, note="old")


def run(job: Job) -> Job:
    bench = Bench()
    job.refresh_from_db()
    bench.run([one for one in bench.poll() if one.message and one.message.id == job.message_id])
    job.refresh_from_db()
    return job


def open_letters() -> int:
    return DeadLetter.objects.filter(handler="tests.add", state="open").count()


def cancelled(user: User) -> Job:
    """What a user asked for and cancelled."""
    job = asked_by(user)
    jobs.cancel([job.pk])
    return job


def dead(user: User, generation: int = 1) -> DeadLetter:
    """The open dead letter of what a user asked for."""
    job = asked_by(user)
    Job.objects.filter(pk=job.pk).update(state="failed", generation=generation)
    return DeadLetterFactory(
        job=job,
        source_id=source_of_job(job.pk, 1),
        message_id=job.message_id,
        handler=job.handler,
        queue="ledger",
        value=job.payload,
    )


# --- When it runs ---------------------------------------------------------------------------------


def test_what_a_user_may_do_is_done_in_their_name():
    # Given
    letter, user = DeadLetterFactory(), user_with("discard_dlq")
    # When
    job = run(asked_by(user))
    # Then
    letter.refresh_from_db()
    assert (job.state, letter.state) == ("completed", "discarded")
    assert letter.note == f"old ({user.username})"


def test_what_a_program_asks_for_needs_no_user():
    DeadLetterFactory()
    assert run(asked_by(None)).state == "completed"
    assert open_letters() == 0


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda user: user.delete(), "is no longer a user"),
        (
            lambda user: User.objects.filter(pk=user.pk).update(is_active=False),
            "is no longer active",
        ),
        (lambda user: user.user_permissions.clear(), "lacks the permission kjo_django.discard_dlq"),
    ],
    ids=["deleted", "deactivated", "withdrawn"],
)
def test_who_may_not_do_it_any_more_when_it_runs_does_not_do_it(change, told):
    # Given
    DeadLetterFactory()
    user = user_with("discard_dlq")
    name, job = user.username, asked_by(user)
    # When
    change(user)
    job = run(job)
    # Then it has failed for good, and says so
    assert (job.state, job.attempts) == ("failed", 1)
    assert name in job.error
    assert told in job.error
    assert open_letters() == 1


INPUTS = {"note": "x", "queue": "ledger", "expires_in": 60}
OF_JOBS = [each for each in TABLE if each.is_bulk and each.subject == Subject.JOBS]


@pytest.mark.parametrize("action", OF_JOBS, ids=lambda action: action.key)
def test_each_change_of_jobs_needs_its_permission(action):
    inputs = {each.name: INPUTS[each.name] for each in action.inputs if each.is_required}
    actor = UserActor(user_with())
    job = start_bulk(action.key, parse("state:failed"), actor=actor, **inputs)
    job = run(job)
    assert job.state == "failed"
    assert "lacks the permission" in job.error


@pytest.mark.parametrize(("permissions", "found"), [((), 0), (("view_payload",), 1)])
def test_a_job_searches_what_its_user_may_see(permissions, found):
    """How many it changed would tell what is in there."""
    # Given
    JobFactory(queued=True, queue="other", key="ada@example.org")
    user = UserActor(user_with("cancel_job", *permissions))
    # When
    job = run(start_bulk("cancel", parse("ada@example.org"), actor=user))
    # Then
    assert json.loads(bytes(job.result))["v"]["changed"] == found


def test_a_job_does_not_search_what_its_user_may_not_see_any_more():
    JobFactory(queued=True, queue="other", key="ada@example.org")
    user = UserActor(user_with("cancel_job"))
    job = run(start_bulk("cancel", parse("key:ada@example.org"), actor=user))
    assert job.state == "failed"
    assert "takes the permission to see payloads" in job.error


# --- Again ----------------------------------------------------------------------------------------

AGAIN = {
    "requeue": lambda job, actor: jobs.requeue([job.pk], actor=actor),
    "bulk": lambda job, actor: bulk.change_or_start(
        "requeue", parse("state:cancelled"), actor=actor
    ),
}


@pytest.mark.parametrize("how", AGAIN)
def test_what_a_superuser_cancelled_is_not_requeued_by_who_may_not_do_it(how):
    # Given
    DeadLetterFactory()
    job = cancelled(user_with(is_superuser=True))
    # When
    outcomes = AGAIN[how](job, UserActor(user_with("retry_job")))
    # Then
    assert outcomes.counts == {"forbidden": 1}
    assert run(job).state == "cancelled"
    assert open_letters() == 1


def test_what_runs_again_runs_in_the_name_of_who_asked_for_that():
    # Given
    letter, other = DeadLetterFactory(), user_with("retry_job", "discard_dlq")
    job = cancelled(user_with(is_superuser=True))
    # When
    outcomes = jobs.requeue([job.pk], actor=UserActor(other))
    # Then
    assert outcomes.counts == {"requeued": 1}
    assert run(job).state == "completed"
    letter.refresh_from_db()
    assert letter.note == f"old ({other.username})"


def test_a_requeue_in_the_background_asks_for_both_permissions(monkeypatch):
    # Given
    monkeypatch.setattr(bulk, "SYNCHRONOUS_LIMIT", 0)
    DeadLetterFactory()
    job = cancelled(user_with(is_superuser=True))
    started = bulk.change_or_start(
        "requeue", parse("state:cancelled"), actor=UserActor(user_with("retry_job"))
    )
    # When
    assert run(started).state == "completed"
    # Then
    assert run(job).state == "cancelled"


def test_one_that_waits_for_its_next_attempt_is_not_hurried_by_who_may_not_do_it():
    # Given
    job = asked_by(user_with(is_superuser=True))
    Job.objects.filter(pk=job.pk).update(state="failing", available_at="2999-01-01T00:00Z")
    # When, then
    hasty = rescheduling.run_now([job.pk], actor=UserActor(user_with("retry_job")))
    assert hasty.counts == {"forbidden": 1}
    entitled = rescheduling.run_now(
        [job.pk], actor=UserActor(user_with("retry_job", "discard_dlq"))
    )
    assert entitled.counts == {"due": 1}


@pytest.mark.parametrize("generation", [1, 2])
def test_its_dead_letter_is_replayed_by_who_may_do_what_it_does(generation):
    """Also one of an earlier generation, which is replayed as a job of its own."""
    # Given
    DeadLetterFactory()
    letter = dead(user_with(is_superuser=True), generation)
    # When, then
    selection = DeadLetterFilter(ids=[letter.pk])
    report = dead_letters.replay(selection, actor=UserActor(user_with("replay_dlq")))
    assert (report.replayed, dict(report.refused)) == (0, {"an internal job": 1})
    entitled = user_with("replay_dlq", "discard_dlq")
    assert dead_letters.replay(selection, actor=UserActor(entitled)).replayed == 1
    again = Job.objects.get(state__in=("pending", "queued"))
    assert (again.arguments["actor"], again.arguments["user"]) == (
        entitled.username,
        str(entitled.pk),
    )


@pytest.mark.parametrize("has_job", [True, False])
def test_its_payload_is_edited_by_nobody(has_job):
    letter = dead(user_with(is_superuser=True))
    before = bytes(Job.objects.get(pk=letter.job_id).payload)
    if not has_job:
        DeadLetter.objects.filter(pk=letter.pk).update(job=None)
    with pytest.raises(ValueError, match="An internal job cannot be edited"):
        dead_letters.edit_and_replay(letter.pk, b'{"actor": "the-ceo"}', actor="root")
    letter.refresh_from_db()
    assert letter.state == "open"
    assert bytes(Job.objects.get(handler=bulk.DISCARD).payload) == before


def test_nor_by_way_of_a_letter_that_names_another_handler():
    """A message that bears the job's name and no handler's leaves such a letter."""
    letter = dead(user_with(is_superuser=True))
    DeadLetter.objects.filter(pk=letter.pk).update(handler="nobody's")
    with pytest.raises(ValueError, match="An internal job cannot be edited"):
        dead_letters.edit_and_replay(letter.pk, b'{"actor": "the-ceo"}', actor="root")


# --- On every surface -----------------------------------------------------------------------------


def test_the_admin_asks_for_the_permission():
    job = cancelled(user_with(is_superuser=True))
    client = client_of(user_with("view_job", "retry_job"))
    answer = client.post(reverse("admin:kjo_django_job_requeue", args=[job.pk]), follow=True)
    assert "1 internal, which need the permission of what they do." in answer.content.decode()
    job.refresh_from_db()
    assert job.state == "cancelled"


@pytest.mark.parametrize("action", ["requeue", "run_now"])
def test_the_dashboard_asks_for_the_permission(action):
    job = cancelled(user_with(is_superuser=True))
    if action == "run_now":
        Job.objects.filter(pk=job.pk).update(state="failing", available_at="2999-01-01T00:00Z")
    client = client_of(user_with("view_dashboard", "view_job", "retry_job"))
    place = reverse(f"admin:kjo_django_dashboard_job_{action}", args=[job.pk])
    answer = client.post(place, follow=True)
    assert "1 internal, which need the permission of what they do." in answer.content.decode()


def test_the_dashboard_tells_that_it_cannot_be_edited():
    letter = dead(user_with(is_superuser=True))
    client = client_of(
        user_with("view_dashboard", "view_deadletter", "view_payload", "replay_dlq", "edit_payload")
    )
    place = reverse("admin:kjo_django_dashboard_letter_edit", args=[letter.pk])
    assert "An internal job cannot be edited" in client.get(place).content.decode()
    answer = client.post(place, {"value": '{"actor": "the-ceo"}'})
    assert "An internal job cannot be edited" in answer.content.decode()
