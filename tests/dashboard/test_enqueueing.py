"""A job is enqueued by hand: by those with the permission, checked as over REST, in the history."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.utils import timezone

from kjo_django import job, registry
from kjo_django.models import Job
from kjo_django.testing import drain
from tests.dashboard.conftest import texts, url

pytestmark = pytest.mark.django_db
NAME = "tests.greet_by_hand"
FORM = {"handler": NAME, "payload": '{"name": "Ada"}'}


@pytest.fixture(autouse=True)
def greet() -> Iterator[None]:
    """A job that takes a name and, perhaps, a customer, by whom it is ordered."""

    @job(name=NAME, key="customer")
    def greet(name: str, customer: str = "") -> str:
        return f"Hello {name}"

    yield
    registry.unregister(NAME)


@pytest.fixture
def client(operator: Any) -> Any:
    return operator("view_dashboard", "enqueue_job", "view_job")


def test_a_job_is_enqueued_by_hand_and_runs(client: Any) -> None:
    # When
    answer = client.post(url("job_add"), FORM, follow=True)
    # Then
    row = Job.objects.get()
    assert texts(answer) == [f"Enqueued: {NAME}"]
    assert answer.request["PATH_INFO"] == url("job", row.pk)
    assert LogEntry.objects.get().change_message == "Enqueued."
    assert (row.handler, row.queue, row.arguments) == (NAME, "default", {"name": "Ada"})
    assert drain().results == ["Hello Ada"]


def test_the_options_of_an_enqueue_are_taken(client: Any) -> None:
    given = {"queue": "emails", "delay": "3600", "priority": "1", "unique_id": "a", "key": "c-1"}
    client.post(url("job_add"), {**FORM, **given})
    row = Job.objects.get()
    assert (row.queue, row.priority, row.unique_id, row.key) == ("emails", 1, "a", "c-1")
    assert row.available_at > timezone.now() + timedelta(minutes=59)


def test_an_id_that_is_taken_leads_to_the_job_that_has_it(client: Any) -> None:
    client.post(url("job_add"), {**FORM, "unique_id": "a"})
    answer = client.post(url("job_add"), {**FORM, "unique_id": "a"}, follow=True)
    row = Job.objects.get()
    assert texts(answer)[-1] == "Nothing was enqueued: this job has the unique id."
    assert answer.request["PATH_INFO"] == url("job", row.pk)
    assert LogEntry.objects.count() == 1


@pytest.mark.parametrize(
    ("change", "field", "told"),
    [
        ({"handler": "nosuch"}, "handler", "not one of the available choices"),
        ({"handler": "kjo_django.erase"}, "handler", "not one of the available choices"),
        ({"payload": "{"}, "payload", "valid JSON"),
        ({"payload": "[1]"}, "payload", "by name"),
        ({"payload": "{}"}, "payload", "missing a required argument: 'name'"),
        ({"payload": '{"name": "a", "<b>": 1}'}, "payload", "unexpected keyword argument '<b>'"),
        ({"payload": '{"name": "\\ud800"}'}, "payload", "surrogate"),
        ({"queue": "nosuch"}, "queue", "not one of the available choices"),
        ({"delay": "-1"}, "delay", "greater than or equal to 0"),
        ({"priority": "101"}, "priority", "less than or equal to 100"),
        ({"key": "k" * 256}, "key", "at most 255"),
    ],
)
def test_what_means_nothing_is_refused_beside_its_field(
    client: Any, change: dict[str, str], field: str, told: str
) -> None:
    answer = client.post(url("job_add"), {**FORM, **change})
    assert answer.status_code == 200
    assert told in " ".join(answer.context["form"].errors[field])
    assert "<b>" not in answer.content.decode()
    assert not Job.objects.exists()
    assert not LogEntry.objects.exists()


def test_arguments_that_do_not_fit_are_said_in_the_readers_language(
    client: Any, settings: Any
) -> None:
    settings.LANGUAGE_CODE = "de"
    answer = client.post(url("job_add"), {**FORM, "payload": "{}"})
    assert answer.context["form"].errors["payload"] == ["es fehlt das Argument 'name'"]


def test_internal_jobs_are_not_offered(client: Any) -> None:
    page = client.get(url("job_add")).content.decode()
    assert NAME in page
    assert "kjo_django." not in page


def test_a_page_of_a_handler_leads_to_the_form_with_its_name(client: Any, operator: Any) -> None:
    page = client.get(url("handler", NAME)).content.decode()
    address = f"{url('job_add')}?handler={NAME}"
    assert f'href="{address}"' in page
    assert client.get(address).context["form"]["handler"].value() == NAME
    assert url("job_add") in client.get(url("jobs")).content.decode()
    viewer = operator("view_dashboard", "view_job")
    assert url("job_add") not in viewer.get(url("handler", NAME)).content.decode()
    assert url("job_add") not in viewer.get(url("jobs")).content.decode()


def test_only_those_with_the_permission_enqueue(operator: Any) -> None:
    viewer = operator("view_dashboard", "view_job")
    assert viewer.get(url("job_add")).status_code == 403
    assert viewer.post(url("job_add"), FORM).status_code == 403
    assert not Job.objects.exists()


def test_who_may_not_see_jobs_stays_at_the_form(operator: Any) -> None:
    answer = operator("view_dashboard", "enqueue_job").post(url("job_add"), FORM, follow=True)
    assert answer.request["PATH_INFO"] == url("job_add")
    assert texts(answer) == [f"Enqueued: {NAME}"]
    assert json.loads(bytes(Job.objects.get().payload)) == {"name": "Ada"}
