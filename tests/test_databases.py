"""What a test leaves in a shared database does not reach the next test; what there is to dump."""

from __future__ import annotations

import json

import pytest
from django.contrib.auth.models import Permission
from django.core.management import call_command
from django.db import connection

from kjo_django.models import Dashboard
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


@pytest.mark.django_db
@pytest.mark.parametrize("options", [(), ("--all",)], ids=["", "all"])
def test_a_project_is_dumped_without_a_table_of_the_dashboard(options, capsys):
    """The dashboard is a model without a table, and `dumpdata` looked into it."""
    Item.objects.create()
    call_command("dumpdata", *options)
    models = {row["model"] for row in json.loads(capsys.readouterr().out)}
    assert "items.item" in models
    assert "kjo_django.dashboard" not in models
    assert list(Dashboard.objects.all()) == []
    assert Dashboard.objects.count() == 0
