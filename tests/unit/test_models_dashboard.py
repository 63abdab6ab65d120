"""The dashboard is a model without a table, and nobody looks for one."""

from __future__ import annotations

import json

import pytest
from django.core.management import call_command

from kjo_django.models import Dashboard
from tests.items.models import Item


@pytest.mark.django_db
@pytest.mark.parametrize("options", [(), ("--all",)], ids=["", "all"])
def test_a_project_is_dumped_without_a_table_of_the_dashboard(options, capsys):
    """`dumpdata` looked into it."""
    Item.objects.create()
    call_command("dumpdata", *options)
    models = {row["model"] for row in json.loads(capsys.readouterr().out)}
    assert "items.item" in models
    assert "kjo_django.dashboard" not in models
    assert list(Dashboard.objects.all()) == []
    assert Dashboard.objects.count() == 0
