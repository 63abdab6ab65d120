"""Keys and filters nobody could have been offered: told as such on every database."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

from kjo_django.models import Job
from tests.factories import JobFactory

pytestmark = pytest.mark.usefixtures("real_database")


@pytest.fixture
def client(real_database: str) -> Client:
    user, _ = User.objects.get_or_create(username="root", is_staff=True, is_superuser=True)
    client = Client(raise_request_exception=False)
    client.force_login(user)
    return client


@pytest.mark.parametrize(
    ("model", "parameter"),
    [
        *(("job", name) for name in ("state", "queue", "handler")),
        *(("deadletter", name) for name in ("state", "reason", "queue", "handler")),
    ],
)
def test_a_filter_with_a_nul_finds_nothing(client: Client, model: str, parameter: str) -> None:
    JobFactory()
    answer = client.get(reverse(f"admin:kjo_django_{model}_changelist"), {parameter: "\0"})
    assert answer.status_code == 200
    assert list(answer.context["cl"].result_list) == []


@pytest.mark.parametrize("model", ["job", "deadletter", "queuecontrol", "processedevent", "worker"])
@pytest.mark.parametrize("page", ["change", "history"])
def test_a_key_with_a_nul_is_no_rows(client: Client, model: str, page: str) -> None:
    answer = client.get(reverse(f"admin:kjo_django_{model}_{page}", args=["a\0b"]))
    assert answer.status_code == 302


@pytest.mark.parametrize("key", ["x", "\0", ""])
@pytest.mark.parametrize("model", ["job", "deadletter", "queuecontrol"])
def test_a_selection_of_what_is_no_key_is_refused(client: Client, model: str, key: str) -> None:
    job = JobFactory(queued=True)
    action = {"job": "cancel", "deadletter": "replay", "queuecontrol": "pause"}[model]
    answer = client.post(
        reverse(f"admin:kjo_django_{model}_changelist"),
        {"action": action, "_selected_action": [str(job.pk), key]},
    )
    # The name of a queue is any text.
    assert answer.status_code == (302 if (model, key) == ("queuecontrol", "x") else 400)
    assert Job.objects.get(pk=job.pk).state == "queued"
