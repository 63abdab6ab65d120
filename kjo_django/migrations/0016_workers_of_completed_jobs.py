from typing import Any

from django.db import migrations, models
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


class AddColumn(migrations.AddField):
    """On SQLite, too, the column is added at once: Django would write the table of jobs anew."""

    def database_forwards(
        self, app_label: str, schema_editor: Any, from_state: Any, to_state: Any
    ) -> None:
        if schema_editor.connection.vendor != "sqlite":
            super().database_forwards(app_label, schema_editor, from_state, to_state)
            return
        model = to_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            field = model._meta.get_field(self.name)
            BaseDatabaseSchemaEditor.add_field(schema_editor, model, field)


class Migration(migrations.Migration):
    dependencies = [("kjo_django", "0015_dashboard_without_rows")]

    operations = [
        AddColumn(
            model_name="job",
            name="worker",
            field=models.CharField(
                blank=True,
                db_default="",
                default="",
                help_text="The worker that completed it, kept where the job asks for it, as Django Tasks do.",
                max_length=255,
                verbose_name="worker",
            ),
        ),
    ]
