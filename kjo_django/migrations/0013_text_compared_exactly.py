"""MariaDB and MySQL: keys, unique ids and names are equal when their characters are.

A project's database mostly compares text without regard to case and to blanks at the end: two jobs
with the unique ids ``a`` and ``A`` would be one.
"""

from typing import Any

from django.db import migrations, router


def compare_exactly(apps: Any, schema_editor: Any) -> None:
    """Convert all tables; columns that are added later are like their table."""
    connection = schema_editor.connection
    if connection.vendor != "mysql":
        return
    collation = "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"
    schema_editor.execute("SET foreign_key_checks = 0")
    try:
        for model in apps.get_app_config("kjo_django").get_models():
            if model._meta.managed and router.allow_migrate_model(connection.alias, model):
                table = schema_editor.quote_name(model._meta.db_table)
                how = f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
                schema_editor.execute(f"ALTER TABLE {table} {how}")
    finally:
        schema_editor.execute("SET foreign_key_checks = 1")


class Migration(migrations.Migration):
    atomic = False  # these databases commit each change of a table
    dependencies = [("kjo_django", "0012_permission_to_erase_personal_data")]
    operations = [migrations.RunPython(compare_exactly, migrations.RunPython.noop)]
