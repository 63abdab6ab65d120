"""What ends a test that commits: Django's command, but for content types and permissions."""

from __future__ import annotations

from typing import Any

from django.contrib.auth.models import Permission
from django.contrib.contenttypes.models import ContentType
from django.core.management.color import no_style
from django.core.management.commands import flush
from django.db import connections

KEPT = {ContentType._meta.db_table, Permission._meta.db_table}
"""Django's own deletes these too, and makes them anew from all models: a fifth of a short test."""


class Command(flush.Command):
    def handle(self, **options: Any) -> None:
        connection = connections[options["database"]]
        names = connection.introspection.django_table_names(only_existing=True, include_views=False)
        tables = [name for name in names if name not in KEPT]
        connection.ops.execute_sql_flush(
            connection.ops.sql_flush(
                no_style(), tables, reset_sequences=options["reset_sequences"], allow_cascade=False
            )
        )
