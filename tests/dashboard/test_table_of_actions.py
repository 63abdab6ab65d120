"""Every entry of the table of actions is on each surface it names, with its permission."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.contrib.admin.models import LogEntry
from django.core.exceptions import PermissionDenied
from django.urls import resolve, reverse
from django.utils import timezone

from kjo_django.admin.dashboard import screens
from kjo_django.admin.dashboard.page import button_actions, screen_of
from kjo_django.models import (
    DeadLetter,
    Job,
    LimitControl,
    QueueControl,
    Schedule,
    Worker,
    Workflow,
)
from kjo_django.operations.actions import ACTIONS, TABLE, VIEW_PERMISSIONS, Subject, Surface
from kjo_django.operations.internal import UserActor
from tests.dashboard.conftest import texts, url
from tests.factories import DeadLetterFactory, JobFactory, WorkerFactory

pytestmark = pytest.mark.django_db(transaction=True)

MODELS = {
    Subject.JOBS: Job,
    Subject.LETTERS: DeadLetter,
    Subject.QUEUES: QueueControl,
    Subject.WORKERS: Worker,
    Subject.SCHEDULES: Schedule,
    Subject.WORKFLOWS: Workflow,
    Subject.LIMITS: LimitControl,
}
EXPIRY = ACTIONS["change_expiry"]
HOUR = timedelta(hours=1)


def on(surface):
    found = [action for action in TABLE if surface in action.surfaces]
    return pytest.mark.parametrize("action", found, ids=lambda action: action.key)


def row_of(subject):
    if subject == Subject.QUEUES:
        return QueueControl.objects.create(queue="emails")
    if subject == Subject.LIMITS:
        return LimitControl.objects.create(name="queue:emails", rate="5/s")
    if subject == Subject.SCHEDULES:
        return Schedule.objects.create(name="nightly", job="ledger.write", every=60)
    factories = {
        Subject.JOBS: JobFactory,
        Subject.LETTERS: DeadLetterFactory,
        Subject.WORKERS: WorkerFactory,
    }
    return factories[subject]()


def test_keys_are_unique_and_permissions_exist(operator):
    assert len(ACTIONS) == len(TABLE)
    operator(*{name for action in TABLE for name in action.permissions})


@on(Surface.ADMIN)
def test_the_admin_offers_it_to_those_with_its_permission(operator, action):
    # Given
    row, view = row_of(action.subject), VIEW_PERMISSIONS[action.subject]
    model = f"kjo_django_{MODELS[action.subject]._meta.model_name}"
    changes = f"admin:{model}_changelist"
    button = reverse(f"admin:{model}_{action.name}", args=[row.pk])
    # When, then
    for codenames, is_offered in (([view], False), (action.permissions, True)):
        client = operator(*codenames)
        page = client.get(reverse(changes)).content.decode()
        assert (f'<option value="{action.name}">' in page) == is_offered
        answer = client.post(button)
        assert answer.status_code == (302 if is_offered else 403)


@on(Surface.DASHBOARD)
def test_the_dashboard_has_an_address_for_it_with_its_permission(action):
    if action not in button_actions(action.subject):
        return  # limits, payloads and schedules are edited on pages of their own
    (screen,) = [each for each in screens() if each.name == screen_of(action)]
    assert screen.permission == action.permission


@on(Surface.REST)
def test_the_rest_api_has_an_endpoint_for_it_with_its_permissions(action):
    pytest.importorskip("rest_framework")
    places = {
        Subject.JOBS: "jobs/x/",
        Subject.LETTERS: "dead-letters/x/",
        Subject.QUEUES: "queues/x/",
        Subject.WORKERS: "workers/x/",
        Subject.SCHEDULES: "schedules/x/",
        Subject.WORKFLOWS: "workflows/x/",
        Subject.LIMITS: "limits/x/",
    }
    last = "" if action.rest.path == "" else f"{action.name.replace('_', '-')}/"
    view = resolve(f"/kjo/{places[action.subject]}{last}", "tests.api.urls").func.view_class
    assert view.permissions[action.rest.method] == action.permissions


def test_a_user_without_the_permission_is_refused_whatever_surface_forgot_to_ask(
    django_user_model,
):
    job = JobFactory(failed=True)
    user = UserActor(django_user_model.objects.create_user("nobody"))
    with pytest.raises(PermissionDenied):
        ACTIONS["requeue"].perform([job.pk], actor=user)
    job.refresh_from_db()
    assert job.state == "failed"


@pytest.mark.parametrize("inputs", [{}, {"expires_in": 1, "queue": "emails"}])
def test_inputs_that_are_missing_or_unknown_are_refused(inputs):
    with pytest.raises(ValueError, match=r"change_expiry (needs|takes no)"):
        EXPIRY.perform([JobFactory().pk], actor="ann", **inputs)


# --- One action on every surface ------------------------------------------------------------------


def expires_in_an_hour(*jobs):
    found = Job.objects.filter(pk__in=[job.pk for job in jobs]).values_list("expires_at", flat=True)
    return all(at and abs(at - timezone.now() - HOUR) < timedelta(minutes=5) for at in found)


def test_the_expiry_of_a_job_is_changed_on_its_page(operator):
    # Given
    job = JobFactory()
    client = operator("view_dashboard", "view_job", "retry_job")
    address = url("job_change_expiry", job.pk)
    assert address in client.get(url("job", job.pk)).content.decode()
    assert 'name="expires_in"' in client.get(address).content.decode()
    # When
    said = texts(client.post(address, {"confirmed": 1, "expires_in": 3600}, follow=True))
    # Then
    assert said == ["The expiry of 1 job was changed."]
    assert expires_in_an_hour(job)
    assert LogEntry.objects.get().change_message == "Expiry changed: expires_in: 3600.0."
    # And an absurd one is refused beside its field
    answer = client.post(address, {"confirmed": 1, "expires_in": "-5"})
    assert "expires_in" in answer.context["form"].errors


def test_the_expiry_of_jobs_ticked_and_of_all_found_is_changed(operator):
    # Given
    ticked, found, other = (JobFactory(handler=name) for name in ("a", "b", "c"))
    client = operator("view_dashboard", "view_job", "retry_job")
    # When ticked, a form asks for the time first
    asked = client.post(url("jobs_chosen", "change_expiry"), {"job": ticked.pk})
    assert 'name="expires_in"' in asked.content.decode()
    assert not expires_in_an_hour(ticked)
    given = {"confirmed": 1, "expires_in": 3600}
    client.post(url("jobs_chosen", "change_expiry"), {"job": ticked.pk, **given})
    client.post(url("jobs_all", "change_expiry"), {"q": "handler:b", **given})
    # Then
    assert expires_in_an_hour(ticked, found)
    other.refresh_from_db()
    assert other.expires_at is None


def test_the_expiry_of_jobs_is_changed_in_the_admin(operator):
    job, other = JobFactory(), JobFactory()
    client = operator("view_job", "retry_job")
    client.post(
        reverse("admin:kjo_django_job_changelist"),
        {"action": "change_expiry", "_selected_action": [job.pk], "expires_in": "3600"},
    )
    client.post(
        reverse("admin:kjo_django_job_change_expiry", args=[other.pk]), {"expires_in": "3600"}
    )
    assert expires_in_an_hour(job, other)
