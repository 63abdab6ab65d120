"""Clients of the REST API, and handlers for them to call."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from django.contrib.auth.models import Permission, User
from rest_framework.test import APIClient

from kjo_django import job, registry

Login = Callable[..., APIClient]


def user_with(*codenames: str) -> User:
    """A user with these permissions of ours and no others."""
    user = User.objects.create_user(f"user-{uuid.uuid4().hex[:12]}", password="secret")
    wanted = Permission.objects.filter(content_type__app_label="kjo_django", codename__in=codenames)
    assert wanted.count() == len(set(codenames)), codenames
    user.user_permissions.set(wanted)
    return user


@pytest.fixture(autouse=True)
def project(settings: Any) -> None:
    """The API is at ``/kjo/``, jobs are on the embedded default."""
    settings.ROOT_URLCONF = "tests.api.urls"
    settings.KJO = {"SERVICE_NAME": "tests", "QUEUES": {"default": {}, "mails": {}}}


@pytest.fixture
def login() -> Login:
    """Log in a user with these permissions, and return the client."""

    def log_in(*codenames: str) -> APIClient:
        client = APIClient()
        client.user = user_with(*codenames)
        client.force_login(client.user)
        return client

    return log_in


@pytest.fixture
def superuser(db: None) -> APIClient:
    """A client that may do everything."""
    client = APIClient()
    client.user = User.objects.create_superuser("root", password="secret")
    client.force_login(client.user)
    return client


@pytest.fixture
def greet() -> Iterator[Any]:
    """A job that takes a name and, perhaps, a customer, by whom it is ordered."""

    @job(name="tests.greet", key="customer")
    def greet(name: str, customer: str = "") -> str:
        return f"Hello {name}"

    yield greet
    registry.unregister("tests.greet")


def problem_of(answer: Any, status: int) -> dict[str, Any]:
    """The problem details of an answer, which must be some of this status."""
    assert answer.status_code == status, answer.content
    assert answer["Content-Type"] == "application/problem+json"
    assert answer["X-Content-Type-Options"] == "nosniff"
    told: dict[str, Any] = answer.json()
    assert told.keys() == {"type", "title", "status", "detail", "errors"}
    assert told["status"] == status
    assert told["type"].startswith("urn:kjo:problem:")
    return told


def errors_of(answer: Any, status: int = 400) -> dict[str, str]:
    """What is wrong, by field."""
    return {error["field"]: error["detail"] for error in problem_of(answer, status)["errors"]}
