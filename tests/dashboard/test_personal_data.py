"""A person is looked for, what was found is shown, and a button erases it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.cache import cache

from kjo_django.models import Job
from kjo_django.personal_data.erasure import start_erasure
from kjo_django.personal_data.person import Person
from kjo_django.testing import drain
from tests.dashboard.conftest import texts, url
from tests.factories import JobFactory

pytestmark = pytest.mark.django_db

ADA = "ada@lovelace.example"
FORM = {"values": f"customer.email={ADA}\n\n", "mode": "delete", "reference": "R-17"}


@pytest.fixture
def client(operator: Any) -> Any:
    return operator("view_dashboard", "erase_personal_data")


def of_ada(**columns: Any) -> Job:
    payload = json.dumps({"customer": {"email": ADA}}).encode()
    found: Job = JobFactory(payload=payload, **columns)
    return found


def look(client: Any, **change: str) -> Any:
    return client.post(url("personal_data"), {**FORM, **change}, follow=True)


def test_a_person_is_counted_first_and_erased_by_a_button(client: Any) -> None:
    # Given
    done, still_open = of_ada(completed=True), of_ada(queued=True, queue="emails")
    # When
    answer = look(client)
    # Then
    assert texts(answer) == ["Looking for the person."]
    assert "A worker is reading all rows" in answer.content.decode()
    # When
    drain("default")
    page = client.get(answer.request["PATH_INFO"]).content.decode()
    # Then
    for text in ("<dt>jobs</dt><dd>1</dd>", "<dt>open_jobs</dt><dd>1</dd>", "R-17", "backups"):
        assert text in page
    assert Job.objects.filter(pk=done.pk).exists()
    # When
    (counted,) = Job.objects.exclude(pk__in=[done.pk, still_open.pk])
    answer = client.post(url("erasure_start", counted.pk), follow=True)
    drain("default")
    # Then
    assert texts(answer) == ["Erasing what was found."]
    page = client.get(answer.request["PATH_INFO"]).content.decode()
    assert "Data erased about a person" in page
    assert ">Erase<" not in page
    assert not Job.objects.filter(pk=done.pk).exists()
    assert Job.objects.filter(pk=still_open.pk).exists()
    # And: nobody reads who it was
    cache.clear()
    listed = client.get(url("personal_data")).content.decode()
    assert "the field customer.email" in listed
    logged = " ".join(LogEntry.objects.values_list("change_message", flat=True))
    assert "Looking for the person. Found by the field customer.email." in logged
    assert ADA not in listed + page + logged


def test_what_is_wrong_is_said_in_the_readers_language(client: Any, settings: Any) -> None:
    settings.LANGUAGE_CODE = "de"
    page = look(client, values=ADA).content.decode()
    assert "ist nicht PFAD=WERT, wie customer.email=ada@example.org" in page
    assert "is not PATH=VALUE" not in page


def test_a_request_of_another_secret_key_is_refused_in_the_readers_language(
    client: Any, settings: Any
) -> None:
    row = start_erasure(Person.of(keys=["ada"]), actor="a", dry_run=True)
    settings.SECRET_KEY, settings.LANGUAGE_CODE = "another one", "es"
    client.force_login(User.objects.get())  # the session was of the other key
    said = texts(client.post(url("erasure_start", row.pk), follow=True))
    assert said[0].startswith("La solicitud se hizo con otro SECRET_KEY")


def test_what_is_wrong_with_the_form_is_said(client: Any) -> None:
    for change, text in (
        ({"values": " \n"}, "give at least one key, id or value"),
        ({"values": ADA}, "not PATH=VALUE, such as customer.email=ada@example.org"),
        ({"mode": "shred"}, "not one of the available choices"),
    ):
        assert text in look(client, **change).content.decode()
    assert not Job.objects.exists()


def test_a_form_without_its_token_is_refused(operator: Any) -> None:
    client = operator("view_dashboard", "erase_personal_data", enforce_csrf_checks=True)
    row = start_erasure(Person.of(keys=["customer-7"]), actor="ops", dry_run=True)
    assert look(client).status_code == 403
    assert client.post(url("erasure_start", row.pk)).status_code == 403
    assert Job.objects.count() == 1


def test_another_job_is_no_request(client: Any) -> None:
    row = of_ada(completed=True)
    assert client.get(url("erasure", row.pk)).status_code == 404
    assert client.post(url("erasure_start", row.pk)).status_code == 404


def test_where_no_worker_would_do_it_that_is_said(client: Any, monkeypatch: Any) -> None:
    def nobody() -> str:
        raise ValueError("No worker would run it")

    monkeypatch.setattr("kjo_django.personal_data.erasure.operations_queue", nobody)
    assert texts(look(client)) == ["No worker would run it"]


def test_a_rotated_secret_key_is_said_before_anything_is_erased(client: Any, settings: Any) -> None:
    row = start_erasure(Person.of(keys=["customer-7"]), actor="ops", dry_run=True)
    user = client.session["_auth_user_id"]
    settings.SECRET_KEY = "rotated"
    client.force_login(User.objects.get(pk=user))
    answer = client.post(url("erasure_start", row.pk), follow=True)
    assert any("another SECRET_KEY" in text for text in texts(answer))
    assert Job.objects.count() == 1
