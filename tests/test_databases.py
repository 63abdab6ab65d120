"""What a test leaves in a shared database does not reach the next test."""

from __future__ import annotations

import pytest
from django.contrib.auth.models import Permission
from django.db import connection

from tests.databases import EMPTY
from tests.items.models import Item, Run


@pytest.mark.parametrize(
    "database", [pytest.param(name, marks=getattr(pytest.mark, name)) for name in EMPTY]
)
def test_rows_of_every_application_are_gone_and_ids_begin_anew(request, database):
    # Given the rows of an application that is not ours
    request.getfixturevalue(database)
    first = Item.objects.create()
    Run.objects.create(item=first.pk)
    permissions = Permission.objects.count()
    # When
    with connection.cursor() as cursor:
        EMPTY[database](cursor)
    # Then
    assert (Item.objects.count(), Run.objects.count()) == (0, 0)
    assert Item.objects.create().pk == first.pk == 1
    # And what the migrations wrote is there
    assert Permission.objects.count() == permissions > 0
