"""PostgreSQL: a tenth of each page of ``kjo_job`` is for new versions of its rows.

Without it, inserts and updates look for room among all pages of a large table and find a little on
each: every job dirtied two pages nobody had touched for days, and wrote both of them whole into
the log of transactions. With it, a new version finds room beside the old one.
"""

from typing import Any

from django.db import migrations, router


def leave_room(apps: Any, schema_editor: Any) -> None:
    """Tell PostgreSQL; pages written before stay as they are."""
    _alter(apps, schema_editor, "SET (fillfactor = 90)")


def leave_none(apps: Any, schema_editor: Any) -> None:
    """Undo ``leave_room``."""
    _alter(apps, schema_editor, "RESET (fillfactor)")


def _alter(apps: Any, schema_editor: Any, change: str) -> None:
    connection, job = schema_editor.connection, apps.get_model("kjo_django", "Job")
    # A router may keep the table elsewhere and still let this run here.
    if connection.vendor == "postgresql" and router.allow_migrate_model(connection.alias, job):
        schema_editor.execute(f"ALTER TABLE {schema_editor.quote_name(job._meta.db_table)} {change}")


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0001_initial")]
    operations = [migrations.RunPython(leave_room, leave_none)]
