"""Operators with and without permissions, and rows to look at."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission, User
from django.core.cache import cache
from django.test import Client
from django.urls import reverse

from kjo_django.admin.dashboard.page import address_name
from tests.unit.deliveries import on_memory


@pytest.fixture(autouse=True)
def transport(settings):
    """The memory transport, and nothing kept by the cache of another test."""
    cache.clear()
    with on_memory(settings, QUEUES={"default": {}, "emails": {}}) as transport:
        yield transport
    cache.clear()


@pytest.fixture
def operator(db):
    """Log in somebody with these permissions."""

    def login(*codenames: str, enforce_csrf_checks: bool = False) -> Client:
        name = f"op-{User.objects.count()}"
        user = User.objects.create_user(name, is_staff=True)
        wanted = Permission.objects.filter(
            content_type__app_label="kjo_django", codename__in=codenames
        )
        assert wanted.count() == len(set(codenames)), codenames
        user.user_permissions.set(wanted)
        client = Client(enforce_csrf_checks=enforce_csrf_checks)
        client.force_login(user)
        return client

    return login


@pytest.fixture
def everybody(db):
    """Log in somebody who may do everything."""
    user = User.objects.create_superuser("root")
    client = Client()
    client.force_login(user)
    return client


def url(name: str, *arguments: object) -> str:
    """Return the address of a screen."""
    return reverse(f"admin:{address_name(name)}", args=arguments)


def texts(response) -> list[str]:
    """Return the messages shown on the page."""
    return [str(message) for message in response.context["messages"]]
