"""Operations of migrations that Django does not have."""

from typing import Any

from django.db import migrations, router
from django.db.backends.base.schema import BaseDatabaseSchemaEditor


class AddColumn(migrations.AddField):
    """On SQLite, too, the column is added at once: Django would write its table anew."""

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


class CompareExactly(migrations.RunPython):
    """On MariaDB and MySQL the texts of a new table are compared by their characters, as those of
    the other tables are. These databases commit each change of a table.

    :param model: its name.
    """

    def __init__(self, model: str) -> None:
        self._model = model
        super().__init__(self._convert, migrations.RunPython.noop, atomic=False)

    def _convert(self, apps: Any, schema_editor: Any) -> None:
        connection = schema_editor.connection
        model = apps.get_model("kjo_django", self._model)
        if connection.vendor != "mysql" or not router.allow_migrate_model(connection.alias, model):
            return
        collation = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
        table = schema_editor.quote_name(model._meta.db_table)
        how = f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
        schema_editor.execute(f"ALTER TABLE {table} {how}")
